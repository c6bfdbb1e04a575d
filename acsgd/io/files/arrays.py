"""One-dimensional arrays in cache entries: .npy files, written piece by piece and read slice by slice."""

from __future__ import annotations

import io
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from acsgd.errors import CorruptFileError
from acsgd.io.files.entry import Entry

NEAR_BYTES = 4096
"""Distance up to which values are read together with those between them, which takes less time than one by one."""


class Array(Protocol):
    """A one-dimensional array of integers, in memory or on disk."""

    def __len__(self) -> int: ...
    def __getitem__(self, span: slice, /) -> NDArray[Any]: ...


class ArrayFile:
    """An array in a file of a cache entry, read from disk and verified when it is used."""

    def __init__(self, entry: Entry, name: str) -> None:
        """Read the header. Raises CorruptFileError."""
        self._entry = entry
        self._file = entry.file(name)
        head = io.BytesIO(self._file.read(0, 1024))
        np.lib.format.read_magic(head)
        (self._length,), _, self._dtype = np.lib.format.read_array_header_1_0(head)
        self._start = head.tell()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, span: slice, /) -> NDArray[Any]:
        """Read values from disk. Raises CorruptFileError, after which the entry is no longer valid."""
        try:
            return self._read(span)
        except CorruptFileError as error:
            is_invalid = self._entry.invalidate()
            remedy = "start again, and the text is tokenized again" if is_invalid else f"remove {self._entry.path}"
            raise CorruptFileError(error.path, f"{error.problem}; {remedy}") from None

    def verify_sample(self) -> None:
        """Raise CorruptFileError if a sample of the values is not as it was written."""
        self._read(sample(self))

    def _read(self, span: slice) -> NDArray[Any]:
        start, stop, step = span.indices(self._length)
        size = self._dtype.itemsize
        if 0 < step * size <= NEAR_BYTES:
            every = self._file.read(self._start + start * size, (stop - start) * size)
            return np.frombuffer(every, self._dtype)[::step]
        single = (self._file.read(self._start + i * size, size) for i in range(start, stop, step))
        return np.frombuffer(b"".join(single), self._dtype)


class ArrayWriter:
    """Writes an array of unknown length. To be used as a context manager."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.length = 0
        self._dtype = dtype
        self._file = path.open("wb")

    def __enter__(self) -> ArrayWriter:
        self._write_header()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if error is None:
                self._file.seek(0)
                self._write_header()

    def append(self, values: NDArray[Any]) -> None:
        """Write values at the end."""
        self._file.write(values.astype(self._dtype, copy=False).tobytes())
        self.length += len(values)

    def _write_header(self) -> None:
        """Write the header of a .npy file. numpy pads it, so its size does not depend on the length."""
        fields = {"descr": self._dtype.str, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self._file, fields)


def sample(array: Array) -> slice:
    """Return a slice of about 1000 values, evenly spaced."""
    return slice(None, None, max(1, len(array) // 1000))
