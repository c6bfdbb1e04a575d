"""Laws: what a plan says before a run is what the run needs; a plan needs no weights, no data, no tokenizer."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import XLNetConfig

from acsgd import cli
from acsgd.config.checks import check
from acsgd.config.options import AdapterConfig, Config, ModelConfig, OptimConfig
from acsgd.config.run_file import parse, to_toml
from acsgd.config.spec import from_spec
from acsgd.dp import MODES
from acsgd.dp.exchange.buckets import split_weights
from acsgd.dp.modes.allreduce import AllReduce, open_sync
from acsgd.dp.peers import AsyncResult
from acsgd.groups import connect
from acsgd.host_memory import HostMemory
from acsgd.io.checkpoint.progress import Progress
from acsgd.launch import Launch
from acsgd.optim import OPTIMIZERS
from acsgd.optim.base import PLAIN_STEP
from acsgd.optim.ownership import OwnedWeights, Ownership, divide
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.plan import planner
from acsgd.run.plan.dry_run import AbsentPeers, dry_run
from acsgd.run.plan.job import prepare
from acsgd.run.plan.layer_trace import MemoryTracker
from acsgd.run.plan.memory import PlanCache, least_memory, plan_memory
from acsgd.run.plan.model import describe_run_model
from acsgd.run.plan.planner import GIB, RunPlanner
from acsgd.run.plan.rates import rates_of_gpu
from acsgd.run.plan.step_memory import SummedBuckets, trace_model
from acsgd.run.setup.build import build_session
from acsgd.shards.weights import Weight
from acsgd.streams import Streams
from acsgd.topology import Topology
from acsgd.train import train_step
from tests.lib.training import batches_of, make_config, schedule_of

T = TypeVar("T")
WIDE = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 192}


def planner_of(config: Config, world: int, *, per_host: int = 1) -> RunPlanner:
    return RunPlanner(config, world, describe_run_model(config), on_gpu=True, per_host=per_host)


def measured(config: Config) -> int:
    """Return the peak of the tensors of a run in one process, without frozen ones kept as they are stored."""
    job, tracker = prepare(config, Launch()), MemoryTracker()
    source, progress = open_weight_source(job), Progress()
    with connect(Topology.of(0, 1, 1), timeout=timedelta(seconds=60), store=dist.HashStore()) as groups:
        batches = itertools.islice(batches_of(job), 2)
        with tracker:
            session = build_session(job, source, groups)
            stored = sum(
                x.nbytes for layer in session.layers for x in layer.constants.values() if x.dtype != job.shapes.dtype
            )
            for batch in batches:
                tracker.peak = tracker.now
                progress = train_step(session, batch, progress).progress
        session.close()
    return tracker.peak - stored


@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param({"dtype": "bf16"}, {"optim": "muon"}, marks=pytest.mark.soak),
        *(pytest.param({}, {"optim": name}, marks=pytest.mark.soak) for name in OPTIMIZERS),
        *(pytest.param({"dtype": each}, {"adapter": "lora:r=8"}, marks=pytest.mark.soak) for each in ("fp32", "bf16")),
        pytest.param({"freeze": "*.layers.0.*"}, {}, marks=pytest.mark.soak),
        pytest.param({"dtype": "bf16", "recompute": "layers"}, {"micro": 3}, marks=pytest.mark.soak),
        ({"dtype": "bf16"}, {"offload": "cpu"}),
        ({"dtype": "bf16"}, {"masters": "none"}),
        pytest.param({"dtype": "bf16"}, {"masters": "none", "optim": "lion"}, marks=pytest.mark.soak),
        pytest.param({"dtype": "bf16"}, {"optim": "schedule_free_adamw"}, marks=pytest.mark.soak),
        pytest.param({}, {"optim": "schedule_free_adamw", "offload": "cpu"}, marks=pytest.mark.soak),
        pytest.param({}, {"offload": "cpu", "optim": "lion"}, marks=pytest.mark.soak),
        ({"recompute": "layers"}, {"micro": 6}),
        ({"recompute": "every:2"}, {"micro": 6}),
        ({"recompute": "attention"}, {"micro": 6}),
        ({}, {"schedule": "zb"}),
        pytest.param({}, {"schedule": "1f1b:split_last=true"}, marks=pytest.mark.soak),
    ],
)
def test_a_plan_predicts_the_memory_of_a_run(
    model: dict[str, Any], options: dict[str, Any], tiny_model: Any, tmp_path: Path
) -> None:
    config = make_config(tiny_model("llama", **WIDE), tmp_path, micro=options.get("micro", 2))
    config = replace(config, pp=replace(config.pp, schedule=options.get("schedule", "1f1b")))
    config = replace(
        config,
        model=replace(config.model, **model),
        optim=replace(
            config.optim,
            name=(name := options.get("optim", "adamw")),
            offload=options.get("offload", "none"),
            masters=options.get("masters", "fp32"),
            schedule=schedule_of(name),
        ),
        adapter=AdapterConfig(options.get("adapter")),
    )
    job = prepare(config, Launch())
    [planned] = plan_memory(job, traced := trace_model(job))
    assert planned.total == pytest.approx(measured(config), rel=0.05)
    without, cache = replace(traced, layers=()), PlanCache()
    least = least_memory(job, without, cache), least_memory(job, traced, cache)
    assert planned.total / 5 < least[0] <= least[1] <= planned.on_device, "runs that fit are not rejected early"


def test_logits_are_those_of_the_last_layer_alone(tiny_model: Any, tmp_path: Path) -> None:
    config = make_config(tiny_model("llama", **WIDE, vocab_size=8192), tmp_path, micro=2)
    job = prepare(config, Launch())
    traced, logits = trace_model(job), 2 * config.data.sequence * 8192 * 4
    _, *blocks, head = traced.layers
    assert head.forward_peak > logits
    assert max(max(each.forward_peak, each.backward_peak) for each in blocks) < logits
    [planned] = plan_memory(job, traced)
    assert planned.activations < logits < planned.logits


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_declared_state_of_an_optimizer_is_what_it_allocates(name: str) -> None:
    if name == "adamw8bit":
        pytest.importorskip("bitsandbytes", reason="the extra 8bit is not installed")
    optimizer = from_spec(name, OPTIMIZERS, key="optim.name")
    tracker = MemoryTracker()
    with tracker:
        params = [nn.Parameter(torch.randn(shape)) for shape in ((96, 64), (64,), (7, 5))]
        weights = [Weight(str(i), param, param, is_hidden_matrix=i == 0) for i, param in enumerate(params)]
        opened = optimizer.open(weights, OptimConfig(lr=0.1, steps=1))
        for param in params:
            param.grad = torch.ones_like(param)
        before = tracker.now
        opened.step(0)
        allocated = tracker.now - before
    declared = sum(
        state.nbytes(weight.master, is_hidden_matrix=weight.is_hidden_matrix)
        for weight in weights
        for state in optimizer.states
    )
    code = 2 * 4 * 256 if name == "adamw8bit" else 0  # levels that all weights share
    assert abs(allocated - declared) <= code + 16 * len(params)


@pytest.mark.parametrize(
    ("mode", "copies"),
    [("allreduce", 0), ("local", 1), ("diloco", 2), ("powersgd", 1), ("cocktail_grad", 2.25), ("quantized", 2.25)],
)
def test_the_state_of_a_mode_is_counted_in_copies_of_the_weights(mode: str, copies: float) -> None:
    param = nn.Parameter(torch.empty(4096, 64, device="meta"))
    for members in (1, 3):
        memory = dry_run(
            from_spec(mode, MODES, key="dp.mode"),
            OPTIMIZERS["adamw"](),
            OptimConfig(lr=1, steps=1),
            [[Weight("w", param, param)]],
            4,
            members,
        )
        assert memory.state == pytest.approx(copies * param.nbytes, rel=0.05)
        assert memory.has_buckets == (members > 1 or mode in ("allreduce", "powersgd"))


@pytest.mark.parametrize(
    ("mode", "initial"),
    [
        ("quantized:bits=4", "exact_steps=20000"),
        ("cocktail:topk=0.1", "exact_steps=20000"),
        ("sparseloco:inner=4", "redundant_steps=60"),
        ("diloco:inner=4,delay=2", "redundant_steps=60"),
    ],
)
def test_initial_steps_hide_no_memory_of_what_follows_them(mode: str, initial: str) -> None:
    """Replicas that end redundant steps average their weights in fp32: one copy to send, one of the mean."""
    param = nn.Parameter(torch.empty(4096, 64, device="meta"))
    plain, late = (
        dry_run(
            from_spec(spec, MODES, key="dp.mode"),
            OPTIMIZERS["adamw"](),
            OptimConfig(lr=1, steps=1),
            [[Weight("w", param, param)]],
            3,
        )
        for spec in (mode, f"{mode},{initial}")
    )
    assert late.state == plain.state > 0
    assert late.update_peak >= plain.update_peak
    assert late.update_peak >= 2 * param.nbytes * ("redundant" in initial)


@pytest.mark.parametrize(("mode", "copies"), [("allreduce", 1), ("diloco", 3), ("cocktail_grad", 3.25)])
def test_the_state_of_a_mode_of_parts_is_counted_in_copies_of_the_parts(mode: str, copies: float) -> None:
    """Of 4 domains whose 2 replicas divide the weights. All-reduce keeps a buffer of gradients, and modes with local
    weights one of these, besides the whole weights in fp32."""
    param = nn.Parameter(torch.empty(4096, 64, device="meta"))
    weight = Weight("w", param, param)
    domains = [[2 * domain, 2 * domain + 1] for domain in range(4)]
    parts = tuple(divide([weight], 2, by_rows=True))
    memory = dry_run(
        from_spec(mode, MODES, key="dp.mode"),
        OPTIMIZERS["adamw"](),
        OptimConfig(lr=1, steps=1),
        [[weight]],
        4,
        2,
        Ownership(3, 8, parts, domains=domains),
        "optimizer",
    )
    assert memory.state == pytest.approx(copies * param.nbytes / 2, rel=0.05)
    assert not memory.has_buckets
    assert memory.update_peak >= 2 * param.nbytes, "the weights are gathered"


@pytest.mark.parametrize(
    ("mode", "steps"),
    [
        ("quantized:exact_steps=1", 2),
        *(
            pytest.param(*each, marks=pytest.mark.soak)
            for each in (
                ("quantized:bits=1,exact_steps=1", 2),
                ("cocktail_grad:topk=0.1", 1),
                ("cocktail:random=0.5,moment_correction=false", 2),
                ("sparseloco:inner=1,chunk=4096", 1),
                ("diloco:inner=1", 1),
                ("diloco:inner=1,bits=4", 1),
                ("diloco:inner=2,bits=4,delay=1", 3),
            )
        ),
    ],
)
def test_the_exchange_of_a_mode_is_counted_whatever_its_codec_reads(mode: str, steps: int) -> None:
    """On a plan's tensors, which have no values, the exchange allocates what it allocates with values."""

    class EqualPeers(AbsentPeers):
        """Replicas that have the same weights: what one receives is what it has sent to itself."""

        def exchange(self, outgoing: Any, longest: Any, meter: Any) -> Any:
            framed = [message.clone() for message in outgoing.values()]
            return {peer: framed[0].clone() for peer in longest} if framed else {}

    shape, parsed, config = (4096, 512), from_spec(mode, MODES, key="dp.mode"), OptimConfig(lr=1e-3, steps=9)
    stages = [
        [Weight(f"{stage}.{name}", param := nn.Parameter(torch.empty(shape, device="meta")), param) for name in "ab"]
        for stage in range(2)
    ]
    planned, elements = dry_run(parsed, OPTIMIZERS["adamw"](), config, stages, 2), 4 * 4096 * 512
    with MemoryTracker() as tracker:
        stages = [
            [each._replace(param=(real := nn.Parameter(torch.randn(shape))), master=real) for each in weights]
            for weights in stages
        ]
        optimizer = OPTIMIZERS["adamw"]().open([*itertools.chain.from_iterable(stages)], config)
        syncs = [parsed.open(weights, EqualPeers(0, 2)) for weights in stages]
        for step in range(steps):
            for sync, weights in zip(syncs, stages, strict=True):
                sync.begin_step(step)
                for weight in reversed(weights):
                    weight.master.grad = torch.randn(shape)
                    sync.grad_ready(weight, is_final=True)
                sync.reduce()
                sync.wait()
            hows = [sync.local_step(step) or PLAIN_STEP for sync in syncs]
            for sync in syncs:
                sync.commit()
            shares = {key: share for how in hows for key, share in how.shares.items()}
            optimizer.step(step, hows[0]._replace(shares=shares))
            moments = [optimizer.second_moments(weights) for weights in stages]
            for sync, each in zip(syncs, moments, strict=True):
                sync.exchange(step, each)
            for sync, each in zip(syncs, moments, strict=True):
                sync.after_step(step, each)
    lasting = 4 * 4 * elements  # weights, gradients, moments
    assert lasting + planned.state + planned.update_peak == pytest.approx(tracker.peak, rel=0.05)


