"""Replicas that own parts of masters and optimizer state: the losses, files and memory of a run, at any size."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from lib.ranks import on_ranks
from lib.replica_runs import make_replica_config, resumed_at_half
from lib.resume import HALF, STEPS, TinyModel, checkpoint_of, train_ranks
from lib.training import schedule_of
from safetensors.torch import load_file
from torch import Tensor, nn

from acsgd.comm.waits import Meter
from acsgd.config.options import AdapterConfig, Config, EvalConfig, OptimConfig, ReplicaConfig
from acsgd.config.spec import from_spec
from acsgd.dp import MODES
from acsgd.dp.exchange.layer_gather import DividedParams
from acsgd.dp.modes.allreduce import open_sync
from acsgd.dp.peers import Peers
from acsgd.launch import Launch
from acsgd.layers.composed import ComposedModel
from acsgd.optim import OPTIMIZERS
from acsgd.optim.fetch import LayerFetch
from acsgd.optim.ownership import OwnedWeights, Ownership, Part, divide
from acsgd.pp.stage import MicroBatch
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.plan.dry_run import AbsentPeers
from acsgd.run.plan.job import prepare
from acsgd.run.setup.build import build_stages
from acsgd.shards.weights import Weight

AVERAGED = "diloco:inner=3,outer_lr=1,momentum=0"
"""A mode that sends exact means, whatever the parts."""
HAS_8BIT = importlib.util.find_spec("bitsandbytes") is not None
SOAK = pytest.mark.soak
NEEDS_8BIT = pytest.mark.skipif(not HAS_8BIT, reason="bitsandbytes is not installed")


EXACT = "allreduce:bucket_mb=0.05"


def train_each(configs: list[Config], replicas: int, directory: Path, domains: str = "") -> None:
    on_ranks(configs[0].pp.stages * replicas, train_ranks, directory / "store", configs, domains)


def sharded(config: Config, shard: Any, mode: str = EXACT) -> Config:
    log = dataclasses.replace(config.log, dir=f"{config.log.dir}-{shard}")
    return dataclasses.replace(config, dp=ReplicaConfig(mode, shard=shard), log=log)


def losses(config: Config) -> list[float]:
    """Return the losses of all steps and evaluations."""
    records = map(json.loads, (Path(config.log.dir) / "metrics.jsonl").read_text().splitlines())
    return [record[name] for record in records for name in ("loss", "eval_loss") if name in record]


def tensors(config: Config, step: int = STEPS) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of a checkpoint by file."""
    directory = checkpoint_of(config, step)
    return {str(path.relative_to(directory)): load_file(path) for path in sorted(directory.rglob("*.safetensors"))}


