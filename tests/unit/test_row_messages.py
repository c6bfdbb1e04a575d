"""Laws of the messages of a tied table in a program: rows before forwards that use them, gradients after backwards."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest

from acsgd.config.spec import from_spec
from acsgd.pp import SCHEDULES, Action, Op, Schedule, forwards, lower, parse_action, validate
from acsgd.pp.schedules.programs import RankPrograms
from acsgd.pp.schedules.rows import MAX_GROUPS, Pacing, RowRoute, group_width
from acsgd.pp.schedules.schedules import GPipe, OneFOneB
from acsgd.pp.schedules.simulate import Cost, Timeline, main, simulate

# of zbv the first rank has all layers that use the table
SPECS = [*(name for name in SCHEDULES if name != "zbv"), "1f1b:lead=3", "interleaved:lead=1", "interleaved:chunks=3"]
SIZES = [*itertools.product((2, 3, 4), (1, 2, 5, 8))]
"""Ranks and micro-batches."""

every_schedule = pytest.mark.parametrize("schedule", [from_spec(spec, SCHEDULES, key="") for spec in SPECS], ids=SPECS)


def simulate_tied(schedule: Schedule, ranks: int, micros: int, cost: Cost) -> Timeline:
    route = RowRoute(owner=ranks * schedule.chunks - 1, user=0)
    return simulate(lower(schedule.program(ranks, micros), routes=[route]), cost)


@every_schedule
def test_paced_rows_stop_no_schedule(schedule: Schedule) -> None:
    """In training and in evaluation, whichever stages look up the rows, even if each send waits for its receive."""
    for (ranks, micros), width in itertools.product(SIZES, (1, 3)):
        program, owner = schedule.program(ranks, micros), ranks * schedule.chunks - 1
        pacing = Pacing.of(width, program)
        users = [user for user in range(owner) if (user + 1) % ranks]  # others are on the rank of the owner
        routes = [[RowRoute(owner, user)] for user in users] + [[RowRoute(owner, user) for user in users[:2]]]
        for each in routes:
            validate(lower(program, routes=each, pacing=pacing), routes=each)
            validate(lower(forwards(program), routes=each, pacing=pacing), forward_only=True, routes=each)


def test_the_first_groups_are_sent_before_the_first_forward() -> None:
    assert group_width(MAX_GROUPS) == 1
    assert group_width(MAX_GROUPS + 1) == 2
    assert Pacing.of(1, OneFOneB(lead=2).program(3, 8)) == (1, 5)
    assert Pacing.of(2, OneFOneB(lead=2).program(3, 8)) == (2, 3)


@every_schedule
def test_rows_are_paced_for_the_micro_batches_that_a_replica_gets(schedule: Schedule) -> None:
    """`actions` validates the program: with any number of micro-batches, as dealing by speed and evaluations have."""
    routes = (RowRoute(owner=2 * schedule.chunks - 1, user=0),)
    for micros in range(6):
        trained = [RankPrograms(schedule, 2, rank, routes=routes).actions(micros).train for rank in range(2)]
        assert [sum(action.op is Op.RT for action in actions) for actions in trained] == [0, 1]


def test_a_schedule_stops_if_no_rows_are_sent_ahead() -> None:
    route = RowRoute(owner=1, user=0)
    with pytest.raises(ValueError, match="rank 0, action 0F0: waits for 1SR0:0"):
        simulate(lower(OneFOneB().program(2, 5), routes=[route], pacing=Pacing(1, 0)), Cost())


def test_messages_of_a_program_of_two_ranks() -> None:
    """Rows are sent after the receives before the first forward are posted, and the table is reduced last."""
    assert [" ".join(map(str, each)) for each in lower(OneFOneB().program(2, 3), 1, routes=[RowRoute(1, 0)])] == [
        "0RR0:1 0RR1:1 0RR2:1 0F0 0SF0 0RB0 0F1 0SF1 0RB1 0B0 0SG0:1 0F2 0SF2 0RB2 0B1 0SG1:1 0B2 0SG2:1 0R",
        "1RG0:0 1RG1:0 1RG2:0 1RF0 1RF1 1SR0:0 1SR1:0 1F0 1B0 1SB0 1RF2 1SR2:0 1F1 1B1 1SB1 1F2 1B2 1SB2 1R 1RT",
    ]


@pytest.mark.parametrize("missing", ["1SR2:0", "0RR2:1", "0SG1:1", "1RG1:0", "1RT"])
def test_an_incomplete_program_is_refused(missing: str) -> None:
    routes = [RowRoute(owner=1, user=0)]
    program = lower(OneFOneB().program(2, 5), routes=routes)
    program[parse_action(missing).stage].remove(parse_action(missing))
    with pytest.raises(ValueError, match=f"action {missing}: is missing"):
        validate(program, routes=routes)


@every_schedule
def test_each_micro_batch_has_its_rows_before_its_forward_and_its_gradients_after_its_backward(
    schedule: Schedule,
) -> None:
    for ranks, micros in SIZES:
        spans = simulate_tied(schedule, ranks, micros, Cost(1, 2, Fraction(1, 2), rows=3, row_gradients=1)).spans
        for micro in range(micros):
            last = ranks * schedule.chunks - 1
            assert spans[Action(Op.SR, last, micro, 0)].end <= spans[Action(Op.F, 0, micro)].start
            completed = next(each for each in spans if each[1:3] == (0, micro) and each.operation.completes)
            assert spans[Action(Op.SG, 0, micro, last)].start >= spans[completed].end


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
def test_the_first_activation_does_not_wait_for_rows_that_are_sent_ahead(schedule: Schedule) -> None:
    """It waits for the notice that its receive is posted, which has to leave the owner before the rows."""
    for micros in (1, 2, 5, 8):
        spans = simulate_tied(schedule, 2, micros, Cost(1, 2, rows=[3, *[100] * (micros - 1)])).spans
        assert spans[Action(Op.SF, 0, 0)].start == spans[Action(Op.F, 0, 0)].end == 4


def test_the_notice_of_a_receive_waits_for_the_messages_before_it() -> None:
    """As over gloo, whose notices and messages share a connection."""
    program = lower(OneFOneB().program(2, 3), routes=[RowRoute(1, 0)])
    rows, receives = [Action(Op.SR, 1, micro, 0) for micro in (0, 1)], [Action(Op.RF, 1, micro) for micro in range(3)]
    for first, known in (receives, 0), (rows, 6):
        program[1].sort(key=lambda action, first=first: action not in first)
        spans = simulate(program, Cost(1, 2, Fraction(1, 2), rows=3)).spans
        assert {spans[receive].end for receive in receives} == {known}
        assert spans[Action(Op.SF, 0, 0)].start == max(known, spans[Action(Op.F, 0, 0)].end)


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
