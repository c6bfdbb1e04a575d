"""Outputs of a membership, which its caller carries out, and the timing of the protocol."""

from __future__ import annotations

from dataclasses import dataclass

from acsgd.elastic.membership.messages import DaemonMessage, Host, Refused, View


@dataclass(frozen=True)
class Timing:
    """Intervals and limits of the protocol, seconds."""

    heartbeat_s: float = 0.2
    silence_s: float = 2.0
    """Time without a message after which a host counts as lost."""
    settle_s: float = 0.05
    """Time for which losses are collected before the next view is formed."""
    leave_s: float = 2.0
    """Time without another host that leaves after which the next view is formed without those that do. Hosts that all
    get a stop signal get it at different times; if they left one by one, the last one would save its state alone."""
    hang_s: float = 60.0
    """Time after which a worker is killed that works without a wait while all others wait."""
    last_call_s: float = 1.0
    """Time without a newcomer after which the first view is formed."""
    endpoints_s: float = 5.0
    """The same if this host knows of no earlier view, and not all endpoints are there. Their hosts may know of one, and
    processes that are started at the same time on several hosts are ready seconds apart."""


@dataclass(frozen=True)
class Send:
    """Send a message to a host."""

    to: Host
    message: DaemonMessage


@dataclass(frozen=True)
class Contact:
    """Send a message to an address of which only the address is known."""

    address: str
    message: DaemonMessage


@dataclass(frozen=True)
class StopWorkers:
    """Stop the workers and call `stopped` with their states. at_step_end: they first complete their step."""

    at_step_end: bool


@dataclass(frozen=True)
class RecordView:
    """Record a view if its epoch is free, then call `recorded` with the view that is recorded."""

    view: View
    voters: tuple[str, ...]
    """Disks of which a majority must vote for it."""
    history: str | None
    """Of the view before; None if a new one begins."""


@dataclass(frozen=True)
class Install:
    """Let the workers run a view."""

    view: View


@dataclass(frozen=True)
class Excluded:
    """The run continues without this host: stop its workers. To join again, it needs a new membership."""

    left: bool
    """Whether it wanted to leave."""


@dataclass(frozen=True)
class KillHung:
    """Kill the workers that work for too long without a wait."""


@dataclass(frozen=True)
class Finish:
    """The run has ended: end the workers."""


Effect = Send | Contact | StopWorkers | RecordView | Install | Refused | Excluded | KillHung | Finish


class EffectList:
    """Collects the effects of an input, in order."""

    def __init__(self) -> None:
        self._effects: list[Effect] = []

    def add(self, effect: Effect) -> None:
        self._effects.append(effect)

    def send(self, to: Host, message: DaemonMessage) -> None:
        self._effects.append(Send(to, message))

    def take(self) -> list[Effect]:
        """Return the effects since the last call."""
        effects, self._effects = self._effects, []
        return effects