class SlowPeers(AbsentPeers):
    """Replicas behind so slow a link that work ends no sooner than training waits for it."""

    def submit(self, work: Callable[[], T]) -> AsyncResult[T]:
        return cast("AsyncResult[T]", SimpleNamespace(result=lambda meter: work()))


@pytest.mark.parametrize(("replicas", "rel"), [(2, 0.1), (4, 0.15)])
def test_whole_gradients_that_are_not_summed_yet_are_counted(replicas: int, rel: float) -> None:
    """rel: the tracker keeps counting some storages of which only views were seen while a bucket was summed."""
    beside_whole = SummedBuckets((30, 50), replicas, keeps_whole=True)
    assert [*map(beside_whole.in_flight, (0, 29, 30, 80))] == [
        int(nbytes * (1 + 2 * (replicas - 1) / replicas)) for nbytes in (0, 0, 30, 50)
    ]
    rows = (64, 32, 16, 256, 64, 64, 32, 8)
    params = [nn.Parameter(torch.zeros(each, 128)) for each in rows]
    weights = [Weight(str(index), param, param) for index, param in enumerate(params)]
    owned = OwnedWeights(weights, Ownership(0, replicas, tuple(divide(weights, replicas, by_rows=True))))
    mode = AllReduce(bucket_mb=0.03)
    sizes = [sum(each.master.nbytes for each in bucket) for bucket in split_weights(weights, mode.bucket_mb)]
    assert len(sizes) > 3
    buckets = SummedBuckets(sizes, replicas)
    planned, made = list[int](), 0
    with MemoryTracker() as tracker:
        sync = open_sync(mode, weights, owned, SlowPeers(0, replicas), shard="gradients")
        sync.begin_step(0)
        for weight in reversed(weights):
            planned.append(buckets.in_flight(made) + weight.master.nbytes)
            weight.master.grad = torch.ones(weight.master.shape)
            made += weight.master.nbytes
            sync.grad_ready(weight, is_final=True)
        sync.reduce()
        sync.wait()
    sums = made // replicas
    assert tracker.peak == pytest.approx(max(*planned, buckets.in_flight(made)) + sums, rel=rel)


