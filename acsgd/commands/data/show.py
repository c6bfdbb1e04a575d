"""Show records and rows as the model sees them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from acsgd.config.options import Config, DataConfig, ModelConfig, OptimConfig
from acsgd.io.data.formats.formats import describe_unused, read_each, read_options
from acsgd.io.data.row_spec import RowSpec
from acsgd.io.data.sources.base import BadRecord, RecordCounts, Source
from acsgd.io.data.sources.sources import WeightedSource, parse_sources
from acsgd.io.data.sources.streamed import refuse_streams
from acsgd.io.data.tokens.encode import DocumentEncoder
from acsgd.io.data.tokens.ends import EndFinder, TextEnds
from acsgd.run.setup.rows import RowMaker
from acsgd.shards.chat_template import set_chat_template
from acsgd.shards.config import read_config
from acsgd.shards.generation import known_ends, set_special_tokens
from acsgd.shards.hub import find_model, find_tokenizer
from acsgd.shards.tokenizer import load_tokenizer
from acsgd.tasks import check_options, find_task


def open_sources(
    data: DataConfig, model: ModelConfig
) -> tuple[Sequence[Source], PreTrainedTokenizerBase, PreTrainedConfig, Sequence[int]]:
    """Return the sources, tokenizer and config of a run's model, and the tokens that end a text generated with it.

    Model and tokenizer are downloaded if they are Hugging Face ids. Raises ValueError.
    """
    task = find_task(model.task)
    options = read_options(data, has_labels=task.has_labels)
    sources = [source for source, _ in parse_sources(data.sources, key="source", options=options)]
    directory = find_model(model.name, option="--model", weights=False)
    # no model is built, for which transformers' code of models would be imported
    config = read_config(directory, task.model_class.name, is_valid=lambda config: True)
    tokenizer_dir = directory if model.tokenizer is None else find_tokenizer(model.tokenizer)
    tokenizer = load_tokenizer(tokenizer_dir, config, directory)
    if tokenizer_dir != directory:
        set_special_tokens(config, tokenizer)
    set_chat_template(tokenizer, data)
    return sources, tokenizer, config, known_ends(directory, tokenizer_dir, tokenizer)


def unused_run(data: DataConfig, model: ModelConfig) -> Config:
    """Return the options of a run with some data, of which nothing else matters."""
    return Config(model, data, OptimConfig(lr=1e-3, steps=1, warmup=0))


MAX_TOKENS = 2000
"""Number of tokens of a record or row that are shown."""


def show_records(data: DataConfig, model: ModelConfig, number: int, typed: Callable[[str], str]) -> None:
    """Print the first records of each source. Raises ValueError.

    typed: returns a message with the options of the command.
    """
    sources, tokenizer, _, known = open_sources(data, model)
    formats = set[str]()
    console = Console(soft_wrap=True, highlight=False)
    masked = "dimmed" if console.is_terminal else "in ⟦⟧"
    for source in sources:
        counts, encoder, finder, ends = RecordCounts(), DocumentEncoder(tokenizer), EndFinder(tokenizer), TextEnds()
        records = list(islice(read_each(source, tokenizer, counts), number))
        console.print(Text(f"{counts.describe_format()}; masked tokens are {masked}", style="bold"))
        for where, example in records:
            if isinstance(example, BadRecord):
                console.print(Text(f"\n{where} {example.reason}; {typed(example.remedy)}", style="red"))
                continue
            encoded = encoder.encode([example], encoder.tokenize([example]))
            if error := encoded.refused.get(0):
                console.print(Text(f"\n{where} {error.reason}; {typed(error.remedy)}", style="red"))
                continue
            ends = TextEnds.union([ends, finder.find(encoded.tokens, encoded.targets, encoded.ends)])
            learned = int(encoded.targets.sum())
            console.print(Text(f"\n{where}: {len(encoded.tokens)} tokens, {learned} of them learned", style="bold"))
            console.print(decoded(encoded.tokens, encoded.targets, tokenizer, marks=not console.is_terminal))
        formats |= {counts.format} - {""}
        if unread := counts.unread_summary():
            console.print(Text(f"\n{unread}", style="bold"))
        if not ends.documents:
            continue
        console.print(Text("\n".join(["", ends.describe(tokenizer), *ends.notes(tokenizer, known)])))
    for sentence in describe_unused(data, formats):
        console.print(Text(f"\n{typed(sentence)}", style="bold"))


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


def show_rows(data: DataConfig, model: ModelConfig, number: int, typed: Callable[[str], str]) -> None:
    """Print the first rows of each source, after the notes of a run. typed: see `show_records`. Raises ValueError."""
    config = unused_run(data, model)
    task = check_options(config)
    found, tokenizer, model_config, _ = open_sources(data, model)
    refuse_streams(found, "--sequence")
    sources = [WeightedSource(source, None) for source in found]
    console = Console(soft_wrap=True, highlight=False)
    if task.layout(data) != "concat":
        config = replace(config, data=replace(data, isolate=True))  # then rows have the borders of their documents
    marks = not console.is_terminal
    spec = RowSpec.of(config, task, model_config, tokenizer, sources)
    with tempfile.TemporaryDirectory(prefix="acsgd-") as name:
        cache = Path(name)
        opened = RowMaker(spec, model_config, tokenizer, model.name, cache, stream_dir=cache).open(sources)
        for sentence in describe_unused(data, {rows.format for rows in opened}):
            console.print(Text(typed(sentence), style="bold"))
        for rows in opened:
            masked = "in ⟦⟧" if marks else "dimmed"
            console.print(Text("\n".join([*rows.notes, f"masked tokens are {masked}"]), style="bold"))
            for index in range(min(number, len(rows))):
                summary, texts = task.show(rows.read(index), model_config)
                console.print(Text(f"\nrow {index + 1} of {len(rows):,}: {summary}", style="bold"))
                for text in texts:
                    if text.title is not None:
                        console.print(Text(text.title, style="bold"))
                    console.print(decoded(text.tokens, text.is_target, tokenizer, marks=marks))
