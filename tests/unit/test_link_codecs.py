"""pp.compress=auto: laws of the choice of codecs, its ladder, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from acsgd.config.options import Config
from acsgd.config.run_file import parse, to_toml
from acsgd.pp.schedules.lowering import lower
from acsgd.pp.schedules.rows import RowRoute
from acsgd.pp.schedules.schedules import OneFOneB
from acsgd.pp.tied.plan import ROW_RUNGS
from acsgd.pp.wire import ladder
from acsgd.pp.wire.coder import TensorSpec
from acsgd.pp.wire.delta import Delta
from acsgd.pp.wire.ladder import (
    BACKWARD,
    CACHED_GRADIENT_EPOCHS,
    FORWARD,
    NO_CACHE,
    NO_CACHE_BACKWARD,
    CodecTime,
    Rung,
    measure_codec,
)
from acsgd.pp.wire.probe import PROBE_S
from acsgd.run.plan.partition import with_useful_delta
from acsgd.run.plan.plugins import parse_plugins
from acsgd.run.report import MICROS
from acsgd.run.step.codec_choice import BAND, Choice, Chooser, Direction, Measured, RowTraffic, RowWay
from acsgd.run.step.link_codecs import PROBE_EVERY, steps_between
from acsgd.run.step.row_ways import ALL_ROWS, FIRST_ROWS, RowTable, RowTimes, RowWays
from acsgd.streams import open_streams

SPEC = TensorSpec((4, 256, 512), torch.float32)
COMPUTE_S = 0.1
"""Time of a micro-batch on a rank."""
NO_TIME = CodecTime(0.0, 0.0)


def direction(rungs: Sequence[Rung], mbit: float, *, delay_s: float = 0.0, times: CodecTime = NO_TIME) -> Direction:
    """Return a direction of a link in which all codecs may be chosen."""
    sizes = tuple(rung.message_bytes([SPEC]) for rung in rungs)
    costs = tuple(rung.loss_cost for rung in rungs)
    of_codecs = (NO_TIME, *[times] * (len(rungs) - 1))
    coded = frozenset(index for index, rung in enumerate(rungs) if rung.is_entropy_coded)
    return Direction(8e-6 / mbit, delay_s, sizes, costs, of_codecs, tuple(range(len(rungs))), coded)


def pipeline(*mbit: float, **options: float) -> Measured:
    """Return a pipeline with links of some rates."""
    links = [direction(rungs, rate, **options) for rungs in (FORWARD, BACKWARD) for rate in mbit]
    return Measured((COMPUTE_S,) * (len(mbit) + 1), tuple(links))


def chooser(ranks: int, max_loss_cost: float = 1.0, micros: int = 16) -> Chooser:
    program = lower(OneFOneB(lead=2).program(ranks, micros))
    return Chooser(program, max_loss_cost)


def first(measured: Measured) -> Choice:
    return (0,) * len(measured.directions)


UNLIMITED, RATES = 1e6, [2.0 * 1.5**step for step in range(24)]


def test_unlimited_links_get_no_codec_and_return_to_none() -> None:
    choose = chooser(4).choose
    unlimited = pipeline(UNLIMITED, UNLIMITED, UNLIMITED)
    assert choose(unlimited, first(unlimited)) == first(unlimited)
    assert choose(unlimited, (3,) * 6) == first(unlimited)


def test_only_the_slow_link_gets_codecs() -> None:
    measured = pipeline(UNLIMITED, 100, UNLIMITED)
    chosen = chooser(4).choose(measured, first(measured))
    assert chosen[1] > 0
    assert chosen[4] > 0
    assert [codec for number, codec in enumerate(chosen) if number not in (1, 4)] == [0] * 4


def test_slower_links_get_fewer_bytes() -> None:
    """And the step is nearly as short as with any other codecs, which are all tried.

    Where a message takes about as long as a computation, a schedule may gain from one codec more.
    """
    of_two = chooser(2, micros=6)
    before = (len(FORWARD), len(BACKWARD))
    for rate in RATES[::3]:
        measured = pipeline(rate)
        chosen = of_two.choose(measured, first(measured))
        assert all(codec <= former + 1 for codec, former in zip(chosen, before, strict=True)), rate
        every = [(up, down) for up in range(len(FORWARD)) for down in range(len(BACKWARD))]
        shortest = min(of_two.step_s(measured, each) for each in every)
        assert of_two.step_s(measured, chosen) <= 1.06 * shortest, "times are on a coarse grid"
        before = chosen


@pytest.mark.parametrize("limit", [0.0002, 0.0055, 0.1])
def test_the_loss_cost_is_never_exceeded(limit: float) -> None:
    of_three, numbers, present = chooser(3, limit, micros=2), random.Random(0), (0, 0, 0, 0)
    for _ in range(8):
        measured = pipeline(numbers.choice(RATES), numbers.choice(RATES))
        present = of_three.choose(measured, present)
        assert measured.loss_cost(present) <= limit
        rungs = [FORWARD, FORWARD, BACKWARD, BACKWARD]
        assert sum(each[codec].loss_cost for each, codec in zip(rungs, present, strict=True)) <= limit


def with_rows(measured: Measured, mbit: float, *, codec_s: float = 0.0) -> Measured:
    """Return the same with 300 rows per micro-batch of a tied table, of as many as it has tokens."""
    ways, elements = [], 300 * SPEC.shape[2]
    for number, rung in enumerate(ROW_RUNGS):
        rows, gradients = (each * elements * 8e-6 / mbit for each in rung.element_bytes(SPEC.shape[2], SPEC.dtype))
        ways.append(RowWay(rung.loss_cost, rows, gradients, *[codec_s * (number > 0)] * 2))
    return measured._replace(rows=RowTraffic(tuple(ways), 16, 0.6))


def test_rows_of_a_tied_table_are_sent_as_the_link_and_the_loss_cost_demand() -> None:
    """The step is nearly as short as with any other codecs and ways, which are all tried."""
    program = lower(OneFOneB(lead=2).program(2, 6), routes=[RowRoute(1, 0)])
    any_cost, lossless = Chooser(program, 1.0), Chooser(program, 0.001)
    found, exact = [], []
    for rate in (UNLIMITED, *RATES[::-3]):
        measured = with_rows(pipeline(rate), rate)
        chosen = any_cost.choose(measured, (0, 0, 0))
        every = list(itertools.product(range(len(FORWARD)), range(len(BACKWARD)), range(len(ROW_RUNGS))))
        shortest = min(any_cost.step_s(measured, each) for each in every)
        assert any_cost.step_s(measured, chosen) <= 1.06 * shortest, "times are on a coarse grid"
        found.append(chosen[-1])
        exact.append(lossless.choose(measured, (0, 0, 0))[-1])
    assert found == sorted(found)
    assert exact == sorted(exact)
    assert [found[0], found[-1], exact[0], exact[-1]] == [0, 2, 0, 1]
    slow = with_rows(pipeline(100.0), 100.0, codec_s=COMPUTE_S)
    assert any_cost.choose(slow, (0, 0, 0))[-1] == 0, "codecs of rows that take longer than they save"
    assert any_cost.choose(with_rows(pipeline(UNLIMITED), UNLIMITED), (3, 3, 2)) == (0, 0, 0)


def test_rows_pass_the_slowest_link_of_the_rank_that_sends_or_receives_them() -> None:
    """With the times of their codecs on any rank, for the rows and the micro-batches of the last step."""
    routed = Chooser(lower(OneFOneB().program(3, 4), routes=[RowRoute(2, 0)]), 1.0)
    plugins = SimpleNamespace(row_rungs=ROW_RUNGS)
    job = SimpleNamespace(
        plugins=plugins,
        topology=SimpleNamespace(replicas=1),
        programs=SimpleNamespace(width=1),
        shapes=SimpleNamespace(dtype=torch.float32),
    )
    session: Any = SimpleNamespace(job=job)
    ways = RowWays(session, routed)
    ways.use_tables([RowTable(width, [RowTimes(each, 2 * each) for each in (0.0, 1e-6, 3e-6)]) for width in (0, 8)])
    micros = [[4.0, 4.0, 4.0]]
    summary: Any = {FIRST_ROWS: [160.0], ALL_ROWS: [640.0], MICROS: micros}
    ways.record(summary)
    # activations 0 -> 1 and 1 -> 2, then gradients 1 -> 0 and 2 -> 1
    directions = [direction(FORWARD, 8.0)._replace(s_per_byte=rate) for rate in (1.0, 20.0, 300.0, 4000.0)]
    traffic = ways.traffic(0, directions)
    assert traffic is not None
    exact, _, rounded = traffic.ways
    assert exact == RowWay(0.0, 160 * 4 * 4000.0, 160 * 4 * 20.0, 0.0, 0.0), "gradients of rows leave rank 0 for rank 2"
    assert rounded.owner_s == pytest.approx(160 * 3e-6)
    assert [ways.codec_s(0, rank, 2) for rank in range(3)] == pytest.approx([160 * 6e-6, 0.0, 160 * 3e-6])
    assert (traffic.micros, traffic.power) == (4, 1.0)


def test_micro_batches_use_fewer_and_fewer_further_rows() -> None:
    """By Heaps' law, on average as many as there are."""
    traffic = RowTraffic((), 64, 0.65)
    shares = traffic.shares(64)
    assert sum(shares) == pytest.approx(64)
    assert shares == sorted(shares, reverse=True)
    assert traffic.shares(16) == shares[:16]
    assert RowTraffic((), 64, 1.0).shares(3) == pytest.approx([1, 1, 1])
    assert RowTraffic((), 64, 0.0).shares(3) == [64, 0, 0], "the first uses all"


