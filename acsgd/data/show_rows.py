"""Rows as a run makes them and the model sees them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from acsgd.config.checks import check
from acsgd.config.options import Config, DataConfig, ModelConfig, OptimConfig
from acsgd.data.opened import refuse_streams
from acsgd.data.show import decoded
from acsgd.io.formats.formats import read_options
from acsgd.io.formats.labels import LABELLED
from acsgd.io.rows.base import INPUT_IDS, LABELS, LENGTHS, Row
from acsgd.io.rows.labelled import MASK
from acsgd.io.sources.sources import parse_sources
from acsgd.layers.masks import DOCUMENTS
from acsgd.run.rows import RowMaker
from acsgd.shards.config import read_config
from acsgd.shards.hub import find_model
from acsgd.shards.tokenizer import load_tokenizer
from acsgd.tasks import IGNORED

Task = Literal["lm", "classification", "regression", "seq2seq"]


def show_rows(data: DataConfig, model: str, task: Task, number: int) -> None:
    """Print the first rows of each source, after the notes of a run. Raises ValueError."""
    config = Config(ModelConfig(model, task=task), data, OptimConfig(lr=1e-3, steps=1, warmup=0))
    check(config)
    options = read_options(data, has_labels=task in LABELLED)
    sources = parse_sources(data.sources, key="source", options=options)
    refuse_streams([source for source, _ in sources], "--sequence")
    directory = find_model(model, option="--model", weights=False)
    model_config = read_config(directory, task)
    tokenizer = load_tokenizer(directory, model_config)
    console = Console(soft_wrap=True, highlight=False)
    if config.rows != "concat" and task == "lm":
        config = replace(config, data=replace(data, isolate=True))  # then rows have the borders of their documents
    with tempfile.TemporaryDirectory(prefix="acsgd-") as cache:
        for rows in RowMaker(config, model_config, tokenizer, Path(cache)).open(sources):
            masked = "dimmed" if console.is_terminal else "in ⟦⟧"
            console.print(Text("\n".join([*rows.notes, f"masked tokens are {masked}"]), style="bold"))
            for index in range(min(number, len(rows))):
                row, name = rows.read(index), f"row {index + 1} of {len(rows):,}"
                for line in _lines(row, name, task, model_config, tokenizer, marks=not console.is_terminal):
                    console.print(line)


def _lines(
    row: Row, name: str, task: Task, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, *, marks: bool
) -> Iterator[Text]:
    """Yield the lines about a row."""
    if task == "lm":
        yield from _documents(row, name, tokenizer, marks=marks)
        return
    inputs, labels = row[INPUT_IDS][row[MASK] == 1], row[LABELS]
    padding = len(row[MASK]) - len(inputs)
    if task == "seq2seq":
        target = labels[labels != IGNORED]
        sizes = f"{len(inputs)} and {len(target)} tokens, {padding} and {len(labels) - len(target)} padding"
        yield Text(f"\n{name}: {sizes}", style="bold")
        yield decoded(inputs, np.zeros(len(inputs), dtype=bool), tokenizer, marks=marks)
        yield decoded(target, np.ones(len(target), dtype=bool), tokenizer, marks=marks)
        return
    names = {int(number): name for number, name in (config.id2label or {}).items()}
    label = f"{labels:g}" if task == "regression" else f"{labels} ({names.get(int(labels))})"
    yield Text(f"\n{name}: {len(inputs)} tokens, {padding} padding; label {label}", style="bold")
    yield decoded(inputs, np.ones(len(inputs), dtype=bool), tokenizer, marks=marks)


def _documents(row: Row, name: str, tokenizer: PreTrainedTokenizerBase, *, marks: bool) -> Iterator[Text]:
    """Yield the documents of a row of a language model, each with the label of its last token at its end."""
    length = int(row[LENGTHS][0])
    tokens, labels = row[INPUT_IDS][:length], row[LABELS][:length]
    documents = row.get(DOCUMENTS, np.zeros(length))[:length]
    starts = [0, *(np.flatnonzero(np.diff(documents)) + 1).tolist()]
    padding = len(row[INPUT_IDS]) - length
    learned = int((labels != IGNORED).sum())
    parts = f"{len(starts)} documents, " if DOCUMENTS in row else ""
    yield Text(f"\n{name}: {parts}{length} tokens, {learned} labels, {padding} padding", style="bold")
    for number, (start, stop) in enumerate(zip(starts, [*starts[1:], length], strict=True), start=1):
        if DOCUMENTS in row:
            yield Text(f"document {number}", style="bold")
        seen = np.concatenate([tokens[start:stop], labels[stop - 1 : stop]])
        is_target = np.concatenate([[False], labels[start:stop] != IGNORED])
        known = seen != IGNORED
        yield decoded(seen[known], is_target[known], tokenizer, marks=marks)
