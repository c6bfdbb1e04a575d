"""A host that is in a view."""

from __future__ import annotations

from collections.abc import Sequence

from acsgd.elastic.membership.effects import EffectList, KillHung, Timing
from acsgd.elastic.membership.messages import DaemonMessage, Decided, Host, HostHeartbeat, Hung, View, ViewRequest
from acsgd.elastic.membership.presence import Presence


class Member:
    """A host in one view: it observes the others, and knows when the next view is due."""

    def __init__(self, me: Host, view: View, presence: Presence, timing: Timing, outbox: EffectList) -> None:
        self.view = view
        self.change: ViewRequest | None = None
        """The most urgent request for the next view."""
        self.is_idle = False
        """Whether stop signals to all ranks have ended training in this view."""
        self.hung: set[str] = set()
        """Addresses of the hosts whose workers hang, as the first live host knows, which has them killed."""
        self._me = me
        self._presence = presence
        self._timing = timing
        self._outbox = outbox
        self._changed_at: float | None = None
        self._leaving = set[str]()
        """Ids of the live hosts that want to leave, as of the last timer."""
        self._left_at = 0.0
        """When the last of these was first seen to."""

    @property
    def is_urgent(self) -> bool:
        """Whether the workers cannot complete their step, as was reported."""
        return self.change is not None and not self.change.at_step_end

    def receive(self, sender: Host, message: HostHeartbeat | ViewRequest | Hung) -> None:
        """Handle a message of a host of this view or of an earlier one."""
        match message:
            case HostHeartbeat(epoch) if epoch < self.view.epoch:
                self._outbox.send(sender, Decided(self.view))  # which also shows a host that it was excluded
            case HostHeartbeat() if self.view.has(sender.id):
                self._presence.record_heartbeat(sender, message)
            case ViewRequest(epoch) if epoch == self.view.epoch:
                self._take_change(message)
            case Hung(epoch) if epoch == self.view.epoch:
                self._outbox.add(KillHung())

    def request_change(self, reason: str, *, at_step_end: bool) -> None:
        """Request the next view, from all hosts."""
        change = ViewRequest(self.view.epoch, reason, at_step_end)
        self.broadcast(change)
        self._take_change(change)

    def on_timer(self, working_s: float | None, now: float) -> None:
        """Send the heartbeat, and have workers killed that hang. working_s: as in Heartbeat, of this host."""
        candidates = tuple(host.id for host in self._presence.candidates(now))
        self.broadcast(HostHeartbeat(self.view.epoch, not self._presence.stays(self._me), candidates, working_s))
        for host in self._hung(working_s, now):
            self.hung.add(host.address)
            self._outbox.send(host, Hung(self.view.epoch))

    def broadcast(self, message: DaemonMessage) -> None:
        """Send a message to all other hosts of the view."""
        for host in self.view.hosts:
            if host.id != self._me.id:
                self._outbox.send(host, message)

    def is_change_due(self, newcomers: Sequence[Host], now: float, *, is_stopping: bool) -> bool:
        """Return whether this host has to form the next view now.

        is_stopping: whether another host has requested to stop the workers.
        """
        live = self._presence.live(self.view.hosts, now)
        leaving = {host.id for host in live if not self._presence.stays(host)}
        if leaving - self._leaving:
            self._left_at = now
        self._leaving = leaving
        is_needed = (
            len(live) < len(self.view.hosts)
            or self.change is not None
            or is_stopping
            or bool(newcomers)
            # the last host does not leave: the run would end
            or (0 < len(leaving) < len(live) and now - self._left_at >= self._timing.leave_s)
        )
        if not is_needed:
            self._changed_at = None
            return False
        if self._changed_at is None:
            self._changed_at = now
        patience = (
            self._timing.settle_s + live.index(self._me) * self._timing.silence_s
        )  # others, if the first does not
        return now - self._changed_at >= patience

    def do_all_leave(self, now: float) -> bool:
        """Return whether all hosts of the view that are left want to leave."""
        return not any(self._presence.stays(host) for host in self._presence.live(self.view.hosts, now))

    def reason(self, newcomers: Sequence[Host], now: float) -> str:
        """Return why the next view is formed."""
        reasons = [f"{address} hung" for address in sorted(self.hung)]
        reasons += [self.change.reason] if self.change and not self.hung else []  # which follows from that
        for host in self.view.hosts:
            if host.id in self._presence.ended:
                reasons.append(f"{host.address} ended")
            elif self._presence.is_lost(host, now):
                reasons.append(f"{host.address} was silent for {self._timing.silence_s:g} s")
            elif not self._presence.stays(host):
                reasons.append(f"{host.address} leaves")
        return ", ".join([*reasons, *(f"{host.address} joins" for host in newcomers)])

    def _take_change(self, change: ViewRequest) -> None:
        if self.change is None or not change.at_step_end:
            self.change = change

    def _hung(self, working_s: float | None, now: float) -> list[Host]:
        """As the first live host, return the hosts whose ranks work for too long while those of all others wait."""
        if self._presence.live(self.view.hosts, now)[0] != self._me:
            return []
        ranks = [host for host in self.view.hosts if host.id in self.view.rank_hosts()]
        worked = {host: working_s if host == self._me else self._presence.working_s(host) for host in ranks}
        hung = [host for host, seconds in worked.items() if seconds is not None and seconds >= self._timing.hang_s]
        return hung if all(seconds is None or host in hung for host, seconds in worked.items()) else []
