"""Membership of a run as a state machine without I/O, threads or clocks.

Every host runs one `Membership`. The hosts of a view send each other heartbeats. When a host is silent, leaves or wants
to join, the most senior live host of the view requests all participants to stop their workers and to report their
states (Prepare, Promise). From the states it plans the next view and records it in the register of the run, which holds
one view per epoch and never changes it. Whoever records first wins; all others follow what is recorded (Decided).
A view is recorded once a majority of the disks of the view before has voted for it; hosts that share one have one vote.

Why two views never train at the same time:
- Hosts run only views that are recorded, and epoch e + 1 is recorded by a host that runs epoch e.
- A step of a view needs the reports of all of its ranks. A host records epoch e + 1 only after the workers of a host
  with ranks in epoch e have stopped for good, or every host with ranks in epoch e has ended.
So a view with a successor completes no further step. A host that was cut off finds the successor in the register.

A majority of hosts decides at once. Fewer, which may record if they share disks, wait for longer, so that in a
partition the larger part continues.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from acsgd.elastic.membership.effects import Effect, EffectList, Excluded, Finish, Install, RecordView, Timing
from acsgd.elastic.membership.member import Member
from acsgd.elastic.membership.messages import (
    DaemonMessage,
    Decided,
    Finished,
    Host,
    HostHeartbeat,
    Hung,
    Join,
    Prepare,
    Promise,
    Refused,
    View,
    ViewRequest,
)
from acsgd.elastic.membership.plan import Plan, WorkerState
from acsgd.elastic.membership.preparation import Candidate, Planner, Preparation, Promises
from acsgd.elastic.membership.presence import Presence


class Membership:
    """One host's part in the membership of a run: a candidate until it is in a view, then a member of that view.

    Inputs are methods, with the present time in seconds. After each, the caller carries out the effects, in order.

    me: this host; endpoints: addresses to which a host that joins turns, which may become more; min_hosts: of the
    first view; newest: the newest recorded view, of which the hosts may still run; planner: plans the next view; force:
    as in `Candidate`.
    """

    def __init__(
        self,
        me: Host,
        *,
        endpoints: Sequence[str],
        min_hosts: int,
        max_hosts: int,
        planner: Planner,
        setup: Mapping[str, str] = MappingProxyType({}),
        newest: View | None = None,
        force: bool = False,
        timing: Timing,
        now: float,
    ) -> None:
        self.me = me
        self.working_s: float | None = None
        """As in Heartbeat, of this host's workers; set by the caller."""
        self.newest = newest
        """The newest recorded view that this host knows of."""
        self._max_hosts = max_hosts
        self._planner = planner
        self._timing = timing
        self._outbox = EffectList()
        self._presence = Presence(me, timing.silence_s, now)
        self.candidate = Candidate(
            me,
            endpoints=endpoints,
            min_hosts=min_hosts,
            max_hosts=max_hosts,
            setup=setup,
            force=force,
            presence=self._presence,
            timing=timing,
            outbox=self._outbox,
        )
        self._member: Member | None = None
        self._preparation: Preparation | None = None
        self._promises = Promises(self._outbox)
        self._is_over = False

    @property
    def view(self) -> View | None:
        """The view that this host is in."""
        return self._member.view if self._member else None

    def describe_wait(self, now: float) -> str:
        """Return for what this host, which is in no view, waits."""
        return self.candidate.describe_wait(self.newest, now)

    def take_effects(self) -> list[Effect]:
        """Return the effects since the last call."""
        return self._outbox.take()

    # Inputs from this host.

    def stopped(self, states: dict[str, WorkerState]) -> None:
        """Take the states of this host's workers, all of which have stopped; empty if there are none any more.

        They run again when a view is installed, and not before.
        """
        self._promises.take_states(states)

    def request_change(self, reason: str, *, at_step_end: bool) -> None:
        """Request the next view: workers of this view cannot continue, were lost, or have been started again."""
        if self._member is not None:
            self._member.request_change(reason, at_step_end=at_step_end)

    def leave(self) -> None:
        """Leave the run: the next view is formed without this host. If it is alone, nothing changes.

        A host in no view leaves at the next `on_timer`, unless a view with it may be recorded: then it leaves that one.
        """
        self._presence.leaving.add(self.me.id)

    def finish(self) -> None:
        """End the run: all hosts end their workers. A view without hosts is recorded, so that none continues."""
        if self._member is not None:
            view = self._member.view
            end = View(self._next_epoch, (), Plan(stages=1), voters=view.voters, history=view.history)
            self._outbox.add(RecordView(end, view.voters, view.history))
            self._member.broadcast(Finished(view.epoch))
        self._finish()

    def finish_if_all_leave(self) -> None:
        """End the run once all hosts of this view want to leave: its ranks have stopped on their own."""
        if self._member is not None:
            self._member.is_idle = True

    def recorded(self, view: View, now: float) -> None:
        """Take the view that an epoch has in the register."""
        if self._preparation is not None:
            for host in self._preparation.participants:
                self._outbox.send(host, Decided(view))
        self._preparation = None
        self._learn(view, now)

    def recording_failed(self) -> None:
        """Note that no majority has voted: record again later. A host that wants to leave does not wait for that."""
        if self._preparation is not None:
            self._preparation.is_recording = False
        if not self._presence.stays(self.me):
            self._exclude()

    def ended(self, address: str, host_id: str | None) -> None:
        """Note that the process at an address has ended: nothing listens there. host_id: its id, if it is known."""
        self._presence.end(address, host_id, self._known)

    def abandoned(self, now: float) -> None:
        """Note that nobody holds the lease on this host's run directory: silent hosts that shared it have ended."""
        if self._member is None:
            self._presence.end_silent([host for host in self._known if host.disk == self.me.disk], now)

    # Messages.

    def receive(self, sender: Host, message: DaemonMessage, now: float) -> None:
        """Handle a message of another host."""
        self._presence.record_message(sender, now)
        self._presence.end_others(sender, self._known)
        if self._member is None:
            self._presence.ended.discard(sender.id)
        match message:
            case Join():
                self._on_join(sender, message, now)
            case Refused():
                if self._member is None:
                    self._outbox.add(message)
            case Prepare():
                self._on_prepare(sender, message, now)
            case Promise():
                if self._preparation is not None and message.epoch == self._preparation.epoch:
                    self._preparation.promises[sender.id] = message
                    self._record_if_complete(now)
            case Decided(view) if self._is_of_this_history(view):
                self._learn(view, now)
            case Finished():
                self._finish()
            case HostHeartbeat() | ViewRequest() | Hung() if self._member is not None:
                self._member.receive(sender, message)

    def _on_join(self, sender: Host, join: Join, now: float) -> None:
        if differing := self.candidate.differs(join, self.newest):
            if self._member is not None or self.candidate.precedes(sender.address):
                self._outbox.send(sender, Refused(differing))
            return
        if join.newest is not None:
            self._learn(join.newest, now)
        if self._member is None:
            self._presence.ended |= {*join.ended}
        if self.newest is not None:
            self._outbox.send(sender, Decided(self.newest))  # it then turns to all hosts of the view, or installs it
            if self.newest.has(sender.id):
                return
        self._presence.record_candidate(sender, now)

    def _on_prepare(self, sender: Host, prepare: Prepare, now: float) -> None:
        if prepare.base is not None and self._is_of_this_history(prepare.base):
            self._learn(prepare.base, now)
        if self.view is not None and prepare.epoch <= self.view.epoch:
            self._outbox.send(sender, Decided(self.view))
        else:
            self._promises.take_request(sender, prepare)

    # Time.

    def on_timer(self, now: float) -> None:
        """Send heartbeats or requests to join, and form the next view if it is due. Called every `heartbeat_s`."""
        if self._is_over:
            return
        if self._member is not None:
            self._member.on_timer(self.working_s, now)
            if self._member.is_idle and self._member.do_all_leave(now):
                self.finish()
                return
        elif not self._presence.stays(self.me) and not self._promises.is_requested:
            self._exclude()
            return
        elif self._promises.are_stopped:
            self.candidate.on_timer(self.newest)
        if self._preparation is not None:
            self._continue_preparation(self._preparation, now)
        elif self._is_view_due(now):
            self._prepare(now)
        self._record_if_complete(now)

    def _is_view_due(self, now: float) -> bool:
        """Return whether this host has to form the next view, or the first one."""
        if self._member is None:
            return self._promises.are_stopped and self.candidate.may_found(self.newest, now)
        return self._member.is_change_due(self._newcomers(now), now, is_stopping=self._promises.is_requested)

    def _prepare(self, now: float) -> None:
        """Request all live hosts to stop their workers."""
        members, newcomers = tuple(self._presence.live(self._members, now)), self._newcomers(now)
        is_calm = self._member is None or (len(members) == len(self._members) and not self._member.is_urgent)
        is_forced = self._member is None and self.newest is not None and self.candidate.is_forced(self.newest, now)
        base = None if is_forced else self.newest
        self._preparation = Preparation(
            base=self.view,
            epoch=self._next_epoch,
            reason=self._member.reason(newcomers, now) if self._member else "",
            hung=tuple(sorted(self._member.hung)) if self._member else (),
            members=members,
            newcomers=newcomers,
            at_step_end=is_calm,
            since=now,
            voters=(base and base.voters) or (self.me.disk,),  # older versions noted none
            history=base.history if base else None,
            promises=self._preparation.promises if self._preparation else {},
        )
        self._request_promises(self._preparation)

    def _continue_preparation(self, preparation: Preparation, now: float) -> None:
        """Leave out hosts that were lost meanwhile; repeat the request to the others."""
        is_urgent = preparation.at_step_end and self._member is not None and self._member.is_urgent
        if is_urgent or any(self._presence.is_lost(host, now) for host in preparation.participants):
            if self._member is None:  # those that are left may not form a view
                self._preparation = None
                self._promises.withdraw()
            else:
                self._prepare(now)
        else:
            self._request_promises(preparation)

    def _request_promises(self, preparation: Preparation) -> None:
        for host in preparation.awaited():
            self._outbox.send(host, preparation.request())

    def _record_if_complete(self, now: float) -> None:
        """Record the next view once all participants have promised."""
        preparation, presence = self._preparation, self._presence
        if preparation is None or preparation.is_recording:
            return
        if preparation.may_record(presence.ended, self._timing.silence_s, now):
            preparation.is_recording = True
            view = preparation.next_view(self._planner, presence.stays)
            self._outbox.add(RecordView(view, preparation.voters, preparation.history))

    # Views.

    def _is_of_this_history(self, view: View) -> bool:
        """Return whether a view follows from those that this host knows, or begins a new history with it."""
        return self.newest is None or view.history == self.newest.history or view.has(self.me.id)

    def _learn(self, view: View, now: float) -> None:
        """Take a view that was recorded: install it if this host is in it."""
        if self._is_over or (self.view is not None and view.epoch <= self.view.epoch):
            return
        if view.has(self.me.id):
            self._install(view, now)
        elif self._member is not None and not view.hosts:
            self._finish()
        elif self._member is not None:
            self._exclude()
        elif self.newest is None or view.epoch > self.newest.epoch:
            self.newest = view
            self._preparation = None  # there is no first view to form: the run exists

    def _install(self, view: View, now: float) -> None:
        self.newest = view
        self._member = Member(self.me, view, self._presence, self._timing, self._outbox)
        self._presence.enter(view.hosts, now)
        self._preparation = None
        self._promises.reset()
        self._outbox.add(Install(view))

    def _exclude(self) -> None:
        self._is_over = True
        self._outbox.add(Excluded(left=not self._presence.stays(self.me)))

    def _finish(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._outbox.add(Finish())

    @property
    def _known(self) -> tuple[Host, ...]:
        """The hosts of the newest view that this host knows of."""
        return self.newest.hosts if self.newest else ()

    @property
    def _members(self) -> tuple[Host, ...]:
        """The hosts of this host's view; itself before the first."""
        return self._member.view.hosts if self._member else (self.me,)

    @property
    def _next_epoch(self) -> int:
        return self.newest.epoch + 1 if self.newest else 1

    def _newcomers(self, now: float) -> tuple[Host, ...]:
        """Return the candidates for which the next view has room, and whose messages reach all of its hosts."""
        live = self._presence.live(self._members, now)
        return tuple(self._presence.newcomers(live, now)[: max(0, self._max_hosts - len(live))])