def test_measurements_that_vary_do_not_change_codecs_back_and_forth() -> None:
    of_two, numbers = chooser(2, micros=4), random.Random(0)
    for rate in RATES[1::4]:
        present, changes = (0, 0), 0
        for _ in range(12):
            noisy = pipeline(rate * numbers.uniform(0.9, 1.1))
            noisy = noisy._replace(compute_s=tuple(COMPUTE_S * numbers.uniform(0.95, 1.05) for _ in range(2)))
            chosen = of_two.choose(noisy, present)
            changes += chosen != present
            present = chosen
        assert changes <= 3, "the first choice, and one more per direction"
    assert BAND > 1.1 / 0.9


def test_a_fallen_link_is_answered_and_a_recovered_one_too() -> None:
    of_two = chooser(2, micros=4)
    fast, slow = (pipeline(mbit)._replace(compute_s=(1.0, 1.0)) for mbit in (1000, 20))
    assert of_two.choose(fast, (0, 0)) == (0, 0)
    fallen = of_two.choose(slow, (0, 0))
    assert min(fallen) > 0
    assert of_two.choose(fast, fallen) == (0, 0)


def test_a_codec_that_takes_longer_than_it_saves_is_not_chosen() -> None:
    slow_codecs = pipeline(200, times=CodecTime(COMPUTE_S, COMPUTE_S))
    assert chooser(2, micros=4).choose(slow_codecs, (0, 0)) == (0, 0)
    assert chooser(2, micros=4).choose(pipeline(200), (0, 0)) != (0, 0)