@pytest.mark.parametrize(
    ("optimizer", "dtype", "stages", "replicas", "options"),
    [
        ("adamw", "bf16", 1, 2, {}),
        ("adamw", "bf16", 1, 2, {"masters": "none"}),
        pytest.param("muon", "bf16", 2, 2, {"masters": "none", "tied": "dense"}, marks=SOAK),
        ("schedule_free_adamw", "fp32", 1, 2, {}),
        pytest.param("schedule_free_adamw", "bf16", 2, 2, {}, marks=SOAK),
        pytest.param("adamw", "bf16", 2, 2, {"tied": "dense"}, marks=SOAK),
        pytest.param("adamw", "fp32", 2, 3, {}, marks=SOAK),
        pytest.param("adamw", "fp16", 1, 2, {"clip": 0.5}, marks=SOAK),
        pytest.param("adamw", "bf16", 2, 2, {"clip": 0.5, "freeze": "*.h.*"}, marks=SOAK),
        pytest.param("adamw", "bf16", 1, 2, {"adapter": "lora:r=4"}, marks=SOAK),
        pytest.param(
            "adamw",
            "bf16",
            1,
            2,
            {"model": "llama", "adapter": "lora:r=4", "quantize": "nf4"},
            marks=[SOAK, NEEDS_8BIT],
        ),
        pytest.param("muon", "fp32", 1, 2, {"clip": 0.5}, marks=SOAK),
        pytest.param("muon", "bf16", 2, 2, {"tied": "dense"}, marks=SOAK),
        pytest.param("adafactor", "bf16", 2, 2, {}, marks=SOAK),
        pytest.param("lion", "bf16", 2, 2, {"schedule": "interleaved:chunks=2"}, marks=SOAK),
        pytest.param("sgd", "fp32", 1, 3, {}, marks=SOAK),
        pytest.param("adamw8bit", "bf16", 1, 2, {}, marks=[SOAK, NEEDS_8BIT]),
        pytest.param("adamw", "bf16", 1, 2, {"compile": True}, marks=SOAK),
        pytest.param("adamw", "fp32", 1, 2, {"compile": True, "adapter": "lora:r=4"}, marks=SOAK),
        ("adamw", "fp32", 1, 4, {"domains": "aabb", "mode": AVERAGED}),
        pytest.param("adamw", "bf16", 1, 4, {"domains": "abab", "mode": AVERAGED, "clip": 0.5}, marks=SOAK),
        pytest.param("adamw", "bf16", 1, 4, {"domains": "aabb", "clip": 0.5}, marks=SOAK),
        pytest.param("adamw", "bf16", 2, 4, {"domains": "aaaabbbb", "tied": "dense"}, marks=SOAK),
        pytest.param("muon", "fp32", 1, 4, {"domains": "aabb", "mode": "central_ps", "clip": 0.5}, marks=SOAK),
        pytest.param("adafactor", "bf16", 2, 4, {"domains": "aaaabbbb", "mode": AVERAGED}, marks=SOAK),
        pytest.param(
            "adamw", "bf16", 2, 4, {"domains": "aaaabbbb", "mode": AVERAGED, "adapter": "lora:r=4"}, marks=SOAK
        ),
    ],
)
def test_a_sharded_run_has_the_losses_and_the_files_of_one_that_is_not(
    optimizer: str,
    dtype: Any,
    stages: int,
    replicas: int,
    options: dict[str, Any],
    tiny_model: TinyModel,
    tmp_path: Path,
) -> None:
    """Bit for bit with sums in the same order, hence with "optimizer", and without clipping by a norm.

    And where parts are multiples of the vectors of a CPU, since torch's fused AdamW rounds the rest in another way.
    "weights" sums in the order of "gradients". In domains the other run is one whose replicas have whole weights.
    """
    directory, tied = tmp_path / "run", options.get("tied", "rows")
    wide = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 192}  # as 4 bits need
    layers = wide if "model" in options else {"n_layer": 2}
    config = make_replica_config(
        tiny_model(options.get("model", "gpt2"), **layers),
        directory,
        options.get("mode", "sharded_ps"),
        dtype,
        stages=stages,
        tied=tied,
    )
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, batch=4 * replicas, eval_fraction=0.001),
        eval=EvalConfig(HALF),
        optim=dataclasses.replace(
            config.optim,
            name=optimizer,
            clip=options.get("clip", math.inf),
            masters=options.get("masters", "fp32"),
            schedule=schedule_of(optimizer),
        ),
        adapter=AdapterConfig(options.get("adapter")),
        model=dataclasses.replace(
            config.model,
            quantize=options.get("quantize", "none"),
            freeze=options.get("freeze"),
            compile=options.get("compile", False),
        ),
        pp=dataclasses.replace(config.pp, schedule=options.get("schedule", config.pp.schedule)),
    )
    shards = ("optimizer",) if "schedule" in options else ("optimizer", "gradients", "weights")
    runs = [sharded(config, shard, options.get("mode", EXACT)) for shard in shards]
    train_each([config, *runs], replicas, tmp_path, options.get("domains", ""))
    expected, before = tensors(config), dict[str, dict[str, Tensor]]()
    for run in runs:
        assert losses(run) == pytest.approx(losses(config), rel=1e-5)
        saved = tensors(run)
        assert saved.keys() == expected.keys()
        for file, of_file in expected.items():
            assert saved[file].keys() == of_file.keys()
            for key, tensor in of_file.items():
                assert saved[file][key].shape == tensor.shape
                if run.dp.shard == "optimizer" and replicas == 2 and "clip" not in options:
                    assert torch.equal(saved[file][key], tensor), key
                if run.dp.shard == "weights":
                    assert torch.equal(saved[file][key], before[file][key]), key
        before = saved


@pytest.mark.soak
def test_a_sharded_run_resumes_at_any_size(tiny_model: TinyModel, tmp_path: Path) -> None:
    config = make_replica_config(tiny_model("gpt2", n_layer=2), tmp_path / "run", "allreduce", "bf16", stages=1)
    config = sharded(config, "weights")
    train_each([config], 2, tmp_path)
    others = [
        ("none", 1, 1, ""),
        ("none", 2, 2, ""),
        ("optimizer", 1, 4, ""),
        ("weights", 2, 2, ""),
        ("gradients", 1, 1, ""),
        ("weights", 1, 4, "aabb"),
    ]
    for shard, stages, replicas, domains in others:
        directory = tmp_path / f"{shard}-{stages}-{replicas}-{domains}"
        resumed = resumed_at_half(config, directory, stages=stages)
        resumed = dataclasses.replace(resumed, dp=ReplicaConfig("allreduce", shard=shard))
        train_each([resumed], replicas, directory, domains)
        assert losses(resumed)[-3:] == pytest.approx(losses(config)[-3:], rel=1e-4), (shard, stages, replicas)


