"""The choice of the codecs of a pipeline's links: a pure function of what is measured."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from acsgd.pp.schedules.actions import ACTIVATION, GRADIENT, Op, Program, Route
from acsgd.pp.schedules.dependencies import Dependencies
from acsgd.pp.schedules.rows import RowRoute
from acsgd.pp.schedules.simulate import Cost, Simulator
from acsgd.pp.wire.ladder import CodecTime
from acsgd.pp.wire.probe import probe_size
from acsgd.run.plan.choose import BAND

TOLERANCE = 0.02
"""Fraction by which a step may be longer than with the fastest codecs, for a lower loss cost; twice that, before other
codecs take the place of the present ones."""
SAME = 1.15
"""Ratio of two measurements up to which the choice is not made anew."""
NEGLIGIBLE = 0.02
"""Times below this fraction of the time of a micro-batch count as 0."""
GRID = 1.1
"""Ratio of neighbouring values that times are rounded to, so that the same measurement, nearly, is simulated once."""

Choice = tuple[int, ...]
"""Index of the codec of each direction: of activations by boundary, then of gradients by boundary; and of the way to
send rows of tied tables, if there is a choice."""


class Direction(NamedTuple):
    """One direction of a link. Sequences are by codec, ascending in loss cost."""

    s_per_byte: float
    delay_s: float
    message_bytes: tuple[float, ...]
    loss_costs: tuple[float, ...]
    times: tuple[CodecTime, ...]
    usable: tuple[int, ...]
    """Indices of the codecs that may be chosen, ascending."""
    entropy_coded: frozenset[int] = frozenset()
    """Indices of those that take several times the time of the others."""

    def transfer_s(self, codec: int) -> float:
        """Return the time of a message on the wire."""
        return self.s_per_byte * self.message_bytes[codec]

    def cheapest(self, limit_s: float, *, entropy_coded: bool = True) -> int:
        """Return the codec of the least loss cost whose messages take at most some time, else that of the shortest.

        entropy_coded: whether it may be one with entropy coding, where there are others.
        """
        codecs = [codec for codec in self.usable if entropy_coded or codec not in self.entropy_coded] or self.usable
        shortest = min(codecs, key=self.transfer_s)
        return next((codec for codec in codecs if self.transfer_s(codec) <= limit_s), shortest)


class RowWay(NamedTuple):
    """A way to send the rows of tied tables, and their gradients. Times are those of a micro-batch, on average."""

    loss_cost: float
    rows_s: float
    """Of rows on the wire."""
    gradients_s: float
    owner_s: float
    """Of the codecs of the rank that holds the table."""
    user_s: float
    """Of those of the rank that looks up rows."""


class RowTraffic(NamedTuple):
    """The rows of tied tables in a step."""

    ways: tuple[RowWay, ...]
    """Ascending in loss cost."""
    micros: int
    """Number of micro-batches."""
    power: float
    """k micro-batches use in proportion to k ** power different rows: Heaps' law."""

    def shares(self, micros: int) -> list[float]:
        """Return how many rows each of the first micro-batches is the first to use, relative to the mean of all."""
        until = (self.micros * (count / self.micros) ** self.power for count in range(1, micros + 1))
        return [after - before for before, after in itertools.pairwise([0.0, *until])]

    def slower(self, factor: float) -> RowTraffic:
        """Return the same with slower links."""
        ways = (way._replace(rows_s=way.rows_s * factor, gradients_s=way.gradients_s * factor) for way in self.ways)
        return self._replace(ways=tuple(ways))

    def rounded(self, on_grid: Callable[[float], float]) -> RowTraffic:
        """Return the same with times on a grid."""
        ways = (RowWay(cost, *map(on_grid, times)) for cost, *times in self.ways)
        return RowTraffic(tuple(ways), self.micros, round(self.power, 1))