def test_a_codec_without_entropy_coding_is_chosen_where_this_takes_too_long() -> None:
    def with_times(seconds: float) -> Measured:
        measured, directions = pipeline(60.0), []
        for each in measured.directions:
            times = [CodecTime(seconds * (codec in each.entropy_coded), 0.0) for codec in range(len(each.times))]
            directions.append(each._replace(times=tuple(times)))
        return measured._replace(directions=tuple(directions))

    of_two = chooser(2, micros=8)
    names = [BACKWARD[of_two.choose(with_times(seconds), (0, 0))[1]].spec for seconds in (0.0, COMPUTE_S / 4)]
    assert names == [BACKWARD[3].spec, "fixpoint:bits=4"]


def test_measurements_take_a_hundredth_of_the_time_and_answer_in_50_steps() -> None:
    """The median of five follows a link after three."""
    slow, fast = pipeline(2.0), pipeline(UNLIMITED)
    assert 2 * PROBE_S <= slow.probe_s() <= 4 * PROBE_S
    assert fast.probe_s() < 0.01 * PROBE_S
    steps = [steps_between(slow.probe_s(), seconds) for seconds in (0.01, 0.4, 1.0, 10.0)]
    assert steps == sorted(steps, reverse=True)
    assert 3 * steps[0] <= 50
    assert slow.probe_s() <= 0.01 * 0.4 * steps[1] <= 1.5 * slow.probe_s()
    assert steps[-1] == PROBE_EVERY == steps_between(fast.probe_s(), 0.4)


