"""Membership of a run as a state machine without I/O, threads or clocks.

Every host runs one `Membership`. The hosts of a view send each other heartbeats. When a host is silent, leaves or wants
to join, the most senior live host of the view requests all participants to stop their workers and to report their
states (Prepare, Promise). From the states it plans the next view and records it in the register of the run, which holds
one view per epoch and never changes it. Whoever records first wins; all others follow what is recorded (Decided).

Why two views never train at the same time:
- Hosts run only views that are recorded, and epoch e + 1 is recorded by a host that runs epoch e.
- A step of a view needs the reports of all of its ranks. A host records epoch e + 1 only after the workers of a host
  with ranks in epoch e have stopped for good, or every host with ranks in epoch e has ended.
So a view with a successor completes no further step. A host that was cut off finds the successor in the register.

A majority decides at once. Fewer hosts wait for longer, so that in a partition the larger part continues.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Protocol

from acsgd.elastic.effects import (
    Contact,
    Effect,
    Excluded,
    Finish,
    Install,
    KillHung,
    Record,
    Send,
    StopWorkers,
    Timing,
)
from acsgd.elastic.messages import (
    Change,
    Decided,
    Finished,
    Heartbeat,
    Host,
    Hung,
    Join,
    Message,
    Prepare,
    Promise,
    Refused,
    View,
)
from acsgd.elastic.plan import Plan, WorkerState
from acsgd.elastic.presence import Presence


class Planner(Protocol):
    """Returns the plan of the next view, as `make_plan` does."""

    def __call__(self, workers: Mapping[str, WorkerState], *, staying: Sequence[str]) -> Plan: ...


@dataclass
class _Preparation:
    """The next view, while this host collects promises."""

    epoch: int
    reason: str
    participants: tuple[Host, ...]
    at_step_end: bool
    since: float
    promises: dict[str, Promise] = field(default_factory=dict)
    is_recording: bool = False


class Membership:
    """One host's part in the membership of a run.

    Inputs are methods, each with the present time in seconds; outputs are effects, in order, which the caller takes by
    `take_effects` after each input and carries out.

    me: this host; endpoints: addresses to which a host that joins turns; min_hosts: of the first view; newest: the
    newest recorded view, of which the hosts may still run; planner: plans the next view.
    """

    def __init__(
        self,
        me: Host,
        *,
        endpoints: Iterable[str],
        min_hosts: int,
        max_hosts: int,
        planner: Planner,
        setup: Mapping[str, str] = MappingProxyType({}),
        newest: View | None = None,
        timing: Timing,
        now: float,
    ) -> None:
        self.me = me
        self.view: View | None = None
        """The view that this host is in."""
        self.wants_to_leave = False
        self.working_s: float | None = None
        """As in Heartbeat, of this host's workers; set by the caller."""
        self._endpoints = list(endpoints)
        self._hosts_range = min_hosts, max_hosts
        self._planner = planner
        self._setup = dict(setup)
        self.newest = newest
        """The newest recorded view that this host knows of."""
        self._timing = timing
        self._presence = Presence(me, timing.silence_s, now)
        self._change: Change | None = None
        self._changed_at: float | None = None
        self._states: dict[str, WorkerState] | None = None  # of this host's workers, while they are stopped
        self._stopping: Prepare | None = None
        self._waiting: dict[str, tuple[Host, int]] = {}  # by id, hosts that wait for a promise, and its epoch
        self._preparation: _Preparation | None = None
        self._is_over = False
        self._effects: list[Effect] = []

    def take_effects(self) -> list[Effect]:
        """Return the effects since the last call."""
        effects, self._effects = self._effects, []
        return effects

    # Inputs from this host.

    def stopped(self, states: dict[str, WorkerState]) -> None:
        """Take the states of this host's workers, all of which have stopped; empty if there are none any more.

        They run again when a view is installed, and not before.
        """
        self._states = states
        for host, epoch in self._waiting.values():
            self._send(host, Promise(epoch, states))
        self._waiting.clear()

    def request_change(self, reason: str, *, at_step_end: bool) -> None:
        """Request the next view: workers of this view cannot continue, were lost, or have been started again."""
        if self.view is not None:
            change = Change(self.view.epoch, reason, at_step_end)
            self._broadcast(change)
            self._note_change(change)

    def leave(self) -> None:
        """Leave the run: the next view is formed without this host. If it is alone, nothing changes."""
        self.wants_to_leave = True

    def finish(self) -> None:
        """End the run: all hosts end their workers. A view without hosts is recorded, so that none continues."""
        if self.view is not None:
            self._effects.append(Record(View(self._next_epoch, (), Plan(stages=1))))
            self._broadcast(Finished(self.view.epoch))
        self._finish()

    def recorded(self, view: View, now: float) -> None:
        """Take the view that an epoch has in the register."""
        if self._preparation is not None:
            for host in self._preparation.participants:
                self._send(host, Decided(view))
        self._preparation = None
        self._learn(view, now)

    def recording_failed(self) -> None:
        """Note that the register did not answer: record again later."""
        if self._preparation is not None:
            self._preparation.is_recording = False

    def ended(self, address: str, host_id: str | None) -> None:
        """Note that the process at an address has ended: nothing listens there. host_id: its id, if it is known."""
        self._presence.end(address, host_id, self._known)

    def abandoned(self, now: float) -> None:
        """Note that the hosts of the newest view hold no lease on the run directory: those that are silent ended."""
        if self.view is None:
            self._presence.end_silent(self._known, now)

    # Messages.

    def receive(self, sender: Host, message: Message, now: float) -> None:
        """Handle a message of another host."""
        self._presence.record_message(sender, now)
        self._presence.end_others(sender, self._known)
        if self.view is None:
            self._presence.ended.discard(sender.id)
        match message:
            case Heartbeat():
                self._on_heartbeat(sender, message)
            case Join():
                self._on_join(sender, message, now)
            case Refused():
                if self.view is None:
                    self._effects.append(message)
            case Change():
                if self.view is not None and message.epoch == self.view.epoch:
                    self._note_change(message)
            case Prepare():
                self._on_prepare(sender, message, now)
            case Promise():
                if self._preparation is not None and message.epoch == self._preparation.epoch:
                    self._preparation.promises[sender.id] = message
                    self._record_if_complete(now)
            case Decided():
                self._learn(message.view, now)
            case Hung():
                if self.view is not None and message.epoch == self.view.epoch:
                    self._effects.append(KillHung())
            case Finished():
                self._finish()

    def _on_heartbeat(self, sender: Host, heartbeat: Heartbeat) -> None:
        if self.view is None:
            return
        if heartbeat.epoch < self.view.epoch:
            self._send(sender, Decided(self.view))  # which also shows a host that it was excluded
        elif self.view.has(sender.id):
            self._presence.record_heartbeat(sender, heartbeat)

    def _on_join(self, sender: Host, join: Join, now: float) -> None:
        if differing := tuple(name for name in self._setup if join.setup.get(name) != self._setup[name]):
            if self.view is not None or self._precedes(sender):
                self._send(sender, Refused(differing))
            return
        if (newest := self.view or self.newest) is not None:
            self._send(sender, Decided(newest))  # it then turns to all hosts of the view, or installs it
            if newest.has(sender.id):
                return
        self._presence.record_candidate(sender, now)

    def _on_prepare(self, sender: Host, prepare: Prepare, now: float) -> None:
        if prepare.base is not None:
            self._learn(prepare.base, now)
        if self.view is not None and prepare.epoch <= self.view.epoch:
            self._send(sender, Decided(self.view))
            return
        is_new = self._stopping is None or (self._stopping.at_step_end and not prepare.at_step_end)
        self._stopping = prepare if is_new else self._stopping
        if self._states is not None:
            self._send(sender, Promise(prepare.epoch, self._states))
            return
        self._waiting[sender.id] = sender, prepare.epoch
        if is_new:
            self._effects.append(StopWorkers(prepare.at_step_end))

    # Time.

    def on_timer(self, now: float) -> None:
        """Send heartbeats or requests to join, and form the next view if it is due. Called every `heartbeat_s`."""
        if self._is_over:
            return
        if self.view is not None:
            candidates = tuple(host.id for host in self._presence.candidates(now))
            self._broadcast(Heartbeat(self.view.epoch, self.wants_to_leave, candidates, self.working_s))
            self._find_hung(self.view, now)
        elif self._states is not None:
            self._request_to_join()
        if self._preparation is not None:
            self._continue_preparation(now)
        elif self._is_change_due(now) if self.view is not None else self._may_found(now):
            self._prepare(now)
        self._record_if_complete(now)

    def _find_hung(self, view: View, now: float) -> None:
        """As the first live host, let workers be killed that work for too long while the ranks of all others wait."""
        if self._presence.live(view.hosts, now)[0] != self.me:
            return
        ranks = [host for host in view.hosts if host.id in view.rank_hosts()]
        worked = {host: self.working_s if host == self.me else self._presence.working_s(host) for host in ranks}
        hung = [host for host, seconds in worked.items() if seconds is not None and seconds >= self._timing.hang_s]
        if all(seconds is None or host in hung for host, seconds in worked.items()):
            for host in hung:
                self._send(host, Hung(view.epoch))

    def _request_to_join(self) -> None:
        for address in dict.fromkeys([*self._endpoints, *(host.address for host in self._known)]):
            if address != self.me.address:
                self._effects.append(Contact(address, Join(self._setup)))

    def _may_found(self, now: float) -> bool:
        """Return whether this host forms the first view: it has the first endpoint of those that answer."""
        is_ready = self._states is not None and self.me.address in self._endpoints
        if not is_ready or now - self._presence.newcomer_at < self._timing.last_call_s:
            return False
        candidates = self._presence.candidates(now)
        if len(candidates) + 1 < self._hosts_range[0] or not all(self._precedes(host) for host in candidates):
            return False
        return all(host.id in self._presence.ended for host in self._known)

    def _is_change_due(self, now: float) -> bool:
        """Return whether this host has to form the next view now."""
        assert self.view is not None
        live = self._presence.live(self.view.hosts, now)
        leaving = [host for host in live if not self._stays(host)]
        is_needed = (
            len(live) < len(self.view.hosts)
            or self._change is not None
            or self._stopping is not None
            or bool(self._newcomers(now))
            or 0 < len(leaving) < len(live)  # the last host does not leave: the run would end
        )
        if not is_needed:
            self._changed_at = None
            return False
        if self._changed_at is None:
            self._changed_at = now
        patience = self._timing.settle_s + live.index(self.me) * self._timing.silence_s  # others, if the first does not
        return now - self._changed_at >= patience

    def _prepare(self, now: float) -> None:
        """Ask all live hosts to stop their workers."""
        members, newcomers = self._presence.live(self._members, now), self._newcomers(now)
        is_calm = self.view is None or len(members) == len(self.view.hosts)
        at_step_end = is_calm and (self._change is None or self._change.at_step_end)
        previous = self._preparation.promises if self._preparation else {}
        reason = self._reason(now, newcomers)
        self._preparation = _Preparation(self._next_epoch, reason, (*members, *newcomers), at_step_end, now, previous)
        self._send_prepare()

    def _reason(self, now: float, newcomers: Sequence[Host]) -> str:
        """Return why the next view is formed."""
        reasons = [self._change.reason] if self._change else []
        for host in self._members:
            if host.id in self._presence.ended:
                reasons.append(f"{host.address} ended")
            elif self._presence.is_lost(host, now):
                reasons.append(f"{host.address} was silent for {self._timing.silence_s:g} s")
            elif not self._stays(host):
                reasons.append(f"{host.address} leaves")
        reasons += [f"{host.address} joins" for host in newcomers if self.view]
        return ", ".join(reasons)

    def _continue_preparation(self, now: float) -> None:
        """Leave out hosts that were lost meanwhile; repeat the request to the others."""
        assert self._preparation is not None
        if any(self._presence.is_lost(host, now) for host in self._preparation.participants) or (
            self._preparation.at_step_end and self._change is not None and not self._change.at_step_end
        ):
            self._prepare(now)
        else:
            self._send_prepare()

    def _send_prepare(self) -> None:
        assert self._preparation is not None
        for host in self._preparation.participants:
            if host.id not in self._preparation.promises:
                self._send(host, Prepare(self.view, self._preparation.epoch, self._preparation.at_step_end))

    def _record_if_complete(self, now: float) -> None:
        """Record the next view once all participants have promised."""
        preparation = self._preparation
        if preparation is None or preparation.is_recording or not self._may_record(preparation, now):
            return
        has_heir = any(self._stays(host) for host in preparation.participants if host in self._members)
        hosts = tuple(host for host in preparation.participants if self._stays(host) or not has_heir)
        promises = {host.id: preparation.promises[host.id] for host in preparation.participants}
        states = {f"{id}/{name}": state for id, promise in promises.items() for name, state in promise.workers.items()}
        staying = [f"{host.id}/{name}" for host in hosts for name in sorted(promises[host.id].workers)]
        preparation.is_recording = True
        plan = replace(self._planner(states, staying=staying), is_first=self.view is None)
        self._effects.append(Record(View(preparation.epoch, hosts, plan, preparation.reason)))

    def _may_record(self, preparation: _Preparation, now: float) -> bool:
        """Return whether the present view can complete no further step, and a larger part of it has had its chance."""
        promised = preparation.promises.keys()
        if any(host.id not in promised for host in preparation.participants):
            return False
        if self.view is None:
            return True
        rank_hosts, ended = self.view.rank_hosts(), self._presence.ended
        if rank_hosts and not (rank_hosts & promised or rank_hosts <= ended):
            return False
        absent = [host for host in self.view.hosts if host.id not in promised | ended]
        return now - preparation.since >= self._patience_s(absent)

    def _patience_s(self, absent: Sequence[Host]) -> float:
        """Return for how long the decision is left to the hosts that are cut off: to the larger part of the view."""
        assert self.view is not None
        present = len(self.view.hosts) - len(absent)
        if present == len(absent):
            return self._timing.silence_s if self.view.hosts[0] in absent else 0.0
        return 0.0 if present > len(absent) else 2 * self._timing.silence_s

    def _learn(self, view: View, now: float) -> None:
        """Take a view that was recorded: install it if this host is in it."""
        if self._is_over or (self.view is not None and view.epoch <= self.view.epoch):
            return
        if view.has(self.me.id):
            self._install(view, now)
        elif self.view is not None and not view.hosts:
            self._finish()
        elif self.view is not None:
            self._is_over = True
            self._effects.append(Excluded(left=self.wants_to_leave))
        elif self.newest is None or view.epoch > self.newest.epoch:
            self.newest = view
            self._preparation = None  # there is no first view to form: the run exists

    def _install(self, view: View, now: float) -> None:
        self.view = self.newest = view
        self._presence.enter(view.hosts, now)
        self._change = self._changed_at = self._stopping = self._preparation = self._states = None
        self._waiting.clear()
        self._effects.append(Install(view))

    def _finish(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._effects.append(Finish())

    # Who is there.

    @property
    def _known(self) -> tuple[Host, ...]:
        """The hosts of the newest view that this host knows of."""
        newest = self.view or self.newest
        return newest.hosts if newest else ()

    @property
    def _members(self) -> tuple[Host, ...]:
        """The hosts of this host's view; itself before the first."""
        return self.view.hosts if self.view else (self.me,)

    @property
    def _next_epoch(self) -> int:
        newest = self.view or self.newest
        return newest.epoch + 1 if newest else 1

    def _stays(self, host: Host) -> bool:
        return not (host.id in self._presence.leaving or (host == self.me and self.wants_to_leave))

    def _precedes(self, other: Host) -> bool:
        """Return whether this host comes before another among the endpoints."""
        if self.me.address not in self._endpoints:
            return False
        before_me = self._endpoints[: self._endpoints.index(self.me.address)]
        return other.address not in before_me

    def _newcomers(self, now: float) -> list[Host]:
        """Return the candidates for which the next view has room, and whose messages reach all of its hosts."""
        live = self._presence.live(self._members, now)
        return self._presence.newcomers(live, now)[: max(0, self._hosts_range[1] - len(live))]

    def _note_change(self, change: Change) -> None:
        if self._change is None or not change.at_step_end:
            self._change = change

    def _broadcast(self, message: Message) -> None:
        assert self.view is not None
        for host in self.view.hosts:
            if host.id != self.me.id:
                self._send(host, message)

    def _send(self, to: Host, message: Message) -> None:
        self._effects.append(Send(to, message))