@pytest.mark.soak
def test_the_messages_of_a_bucket_are_counted_beside_whole_gradients(tiny_model: Any, tmp_path: Path) -> None:
    """With dp.shard=optimizer, all gradients of a step are whole when the first bucket of them is summed."""
    config = make_config(tiny_model("llama", **WIDE), tmp_path, micro=1)
    planner, peaks = planner_of(config, 2), list[int]()
    for megabytes in (1000, 0.3, 0.1):
        dp = replace(config.dp, shard="optimizer", mode=f"allreduce:bucket_mb={megabytes}")
        [planned] = planner.memory(replace(config, dp=dp))
        peaks.append(planned.gradients - describe_run_model(config).parameters.gradient_bytes)
    assert peaks[0] > peaks[1] > peaks[2] >= 2 * 0.1e6


def test_replicas_of_a_host_are_counted_as_one(tiny_model: Any, tmp_path: Path) -> None:
    config = make_config(tiny_model("llama", **WIDE), tmp_path, micro=1)
    config = replace(config, data=replace(config.data, batch=4), dp=replace(config.dp, mode="cocktail:random=0.1"))
    of_two = planner_of(config, 2)
    [alone], [in_domain] = of_two.memory(config), planner_of(config, 4, per_host=2).memory(config)
    assert in_domain.replicas == alone.replicas, "its part is that of one of two replicas"
    apart = replace(config, dp=replace(config.dp, local="none"))
    [without] = planner_of(apart, 4, per_host=2).memory(apart)
    assert [without] == planner_of(config, 4).memory(config)
    assert [in_domain] == of_two.on(4, per_host=2).memory(config), "what it shares is not the number of processes"
    besides = [each.total - each.replicas for each in (without, in_domain)]
    assert besides[0] < besides[1], "gradients are in buckets when activations are largest"


