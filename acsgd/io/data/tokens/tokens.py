"""Tokenized sources on disk: each is tokenized once per host."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from acsgd.io.data.row_spec import RowSpec, RowStage
from acsgd.io.data.sources.base import TEXT, RecordCounts, Source
from acsgd.io.data.tokens.corpus import Corpus, CorpusWriter, open_arrays
from acsgd.io.data.tokens.encode import Encoder
from acsgd.io.data.tokens.ends import EndFinder, TextEnds
from acsgd.io.data.tokens.pipeline import encode_source, progress, stop_or_skip
from acsgd.io.files.cache import open_cached
from acsgd.io.files.entry import Entry, seal
from acsgd.notes import print_note, report_if_slow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


ABOUT = "about.json"
"""File of a cache entry with the fields of TokenStats, beside the arrays of the Corpus."""

NAME_BYTES = 80
"""Maximum length of the name of a source in the name of its cache entry."""


class TokenStats(NamedTuple):
    """What a cache entry stores about its tokens."""

    largest: int
    """Largest token id."""
    targets: int
    """Number of target tokens."""
    overlap: int
    """See Corpus."""
    skipped: str | None
    """Clause that describes the skipped records."""
    format: str
    """Name of the format of the records."""
    long: str | None
    """Clause that describes the examples that are too long."""
    unread: str | None
    """Clause that names the fields without effect."""
    ends: TextEnds
    """How the learned texts end."""
    unknown: str | None = None
    """Clause that counts the tokens of unknown text; None in cache entries of older versions."""

    def notes(self, source: Source) -> tuple[str, ...]:
        """Return sentences on a detected format, skipped records, fields not read, and unknown text."""
        is_detected = source.options.format == "auto" and self.format != TEXT
        clauses = [f'format "{self.format}", detected from the first record'] if is_detected else []
        clauses += [clause for clause in (self.unread, self.skipped, self.long, self.unknown) if clause]
        return tuple(f"{source.key}: {source.name}: {clause}" for clause in clauses)


def open_tokens(
    source: Source,
    spec: RowSpec,
    tokenizer: PreTrainedTokenizerBase,
    cache_dir: Path,
    encoder: Encoder,
    *,
    vocab_size: int,
    reports_wait: bool = True,
) -> Corpus:
    """Return the tokens of a source, on disk in `cache_dir`, tokenizing it if it is not cached yet.

    Called by every process of a host; one of them tokenizes. encoder: a new one; vocab_size: of the model;
    reports_wait: see `open_cached`. Raises ValueError if a text cannot be read or has a token that the model has not.
    """
    assert source.options in spec.reading
    fingerprint = source.fingerprint
    key = spec.key(RowStage.TOKENS, fingerprint, source.options)
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
    arrays, about = open_arrays(entry), entry.file(ABOUT)
    arrays["tokens"].verify_sample()
    fields = json.loads(about.read(0, about.size))
    ids, *counts = fields["ends"]
    stats = TokenStats(**{**fields, "ends": TextEnds(tuple(ids), *counts)})
    fraction = stats.targets / len(arrays["tokens"])
    corpus = Corpus(
        source.name,
        path.name,
        **arrays,
        overlap=stats.overlap,
        target_fraction=fraction,
        notes=stats.notes(source),
        ends=stats.ends,
        format=stats.format,
    )
    return corpus, stats.largest


def tokenize(
    source: Source, tokenizer: PreTrainedTokenizerBase, encoder: Encoder, directory: Path, *, vocab_size: int
) -> TokenStats:
    """Write the arrays of a source in bounded memory: TOKENS of uint16 or, for larger vocabularies, uint32.

    Reports its progress on stderr if it takes long. Cutting a long document into pieces may change the tokens at the
    cuts, about one in ten thousand. Raises ValueError if the text cannot be read, has no token, or has a token of
    `vocab_size` or above.
    """
    counts, started, finder, ends = RecordCounts(), time.monotonic(), EndFinder(tokenizer), TextEnds()

    def describe() -> str:
        return progress("tokenizing", source, counts, writer.num_tokens, time.monotonic() - started)

    with CorpusWriter(directory, token_dtype(tokenizer)) as writer, report_if_slow(print_note, describe):
        for _, encoded, bad, _ in encode_source(source, tokenizer, encoder, counts):
            for record in bad:
                stop_or_skip(record, source, counts)
            writer.append(encoded)
            ends = TextEnds.union([ends, finder.find(encoded.tokens, encoded.targets, encoded.ends)])
            check_token(writer.largest, source, tokenizer, vocab_size)
    skipped, too_long = counts.summary(), encoder.note
    if not writer.num_of_text:
        raise ValueError(_no_token(source, tokenizer, [clause for clause in (skipped, too_long) if clause]))
    return TokenStats(
        writer.largest,
        writer.num_targets,
        encoder.overlap,
        skipped,
        counts.format,
        too_long,
        counts.unread_summary(),
        ends,
        counts.unknown_summary(),
    )


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
