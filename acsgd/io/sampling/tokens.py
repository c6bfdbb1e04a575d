"""Tokenized sources on disk: tokenize once per host, read fixed-length windows.

Shapes: n sequences, M micro-batches, B sequences per micro-batch, T tokens per sequence.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from acsgd.io.cache import once_per_host
from acsgd.io.sampling.sampler import Ints
from acsgd.io.sources.sources import LineCounts, Piece, Source, WeightedSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Tokens = NDArray[np.uint16] | NDArray[np.uint32]
"""Tokens of one source, 1-D: all documents, each followed by the end-of-document token."""

FORMAT = 2
"""Version of the format of a token cache entry; part of every cache key."""

BATCH_CHARS = 2**20
"""Characters tokenized at a time. The tokenizer's working memory is about 100 bytes per character."""


class Corpus(NamedTuple):
    """A tokenized source."""

    tokens: Tokens
    skipped: str | None
    """Sentence that describes the lines skipped as unreadable; None if there are none."""


def tokenize_all(
    sources: Sequence[WeightedSource], tokenizer: PreTrainedTokenizerBase, sequence: int, cache_dir: Path
) -> list[Corpus]:
    """Return the tokens of each source, memory-mapped from `cache_dir`, tokenizing the sources that are not cached yet.

    Called by every process of a host; one of them tokenizes. Raises ValueError if the tokenizer has no
    end-of-document token, a text cannot be read, or a source has less than `sequence` + 1 tokens.
    """
    end_of_document(tokenizer)
    suffix = f"{FORMAT} {tokenizer_fingerprint(tokenizer)}"  # before use, which may change its state
    return [_open(source, tokenizer, sequence, cache_dir, suffix) for source, _ in sources]


def _open(source: Source, tokenizer: PreTrainedTokenizerBase, sequence: int, cache_dir: Path, suffix: str) -> Corpus:
    key = hashlib.sha256(f"{source.fingerprint} {suffix}".encode()).hexdigest()[:16]
    entry = cache_dir / f"{Path(source.name).name}-{key}"

    def build(unfinished: Path) -> None:
        unfinished.mkdir()
        counts = tokenize(source, tokenizer, unfinished / "tokens.npy")
        (unfinished / "lines.json").write_text(json.dumps(asdict(counts)))
        _load(unfinished, source, sequence)

    return _load(once_per_host(entry, build), source, sequence)


def _load(entry: Path, source: Source, sequence: int) -> Corpus:
    """Map the tokens of a cache entry. Raises ValueError if they are less than one sequence."""
    tokens: Tokens = np.load(entry / "tokens.npy", mmap_mode="r")
    if not num_sequences(tokens, sequence):
        raise ValueError(
            f"data.sequence={sequence}: {source.name} has {len(tokens)} tokens, less than one sequence of "
            f"{sequence} + 1; use data.sequence={len(tokens) - 1} or less, or a longer text"
        )
    skipped = LineCounts(**json.loads((entry / "lines.json").read_text())).summary()
    return Corpus(tokens, skipped and f"{source.key}: {source.name}: {skipped}")


def end_of_document(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token appended to each document. Raises ValueError if the tokenizer has no eos_token."""
    token = tokenizer.eos_token_id
    if not isinstance(token, int):
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path} has no eos_token to put between documents; "
            'set "eos_token" in its tokenizer_config.json'
        )
    return token


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash that changes if the tokenizer may produce other tokens."""
    rules = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(f"{type(tokenizer).__name__} {tokenizer.eos_token_id} {rules}".encode()).hexdigest()


def tokenize(source: Source, tokenizer: PreTrainedTokenizerBase, path: Path) -> LineCounts:
    """Write the tokens of a source as a 1-D .npy of uint16, or uint32 for larger vocabularies, in bounded memory.

    Cutting a long document into pieces may change the tokens at the cuts, about one in ten thousand. Returns the
    number of lines read and skipped. Raises ValueError if the text cannot be read or has no token.
    """
    end = end_of_document(tokenizer)
    dtype = np.dtype("<u2" if max(tokenizer.get_vocab().values()) < 2**16 else "<u4")
    counts = LineCounts()
    num_tokens = num_ends = 0
    with path.open("wb") as file:
        _write_header(file, dtype, 0)
        for pieces in _in_batches(source.pieces(counts)):
            texts = [piece.text for piece in pieces]
            # verbose=False: no warning if a document is longer than the model's maximum sequence
            encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
            ends = [[end] if piece.ends_document else [] for piece in pieces]
            rows = chain.from_iterable(zip(encoded["input_ids"], ends, strict=True))
            flat = np.fromiter(chain.from_iterable(rows), dtype)
            file.write(flat.tobytes())
            num_tokens += len(flat)
            num_ends += sum(map(len, ends))
        file.seek(0)
        _write_header(file, dtype, num_tokens)
    if num_tokens == num_ends:
        skipped = f" ({counts.summary()})" if counts.skipped else ""
        raise ValueError(
            f"{source.key}: {source.name} has no token with the tokenizer {tokenizer.name_or_path} of "
            f"{len(tokenizer)} tokens{skipped}; give a text that is not blank, or a model with all its tokenizer files"
        )
    return counts


def _write_header(file: BinaryIO, dtype: np.dtype[np.unsignedinteger], length: int) -> None:
    """Write the header of a .npy file. numpy pads it, so the size of the header does not depend on `length`."""
    np.lib.format.write_array_header_1_0(file, {"descr": dtype.str, "fortran_order": False, "shape": (length,)})


def _in_batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Group pieces into lists of at least BATCH_CHARS characters."""
    batch: list[Piece] = []
    chars = 0
    for piece in pieces:
        batch.append(piece)
        chars += len(piece.text) + 1  # empty documents count too
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
    return repr([(len(tokens), tokens[:: max(1, len(tokens) // 1000)].tolist()) for tokens in corpora])
