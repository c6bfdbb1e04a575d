"""Laws of options that are chosen at the start: what is taken is what is predicted to be the shortest."""

from __future__ import annotations

import itertools
import json
import math
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from acsgd.config.options import Config, PipelineConfig, ReplicaConfig
from acsgd.config.spec import from_spec
from acsgd.dp.ladder import MEASURED
from acsgd.dp.modes import compression
from acsgd.launch import Launch
from acsgd.pp.schedules.lowering import lower
from acsgd.pp.schedules.schedules import CANDIDATES, SCHEDULES
from acsgd.pp.schedules.simulate import Cost, simulate
from acsgd.run.plan.choose import (
    GAIN,
    MAX_ORDERS,
    HostPlanner,
    MeasuredHosts,
    MeasuredRanks,
    ModePlanner,
    TimedRun,
    compare_orders,
    timed_divisions,
    timed_orders,
)
from acsgd.run.plan.job import prepare
from acsgd.run.plan.model import describe_run_model
from acsgd.run.plan.partition import Partition, divide_model, open_grid, topology_of
from acsgd.run.plan.plugins import parse_modes
from acsgd.run.plan.rates import SPLIT, LayerTimes, LinkRate, Rates
from acsgd.run.plan.step_time import StepPlanner
from acsgd.run.setup import auto
from acsgd.shards.plan import blocks_of
from acsgd.streams import open_streams
from tests.lib.training import make_config

