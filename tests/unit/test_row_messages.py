"""Laws of the messages of a tied table in a program: rows before forwards that use them, gradients after backwards."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest

from acsgd.config.spec import from_spec
from acsgd.pp import SCHEDULES, Op, Schedule, forwards, lower
from acsgd.pp.schedules.actions import Action, Program
from acsgd.pp.schedules.dependencies import Dependencies, walk
from acsgd.pp.schedules.programs import RankPrograms
from acsgd.pp.schedules.rows import MAX_GROUPS, Pacing, add_rows
from acsgd.pp.schedules.schedules import GPipe, OneFOneB
from acsgd.pp.schedules.simulate import Cost, Timeline, main, simulate

SPECS = [*SCHEDULES, "1f1b:lead=3", "interleaved:lead=1", "interleaved:chunks=3"]
SIZES = [*itertools.product((2, 3, 4), (1, 2, 5, 8))]
"""Ranks and micro-batches."""

every_schedule = pytest.mark.parametrize("schedule", [from_spec(spec, SCHEDULES, key="") for spec in SPECS], ids=SPECS)


def pacing_of(schedule: Schedule, ranks: int, micros: int, *, width: int = 1) -> Pacing:
    """Return the pacing of a run with `width` micro-batches per group."""
    pacing = Pacing.of(width * MAX_GROUPS, RankPrograms(schedule, ranks, 0).warm_up(micros))
    assert pacing.width == width
    return pacing


def run(program: Program) -> None:
    """Raises ValueError if the computations, and the forwards that wait for rows, cannot run."""
    for _ in walk(program, Dependencies.of(program).inputs):
        pass


def simulate_tied(schedule: Schedule, ranks: int, micros: int, cost: Cost) -> Timeline:
    program = lower(schedule.program(ranks, micros))
    return simulate(add_rows(program, pacing_of(schedule, ranks, micros)), cost)


@every_schedule
def test_paced_rows_stop_no_schedule(schedule: Schedule) -> None:
    """In training and in evaluation, whichever stage looks up the rows."""
    for (ranks, micros), width in itertools.product(SIZES, (1, 3)):
        program, pacing = schedule.program(ranks, micros), pacing_of(schedule, ranks, micros, width=width)
        for user in range(ranks * schedule.chunks - 1):
            if (user + 1) % ranks == 0:
                continue  # on the rank of the owner
            for each in (program, forwards(program)):
                run(add_rows(each, pacing, user))


def test_a_schedule_stops_if_no_rows_are_sent_ahead() -> None:
    with pytest.raises(ValueError, match="rank 0, action 0F0: waits for 0SR0"):
        run(add_rows(OneFOneB().program(2, 5), Pacing(1, 0)))


@every_schedule
def test_each_micro_batch_has_its_rows_before_its_forward_and_its_gradients_after_its_backward(
    schedule: Schedule,
) -> None:
    for ranks, micros in SIZES:
        spans = simulate_tied(schedule, ranks, micros, Cost(1, 2, Fraction(1, 2), rows=3, row_gradients=1)).spans
        for micro in range(micros):
            assert spans[Action(Op.SR, 0, micro)].end <= spans[Action(Op.F, 0, micro)].start
            assert spans[Action(Op.SG, 0, micro)].start >= spans[Action(Op.B, 0, micro)].end


@pytest.mark.parametrize("schedule", [GPipe(), OneFOneB(), OneFOneB(lead=3)])
def test_only_the_first_rows_and_the_last_gradients_cost_time_on_a_fast_link(schedule: Schedule) -> None:
    """Nothing overlaps these two. All others overlap with computations if they take no longer than a forward.

    With several stages per rank, they also delay activations, which leave the last rank for the first.
    """
    for ranks, micros in SIZES:
        untied = simulate(lower(schedule.program(ranks, micros)), Cost(1, 2)).makespan
        rows, gradients = [3, *[1] * (micros - 1)], [*[1] * (micros - 1), 5]
        tied = simulate_tied(schedule, ranks, micros, Cost(1, 2, rows=rows, row_gradients=gradients)).makespan
        assert tied == untied + 3 + 5, (ranks, micros)


@every_schedule
def test_rows_share_their_link_with_the_gradients_of_activations(schedule: Schedule) -> None:
    """On two ranks, both leave the last one for the first; with slow messages, the link is the bottleneck."""
    for micros in (1, 2, 5, 8):
        timeline = simulate_tied(schedule, 2, micros, Cost(1, 2, message=10, rows=20, row_gradients=0))
        sent = [a for a in timeline.spans if a.op is Op.SR or (a.op in (Op.SF, Op.SB) and a.stage % 2 == 1)]
        spans = sorted(timeline.spans[action] for action in sent)
        assert all(before.end <= after.start for before, after in itertools.pairwise(spans))
        assert timeline.makespan > sum(end - start for start, end in spans) >= 20 * micros


def test_rows_that_take_no_time_change_nothing() -> None:
    for ranks, micros in SIZES:
        cost = Cost(1, 2, Fraction(1, 2))
        tied = simulate_tied(OneFOneB(2), ranks, micros, cost)
        untied = simulate(lower(OneFOneB(2).program(ranks, micros)), cost)
        assert untied.spans.items() <= tied.spans.items()


def test_command_draws_rows_and_prints_their_share(capsys: pytest.CaptureFixture[str]) -> None:
    main(["1f1b", "2", "3", "--rows", "2", "1/2"])
    assert capsys.readouterr().out.splitlines() == [
        "rank 0 |        0F0 0F1         0B0==== 0F2 0B1====     0B2====",
        "rank 1 |            1F0 1B0==== 1F1 1B1==== 1F2 1B2====",
        "rows   |0=======1=              2=",
        "grad   |                                0=          1=          2=======",
        "makespan 16, bubble 43.8%",
        "without rows 12: the tie is 25.0%",
        "micro-batches in flight, at most, by rank: 2, 1",
    ]


def test_one_rank_sends_no_rows(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["1f1b", "1", "2", "--rows", "2"])
    assert "--rows needs" in capsys.readouterr().err
