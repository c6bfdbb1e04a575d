"""Law: masters, gradients, optimizer state and parameters in host memory or in files give the losses and the files of a
run that keeps them on the device, bit for bit.

In one process, tests/dist/test_device_waits.py has it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lib.ranks import on_ranks
from lib.replica_runs import make_replica_config, resumed_at_half
from lib.resume import STEPS, TinyModel, checkpoint_of, train_ranks
from lib.training import schedule_of
from safetensors.torch import load_file
from torch import Tensor, nn

from acsgd.config.options import AdapterConfig, Config, ReplicaConfig
from acsgd.dp import MODES
from acsgd.optim import offload
from acsgd.shards.weights import Weight
from acsgd.streams import Streams

SOAK = pytest.mark.soak
NEEDS_8BIT = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


def offloaded(config: Config) -> Config:
    log = dataclasses.replace(config.log, dir=f"{config.log.dir}-offloaded")
    return dataclasses.replace(config, optim=dataclasses.replace(config.optim, offload="cpu"), log=log)


def losses(config: Config) -> list[float]:
    lines = (Path(config.log.dir) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def tensors(config: Config) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of the last checkpoint by file."""
    directory = checkpoint_of(config, STEPS)
    return {str(path.relative_to(directory)): load_file(path) for path in sorted(directory.rglob("*.safetensors"))}


def assert_same(run: Config, expected: Config) -> None:
    assert losses(run)[-len(losses(expected)) :] == losses(expected)
    saved, of_files = tensors(run), tensors(expected)
    assert saved.keys() == of_files.keys()
    for file, by_name in of_files.items():
        assert saved[file].keys() == by_name.keys()
        for name, tensor in by_name.items():
            assert torch.equal(saved[file][name], tensor), (file, name)


