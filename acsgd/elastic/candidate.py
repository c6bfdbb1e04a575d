"""A host that is in no view."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from acsgd.elastic.effects import Contact, Outbox, Timing
from acsgd.elastic.messages import Host, Join
from acsgd.elastic.presence import Presence


class Candidate:
    """A host in no view: it requests to join, or forms the first view if it has the first endpoint.

    me: this host; endpoints: addresses to which a host that joins turns; min_hosts: of the first view; max_hosts: of
    any view; setup: as in Join.
    """

    def __init__(
        self,
        me: Host,
        *,
        endpoints: Iterable[str],
        min_hosts: int,
        max_hosts: int,
        setup: Mapping[str, str],
        presence: Presence,
        timing: Timing,
        outbox: Outbox,
    ) -> None:
        self._me = me
        self._endpoints = list(endpoints)
        self._min_hosts = min_hosts
        self._max_hosts = max_hosts
        self._setup = dict(setup)
        self._presence = presence
        self._timing = timing
        self._outbox = outbox

    def differs(self, join: Join) -> tuple[str, ...]:
        """Return the names of what a host that requests to join has different."""
        return tuple(name for name in self._setup if join.setup.get(name) != self._setup[name])

    def on_timer(self, known: Iterable[Host]) -> None:
        """Send the request to join. known: the hosts of the newest view."""
        for address in dict.fromkeys([*self._endpoints, *(host.address for host in known)]):
            if address != self._me.address:
                self._outbox.add(Contact(address, Join(self._setup)))

    def may_found(self, known: Iterable[Host], now: float) -> bool:
        """Return whether this host forms the first view: it has the first endpoint of those that answer."""
        if self._me.address not in self._endpoints:
            return False
        if now - self._presence.newcomer_at < self._timing.last_call_s:
            return False
        candidates = self._presence.candidates(now)
        if len(candidates) + 1 < self._min_hosts or not all(self.precedes(host.address) for host in candidates):
            return False
        return all(host.id in self._presence.ended for host in known)

    def describe_wait(self, known: Sequence[Host], now: float) -> str:
        """Return for what this host waits. known: the hosts of the newest view."""
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
