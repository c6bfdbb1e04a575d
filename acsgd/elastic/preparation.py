"""The next view, while one host prepares it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Protocol

from acsgd.elastic.messages import Host, Prepare, Promise, View
from acsgd.elastic.plan import Plan, WorkerState


class Planner(Protocol):
    """Returns the plan of the next view, as `make_plan` does."""

    def __call__(self, workers: Mapping[str, WorkerState], *, staying: Sequence[str]) -> Plan: ...


@dataclass
class Preparation:
    """The promises that a host collects before it records the next view."""

    base: View | None
    """The view before; None before the first."""
    epoch: int
    reason: str
    """Why the next view is formed."""
    hung: tuple[str, ...]
    """As of View."""
    members: tuple[Host, ...]
    """Participants of the view before, most senior first; before the first, this host."""
    newcomers: tuple[Host, ...]
    at_step_end: bool
    """Whether the workers can first complete their step."""
    since: float
    promises: dict[str, Promise] = field(default_factory=dict)
    """By the id of the host."""
    is_recording: bool = False

    @property
    def participants(self) -> tuple[Host, ...]:
        """The hosts that have to promise."""
        return (*self.members, *self.newcomers)

    def request(self) -> Prepare:
        """Return the request to those that have not promised."""
        return Prepare(self.base, self.epoch, self.at_step_end)

    def awaited(self) -> list[Host]:
        """Return the participants that have not promised."""
        return [host for host in self.participants if host.id not in self.promises]

    def may_record(self, ended: Set[str], silence_s: float, now: float) -> bool:
        """Return whether the view before can complete no further step, and a larger part of it has had its chance.

        ended: ids of the hosts whose processes have ended.
        """
        if self.awaited():
            return False
        if self.base is None:
            return True
        promised, rank_hosts = self.promises.keys(), self.base.rank_hosts()
        if rank_hosts and not (rank_hosts & promised or rank_hosts <= ended):
            return False
        absent = [host for host in self.base.hosts if host.id not in promised | ended]
        return now - self.since >= _patience_s(self.base, absent, silence_s)

    def next_view(self, planner: Planner, stays: Callable[[Host], bool]) -> View:
        """Return the next view, all participants having promised. stays: whether a host does not leave."""
        has_heir = any(stays(host) for host in self.members)
        hosts = tuple(host for host in self.participants if stays(host) or not has_heir)
        promises = {host.id: self.promises[host.id] for host in self.participants}
        states = {f"{id}/{name}": state for id, promise in promises.items() for name, state in promise.workers.items()}
        staying = [f"{host.id}/{name}" for host in hosts for name in sorted(promises[host.id].workers)]
        plan = replace(planner(states, staying=staying), is_first=self.base is None)
        return View(self.epoch, hosts, plan, self.reason, self.hung)


def _patience_s(view: View, absent: Sequence[Host], silence_s: float) -> float:
    """Return for how long the decision is left to the hosts that are cut off: to the larger part of the view."""
    present = len(view.hosts) - len(absent)
    if present == len(absent):
        return silence_s if view.hosts[0] in absent else 0.0
    return 0.0 if present > len(absent) else 2 * silence_s
