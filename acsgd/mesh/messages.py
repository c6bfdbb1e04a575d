"""What the forwarders of two hosts send to each other on the connection that each pair of hosts keeps."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, get_args

from acsgd.io.files.fields import Natural, from_json

PROTOCOL = 5
"""Version of the messages, and of what the length of a record means (see `SHORT_BYTES`), in each `Greeting`."""


def _check_port(port: int) -> None:
    if not 0 < port < 65536:
        raise ValueError(f"{port} is no port")


Port = Annotated[int, _check_port]


@dataclass(frozen=True)
class Greeting:
    """The first message, in each direction."""

    protocol: Natural
    announced: str | None
    """host:port at which this host can be dialed; None = nowhere."""
    daemon_port: Natural
    """Port of its daemon at its virtual address."""
    ports: tuple[Port, ...]
    """Ports at which its processes listen at its virtual address."""


@dataclass(frozen=True)
class Ports:
    """The ports at which processes of the sender listen now. The receiver answers with `Opened`."""

    number: Natural
    ports: tuple[Port, ...]


@dataclass(frozen=True)
class Opened:
    """The ports of a message are open on the sender's host, too, except those that another program has taken there."""

    number: Natural
    taken: tuple[Port, ...]


@dataclass(frozen=True)
class Ping:
    """Sent every PING_S."""


@dataclass(frozen=True)
class Acquaintance:
    """Another host to which the sender is connected."""

    address: str
    announced: str | None


@dataclass(frozen=True)
class Open:
    """Dial the sender, for a connection that it wants to open: it cannot dial."""

    number: Natural


@dataclass(frozen=True)
class Misled:
    """The address that the receiver announces leads elsewhere."""

    announced: str
    problem: str


@dataclass(frozen=True)
class Rotate:
    """A step of the replacement of the run's secret, see `rotation`. The receiver answers with `Rotated`."""

    rotation: str
    """Random text."""
    step: Literal["accept", "use", "end", "cancel"]
    secret: str
    """The new one, with "accept"; else empty."""


@dataclass(frozen=True)
class Rotated:
    """The sender has taken a step."""

    rotation: str
    step: str
    problem: str | None
    """Why it has not."""


Message = Greeting | Ports | Opened | Ping | Acquaintance | Open | Misled | Rotate | Rotated


def to_line(message: Message) -> bytes:
    return json.dumps({"kind": type(message).__name__, "body": asdict(message)}).encode() + b"\n"


def from_line(line: bytes) -> Any:
    """Return the message of a line. Raises ValueError for anything else."""
    value = json.loads(line)
    by_name = {kind.__name__: kind for kind in get_args(Message)}
    if not isinstance(value, dict) or value.get("kind") not in by_name:
        raise ValueError(f"{line!r:.80} is not a message of a mesh")
    return from_json(by_name[value["kind"]], value.get("body"))
