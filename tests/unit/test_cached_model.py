"""The cache of converted models repairs itself."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lib.saved import SMALL, small_run

from acsgd.errors import CorruptFileError
from acsgd.launch import Launch
from acsgd.run.inputs import open_weight_source
from acsgd.run.job import prepare


def test_a_damaged_model_is_converted_again(
    tiny_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the start if a file is missing or of another size, else at the next start."""
    job = prepare(small_run(tiny_model("gpt2", **SMALL), tmp_path / "runs" / "a"), Launch())
    key = "transformer.wpe.weight"
    intact = open_weight_source(job).tensor("embed", key).clone()
    [model] = (tmp_path / "runs" / "cache" / "models").iterdir()
    shutil.copytree(model, tmp_path / "kept")
    raw = (model / "embed.safetensors").read_bytes()
    capsys.readouterr()
    cases = {
        "embed.safetensors": [raw[:-1], raw + b"x", b"", None, raw[:-1] + bytes([raw[-1] ^ 1])],
        "manifest.json": [b"", None],
    }
    for name, contents in cases.items():
        for number, content in enumerate(contents):
            case = f"{name} {number}"
            (model / name).unlink()
            if content is not None:
                (model / name).write_bytes(content)
            source = open_weight_source(job)
            if name == "embed.safetensors" and number == 4:
                assert not capsys.readouterr().err
                with pytest.raises(CorruptFileError, match=r"; start again, and the model is converted again$"):
                    source.tensor("embed", key)
                source = open_weight_source(job)
            note = capsys.readouterr().err
            assert note.startswith(str(model)), case
            assert note.endswith(f"; {model} is built again now\n"), case
            assert torch.equal(source.tensor("embed", key), intact), case
            for file in (tmp_path / "kept").iterdir():
                assert (model / file.name).read_bytes() == file.read_bytes(), case
