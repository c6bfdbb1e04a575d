"""Law: a tensor of a checkpoint that does not fit is found before its use, though all hashes match."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lib.cache import share_cache
from lib.saved import SMALL, assert_describes_its_model, rewrite_tensors, small_run, train_alone
from torch import Tensor

from acsgd.config.options import CheckpointConfig, Config, LogConfig, ReplicaConfig, RunConfig
from acsgd.errors import CorruptFileError
from acsgd.io.checkpoint.inspect import inspect
from acsgd.io.checkpoint.resume import Checkpoint
from acsgd.launch import Launch
from acsgd.run.plan.job import Job, prepare
from acsgd.run.setup.resume import check_files
from acsgd.shards.convert import from_hf
from acsgd.shards.disk import list_model_files
from acsgd.shards.export import to_hf
from acsgd.shards.manifest import Manifest

TinyModel = Callable[..., Path]
Change = Callable[[dict[str, Tensor]], None]
FILE = "block-00000.safetensors"
WEIGHT = "transformer.h.0.mlp.c_fc.weight"
BIAS = "transformer.h.0.mlp.c_fc.bias"


def replace(key: str, change: Callable[[Tensor], Tensor]) -> Change:
    """Return a function that replaces one tensor."""

    def changed(tensors: dict[str, Tensor]) -> None:
        tensors[key] = change(tensors[key]).contiguous()

    return changed


def fill_first(key: str, value: float) -> Change:
    """Return a function that sets one value of a tensor."""

    def changed(tensors: dict[str, Tensor]) -> None:
        tensors[key].view(-1)[0] = value

    return changed


def drop(*keys: str) -> Change:
    return lambda tensors: [tensors.pop(key) for key in keys] and None


def drop_all(name: str) -> Change:
    return lambda tensors: [tensors.pop(key) for key in list(tensors) if key.startswith(f"{name}/")] and None


CHANGES: dict[str, tuple[Change, str]] = {
    "a short moment": (replace(f"exp_avg_sq/{BIAS}", lambda x: x[:-1]), f"exp_avg_sq/{BIAS} has shape [31], expected"),
    "a long moment": (replace(f"exp_avg/{BIAS}", lambda x: torch.cat([x, x])), f"exp_avg/{BIAS} has shape [64]"),
    "a flat moment": (
        replace(f"exp_avg/{WEIGHT}", torch.flatten),
        f"exp_avg/{WEIGHT} has shape [256]",
    ),
    "a transposed moment": (replace(f"exp_avg/{WEIGHT}", torch.t), f"exp_avg/{WEIGHT} has shape [32, 8]"),
    "a moment in fp64": (replace(f"exp_avg/{BIAS}", torch.Tensor.double), "has dtype float64, expected float32"),
    "a moment is gone": (drop(f"exp_avg/{BIAS}"), f"lacks exp_avg/{BIAS}"),
    "the moments of a weight are gone": (
        drop(*(f"{name}/{BIAS}" for name in ("step", "exp_avg", "exp_avg_sq"))),
        "lacks",
    ),
    "all second moments are gone": (drop_all("exp_avg_sq"), "lacks exp_avg_sq/transformer.h.0.ln_1.weight"),
    "NaN in a moment": (fill_first(f"exp_avg/{WEIGHT}", torch.nan), "has values that are not finite"),
    "a negative second moment": (fill_first(f"exp_avg_sq/{WEIGHT}", -1.0), "has negative values"),
    "a step count per value": (
        replace(f"step/{BIAS}", lambda x: x.expand(32)),
        f"step/{BIAS} has shape [32]",
    ),
    "a negative step count": (fill_first(f"step/{BIAS}", -2.0), f"step/{BIAS} has negative values"),
    "another optimizer's state": (
        lambda tensors: tensors.update({f"momentum/{BIAS}": torch.zeros(32)}),
        f"holds momentum/{BIAS}, which the run did not save",
    ),
    "the moments of another layer": (
        lambda tensors: tensors.update({"exp_avg/transformer.wte.weight": torch.zeros(1)}),
        "holds exp_avg/transformer.wte.weight",
    ),
    "a transposed weight": (replace(WEIGHT, torch.t), f"{WEIGHT} has shape [32, 8], expected [8, 32]"),
    "a weight in bf16": (replace(WEIGHT, torch.Tensor.bfloat16), f"{WEIGHT} has dtype bfloat16, expected float32"),
    "a weight is gone": (drop(WEIGHT), f"lacks {WEIGHT}"),
    "inf in a weight": (fill_first(WEIGHT, torch.inf), f"{WEIGHT} has values that are not finite"),
    "a weight too many": (lambda tensors: tensors.update({"lm_head.weight": torch.zeros(1)}), "holds lm_head.weight"),
}


@pytest.fixture(scope="module")
def finished(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Return a run with a checkpoint after each of its two steps."""
    config = small_run(tiny_model("gpt2", **SMALL), tmp_path_factory.mktemp("contents") / "runs" / "run")
    train_alone(config)
    return config


