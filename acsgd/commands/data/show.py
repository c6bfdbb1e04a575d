"""Show records and rows as the model sees them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from acsgd.config.checks import check
from acsgd.config.options import Config, DataConfig, ModelConfig, OptimConfig
from acsgd.io.data.formats.formats import read_each, read_options
from acsgd.io.data.formats.labels import LABELLED
from acsgd.io.data.row_spec import RowSpec
from acsgd.io.data.rows.base import INPUT_IDS, LABELS, LENGTHS, Row
from acsgd.io.data.rows.labelled import MASK
from acsgd.io.data.sources.base import BadRecord, RecordCounts, Source
from acsgd.io.data.sources.sources import WeightedSource, parse_sources
from acsgd.io.data.sources.streamed import PREFIX, Streamed
from acsgd.io.data.tokens.encode import DocumentEncoder
from acsgd.layers.masks import DOCUMENTS
from acsgd.run.setup.rows import RowMaker
from acsgd.shards.config import read_config
from acsgd.shards.hub import find_model
from acsgd.shards.tokenizer import load_tokenizer
from acsgd.tasks import IGNORED


def refuse_streams(sources: Sequence[Source], action: str) -> None:
    """Raise ValueError if a source is streamed. action: what needs all records at once."""
    for source in sources:
        if isinstance(source, Streamed):
            raise ValueError(f"{source.key}: {action} reads all records of {source.name}; remove {PREFIX}")


def open_sources(
    data: DataConfig, model: str, task: str = "lm"
) -> tuple[Sequence[Source], PreTrainedTokenizerBase, PreTrainedConfig]:
    """Return the sources, and tokenizer and config of a model, which is downloaded if it is a Hugging Face id.

    Raises ValueError.
    """
    options = read_options(data, has_labels=task in LABELLED)
    sources = [source for source, _ in parse_sources(data.sources, key="source", options=options)]
    directory = find_model(model, option="--model", weights=False)
    config = read_config(directory, task)
    return sources, load_tokenizer(directory, config), config


MAX_TOKENS = 2000
"""Number of tokens of a record or row that are shown."""


def show_records(data: DataConfig, model: str, number: int) -> None:
    """Print the first records of each source. Raises ValueError."""
    sources, tokenizer, _ = open_sources(data, model)
    console = Console(soft_wrap=True, highlight=False)
    masked = "dimmed" if console.is_terminal else "in ⟦⟧"
    for source in sources:
        counts, encoder = RecordCounts(), DocumentEncoder(tokenizer)
        for index, (where, example) in enumerate(islice(read_each(source, tokenizer, counts), number)):
            if not index:
                console.print(Text(f'format "{counts.format}"; masked tokens are {masked}', style="bold"))
            if isinstance(example, BadRecord):
                console.print(Text(f"\n{where} {example.reason}; {example.remedy}", style="red"))
                continue
            encoded = encoder.encode([example], encoder.tokenize([example]))
            if error := encoded.refused.get(0):
                console.print(Text(f"\n{where} {error.reason}; {error.remedy}", style="red"))
                continue
            learned = int(encoded.targets.sum())
            console.print(Text(f"\n{where}: {len(encoded.tokens)} tokens, {learned} of them learned", style="bold"))
            console.print(decoded(encoded.tokens, encoded.targets, tokenizer, marks=not console.is_terminal))


def decoded(
    tokens: NDArray[Any], targets: NDArray[np.bool_], tokenizer: PreTrainedTokenizerBase, *, marks: bool
) -> Text:
    """Return the text of tokens, with those that are no targets dimmed or in brackets."""
    text = Text()
    pairs = zip(tokens[:MAX_TOKENS].tolist(), targets.tolist(), strict=False)
    for is_target, group in groupby(pairs, key=lambda pair: pair[1]):
        part = tokenizer.decode([token for token, _ in group], clean_up_tokenization_spaces=False)
        assert isinstance(part, str)
        text.append(f"⟦{part}⟧" if marks and not is_target else part, style="" if is_target else "dim")
    if (rest := len(tokens) - MAX_TOKENS) > 0:
        text.append(f"\n... and {rest} more tokens", style="italic")
    return text


TaskName = Literal["lm", "classification", "regression", "seq2seq"]


def show_rows(data: DataConfig, model: str, task: TaskName, number: int) -> None:
    """Print the first rows of each source, after the notes of a run. Raises ValueError."""
    config = Config(ModelConfig(model, task=task), data, OptimConfig(lr=1e-3, steps=1, warmup=0))
    check(config)
    found, tokenizer, model_config = open_sources(data, model, task)
    refuse_streams(found, "--sequence")
    sources = [WeightedSource(source, None) for source in found]
    console = Console(soft_wrap=True, highlight=False)
    if config.rows != "concat" and task == "lm":
        config = replace(config, data=replace(data, isolate=True))  # then rows have the borders of their documents
    spec = RowSpec.of(config, model_config, tokenizer, sources)
    with tempfile.TemporaryDirectory(prefix="acsgd-") as name:
        cache = Path(name)
        for rows in RowMaker(spec, model_config, tokenizer, model, cache, cache).open(sources):
            masked = "dimmed" if console.is_terminal else "in ⟦⟧"
            console.print(Text("\n".join([*rows.notes, f"masked tokens are {masked}"]), style="bold"))
            for index in range(min(number, len(rows))):
                row, name = rows.read(index), f"row {index + 1} of {len(rows):,}"
                for line in _lines(row, name, task, model_config, tokenizer, marks=not console.is_terminal):
                    console.print(line)


def _lines(
    row: Row, name: str, task: TaskName, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, *, marks: bool
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