@pytest.mark.soak
def test_divided_parameters_are_counted_with_those_of_two_layers(tiny_model: Any, tmp_path: Path) -> None:
    config = make_config(tiny_model("llama", **WIDE), tmp_path, micro=1)
    divided = replace(config, dp=replace(config.dp, shard="weights"))
    planner, model = planner_of(config, 2), describe_run_model(config)
    [whole], [part] = planner.memory(config), planner.memory(divided)
    built, numbers = model.build(torch.float32), model.parameters
    layers = [sum(built.get_parameter(key).nbytes for key in layer.parameters) for layer in model.layers]
    of_two = max(first + second for first, second in itertools.pairwise(layers))
    assert part.weights == whole.weights - 2 * numbers.all + of_two
    assert part.moments == pytest.approx(whole.moments / 2, rel=1e-3)


@pytest.mark.parametrize(("on_gpu", "buffers"), [(False, 0), pytest.param(True, 2, marks=pytest.mark.soak)])
def test_parameters_in_files_are_counted_where_they_are_read(
    on_gpu: bool, buffers: int, tiny_model: Any, tmp_path: Path
) -> None:
    """On a CPU, layers are read to where they are used, the next one ahead.

    On a GPU, the backward of the last layer is read ahead of when the device has copied that of the forward.
    """
    config = make_config(tiny_model("llama", **WIDE), tmp_path, micro=1)
    config = replace(config, model=replace(config.model, offload="disk"), adapter=AdapterConfig("lora:r=2"))
    model = describe_run_model(config)
    [read] = RunPlanner(config, 1, model, on_gpu=on_gpu).memory(config)
    built = model.build(torch.float32)
    table, block, *_ = layers = [
        [built.get_parameter(key).nbytes for key in layer.parameters if key in model.description.frozen]
        for layer in model.layers
    ]
    in_use = max(sum(first) + sum(second) for first, second in itertools.pairwise(layers))
    adapters = 4 * model.parameters.trained
    assert read.weights - read.host_weights == pytest.approx(adapters + in_use, rel=0.01), "and buffers"
    assert read.host_weights == buffers * (sum(block) + sum(table)), "the head has the size of the table"


