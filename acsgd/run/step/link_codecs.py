"""pp.compress: measure links, choose the codec of each direction by it, and choose again when a link changes."""

from __future__ import annotations

import json
import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from statistics import median

from acsgd.io.telemetry.record import RunEvent
from acsgd.pp.schedules.actions import ACTIVATION, GRADIENT
from acsgd.pp.wire.coder import CodecIndices, TensorSpec
from acsgd.pp.wire.ladder import CodecTime, measure_codec
from acsgd.pp.wire.link import Link
from acsgd.pp.wire.probe import Probed, probe, probe_size
from acsgd.run.report import COMPUTE_S, MICROS, Numbers, Report, StepField, in_grid
from acsgd.run.session import Session
from acsgd.run.step.codec_choice import Choice, Chooser, Direction, Measured
from acsgd.run.step.hooks import LoopState, StepHook
from acsgd.run.step.row_ways import RowWays

MAX_MICROS = 32
"""Number of micro-batches that are simulated at most."""

Tensors = tuple[TensorSpec, ...]
"""Tensors of a message of activations."""

PROBE_EVERY, LONGEST = 5, 15
"""Steps between two measurements of the links: between the first PROBES ones, and at most."""
PROBE_SHARE = 0.01
"""Fraction of the time that later measurements may take, with no more than LONGEST steps between two."""
PROBES = 5
"""Number of measurements of a link whose median counts."""
WINDOW = 5
"""Number of steps whose median is the computing time of a rank."""


def steps_between(probe_s: float, step_s: float) -> int:
    """Return the number of steps between two measurements. probe_s: time of one; step_s: of a step."""
    return min(LONGEST, max(PROBE_EVERY, math.ceil(probe_s / (PROBE_SHARE * step_s))))


