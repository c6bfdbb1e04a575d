"""Files of a model directory: which may be opened, and JSON objects, safetensors and torch.save files in them."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError, safe_open

from acsgd.errors import CorruptFileError, is_out_of_memory, kind_of_file

if TYPE_CHECKING:
    from torch import Tensor

GIT_LFS = b"version https://git-lfs.github.com/spec/"
"""First bytes of the pointer that Git LFS leaves in place of a file that was not downloaded."""
MAX_JSON_BYTES = 2**28
CONFIG = "config.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Files of an adapter directory of PEFT."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "spm.model",
    "sentencepiece.bpe.model",
)
"""A directory with a tokenizer has at least one of these."""


def check_file_name(name: str) -> None:
    """Raise ValueError unless `name` is the name of a file inside a directory, without a path."""
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise ValueError(f"{name!r} is not a file name; files lie directly in the directory")
    if not _is_utf8(name):
        raise ValueError(f"{name!r} is not UTF-8")
    if len(name.encode()) > 255:
        raise ValueError(f"{name[:40]!r}... is longer than the 255 bytes of a file name")


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def unusable(path: Path) -> str | None:
    """Return why a file of a model directory must not be opened, as a clause; None if it may.

    Only regular files inside the directory may, and links to them. In the cache of the Hugging Face Hub, links lead to
    the blobs of the same repository. Opens nothing but regular files, so it does not block on a named pipe.
    """
    if not _is_utf8(str(path)):  # safetensors requires it
        return "has a path that is not UTF-8; rename it"
    try:
        target = Path(os.path.realpath(path, strict=True))
        mode = target.stat().st_mode
    except OSError as error:
        if path.is_symlink():
            return f"is a link to {os.readlink(path)}, which does not exist; put the file in its place"
        return "is missing" if error.errno == errno.ENOENT else f"cannot be read ({error.strerror})"
    if not any(target.is_relative_to(root) for root in _roots(path.parent)):
        return f"is a link to {target}, outside of the directory; put a copy of the file in its place"
    if not stat.S_ISREG(mode):
        return f"is a {kind_of_file(mode)}, not a file; rename it or move it elsewhere"
    try:
        with target.open("rb") as file:
            start = file.read(len(GIT_LFS))
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return describe_pointer(path) if start == GIT_LFS else None


def describe_pointer(path: Path) -> str:
    """Return a predicate on a pointer of Git LFS."""
    return f"is a Git LFS pointer, not the file itself; run `git lfs pull` in {path.parent}"


def _roots(directory: Path) -> list[Path]:
    """Return the directories in which the files of a model directory may lie."""
    real = directory.resolve()
    # in the cache of the Hub: models--OWNER--NAME/snapshots/REVISION/config.json -> ../../blobs/HASH
    return [real, real.parent.parent / "blobs"] if real.parent.name == "snapshots" else [real]


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory has a tokenizer. Without its files, transformers returns an empty one."""
    return any((directory / name).is_file() for name in TOKENIZER_FILES)


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object of finite numbers in which no key occurs twice. Raises ValueError."""
    if (problem := unusable(path)) is not None:
        raise ValueError(f"{path} {problem}")
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"it has {path.stat().st_size} bytes, more than {MAX_JSON_BYTES}")
        fields = json.loads(
            path.read_bytes().decode(),
            object_pairs_hook=_unique,
            parse_float=_finite,
            parse_constant=_finite,
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte {error.start}); write it again or download it again") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}; correct it or download it again") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path} is not a JSON object; download it again")
    return fields


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} occurs twice")
    return fields


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not a finite number")
    return number


class TensorHeader(NamedTuple):
    """Entry of a tensor in the header of a safetensors file."""

    dtype: str
    """Name in safetensors, such as "BF16"."""
    shape: tuple[int, ...]


def tensor_headers(path: Path) -> dict[str, TensorHeader]:
    """Read the header of a safetensors file: dtype and shape of each tensor, by name. Raises as `open_tensors`."""
    with open_tensors(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, not a dict
        return {name: TensorHeader(each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}


@contextlib.contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file of a model directory as `safe_open` does.

    Raises CorruptFileError if it may not be opened or is not a complete safetensors file.
    """
    if (problem := unusable(path)) is not None:
        raise CorruptFileError(path, problem)
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CorruptFileError(
            path, f"is not a complete safetensors file ({_first_line(error)}); copy it or download it again"
        ) from None


@contextlib.contextmanager
def blame(path: Path, problem: str, remedy: str) -> Iterator[None]:
    """Report what a library raises on the content of a file as a ValueError: path, problem, its message, remedy.

    Short memory is no problem of the file, and raised as it is.
    """
    try:
        yield
    except Exception as error:  # transformers and tokenizers raise errors of every class, also Exception itself
        if is_out_of_memory(error):
            raise
        raise ValueError(f"{path} {problem}: {_first_line(error)}; {remedy}") from None


def _first_line(error: Exception) -> str:
    """Return the message of a library's error in one line, with its class if the message is a single word."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    if lines and lines[0].endswith(":"):  # the message of a strict dataclass has the cause in its second line
        lines = lines[1:] or lines
    text = lines[0].rstrip(".") if lines else ""
    return text if " " in text else f"{type(error).__name__} {text}".strip()


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
    import torch  # takes seconds, and most files are read without it

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
        if not (isinstance(name, str) and isinstance(tensor, torch.Tensor)):
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
