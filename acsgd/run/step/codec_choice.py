"""The choice of the codecs of a pipeline's links: a pure function of what is measured."""

from __future__ import annotations

import math
from typing import NamedTuple

from acsgd.pp.schedules.actions import ACTIVATION, GRADIENT, Program, Route
from acsgd.pp.schedules.dependencies import Dependencies
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
"""Index of the codec of each direction: of activations by boundary, then of gradients by boundary."""


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


class Measured(NamedTuple):
    """A pipeline as measured: what the choice of its codecs depends on."""

    compute_s: tuple[float, ...]
    """Of a micro-batch, by rank, without codecs."""
    directions: tuple[Direction, ...]
    """In the order of `Choice`."""

    def loss_cost(self, choice: Choice) -> float:
        """Return the sum of the loss costs of all directions in which codecs are chosen."""
        return sum(
            each.loss_costs[codec] for each, codec in zip(self.directions, choice, strict=True) if len(each.usable) > 1
        )

    def slower(self, factor: float) -> Measured:
        """Return the same with slower links."""
        return self._replace(directions=tuple(d._replace(s_per_byte=d.s_per_byte * factor) for d in self.directions))

    def without_links(self) -> Measured:
        """Return the same with links and codecs that take no time."""
        nothing = CodecTime(0.0, 0.0)
        directions = (
            each._replace(s_per_byte=0.0, delay_s=0.0, times=(nothing,) * len(each.times)) for each in self.directions
        )
        return self._replace(directions=tuple(directions))

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
        return Measured(tuple(map(on_grid, self.compute_s)), tuple(directions))


class Chooser:
    """Chooses the codecs of a pipeline: a pure function of what is measured and of the present choice.

    program: of a step; max_loss_cost: largest sum of the loss costs of all directions.
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

    def step_s(self, measured: Measured, choice: Choice) -> float:
        """Return the time of a step with some codecs, as the simulator predicts it."""
        ranks, stages, links = len(self._simulator.program), self.placement.stages, len(choice) // 2
        base = [measured.compute_s[self.placement.rank_of(stage)] * ranks / stages for stage in range(stages)]
        forward, backward = [seconds / 3 for seconds in base], [2 * seconds / 3 for seconds in base]
        for number, (direction, codec) in enumerate(zip(measured.directions, choice, strict=True)):
            boundary, time = number % links, direction.times[codec]
            if number < links:
                forward[boundary] += time.encode_s
                forward[boundary + 1] += time.decode_s
            else:
                backward[boundary + 1] += time.encode_s
                backward[boundary] += time.decode_s
        transfers = [each.transfer_s(codec) for each, codec in zip(measured.directions, choice, strict=True)]
        delays = [each.delay_s for each in measured.directions[:links]]
        cost = Cost(forward, backward, transfers[:links], transfers[links:], delays)
        return float(self._simulator.makespan(cost))

    def _best(self, measured: Measured) -> Choice:
        """Return the choice of the least loss cost among those whose step is nearly as short as that of any."""
        measured = measured.rounded()
        lossless = tuple(each.usable[0] for each in measured.directions)
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
        among all codecs, or among those without entropy coding.
        """
        directions = measured.directions
        limits = {direction.transfer_s(codec) for direction in directions for codec in direction.usable}
        choices = dict.fromkeys(
            tuple(direction.cheapest(limit, entropy_coded=entropy_coded) for direction in directions)
            for limit in (math.inf, *sorted(limits, reverse=True))
            for entropy_coded in (False, True)
        )
        allowed = [choice for choice in choices if measured.loss_cost(choice) <= self._max_loss_cost]
        return sorted(allowed, key=measured.loss_cost)
