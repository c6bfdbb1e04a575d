"""Simulate a program: when actions run and messages travel, the idle share of each rank, and the activations it keeps.

python -m acsgd.pp.schedules.simulate interleaved:chunks=2 4 8 --message 0.5
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import NamedTuple, cast

from acsgd.config.spec import from_spec
from acsgd.pp.schedules.actions import ACTIVATION, GRADIENT, ROW_GRADIENTS, ROWS, Action, Op, Program, label_ranks
from acsgd.pp.schedules.dependencies import Dependencies, walk
from acsgd.pp.schedules.lowering import AHEAD, lower
from acsgd.pp.schedules.rows import RowRoute
from acsgd.pp.schedules.schedules import SCHEDULES, Schedule

Time = float | Fraction
"""In any unit; integers and fractions stay exact."""


@dataclass(frozen=True)
class Cost:
    """Durations of actions: one value for all, or one per stage (messages: one per boundary, from the first; rows: one
    per micro-batch)."""

    forward: Time | Sequence[Time] = 1
    backward: Time | Sequence[Time] = 2
    message: Time | Sequence[Time] = 0
    """Time of a message on the wire, which carries one at a time."""
    gradient_message: Time | Sequence[Time] | None = None
    """Of gradients of activations; None = as `message`."""
    delay: Time | Sequence[Time] = 0
    """Time by which a message arrives later than its link is free again, in both directions, and by which its sender
    learns later that its receive is posted."""
    rows: Time | Sequence[Time] = 0
    """Of the rows of a tied table that a micro-batch is the first to use."""
    row_gradients: Time | Sequence[Time] = 0
    """Of the gradients of the rows that a micro-batch is the last to use."""
    weight: Time | Sequence[Time] | None = None
    """Of the part of a split backward that computes gradients of weights; None = half of a whole one."""
    inputs: Time | Sequence[Time] | None = None
    """Of the part that computes gradients of inputs; None = the rest of a whole one."""

    def of(self, action: Action) -> Time:
        """Return the duration of an action: computations occupy the rank, sends the link; all others take no time."""
        if action.operation.kind == "send" and action.operation.route in (ROWS, ROW_GRADIENTS):
            return _at(self.rows if action.op is Op.SR else self.row_gradients, action.micro)
        match action.operation.kind, action.operation.phase:
            case "compute", "forward":
                return _at(self.forward, action.stage)
            case "compute", _:
                whole = _at(self.backward, action.stage)
                weight = whole * Fraction(1, 2) if self.weight is None else _at(self.weight, action.stage)
                inputs = whole - weight if self.inputs is None else _at(self.inputs, action.stage)
                return {Op.B: whole, Op.I: inputs, Op.W: weight}[action.op]
            case "send", _:
                if action.operation.route == GRADIENT and self.gradient_message is not None:
                    return _at(self.gradient_message, action.boundary)
                return _at(self.message, action.boundary)
        return 0

    def delay_of(self, action: Action) -> Time:
        """Return the delay of a message, or of the notice that its receive is posted; that of all else is 0.

        Of rows, which pass no boundary, it is the longest one.
        """
        if action.operation.kind not in ("send", "receive"):
            return 0
        if action.operation.route in (ACTIVATION, GRADIENT):
            return _at(self.delay, action.boundary)
        return max(self.delay) if isinstance(self.delay, Sequence) else self.delay


def _at(cost: Time | Sequence[Time], index: int) -> Time:
    return cost[index] if isinstance(cost, Sequence) else cost


class ActionSpan(NamedTuple):
    """Start and end of an action; of a send, of the transfer of its message; a receive ends when its sender knows that
    it is posted."""

    start: Time
    end: Time


@dataclass(frozen=True)
class Timeline:
    """The spans of all actions of a program."""

    program: Program
    spans: dict[Action, ActionSpan]

    @property
    def makespan(self) -> Time:
        """Time at which the last action ends."""
        return max(span.end for span in self.spans.values())

    @property
    def busy(self) -> list[Time]:
        """Total time of the computations of each rank."""
        return [sum(self._length(action) for action in _computes(actions)) for actions in self.program]

    @property
    def bubble(self) -> Fraction:
        """Idle share of the time of all ranks."""
        return 1 - Fraction(sum(self.busy)) / Fraction(self.makespan * len(self.program))

    @property
    def peak_in_flight(self) -> list[int]:
        """Largest number of (stage, micro-batch) pairs whose activations each rank keeps at once."""
        return [_peak_in_flight(actions) for actions in self.program]

    def _length(self, action: Action) -> Time:
        return self.spans[action].end - self.spans[action].start

    def draw(self) -> str:
        """Draw the computations on one time axis, one line per rank: = continues a computation, blank is idle.

        Two more lines show the transfers of rows and of their gradients, if there are any, by micro-batch.
        """
        computes = [action for actions in self.program for action in _computes(actions)]
        shortest: Time = min((length for action in computes if (length := self._length(action))), default=1)
        columns = (1 + max(len(str(action)) for action in computes)) / shortest  # per unit of time
        ranks = label_ranks([self._line(actions, columns) for actions in self.program])
        label = len(ranks.partition("|")[0])
        rows = {name: self._transfers(op, columns) for name, op in (("rows", Op.SR), ("grad", Op.SG))}
        return "\n".join([ranks, *(f"{name:{label}}|{line}" for name, line in rows.items() if line)])

    def _line(self, actions: list[Action], columns: Time) -> str:
        line = ""
        for action in _computes(actions):
            start, end = (round(time * columns) for time in self.spans[action])
            line = line.ljust(start) + str(action).ljust(end - start - 1, "=") + " "
        return line.rstrip()

    def _transfers(self, op: Op, columns: Time) -> str:
        """Draw the transfers of one kind, which do not overlap."""
        line = ""
        for action in (action for actions in self.program for action in actions if action.op is op):
            start, end = (round(time * columns) for time in self.spans[action])
            line = line.ljust(start) + str(action.micro).ljust(end - start, "=")[: end - start]
        return line.rstrip()


def _computes(actions: list[Action]) -> list[Action]:
    return [action for action in actions if action.is_compute]


def _peak_in_flight(actions: list[Action]) -> int:
    in_flight = peak = 0
    trained = {action.stage for action in actions if action.operation.completes}  # others keep nothing
    for action in actions:
        in_flight += (action.operation.phase == "forward" and action.stage in trained) - action.operation.completes
        peak = max(peak, in_flight)
    return peak


class _Step(NamedTuple):
    """An action and what it waits for, in an order in which the ranks can run it."""

    rank: int
    needs: tuple[int, ...]
    """Indices of the steps that must have ended."""
    link: tuple[int, int] | None
    """From this rank to the other one, of a send or a receive."""
    is_send: bool
    is_compute: bool
    kind: int
    """Index among the kinds of actions, those of equal cost."""


class Simulator:
    """A lowered program, to be simulated with any costs. Raises ValueError if it deadlocks.

    Sends overlap with computations. The link from one rank to another carries one message at a time, in sending order,
    each no sooner than its sender knows that its receive is posted. That notice waits for the messages that its link
    has to carry by then, as gloo's does, whose notices and messages share a connection.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        dependencies, index = Dependencies.of(program), dict[Action, int]()
        kinds = dict[Action, int]()
        self._steps: list[_Step] = []
        for rank, action in walk(program, dependencies.needs):
            needs = tuple(index[need] for need in dependencies.needs(action))
            is_send, is_row = action.operation.kind == "send", action.operation.route in (ROWS, ROW_GRADIENTS)
            has_peer = action.operation.kind in ("send", "receive")
            link = (rank, dependencies.placement.rank_of(action.peer)) if has_peer else None
            kind = kinds.setdefault(action if is_row else action._replace(micro=-1), len(kinds))
            index[action] = len(self._steps)
            self._steps.append(_Step(rank, needs, link, is_send, action.is_compute, kind))
        self._actions, self._kinds = [*index], [*kinds]

    def run(self, cost: Cost) -> Timeline:
        """Run the program as fast as its messages allow; return when which action runs."""
        return Timeline(self.program, dict(zip(self._actions, map(ActionSpan, *self._times(cost)), strict=True)))

    def makespan(self, cost: Cost) -> Time:
        """Return the time at which the last action ends."""
        return max(self._times(cost)[1])

    def _times(self, cost: Cost) -> tuple[list[Time], list[Time]]:
        """Return start and end of all steps."""
        durations = [(cost.of(action), cost.delay_of(action)) for action in self._kinds]
        rank_free: defaultdict[int, Time] = defaultdict(int)
        queues: defaultdict[tuple[int, int], list[ActionSpan]] = defaultdict(lambda: [ActionSpan(0, 0)])
        """By link, when each message could start, and when it has left the link."""
        starts, ends = list[Time](), list[Time]()
        for rank, needs, link, is_send, is_compute, kind in self._steps:
            length, delay = durations[kind]
            start = max([rank_free[rank], *(ends[need] for need in needs)])
            if link is not None:
                queue = queues[link]
                if is_send:
                    ready, start = start, max(start, queue[-1].end)
                    queue.append(ActionSpan(ready, start + length))
                else:
                    delay += max(0, next(sent.end for sent in reversed(queue) if sent.start <= start) - start)
            starts.append(start)
            ends.append(start + length + delay)
            if is_compute:
                rank_free[rank] = ends[-1]
        return starts, ends


