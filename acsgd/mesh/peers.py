"""Another host of the mesh, as this one knows it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from acsgd.mesh.identity import VerifiedHost
from acsgd.mesh.messages import Acquaintance, Message, Opened, Ports, to_line
from acsgd.mesh.streams import Lines

PING_S = 0.5
"""Interval of pings, seconds."""
HEARD_S = 3 * PING_S
"""Time without a ping after which a host is not awaited, seconds."""


@dataclass
class MeshPeer:
    """Another host, from the first connection on."""

    member: VerifiedHost
    announced: str | None = None
    is_dialer: bool = False
    """Whether this host has dialed the connection."""
    is_relayed: bool = False
    """Whether the connection goes through another host, since neither can dial the other."""
    lines: Lines | None = None
    """The connection for messages; None while there is none."""
    heard_at: float = 0.0
    connected: asyncio.Event = field(default_factory=asyncio.Event)
    ended: bool = False
    """Whether its process has ended: the address that it announces refuses connections."""
    daemon_port: int = 0
    ports: Ports = field(default_factory=lambda: Ports(0, ()))
    """Its ports, which are open here, too, except those in `taken_here`."""
    taken_here: tuple[int, ...] = ()
    """Its ports at which another program listens here."""
    opened: Opened = field(default_factory=lambda: Opened(0, ()))
    """Its latest answer to a message `Ports`."""

    def send(self, message: Message) -> None:
        if self.lines is not None:
            self.lines.transport.write(to_line(message))

    def acquaint(self, other: MeshPeer) -> None:
        """Let this host know another one."""
        self.send(Acquaintance(other.member.address, other.announced))

    def is_heard(self) -> bool:
        """Return whether its latest pings have arrived."""
        return self.lines is not None and time.monotonic() - self.heard_at < HEARD_S
