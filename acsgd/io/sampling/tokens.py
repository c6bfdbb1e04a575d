"""Tokenized sources on disk: tokenize once per host, read fixed-length windows.

Shapes: n sequences, M micro-batches, B sequences per micro-batch, T tokens per sequence.
"""

from __future__ import annotations

import hashlib
import io
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from acsgd.errors import CorruptFileError
from acsgd.io.cache import open_cached
from acsgd.io.entry import Entry, seal
from acsgd.io.formats.base import Example
from acsgd.io.formats.formats import read_examples
from acsgd.io.sampling.sampler import Ints
from acsgd.io.sources.base import RecordCounts, Source
from acsgd.io.sources.sources import WeightedSource
from acsgd.notes import print_note, report_if_slow
from acsgd.shards.tokenizer import DocumentTokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Ids = NDArray[np.uint16] | NDArray[np.uint32]


class Tokens(Protocol):
    """Tokens of one source, 1-D: all documents, between special tokens as of `DocumentTokens`."""

    def __len__(self) -> int: ...
    def __getitem__(self, span: slice, /) -> Ids: ...


class TokenFile:
    """Tokens in the file TOKENS of a cache entry, read from disk and verified when they are used."""

    def __init__(self, entry: Entry) -> None:
        """Read the header. Raises CorruptFileError."""
        self._entry = entry
        self._file = entry.file(TOKENS)
        head = io.BytesIO(self._file.read(0, 1024))
        np.lib.format.read_magic(head)
        (self._length,), _, self._dtype = np.lib.format.read_array_header_1_0(head)
        self._start = head.tell()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, span: slice, /) -> Ids:
        """Read tokens from disk. Raises CorruptFileError, after which the entry is no longer valid."""
        try:
            return self._read(span)
        except CorruptFileError as error:
            is_invalid = self._entry.invalidate()
            remedy = "start again, and the text is tokenized again" if is_invalid else f"remove {self._entry.path}"
            raise CorruptFileError(error.path, f"{error.problem}; {remedy}") from None

    def verify_sample(self) -> None:
        """Raise CorruptFileError if a sample of the tokens is not as it was written."""
        self._read(_sample(self))

    def _read(self, span: slice) -> Ids:
        start, stop, step = span.indices(self._length)
        size = self._dtype.itemsize
        if step == 1:
            return np.frombuffer(self._file.read(self._start + start * size, (stop - start) * size), self._dtype)
        single = (self._file.read(self._start + i * size, size) for i in range(start, stop, step))
        return np.frombuffer(b"".join(single), self._dtype)


TOKENS, ABOUT = "tokens.npy", "about.json"
"""Files of a cache entry: the tokens, and the fields of TokenStats."""

FORMAT = 4
"""Version of the format of a token cache entry; part of every cache key."""

NAME_BYTES = 80
"""Maximum length of the name of a source in the name of its cache entry."""

BATCH_CHARS = 2**20
"""Characters tokenized at a time. The tokenizer's working memory is about 200 bytes per character."""


class Corpus(NamedTuple):
    """A tokenized source."""

    tokens: Tokens
    skipped: str | None
    """Sentence that describes the records skipped as unreadable; None if there are none."""


class TokenStats(NamedTuple):
    """What a cache entry stores about its tokens."""

    largest: int
    """Largest token id."""
    skipped: str | None
    """Clause that describes the skipped records."""


def tokenize_all(
    sources: Sequence[WeightedSource],
    tokenizer: PreTrainedTokenizerBase,
    sequence: int,
    cache_dir: Path,
    *,
    vocab_size: int,
    reports_wait: bool = True,
) -> list[Corpus]:
    """Return the tokens of each source, on disk in `cache_dir`, tokenizing the sources that are not cached yet.

    Called by every process of a host; one of them tokenizes. vocab_size: of the model; reports_wait: as of
    `open_cached`. Raises ValueError if the tokenizer has no end-of-document token, a text cannot be read, has a token
    that the model has not, or has less than `sequence` + 1 tokens.
    """
    suffix = f"{FORMAT} {tokenizer_fingerprint(tokenizer)}"  # before use, which may change its state
    DocumentTokens.of(tokenizer)
    return [
        _open(source, tokenizer, sequence, cache_dir, suffix, vocab_size=vocab_size, reports_wait=reports_wait)
        for source, _ in sources
    ]