def test_a_weight_part_of_layers_that_share_a_table_has_all_of_them(tiny_model: Any, tmp_path: Path) -> None:
    config = make_config(tiny_model("gpt2", n_layer=3), tmp_path, schedule="zb", micro=1)
    model, optim = replace(config.model, offload="cpu"), replace(config.optim, offload="cpu")
    config = replace(config, model=replace(model, dtype="bf16"), optim=optim)
    plans = planner_of(config, 1)
    [split] = plans.memory(config)
    assert split.weights - split.host_weights == 2 * plans.partition(config).model.parameters.trained


@pytest.mark.soak
def test_a_pipeline_keeps_the_micro_batches_that_its_schedule_has_in_flight(tiny_model: Any, tmp_path: Path) -> None:
    config = make_config(tiny_model("llama", **WIDE), tmp_path, stages=3, micro=1)
    planner, kept = planner_of(config, 3), {}
    for schedule in ("1f1b", "gpipe"):
        kept[schedule] = [
            each.activations for each in planner.memory(replace(config, pp=replace(config.pp, schedule=schedule)))
        ]
    assert kept["gpipe"][0] > 1.5 * kept["1f1b"][0]  # 6 in place of 3
    assert kept["gpipe"][1] > 1.5 * kept["1f1b"][1]  # 6 in place of 2


