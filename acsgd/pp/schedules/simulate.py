"""Simulate a program: when each action runs, the idle share of each rank, and the activations it keeps.

python -m acsgd.pp.schedules.simulate interleaved:chunks=2 4 8 --message 0.5
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, cast

from acsgd.config.spec import from_spec
from acsgd.pp.schedules.actions import Action, Program, label_ranks
from acsgd.pp.schedules.dependencies import Dependencies, walk
from acsgd.pp.schedules.lowering import AHEAD, lower
from acsgd.pp.schedules.schedules import SCHEDULES, Schedule

Time = float | Fraction
"""In any unit; integers and fractions stay exact."""


@dataclass(frozen=True)
class Cost:
    """Durations of actions: one value for all, or one per stage (message: one per boundary, from the first)."""

    forward: Time | Sequence[Time] = 1
    backward: Time | Sequence[Time] = 2
    message: Time | Sequence[Time] = 0

    def of(self, action: Action) -> Time:
        """Return the duration of an action: computations occupy the rank, sends the link; all others take no time."""
        match action.operation.kind, action.operation.phase:
            case "compute", "forward":
                return _at(self.forward, action.stage)
            case "compute", _:
                return _at(self.backward, action.stage)
            case "send", _:
                return _at(self.message, action.boundary)
        return 0


def _at(cost: Time | Sequence[Time], index: int) -> Time:
    return cost[index] if isinstance(cost, Sequence) else cost


class Span(NamedTuple):
    """Start and end of an action; for a send, of the transfer of its message."""

    start: Time
    end: Time


@dataclass(frozen=True)
class Timeline:
    """The spans of all actions of a program."""

    program: Program
    spans: dict[Action, Span]

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
        """Draw the computations on one time axis, one line per rank: = continues a computation, blank is idle."""
        computes = [action for actions in self.program for action in _computes(actions)]
        shortest: Time = min((length for action in computes if (length := self._length(action))), default=1)
        columns = (1 + max(len(str(action)) for action in computes)) / shortest  # per unit of time
        return label_ranks([self._line(actions, columns) for actions in self.program])

    def _line(self, actions: list[Action], columns: Time) -> str:
        line = ""
        for action in _computes(actions):
            start, end = (round(time * columns) for time in self.spans[action])
            line = line.ljust(start) + str(action).ljust(end - start - 1, "=") + " "
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


def simulate(program: Program, cost: Cost) -> Timeline:
    """Run a lowered program as fast as its messages allow. Raises ValueError if it deadlocks.

    Sends overlap with computations. The link from one rank to another carries one message at a time, in sending
    order, each no sooner than its receive is posted.
    """
    dependencies = Dependencies.of(program)
    rank_free: defaultdict[int, Time] = defaultdict(int)
    link_free: defaultdict[tuple[int, int], Time] = defaultdict(int)
    spans: dict[Action, Span] = {}
    for rank, action in walk(program, dependencies.needs):
        start = max([rank_free[rank], *(spans[need].end for need in dependencies.needs(action))])
        if action.operation.kind == "send":
            link = rank, dependencies.placement.rank_of(action.peer)
            start = max(start, link_free[link])
            link_free[link] = start + cost.of(action)
        spans[action] = Span(start, start + cost.of(action))
        if action.is_compute:
            rank_free[rank] = spans[action].end
    return Timeline(program, spans)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw a schedule on a time axis and print its bubble and memory."""
    parser = argparse.ArgumentParser(prog="python -m acsgd.pp.schedules.simulate", description=main.__doc__)
    parser.add_argument("schedule", help=" | ".join(SCHEDULES) + ", with its options: interleaved:chunks=2")
    parser.add_argument("ranks", type=int, help="ranks of the pipeline")
    parser.add_argument("micros", type=int, help="micro-batches of a step")
    parser.add_argument("--forward", type=Fraction, default=1, help="time of one forward of one stage")
    parser.add_argument("--backward", type=Fraction, default=2, help="time of one backward of one stage")
    parser.add_argument("--message", type=Fraction, default=0, help="time of one message on the wire")
    parser.add_argument(
        "--ahead", type=int, default=AHEAD, help="number of computations by which a receive is posted before its use"
    )
    parser.add_argument(
        "--first-backward", type=int, default=0, help="first stage with trained weights; those below run no backward"
    )
    options = parser.parse_args(arguments)
    schedule = cast(Schedule, from_spec(options.schedule, SCHEDULES, key="pp.schedule"))
    cost = Cost(options.forward, options.backward, options.message)
    computes = schedule.program(options.ranks, options.micros)
    timeline = simulate(lower(computes, options.ahead, first_backward=options.first_backward), cost)
    print(timeline.draw())
    print(f"makespan {float(timeline.makespan):g}, bubble {float(timeline.bubble):.1%}")
    print(f"micro-batches in flight, at most, by rank: {', '.join(map(str, timeline.peak_in_flight))}")


if __name__ == "__main__":
    main()
