"""Tokenized sources on disk: each is tokenized once per host."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from acsgd.io.data.sampler import Ints
from acsgd.io.data.sources.base import TEXT, RecordCounts, Source
from acsgd.io.data.sources.sources import WeightedSource
from acsgd.io.data.tokens.corpus_writer import LABELS, OFFSETS, TARGETS, TOKENS, TYPES, CorpusWriter
from acsgd.io.data.tokens.encode import DocumentEncoder, Encoder
from acsgd.io.data.tokens.pipeline import encode_source, progress, stop_or_skip
from acsgd.io.files.arrays import Array, ArrayFile, sample
from acsgd.io.files.cache import open_cached
from acsgd.io.files.entry import Entry, seal
from acsgd.notes import print_note, report_if_slow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


ABOUT = "about.json"
"""File of a cache entry with the fields of TokenStats, beside the arrays of the Corpus."""

FORMAT = 11
"""Version of the format of a token cache entry; part of every cache key."""

NAME_BYTES = 80
"""Maximum length of the name of a source in the name of its cache entry."""


class Corpus(NamedTuple):
    """A tokenized source: its documents one after another, between special tokens as of `DocumentTokens`."""

    name: str
    """Name of the source, for messages."""
    key: str
    """Name of the cache entry. Changes with the tokens."""
    tokens: Array
    offsets: Array
    """Position of the first token of each document, and the number of tokens."""
    targets: Array | None = None
    """Whether each token is a target, 1 or 0. None if all are."""
    overlap: int = 0
    """Number of tokens that end a document and begin the next one."""
    labels: Array | None = None
    """Label of each document, fp64: its class or value. None for tasks without labels."""
    target_fraction: float = 1.0
    """Fraction of the tokens that are targets."""
    types: Array | None = None
    """Type of each token (token_type_ids), 0 in the first text of a pair, 1 in the second. None if none are needed."""
    before: int = 0
    """Number of tokens of the source before these, if this is a segment of it."""
    notes: tuple[str, ...] = ()
    """Sentences for the user: on the format of the records, and on those skipped as unreadable."""

    def spans(self) -> tuple[Ints, Ints]:
        """Return the position of the first token of each document, and that after the last one."""
        offsets: Ints = self.offsets[:]
        starts = offsets[:-1].copy()
        starts[1:] -= self.overlap
        return starts, offsets[1:]

    def fingerprint(self) -> tuple[object, ...]:
        """Return values that differ between hosts with different texts: lengths and samples."""
        arrays = [self.tokens] if self.targets is None else [self.tokens, self.targets, self.offsets]
        arrays += [array for array in (self.labels, self.types) if array is not None]
        return tuple(part for array in arrays for part in (len(array), array[sample(array)].tolist()))


class TokenStats(NamedTuple):
    """What a cache entry stores about its tokens."""

    largest: int
    """Largest token id."""
    targets: int
    """Number of target tokens."""
    overlap: int
    """As of Corpus."""
    skipped: str | None
    """Clause that describes the skipped records."""
    format: str
    """Name of the format of the records."""
    long: str | None
    """Clause that describes the examples that are too long."""

    def notes(self, source: Source) -> tuple[str, ...]:
        """Return sentences on a format that was detected, and on skipped records."""
        is_detected = source.options.format == "auto" and self.format != TEXT
        clauses = [f'format "{self.format}", detected from the first record'] if is_detected else []
        clauses += [clause for clause in (self.skipped, self.long) if clause]
        return tuple(f"{source.key}: {source.name}: {clause}" for clause in clauses)


def tokenize_all(
    sources: Sequence[WeightedSource],
    tokenizer: PreTrainedTokenizerBase,
    cache_dir: Path,
    *,
    vocab_size: int,
    make_encoder: Callable[[PreTrainedTokenizerBase], Encoder] = DocumentEncoder,
    reports_wait: bool = True,
) -> list[Corpus]:
    """Return the tokens of each source, on disk in `cache_dir`, tokenizing the sources that are not cached yet.

    Called by every process of a host; one of them tokenizes. vocab_size: of the model; make_encoder: returns a new
    encoder for a source; reports_wait: as of `open_cached`. Raises ValueError if the tokenizer lacks a token that the
    encoder needs, or a text cannot be read or has a token that the model has not.
    """
    suffix = tokens_key(tokenizer)  # before use, which may change its state
    return [
        _open(
            source,
            tokenizer,
            cache_dir,
            suffix,
            make_encoder(tokenizer),
            vocab_size=vocab_size,
            reports_wait=reports_wait,
        )
        for source, _ in sources
    ]


def _open(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    cache_dir: Path,
    suffix: str,
    encoder: Encoder,
    *,
    vocab_size: int,
    reports_wait: bool,
) -> Corpus:
    fingerprint = source.fingerprint
    key = hashlib.sha256(f"{fingerprint} {source.options} {suffix} {encoder.key}".encode()).hexdigest()[:16]
    name = Path(source.name).name.encode()[:NAME_BYTES].decode(errors="ignore")

    def open_built(path: Path) -> Corpus:
        corpus, largest = _read_entry(path, source)
        check_token(largest, source, tokenizer, vocab_size)
        return corpus

    def build(unfinished: Path) -> None:
        unfinished.mkdir()
        stats = tokenize(source, tokenizer, encoder, unfinished, vocab_size=vocab_size)
        if source.fingerprint != fingerprint:
            raise ValueError(
                f"{source.key}: {source.name} changed while it was tokenized; start again when it is complete"
            )
        (unfinished / ABOUT).write_text(json.dumps(stats._asdict()))
        seal(unfinished)
        open_built(unfinished)

    return open_cached(cache_dir / f"{name}-{key}", build, open_built, reports_wait=reports_wait)


def _read_entry(path: Path, source: Source) -> tuple[Corpus, int]:
    """Return the corpus in a cache entry, and its largest token. Raises CorruptFileError."""
    entry = Entry(path)
    tokens, offsets = (ArrayFile(entry, name) for name in (TOKENS, OFFSETS))
    targets, labels, types = (ArrayFile(entry, name) if name in entry else None for name in (TARGETS, LABELS, TYPES))
    tokens.verify_sample()
    about = entry.file(ABOUT)
    stats = TokenStats(**json.loads(about.read(0, about.size)))
    notes, fraction = stats.notes(source), stats.targets / len(tokens)
    corpus = Corpus(
        source.name, path.name, tokens, offsets, targets, stats.overlap, labels, fraction, types, notes=notes
    )
    return corpus, stats.largest


def tokens_key(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what the tokens depend on besides the source and the encoder; part of every cache key."""
    return f"{FORMAT} {tokenizer_fingerprint(tokenizer)} {tokenizer.chat_template}"


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash that changes if the tokenizer may produce other tokens."""
    rules = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(f"{type(tokenizer).__name__} {tokenizer.eos_token_id} {rules}".encode()).hexdigest()


def tokenize(
    source: Source, tokenizer: PreTrainedTokenizerBase, encoder: Encoder, directory: Path, *, vocab_size: int
) -> TokenStats:
    """Write the arrays of a source in bounded memory: TOKENS of uint16 or, for larger vocabularies, uint32.

    Reports its progress on stderr if it takes long. Cutting a long document into pieces may change the tokens at the
    cuts, about one in ten thousand. Raises ValueError if the text cannot be read, has no token, or has a token of
    `vocab_size` or above.
    """
    counts, started = RecordCounts(), time.monotonic()

    def describe() -> str:
        return progress("tokenizing", source, counts, writer.num_tokens, time.monotonic() - started)

    with CorpusWriter(directory, token_dtype(tokenizer)) as writer, report_if_slow(print_note, describe):
        for _, encoded, bad, _ in encode_source(source, tokenizer, encoder, counts):
            for record in bad:
                stop_or_skip(record, source, counts)
            writer.append(encoded)
            check_token(writer.largest, source, tokenizer, vocab_size)
    skipped, too_long = counts.summary(), encoder.note
    if not writer.num_of_text:
        raise ValueError(_no_token(source, tokenizer, [clause for clause in (skipped, too_long) if clause]))
    return TokenStats(writer.largest, writer.num_targets, encoder.overlap, skipped, counts.format, too_long)


def token_dtype(tokenizer: PreTrainedTokenizerBase) -> np.dtype[np.unsignedinteger]:
    """Return the smallest type that holds all tokens of a tokenizer."""
    return np.dtype("<u2" if max(tokenizer.get_vocab().values()) < 2**16 else "<u4")


def _no_token(source: Source, tokenizer: PreTrainedTokenizerBase, clauses: Sequence[str]) -> str:
    skipped = f" ({', '.join(clauses)})" if clauses else ""
    return (
        f"{source.key}: {source.name} has no token with the tokenizer {tokenizer.name_or_path} of {len(tokenizer)} "
        f"tokens{skipped}; give a text that is not blank, or a model with all its tokenizer files"
    )


def check_token(token: int, source: Source, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Raise ValueError if the model has no embedding of a token."""
    if token >= vocab_size:
        raise ValueError(
            f"{source.key}: {source.name} has the token {tokenizer.convert_ids_to_tokens(token)!r} of id {token}, but "
            f"the model's vocab_size is {vocab_size}; give the tokenizer that belongs to the model, or a model with "
            "a larger vocabulary"
        )
