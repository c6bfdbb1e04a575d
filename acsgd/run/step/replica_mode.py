"""dp.compress: change the data-parallel mode when the links between replicas change."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from statistics import median

from acsgd.dp.ladder import MEASURED
from acsgd.io.telemetry.record import RunEvent
from acsgd.pp.wire.probe import Probed
from acsgd.run.plan.choose import ModePlanner
from acsgd.run.plan.rates import LinkRate
from acsgd.run.session import Session
from acsgd.run.setup.auto import describe_link
from acsgd.run.setup.continued import change_mode
from acsgd.run.setup.measured import links_of_replicas, probe_ring, replica_ring
from acsgd.run.step.hooks import LoopState, StepHook
from acsgd.run.step.link_codecs import PROBE_EVERY, PROBES


class ReplicaMode(StepHook):
    """Measures the links between replicas now and then, and changes the mode by it. All ranks decide alike.

    A change holds from the next step, and is part of the next checkpoint. planner: of all possible modes; note: logs an
    event.
    """

    def __init__(self, session: Session, planner: ModePlanner, note: Callable[[RunEvent], None]) -> None:
        self._session, self._planner, self._note = session, planner, note
        self._known: Mapping[tuple[int, int], Probed] = {}
        """The last measurements of this rank's ring, by positions of sender and receiver."""
        self._links = deque[LinkRate](maxlen=PROBES)
        self._steps_left = PROBE_EVERY

    def before_next(self, state: LoopState) -> None:
        """Measure the links, if it is time, and choose the mode of the next step. A collective call."""
        step = state.progress.step
        self._steps_left -= 1
        if self._steps_left > 0 or state.is_paused or step >= self._session.job.config.optim.num_steps:
            return
        self._steps_left = PROBE_EVERY
        self._links.append(self._measure())
        rates, delays = zip(*((each.bytes_per_s, each.delay_s) for each in self._links), strict=True)
        link = LinkRate(median(rates), median(delays))
        present = self._session.job.config.dp.mode
        found = self._planner.following(present, link)
        if found.mode != present:
            change_mode(self._session, found.mode)
            cost = MEASURED[found.mode].cost(from_scratch=self._session.job.config.model.init == "scratch")
            text = (
                f"dp.compress=auto: {found.mode}, before {present}; a step is predicted to take {found.step_s:.3g} s, "
                f"at a loss cost of {cost:g}; the slowest link between replicas {describe_link(link)}"
            )
            fields = {"mode": found.mode, "mbit_per_s": round(8e-6 * link.bytes_per_s, 2)}
            self._note(RunEvent("mode", step, text, fields))

    def _measure(self) -> LinkRate:
        """Return the slowest link between replicas, once the rows of tied tables that would share it have arrived."""
        session, ring = self._session, replica_ring(self._session.groups)
        session.settle()
        probed = probe_ring(ring, session.groups, session.job.streams, self._known)
        slowest, self._known = links_of_replicas(session.job, session.groups, probed)
        return slowest
