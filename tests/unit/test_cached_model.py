"""The cache of converted models repairs itself, and continues what was killed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
import torch
from lib.processes import CONTEXT, WAIT_S, started, wait_for_a_signal
from lib.saved import SMALL, small_run
from torch import Tensor

from acsgd.config.options import Config
from acsgd.errors import CorruptFileError
from acsgd.launch import Launch
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.plan.job import prepare
from acsgd.shards import convert
from acsgd.shards.manifest import StoredFile


def convert_and_wait(config: Config, writing: Event) -> None:
    """Convert the model of a run in a process that waits when two of its layers are written."""
    write_layer, written = convert.write_layer, list[str]()

    def write(directory: Path, layer: str, tensors: Mapping[str, Tensor]) -> StoredFile:
        if len(written) == 2:
            writing.set()
            wait_for_a_signal()
        written.append(layer)
        return write_layer(directory, layer, tensors)

    convert.write_layer = write  # type: ignore[assignment]
    open_weight_source(prepare(config, Launch()))


def test_a_conversion_that_was_killed_continues_at_the_next_start(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    config, writing = small_run(tiny_model("gpt2", **SMALL), tmp_path / "runs" / "a"), CONTEXT.Event()
    with started(convert_and_wait, config, writing):
        assert writing.wait(WAIT_S)
    [partial] = (tmp_path / "runs" / "cache" / "models").iterdir()
    before = {path.name: path.stat().st_mtime_ns for path in partial.glob("*/*.safetensors")}
    assert before.keys() == {"embed.safetensors", "block-00000.safetensors"}
    open_weight_source(prepare(config, Launch()))
    [model] = (tmp_path / "runs" / "cache" / "models").iterdir()
    after = {path.name: path.stat().st_mtime_ns for path in model.glob("*.safetensors")}
    assert after.keys() == before.keys() | {"head.safetensors"}
    assert before.items() < after.items()


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