@pytest.fixture(scope="module")
def job(finished: Config) -> Job:
    return prepare(finished, Launch())


def copied(job: Job, target: Path) -> Path:
    """Copy the checkpoint of the last step."""
    return Path(shutil.copytree(job.paths.checkpoints.of(2), target / "step-00000002"))


def test_a_tensor_that_does_not_fit_is_named_by_a_start_and_by_inspect(job: Job, tmp_path: Path) -> None:
    check_files(job, Checkpoint.open(job.paths.checkpoints.of(2)))
    for name, (change, message) in CHANGES.items():
        checkpoint = copied(job, tmp_path / name)
        rewrite_tensors(checkpoint / FILE, change)
        with pytest.raises(CorruptFileError) as error:
            check_files(job, Checkpoint.open(checkpoint))
        assert str(error.value).startswith(f"{checkpoint / FILE} is invalid: "), name
        assert message in str(error.value), name
        (report,) = inspect(checkpoint)
        assert report.errors == [str(error.value)], name


def test_recorded_tensors_are_those_of_the_model_that_is_built(job: Job, tiny_model: TinyModel, tmp_path: Path) -> None:
    from_hf(tiny_model("qwen2"), tmp_path)
    for path in (job.paths.checkpoints.of(2), tmp_path):
        assert_describes_its_model(path)


def test_an_older_manifest_or_another_config_does_not_hide_a_tensor_that_does_not_fit(job: Job, tmp_path: Path) -> None:
    """A weight and its moments of the same wrong shape; then another size in config.json, with files of the old one."""
    older = copied(job, tmp_path / "older")
    for key in (f"exp_avg_sq/{BIAS}", f"exp_avg/{BIAS}", BIAS):
        rewrite_tensors(older / FILE, replace(key, lambda x: x[:-1]))
    (recorded,) = inspect(older)
    dataclasses.replace(Manifest.read(older), tensors=None).write(older)
    (built,) = inspect(older)
    assert f"{BIAS} has shape [31], expected [32]" in recorded.errors[0]
    assert built.errors == recorded.errors
    other = copied(job, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"n_positions": 64}))
    manifest = Manifest.read(other)
    dataclasses.replace(manifest, model_files=list_model_files(other)).write(other)
    (report,) = inspect(other)
    assert "transformer.wpe.weight has shape [32, 8], expected [64, 8]" in report.errors[0]


