"""A program on a time axis: when every action runs, how idle each rank is, what it has to remember.

python -m acsgd.pp.schedules.simulate interleaved:chunks=2 4 8 --message 0.5
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, cast

from acsgd.config import spec as registry
from acsgd.pp.schedules.actions import ROUTES, SENT_AFTER, Action, Op, Placement, Program, grid, walk
from acsgd.pp.schedules.lowering import AHEAD, lower
from acsgd.pp.schedules.schedules import SCHEDULES, Schedule

Time = float | Fraction  # in any unit; whole numbers and fractions stay exact


@dataclass(frozen=True)
class Cost:
    """How long actions take: a single time, or one per stage (message: per boundary, from the first)."""

    forward: Time | Sequence[Time] = 1
    backward: Time | Sequence[Time] = 2
    message: Time | Sequence[Time] = 0

    def of(self, action: Action) -> Time:
        """Return how long an action takes: a compute of its rank, a send of its link, the others none."""
        op, stage, _ = action
        match op:
            case Op.F:
                return _at(self.forward, stage)
            case Op.B:
                return _at(self.backward, stage)
            case Op.SF | Op.SB:
                return _at(self.message, min(stage, stage + ROUTES[SENT_AFTER[op]].step))
        return 0


def _at(cost: Time | Sequence[Time], index: int) -> Time:
    return cost[index] if isinstance(cost, Sequence) else cost


class Span(NamedTuple):
    """When an action starts and ends; for a send, when its message is on the wire."""

    start: Time
    end: Time


@dataclass(frozen=True)
class Timeline:
    """A program that has run."""

    program: Program
    spans: dict[Action, Span]

    @property
    def makespan(self) -> Time:
        """The time at which the last action ends."""
        return max(span.end for span in self.spans.values())

    @property
    def busy(self) -> list[Time]:
        """How long each rank computes."""
        return [sum(self._length(action) for action in row if action.op in ROUTES) for row in self.program]

    @property
    def bubble(self) -> Fraction:
        """The idle share of all ranks' time."""
        return 1 - Fraction(sum(self.busy)) / Fraction(self.makespan * len(self.program))

    @property
    def live(self) -> list[int]:
        """The most activations each rank keeps at once: one per stage and micro-batch, from F to B."""
        return [_peak(row) for row in self.program]

    def _length(self, action: Action) -> Time:
        return self.spans[action].end - self.spans[action].start

    def draw(self) -> str:
        """Draw the computes on one time axis, a line per rank: = is work that goes on, blank is idle."""
        computes = [action for row in self.program for action in row if action.op in ROUTES]
        shortest: Time = min((length for action in computes if (length := self._length(action))), default=1)
        columns = (1 + max(len(str(action)) for action in computes)) / shortest  # per unit of time
        return grid([self._line(row, columns) for row in self.program])

    def _line(self, row: list[Action], columns: Time) -> str:
        line = ""
        for action in row:
            if action.op in ROUTES:
                start, end = (round(time * columns) for time in self.spans[action])
                line = line.ljust(start) + str(action).ljust(end - start - 1, "=") + " "
        return line.rstrip()


def _peak(row: list[Action]) -> int:
    live = peak = 0
    for action in row:
        live += (action.op is Op.F) - (action.op is Op.B)
        peak = max(peak, live)
    return peak


def simulate(program: Program, cost: Cost) -> Timeline:
    """Run a lowered program as fast as its messages allow. Raises ValueError if it deadlocks.

    Sends run beside the computes. A link, from one rank to another, carries one message at a time, in the
    order in which they were sent, each no sooner than its receive is posted.
    """
    placement = Placement.of(program)
    rank_free: defaultdict[int, Time] = defaultdict(int)
    link_free: defaultdict[tuple[int, int], Time] = defaultdict(int)
    spans: dict[Action, Span] = {}
    for rank, action in walk(program, placement.needs):
        start = max([rank_free[rank], *(spans[need].end for need in placement.needs(action))])
        if action.op in SENT_AFTER:
            peer = placement.rank_of(action.stage + ROUTES[SENT_AFTER[action.op]].step)
            start = max(start, link_free[rank, peer])
            link_free[rank, peer] = start + cost.of(action)
        spans[action] = Span(start, start + cost.of(action))
        if action.op in ROUTES:
            rank_free[rank] = spans[action].end
    return Timeline(program, spans)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print how a schedule runs."""
    parser = argparse.ArgumentParser(prog="python -m acsgd.pp.schedules.simulate", description=main.__doc__)
    parser.add_argument("schedule", help=" | ".join(SCHEDULES) + ", with its options: interleaved:chunks=2")
    parser.add_argument("ranks", type=int)
    parser.add_argument("micros", type=int)
    parser.add_argument("--forward", type=Fraction, default=1, help="time of one forward of one stage")
    parser.add_argument("--backward", type=Fraction, default=2, help="time of one backward of one stage")
    parser.add_argument("--message", type=Fraction, default=0, help="time of one message on the wire")
    parser.add_argument("--ahead", type=int, default=AHEAD, help="computes by which a receive is posted ahead")
    options = parser.parse_args(arguments)
    schedule = cast(Schedule, registry.from_spec(options.schedule, SCHEDULES, key="pp.schedule"))
    cost = Cost(options.forward, options.backward, options.message)
    timeline = simulate(lower(schedule.program(options.ranks, options.micros), options.ahead), cost)
    print(timeline.draw())
    print(f"makespan {float(timeline.makespan):g}, bubble {float(timeline.bubble):.1%}")
    print(f"activations kept, at most, by rank: {', '.join(map(str, timeline.live))}")


if __name__ == "__main__":
    main()