def test_gradients_are_added_in_fp32_in_parts_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "CAST_AT_ONCE", 100)
    param, master = (nn.Parameter(torch.zeros(37, 11, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32))
    adds, gradients = offload.GradientOffload(Streams(torch.device("cpu"))), torch.randn(3, 37, 11).bfloat16()
    for gradient in gradients:
        param.grad = gradient
        adds.start(Weight("w", param, master), lambda: None)
    adds.finish()
    assert master.grad is not None
    assert torch.equal(master.grad, gradients[0].float() + gradients[1].float() + gradients[2].float())


@pytest.mark.parametrize(
    ("optimizer", "dtype", "stages", "replicas", "dp", "options"),
    [
        pytest.param("adamw", "bf16", 1, 2, "weights", {}, marks=SOAK),
        pytest.param("adamw", "fp32", 2, 1, "none", {"schedule": "zb"}, marks=SOAK),
        pytest.param("adamw", "fp32", 2, 2, "none", {"tied": "dense"}, marks=SOAK),
        pytest.param("adamw", "fp16", 2, 2, "optimizer", {}, marks=SOAK),
        pytest.param("adamw", "bf16", 1, 2, "diloco:inner=2", {}, marks=SOAK),
        pytest.param("adamw", "bf16", 1, 2, "cocktail_grad:exact_steps=2", {}, marks=SOAK),
        pytest.param("muon", "bf16", 2, 2, "none", {}, marks=SOAK),
        pytest.param("adafactor", "fp32", 1, 2, "optimizer", {}, marks=SOAK),
        pytest.param("lion", "bf16", 1, 1, "none", {}, marks=SOAK),
        pytest.param("schedule_free_adamw", "bf16", 2, 2, "optimizer", {}, marks=SOAK),
        pytest.param("sgd", "fp32", 2, 1, "none", {}, marks=SOAK),
        pytest.param("adamw8bit", "bf16", 1, 1, "none", {}, marks=[SOAK, NEEDS_8BIT]),
    ],
)
def test_an_offloaded_run_has_the_losses_and_the_files_of_one_that_is_not(
    optimizer: str,
    dtype: Any,
    stages: int,
    replicas: int,
    dp: str,
    options: dict[str, Any],
    tiny_model: TinyModel,
    tmp_path: Path,
) -> None:
    """dp: a value of dp.shard, else of dp.mode."""
    model, tied = tiny_model("gpt2", n_layer=2), options.pop("tied", "rows")
    config = make_replica_config(model, tmp_path / "run", "allreduce", dtype, stages=stages, tied=tied)
    config = dataclasses.replace(
        config,
        optim=dataclasses.replace(config.optim, name=optimizer, clip=0.5, schedule=schedule_of(optimizer)),
        pp=dataclasses.replace(config.pp, **options),
        dp=ReplicaConfig(dp) if dp.split(":")[0] in MODES else ReplicaConfig(shard=dp),  # type: ignore[arg-type]
    )
    run = offloaded(config)
    on_ranks(stages * replicas, train_ranks, tmp_path / "store", [config, run])
    assert_same(run, config)


@pytest.mark.parametrize(
    ("stages", "replicas", "offload", "model", "options"),
    [
        pytest.param(1, 1, "cpu", {}, {}, marks=SOAK),
        pytest.param(1, 1, "cpu", {"dtype": "bf16", "recompute": "every:2"}, {}, marks=SOAK),
        pytest.param(2, 1, "cpu", {"dtype": "bf16"}, {"tied": "dense"}, marks=SOAK),
        pytest.param(2, 2, "cpu", {"dtype": "bf16"}, {"dp": "diloco:inner=2"}, marks=SOAK),
        (1, 2, "cpu", {}, {"dp": "diloco:inner=2"}),
        pytest.param(1, 2, "cpu", {}, {"shard": "optimizer"}, marks=SOAK),
        pytest.param(2, 1, "cpu", {"freeze": "*.h.*"}, {"schedule": "interleaved:chunks=2"}, marks=SOAK),
        pytest.param(2, 1, "cpu", {"dtype": "bf16"}, {"schedule": "zb"}, marks=SOAK),
        pytest.param(2, 1, "cpu", {"freeze": "*.h.0.*"}, {"schedule": "1f1b:split_last=true"}, marks=SOAK),
        pytest.param(2, 1, "disk", {"adapter": "lora:r=4"}, {"schedule": "zbv"}, marks=SOAK),
        pytest.param(1, 1, "cpu", {"dtype": "bf16", "quantize": "nf4"}, {}, marks=[SOAK, NEEDS_8BIT]),
        pytest.param(1, 1, "cpu", {"dtype": "bf16", "quantize": "int8"}, {}, marks=[SOAK, NEEDS_8BIT]),
        pytest.param(1, 1, "cpu", {"dtype": "bf16", "quantize": "nf4", "compile": True}, {}, marks=[SOAK, NEEDS_8BIT]),
        pytest.param(1, 1, "cpu", {"compile": True, "recompute": "layers"}, {}, marks=SOAK),
        pytest.param(1, 1, "disk", {"compile": True, "adapter": "lora:r=4"}, {}, marks=SOAK),
        pytest.param(1, 1, "disk", {"dtype": "bf16", "adapter": "lora:r=4"}, {}, marks=SOAK),
        pytest.param(2, 2, "disk", {"freeze": "*.h.*", "recompute": "attention"}, {"tied": "dense"}, marks=SOAK),
    ],
)
def test_offloaded_parameters_give_the_losses_and_the_files_of_those_that_stay(
    stages: int,
    replicas: int,
    offload: Any,
    model: dict[str, Any],
    options: dict[str, Any],
    tiny_model: TinyModel,
    tmp_path: Path,
) -> None:
    """options: pp.tied and pp.schedule, and values of dp.mode and dp.shard. The run resumes from half of its steps."""
    spec = model.pop("adapter", "lora:r=4" if "quantize" in model else None)
    wide = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 192}  # as 4 bits need
    path = tiny_model("llama", **wide) if spec else tiny_model("gpt2", n_layer=4)
    config = make_replica_config(
        path, tmp_path / "run", options.get("dp", "allreduce"), stages=stages, tied=options.get("tied", "rows")
    )
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **model),
        adapter=AdapterConfig(spec),
        dp=dataclasses.replace(config.dp, shard=options.get("shard", "none")),
        pp=dataclasses.replace(config.pp, schedule=options.get("schedule", "1f1b")),
    )
    run = config if offload == "disk" else offloaded(config)
    log = dataclasses.replace(run.log, dir=f"{run.log.dir}-parameters")
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, offload=offload), log=log)
    on_ranks(stages * replicas, train_ranks, tmp_path / "store", [config, run])
    assert_same(run, config)
    resumed = resumed_at_half(run, tmp_path / "resumed", stages=stages)
    on_ranks(stages * replicas, train_ranks, tmp_path / "again", [resumed])
    assert losses(resumed)[-2:] == losses(config)[-2:]


@pytest.mark.soak
def test_checkpoints_know_nothing_of_it(tiny_model: TinyModel, tmp_path: Path) -> None:
    config = make_replica_config(tiny_model("gpt2", n_layer=2), tmp_path / "run", "allreduce", "bf16", stages=2)
    run = offloaded(config)
    on_ranks(2, train_ranks, tmp_path / "store", [config, run])
    resumed = resumed_at_half(run, tmp_path / "resumed")
    back = dataclasses.replace(resumed, optim=config.optim)
    on_ranks(2, train_ranks, tmp_path / "again", [back])
    assert losses(back)[-2:] == losses(config)[-2:]