@pytest.fixture
def run_file(tiny_model: Any, tmp_path: Path) -> Path:
    """A run whose model directory has nothing but config.json, and whose data do not exist."""
    (bare := tmp_path / "bare").mkdir()
    shutil.copy(tiny_model("llama", **WIDE) / "config.json", bare)
    config = make_config(bare, tmp_path)
    path = tmp_path / "run.toml"
    path.write_text(
        to_toml(replace(config, data=replace(config.data, sources="absent.jsonl"), model=ModelConfig(str(bare))))
    )
    return path


def plan(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[Any, str, str]:
    with pytest.raises(SystemExit) as end:
        cli.run(["plan", *argv])
    return end.value.code, *capsys.readouterr()


def test_a_plan_names_the_nearest_run_that_fits(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = plan(capsys, str(run_file), "--json", "--pp.micro", "1")
    assert not code
    needed = max(each["needed"] for each in json.loads(text)["memory"])
    code, text, _ = plan(capsys, str(run_file), "--pp.micro", "1", "--memory", f"{(needed - 1) / 1e9:.9f}GB")
    assert code
    assert "does not fit: rank 0 needs" in text
    assert text.endswith("; use --model.recompute attention\n")


def test_memory_is_compared_where_it_is_and_caches_are_counted_if_their_number_is_known(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the number of steps nor of epochs says how many sequences the data have."""
    config = parse([str(run_file), "--pp.stages", "2", "--pp.forward", "delta:bits=4"], prog="", is_main=False)
    planner, entry = planner_of(config, 2), 32 * 64 * 2

    def caches(codec: str, sequences: int | None, steps: int = 8) -> tuple[int, int]:
        planner.sequences = sequences
        changed = replace(config, pp=replace(config.pp, forward=codec), optim=replace(config.optim, steps=steps))
        first, _ = planner.memory(changed)
        return first.caches, first.cache_per_sequence

    assert caches("delta:bits=4", None) == caches("delta:bits=4", None, steps=777) == (0, entry)
    assert caches("delta:bits=4", 1000) == (1000 * entry, 0)
    config = replace(config, pp=replace(config.pp, backward="delta:step=1"))
    assert caches("delta:bits=4", 1000) == (2000 * entry, 0), "activations and gradients"
    planner = planner_of(frozen := replace(config, model=replace(config.model, freeze="model.embed*,model.layers*")), 2)
    config, of_whole = frozen, config
    assert caches("delta:bits=4", 1000) == (1000 * entry, 0), "no gradient is sent"
    assert caches("none", 1000) == (0, 0)
    config, planner = of_whole, planner_of(of_whole, 2)
    config = replace(config, pp=replace(config.pp, backward="none"))
    bounded = f"delta:bits=4,cache_gib={100 * entry / GIB}"
    assert (caches(bounded, None), caches(bounded, 50)) == ((100 * entry, 0), (50 * entry, 0))
    assert caches("delta:bits=4,cache=disk", None) == (0, 0)
    planner.sequences = 10**6
    for each in planner.memory(config):
        assert each.on_host == each.messages + each.caches > 2 * GIB
        assert planner.needed(each) == each.total - each.on_host + GIB
        planner.on_gpu = False
        assert planner.needed(each) == each.total + GIB
        planner.on_gpu = True
    code, text, _ = plan(
        capsys, str(run_file), "--pp.stages", "2", "--pp.forward", "delta:bits=4", "--memory", "1.5GiB"
    )
    assert not code
    assert "not counted: activation caches, up to 0.00391 MiB of host memory on a rank for each sequence" in text
    assert text.endswith("needs 1.00 of 1.50 GiB, of which the process and its libraries 1.00\n")


def test_offloaded_state_is_counted_on_the_host_and_offered(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tiny_model("llama", **WIDE), tmp_path, micro=1)
    config = replace(config, model=replace(config.model, dtype="bf16"))
    offloading = replace(config, optim=replace(config.optim, offload="cpu"))
    monkeypatch.setattr(planner, "PROCESS_BYTES", 0)
    plans = planner_of(config, 1)
    [plain], [offloaded] = plans.memory(config), plans.memory(offloading)
    assert plain.offloaded == 0
    assert offloaded.on_device < plain.on_device - plain.masters - plain.moments
    assert offloaded.on_device >= offloaded.weights + offloaded.activations + offloaded.logits
    assert offloaded.on_host >= plain.masters + plain.gradients + plain.moments
    fetching = replace(offloading, model=replace(offloading.model, offload="cpu"))
    [without_weights] = plans.memory(fetching)
    built, model = plans.partition(config).model.build(torch.bfloat16), plans.partition(config).model
    layers = [sum(built.get_parameter(key).nbytes for key in each.parameters) for each in model.layers]
    on_device = without_weights.weights - without_weights.host_weights
    assert without_weights.host_weights == sum(layers)
    assert on_device == offloaded.weights - sum(layers) + max(a + b for a, b in itertools.pairwise(layers))
    assert without_weights.on_device == offloaded.on_device - offloaded.weights + on_device
    [saved] = plans.memory(replace(config, model=replace(config.model, offload_activations=True)))
    assert saved.on_device < plain.on_device
    assert saved.on_host - plain.on_host == saved.host_activations > saved.activations / 2
    flags = plans.first_that_fits(offloaded.on_device)
    assert flags is not None
    assert "--optim.offload cpu" in flags
    plans.host_bytes = offloaded.on_host
    assert not plans.fits(offloading, offloaded.on_device)
    rates = rates_of_gpu("H100 PCIe", "bf16")
    steps = plans.step_planner(rates, None)
    fast, slow, slowest = (plans.step(each, steps).total_s for each in (config, offloading, fetching))
    assert fast < slow < slowest


def test_offloading_without_enough_host_memory_is_refused(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tiny_model("llama", **WIDE), tmp_path, micro=1)
    config = replace(config, optim=replace(config.optim, offload="cpu"))
    model, gpu = describe_run_model(config), cast("Streams", SimpleNamespace(gpu="GPU-0", memory_bytes=lambda: 2**40))
    [planned] = planner_of(config, 1).memory(config)
    monkeypatch.setattr(planner, "PROCESS_BYTES", 0)
    copied = planned.on_host + planned.masters + planned.moments  # for a checkpoint
    for spare, is_refused in ((0, False), (-1, True)):
        memory = HostMemory(2 * (copied + spare), 0, 0, is_limited=False)
        monkeypatch.setattr(planner, "host_memory", lambda memory=memory: memory)
        refusal = pytest.raises(ValueError, match=r"host memory for 2 processes, .*; use --dp\.shard optimizer; --run")
        with refusal if is_refused else nullcontext():
            assert planner.check_fit(config, Launch(world_size=2, local_world_size=2), model, gpu) is None


@pytest.mark.parametrize(
    ("argv", "nearest"),
    [
        ("--optim.offload cpu", "--dp.shard optimizer"),
        pytest.param(
            "--pp.stages 2 --pp.forward delta:bits=4 --sequences 10000000", "--pp.stages 1", marks=pytest.mark.soak
        ),
    ],
)
def test_hosts_share_their_memory_among_their_processes(
    argv: str, nearest: str, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = (str(run_file), "--pp.micro", "1", "--world", "2", "--per-host", "2", *argv.split())
    _, text, _ = plan(capsys, *run, "--json")
    [needed] = json.loads(text)["hosts"]
    code, text, _ = plan(capsys, *run, "--host-memory", f"{(needed - 1) / 1e9:.9f}GB")
    assert code
    assert "does not fit: host 0 needs" in text
    assert text.endswith(f"; use {nearest}\n")


def test_training_takes_every_run_that_a_plan_proposes(run_file: Path) -> None:
    argv = [str(run_file), "--data.batch", "15", "--pp.micro", "15", "--pp.layers", "3"]
    variants = [*planner_of(parse(argv, prog="", is_main=False), 2).smaller()]
    assert [micro for micro, _ in itertools.groupby(changed.pp.micro for _, changed in variants)] == [15, 5, 1] * 6
    assert {flag for flags, _ in variants for flag in flags} >= {"--model.offload cpu", "--dp.shard weights"}
    for flags, changed in variants:
        typed = parse([*argv, *(word for flag in flags for word in flag.split())], prog="", is_main=False)
        check(typed)
        assert typed == changed


def test_a_run_that_cannot_fit_is_refused_before_it_loads_weights(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tiny_model("llama", **WIDE), tmp_path, micro=6)
    config = replace(config, run=replace(config.run, device="cpu"))
    job = prepare(config, Launch())
    [planned] = plan_memory(job, trace_model(job))
    monkeypatch.setattr(planner, "PROCESS_BYTES", 0)
    monkeypatch.setattr(Streams, "memory_bytes", lambda self: int(planned.total / 1.05))
    prepare(config, Launch())
    monkeypatch.setattr(Streams, "memory_bytes", lambda self: int(planned.total / 1.15))
    with pytest.raises(
        ValueError, match=r"the run does not fit: rank 0 needs .*; use --model\.recompute layers; --run"
    ):
        prepare(config, Launch())
    prepare(config, Launch(), trains=False)
    prepare(replace(config, run=replace(config.run, memory="ignore")), Launch())
    assert "may not fit" not in capsys.readouterr().err
    prepare(replace(config, model=replace(config.model, compile=True)), Launch())  # of which activations are estimates
    assert "memory: the run may not fit: rank 0 needs" in capsys.readouterr().err
    monkeypatch.setattr(planner, "RunPlanner", None)  # is not called where there is room
    monkeypatch.setattr(Streams, "memory_bytes", lambda self: 9 * planned.total)
    prepare(config, Launch())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--pp.micro", "4"], "pp.micro=4 does not divide data.batch=6"),
        (["--sequences", "0"], "--sequences"),
        (["--memory", "24"], "--memory 24 is not a size; give a number with a unit, such as 24GiB"),
        (["--memory", "0GiB"], "--memory 0GiB is not a size"),
        (["--host-memory", "1"], "--host-memory 1 is not a size; give a number with a unit, such as 128GiB"),
        (["--host-memory", "9GB", "--memory", "9GB", "--run.device", "cpu"], "both limit the host"),
        (["--world", "0"], "--world"),
        (["--world", "3", "--pp.stages", "2"], "pp.stages=2 does not divide the number of processes, 3; use"),
        (["--pp.stage", "2"], "did you mean --pp.stages"),
    ],
)
def test_a_plan_refuses_in_one_sentence(
    argv: list[str], message: str, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, text = plan(capsys, str(run_file), *argv)
    assert code
    assert not out
    assert message in text.replace("\n", " ")
    assert "Traceback" not in text


def test_a_model_without_layers_is_refused(run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"vocab_size": 64, "d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 32}
    XLNetConfig(**sizes, architectures=["XLNetLMHeadModel"]).save_pretrained(tmp_path / "xlnet")
    code, out, text = plan(capsys, str(run_file), "--model.name", str(tmp_path / "xlnet"))
    assert code
    assert not out
    text = text.replace("\n", " ")
    assert "cannot be divided into layers: hidden enters layer block-00000 with axis 1" in text
    assert text.strip().endswith("give one of a type in docs/models.md")