def test_a_run_resumes_from_an_older_checkpoint_if_a_moment_does_not_fit(
    finished: Config, job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    """A short moment would otherwise let the optimizer write past its end."""
    expected = Manifest.read(job.paths.checkpoints.of(2))
    rewrite_tensors(job.paths.checkpoints.of(2) / FILE, CHANGES["a short moment"][0])
    train_alone(printing(finished))
    printed = capsys.readouterr().out
    assert (
        f"set aside a checkpoint: {job.paths.checkpoints.of(2) / FILE} is invalid: exp_avg_sq/{BIAS} has shape"
        in printed
    )
    assert f"resuming from {job.paths.checkpoints.of(1)}" in printed
    assert Manifest.read(job.paths.checkpoints.of(2)) == expected


def printing(config: Config, **optim: Any) -> Config:
    """Return a config of the same run that prints its notes."""
    return dataclasses.replace(
        config,
        log=dataclasses.replace(config.log, to="jsonl,print"),
        optim=dataclasses.replace(config.optim, **optim),
    )


def test_weights_that_are_not_finite_are_neither_exported_nor_trained_from(
    finished: Config, job: Job, tmp_path: Path
) -> None:
    change, message = CHANGES["inf in a weight"]
    checkpoint = copied(job, tmp_path)
    rewrite_tensors(checkpoint / FILE, change)
    (tmp_path / "hf").mkdir()
    with pytest.raises(CorruptFileError) as error:
        to_hf(checkpoint, tmp_path / "hf")
    assert message in str(error.value)
    start = dataclasses.replace(finished, log=LogConfig(dir=str(tmp_path / "run"), to="jsonl"))
    share_cache(Path(finished.model.name), Path(start.log.dir))
    with pytest.raises(CorruptFileError) as error:
        train_alone(dataclasses.replace(start, model=dataclasses.replace(start.model, name=str(checkpoint))))
    assert message in str(error.value)


def test_weights_of_a_converted_model_are_checked_too(tiny_model: TinyModel, tmp_path: Path) -> None:
    from_hf(tiny_model("gpt2", **SMALL), tmp_path)
    (report,) = inspect(tmp_path)
    assert report.errors == []
    rewrite_tensors(tmp_path / FILE, replace(WEIGHT, lambda x: x.to(torch.int64)))
    (report,) = inspect(tmp_path)
    expected = f"{WEIGHT} has dtype int64, expected bfloat16 or float16 or float32 or float64"
    assert report.errors == [f"{tmp_path / FILE} is invalid: {expected}"]


def copied_run(config: Config, job: Job, directory: Path) -> Config:
    """Copy a run as it was after its first step; return a config that resumes and prints it."""
    shutil.copytree(job.paths.checkpoints.of(1), directory / "checkpoints" / "step-00000001")
    share_cache(Path(config.model.name), directory)
    return dataclasses.replace(printing(config), log=LogConfig(dir=str(directory), to="jsonl,print"))


def test_a_resumed_run_reports_options_that_differ_from_the_checkpoint(
    finished: Config, job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    note = "options that differ from those of the checkpoint: "
    same = copied_run(finished, job, tmp_path / "same" / "run")
    train_alone(dataclasses.replace(same, checkpoint=CheckpointConfig(keep=3), run=RunConfig(timeout=30)))
    assert note not in capsys.readouterr().out
    assert Manifest.read(tmp_path / "same/run/checkpoints/step-00000002").layers == (
        Manifest.read(job.paths.checkpoints.of(2)).layers
    )
    other = copied_run(finished, job, tmp_path / "other" / "run")
    train_alone(
        dataclasses.replace(
            other,
            model=dataclasses.replace(other.model, dtype="bf16"),
            optim=dataclasses.replace(other.optim, lr=5e-4, betas=(0.8, 0.95), weight_decay=0.0, warmup=1, spike=2.0),
            dp=ReplicaConfig("cocktail:topk=0.5"),
            pp=dataclasses.replace(other.pp, forward="fixpoint:bits=8"),
        )
    )
    (printed,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(note)]
    assert set(printed.removeprefix(note).split("; ")) == {
        "model.dtype: fp32 -> bf16",
        "optim.lr: 0.001 -> 0.0005",
        "optim.betas: (0.9, 0.999) -> (0.8, 0.95)",
        "optim.weight_decay: 0.01 -> 0.0",
        "optim.warmup: 0 -> 1",
        "optim.spike: not set -> 2.0",
        "dp.mode: allreduce -> cocktail:topk=0.5",
        "pp.forward: none -> fixpoint:bits=8",
    }


def test_a_checkpoint_without_options_resumes_and_is_checked(finished: Config, job: Job, tmp_path: Path) -> None:
    """As older versions wrote it."""
    config = copied_run(finished, job, tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000001"
    manifest = Manifest.read(checkpoint)
    assert manifest.run is not None
    run = {key: value for key, value in manifest.run.items() if key not in ("options", "replicas")}
    dataclasses.replace(manifest, run=run).write(checkpoint)
    train_alone(config)
    resumed = Manifest.read(tmp_path / "run/checkpoints/step-00000002")
    assert resumed.layers == Manifest.read(job.paths.checkpoints.of(2)).layers
    rewrite_tensors(checkpoint / FILE, CHANGES["a short moment"][0])
    with pytest.raises(CorruptFileError, match=r"exp_avg_sq/.* has shape"):
        check_files(job, Checkpoint.open(checkpoint))
