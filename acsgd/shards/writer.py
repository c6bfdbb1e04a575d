"""Safetensors files that are written, sent or read without holding all of their tensors at once."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from acsgd.errors import CorruptFileError
from acsgd.io.files.atomic import naming
from acsgd.io.files.checksum import new_file_checksum
from acsgd.shards.files import TensorHeader, tensor_headers

CHUNK = 2**20
"""Bytes written at a time: they fit into the cache of a core."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""torch dtypes by their names in safetensors; those of floating-point numbers first."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""Names of torch dtypes in safetensors."""


def header_of(tensor: Tensor) -> TensorHeader:
    """Return the entry of a tensor in the header of a file."""
    return TensorHeader(NAMES[tensor.dtype], tuple(tensor.shape))


def bytes_of(header: TensorHeader) -> int:
    """Return the size of a tensor in a file, bytes."""
    return math.prod(header.shape) * DTYPES[header.dtype].itemsize


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> str:
    """Write a safetensors file and return its checksum, which is computed meanwhile. Raises OSError."""
    checksum = new_file_checksum()
    headers = {name: header_of(tensor) for name, tensor in tensors.items()}
    with TensorWriter(path, headers) as file:
        checksum.update(file.header)
        for name in file.offsets:
            file.write(name, tensors[name], checksum.update)
    return checksum.hexdigest()


def layout(headers: Mapping[str, TensorHeader]) -> tuple[bytes, dict[str, int]]:
    """Return the first bytes of a file, and the position of each tensor after them, in ascending order."""
    names = sorted(headers, key=lambda name: (-DTYPES[headers[name].dtype].itemsize, name))  # each aligned to its dtype
    offsets: dict[str, int] = {}
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        offsets[name], end = end, end + bytes_of(headers[name])
        dtype, shape = headers[name]
        fields[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offsets[name], end]}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offsets


class TensorWriter:
    """A new safetensors file, whose tensors are written one by one. It is complete when all are."""

    def __init__(self, path: Path, headers: Mapping[str, TensorHeader]) -> None:
        """Write the header. Raises OSError."""
        self.header, self.offsets = layout(headers)
        self._path = path
        self._file = path.open("wb")
        self._file.write(self.header)

    def write(self, name: str, tensor: Tensor, use: Callable[[memoryview], object] = bool) -> None:
        """Write a tensor of the shape and dtype in the header. use: is called with every chunk. Raises OSError."""
        data: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        data = memoryview(data)
        self._file.seek(len(self.header) + self.offsets[name])
        for start in range(0, len(data), CHUNK):
            chunk = data[start : start + CHUNK]
            use(chunk)
            with naming(self._path):
                self._file.write(chunk)

    def close(self) -> None:
        """Close the file."""
        with naming(self._path):
            self._file.close()

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def open_weights(path: Path) -> IO[bytes]:
    """Open the safetensors file that has the tensors of a layer's file except for the state of the optimizer.

    It exists nowhere: what is read comes from that file. Raises CorruptFileError, OSError.
    """
    return io.BufferedReader(_WeightsFile(path), CHUNK)


class _WeightsFile(io.RawIOBase):
    def __init__(self, path: Path) -> None:
        kept = {name: header for name, header in tensor_headers(path).items() if "/" not in name}
        header, offsets = layout(kept)
        self._file = path.open("rb")
        begin = 8 + int.from_bytes(self._file.read(8), "little")
        stored = json.loads(self._file.read(begin - 8))
        self._header, self._position, self._size = header, 0, len(header) + sum(map(bytes_of, kept.values()))
        self._tensors = [
            (len(header) + offset, begin + stored[name]["data_offsets"][0], bytes_of(kept[name]))
            for name, offset in offsets.items()
        ]
        """Position in this file and in the other one, and size, of each tensor, in ascending order."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Read from the header, or from one tensor. Returns 0 at the end."""
        data = self._header[self._position : self._position + len(buffer)]
        for position, source, size in self._tensors:
            if not data and position <= self._position < position + size:
                self._file.seek(source + self._position - position)
                data = self._file.read(min(len(buffer), position + size - self._position))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


class OpenTensor(NamedTuple):
    """A tensor in a safetensors file, which stays open and may be removed meanwhile."""

    path: Path
    file: BinaryIO
    start: int
    """Position of its first byte."""
    header: TensorHeader

    def read_into(self, target: Tensor) -> None:
        """Read the values into a contiguous tensor of the host with this shape. Raises CorruptFileError.

        Leaves nothing else in the memory of this process, as a mapped file would.
        """
        dtype = DTYPES[self.header.dtype]
        values = target if target.dtype == dtype else torch.empty(self.header.shape, dtype=dtype)
        buffer, done = memoryview(values.view(-1).view(torch.uint8).numpy().data), 0
        while done < len(buffer):
            try:
                count = os.preadv(self.file.fileno(), [buffer[done:]], self.start + done)
            except OSError as error:
                raise CorruptFileError(self.path, f"cannot be read ({error.strerror}); start the run again") from error
            if not count:
                raise CorruptFileError(self.path, "was made shorter while the run reads it; start the run again")
            done += count
        if values is not target:
            target.copy_(values)


def open_stored(path: Path) -> dict[str, OpenTensor]:
    """Open a safetensors file, and return where each of its tensors is. Raises as `open_tensors`."""
    headers, file = tensor_headers(path), path.open("rb", buffering=0)
    size = int.from_bytes(file.read(8), "little")
    fields = json.loads(file.read(size))
    starts = {name: 8 + size + fields[name]["data_offsets"][0] for name in headers}
    return {name: OpenTensor(path, file, starts[name], header) for name, header in headers.items()}