@pytest.mark.soak
@pytest.mark.parametrize(
    "mode", [AVERAGED, "cocktail:random=.5,topk=.2", "cocktail_grad:topk=.25", "sparseloco:inner=2"]
)
def test_a_run_sharded_in_domains_resumes_with_the_state_of_each(
    mode: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """On as many domains, sharded in another way. Without, where a mode sends the same whatever its parts."""
    config = make_replica_config(tiny_model("gpt2", n_layer=2), tmp_path / "run", mode, "bf16", stages=1)
    config = sharded(config, "optimizer", mode)
    train_each([config], 4, tmp_path, "aabb")
    others = [("optimizer", 1, 4, "aabb"), ("weights", 1, 4, "aabb")]
    if mode == AVERAGED:
        others += [("none", 1, 2, ""), ("none", 1, 4, "aabb"), ("gradients", 2, 4, "aaaabbbb")]
    for shard, stages, replicas, domains in others:
        directory = tmp_path / f"{shard}-{stages}-{replicas}-{domains}"
        resumed = resumed_at_half(config, directory, stages=stages)
        resumed = dataclasses.replace(resumed, dp=ReplicaConfig(mode, shard=shard))
        train_each([resumed], replicas, directory, domains)
        bound = 1e-5 if stages == 1 else 1e-4  # sums over stages round differently, and so do a few weights in bf16
        assert losses(resumed)[-3:] == pytest.approx(losses(config)[-3:], rel=bound), (shard, stages, replicas)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_memory_and_bytes_fall_as_the_number_of_replicas(shard: str, dtype: torch.dtype) -> None:
    """Of tensors with values; what other replicas send is 0."""
    numel, passes, sent = 6 * 128 * 64, 2, 0
    for replicas in (1, 2, 4):
        weights = []
        for index in range(6):
            param = nn.Parameter(torch.ones(128, 64, dtype=dtype))
            master = param if dtype == torch.float32 else nn.Parameter(param.detach().float())
            weights.append(Weight(f"w{index}", param, master))
        parts = tuple(divide(weights, replicas, by_rows=True)) if replicas > 1 else None
        owned = OwnedWeights(weights, Ownership(0, replicas, parts))
        mode = from_spec(f"allreduce:bucket_mb={3 * 128 * 64 * 4 / 1e6}", MODES, key="dp.mode")
        sync = open_sync(mode, weights, owned, AbsentPeers(0, replicas), shard=shard)
        optimizer = OPTIMIZERS["adamw"]().open(owned.of(weights), OptimConfig(lr=0.1, steps=1))
        sync.begin_step(0)
        for number in range(passes):
            for weight in reversed(weights):
                grad = torch.ones(weight.master.shape)
                weight.master.grad = grad if weight.master.grad is None else weight.master.grad + grad
                sync.grad_ready(weight, is_final=number == passes - 1)
            sync.backward_done(is_last=number == passes - 1)
            if shard == "gradients" and replicas > 1:
                assert all(weight.master.grad is None for weight in weights), "those of whole weights never stay"
        sync.reduce()
        sync.wait()
        steps = owned.of(weights)
        gradients = sum(x.master.grad.nbytes for x in steps if x.master.grad is not None)
        optimizer.step(0)
        if replicas > 1:
            assert all(weight.master.grad is None for weight in weights)
            sync.share_parts()
        moments = owned.state_of(optimizer, weights)
        assert gradients == 4 * numel / replicas
        for name in ("exp_avg", "exp_avg_sq"):
            assert sum(x.nbytes for x in moments[name].values()) == 4 * numel / replicas
        masters = {x.master.untyped_storage().data_ptr(): x.master.untyped_storage() for x in (*steps, *weights)}
        if dtype == torch.bfloat16:
            placeholders = 4 * len(weights) if replicas > 1 else 0
            assert sum(x.nbytes() for x in masters.values()) == 4 * numel / replicas + placeholders
        if replicas > 1:  # of a ring: 2 (R - 1) / R numbers per parameter; with 16 bytes per message
            reductions = passes if shard == "gradients" else 1
            sent = (replicas - 1) * numel * (4 * reductions + dtype.itemsize) // replicas
            assert sent == sync.meter.sent_bytes, "headers are added by the groups"


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=SOAK)])
def test_a_replica_holds_its_part_of_the_parameters_and_those_of_two_layers(
    dtype: Any, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Trained, frozen and tied ones, in each forward and backward."""
    config = make_replica_config(tiny_model("gpt2", n_layer=3), tmp_path, "allreduce", dtype, stages=1)
    model = dataclasses.replace(config.model, freeze="*.h.1.*")
    config = dataclasses.replace(config, dp=ReplicaConfig(shard="weights"), model=model)
    whole, ids = 0, torch.ones(2, 32, dtype=torch.int64)
    for replicas in (1, 4):
        job = prepare(config, Launch(0, 0, replicas))
        composed = ComposedModel(job.model.build(job.shapes.dtype), job.model.description)
        source, peers = open_weight_source(job), AbsentPeers(0, replicas)
        stages, owned = build_stages(job, composed, source, peers)
        stage, params, peaks = stages[0], {*composed.model.parameters()}, list[int]()
        whole, stand_ins = whole or existing(params), sum(param.itemsize for param in params)
        for block in map(composed.model.get_submodule, job.model.description.blocks):
            block.register_forward_hook(lambda *_, params=params, peaks=peaks: peaks.append(existing(params)))
        for weight in stage.weights:
            weight.param.register_hook(lambda _, params=params, peaks=peaks: peaks.append(existing(params)))
        for micro in range(2):
            stage.sync.begin_step(0)
            stage.forward(MicroBatch(0, micro, micro, (0, 1)), {"input_ids": ids}, {}, ids)
            stage.backward(micro, None, last=True)
            stage.reduce()
            stage.sync.wait()
            assert existing(params) == (whole if replicas == 1 else stand_ins)
            assert replicas == 1 or all(weight.master.grad is None for weight in stage.weights)
        frozen = sum(composed.model.get_parameter(key).nbytes for key in job.model.description.frozen)
        assert replicas * sum(each.param.nbytes for each in owned.of(owned.weights)) == whole - frozen
        layers = [sum(composed.model.get_parameter(key).nbytes for key in each.parameters) for each in composed.layers]
        most = max(a + b for a, b in itertools.pairwise(layers))
        assert most < max(peaks) == whole if replicas == 1 else 0 < max(peaks) <= most + stand_ins


def existing(params: Iterable[nn.Parameter]) -> int:
    """Return the bytes of the values of parameters."""
    storages = {param.untyped_storage().data_ptr(): param.untyped_storage() for param in params}
    return sum(storage.nbytes() for storage in storages.values())


class OtherReplica:
    """Peers of replica 0 of 2, whose other one holds the second half of each weight and answers at once."""

    size, replica, others, device = 2, 0, (1,), torch.device("cpu")

    def __init__(self) -> None:
        self.halves: list[Tensor] = []
        """What the other replica sends in the next exchange."""
        self.sent: list[int] = []
        """Bytes of each exchange."""

    def submit(self, work: Callable[[], None]) -> Any:
        work()
        return SimpleNamespace(result=lambda meter: None)

    def exchange(self, outgoing: Mapping[int, Tensor], longest: Mapping[int, int], meter: Meter) -> dict[int, Tensor]:
        self.sent.append(sum(map(len, outgoing.values())))
        theirs = torch.cat([half.view(-1).view(torch.uint8) for half in self.halves]) if longest else torch.tensor([])
        return {1: theirs} if longest else {}


def test_a_parameter_of_two_groups_is_gathered_once_and_freed_after_the_last() -> None:
    """As that of a block that is repeated, which the group ahead already uses when the one before ends."""
    values = {key: torch.randn(4, 3) for key in ("repeated", "own")}
    params = nn.ParameterDict({key: nn.Parameter(x.clone()) for key, x in values.items()})
    parts = tuple(part for key in values for part in (Part(key, 0, 2, 0), Part(key, 2, 4, 1)))
    peers = OtherReplica()
    divided = DividedParams(OwnedWeights((), Ownership(0, 2, parts, frozenset(values))), cast(Peers, peers))
    layers: Any = [SimpleNamespace(parameters=("repeated",)), SimpleNamespace(parameters=("repeated", "own"))]
    for layer, key in zip(layers, ("repeated", "own"), strict=True):
        divided.add(layer, [Weight(key, params[key], params[key])], params)
        assert params[key].isnan().all()
    gather = LayerFetch([[layer] for layer in layers], divided, Meter())
    peers.halves = [values["repeated"][2:]]
    gather.enter(0, -1)
    assert torch.equal(params["repeated"], values["repeated"])
    peers.halves = [values["own"][2:]]
    gather.enter(1, -1)
    gather.leave(0)
    assert all(torch.equal(params[key], values[key]) for key in values)
    gather.leave(1)
    assert all(param.isnan().all() for param in params.values())
    assert peers.sent == [2 * 3 * 4] * 2, "each is sent once"
