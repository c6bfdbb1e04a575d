"""Laws of the predicted time of a step: by hand where it is simple, by the simulator where it is not."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import multiprocessing
import os
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from acsgd import cli
from acsgd.commands import plan as command
from acsgd.config.checks import check
from acsgd.config.options import Config
from acsgd.config.run_file import parse, to_toml
from acsgd.dp.modes import measured_work
from acsgd.errors import CorruptFileError
from acsgd.pp import passes
from acsgd.pp.schedules.simulate import Cost
from acsgd.pp.stage import Stage
from acsgd.pp.wire.frame import HEADER_BYTES
from acsgd.run.plan import measure_messages as measure_module
from acsgd.run.plan import planner as planner_module
from acsgd.run.plan import step_time
from acsgd.run.plan.layer_trace import RecordingModel
from acsgd.run.plan.measure import measure_layers
from acsgd.run.plan.measure_messages import NBYTES, MeasuredMessages, _bytes_per_s, _MessageTime, measure_messages
from acsgd.run.plan.model import describe_run_model
from acsgd.run.plan.planner import RunPlanner
from acsgd.run.plan.rates import (
    HOST_BYTES_PER_S,
    SPLIT,
    VERSION,
    LayerTimes,
    LinkRate,
    MessageTimes,
    Rates,
    parse_link,
    rates_of_gpu,
)
from acsgd.run.plan.step_time import PlannedStep
from tests.lib.model_types import small_config
from tests.lib.training import make_config

SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 192}
RATES = Rates("test", False, "fp32", operations_per_s=1e9, bytes_per_s=math.inf)
SLOW = LinkRate(1e6, 0.25)
MESSAGES = MessageTimes(end_s=0.5, end_byte_s=0.0, sum_byte_s=1e-6, part_byte_s=3e-6, cores=2)


def planned(config: Config, world: int, rates: Rates = RATES, link: LinkRate | None = None) -> PlannedStep:
    planner = RunPlanner(config, world, describe_run_model(config), on_gpu=False)
    return planner.step(config, planner.step_planner(rates, link))


def with_times(config: Config, forward: list[float], backward: list[float], **others: float) -> Rates:
    """Return rates with measured times of layers."""
    planner = RunPlanner(config, config.pp.stages, describe_run_model(config), on_gpu=False)
    return replace(RATES, layers=LayerTimes(planner.key(config), tuple(forward), tuple(backward), **others))


@pytest.fixture
def config(tiny_model: Any, tmp_path: Path) -> Config:
    """A run of 4 layers, blocks among them two, with 6 micro-batches."""
    return make_config(tiny_model("llama", **SIZES), tmp_path, micro=1)


def test_a_process_computes_its_layers_for_each_micro_batch(config: Config) -> None:
    step = planned(config, 1, with_times(config, [1, 2, 3, 4], [5, 6, 7, 8]))
    assert (step.compute_s, step.total_s, step.links) == (6 * 36, 6 * 36, ())
    split = replace(config, pp=replace(config.pp, schedule="zb"))
    assert planned(split, 1, with_times(split, [1, 2, 3, 4], [5, 6, 7, 8])).compute_s == pytest.approx(
        6 * (10 + SPLIT * 26)
    )
    assert planned(split, 1, with_times(split, [1, 2, 3, 4], [5, 6, 7, 8], split=1.5)).compute_s == 6 * (10 + 1.5 * 26)
    last = replace(config, pp=replace(config.pp, schedule="1f1b:split_last=true"))
    assert planned(last, 1, with_times(last, [1, 2, 3, 4], [5, 6, 7, 8], split=1.5)).compute_s == 6 * 36 + 0.5 * 26
    assert planned(config, 1, with_times(config, [1, 2, 3, 4], [5, 6, 7, 8], context_s=0.5)).compute_s == 6 * 36.5
    chunks = replace(config, pp=replace(config.pp, stages=2, schedule="interleaved:chunks=2"))
    assert planned(chunks, 2, with_times(chunks, [1] * 4, [2] * 4, context_s=0.5)).compute_s == 6 * 2 * (3 + 0.5)


def test_micro_batches_of_other_sizes_and_recomputation_take_time_in_proportion(config: Config) -> None:
    planner = RunPlanner(config, 1, describe_run_model(config), on_gpu=False)
    steps = planner.step_planner(RATES, None)
    whole = planner.step(config, steps).compute_s
    assert planner.step(replace(config, pp=replace(config.pp, micro=3)), steps).compute_s == pytest.approx(whole)
    again = planner.step(replace(config, model=replace(config.model, recompute="layers")), steps).compute_s
    assert again == pytest.approx(4 / 3 * whole, rel=0.05)


def test_each_layer_takes_the_time_of_its_own_recomputation(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock counts forwards of layers."""
    calls, call = list[int](), RecordingModel.call

    def counted(self: Any, index: int, *args: Any) -> Any:
        calls.append(index)
        return call(self, index, *args)

    monkeypatch.setattr(RecordingModel, "call", counted)
    config = replace(config, model=replace(config.model, recompute="every:2"))
    planner = RunPlanner(config, 1, describe_run_model(config), on_gpu=False)
    times = measure_layers(planner.partition(config), 0.0, lambda: float(len(calls)))
    assert times.backward_s[1:3] == (1, 1), "both blocks are run again in their own backward"