def _open(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    sequence: int,
    cache_dir: Path,
    suffix: str,
    *,
    vocab_size: int,
    reports_wait: bool,
) -> Corpus:
    fingerprint = source.fingerprint
    key = hashlib.sha256(f"{fingerprint} {suffix}".encode()).hexdigest()[:16]
    name = Path(source.name).name.encode()[:NAME_BYTES].decode(errors="ignore")

    def build(unfinished: Path) -> None:
        unfinished.mkdir()
        stats = tokenize(source, tokenizer, unfinished / TOKENS, vocab_size=vocab_size)
        if source.fingerprint != fingerprint:
            raise ValueError(
                f"{source.key}: {source.name} changed while it was tokenized; start again when it is complete"
            )
        (unfinished / ABOUT).write_text(json.dumps(stats._asdict()))
        seal(unfinished)
        open_built(unfinished)

    def open_built(path: Path) -> Corpus:
        entry = Entry(path)
        tokens = TokenFile(entry)
        tokens.verify_sample()
        about = entry.file(ABOUT)
        stats = TokenStats(**json.loads(about.read(0, about.size)))
        _check_token(stats.largest, source, tokenizer, vocab_size)
        if not num_sequences(tokens, sequence):
            raise ValueError(
                f"data.sequence={sequence}: {source.name} has {len(tokens)} tokens, less than one sequence of "
                f"{sequence} + 1; use data.sequence={len(tokens) - 1} or less, or a longer text"
            )
        return Corpus(tokens, stats.skipped and f"{source.key}: {source.name}: {stats.skipped}")

    return open_cached(cache_dir / f"{name}-{key}", build, open_built, reports_wait=reports_wait)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash that changes if the tokenizer may produce other tokens."""
    rules = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(f"{type(tokenizer).__name__} {tokenizer.eos_token_id} {rules}".encode()).hexdigest()


def tokenize(source: Source, tokenizer: PreTrainedTokenizerBase, path: Path, *, vocab_size: int) -> TokenStats:
    """Write the tokens of a source as a 1-D .npy of uint16, or uint32 for larger vocabularies, in bounded memory.

    Reports its progress on stderr if it takes long. Cutting a long document into pieces may change the tokens at the
    cuts, about one in ten thousand. Raises ValueError if the text cannot be read, has no token, or has a token of
    `vocab_size` or above.
    """
    special = DocumentTokens.of(tokenizer)
    dtype = np.dtype("<u2" if max(tokenizer.get_vocab().values()) < 2**16 else "<u4")
    counts, started = RecordCounts(), time.monotonic()
    num_tokens = num_of_text = largest = 0
    begin = special.begin

    def progress() -> str:
        fraction = f" {counts.fraction():.0%} of" if counts.fraction else ""
        rate = num_tokens / (time.monotonic() - started)
        return f"tokenizing: read{fraction} {source.name}, {num_tokens / 1e6:.1f} M tokens, {rate / 1e6:.2f} M/s"

    with path.open("wb") as file, report_if_slow(print_note, progress):
        _write_header(file, dtype, 0)
        for examples in _in_batches(read_examples(source, counts)):
            texts = [example.text for example in examples]
            # verbose=False: no warning if a document is longer than the model's maximum sequence
            encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
            rows: list[list[int]] = []
            for example, ids in zip(examples, encoded["input_ids"], strict=True):
                rows += [begin, ids, [special.end] if example.ends_document else []]
                begin = special.begin_next if example.ends_document else []
                num_of_text += len(ids)
            flat = np.fromiter(chain.from_iterable(rows), dtype)
            largest = max(largest, int(flat.max(initial=0)))
            _check_token(largest, source, tokenizer, vocab_size)
            file.write(flat.tobytes())
            num_tokens += len(flat)
        file.seek(0)
        _write_header(file, dtype, num_tokens)
    if not num_of_text:
        skipped = f" ({counts.summary()})" if counts.skipped else ""
        raise ValueError(
            f"{source.key}: {source.name} has no token with the tokenizer {tokenizer.name_or_path} of "
            f"{len(tokenizer)} tokens{skipped}; give a text that is not blank, or a model with all its tokenizer files"
        )
    return TokenStats(largest, counts.summary())


def _check_token(token: int, source: Source, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Raise ValueError if the model has no embedding of a token."""
    if token >= vocab_size:
        raise ValueError(
            f"{source.key}: {source.name} has the token {tokenizer.convert_ids_to_tokens(token)!r} of id {token}, but "
            f"the model's vocab_size is {vocab_size}; give the tokenizer that belongs to the model, or a model with "
            "a larger vocabulary"
        )


def _write_header(file: BinaryIO, dtype: np.dtype[np.unsignedinteger], length: int) -> None:
    """Write the header of a .npy file. numpy pads it, so the size of the header does not depend on `length`."""
    np.lib.format.write_array_header_1_0(file, {"descr": dtype.str, "fortran_order": False, "shape": (length,)})


def _in_batches(examples: Iterable[Example]) -> Iterator[list[Example]]:
    """Group examples into lists of at least BATCH_CHARS characters."""
    batch: list[Example] = []
    chars = 0
    for example in examples:
        batch.append(example)
        chars += len(example.text) + 1  # empty documents count too
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def num_sequences(tokens: Tokens, sequence: int) -> int:
    """Return the number of windows of `sequence` + 1 tokens, each overlapping the next by one token.

    So each token except the first is a target once per epoch. A remainder shorter than a sequence is dropped.
    """
    return max(0, len(tokens) - 1) // sequence


def read_windows(corpora: Sequence[Tokens], sequence: int, sources: Ints, indices: Ints) -> Ints:
    """Read sequences, given by source and index [n], from disk: [n, T + 1], the T inputs and the last label.

    Sequence i of a source has the tokens i T .. (i + 1) T inclusive. Adjacent sequences share one token, a target of
    the first of them only.
    """
    windows = np.empty((len(sources), sequence + 1), dtype=np.int64)
    for window, source, index in zip(windows, sources, indices, strict=True):
        window[:] = corpora[source][index * sequence : (index + 1) * sequence + 1]
    return windows


def to_micro_batches(rows: Ints, micro: int) -> Tensor:
    """Return rows [M * B, T] as a new tensor [M, B, T]."""
    return torch.from_numpy(rows.copy()).view(-1, micro, rows.shape[1])


def corpora_fingerprint(corpora: Sequence[Tokens]) -> str:
    """Return lengths and a sample of the tokens, to detect hosts with different texts."""
    return repr([(len(tokens), tokens[_sample(tokens)].tolist()) for tokens in corpora])


def _sample(tokens: Tokens) -> slice:
    return slice(None, None, max(1, len(tokens) // 1000))
