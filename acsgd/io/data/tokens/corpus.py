"""Tokenized sources: arrays in memory, or in the files of a cache entry."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from acsgd.io.data.sampler import Ints
from acsgd.io.data.tokens.encode import Encoded
from acsgd.io.data.tokens.ends import TextEnds
from acsgd.io.files.arrays import Array, ArrayFile, ArrayWriter, sample
from acsgd.io.files.entry import Entry

TOKENS, OFFSETS, TARGETS, LABELS, TYPES = "tokens.npy", "offsets.npy", "targets.npy", "labels.npy", "types.npy"
"""Files of the arrays of a Corpus. TARGETS is absent if all tokens are targets, LABELS and TYPES if there are none."""


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
    ends: TextEnds = TextEnds()
    """How its learned texts end."""
    format: str = ""
    """Name of the format of its records."""

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


class CorpusWriter:
    """Writes the arrays of a Corpus to a directory. To be used as a context manager; removes absent arrays at the end.

    token_dtype: of TOKENS.
    """

    def __init__(self, directory: Path, token_dtype: np.dtype[np.unsignedinteger]) -> None:
        self.num_tokens = 0
        self.num_of_text = 0
        """Number of tokens without special tokens around documents."""
        self.num_targets = 0
        self.largest = 0
        """Largest token."""
        self._directory = directory
        dtypes = {TOKENS: token_dtype.str, OFFSETS: "<i8", TARGETS: "u1", LABELS: "<f8", TYPES: "u1"}
        self._arrays = {name: ArrayWriter(directory / name, np.dtype(dtype)) for name, dtype in dtypes.items()}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> CorpusWriter:
        for array in self._arrays.values():
            self._stack.enter_context(array)
        self._arrays[OFFSETS].append(np.zeros(1))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)
        absent = [name for name in (LABELS, TYPES) if not self._arrays[name].length]
        absent += [TARGETS] if self.num_targets == self.num_tokens else []
        for name in absent:
            (self._directory / name).unlink()

    def append(self, encoded: Encoded) -> None:
        """Write the tokens and labels of the next examples."""
        self._arrays[OFFSETS].append(self.num_tokens + encoded.ends)
        self._arrays[TOKENS].append(encoded.tokens)
        self._arrays[TARGETS].append(encoded.targets)
        self._arrays[LABELS].append(encoded.labels)
        if encoded.types is not None:
            self._arrays[TYPES].append(encoded.types)
        self.num_tokens += len(encoded.tokens)
        self.num_of_text += encoded.num_of_text
        self.num_targets += int(encoded.targets.sum())
        self.largest = max(self.largest, int(encoded.tokens.max(initial=0)))


def open_arrays(entry: Entry) -> dict[str, Any]:
    """Return the arrays of the Corpus in a cache entry, by the names of its fields. Raises CorruptFileError."""
    files = (TOKENS, OFFSETS, *(name for name in (TARGETS, LABELS, TYPES) if name in entry))
    return {name.removesuffix(".npy"): ArrayFile(entry, name) for name in files}
