"""Files of tensors that torch.save wrote, read without running code that they may hold."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import torch
from torch import Tensor

from acsgd.errors import CorruptFileError
from acsgd.shards.files import unusable

ZIP = b"PK\x03\x04"
"""First bytes of a file that torch.save writes. Before torch 1.6 it wrote another format."""
AGAIN = "copy it or download it again"
INCOMPLETE = f"is not a complete file of torch.save; {AGAIN}"


def verify_torch_file(path: Path) -> None:
    """Verify the checksums of a file that torch.save wrote; one of torch < 1.6 has none.

    Reads all of it. Raises CorruptFileError, also if it may not be opened or is not complete.
    """
    if not _is_zip(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            record = archive.testzip()
    except Exception:  # zipfile raises errors of many classes for a damaged file
        raise CorruptFileError(path, INCOMPLETE) from None
    if record is not None:
        raise CorruptFileError(path, f"is corrupt: the checksum of {record} in it differs; {AGAIN}")


def read_torch_file(path: Path) -> dict[str, Tensor]:
    """Read a file in which torch.save wrote tensors by name.

    They lie in the memory-mapped file, or in memory if torch < 1.6 wrote it. Raises CorruptFileError if it may not be
    opened or is not complete, ValueError if it holds anything else than tensors: nothing in it is executed.
    """
    is_zip = _is_zip(path)
    try:
        content = torch.load(str(path), map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # torch, too
        if name := re.search(r"\bGLOBAL ([\w.]+)", str(error)):
            raise ValueError(
                f"{path} holds {name[1]} besides tensors, which could run code, and is not read; save a dict of "
                "tensors, or download the model in safetensors"
            ) from None
        raise CorruptFileError(path, INCOMPLETE) from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not tensors by name; save a dict of tensors")
    for name, tensor in content.items():
        if not (isinstance(name, str) and isinstance(tensor, Tensor)):
            raise ValueError(
                f"{path} holds a {type(tensor).__name__} as {name!r}, not a tensor; save a dict of tensors"
            )
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            raise ValueError(f"{path}: {name} is a tensor without plain values; save it dense and not quantized")
    return {name: tensor.detach() for name, tensor in content.items()}


def _is_zip(path: Path) -> bool:
    """Whether a file has the format of torch >= 1.6. Raises CorruptFileError if it may not be opened."""
    if (problem := unusable(path)) is not None:
        raise CorruptFileError(path, problem)
    with path.open("rb") as file:
        return file.read(len(ZIP)) == ZIP
