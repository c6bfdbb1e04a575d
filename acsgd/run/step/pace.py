"""What a run does with the measured speed of its ranks: deal micro-batches by it, and report slow ranks."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Collection, Sequence
from statistics import median
from typing import NamedTuple

from acsgd.dp.modes import redundant_steps
from acsgd.io.data.sampler import deal
from acsgd.io.telemetry.record import RunEvent
from acsgd.run.report import COMPUTE_S, MICROS, StepSummary
from acsgd.run.session import Session
from acsgd.run.step.hooks import LoopState, StepHook


class Pace(StepHook):
    """Deals micro-batches to replicas, and names slow ranks. All ranks decide alike, by the reports that all have.

    In the redundant steps of dp.mode, each replica gets all micro-batches, or each domain, among its replicas.
    A change of the dealing holds from the first step whose batch is not being read yet. note: logs an event; idle:
    replicas that get no micro-batches, until `LoopState.idle` is another.
    """

    def __init__(self, session: Session, note: Callable[[RunEvent], None], idle: Collection[int] = ()) -> None:
        job = session.job
        self._groups = session.groups
        self._peers = session.peers
        self._redundant_steps = redundant_steps(job.plugins.mode)
        self._topology = job.topology
        self._note = note
        self._is_by_speed = job.config.data.deal == "speed"
        self._idle = tuple(idle)
        # time to fill and drain the pipeline of a replica, in micro-batches, without that of messages
        self._num_micros, replicas = job.shapes.num_micros, job.topology.replicas
        of_replica = job.micros_per_replica
        bubble = job.plugins.schedule.bubble(job.topology.stages, of_replica)
        self._dealer = Dealer(self._num_micros, replicas, float(of_replica * bubble / (1 - bubble)))
        self._dealer.deal_evenly(without=idle)
        self._stragglers = Stragglers()

    def micros(self, step: int) -> range:
        """Return the micro-batches of this replica in a step whose batch is read from now on."""
        me = self._topology.replica
        if step >= self._redundant_steps or me in self._idle:
            return self._dealer.shares[me]
        members = [each for each in self._peers.members if each not in self._idle]
        return deal(self._num_micros, [1.0] * len(members))[members.index(me)]

    def before_next(self, state: LoopState) -> None:
        """Record the last step, deal by it, and name ranks that have become slow.

        Raises RunError if the hosts of slow ranks are needed, and a rank does not answer.
        """
        assert state.summary is not None
        before, step = self._dealer.counts, state.progress.step
        micro_s = self._micro_s(state.summary)
        if (
            not self._deal_to_ready(state)
            and self._is_by_speed
            and self._dealer.record([max(of_replica) for of_replica in micro_s])
        ):
            counts = self._dealer.counts
            text = f"micro-batches per replica, by speed: {_listed(counts)}, before {_listed(before)}"
            self._note(RunEvent("deal", step, text, {"micros": counts}))
        if changes := self._stragglers.record(micro_s):
            self._name(changes, step)

    def at_return(self, state: LoopState) -> None:
        self._deal_to_ready(state)

    def _deal_to_ready(self, state: LoopState) -> bool:
        """Deal evenly, and log an event, if other replicas are idle than before; return whether this is so."""
        if not self._idle or tuple(state.idle) == self._idle:
            return False
        ready = [replica for replica in self._idle if replica not in state.idle]
        self._idle = tuple(state.idle)
        self._dealer.deal_evenly(without=self._idle)
        counts = self._dealer.counts
        text = f"replicas that now have all of their state: {_listed(ready)}; micro-batches: {_listed(counts)}"
        self._note(RunEvent("ready", state.progress.step, text, {"ready": ready, "micros": counts}))
        return True

    def _name(self, changes: Sequence[SpeedChange], step: int) -> None:
        """Log an event for each rank that has become slow, or normal again. A collective call."""
        hosts = self._groups.all_gather_text(
            "naming slow ranks", socket.gethostname(), timeout_s=self._groups.timeout_s
        )
        for position, is_slow, factor in changes:
            rank = self._topology.ranks[position]
            state = "is slow" if is_slow else "is no longer slow"
            text = f"rank {rank} on {hosts[rank]} {state}: {factor:.1f} times the time of other ranks of its stages"
            fields = {"rank": rank, "host": hosts[rank], "factor": round(factor, 2)}
            self._note(RunEvent("slow_rank" if is_slow else "normal_rank", step, text, fields))

    @staticmethod
    def _micro_s(summary: StepSummary) -> list[list[float]]:
        """Return the computing time per micro-batch, [replicas][ranks per pipeline], seconds; 0 = a rank had none."""
        return [
            [seconds / micros if micros else 0.0 for seconds, micros in zip(*rows, strict=True)]
            for rows in zip(summary[COMPUTE_S], summary[MICROS], strict=True)
        ]


def _listed(counts: list[int]) -> str:
    return " ".join(map(str, counts))


WINDOW = 5
"""Number of steps whose median is the time of a replica."""
MIN_GAIN = 0.1
"""Fraction of the time of a step that another split must save; so measurements that vary do not change it back and
forth."""


class Dealer:
    """Deals the micro-batches of a step to replicas: evenly at first, then as their times suggest.

    A pure function of the recorded times, so that all ranks, which record the same, deal alike. fill: see `deal`.
    """

    def __init__(self, num_micros: int, replicas: int, fill: float) -> None:
        self._num_micros = num_micros
        self._replicas = replicas
        self._fill = fill
        self._steps = deque[Sequence[float]](maxlen=WINDOW)
        self.shares: tuple[range, ...] = ()
        """Micro-batches of each replica."""
        self.deal_evenly()

    def deal_evenly(self, without: Collection[int] = ()) -> None:
        """Deal the micro-batches evenly to all replicas but some, and forget the recorded times."""
        self.shares = deal(self._num_micros, [float(replica not in without) for replica in range(self._replicas)])
        self._steps.clear()

    @property
    def counts(self) -> list[int]:
        """Number of micro-batches of each replica."""
        return [len(share) for share in self.shares]

    def record(self, micro_s: Sequence[float]) -> bool:
        """Record the time of each replica per micro-batch in one step; return whether `shares` change."""
        if min(micro_s) <= 0:
            return False
        self._steps.append(micro_s)
        if len(self._steps) < WINDOW:
            return False
        times = [median(of_replica) for of_replica in zip(*self._steps, strict=True)]
        shares = deal(self._num_micros, [1 / seconds for seconds in times], self._fill)
        if self._step_s(shares, times) > (1 - MIN_GAIN) * self._step_s(self.shares, times):
            return False
        self.shares = shares
        self._steps.clear()
        return True

    def _step_s(self, shares: Sequence[range], times: Sequence[float]) -> float:
        """Return the time of a step with given times per micro-batch."""
        return max((len(share) + self._fill) * seconds for share, seconds in zip(shares, times, strict=True))


SLOW, NORMAL = 2.0, 1.5
"""Multiples of the median time of the other ranks: above the first a rank becomes slow, below the second normal."""
PATIENCE = 20
"""Number of consecutive steps after which it does."""


class SpeedChange(NamedTuple):
    """A rank that has become slow, or normal again."""

    position: int
    """In the grid of ranks."""
    is_slow: bool
    factor: float
    """Its time per micro-batch as a multiple of the median of the other ranks with the same stages; median of the last
    PATIENCE steps."""


class Stragglers:
    """Finds slow ranks, from the times of all ranks. With one replica there is nothing to compare a rank with."""

    def __init__(self) -> None:
        self._slow = set[int]()
        self._factors: dict[int, list[float]] = {}
        """By position, factors of the ranks whose last steps, without a break, speak for a change."""

    def record(self, micro_s: list[list[float]]) -> list[SpeedChange]:
        """Record the times of one step per micro-batch, [replicas][stage ranks]; return which ranks have changed.

        0 = a rank had no micro-batches.
        """
        stages = len(micro_s[0])
        changes = []
        for replica, of_replica in enumerate(micro_s):
            for stage_rank, seconds in enumerate(of_replica):
                others = [row[stage_rank] for row in micro_s[:replica] + micro_s[replica + 1 :] if row[stage_rank]]
                if seconds and others:
                    changes += self._compare(replica * stages + stage_rank, seconds / median(others))
        return changes

    def _compare(self, position: int, factor: float) -> list[SpeedChange]:
        was_slow = position in self._slow
        if factor >= NORMAL if was_slow else factor <= SLOW:
            self._factors.pop(position, None)
            return []
        factors = self._factors.setdefault(position, [])
        factors.append(factor)
        if len(factors) < PATIENCE:
            return []
        self._slow ^= {position}
        del self._factors[position]
        return [SpeedChange(position, not was_slow, median(factors))]
