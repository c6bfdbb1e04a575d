"""Tokenized text on disk: tokenize a source once per host and read fixed-length windows of it."""

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
from acsgd.io.sources.sources import Piece, Source, Tally, WeightedSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Tokens = NDArray[np.uint16] | NDArray[np.uint32]
"""One source's tokens, [n], all documents in a row, each followed by the end-of-document token."""


FORMAT = 2
"""Version of what a cache entry holds; part of every cache key."""


BATCH_CHARS = 2**20
"""Characters that go through the tokenizer at a time; its working memory is about 100 times as many bytes."""


class Corpus(NamedTuple):
    """One source, tokenised."""

    tokens: Tokens
    skipped: str | None
    """What was left out of the text since it cannot be read, in one sentence; None if nothing was."""


def prepare(
    sources: Sequence[WeightedSource], tokenizer: PreTrainedTokenizerBase, sequence: int, cache_dir: Path
) -> list[Corpus]:
    """Return each source's tokens, memory-mapped, tokenising into `cache_dir` what is not there yet.

    Every process of a host calls it, and one of them tokenises. Raises ValueError if the tokenizer has no
    end-of-document token, a text cannot be read, or one is shorter than `sequence` + 1 tokens.
    """
    end_of_document(tokenizer)
    suffix = f"{FORMAT} {fingerprint(tokenizer)}"  # now: a tokenizer's state may change while it is used
    return [_prepare(source, tokenizer, sequence, cache_dir, suffix) for source, _ in sources]


def _prepare(source: Source, tokenizer: PreTrainedTokenizerBase, sequence: int, cache_dir: Path, suffix: str) -> Corpus:
    key = hashlib.sha256(f"{source.fingerprint} {suffix}".encode()).hexdigest()[:16]
    entry = cache_dir / f"{Path(source.name).name}-{key}"

    def build(unfinished: Path) -> None:
        unfinished.mkdir()
        tally = tokenize(source, tokenizer, unfinished / "tokens.npy")
        (unfinished / "lines.json").write_text(json.dumps(asdict(tally)))
        _load(unfinished, source, sequence)

    return _load(once_per_host(entry, build), source, sequence)


def _load(entry: Path, source: Source, sequence: int) -> Corpus:
    """Map a source's tokens. Raises ValueError if they do not make one sequence."""
    tokens: Tokens = np.load(entry / "tokens.npy", mmap_mode="r")
    if not num_sequences(tokens, sequence):
        raise ValueError(
            f"data.sequence={sequence}: {source.name} has {len(tokens)} tokens, fewer than one sequence of "
            f"{sequence} + 1; use data.sequence={len(tokens) - 1} or less, or a longer text"
        )
    told = Tally(**json.loads((entry / "lines.json").read_text())).told()
    return Corpus(tokens, told and f"{source.key}: {source.name}: {told}")


def end_of_document(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that follows each document. Raises ValueError if the tokenizer has none."""
    token = tokenizer.eos_token_id
    if not isinstance(token, int):
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path} has no eos_token to put between documents; "
            'set "eos_token" in its tokenizer_config.json'
        )
    return token


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash that changes when the tokenizer may give other tokens."""
    rules = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(f"{type(tokenizer).__name__} {tokenizer.eos_token_id} {rules}".encode()).hexdigest()


def tokenize(source: Source, tokenizer: PreTrainedTokenizerBase, path: Path) -> Tally:
    """Write a source's tokens as a flat .npy of uint16, or uint32 for larger vocabularies, in bounded memory.

    Cutting a long document into pieces may change the tokens at the cuts, one in some ten thousand.
    Returns which lines were left out. Raises ValueError if the text cannot be read or has no token.
    """
    end = end_of_document(tokenizer)
    dtype = np.dtype("<u2" if max(tokenizer.get_vocab().values()) < 2**16 else "<u4")
    tally = Tally()
    num_tokens = num_ends = 0
    with path.open("wb") as file:
        _write_header(file, dtype, 0)
        for pieces in _in_batches(source.pieces(tally)):
            texts = [piece.text for piece in pieces]
            # verbose=False: a document may well be longer than the model's longest sequence
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
        told = f" ({tally.told()})" if tally.skipped else ""
        raise ValueError(
            f"{source.key}: {source.name} gives no token with the tokenizer {tokenizer.name_or_path} of "
            f"{len(tokenizer)} tokens{told}; give a text that is not blank, or a model with all its tokenizer files"
        )
    return tally


def _write_header(file: BinaryIO, dtype: np.dtype[np.unsignedinteger], length: int) -> None:
    """Write the header of a .npy file; numpy pads it, so that its own length does not depend on `length`."""
    np.lib.format.write_array_header_1_0(file, {"descr": dtype.str, "fortran_order": False, "shape": (length,)})


def _in_batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Group pieces until they hold BATCH_CHARS characters."""
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
    """Return how many windows of `sequence` + 1 tokens, overlapping by one, a text holds.

    So each token but the first is predicted once per epoch; a rest shorter than a sequence is left out.
    """
    return max(0, len(tokens) - 1) // sequence


def read_windows(corpora: Sequence[Tokens], sequence: int, sources: Ints, indices: Ints) -> Ints:
    """Read sequences, given by source and index [n], off the disk: [n, T + 1], the inputs and the last label.

    Sequence i of a text is its tokens i T .. (i + 1) T: neighbours share one token, which only the first of them
    has as a target.
    """
    windows = np.empty((len(sources), sequence + 1), dtype=np.int64)
    for window, source, index in zip(windows, sources, indices, strict=True):
        window[:] = corpora[source][index * sequence : (index + 1) * sequence + 1]
    return windows


def in_micros(rows: Ints, micro: int) -> Tensor:
    """Return rows [M * B, T] as a new tensor [M, B, T]."""
    return torch.from_numpy(rows.copy()).view(-1, micro, rows.shape[1])


def sampled(corpora: Sequence[Tokens]) -> str:
    """Return what differs between two hosts whose texts do: lengths, and a sample of the tokens."""
    return repr([(len(tokens), tokens[:: max(1, len(tokens) // 1000)].tolist()) for tokens in corpora])
