"""The arrays of a tokenized source while they are written."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import TracebackType

import numpy as np

from acsgd.io.data.tokens.encode import Encoded
from acsgd.io.files.arrays import ArrayWriter

TOKENS, OFFSETS, TARGETS, LABELS, TYPES = "tokens.npy", "offsets.npy", "targets.npy", "labels.npy", "types.npy"
"""Files of the arrays of a Corpus. TARGETS is absent if all tokens are targets, LABELS and TYPES if there are none."""


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
