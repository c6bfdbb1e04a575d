"""Which hosts are reachable, as one host observes it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from acsgd.elastic.membership.messages import Host, HostHeartbeat


class Presence:
    """When the last message of each other host arrived, and the content of their last heartbeats.

    me: this host, which counts as present; silence_s: time without a message after which a host counts as lost.
    """

    def __init__(self, me: Host, silence_s: float, now: float) -> None:
        self.ended: set[str] = set()
        """Ids of hosts whose processes have ended."""
        self.leaving: set[str] = set()
        """Ids of hosts that want to leave; this one may be among them."""
        self.newcomer_at = now
        """When the first message of the last newcomer arrived."""
        self._me = me
        self._silence_s = silence_s
        self._message_at: dict[str, float] = {}
        self._candidates: dict[str, tuple[Host, float]] = {}
        self._heartbeats: dict[str, HostHeartbeat] = {}

    @property
    def has_heard(self) -> bool:
        """Whether a message of another host has arrived."""
        return any(host_id != self._me.id for host_id in self._message_at)

    def record_message(self, host: Host, now: float) -> None:
        """Record that a message of a host arrived."""
        self._message_at[host.id] = now

    def record_heartbeat(self, host: Host, heartbeat: HostHeartbeat) -> None:
        """Record the heartbeat of a host of the same view."""
        self._heartbeats[host.id] = heartbeat
        if heartbeat.leaving:
            self.leaving.add(host.id)

    def record_candidate(self, host: Host, now: float) -> None:
        """Record a request to join."""
        if host.id not in self._candidates:
            self.newcomer_at = now
        self._candidates[host.id] = host, now

    def enter(self, hosts: Iterable[Host], now: float) -> None:
        """Note that the hosts of a new view are there."""
        ids = {host.id for host in hosts}
        self._message_at.update(dict.fromkeys(ids, now))
        self.leaving &= ids
        self._heartbeats.clear()
        for id in ids & self._candidates.keys():
            del self._candidates[id]

    def end(self, address: str, host_id: str | None, known: Iterable[Host]) -> None:
        """Note that a process, or whichever listened at an address, has ended. known: the hosts of the newest view."""
        for host in [*known, *(candidate for candidate, _ in self._candidates.values())]:
            if host.address == address and host_id in (None, host.id):
                self.ended.add(host.id)
                self._candidates.pop(host.id, None)

    def end_others(self, host: Host, known: Iterable[Host]) -> None:
        """Note that all other processes that listened at a host's address have ended."""
        self.ended |= {other.id for other in known if other.address == host.address and other.id != host.id}

    def end_silent(self, known: Iterable[Host], now: float) -> None:
        """Note that the hosts of an earlier view that are silent have ended."""
        self.ended |= {host.id for host in known if self.is_silent(host, now)}

    def is_silent(self, host: Host, now: float) -> bool:
        """Return whether no message of a host has arrived for a while, or ever."""
        return now - self._message_at.get(host.id, -math.inf) >= self._silence_s

    def is_lost(self, host: Host, now: float) -> bool:
        """Return whether a host has ended or is silent."""
        if host == self._me:
            return False
        return host.id in self.ended or now - self._message_at.get(host.id, now) >= self._silence_s

    def stays(self, host: Host) -> bool:
        """Return whether a host does not want to leave."""
        return host.id not in self.leaving

    def live(self, hosts: Iterable[Host], now: float) -> list[Host]:
        """Return the hosts that are not lost."""
        return [host for host in hosts if not self.is_lost(host, now)]

    def candidates(self, now: float) -> list[Host]:
        """Return the hosts that want to join, in the order in which they came."""
        return [host for host, at in self._candidates.values() if now - at < self._silence_s]

    def newcomers(self, members: Sequence[Host], now: float) -> list[Host]:
        """Return the candidates whose messages reach all of these hosts."""
        others = [self._heartbeats.get(host.id, HostHeartbeat(0)) for host in members if host != self._me]
        return [host for host in self.candidates(now) if all(host.id in each.candidates for each in others)]

    def working_s(self, host: Host) -> float | None:
        """Return for how long a rank of a host works, as of its last heartbeat; None if all wait."""
        return self._heartbeats[host.id].working_s if host.id in self._heartbeats else 0.0
