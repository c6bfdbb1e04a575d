"""Laws of every schedule in SCHEDULES, checked on its program: no process, no torch."""

import random
import re
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from math import ceil

import pytest

from acsgd.config.spec import from_spec, to_spec
from acsgd.pp import SCHEDULES, Action, Op, Program, Schedule, draw, forwards, lower, parse_action, validate
from acsgd.pp.schedules.actions import OPERATIONS, ROW_GRADIENTS, ROWS, Operation, Placement
from acsgd.pp.schedules.dependencies import Dependencies
from acsgd.pp.schedules.schedules import GPipe, Interleaved, OneFOneB, ZeroBubble, ZeroBubbleV
from acsgd.pp.schedules.simulate import Cost, main, simulate

SPECS = [
    *SCHEDULES,
    "1f1b:lead=2",
    "1f1b:lead=2,split_last=true",
    "interleaved:chunks=1,lead=1",
    "interleaved:chunks=3",
]
# fewer micro-batches than ranks, as many, a multiple, and numbers that the ranks do not divide
SIZES = sorted({(r, m) for r in (1, 2, 3, 4, 5, 8) for m in (1, r - 1, r, r + 1, 2 * r, 2 * r + 1, 16) if m > 0})

FEWER_SIZES = [(ranks, micros) for ranks, micros in SIZES if ranks < 8]
"""Without those that take most of the time."""

every_schedule = pytest.mark.parametrize("schedule", [from_spec(spec, SCHEDULES, key="") for spec in SPECS], ids=SPECS)


@every_schedule
def test_programs_train_every_micro_batch_once_and_never_deadlock(schedule: Schedule) -> None:
    """`validate` lets every send block until its receive is posted."""
    for ranks, micros in SIZES:
        validate(lower(schedule.program(ranks, micros), ahead=1 + (ranks + micros) % 3))


@every_schedule
def test_evaluations_are_the_forwards_in_order_and_never_deadlock(schedule: Schedule) -> None:
    for ranks, micros in SIZES:
        computes = schedule.program(ranks, micros)
        program = lower(forwards(computes), ahead=1 + (ranks + micros) % 3)
        validate(program, forward_only=True)
        for actions, trained in zip(program, computes, strict=True):
            assert {action.op for action in actions} <= {Op.F, Op.SF, Op.RF}
            assert [a for a in actions if a.op is Op.F] == [a for a in trained if a.op is Op.F]


@every_schedule
def test_bubble_is_exactly_the_formula(schedule: Schedule) -> None:
    """Whatever backwards take; if they are split, that of F, I and W that take equally long."""
    is_split = any(action.op is Op.I for actions in schedule.program(2, 2) for action in actions)
    for backward in (2,) if is_split else (2, Fraction(5, 2)):
        for ranks, micros in SIZES:
            timeline = simulate(lower(schedule.program(ranks, micros)), Cost(backward=backward))
            assert timeline.bubble == schedule.bubble(ranks, micros), (ranks, micros)
            assert timeline.busy == [schedule.chunks * micros * (1 + backward)] * ranks


@every_schedule
def test_micros_and_reduces_come_in_order(schedule: Schedule) -> None:
    """Each stage runs its micro-batches in ascending order, and adds their gradients in this order; each rank reduces
    its first stage last."""
    for ranks, micros in SIZES:
        program = lower(schedule.program(ranks, micros))
        for rank, actions in enumerate(program):
            stages = Placement.of(program).stages_of(rank)
            assert [action.stage for action in actions if action.op is Op.R] == list(reversed(stages))
            for stage in stages:
                of_stage = [action for action in actions if action.is_compute and action.stage == stage]
                assert [action.micro for action in of_stage if action.operation.completes] == list(range(micros))
                for op in {action.op for action in of_stage}:
                    assert (found := [action.micro for action in of_stage if action.op is op]) == sorted(found)


def test_peak_of_micro_batches_in_flight_is_as_documented() -> None:
    for ranks, micros in SIZES:
        assert peak_in_flight(GPipe(), ranks, micros) == [micros] * ranks
        for lead in (1, 2):
            assert max(peak_in_flight(ZeroBubble(lead), ranks, micros)) == min(micros, lead * (ranks - 1) + 1)
            expected = [min(micros, lead * (ranks - rank - 1) + 1) for rank in range(ranks)]
            assert peak_in_flight(OneFOneB(lead), ranks, micros) == expected