def test_a_process_measures_a_codec_once_for_each_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The views of an elastic run, which choose codecs anew, are on the same device."""
    measured = list[int]()

    def measure(codec: object, spec: TensorSpec, streams: object) -> CodecTime:
        measured.append(spec.shape[0])
        return CodecTime(1.0 * spec.shape[0], 2.0)

    monkeypatch.setattr(ladder, "_measure", measure)
    monkeypatch.setattr(ladder, "_measured", {})
    specs = [TensorSpec((rows, 4), torch.float32) for rows in (1, 2)]
    for _ in range(2):
        streams = open_streams("cpu", 0)
        assert measure_codec(Rung("none", 0.0).codec, specs, streams) == CodecTime(3.0, 4.0)
    assert measured == [1, 2]
    measure_codec(Rung("fixpoint:bits=8", 0.0).codec, specs[:1], streams)
    assert measured == [1, 2, 1]


def test_the_loss_costs_are_those_of_the_measurements() -> None:
    """And a codec with a higher cost has fewer bytes, or less entropy coding, else nobody would choose it."""
    page = (Path(__file__).parents[2] / "docs/measurements/stages.md").read_text()
    for name, rungs in (
        ("forward", FORWARD),
        ("forward", (*FORWARD[:3], *NO_CACHE)),
        ("backward", BACKWARD),
        ("backward", (*BACKWARD[:3], *NO_CACHE_BACKWARD, BACKWARD[4])),
    ):
        for rung in rungs[1:]:
            assert re.search(rf"\| {name} \| `{re.escape(rung.spec)}` \| {rung.loss_cost:.4f} \|", page), rung
        for index, rung in enumerate(rungs[1:], 1):
            others = [each for each in rungs[:index] if rung.is_entropy_coded or not each.is_entropy_coded]
            assert rung.message_bytes([SPEC]) < min(each.message_bytes([SPEC]) for each in others), rung
        assert [rung.loss_cost for rung in rungs] == sorted(rung.loss_cost for rung in rungs)
    for rung in ROW_RUNGS[1:]:
        assert re.search(rf"\| rows \| `{re.escape(rung.spec)}` \| {rung.loss_cost:.4f} \|", page), rung
    sizes = [sum(rung.element_bytes(512, torch.float32)) for rung in ROW_RUNGS]
    assert sizes == sorted(sizes, reverse=True)


RUN_FILE = """
[model]
name = "some/model"
[data]
sources = "demo"
sequence = 64
batch = 8
[pp]
stages = 3
compress = "auto"
forward.1 = "none"
[optim]
lr = 1e-3
steps = 5
"""


def parsed(directory: Path, flags: str) -> Config:
    (directory / "run.toml").write_text(RUN_FILE)
    return parse([str(directory / "run.toml"), *flags.split()])


def test_single_links_have_given_codecs(tmp_path: Path) -> None:
    """Flags > file, link by link; the written configuration reads back equal."""
    config = parsed(tmp_path, "--pp.forward.0=hadamard --pp.backward.1 fixpoint:bits=8")
    assert (config.pp.forward, config.pp.backward) == ("1=none 0=hadamard", "1=fixpoint:bits=8")
    assert parsed(tmp_path, "--pp.forward.1 hadamard").pp.forward == "1=hadamard"
    (tmp_path / "again.toml").write_text(to_toml(config))
    assert parse([str(tmp_path / "again.toml")]) == config

    plugins = parse_plugins(config)
    ladder = plugins.ladder
    assert ladder is not None
    assert ladder.fixed_forward == {1: 0, 0: 3}
    assert ladder.fixed_backward == {1: 2}
    assert [rung.spec for rung in ladder.forward] == [*(rung.spec for rung in FORWARD[:3]), "hadamard"]
    assert [rung.codec for rung in ladder.forward[1:]] == [*plugins.forward]
    assert [*ladder.backward] == [*BACKWARD]


def test_deltas_are_no_choice_where_caches_are_not_possible(tmp_path: Path) -> None:
    everything = parse_plugins(parsed(tmp_path, ""))
    deltas = [codec for codec in everything.forward if isinstance(codec, Delta)]
    assert deltas == [rung.codec for rung in FORWARD[3:6]]
    assert [len(everything.deltas_at(boundary)) for boundary in range(2)] == [3, 0], "link 1 has none"
    assert [len(everything.deltas_at(boundary, of_gradients=True)) for boundary in range(2)] == [1, 1]
    for flags in (
        "--pp.compress auto:delta=false",
        "--pp.compress auto:max_loss_cost=0.0002",
        "--pp.forward.0 none --pp.backward.0 none --pp.backward.1 none",
        "--data.deal speed",
        "--data.rows single",
        "--data.sources stream:a.jsonl",
    ):
        without = parse_plugins(parsed(tmp_path, flags))
        assert without.delta is None, flags
        assert len(without.forward) == 2, flags
    without = parse_plugins(parsed(tmp_path, "--pp.compress auto:delta=false"))
    assert without.backward == tuple(rung.codec for rung in (*BACKWARD[1:3], *NO_CACHE_BACKWARD, BACKWARD[4]))
    half = parse_plugins(parsed(tmp_path, "--model.dtype fp16"))
    fewer = parse_plugins(parsed(tmp_path, "--pp.compress auto:cached_gradients=false"))
    for each in (half, fewer):
        assert [len(each.deltas_at(0, of_gradients=way)) for way in (False, True)] == [3, 0]
    loose = parse_plugins(parsed(tmp_path, "--pp.compress auto:delta=false,max_loss_cost=0.0067"))
    assert loose.forward == tuple(rung.codec for rung in (*FORWARD[1:3], *NO_CACHE))
    assert loose.without_chosen_delta() == loose
    flags = "--pp.compress auto:max_loss_cost=1 --pp.forward.0 transform:step=0.1"
    given = parse_plugins(parsed(tmp_path, flags))
    assert given.forward == loose.forward, "once"
    flags = "--pp.compress auto:max_loss_cost=1,delta=false --pp.stages 4 --pp.forward.0 transform:step=0.1"
    others = parse_plugins(parsed(tmp_path, flags)).ladder
    assert others is not None
    assert others.codecs_at(2)[-1] == NO_CACHE[0].codec, "a choice of other links, too"


def test_a_delta_that_is_given_for_a_link_is_used_on_no_other(tmp_path: Path) -> None:
    given = "delta:step=1.5,transform=true,first_bits=8"
    plugins = parse_plugins(parsed(tmp_path, f"--pp.stages 4 --pp.forward.0 {given} --pp.backward.2 {given}"))
    chosen = [rung.codec for rung in FORWARD[3:6]]
    assert [plugins.deltas_at(boundary) for boundary in range(3)] == [[Rung(given, 0.0).codec], [], chosen]
    of_gradients = [plugins.deltas_at(boundary, of_gradients=True) for boundary in range(3)]
    assert of_gradients == [[BACKWARD[3].codec]] * 2 + [[Rung(given, 0.0).codec]]


def test_gradients_are_cached_in_runs_in_which_that_sends_less() -> None:
    """Than in a basis, with the first visit of each sequence in 8 bits."""
    for epochs in range(1, 20):
        cached, others = BACKWARD[3].bits, NO_CACHE_BACKWARD[0].bits
        assert cached is not None
        assert others is not None
        sends_less = 8 + cached * (epochs - 1) < others * epochs
        assert sends_less == (epochs > CACHED_GRADIENT_EPOCHS)


def test_deltas_are_no_choice_where_sequences_do_not_return_with_small_changes(tmp_path: Path) -> None:
    """Only the link that is given one keeps it."""
    config = parsed(tmp_path, "--pp.stages 4 --pp.forward.0 delta:bits=4,first_bits=8")
    same_masks = dataclasses.replace(config, model=dataclasses.replace(config.model, dropout_mask="sample"))
    plugins = parse_plugins(config)
    for each, is_random, epochs, links in (
        (config, False, 1.5, [True, False, True]),
        (config, False, 9.0, [True, False, True]),
        (same_masks, True, 1.5, [True, False, True]),
        (config, True, 9.0, [True, False, False]),
        (config, False, 1.0, [True, False, False]),
    ):
        model: Any = SimpleNamespace(layers=[SimpleNamespace(random=is_random)])
        useful = with_useful_delta(plugins, each, model, epochs)
        assert [bool(useful.deltas_at(boundary)) for boundary in range(3)] == links
        assert bool(useful.deltas_at(2, of_gradients=True)) == (links[2] and epochs > CACHED_GRADIENT_EPOCHS)
        assert useful.ladder is not None
        assert useful.ladder.forward[useful.ladder.fixed_forward[0]].codec == FORWARD[3].codec
        assert [rung.codec for rung in useful.ladder.forward[1:]] == [*useful.forward]
        assert [rung.codec for rung in useful.ladder.backward[1:]] == [*useful.backward]


def test_rows_travel_as_given_unless_they_are_exact_and_chosen(tmp_path: Path) -> None:
    for flags, ways in (
        ("", 3),
        ("--pp.compress auto:max_loss_cost=0.001", 2),
        ("--pp.compress auto:rows=false", 0),
        ("--pp.tied rows:bits=8", 0),
        ("--pp.tied dense", 0),
    ):
        assert parse_plugins(parsed(tmp_path, flags)).row_rungs == ROW_RUNGS[:ways], flags


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ("--pp.forward.2 none", "pp.forward.2: there is no link 2: the links are 0 to 1"),
        ("--pp.stages 2", "pp.forward.1: there is no link 1: link 0 is the only one"),
        ("--pp.stages 1", "pp.forward.1: one stage has no links; give --pp.stages 2, or remove it"),
        (
            "--pp.schedule zbv --pp.forward.2 none",
            "pp.forward.2: stages 2 and 3 are both on rank 2 of a pipeline, so nothing is sent between them; remove",
        ),
        ("--pp.backward fixpoint:bits=8", "pp.compress=auto chooses the codecs; give that of one link, pp.backward.0="),
        ("--pp.backward.0 delta:cache_bits=8", "all caches are alike; remove cache options"),
        ("--pp.forward.0 delta:step=1.5,transform=true,balance=0.5", "balance needs cached gradients in all steps"),
        ("--pp.forward.0 fixpoint:bits=99", 'pp.forward.0="fixpoint:bits=99": bits=99'),
        ("--pp.forward.0 delta:cache=disk", "all caches are alike; remove cache options"),
        ("--pp.compress None", "pp.forward.1 is for pp.compress=auto"),
        ("--pp.compress best", 'pp.compress="best": unknown name "best"; use "auto"'),
        ("--pp.compress auto:max_loss_cost=0", "max_loss_cost=0.0 must be greater than 0"),
        (
            "--pp.compress auto:max_loss_cost=0.0001",
            'the one that costs least, "none:dtype=bf16", costs 0.0002; give max_loss_cost=0.0002 or more',
        ),
        ("--pp.forward.x none", "unrecognized option: --pp.forward.x"),
        ("--pp.forward.0", '--pp.forward.0 "" is not a codec'),
    ],
)
def test_what_cannot_be_is_refused(flags: str, part: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(part)):
        parse_plugins(parsed(tmp_path, flags))


def test_a_table_of_links_in_a_file_has_codecs(tmp_path: Path) -> None:
    for wrong in ("forward.first", "forward.1.a", "backward.0"):
        (tmp_path / "run.toml").write_text(RUN_FILE.replace("forward.1", wrong).replace('"none"', "3"))
        with pytest.raises(ValueError, match=re.escape(f"pp.{wrong[:9]}")):
            parse([str(tmp_path / "run.toml")])