class Measured(NamedTuple):
    """A pipeline as measured: what the choice of its codecs depends on."""

    compute_s: tuple[float, ...]
    """Of a micro-batch, by rank, without codecs."""
    directions: tuple[Direction, ...]
    """In the order of `Choice`."""
    rows: RowTraffic | None = None
    """None = there is no choice of how rows of tied tables travel."""

    def loss_cost(self, choice: Choice) -> float:
        """Return the sum of the loss costs of all directions in which codecs are chosen, and of rows."""
        chosen = zip(self.directions, choice, strict=False)
        cost = sum(each.loss_costs[codec] for each, codec in chosen if len(each.usable) > 1)
        return cost + (self.rows.ways[choice[-1]].loss_cost if self.rows else 0.0)

    def slower(self, factor: float) -> Measured:
        """Return the same with slower links."""
        directions = (each._replace(s_per_byte=each.s_per_byte * factor) for each in self.directions)
        return Measured(self.compute_s, tuple(directions), self.rows and self.rows.slower(factor))

    def without_links(self) -> Measured:
        """Return the same with links and codecs that take no time."""
        nothing, free = CodecTime(0.0, 0.0), self.slower(0.0)
        directions = (each._replace(delay_s=0.0, times=(nothing,) * len(each.times)) for each in free.directions)
        return free._replace(directions=tuple(directions))

    def probe_s(self) -> float:
        """Return the time of a measurement of all links."""
        measured = [each for each in self.directions if each.s_per_byte]
        times = (2 * probe_size(each.s_per_byte) * each.s_per_byte + 2 * each.delay_s for each in measured)
        return max(times, default=0.0)

    def is_near(self, other: Measured) -> bool:
        """Return whether computing times and uncompressed transfers differ little, or count as 0 in both."""
        least = NEGLIGIBLE * max(self.compute_s)
        pairs = [
            *zip(self.compute_s, other.compute_s, strict=True),
            *((a.transfer_s(0), b.transfer_s(0)) for a, b in zip(self.directions, other.directions, strict=True)),
            *((a.delay_s, b.delay_s) for a, b in zip(self.directions, other.directions, strict=True)),
        ]
        if self.rows and other.rows:
            pairs += [(a.rows_s, b.rows_s) for a, b in zip(self.rows.ways, other.rows.ways, strict=True)]
        return all(max(pair) < least or max(pair) <= SAME * min(pair) for pair in pairs)

    def rounded(self) -> Measured:
        """Return the same with times in units of the longest computation, on a coarse grid."""
        unit = max(self.compute_s)

        def on_grid(seconds: float) -> float:
            ratio = seconds / unit
            return 0.0 if ratio < NEGLIGIBLE else GRID ** round(math.log(ratio, GRID))

        directions = []
        for each in self.directions:
            longest = max(each.message_bytes)
            times = tuple(CodecTime(*map(on_grid, time)) for time in each.times)
            s_per_byte = on_grid(each.s_per_byte * longest) / longest
            directions.append(each._replace(s_per_byte=s_per_byte, delay_s=on_grid(each.delay_s), times=times))
        rows = self.rows and self.rows.rounded(on_grid)
        return Measured(tuple(map(on_grid, self.compute_s)), tuple(directions), rows)


