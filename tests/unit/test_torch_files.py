"""Files that torch.save wrote: their tensors are read bit for bit, and nothing in them is executed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from acsgd.errors import CorruptFileError
from acsgd.shards.files import read_torch_file, verify_torch_file

CONTENT = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([1.5], dtype=torch.bfloat16)}


def read(path: Path) -> dict[str, torch.Tensor]:
    verify_torch_file(path)
    return read_torch_file(path)


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "torch < 1.6"])
def test_tensors_are_read_bit_for_bit(is_zip: bool, tmp_path: Path) -> None:
    torch.save(CONTENT, tmp_path / "x.pt", _use_new_zipfile_serialization=is_zip)
    found = read(tmp_path / "x.pt")
    assert list(found) == list(CONTENT)
    assert all(found[key].dtype == x.dtype and torch.equal(found[key], x) for key, x in CONTENT.items())


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "torch < 1.6"])
def test_parameters_and_state_dicts_are_tensors(is_zip: bool, tmp_path: Path) -> None:
    module = nn.Linear(2, 3)
    for content in (module.state_dict(), dict(module.named_parameters())):
        torch.save(content, tmp_path / "x.pt", _use_new_zipfile_serialization=is_zip)
        found = read(tmp_path / "x.pt")
        assert torch.equal(found["weight"], module.weight)
        assert not found["weight"].requires_grad


class Code:
    """An object that runs a command when it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.witness}",)


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "torch < 1.6"])
def test_code_is_not_executed(is_zip: bool, tmp_path: Path) -> None:
    path, witness = tmp_path / "x.pt", tmp_path / "executed"
    torch.save(CONTENT | {"c": Code(witness)}, path, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(ValueError, match="besides tensors") as caught:
        read(path)
    assert str(caught.value) == (
        f"{path} holds posix.system besides tensors, which could run code, and is not read; save a dict of tensors, or "
        "download the model in safetensors"
    )
    assert not witness.exists()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (nn.Linear(2, 2), "holds torch.nn.modules.linear.Linear besides tensors"),
        (torch.ones(2), "holds a Tensor, not tensors by name"),
        ({"step": 3}, "holds a int as 'step', not a tensor"),
        ({3: torch.ones(2)}, "holds a Tensor as 3, not a tensor"),
        ({"a": torch.eye(2).to_sparse()}, "a is a tensor without plain values"),
        ({"a": torch.ones(2, device="meta")}, "a is a tensor without plain values"),
    ],
)
def test_what_is_no_tensor_is_named(content: object, problem: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=problem):
        read(tmp_path / "x.pt")


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda raw: b"",
    "cut after the magic": lambda raw: raw[:4],
    "cut in the tensors": lambda raw: raw[: len(raw) // 2],
    "last byte missing": lambda raw: raw[:-1],
    "a name that is not UTF-8": lambda raw: (
        raw[: raw.rindex(b"data.pkl")] + b"\xff" + raw[raw.rindex(b"data.pkl") + 1 :]
    ),
    "not of torch": lambda raw: b"garbage" * 100,
    "one bit of a tensor": lambda raw: raw.replace(torch.tensor([7.0]).numpy().tobytes(), b"\1\0\0\0"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named(damage: str, tmp_path: Path) -> None:
    """torch.load itself returns the flipped bit."""
    path = tmp_path / "x.pt"
    torch.save({"a": torch.arange(1000.0)}, path)
    raw = path.read_bytes()
    path.write_bytes(DAMAGES[damage](raw))
    assert path.read_bytes() != raw
    with pytest.raises(CorruptFileError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path} is ")


def test_only_files_of_the_directory_are_opened(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    torch.save(CONTENT, tmp_path / "x.pt")
    (tmp_path / "model" / "x.pt").symlink_to(tmp_path / "x.pt")
    with pytest.raises(CorruptFileError, match="outside of the directory"):
        read(tmp_path / "model" / "x.pt")
