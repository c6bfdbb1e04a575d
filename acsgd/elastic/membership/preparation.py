"""How the next view forms: promises of stopped workers, their collection by one host, and hosts that join."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Protocol

from acsgd.elastic.membership.effects import Contact, EffectList, StopWorkers, Timing
from acsgd.elastic.membership.messages import Host, Join, Prepare, Promise, View, is_majority
from acsgd.elastic.membership.plan import Plan, WorkerState
from acsgd.elastic.membership.presence import Presence


class Promises:
    """Answers requests to stop this host's workers, once they have stopped."""

    def __init__(self, outbox: EffectList) -> None:
        self._outbox = outbox
        self._states: dict[str, WorkerState] | None = None
        self._prepare: Prepare | None = None
        self._waiting: dict[str, tuple[Host, int]] = {}  # by id, hosts that wait for a promise, and its epoch

    @property
    def are_stopped(self) -> bool:
        """Whether the workers are stopped."""
        return self._states is not None

    @property
    def is_requested(self) -> bool:
        """Whether a host has requested to stop them."""
        return self._prepare is not None

    def take_states(self, states: dict[str, WorkerState]) -> None:
        """Take the states of the workers, which have stopped."""
        self._states = states
        for host, epoch in self._waiting.values():
            self._outbox.send(host, Promise(epoch, states))
        self._waiting.clear()

    def take_request(self, sender: Host, prepare: Prepare) -> None:
        """Take a request to stop the workers, at once if it is more urgent than the ones before."""
        is_new = self._prepare is None or (self._prepare.at_step_end and not prepare.at_step_end)
        self._prepare = prepare if is_new else self._prepare
        if self._states is not None:
            self._outbox.send(sender, Promise(prepare.epoch, self._states))
            return
        self._waiting[sender.id] = sender, prepare.epoch
        if is_new:
            self._outbox.add(StopWorkers(prepare.at_step_end))

    def withdraw(self) -> None:
        """Note that the host which has requested to stop the workers no longer does."""
        self._prepare = None

    def reset(self) -> None:
        """Note that the workers run a new view."""
        self._states = self._prepare = None
        self._waiting.clear()


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
    """See View."""
    members: tuple[Host, ...]
    """Participants of the view before, most senior first; before the first, this host."""
    newcomers: tuple[Host, ...]
    at_step_end: bool
    """Whether the workers can first complete their step."""
    since: float
    voters: tuple[str, ...]
    """As in RecordView."""
    history: str | None
    """As in RecordView."""
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
        disks = tuple(dict.fromkeys(host.disk for host in hosts))
        history = self.members[0].id if self.history is None else self.history
        return View(self.epoch, hosts, plan, self.reason, self.hung, disks, history)


def _patience_s(view: View, absent: Sequence[Host], silence_s: float) -> float:
    """Return for how long the decision is left to the hosts that are cut off: to the larger part of the view."""
    present = len(view.hosts) - len(absent)
    if present == len(absent):
        return silence_s if view.hosts[0] in absent else 0.0
    return 0.0 if present > len(absent) else 2 * silence_s


HISTORY = "history"
"""Name of what hosts have different whose run directories have other views of the run."""