SIZES = {"num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 192}
"""8 layers with the embedding and the head."""


@pytest.fixture
def config(tiny_model: Callable[..., Path], tmp_path: Path) -> Config:
    plain = make_config(tiny_model("llama", **SIZES), tmp_path, stages=4, schedule="auto")
    return replace(plain, data=replace(plain.data, batch=8))


def divided(config: Config) -> Partition:
    grid = open_grid(config, Launch(0, 0, config.pp.stages))
    return divide_model(config, grid, describe_run_model(config), open_streams("cpu", 0))


def ranks(stages: int, link: LinkRate, *, layer_s: float = 1.0) -> MeasuredRanks:
    """Return alike ranks and links. layer_s: time of the forward of a layer, half of that of its backward."""
    pairs = [pair for rank in range(stages) for pair in ((rank, (rank + 1) % stages), ((rank + 1) % stages, rank))]
    return MeasuredRanks((LayerTimes("", (layer_s,) * 8, (2 * layer_s,) * 8),) * stages, dict.fromkeys(pairs, link))


FREE = LinkRate(float("inf"))


@pytest.mark.parametrize("link", [FREE, LinkRate(1e9, 0.5), LinkRate(1e9, 3.0), LinkRate(20e3, 0.1)])
def test_no_other_schedule_makes_a_shorter_step(link: LinkRate, config: Config) -> None:
    """Each is simulated anew, with stages of two layers, or chunks of one, and split backwards that take longer."""
    found = timed_divisions(divided(config), ranks(4, link))
    times = {}
    message = 48 + config.data.sequence * 64 * 4
    for spec in CANDIDATES:
        schedule: Any = from_spec(spec, SCHEDULES, key="")
        layers = 2 / schedule.chunks
        sent = message / link.bytes_per_s
        cost = Cost(layers, 2 * layers, sent, sent, link.delay_s, weight=SPLIT * layers, inputs=SPLIT * layers)
        times[spec] = float(simulate(lower(schedule.program(4, 8)), cost).makespan)
    assert {each.schedule: each.step_s for each in found} == pytest.approx(times)
    shortest = min(times.values())
    near = [spec for spec in CANDIDATES if times[spec] <= GAIN * shortest]
    assert found[0].schedule == near[0], "of those that are as short, the one with the fewest activations"


def test_a_choice_takes_the_times_that_are_planned(config: Config) -> None:
    partition, times = divided(config), LayerTimes("", (1.0,) * 8, (2.0,) * 8, context_s=0.5, split=1.3)
    link = LinkRate(1e6, 0.1)
    found = timed_divisions(partition, ranks(4, link)._replace(layers=(times,) * 4))
    rates = Rates("", False, "fp32", operations_per_s=math.inf, bytes_per_s=math.inf, layers=times)
    planner = StepPlanner(partition.model.build(partition.shapes.dtype), (), config.pp.micro, rates, link)
    planned = [planner.plan(each.partition, times.key) for each in found]
    ends = [each.compute_s + each.bubble_s + each.messages_s for each in planned]
    assert [each.step_s for each in found] == pytest.approx(ends)


def test_a_choice_depends_on_the_links(config: Config) -> None:
    partition = divided(config)
    taken = {timed_divisions(partition, ranks(4, link))[0].schedule for link in (FREE, LinkRate(1e9, 3.0))}
    assert len(taken) == 2
    assert "1f1b" not in taken


@pytest.mark.parametrize(("delay_s", "lead"), [(3.0, 4), (15.0, 8)])
def test_a_delay_is_hidden_by_micro_batches_in_flight_of_which_the_last_are_split(
    delay_s: float, lead: int, config: Config
) -> None:
    """Of 1.5 and of 7.5 times the forward of a stage: 20 and 100 ms in docs/measurements/stages.md."""
    long = replace(config, data=replace(config.data, batch=32))
    found = timed_divisions(divided(long), ranks(4, LinkRate(1e9, delay_s)))
    assert found[0].schedule == f"1f1b:lead={lead},split_last=true"


def test_schedules_that_other_options_do_not_allow_are_left_out(config: Config) -> None:
    whole = replace(config, model=replace(config.model, recompute="layers"))
    found = timed_divisions(divided(whole), ranks(4, FREE))
    assert {each.schedule for each in found} == {"1f1b", *(f"1f1b:lead={n}" for n in (2, 4, 8)), "interleaved:chunks=2"}
    for given in ({"layers": (1, 2, 2, 1)}, {"compress": "auto", "forward": "1=none"}):  # which count the stages
        found = timed_divisions(divided(replace(config, pp=replace(config.pp, **given))), ranks(4, FREE))
        assert {each.schedule for each in found} == {*CANDIDATES} - {"zbv", "interleaved:chunks=2"}


def test_a_schedule_is_taken_that_fits_all_ranks(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    job: Any = prepare(config, Launch(0, 0, 4))
    timed = timed_divisions(job, ranks(4, FREE))
    assert timed[0].schedule != "1f1b"

    def taken(fits: Callable[[str], bool], of_other_rank: str | None = None) -> str:
        def check_fit(config: Config, *_: Any) -> str | None:
            if not fits(config.pp.schedule):
                raise ValueError("too large")
            return None

        other = json.dumps({"reason": of_other_rank, "is_refused": False})
        groups: Any = SimpleNamespace(all_gather_text=lambda _, text, timeout_s: [text, other])
        monkeypatch.setattr(auto, "check_fit", check_fit)
        return auto._first_fitting(timed, ranks(4, FREE), job, Launch(0, 0, 4), groups).schedule

    assert taken(lambda _: True) == timed[0].schedule
    assert taken(lambda schedule: schedule != timed[0].schedule) == timed[1].schedule
    assert taken(lambda _: True, of_other_rank="may not fit") == taken(lambda _: False) == "1f1b"


def unequal(config: Config, schedule: str = "1f1b") -> tuple[Partition, MeasuredRanks, list[float]]:
    """Return a run with pp.layers=auto on ranks of which each takes another time per layer."""
    layers_s = [1.0, 3.0, 2.0, 0.5]
    of_ranks = tuple(LayerTimes("", (each,) * 8, (2 * each,) * 8) for each in layers_s)
    partition = divided(replace(config, pp=replace(config.pp, layers="auto", schedule=schedule)))
    return partition, ranks(4, FREE)._replace(layers=of_ranks), [3 * each for each in layers_s]


@pytest.mark.parametrize("schedule", ["1f1b", "zb", "auto"])
def test_unequal_ranks_get_layers_by_the_time_that_they_take(schedule: str, config: Config) -> None:
    partition, times, layer_s = unequal(config, schedule)
    found = timed_divisions(partition, times)
    assert found[0].step_s <= 0.7 * max(each.step_s for each in found if each.schedule == found[0].schedule)
    chosen = found[0].partition
    assert chosen.config.pp.layers == blocks_of(chosen.layout.specs)
    if schedule == "1f1b":  # that balanced by cost has two layers on each rank
        assert [each.layers for each in found][1:] == ["1 2 2 1"]
        slowest = max(len(range(*spec)) * cost for spec, cost in zip(chosen.layout.specs, layer_s, strict=True))
        every_cut = itertools.combinations(range(1, 8), 3)
        sizes = [[b - a for a, b in itertools.pairwise((0, *cut, 8))] for cut in every_cut]
        assert slowest == min(max(map(operator.mul, each, layer_s)) for each in sizes)


def test_ranks_that_are_alike_keep_stages_balanced_by_cost(config: Config) -> None:
    partition, _, _ = unequal(config)
    first, *_ = timed_divisions(partition, ranks(4, FREE))
    assert first.partition.layout.specs == divided(config).layout.specs


@pytest.mark.parametrize("most", [3, 2, 1])
def test_ranks_without_memory_get_fewer_layers(most: int, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rank is the fastest, and holds few layers. Without room for any, all ranks end with the same reason, or,
    where the memory is an estimate, begin with the fastest run."""
    partition, times, _ = unequal(config)
    job: Any = SimpleNamespace(**vars(partition), disk_timeout_s=1)

    def sizes(config: Config) -> list[int]:
        assert isinstance(config.pp.layers, tuple)
        first, *inner, last = config.pp.layers
        return [first + 1, *inner, last + 1]

    reasons, is_sure = list[str](), True

    def check_fit(config: Config, *_: Any) -> None:
        reasons[:] = ["", "", "", "too large" if sizes(config)[3] > most else ""]

    def all_gather_text(_: str, text: str, timeout_s: float) -> list[str]:
        return [json.dumps({"reason": each, "is_refused": is_sure and bool(each)}) for each in reasons]

    groups: Any = SimpleNamespace(all_gather_text=all_gather_text)
    monkeypatch.setattr(auto, "check_fit", check_fit)
    found = auto._first_fitting(timed_divisions(partition, times), times, job, Launch(0, 0, 4), groups)
    assert sizes(found.partition.config)[3] == most
    most, timed = 0, timed_divisions(partition, times)
    with pytest.raises(ValueError, match="too large"):
        auto._first_fitting(timed, times, job, Launch(0, 0, 4), groups)
    is_sure = False
    assert auto._first_fitting(timed, times, job, Launch(0, 0, 4), groups) == timed[0]


def hosts_of(links: dict[frozenset[int], LinkRate], *, layer_s: float = 1e-3, hosts: int = 4) -> MeasuredHosts:
    """Return hosts that are alike. links: by both ends, others are fast; layer_s: as for `ranks`."""
    pairs = itertools.permutations(range(hosts), 2)
    layers = (LayerTimes("", (layer_s,) * 8, (2 * layer_s,) * 8),) * hosts
    return MeasuredHosts(layers, {pair: links.get(frozenset(pair), LinkRate(1e9)) for pair in pairs})


def on_hosts(config: Config, stages: int, rank: int = 0, **pp: Any) -> Partition:
    """Return a run on four hosts of one rank each."""
    options = dict[str, Any](schedule="1f1b", hosts="auto") | pp
    config = replace(config, pp=PipelineConfig(stages, **options))
    grid = open_grid(config, Launch(rank, 0, 4))
    return divide_model(config, grid, describe_run_model(config), open_streams("cpu", 0))


def test_no_other_order_of_hosts_makes_a_shorter_step(config: Config) -> None:
    """Each is simulated anew, and no host is faster than its fastest link allows."""
    rng, partition, sent = random.Random(0), on_hosts(config, 4), 48 + config.data.sequence * 64 * 4
    pairs = [frozenset(pair) for pair in itertools.combinations(range(4), 2)]
    measured = hosts_of({pair: LinkRate(10 ** rng.uniform(4, 7), rng.uniform(0, 0.1)) for pair in pairs})
    schedule: Any = from_spec("1f1b", SCHEDULES, key="")
    times = {}
    for order in itertools.permutations(range(4)):
        links = [measured.links[pair] for pair in itertools.pairwise(order)]
        wire = [sent / link.bytes_per_s for link in links]
        cost = Cost(2e-3, 4e-3, wire, wire, [link.delay_s for link in links])
        messages = {host: 8 * sent * (1 + (0 < order.index(host) < 3)) for host in range(4)}
        busy = [messages[host] / measured.fastest(host)[0] for host in range(4)]
        times[order] = max(*busy, float(simulate(lower(schedule.program(4, 8)), cost).makespan))
    found = timed_orders(partition, measured)
    assert {each.hosts: each.step_s for each in found} == pytest.approx(times)
    near = [order for order in times if times[order] <= GAIN * min(times.values())]
    assert found[0].hosts == near[0], "of those that are as short, the nearest to the order of the numbers"
    assert timed_orders(partition, hosts_of({}))[0].hosts == (0, 1, 2, 3), "hosts that are alike keep their order"


def test_replicas_with_unequal_numbers_of_micro_batches_decide_alike(config: Config) -> None:
    config = replace(config, data=replace(config.data, batch=5))
    first, last = (on_hosts(config, 2, rank, schedule="auto") for rank in (0, 3))
    counts = {len(each.micro_ids) for each in (first, last)}
    assert counts == {2, 3}
    assert {each.micros_per_replica for each in (first, last)} == {3}, "the replica with most takes longest"
    divisions = [timed_divisions(each, ranks(2, LinkRate(1e6, 1e-3))) for each in (first, last)]
    of_first, of_last = ([(run.schedule, run.step_s) for run in timed] for timed in divisions)
    assert of_first == of_last
    slow = hosts_of({frozenset((0, 1)): LinkRate(1e5)})
    orders = [timed_orders(timed[0].partition, slow) for timed in divisions]
    assert orders[0] == orders[1]


def test_a_host_with_a_slow_network_stands_at_an_end_of_the_pipeline(config: Config) -> None:
    measured = hosts_of({frozenset((1, other)): LinkRate(1e5) for other in (0, 2, 3)})
    first, *others = timed_orders(on_hosts(config, 4), measured)
    assert first.hosts.index(1) in (0, 3)
    plain = next(each.step_s for each in others if each.hosts == (0, 1, 2, 3))
    assert first.step_s < 0.65 * plain, "it carries the messages of one boundary instead of two"


def test_a_host_with_a_slow_network_receives_all_messages_over_it(config: Config) -> None:
    """Activations from the host before it and gradients from the one after it."""
    measured = hosts_of({}, layer_s=1e-6)
    slow = {pair: LinkRate(1e5) for pair in measured.links if pair[1] == 1}
    measured = measured._replace(links={**measured.links, **slow})
    times = {each.hosts: each.step_s for each in timed_orders(on_hosts(config, 4), measured)}
    assert times[0, 1, 2, 3] == pytest.approx(2 * times[1, 0, 2, 3], rel=0.02)


@pytest.mark.parametrize("layers", [None, "auto"])
def test_hosts_without_memory_for_the_fastest_order_keep_that_of_their_numbers(
    layers: Any, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pp.layers=auto, they get fewer layers later."""
    measured = hosts_of({frozenset((1, other)): LinkRate(1e5) for other in (0, 2, 3)})
    job: Any = on_hosts(config, 4, layers=layers)
    groups: Any = None
    fastest, *_ = timed_orders(job, measured)
    monkeypatch.setattr(auto, "measure_hosts", lambda *_: measured)
    monkeypatch.setattr(auto, "_fit", lambda *_: {"reason": "too large", "is_refused": True})
    monkeypatch.setattr(auto, "gather_reports", lambda _groups, _job, own: [own])
    found, choice = auto.choose_hosts(job, groups)
    shown = " ".join(map(str, fastest.hosts))
    assert found.config.pp.host_order == (fastest.hosts if layers else (0, 1, 2, 3))
    assert choice.value == (shown if layers else "0 1 2 3")
    assert (f"as {shown}, for which a rank lacks memory" in choice.text) == (layers is None)


@pytest.mark.parametrize(("hidden", "hosts"), [(4096, (0, 2, 1, 3)), (1, (0, 1, 2, 3))])
def test_slow_links_carry_messages_or_updates_whichever_are_smaller(
    hidden: int, hosts: tuple[int, ...], config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts 0 and 2 share a site, and hosts 1 and 3: two replicas of two stages are each in a site, or each in both."""
    links = {frozenset(pair): LinkRate(1e5) for pair in itertools.product((0, 2), (1, 3))}
    partition, sizes = on_hosts(config, 2), ([hidden * 1e3], [hidden * 1e3])
    monkeypatch.setattr(HostPlanner, "_sizes", sizes)
    monkeypatch.setattr("acsgd.run.plan.choose.message_bytes", lambda _: sizes)
    assert timed_orders(partition, hosts_of(links))[0].hosts == hosts


@pytest.mark.parametrize(("hosts", "least"), [(5, 1.0), (7, 1.4), (16, None)])
def test_orders_of_many_hosts_are_searched(hosts: int, least: float | None) -> None:
    """Relative to the shortest step of all orders, where these are few enough to be compared here."""
    rng, numbers = random.Random(hosts), range(hosts)
    times = {frozenset(pair): rng.random() for pair in itertools.combinations(numbers, 2)}

    def step_s(order: Sequence[int]) -> float:
        return sum(times[frozenset(pair)] for pair in itertools.pairwise(order))

    steps = compare_orders(hosts, step_s)
    assert next(iter(steps)) == tuple(numbers)
    assert len(steps) <= MAX_ORDERS
    found = min(steps.values())
    assert found < 0.8 * step_s(numbers)
    assert least is None or found <= least * min(map(step_s, itertools.permutations(numbers)))


RATES = [1e12, *(10.0**power for power in range(10, 2, -1))]
"""Of links between replicas, bytes per second."""


def mode_planner(config: Config, limit: float, **others: Any) -> ModePlanner:
    """Return what predicts the steps of the modes that cost at most `limit`. others: see `MeasuredRanks`."""
    config = replace(config, dp=ReplicaConfig(compress=f"auto:max_loss_cost={limit}"))
    grid = open_grid(config, Launch(0, 0, 4))
    partition = divide_model(config, grid, describe_run_model(config), open_streams("cpu", 0))
    measured = ranks(config.pp.stages, FREE, layer_s=1e-3)._replace(**others)
    return ModePlanner(partition, measured, parse_modes(config))


def taken(config: Config, rate: float, limit: float, **others: Any) -> list[TimedRun]:
    """Return the runs with the modes that may be taken for a link between replicas, in the order of choice."""
    return mode_planner(config, limit, **others).timed(LinkRate(rate))


@pytest.mark.parametrize("limit", [0.0002, 0.005, 0.02, 1])
@pytest.mark.parametrize("init", ["pretrained", "scratch"])
def test_slower_links_get_modes_of_fewer_bytes_within_the_loss_cost(init: Any, limit: float, config: Config) -> None:
    config = replace(config, model=replace(config.model, init=init), pp=PipelineConfig(stages=2))
    costs = {rung.spec: rung.cost(from_scratch=init == "scratch") for rung in MEASURED.values()}
    before = 0.0
    for rate in RATES:
        found = taken(config, rate, limit)
        assert found[0].step_s <= GAIN * min(each.step_s for each in found)
        assert all(costs[each.mode] <= limit for each in found)
        as_short = [each.mode for each in found if each.step_s <= GAIN * min(each.step_s for each in found)]
        assert costs[found[0].mode] == min(map(costs.__getitem__, as_short)), "the least loss cost of those"
        assert compression(found[0].mode) >= before
        before = compression(found[0].mode)
    assert taken(config, RATES[0], limit)[0].mode == "allreduce"
    assert before > 1


def test_a_mode_follows_the_link_down_and_up_and_not_its_noise(config: Config) -> None:
    """Measurements that vary by 15 % to both sides change it once at most; a step is nearly as short as possible."""
    planner = mode_planner(replace(config, pp=PipelineConfig()), 0.02)
    down = [10 ** (10 - power / 10) for power in range(80)]
    present, seen = planner.timed(LinkRate(down[0]))[0].mode, list[str]()
    for rate in (*down, *reversed(down)):
        changes = 0
        for noise in (1.0, 0.85, 1.15) * 3:
            link = LinkRate(noise * rate)
            found = planner.following(present, link)
            assert found.step_s <= GAIN**2 * planner.timed(link)[0].step_s
            changes, present = changes + (found.mode != present), found.mode
        assert changes <= 1
        seen.append(present)
    assert len({*seen}) > 2
    assert [compression(mode) for mode in seen[:80]] == sorted(map(compression, seen[:80]))
    assert [compression(mode) for mode in seen[80:]] == sorted(map(compression, seen[80:]), reverse=True)
    assert seen[0] == seen[-1] == "allreduce"


def test_a_mode_that_takes_longer_to_compute_than_it_saves_is_not_taken(config: Config) -> None:
    config = replace(config, pp=PipelineConfig())
    rate = next(rate for rate in RATES if taken(config, rate, 0.005)[0].mode.startswith("cocktail_grad"))
    assert taken(config, rate, 0.005, bytes_per_s=1e3)[0].mode.startswith("allreduce")


def test_modes_that_other_options_do_not_allow_are_left_out(config: Config) -> None:
    config = replace(config, pp=PipelineConfig(), data=replace(config.data, deal="speed"))
    assert {each.mode for each in taken(config, 1e3, 1)} == {"allreduce", "allreduce:dtype=bf16"}
    config = replace(config, data=replace(config.data, deal="even"), optim=replace(config.optim, steps=20))
    inner = {each.partition.plugins.mode.inner for each in taken(config, 1e3, 1) if "diloco" in each.mode}  # type: ignore[attr-defined]
    assert inner == {15}, "others never exchange"


def test_an_order_of_several_hosts_on_a_single_one_is_to_be_removed(config: Config) -> None:
    config = replace(config, pp=PipelineConfig(2, hosts=(1, 0)))
    with pytest.raises(ValueError, match=r"2 hosts for 4 processes, of which this host has 4; remove it$"):
        topology_of(config, Launch(0, 0, 4, 4))