def test_split_last_backwards_keep_no_more_than_the_first_rank() -> None:
    for ranks, micros in FEWER_SIZES:
        for lead in (1, 2):
            schedule = OneFOneB(lead, split_last=True)
            timeline = simulate(lower(schedule.program(ranks, micros)), Cost())
            assert max(timeline.peak_in_flight) == timeline.peak_in_flight[0] == min(micros, lead * (ranks - 1) + 1)
            assert timeline.bubble == schedule.bubble(ranks, micros)


def test_interleaved_keeps_one_more_round_per_chunk() -> None:
    for ranks, micros in SIZES:
        longest = ceil(micros / max(1, micros // ranks))
        expected = [min(3 * micros, 2 * longest + 2 * (ranks - rank - 1) + 1) for rank in range(ranks)]
        assert peak_in_flight(Interleaved(chunks=3), ranks, micros) == expected


def test_interleaved_with_one_chunk_is_1f1b() -> None:
    for ranks, micros in SIZES:
        assert Interleaved(chunks=1, lead=1).program(ranks, micros) == OneFOneB().program(ranks, micros)


def test_lead_overlaps_messages() -> None:
    """Messages of at most (lead - 1) * (F + B) / 2 cost time only while the pipeline fills and drains."""
    for lead, message in [(2, Fraction(1, 2)), (2, Fraction(3, 2)), (3, Fraction(3))]:
        for ranks, micros in SIZES:
            timeline = simulate(lower(OneFOneB(lead).program(ranks, micros)), Cost(1, 2, message))
            assert timeline.makespan == (micros + ranks - 1) * 3 + 2 * (ranks - 1) * message


def test_gradients_of_weights_fill_waits_as_in_the_paper() -> None:
    """ZB-H1: waits of (ranks - 1) * (F + I - W), and the micro-batches in flight of the first rank of 1F1B on all."""
    for ranks, micros in FEWER_SIZES:
        for forward, inputs, weight in [(1, 1, 1), (2, 3, 2), (3, 2, 1), (4, 5, 3)]:
            cost = Cost(forward, inputs + weight, weight=weight)
            timeline = simulate(lower(ZeroBubble().program(ranks, micros)), cost)
            waits = (ranks - 1) * (forward + inputs) - (min(ranks, micros) - 1) * weight
            assert timeline.makespan == micros * (forward + inputs + weight) + waits
            assert timeline.peak_in_flight == [min(ranks, micros)] * ranks


def test_zb_v_has_the_first_and_the_last_stage_on_one_rank_and_keeps_what_zb_h1_keeps() -> None:
    for ranks, micros in SIZES:
        program = ZeroBubbleV().program(ranks, micros)
        assert {each.stage for each in program[0]} == {0, 2 * ranks - 1}
        assert max(peak_in_flight(ZeroBubbleV(), ranks, micros)) == 2 * min(ranks, micros)  # of half as many layers


def test_lead_of_split_backwards_hides_delays_but_that_of_the_first_input() -> None:
    for lead, delay in [(1, 0), (2, 1), (3, Fraction(3, 2)), (5, 4)]:
        for ranks, micros in [(2, 8), (4, 3 * (lead + 2)), (4, 64)]:
            timeline = simulate(lower(ZeroBubble(lead).program(ranks, micros)), Cost(1, 2, delay=delay))
            first_notice = max(0, delay - 1)  # the first output waits until the receive of its message is known
            assert timeline.makespan == 3 * micros + (ranks - 1) * (1 + delay) + first_notice


def test_split_last_backwards_hide_delays_and_no_others_take_the_time_of_two_parts() -> None:
    """Each part takes 1.05: in a step without other waits, that is added for as many backwards as are split."""
    for lead, delay in [(2, 0), (4, Fraction(3, 2)), (8, 6)]:
        for ranks, micros in [(2, 16), (4, 64)]:
            part, split = Fraction(21, 20), lead * (ranks - 1) + 1
            cost = Cost(1, 2, delay=delay, weight=part, inputs=part)
            timeline = simulate(lower(OneFOneB(lead, split_last=True).program(ranks, micros)), cost)
            waits = (ranks - 1) * (1 + delay) + max(0, delay - 1)  # as of those that are all split
            assert timeline.makespan == 3 * micros + split * (2 * part - 2) + waits


def test_receives_are_posted_so_early_that_no_message_waits_for_the_notice() -> None:
    """Each notice takes as long as a message: with receives posted when the messages are sent, it is 90."""
    program = ZeroBubble(8).program(2, 16)
    assert simulate(lower(program, ahead=0), Cost(1, 2, delay=7)).makespan == 3 * 16 + (1 + 7) + (7 - 1)


def test_slow_messages_queue_on_their_link() -> None:
    """If a message takes longer than the computations between two sends, the link is the bottleneck."""
    timeline = simulate(lower(GPipe().program(2, 4), ahead=8), Cost(forward=1, backward=1, message=5))
    assert [timeline.spans[Action(Op.SF, 0, micro)].start for micro in range(4)] == [1, 6, 11, 16]


def test_costs_may_differ_by_stage() -> None:
    timeline = simulate(lower(GPipe().program(3, 1)), Cost([1, 2, 3], [4, 5, 6], [10, 20]))
    assert timeline.makespan == (1 + 2 + 3) + (4 + 5 + 6) + 2 * (10 + 20)
    timeline = simulate(lower(GPipe().program(3, 1)), Cost(1, 2, message=10, gradient_message=[3, 4]))
    assert timeline.makespan == 3 * (1 + 2) + 2 * 10 + (3 + 4)


def test_messages_are_received_in_sending_order_even_if_needed_in_another() -> None:
    swapped = [parse("0F0 0F1 0F2 0B0 0B1 0B2"), parse("1F2 1F0 1F1 1B0 1B1 1B2")]
    program = lower(swapped, ahead=1)
    assert [str(a) for a in program[1] if a.op is Op.RF] == ["1RF0", "1RF1", "1RF2"]
    validate(program)


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_no_order_that_can_run_deadlocks_after_lowering(ahead: int) -> None:
    for seed in range(100):
        computes = any_order(random.Random(seed))
        validate(lower(computes, ahead))
        validate(lower(forwards(computes), ahead), forward_only=True)


@every_schedule
def test_stages_below_the_first_trained_one_run_forwards_alone(schedule: Schedule) -> None:
    for ranks, micros in FEWER_SIZES:
        computes, stages = schedule.program(ranks, micros), ranks * schedule.chunks
        for first in {0, 1, ranks // 2, stages - 1} & {*range(stages)}:
            program = lower(computes, ahead=1 + (ranks + micros) % 3, first_backward=first)
            validate(program, first_backward=first)
            actions = [action for of_rank in program for action in of_rank]
            assert {action.stage for action in actions if action.op is Op.F} == {*range(stages)}
            assert {action.stage for action in actions if action.op in (Op.B, Op.R)} == {*range(first, stages)}
            assert all(action.stage > first for action in actions if action.op is Op.SB)
            assert all(action.stage >= first for action in actions if action.op is Op.RB)
            assert (program == lower(computes, ahead=1 + (ranks + micros) % 3)) == (first == 0)
            if first:
                with pytest.raises(ValueError, match="is missing"):
                    validate(program)
                with pytest.raises(ValueError, match=f"the first {first} run no backward"):
                    validate(lower(computes), first_backward=first)


def test_frozen_stages_keep_no_activations_and_shorten_the_step() -> None:
    program = lower(OneFOneB().program(4, 8), first_backward=2)
    timeline = simulate(program, Cost(forward=1, backward=2))
    assert timeline.busy == [8, 8, 24, 24]
    assert timeline.peak_in_flight == [0, 0, 2, 1]
    assert timeline.makespan < simulate(lower(OneFOneB().program(4, 8)), Cost(forward=1, backward=2)).makespan


def test_lowered_program_of_two_ranks() -> None:
    program = lower(OneFOneB().program(2, 2), ahead=1)
    assert program == [
        parse("0F0 0SF0 0RB0 0F1 0SF1 0RB1 0B0 0B1 0R"),
        parse("1RF0 1RF1 1F0 1B0 1SB0 1F1 1B1 1SB1 1R"),
    ]


def test_every_operation_has_a_row_and_every_route_its_messages() -> None:
    assert OPERATIONS.keys() == set(Op)
    for operation in OPERATIONS.values():
        if operation.route:
            send, receive, _ = operation.route
            assert OPERATIONS[send] == Operation("send", operation.route)
            assert OPERATIONS[receive] == Operation("receive", operation.route)


def test_actions_parse_as_printed() -> None:
    for op, operation in OPERATIONS.items():
        of_rows = operation.route in (ROWS, ROW_GRADIENTS)
        action = Action(op, 12) if operation.kind == "reduce" else Action(op, 12, 3, 0 if of_rows else -1)
        assert parse_action(str(action)) == action
    for text in ("", "F0", "2F", "2X0", "0R1", "2F0 ", "2F0:1", "2SR0", "2SR:1", "0RT1"):
        with pytest.raises(ValueError, match="is not an action"):
            parse_action(text)


def drop(name: str) -> Callable[[Program], None]:
    """Remove an action."""
    return lambda program: actions_of(program, name).remove(parse_action(name))


def repeat(name: str) -> Callable[[Program], None]:
    """Append an action a second time."""
    return lambda program: actions_of(program, name).append(parse_action(name))


def swap(one: str, other: str) -> Callable[[Program], None]:
    """Exchange two actions, wherever they are."""

    def exchange(program: Program) -> None:
        names = {parse_action(one): parse_action(other), parse_action(other): parse_action(one)}
        program[:] = [[names.get(action, action) for action in row] for row in program]

    return exchange


ERRORS = {
    "a receive is missing": (drop("1RF3"), "1RF3", "is missing; needed by 0SF3, 1F3"),
    "a send is missing": (drop("1SB2"), "1SB2", "is missing; needed by 0B2"),
    "a backward is missing": (drop("2B1"), "2B1", "is missing; needed by 2SB1"),
    "a reduce is missing": (drop("2R"), "2R", "is missing"),
    "a backward comes twice": (repeat("2B1"), "2B1", "appears twice"),
    "a stage is on another rank": (swap("1F2", "2F2"), "2F2", "stage 2 is on rank 2"),
    "the last stage sends": (
        lambda program: program[3].append(Action(Op.SF, 3, 0)),
        "3SF0",
        "not part of a training step",
    ),
    "sends change places": (swap("1SF1", "1SF2"), "2RF1", "is posted where 1SF2 arrives"),
    "receives change places": (swap("1RF1", "1RF2"), "1RF2", "is posted where 0SF1 arrives"),
    "a reduce comes early": (swap("2R", "2B5"), "2R", "comes before 2B5"),
    "a backward comes before its forward": (swap("3F4", "3B4"), "3B4", "waits for 3F4"),
    "a receive comes after its compute": (swap("1RF5", "1F5"), "0SF5", "waits for 1RF5"),
    "a send comes before its compute": (swap("0SF0", "0F0"), "0SF0", "waits for 0F0"),
}


@pytest.mark.parametrize(("break_program", "culprit", "text"), ERRORS.values(), ids=ERRORS)
def test_validate_names_and_marks_the_error(break_program: Callable[[Program], None], culprit: str, text: str) -> None:
    program = lower(OneFOneB().program(4, 6), ahead=2)
    validate(program)
    break_program(program)
    with pytest.raises(ValueError, match=rf"(?m)^rank \d, action {culprit}: .*{text}") as error:
        validate(program)
    assert "rank 3 |" in str(error.value)
    assert culprit in marked(str(error.value)) or text.startswith("is missing")


EVALUATION_ERRORS = {
    "a forward is missing": (drop("3F3"), "3F3", "is missing"),
    "a receive is missing": (drop("1RF3"), "1RF3", "is missing; needed by 0SF3, 1F3"),
    "a forward comes twice": (repeat("0F0"), "0F0", "appears twice"),
    "a backward is in it": (
        lambda program: program[3].append(Action(Op.B, 3, 0)),
        "3B0",
        "not part of an evaluation",
    ),
    "a reduce is in it": (lambda program: program[0].append(Action(Op.R, 0)), "0R", "not part of an evaluation"),
    "sends change places": (swap("1SF1", "1SF2"), "2RF1", "is posted where 1SF2 arrives"),
    "a receive comes after its compute": (swap("1RF5", "1F5"), "0SF5", "waits for 1RF5"),
}


@pytest.mark.parametrize(("break_program", "culprit", "text"), EVALUATION_ERRORS.values(), ids=EVALUATION_ERRORS)
def test_validate_checks_evaluations_in_the_same_way(
    break_program: Callable[[Program], None], culprit: str, text: str
) -> None:
    program = lower(forwards(OneFOneB().program(4, 6)), ahead=2)
    validate(program, forward_only=True)
    break_program(program)
    with pytest.raises(ValueError, match=rf"(?m)^rank \d, action {culprit}: .*{text}"):
        validate(program, forward_only=True)


def test_training_needs_backwards_and_evaluation_refuses_them() -> None:
    computes = GPipe().program(2, 2)
    with pytest.raises(ValueError, match="is missing"):
        validate(lower(forwards(computes)))
    with pytest.raises(ValueError, match="not part of an evaluation"):
        validate(lower(computes), forward_only=True)


def test_validate_finds_a_deadlock_of_blocking_sends() -> None:
    """Both ranks send before they post a receive. With receives posted one computation ahead, the same order runs."""
    program = [
        parse("0F0 0SF0 0F1 0SF1 0RB0 0B0 0RB1 0B1 0R"),
        parse("1RF0 1F0 1B0 1SB0 1RF1 1F1 1B1 1SB1 1R"),
    ]
    with pytest.raises(ValueError, match="wait for each other") as error:
        validate(program)
    assert marked(str(error.value)) == ["0SF1", "1SB0"]
    validate(lower([[a for a in row if a.op in (Op.F, Op.B)] for row in program], ahead=1))


def test_lower_refuses_computations_that_cannot_run() -> None:
    with pytest.raises(ValueError, match=r"rank 1, action 1F0: waits for 0F0"):
        lower([[], [Action(Op.F, 1, 0)]])


def test_the_number_of_stages_is_a_multiple_of_the_ranks() -> None:
    with pytest.raises(ValueError, match="3 stages on 2 ranks"):
        validate([parse("0F0 2F0"), parse("1F0")])


@pytest.mark.parametrize("spec", ["interleaved:chunks=0", "interleaved:lead=0", "1f1b:lead=0"])
def test_options_below_one_are_refused(spec: str) -> None:
    with pytest.raises(ValueError, match=r"pp.schedule=.*=0: must be at least 1"):
        from_spec(spec, SCHEDULES, key="pp.schedule")


@pytest.mark.parametrize("spec", SPECS)
def test_specs_parse_as_printed(spec: str) -> None:
    schedule = from_spec(spec, SCHEDULES, key="pp.schedule")
    assert from_spec(to_spec(schedule, SCHEDULES), SCHEDULES, key="pp.schedule") == schedule


def test_draw_shows_computations_and_marks() -> None:
    program = lower(OneFOneB().program(2, 2))
    at = program[0].index(parse_action("0SF0"))
    assert draw(program, [(0, at)]).splitlines() == [
        "rank 0 | 0F0  >0SF0< 0F1   0B0   0B1",
        "rank 1 | 1F0   1B0   1F1   1B1",
    ]


def test_command_draws_the_time_axis(capsys: pytest.CaptureFixture[str]) -> None:
    main(["1f1b", "2", "2"])
    assert capsys.readouterr().out.splitlines() == [
        "rank 0 |0F0 0F1         0B0====     0B1====",
        "rank 1 |    1F0 1B0==== 1F1 1B1====",
        "makespan 9, bubble 33.3%",
        "micro-batches in flight, at most, by rank: 2, 1",
    ]


def test_schedules_need_no_torch() -> None:
    code = "import sys, acsgd.pp, acsgd.pp.schedules.simulate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def any_order(rng: random.Random) -> Program:
    """Return computations in a random order that can run."""
    ranks, chunks, micros = rng.randint(1, 4), rng.randint(1, 3), rng.randint(1, 5)
    placement = Placement(ranks, ranks * chunks)
    left = {Action(op, s, m) for op in (Op.F, Op.B) for s in range(placement.stages) for m in range(micros)}
    dependencies = Dependencies(placement, left)
    program: Program = [[] for _ in range(ranks)]
    while left:
        compute = rng.choice(sorted(c for c in left if left.isdisjoint(dependencies.inputs(c))))
        program[placement.rank_of(compute.stage)].append(compute)
        left.remove(compute)
    return program


def peak_in_flight(schedule: Schedule, ranks: int, micros: int) -> list[int]:
    return simulate(lower(schedule.program(ranks, micros)), Cost()).peak_in_flight


def parse(actions: str) -> list[Action]:
    return [parse_action(text) for text in actions.split()]


def actions_of(program: Program, name: str) -> list[Action]:
    return program[Dependencies.of(program).placement.rank_of(parse_action(name).stage)]


def marked(text: str) -> list[str]:
    return re.findall(r">(\w+)<", text)