def simulate(program: Program, cost: Cost) -> Timeline:
    """Simulate a lowered program once, see `Simulator`."""
    return Simulator(program).run(cost)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m acsgd.pp.schedules.simulate", description=main.__doc__)
    parser.add_argument("schedule", help=" | ".join(SCHEDULES) + ", with its options: interleaved:chunks=2")
    parser.add_argument("ranks", type=int, help="ranks of the pipeline")
    parser.add_argument("micros", type=int, help="micro-batches of a step")
    parser.add_argument("--forward", type=Fraction, default=1, help="time of one forward of one stage")
    parser.add_argument("--backward", type=Fraction, default=2, help="time of one backward of one stage")
    parser.add_argument("--weight", type=Fraction, help="time of its part for the weights, if split; default: half")
    parser.add_argument("--inputs", type=Fraction, help="time of its part for the inputs, if split; default: the rest")
    parser.add_argument(
        "--delay",
        type=Fraction,
        default=0,
        help="time that each message takes besides, and before it the notice that its receive is posted",
    )
    parser.add_argument("--message", type=Fraction, default=0, help="time of one message on the wire")
    parser.add_argument(
        "--ahead", type=int, default=AHEAD, help="number of computations by which a receive is posted before its use"
    )
    parser.add_argument(
        "--first-backward", type=int, default=0, help="first stage with trained weights; those below run no backward"
    )
    parser.add_argument(
        "--rows",
        type=Fraction,
        nargs="+",
        help="tied head: time on the wire of the rows that the first micro-batch uses, of those that the second is the "
        "first to use, and so on; the last value is that of all others. Their gradients mirror them: the rows that the "
        "last micro-batch uses take as long as those of the first",
    )
    options = parser.parse_args(arguments)
    if options.rows and (options.ranks == 1 or options.schedule == "zbv"):
        parser.error("--rows needs the first and the last stage on two ranks: one rank sends no rows")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw a schedule on a time axis and print its bubble and memory."""
    options = parse_arguments(arguments)
    schedule = cast(Schedule, from_spec(options.schedule, SCHEDULES, key="pp.schedule"))
    parts = {"weight": options.weight, "inputs": options.inputs}
    cost = Cost(options.forward, options.backward, options.message, delay=options.delay, **parts)
    computes = schedule.program(options.ranks, options.micros)
    lowered = partial(lower, computes, options.ahead, first_backward=options.first_backward)
    timeline = untied = simulate(lowered(), cost)
    if options.rows:
        rows = (options.rows + options.rows[-1:] * options.micros)[: options.micros]
        program = lowered(routes=[RowRoute(owner=options.ranks * schedule.chunks - 1, user=0)])
        timeline = simulate(program, replace(cost, rows=rows, row_gradients=rows[::-1]))
    print(timeline.draw())
    print(f"makespan {float(timeline.makespan):g}, bubble {float(timeline.bubble):.1%}")
    if options.rows:
        print(
            f"without rows {float(untied.makespan):g}: the tie is {float(1 - untied.makespan / timeline.makespan):.1%}"
        )
    print(f"micro-batches in flight, at most, by rank: {', '.join(map(str, timeline.peak_in_flight))}")


if __name__ == "__main__":
    main()