class LinkCodecs(StepHook):
    """Measures the links between stages, and chooses their codecs by it. All ranks decide alike, by equal reports.

    A change holds from the next step, and is part of `Progress`. Where the cache of a delta has no entry, or an older
    one, it sends a sequence in 8 bits, or a larger difference. Create it on all ranks together: the codecs of the
    progress are in use from then on, also for an evaluation before the first step. note: logs an event.
    """

    def __init__(self, session: Session, note: Callable[[RunEvent], None], state: LoopState) -> None:
        job, ladder = session.job, session.job.plugins.ladder
        assert ladder is not None
        self._session, self._note, self._ladder = session, note, ladder
        all_micros = -(-job.shapes.num_micros // job.topology.replicas)
        micros = min(MAX_MICROS, all_micros)
        self._chooser = Chooser(job.programs.program(micros), ladder.max_loss_cost)
        self._steps_of_simulated = all_micros / micros
        """Time of a step relative to a simulated one, about."""
        self._links = len(job.layout.specs) - 1
        self._threads = ThreadPoolExecutor(max(1, len(session.pipeline.links)), thread_name_prefix="links")
        replicas, ranks = range(job.topology.replicas), range(job.topology.stages)
        self._received = [self._directions_to(rank) for rank in ranks]
        most = max(map(len, self._received))
        self._rates = [StepField(f"link_{number}_s_per_byte", in_grid) for number in range(most)]
        self._delays = [StepField(f"link_{number}_delay_s", in_grid) for number in range(most)]
        self._rows = RowWays(session, self._chooser)
        self.fields = (*self._rates, *self._delays, *self._rows.fields)
        self._probed: list[Probed] = []
        self._steps_left = 1
        self._probes = [deque[list[Probed]](maxlen=PROBES) for _ in replicas]
        """By replica, the last measurements of each direction."""
        self._compute = [deque[list[float]](maxlen=WINDOW) for _ in replicas]
        """By replica, the last computing times of each rank per micro-batch, without codecs."""
        self._last: list[Measured | None] = [None for _ in replicas]
        """By replica, what the present choice was made from."""
        self._has_chosen = False
        """Whether codecs have been chosen by measured links since the start."""
        times = self._codec_times()
        self._directions = [self._direction(number, times) for number in range(2 * self._links)]
        self.before_step(state)

    def close(self) -> None:
        """End the threads that measure, each after its present measurement, which may wait for a peer."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def report(self, state: LoopState) -> Report:
        numbers = dict[StepField[Numbers], float]()
        for probed, rate, delay in zip(self._probed, self._rates, self._delays, strict=False):
            numbers |= {rate: probed.s_per_byte, delay: probed.delay_s}
        self._probed = []
        return {**numbers, **self._rows.report()}

    def before_step(self, state: LoopState) -> None:
        """Use the codecs of the progress: those of the last step, of a checkpoint, or of an earlier step."""
        chosen, codecs = self._choices(state)[self._session.job.topology.replica], self._session.pipeline.codecs
        ups, downs, rows = chosen[: self._links], chosen[self._links : 2 * self._links], chosen[2 * self._links :]
        codecs.in_use = CodecIndices(ups, downs, *rows or [codecs.in_use.tied])

    def at_return(self, state: LoopState) -> None:
        self._last = [None for _ in self._last]

    def before_next(self, state: LoopState) -> None:
        """Choose by the report of the last step, and measure the links now and then. A collective call."""
        if state.progress.step >= self._session.job.config.optim.num_steps or state.is_paused:
            return
        choices = self._choices(state)
        if self._record(state, choices):
            chosen = [self._choose(replica, before) for replica, before in enumerate(choices)]
            if not self._has_chosen and any(self._last):
                self._has_chosen = True
                if chosen == choices:
                    self._note(self._unchanged(state.progress.step))
            for replica, (before, after) in enumerate(zip(choices, chosen, strict=True)):
                self._report_changes(state.progress.step, replica, before, after)
            state.progress = replace(state.progress, codecs=tuple(map(self._specs, chosen)))
        self._steps_left -= 1
        if not self._steps_left:
            self._steps_left = self._steps_to_next(choices)
            self._measure()

    def _codec_times(self) -> dict[Tensors, dict[str, CodecTime]]:
        """Return the longest time of each codec on any rank, by the tensors of a message. A collective call.

        The times of rows of tied tables are exchanged with them.
        """
        job, groups, rungs = self._session.job, self._session.groups, {*self._ladder.forward, *self._ladder.backward}
        messages = list(dict.fromkeys(tuple(each.values()) for each in job.shapes.boundaries))
        own = [{rung.spec: measure_codec(rung.codec, specs, job.streams) for rung in rungs} for specs in messages]
        text = json.dumps((own, self._rows.own_table()))
        texts = groups.all_gather_text("timing codecs", text, timeout_s=groups.timeout_s)
        by_rank, of_rows = zip(*map(json.loads, texts), strict=True)
        self._rows.use_tables(of_rows)

        def longest(number: int, codec: str) -> CodecTime:
            return CodecTime(*map(max, zip(*(times[number][codec] for times in by_rank), strict=True)))

        return {specs: {each: longest(number, each) for each in own[number]} for number, specs in enumerate(messages)}

    def _direction(self, number: int, times: Mapping[Tensors, Mapping[str, CodecTime]]) -> Direction:
        """Return a direction whose rate is not measured yet."""
        boundary, ladder, is_forward = number % self._links, self._ladder, number < self._links
        rungs = ladder.forward if is_forward else ladder.backward
        fixed = (ladder.fixed_forward if is_forward else ladder.fixed_backward).get(boundary)
        specs = tuple(self._session.job.shapes.boundaries[boundary].values())
        sizes = [rung.message_bytes(specs) for rung in rungs]
        usable = [0]
        for index, rung in enumerate(rungs):
            others = [sizes[each] for each in usable if rung.is_entropy_coded or not rungs[each].is_entropy_coded]
            if rung.loss_cost <= ladder.max_loss_cost and sizes[index] < min(others):
                usable.append(index)
        if not self._chooser.is_used(ACTIVATION if is_forward else GRADIENT, boundary):
            usable = [0]
        return Direction(
            0.0,
            0.0,
            tuple(sizes),
            tuple(rung.loss_cost for rung in rungs),
            tuple(times[specs][rung.spec] for rung in rungs),
            tuple(usable) if fixed is None else (fixed,),
            frozenset(index for index, rung in enumerate(rungs) if rung.is_entropy_coded),
        )

    def _directions_to(self, rank: int) -> list[int]:
        """Return the directions that a rank of a pipeline receives, by boundary."""
        rank_of, links = self._chooser.placement.rank_of, self._links
        return [
            boundary if rank_of(boundary + 1) == rank else links + boundary
            for boundary in range(links)
            if (rank_of(boundary) == rank) != (rank_of(boundary + 1) == rank)
        ]

    def _choices(self, state: LoopState) -> list[Choice]:
        """Return the codecs of the progress by replica; the first ones where it has none of this ladder."""
        names, usable = self._names(), [each.usable for each in self._directions]
        usable += [tuple(range(len(each))) for each in names[len(usable) :]]
        first = tuple(each[0] for each in usable)

        def index(number: int, spec: str) -> int:
            is_usable = spec in names[number] and names[number].index(spec) in usable[number]
            return names[number].index(spec) if is_usable else first[number]

        saved, replicas = state.progress.codecs, self._session.job.topology.replicas
        if {len(each) for each in saved} not in ({2 * self._links}, {2 * self._links + 1}):
            return [first] * replicas
        # replicas that have joined begin with the codecs of the first
        by_replica = [*saved, *[saved[0]] * replicas][:replicas] if len(saved) < replicas else saved[:replicas]
        padded = ((*specs, "")[: len(first)] for specs in by_replica)  # that of rows may be new, or none any more
        return [tuple(index(number, spec) for number, spec in enumerate(specs)) for specs in padded]

    def _specs(self, choice: Choice) -> tuple[str, ...]:
        """Return the spec strings of a choice."""
        return tuple(names[codec] for names, codec in zip(self._names(), choice, strict=True))

    def _names(self) -> list[list[str]]:
        """Return the spec strings of all codecs, by what is chosen in the order of `Choice`."""
        up, down, rows = (
            [rung.spec for rung in rungs] for rungs in (self._ladder.forward, self._ladder.backward, self._rows.rungs)
        )
        return [up] * self._links + [down] * self._links + [rows] * bool(rows)

    def _record(self, state: LoopState, choices: Sequence[Choice]) -> bool:
        """Record the report of the last step; return whether it has measurements of the links."""
        assert state.summary is not None
        self._rows.record(state.summary)
        is_measured = False
        for replica, (seconds, micros) in enumerate(zip(state.summary[COMPUTE_S], state.summary[MICROS], strict=True)):
            if all(micros):
                self._compute[replica].append(
                    [
                        max(total / count - self._codec_s(replica, rank, choices[replica]), 0.1 * total / count)
                        for rank, (total, count) in enumerate(zip(seconds, micros, strict=True))
                    ]
                )
            probed = [Probed(0.0, 0.0)] * (2 * self._links)
            for rank, received in enumerate(self._received):
                for direction, rate, delay in zip(received, self._rates, self._delays, strict=False):
                    numbers = state.summary[rate][replica][rank], state.summary[delay][replica][rank]
                    probed[direction] = Probed(*numbers)
            if any(each.s_per_byte for each in probed):
                self._probes[replica].append(probed)
                is_measured = True
        return is_measured

    def _codec_s(self, replica: int, rank: int, choice: Choice) -> float:
        """Return the time of codecs of a rank for a micro-batch."""
        total = self._rows.codec_s(replica, rank, choice[-1]) if self._rows.rungs else 0.0
        for number, (direction, codec) in enumerate(zip(self._directions, choice, strict=False)):
            sender, receiver = self._chooser.ends(number)
            total += direction.times[codec].encode_s * (sender == rank)
            total += direction.times[codec].decode_s * (receiver == rank)
        return total

    def _measured(self, replica: int) -> list[Direction]:
        """Return the directions of a replica with their measured rates and delays."""
        links, probes = self._links, self._probes[replica]
        rates = [median(each.s_per_byte for each in of_direction) for of_direction in zip(*probes, strict=True)]
        elapsed = [median(each.delay_s for each in of_direction) for of_direction in zip(*probes, strict=True)]
        delays = [(elapsed[link] + elapsed[links + link]) / 2 for link in range(links)] * 2
        return [
            direction._replace(s_per_byte=rate, delay_s=delay)
            for direction, rate, delay in zip(self._directions, rates, delays, strict=True)
        ]

    def _choose(self, replica: int, before: Choice) -> Choice:
        if not self._compute[replica] or not self._probes[replica]:
            return before
        compute = tuple(median(of_rank) for of_rank in zip(*self._compute[replica], strict=True))
        directions, last = self._measured(replica), self._last[replica]
        measured = Measured(compute, tuple(directions), self._rows.traffic(replica, directions))
        if last is not None and measured.is_near(last):
            return before
        self._last[replica] = measured
        return self._chooser.choose(measured, before)

    def _steps_to_next(self, choices: Sequence[Choice]) -> int:
        """Return the number of steps to the next measurement, the same on all ranks."""
        steps = PROBE_EVERY
        for replica, last in enumerate(self._last):
            if last is not None and len(self._probes[replica]) == PROBES:
                step_s = self._chooser.step_s(last, choices[replica]) * self._steps_of_simulated
                steps = max(steps, steps_between(last.probe_s(), step_s))
        return steps

    def _report_changes(self, step: int, replica: int, before: Choice, after: Choice) -> None:
        """Log an event for each direction whose codec changes."""
        if before == after:
            return
        where = f"replica {replica}, " if len(self._probes) > 1 else ""
        directions = self._measured(replica)
        for number, (former, codec) in enumerate(zip(self._specs(before), self._specs(after), strict=True)):
            if former != codec and number == len(directions):
                of_rows = {"replica": replica, "link": None, "of": "rows", "codec": codec}
                self._note(RunEvent("codec", step, f"{where}rows of tied tables: {codec}, before {former}", of_rows))
            elif former != codec:
                measured = directions[number]
                link, subject = number % self._links, "activations" if number < self._links else "gradients"
                mbit = 8e-6 / measured.s_per_byte
                text = (
                    f"{where}link {link}, {subject}: {codec}, before {former}; the link has {mbit:.3g} Mbit/s and a "
                    f"delay of {1e3 * measured.delay_s:.2g} ms"
                )
                fields = {"replica": replica, "link": link, "of": subject, "codec": codec, "mbit_per_s": round(mbit, 2)}
                self._note(RunEvent("codec", step, text, fields))

    def _unchanged(self, step: int) -> RunEvent:
        """Return an event that says what was measured, since no change of a codec does."""
        measured = [pair for each in self._last if each is not None for pair in enumerate(each.directions)]
        number, slowest = max(measured, key=lambda pair: pair[1].s_per_byte)
        link, mbit = number % self._links, 8e-6 / slowest.s_per_byte
        text = (
            f"pp.compress=auto changes no codec: the slowest link, {link}, has {mbit:.3g} Mbit/s and a delay of "
            f"{1e3 * slowest.delay_s:.2g} ms"
        )
        return RunEvent("links", step, text, {"link": link, "mbit_per_s": round(mbit, 2)})

    def _measure(self) -> None:
        """Measure all links of this rank at the same time, as its peers do: links of one host share its rate.

        First wait for the rows of tied tables that the last step has sent, which would share it, too.
        """
        self._session.settle()
        links, replica = self._session.pipeline.links, self._session.job.topology.replica
        rates = [each.s_per_byte for each in self._measured(replica)] if self._probes[replica] else []

        def measure(boundary: int, link: Link) -> Probed:
            forward, backward = (
                probe_size(rates[number] if rates else None) for number in (boundary, self._links + boundary)
            )
            sizes = (backward, forward) if link.is_downstream else (forward, backward)
            return probe(link.activations, *sizes)

        by_peer = defaultdict[int, list[int]](list)  # several links to one peer are one link of the network
        for boundary in sorted(links):
            by_peer[links[boundary].activations.peer].append(boundary)

        def measure_peer(boundaries: Sequence[int]) -> dict[int, Probed]:
            return {boundary: measure(boundary, links[boundary]) for boundary in boundaries}

        groups = [*by_peer.values()]
        found = map(measure_peer, groups) if len(groups) == 1 else self._threads.map(measure_peer, groups)
        probed = {boundary: each for of_peer in found for boundary, each in of_peer.items()}
        self._probed = [probed[boundary] for boundary in sorted(probed)]
