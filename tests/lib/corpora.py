"""Corpora in memory, and files of records."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoConfig

from acsgd.config.options import Config, DataConfig, ModelConfig, OptimConfig
from acsgd.io.data.formats.base import Example
from acsgd.io.data.formats.formats import parts_of, read_each
from acsgd.io.data.row_spec import RowSpec
from acsgd.io.data.rows.base import RowReader
from acsgd.io.data.rows.documents import ConcatRows
from acsgd.io.data.sources.base import BadRecord, RecordCounts, Source
from acsgd.io.data.sources.sources import WeightedSource, parse_sources
from acsgd.io.data.tokens.corpus import Corpus
from acsgd.io.data.tokens.encode import DocumentEncoder, Encoded
from acsgd.io.data.tokens.pipeline import stop_or_skip
from acsgd.io.data.tokens.tokens import open_tokens
from acsgd.tasks import find_task


def one_document(tokens: NDArray[Any], *notes: str) -> Corpus:
    """Return a corpus of one document."""
    return Corpus("memory", "memory", tokens, np.array([0, len(tokens)]), notes=notes)


def documents_of(lengths: list[int], *, targets: NDArray[Any] | None = None, overlap: int = 0) -> Corpus:
    """Return a corpus of documents with these numbers of tokens. All tokens are distinct."""
    offsets = np.cumsum([0, *lengths])
    return Corpus("memory", "memory", np.arange(offsets[-1]), offsets, targets, overlap)


def spec_of(tokenizer: Any, sources: Sequence[WeightedSource]) -> RowSpec:
    """Return the specification of rows of a language model."""
    data, model = DataConfig(sources="", sequence=8, batch=1), AutoConfig.for_model("gpt2")
    spec = RowSpec.of(
        Config(ModelConfig(""), data, OptimConfig(lr=1.0, steps=1)), find_task("lm"), model, tokenizer, sources
    )
    return replace(spec, reading=tuple(source.options for source, _ in sources))


def tokenize_all(
    sources: Sequence[WeightedSource], tokenizer: Any, cache_dir: Path, *, vocab_size: int
) -> list[Corpus]:
    """Return the documents of each source from a cache."""
    spec = spec_of(tokenizer, sources)
    return [
        open_tokens(source, spec, tokenizer, cache_dir, DocumentEncoder(tokenizer), vocab_size=vocab_size)
        for source, _ in sources
    ]


def windows_of(corpora: list[Corpus], sequence: int, micro: int, **wants: bool) -> RowReader:
    """Return the reader of rows that are windows of the tokens."""
    return RowReader([ConcatRows(corpus, sequence) for corpus in corpora], micro, **wants)


def examples_of(source: Source, counts: RecordCounts | None = None, tokenizer: Any = None) -> Iterator[Example]:
    """Yield the examples of a source, long ones in parts; only chats need a tokenizer."""
    counts = counts or RecordCounts()
    for _, example in read_each(source, tokenizer, counts):
        if isinstance(example, BadRecord):
            stop_or_skip(example, source, counts)
        else:
            yield from parts_of(example)


def encoded_of(tokenizer: Any, *examples: Example) -> Encoded:
    """Return the tokens of examples."""
    encoder = DocumentEncoder(tokenizer)
    return encoder.encode(examples, encoder.tokenize(examples))


def write_records(path: Path) -> None:
    """Write more documents than the first steps of a small run need."""
    draw = np.random.default_rng(0)
    with path.open("w") as file:
        for number in range(3000):
            words = " ".join(map(str, draw.integers(0, 10**6, 20)))
            file.write(json.dumps({"text": f"{number}: {words}"}) + "\n")


def source_of(path: Path, text: str) -> Source:
    """Write a text and return it as a source."""
    path.write_text(text)
    return parse_sources(str(path))[0].source