class Chooser:
    """Chooses the codecs of a pipeline: a pure function of what is measured and of the present choice.

    program: of a step; max_loss_cost: largest sum of the loss costs of all directions, and of rows.
    """

    def __init__(self, program: Program, max_loss_cost: float) -> None:
        self._simulator = Simulator(program)
        self.placement = Dependencies.of(program).placement
        self._sent = {
            (action.operation.route, action.boundary)
            for actions in program
            for action in actions
            if action.operation.kind == "send" and action.operation.route in (ACTIVATION, GRADIENT)
        }
        actions = {*itertools.chain.from_iterable(program)}
        self.row_routes = sorted({RowRoute(action.stage, action.peer) for action in actions if action.op is Op.SR})
        """Between which stages rows of tied tables travel."""
        self._micros = 1 + max(action.micro for action in actions)
        self._max_loss_cost = max_loss_cost
        self._known: dict[Measured, Choice] = {}

    def choose(self, measured: Measured, present: Choice) -> Choice:
        """Return the codecs of the next step: the present ones, unless they are slow or links leave room for others."""
        now, allowed = self._best(measured), measured.loss_cost(present) <= self._max_loss_cost
        if not allowed or self.step_s(measured, present) > (1 + 2 * TOLERANCE) * self.step_s(measured, now):
            return now
        slower = self._best(measured.slower(BAND))
        return tuple(min(before, max(each)) for before, *each in zip(present, now, slower, strict=True))

    def is_used(self, route: Route, boundary: int) -> bool:
        """Return whether messages of a route cross a boundary; before frozen stages, no gradients do."""
        return (route, boundary) in self._sent

    def ends(self, number: int) -> tuple[int, int]:
        """Return the sending and the receiving rank of a direction, in the order of `Choice`."""
        links = self.placement.stages - 1
        before, after = (self.placement.rank_of(number % links + side) for side in (0, 1))
        return (before, after) if number < links else (after, before)

    def step_s(self, measured: Measured, choice: Choice) -> float:
        """Return the time of a step with some codecs, as the simulator predicts it."""
        ranks, stages, links = len(self._simulator.program), self.placement.stages, len(measured.directions) // 2
        base = [measured.compute_s[self.placement.rank_of(stage)] * ranks / stages for stage in range(stages)]
        forward, backward = [seconds / 3 for seconds in base], [2 * seconds / 3 for seconds in base]
        for number, (direction, codec) in enumerate(zip(measured.directions, choice, strict=False)):
            boundary, time = number % links, direction.times[codec]
            if number < links:
                forward[boundary] += time.encode_s
                forward[boundary + 1] += time.decode_s
            else:
                backward[boundary + 1] += time.encode_s
                backward[boundary] += time.decode_s
        transfers = [each.transfer_s(codec) for each, codec in zip(measured.directions, choice, strict=False)]
        delays = [each.delay_s for each in measured.directions[:links]]
        cost = Cost(forward, backward, transfers[:links], transfers[links:], delays)
        if measured.rows is not None:
            way, shares = measured.rows.ways[choice[-1]], measured.rows.shares(self._micros)
            for owner, user in self.row_routes:
                forward[owner] += way.owner_s
                forward[user] += way.user_s
            rows, gradients = ([share * each for share in shares] for each in (way.rows_s, way.gradients_s))
            cost = replace(cost, rows=rows, row_gradients=gradients[::-1])
        return float(self._simulator.makespan(cost))

    def _best(self, measured: Measured) -> Choice:
        """Return the choice of the least loss cost among those whose step is nearly as short as that of any."""
        measured = measured.rounded()
        lossless = *(each.usable[0] for each in measured.directions), *([0] if measured.rows else [])
        if self.step_s(measured, lossless) <= (1 + TOLERANCE) * self.step_s(measured.without_links(), lossless):
            return lossless  # as any simulation of others would end: none is shorter than without links
        if measured not in self._known:
            times = {choice: self.step_s(measured, choice) for choice in self._candidates(measured)}
            limit = (1 + TOLERANCE) * min(times.values())
            self._known[measured] = next(choice for choice, seconds in times.items() if seconds <= limit)
        return self._known[measured]

    def _candidates(self, measured: Measured) -> list[Choice]:
        """Return choices, ascending in loss cost, as far as max_loss_cost allows.

        In each, every direction has the codec of the least loss cost whose messages are no longer than a common time,
        among all codecs, or among those without entropy coding; with each way to send rows.
        """
        directions, ways = measured.directions, range(len(measured.rows.ways) if measured.rows else 0)
        limits = {direction.transfer_s(codec) for direction in directions for codec in direction.usable}
        choices = dict.fromkeys(
            (*(direction.cheapest(limit, entropy_coded=entropy_coded) for direction in directions), *way)
            for limit in (math.inf, *sorted(limits, reverse=True))
            for entropy_coded in (False, True)
            for way in ([[each] for each in ways] or [[]])
        )
        allowed = [choice for choice in choices if measured.loss_cost(choice) <= self._max_loss_cost]
        return sorted(allowed, key=measured.loss_cost)