class Candidate:
    """A host in no view: it requests to join, or forms the first view if it has the first endpoint.

    me: this host; endpoints: addresses to which a host that joins turns, which may become more; min_hosts: of the
    first view; max_hosts: of any view; setup: as in Join; force: whether it may continue a run without a majority of
    the disks of the newest view.
    """

    def __init__(
        self,
        me: Host,
        *,
        endpoints: Sequence[str],
        min_hosts: int,
        max_hosts: int,
        setup: Mapping[str, str],
        force: bool,
        presence: Presence,
        timing: Timing,
        outbox: EffectList,
    ) -> None:
        self._me = me
        self._endpoints = endpoints
        self._min_hosts = min_hosts
        self._max_hosts = max_hosts
        self._setup = dict(setup)
        self._force = force
        self._presence = presence
        self._timing = timing
        self._outbox = outbox

    def differs(self, join: Join, newest: View | None) -> tuple[str, ...]:
        """Return the names of what a host that requests to join has different. newest: the newest view known here."""
        names = tuple(name for name in self._setup if join.setup.get(name) != self._setup[name])
        has_other_history = newest and join.newest and join.newest.history != newest.history
        return (*names, HISTORY) if has_other_history else names

    def on_timer(self, newest: View | None) -> None:
        """Send the request to join. newest: the newest recorded view."""
        known = newest.hosts if newest else ()
        ended = tuple(host.id for host in known if host.id in self._presence.ended)
        for address in dict.fromkeys([*self._endpoints, *(host.address for host in known)]):
            if address != self._me.address:
                self._outbox.add(Contact(address, Join(self._setup, newest, ended)))

    def may_found(self, newest: View | None, now: float) -> bool:
        """Return whether this host forms the first view of a run that starts, or starts again.

        It has the first endpoint of those that answer. If the run has trained before, no host of its newest view does:
        those whose disk is here have ended, and the others are silent.
        """
        if self._me.address not in self._endpoints:
            return False
        candidates = self._presence.candidates(now)
        are_here = {*self._endpoints} <= {self._me.address, *(host.address for host in candidates)}
        patience_s = self._timing.last_call_s if newest or are_here else self._timing.endpoints_s
        if now - self._presence.newcomer_at < patience_s:
            return False
        if len(candidates) + 1 < self._min_hosts or not all(self.precedes(host.address) for host in candidates):
            return False
        if newest is None:
            return True
        disks, ended = self._disks(now), self._presence.ended
        absent = [host for host in newest.hosts if host.id not in ended]
        if any(host.disk in disks or not self._presence.is_silent(host, now) for host in absent):
            return False
        if absent and now - self._presence.newcomer_at < self._timing.silence_s:
            return False
        return self._force or self._is_continued(newest, now)

    def is_forced(self, newest: View, now: float) -> bool:
        """Return whether a view that this host forms begins a new history, which a person has requested."""
        return self._force and not self._is_continued(newest, now)

    def _is_continued(self, newest: View, now: float) -> bool:
        """Return whether a majority of the disks of the newest view is here, and its ranks complete no further step."""
        return is_majority(self._disks(now), newest.voters) and not self._training(newest)

    def _training(self, newest: View) -> list[Host]:
        """Return the hosts of the newest view that may still train: all with ranks, unless one of these has ended."""
        ranks = newest.rank_hosts()
        return [] if ranks & self._presence.ended else [host for host in newest.hosts if host.id in ranks]

    def _disks(self, now: float) -> set[str]:
        return {self._me.disk, *(host.disk for host in self._presence.candidates(now))}

    def describe_wait(self, newest: View | None, now: float) -> str:
        """Return for what this host waits. newest: the newest recorded view."""
        known = newest.hosts if newest else ()
        if newest and all(self._presence.is_silent(host, now) for host in known):
            disks, training = self._disks(now), [host.address for host in self._training(newest)]
            absent = ", ".join(host.address for host in known if host.disk not in disks) or "the others"
            give_up = "or give up what they have done since: --elastic.force true"
            if not is_majority(disks, newest.voters):
                return (
                    f"the run has trained on {len(newest.voters)} hosts with disks of their own, of which more than "
                    f"half continue it, or half with the first one; start {absent}, {give_up}"
                )
            if training:
                return (
                    f"the run may still train on {', '.join(training)}, which this host does not reach; connect it, or "
                    f"start one of them again, {give_up}"
                )
        if known:
            return (
                f"the run trains on {len(known)} of at most {self._max_hosts} hosts (--nnodes); this one joins when "
                "there is room, and its messages reach all of them"
            )
        endpoints = ",".join(address for address in self._endpoints if address != self._me.address)
        if not self._presence.has_heard:
            return f"no other host answers; start one, or check --rdzv-endpoint ({endpoints or 'only this host'})"
        here = len(self._presence.candidates(now)) + 1
        if here < self._min_hosts:
            return f"{here} of at least {self._min_hosts} hosts (--nnodes) are here; start the others"
        return f"the first view is formed by the host with the first endpoint that answers ({endpoints})"

    def precedes(self, address: str) -> bool:
        """Return whether this host comes before the one at an address among the endpoints."""
        if self._me.address not in self._endpoints:
            return False
        before_me = self._endpoints[: self._endpoints.index(self._me.address)]
        return address not in before_me
