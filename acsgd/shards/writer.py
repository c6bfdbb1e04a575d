"""Write safetensors files without holding all of their tensors at once."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from acsgd.io.files.checksum import new_file_checksum
from acsgd.shards.files import TensorHeader

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


class TensorWriter:
    """A new safetensors file, whose tensors are written one by one. It is complete when all are."""

    def __init__(self, path: Path, headers: Mapping[str, TensorHeader]) -> None:
        """Write the header. Raises OSError."""
        names = sorted(
            headers, key=lambda name: (-DTYPES[headers[name].dtype].itemsize, name)
        )  # each aligned to its dtype
        self.offsets: dict[str, int] = {}
        """Position of each tensor after the header, in ascending order."""
        fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            self.offsets[name], end = end, end + bytes_of(headers[name])
            dtype, shape = headers[name]
            fields[name] = {"dtype": dtype, "shape": shape, "data_offsets": [self.offsets[name], end]}
        text = json.dumps(fields, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.header = len(text).to_bytes(8, "little") + text
        """First bytes of the file."""
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
            self._file.write(chunk)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
