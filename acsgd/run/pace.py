"""What a run does with the measured speed of its ranks: it deals micro-batches by it, and names slow ranks."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection

from acsgd.io.telemetry.record import Event
from acsgd.run.control import StepSummary
from acsgd.run.dealing import Dealer
from acsgd.run.session import Session
from acsgd.run.stragglers import Stragglers


class Pace:
    """All ranks have one, and decide alike, by the reports that all of them have.

    A change of the dealing holds from the first step whose batch is not being read yet. report: logs an event;
    joining: replicas that get no micro-batches until a summary says that they have all of their state.
    """

    def __init__(self, session: Session, report: Callable[[Event], None], joining: Collection[int] = ()) -> None:
        job = session.job
        self._groups = session.groups
        self._replica = job.topology.replica
        self._report = report
        self._is_by_speed = job.config.data.deal == "speed"
        self._joining = tuple(joining)
        self._dealer = Dealer(job.num_micros, job.topology.replicas, job.fill)
        self._dealer.deal_evenly(without=joining)
        self._stragglers = Stragglers()

    def micros(self, step: int) -> range:
        """Return the micro-batches of this replica in a step whose batch is read from now on."""
        return self._dealer.shares[self._replica]

    def record(self, summary: StepSummary, step: int) -> None:
        """Record the last step, the `step`-th. All ranks call it together.

        Raises RunError if the hosts of slow ranks are needed, and a rank does not answer.
        """
        before = self._dealer.counts
        if self._joining and tuple(summary.joining) != self._joining:
            ready = [replica for replica in self._joining if replica not in summary.joining]
            self._joining = tuple(summary.joining)
            self._dealer.deal_evenly(without=self._joining)
            counts = self._dealer.counts
            text = f"replicas that now have all of their state: {_listed(ready)}; micro-batches: {_listed(counts)}"
            self._report(Event("ready", step, text, {"ready": ready, "micros": counts}))
        elif self._is_by_speed and self._dealer.record([max(of_replica) for of_replica in summary.micro_s]):
            counts = self._dealer.counts
            text = f"micro-batches per replica, by speed: {_listed(counts)}, before {_listed(before)}"
            self._report(Event("deal", step, text, {"micros": counts}))
        if changes := self._stragglers.record(summary.micro_s):
            hosts = self._groups.all_gather_text(
                "naming slow ranks", socket.gethostname(), timeout_s=self._groups.timeout_s
            )
            for rank, is_slow, factor in changes:
                state = "is slow" if is_slow else "is no longer slow"
                text = f"rank {rank} on {hosts[rank]} {state}: {factor:.1f} times the time of other ranks of its stages"
                fields = {"rank": rank, "host": hosts[rank], "factor": round(factor, 2)}
                self._report(Event("slow_rank" if is_slow else "normal_rank", step, text, fields))


def _listed(counts: list[int]) -> str:
    return " ".join(map(str, counts))