@pytest.mark.parametrize(
    ("family", "schedule", "ratio"),
    [("llama", "auto", 3.0), ("gpt2", "zb", 3.0), ("t5", "zb", SPLIT), ("llama", "1f1b", SPLIT)],
)
def test_a_split_backward_takes_the_time_of_its_parts(
    family: str, schedule: str, ratio: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock counts whole backwards, and layers whose inputs get their gradients first: all but the embedding.

    The table of GPT-2 is its head, too; tensors of T5 are replicated.
    """
    calls = list[str]()

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        calls.append("whole")
        return backward(self, *args, **options)

    def counted_inputs(inputs: Any, *args: Any) -> Any:
        calls.extend(["inputs"] * bool(inputs))
        return backward_inputs(inputs, *args)

    backward, backward_inputs = Stage.backward, passes.backward_inputs
    monkeypatch.setattr(Stage, "backward", counted)
    monkeypatch.setattr(passes, "backward_inputs", counted_inputs)
    path = tmp_path / "model"
    small_config(family).save_pretrained(path)
    config = make_config(path, tmp_path, micro=1, stages=2, schedule=schedule)
    config = replace(config, model=replace(config.model, task="seq2seq" if family == "t5" else "lm"))
    planner = RunPlanner(config, 2, describe_run_model(config), on_gpu=False)
    assert measure_layers(planner.partition(config), 0.0, lambda: float(len(calls))).split == ratio


def test_a_pipeline_idles_and_waits_for_messages(config: Config) -> None:
    """1F1B of two stages that take 1 s + 2 s: 5 forwards and backwards besides the first wait for none."""
    staged = replace(config, pp=replace(config.pp, stages=2, layers=(1, 1)))
    rates = with_times(staged, [0.5] * 4, [1.0] * 4)
    alone = planned(staged, 2, rates)
    assert (alone.compute_s, alone.bubble_s, alone.messages_s) == (18, 3, 0)
    message = 48 + config.data.sequence * 64 * 4
    linked = planned(staged, 2, rates, SLOW)
    assert [(each.name, each.nbytes) for each in linked.links] == [
        ("stages 0 -> 1", 6 * message),
        ("stages 0 <- 1", 6 * message),
    ]
    assert linked.compute_s == alone.compute_s
    assert linked.messages_s > 2 * SLOW.delay_s
    parts = linked.compute_s + linked.bubble_s + linked.messages_s + linked.replicas_s + linked.update_s
    assert linked.total_s == parts


def test_a_step_waits_for_rows_of_tied_tables_notices_and_reports(tiny_model: Any, tmp_path: Path) -> None:
    """One micro-batch: a delay each for the notice that the receive of its rows is posted, 5 messages, and the report.

    The rows come before all computations, and their gradients after them.
    """
    tied = make_config(tiny_model("gpt2", tie_word_embeddings=True), tmp_path, micro=1, stages=2)
    tied = replace(tied, data=replace(tied.data, batch=1))
    layers = len(describe_run_model(tied).layers)
    rates = with_times(tied, [0.5] * layers, [1.0] * layers)
    alone, linked = planned(tied, 2, rates), planned(tied, 2, rates, SLOW)
    rows = tied.data.sequence * 32 * 4
    nbytes = 2 * rows + 2 * (HEADER_BYTES + rows)  # both ways; a micro-batch has as many rows as activations
    assert alone.total_s == 1.5 * layers
    assert linked.total_s - alone.total_s == pytest.approx(6 * SLOW.delay_s + nbytes / SLOW.bytes_per_s)


def test_messages_take_the_time_of_the_thread_that_computes(config: Config) -> None:
    staged = replace(config, pp=replace(config.pp, stages=2, layers=(1, 1)))
    rates = replace(with_times(staged, [0.5] * 4, [1.0] * 4), messages=MESSAGES)
    assert planned(staged, 2, rates).compute_s == 18 + 6 * 2 * 0.5
    on_gpu = replace(rates, on_gpu=True, layers=None, operations_per_s=1e6)
    assert planned(staged, 2, on_gpu) == planned(staged, 2, replace(on_gpu, messages=None)), "the host runs ahead"


@pytest.mark.parametrize(("shard", "byte_s"), [("none", 1e-6), ("optimizer", 3e-6)])
def test_sums_take_the_time_of_cores_that_compute(shard: Any, byte_s: float, config: Config) -> None:
    changed = replace(config, dp=replace(config.dp, shard=shard, mode="allreduce:bucket_mb=0.1"))
    rates = replace(RATES, operations_per_s=1e3, messages=MESSAGES)
    planner = RunPlanner(changed, 2, describe_run_model(changed), on_gpu=False, per_host=2)
    shared = planner.step(changed, planner.step_planner(rates, None))
    [load] = shared.links
    assert shared.replicas_s == pytest.approx(load.nbytes * byte_s)
    assert load.busy_s == pytest.approx(load.nbytes * byte_s), "the sum takes longer than the link"
    assert planned(changed, 2, rates).replicas_s < shared.replicas_s, "each process has a core for them"


def test_offloaded_activations_take_the_time_that_computation_does_not_hide(config: Config) -> None:
    saving = replace(config, model=replace(config.model, offload_activations=True))
    planner = RunPlanner(saving, 1, describe_run_model(saving), on_gpu=True)
    rates = replace(RATES, on_gpu=True, operations_per_s=1e15)
    rate, nbytes = 1e6, sum(each.kept for each in planner._trace(saving, planner.partition(saving)).layers)
    plain, slow, fast = (
        planner.step(each, planner.step_planner(replace(rates, host_bytes_per_s=bytes_per_s), None))
        for each, bytes_per_s in ((config, rate), (saving, rate), (saving, 1e15))
    )
    assert slow.update_s - plain.update_s == pytest.approx(6 * 2 * nbytes / rate - slow.compute_s)
    assert fast.update_s == pytest.approx(plain.update_s, abs=1e-6)


def test_a_gpu_waits_for_copies_of_what_is_read_from_files(config: Config) -> None:
    """Copies from host memory are hidden, and reads, but not the copies that follow these. Two passes fetch a layer."""
    frozen = replace(config, model=replace(config.model, freeze="model.layers.*"))
    rates = replace(RATES, on_gpu=True, operations_per_s=1e3)
    description = describe_run_model(frozen)
    nbytes = 4 * (description.parameters.frozen)
    kept, cpu, disk = (
        planned(replace(frozen, model=replace(frozen.model, offload=offload)), 1, rates)
        for offload in ("none", "cpu", "disk")
    )
    assert cpu.update_s == kept.update_s
    assert disk.update_s - kept.update_s == pytest.approx(6 * 2 * nbytes / rates.host_bytes_per_s)


def test_the_thread_that_computes_on_a_cpu_copies_what_is_offloaded(config: Config) -> None:
    """6 micro-batches: each gradient is copied, the first one twice, and each master, which is read and written.

    A parameter is fetched for both passes of each.
    """
    rates = replace(RATES, operations_per_s=1e3, bytes_per_s=1e9, host_bytes_per_s=1e8)
    nbytes = 4 * describe_run_model(config).parameters.trained
    optim, params = replace(config.optim, offload="cpu"), replace(config.model, offload="cpu")
    kept, state, both = (
        planned(each, 1, rates)
        for each in (config, replace(config, optim=optim), replace(config, optim=optim, model=params))
    )
    assert state.update_s - kept.update_s == pytest.approx((3 * (6 + 1) + 2) * nbytes / 1e9)
    assert both.update_s - state.update_s == pytest.approx(6 * 2 * nbytes / 1e8), "not hidden"


def test_a_cpu_waits_for_what_is_read_longer_than_the_layer_before_runs(config: Config) -> None:
    """Two blocks, which a read takes 1 s each; each pass of 6 micro-batches begins with a layer that is not read."""
    frozen = replace(config, model=replace(config.model, freeze="model.layers.*", offload="disk"))
    nbytes = 4 * describe_run_model(frozen).parameters.frozen
    times = [0.3, 0.4, 9.0, 9.0], [9.0, 9.0, 0.8, 0.6]
    rates = replace(with_times(frozen, *times), host_bytes_per_s=nbytes / 2)
    assert planned(frozen, 1, rates).update_s == pytest.approx(6 * (0.7 + 0.6 + 0.4 + 0.2))
    one_core = replace(rates, messages=replace(MESSAGES, cores=1))
    assert planned(frozen, 1, one_core).update_s == pytest.approx(6 * 4)


def test_replicas_exchange_what_backward_does_not_hide(config: Config) -> None:
    config = replace(config, data=replace(config.data, batch=8))
    trained = describe_run_model(config).parameters.trained
    sent = {}
    for mode, shard, expected in (
        ("allreduce", "none", 2 * 3 / 4 * 4 * trained),
        ("allreduce", "optimizer", 3 / 4 * 8 * trained),
        ("allreduce", "gradients", 3 / 4 * 12 * trained),
        ("allreduce", "weights", 3 / 4 * (8 + 4 * 4) * trained),
        ("quantized:bits=4", "none", 2 * 3 / 4 * trained / 2),
        ("diloco:inner=10", "none", 2 * 3 / 4 * 4 * trained / 10),
        ("local", "none", 0),
    ):
        changed = replace(config, dp=replace(config.dp, mode=mode, shard=shard))  # type: ignore[arg-type]
        step = planned(changed, 4, RATES, SLOW)
        sent[mode, shard] = sum(each.nbytes for each in step.links)
        assert sent[mode, shard] == pytest.approx(expected), mode
        assert step.replicas_s <= (busy_s := sum(each.busy_s for each in step.links)) + SLOW.delay_s
        if shard == "weights":
            gathers = 2 * 2 * 4  # for forward and backward of 2 micro-batches, of 4 layers
            assert busy_s == pytest.approx(expected / SLOW.bytes_per_s + gathers * SLOW.delay_s)
    rates = replace(RATES, bytes_per_s=1e9)
    modes = (replace(config, dp=replace(config.dp, mode=mode)) for mode in ("allreduce", "cocktail_grad:topk=0.2"))
    plain, compressed = (planned(changed, 4, rates, LinkRate(math.inf)).replicas_s for changed in modes)
    assert compressed - plain == pytest.approx(14 * 28 * trained / 1e9), "cocktail_grad computes, too"
    assert [measured_work(mode) for mode in ("cocktail_grad:topk=0.2", "diloco:inner=9", "allreduce")] == [14, 0.3, 0]
    for mode in ("cocktail_grad:topk=0.2", "sharded_ps"):  # as measured, with what it sends
        compressed = replace(config, dp=replace(config.dp, mode=mode))
        messages = replace(MESSAGES, mode=mode, mode_param_s=1e-3)
        step = planned(compressed, 4, replace(rates, messages=messages), LinkRate(math.inf))
        assert step.replicas_s == pytest.approx(1e-3 * trained)
    compressed = replace(config, dp=replace(config.dp, mode="sharded_ps:bucket_mb=0.1", shard="none"))
    messages = replace(messages, mode=compressed.dp.mode, cores=99)
    slow = replace(rates, operations_per_s=1.0, messages=messages)
    assert planned(compressed, 4, slow, LinkRate(math.inf)).replicas_s < 1e-3 * trained / 3, "behind the backward"
    divided = replace(compressed, dp=replace(compressed.dp, shard="optimizer"))
    planner = RunPlanner(divided, 4, describe_run_model(divided), on_gpu=False, per_host=2)
    (load,) = planner.step(divided, planner.step_planner(slow, LinkRate(math.inf))).links
    assert load.busy_s == pytest.approx(1e-3 * trained / 2), "each replica has half of what its host exchanges"
    in_buckets = replace(config, dp=replace(config.dp, mode="allreduce:bucket_mb=0.1"))
    hidden = planned(in_buckets, 4, replace(RATES, operations_per_s=1e3), SLOW)
    in_view = planned(in_buckets, 4, replace(RATES, operations_per_s=1e15), SLOW)
    assert in_view.replicas_s == pytest.approx(sum(each.busy_s for each in in_view.links) + SLOW.delay_s)
    assert hidden.replicas_s - SLOW.delay_s < in_view.replicas_s / 5


@pytest.mark.parametrize(
    ("schedule", "stages"),
    [("1f1b", 2), ("gpipe", 2), ("interleaved:chunks=2", 2), ("zb", 2), ("zb:lead=8", 4), ("1f1b:split_last=true", 4)],
)
def test_long_steps_take_the_time_of_their_simulation(schedule: str, stages: int, config: Config) -> None:
    config = replace(config, data=replace(config.data, batch=96))
    config = replace(config, pp=replace(config.pp, stages=stages, schedule=schedule))
    planner = RunPlanner(config, stages, describe_run_model(config), on_gpu=False)
    partition = planner.partition(config)
    for cost in (Cost(), Cost(1.0, 2.0, 3.5, delay=2.0), Cost(1.0, 2.0, delay=7.5)):
        found = step_time.ends_of(partition, 96, cost)
        assert found == pytest.approx(step_time._simulated_ends(partition, 96, cost), rel=0.02)


def test_the_fastest_runs_fit_and_can_be_typed(config: Config) -> None:
    config = replace(config, data=replace(config.data, batch=8), pp=replace(config.pp, stages=1))
    planner = RunPlanner(config, 2, describe_run_model(config), on_gpu=False)
    steps = planner.step_planner(replace(RATES, operations_per_s=1e11), LinkRate(1e5))
    own = planner.step(config, steps).total_s
    found = planner.fastest(steps, None)
    assert found[0].step.total_s < own / 2
    assert "--pp.stages 2" in found[0].flags, "activations are smaller than gradients"
    limit = max(map(planner.needed, planner.memory(config)))
    fitting = planner.fastest(steps, limit - 1)
    for alternative in (*found, *fitting):
        argv = [word for flag in alternative.flags for word in flag.split()]
        path = Path(config.log.dir).parent / "run.toml"
        path.write_text(to_toml(config))
        typed = parse([str(path), *argv], prog="", is_main=False)
        check(typed)
        assert planner.step(typed, steps) == alternative.step
        if alternative in fitting:
            assert planner.fits(typed, limit - 1)


@pytest.mark.parametrize(
    ("recomputed", "shards"),
    [
        (("layers",), ("none", "optimizer")),
        pytest.param(planner_module.RECOMPUTED, planner_module.SHARDS, marks=pytest.mark.soak),
    ],
)
def test_no_other_run_of_a_small_space_fits_and_is_faster(
    recomputed: tuple[Any, ...], shards: tuple[Any, ...], config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the planned run itself keeps, divides or recomputes."""
    for name, value in (
        ("RECOMPUTED", recomputed),
        ("SHARDS", shards),
        ("CANDIDATES", ("1f1b",)),
        ("PROCESS_BYTES", 0),
    ):
        monkeypatch.setattr(planner_module, name, value)
    config = replace(config, data=replace(config.data, batch=4), model=replace(config.model, recompute="layers"))
    planner = RunPlanner(config, 2, describe_run_model(config), on_gpu=True)
    rates = Rates("test", True, "fp32", operations_per_s=1e9, bytes_per_s=1e9, host_bytes_per_s=1e8)
    steps, space = planner.step_planner(rates, LinkRate(1e8)), list[tuple[int, float, int]]()
    for stages, micro, recompute, shard, offload in itertools.product(
        (1, 2), (1, 2, 4), ("none", *recomputed), shards, ("none", "cpu")
    ):
        changed = replace(
            config,
            pp=replace(config.pp, stages=stages, micro=micro),
            model=replace(config.model, recompute=recompute),
            dp=replace(config.dp, shard=shard),
            optim=replace(config.optim, offload=offload),
        )
        with contextlib.suppress(ValueError):  # such as as many micro-batches as replicas
            needed = max(map(planner.needed, planner.memory(changed)))
            space.append((stages, planner.step(changed, steps).total_s, needed))
    by_memory = sorted({needed for *_, needed in space})
    for limit in (by_memory[0], by_memory[len(by_memory) // 3], by_memory[-1]):
        found = planner.fastest(steps, limit, count=4)
        for kind in {stages for stages, _, needed in space if needed <= limit}:
            least_s = min(seconds for stages, seconds, needed in space if stages == kind and needed <= limit)
            times = [each.step.total_s for each in found if ("--pp.stages 2" in each.flags) == (kind == 2)]
            if kind == 1 and planner.fits(config, limit):
                times.append(planner.step(config, steps).total_s)
            assert min(times) <= least_s * (1 + 1e-9)


def run_plan(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[Any, str, str]:
    with pytest.raises(SystemExit) as end:
        cli.run(["plan", *map(str, argv)])
    return end.value.code, *capsys.readouterr()


def test_measured_rates_are_kept_in_the_run_directory(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "CALIBRATED_S", 0.2)
    of_messages = MeasuredMessages(LinkRate(1e9), MESSAGES)
    of_messages = of_messages._replace(
        times=replace(MESSAGES, mode="cocktail_grad:exact_steps=0.5 epochs", mode_param_s=1e-8)
    )
    measured = {
        "cocktail_grad:exact_steps=0.5 epochs": of_messages,
        "allreduce": MeasuredMessages(LinkRate(1), MESSAGES),
    }
    monkeypatch.setattr("acsgd.run.plan.measure_messages.measure_messages", lambda seconds, mode: measured[mode])
    (path := tmp_path / "run.toml").write_text(to_toml(config))
    mode = of_messages.times.mode
    of_replicas = ("--calibrate", "--dp.mode", mode, "--world", 2)
    code, text, _ = run_plan(capsys, path, "--run.device", "cpu", *of_replicas)
    assert code == 0
    assert "time of a step on the CPU of this host: " in text
    rates = Rates.read(Path(config.log.dir) / "rates.json")
    assert rates is not None
    assert rates.layers is not None
    assert len(rates.layers.forward_s) == 4
    assert min(*rates.layers.forward_s, *rates.layers.backward_s, rates.layers.context_s) > 0
    assert MeasuredMessages(rates.link, rates.messages) == of_messages
    assert rates.host_bytes_per_s != Rates("", False, "fp32", 1.0, 1.0).host_bytes_per_s
    _, text, _ = run_plan(capsys, path, "--run.device", "cpu", "--json")
    assert json.loads(text)["step"]["compute_s"] == pytest.approx(
        6 * (rates.layers.context_s + sum(rates.layers.forward_s) + sum(rates.layers.backward_s))
    )
    code, _, text = run_plan(capsys, path, "--model.dtype", "bf16")
    assert code
    assert "add --calibrate, or --device NAME" in text.replace("\n", " ")
    (other := tmp_path / "other.json").write_text(f'{{"version": {VERSION}}}')
    with pytest.raises(CorruptFileError, match=r"does not hold measured rates: .*; --calibrate writes it anew"):
        Rates.read(other)
    other.write_text("{}")
    monkeypatch.setattr(command, "measure_here", lambda config, world: rates)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    code, _, text = run_plan(capsys, path, "--run.device", "cpu", "--rates", other)
    assert code
    assert f"--rates {other} was written by another version; --calibrate measures" in text.replace("\n", " ")
    assert other.read_text() == "{}"
    (other := Path(config.log.dir) / "rates.json").write_text("{}")
    code, _, text = run_plan(capsys, path, "--run.device", "cpu", "--world", "2", "--per-host", "2")
    assert code == 0
    assert "was written by another version; measuring this machine again" in text.replace("\n", " ")
    assert "measured with 4 threads, but torchrun gives each of several processes" in text.replace("\n", " ")
    assert Rates.read(other) == rates


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["allreduce", "powersgd", "cocktail_grad:exact_steps=0.5 epochs"])
def test_messages_and_modes_are_measured_between_two_processes(mode: str) -> None:
    link, times = measure_messages(0.1, mode)
    if mode == "allreduce":
        assert (times.mode, times.mode_param_s) == ("", 0)
    else:
        assert times.mode == mode
        assert 1e-11 < times.mode_param_s < 1e-6
    assert link.delay_s < 0.1
    assert link.bytes_per_s > 1e7
    assert 1e-5 < times.end_s < 0.1
    assert 0 < times.sum_byte_s < times.part_byte_s < 1e-6


def _end(*_: Any) -> None:
    os._exit(1)


def _end_second(rank: int, *arguments: Any) -> None:
    if rank == 1:
        os._exit(1)
    arguments[-1].send(MeasuredMessages(SLOW, MESSAGES))


def _fail(*_: Any) -> None:
    raise RuntimeError("no network\nand more")


def _hang(*_: Any) -> None:
    time.sleep(600)


@pytest.mark.parametrize(
    ("name", "breaks", "timeout_s", "message"),
    [
        ("_be_rank", _end, 60, "process 0: it ended without a message"),
        ("_be_rank", _end_second, 60, "process 1: it ended without a message"),
        ("_measure", _fail, 60, "process 0: RuntimeError: no network; acsgd doctor"),
        ("_be_rank", _hang, 0, "process 0: no result after 0.5 s"),
    ],
)
def test_processes_that_cannot_measure_messages_say_why(
    name: str, breaks: Any, timeout_s: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forked processes have the broken function."""
    monkeypatch.setattr(measure_module, name, breaks)
    monkeypatch.setattr(measure_module, "TIMEOUT", timedelta(seconds=timeout_s))
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: fork)
    with pytest.raises(ValueError, match=message):
        measure_messages(0.1, "allreduce")


def test_a_link_is_no_faster_than_memory_and_carries_long_messages_in_their_time() -> None:
    def rate(waited_s: float, wall_s: float) -> float:
        return _bytes_per_s(_MessageTime(0.003, 0.001), _MessageTime(wall_s, wall_s - waited_s))

    assert rate(0.012, 0.02) == pytest.approx(NBYTES / 0.01)
    assert rate(0.001, 0.02) == NBYTES / 0.02, "shorter than the wait for a short message"
    assert rate(0.002 + 1e-9, 0.02) == HOST_BYTES_PER_S


def test_links_and_devices_are_named() -> None:
    assert parse_link("100mbit,20ms") == LinkRate(12.5e6, 0.02)
    assert parse_link("1Gbit") == LinkRate(125e6, 0.0)
    assert rates_of_gpu("RTX 4090", "bf16").device == rates_of_gpu("geforce rtx4090", "bf16").device
    assert rates_of_gpu("H100 nvl", "bf16").device == rates_of_gpu("NVIDIA H100 NVL", "bf16").device == "H100 NVL"
    assert rates_of_gpu("A100", "bf16").device == "A100"
    assert rates_of_gpu("A100", "bf16").operations_per_s > 2 * rates_of_gpu("A100", "fp32").operations_per_s


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--link", "100"], "--link 100 is not a rate and a delay; give, for example, --link 100mbit,20ms"),
        (["--link", "0mbit"], "--link 0mbit is not a rate"),
        (["--device", "RTX 4091"], "--device RTX 4091 is not a known GPU"),
        (["--device", "0"], "--device 0 is not a known GPU"),
        (["--device", "H100"], "--device H100 may be H100 80GB HBM3 or H100 NVL or H100 PCIe; give its whole name"),
        (["--device", "A100", "--calibrate"], "give one of them"),
        (["--device", "A100", "--rates", "rates.json"], "give one of them"),
        (["--device", "A100", "--run.device", "cpu"], "--device A100 names a GPU, and run.device=cpu uses none"),
        (["--rates", "absent.json"], "--rates absent.json is not there; --calibrate measures this machine"),
    ],
)
def test_what_is_not_known_is_refused(
    argv: list[str], message: str, config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path := tmp_path / "run.toml").write_text(to_toml(config))
    code, _, text = run_plan(capsys, path, *argv)
    assert code
    assert message in text.replace("\n", " ")


@pytest.mark.parametrize(
    ("forward", "bits"),
    [
        ("delta:step=1.5", 1.65),
        ("delta:first_bits=8,step=1.8", 1.65),
        ("delta:bits=4", 4.5625),  # not entropy-coded: with scales
        ("delta:step=1.3,transform=true,first_bits=8", 1.07),
        ("delta:transform=true,step=1.5", 1.07),
        ("transform:step=0.1", 2.71),
        ("transform:step=0.17", 2.33),
    ],
)
def test_entropy_coded_messages_have_the_bits_that_were_measured(config: Config, forward: str, bits: float) -> None:
    config = replace(config, pp=replace(config.pp, stages=2, forward=forward))
    planner = RunPlanner(config, 2, describe_run_model(config), on_gpu=False)
    (activations, *_), _ = step_time.message_bytes(planner.partition(config))
    assert activations == HEADER_BYTES + bits / 8 * config.pp.micro * config.data.sequence * SIZES["hidden_size"]


def test_planned_gradients_with_a_cache_have_the_bits_that_were_measured(config: Config) -> None:
    """That of activations where none was measured of gradients."""
    measured = {
        "delta:step=0.5,transform=true,rounding=stochastic": 2.35,
        "delta:step=0.5,transform=true": 2.12,
        "delta:step=1.1,transform=true": 1.41,
        "delta:step=2.5": 1.05,
        "none": 32,
    }
    bits = []
    for backward in measured:
        config = replace(config, pp=replace(config.pp, stages=2, backward=backward))
        planner = RunPlanner(config, 2, describe_run_model(config), on_gpu=False)
        _, (gradients, *_) = step_time.message_bytes(planner.partition(config))
        bits.append(8 * (gradients - HEADER_BYTES))
    assert [32 * each / bits[-1] for each in bits] == pytest.approx([*measured.values()])
