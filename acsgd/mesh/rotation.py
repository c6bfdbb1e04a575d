"""Replacing the secret of a run while it runs.

The host on which a user requests it, the initiator, draws a secret, and lets all hosts that are connected to it take
three steps. Each begins once all have confirmed the one before. Whose connection has just ended is awaited, up to
RETURN_S: else a router that forgets it, or a link that fails, would shut out that host for good.

1. "accept": certificates of the new secret are accepted, too. The new secret is in a file beside that of the old one.
2. "use": this host has a certificate of the new secret. The new file replaces the old one.
3. "end": only the new secret is accepted; what was connected with the old one ends.

If the initiator ends, hosts in any two steps in a row accept each other, and the old secret is accepted by those that
have not reached "end". They reach it with the next rotation, or with a connection to a host that has.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from acsgd.io.files.atomic import fsync_directory
from acsgd.mesh.identity import HostIdentity, check_secret
from acsgd.mesh.messages import Rotate, Rotated
from acsgd.mesh.peers import PING_S, MeshPeer

END_S = 1.0
"""Time between the last step and the end of old connections: the message that announces it is on one, seconds."""
RETURN_S = 15.0
"""Time since its last message in which a host whose connection has ended is connected again, seconds."""
NO_FILE = "has its secret from ACSGD_SECRET, which cannot be replaced: start it with --rdzv-conf secret=PATH"


@dataclass
class _Rotation:
    """A rotation that has not ended on this host."""

    name: str
    secret: bytes
    initiator: str
    """Virtual address."""
    is_used: bool = False


class SecretRotation:
    """The part of this host in rotations. All methods are called in the event loop of the forwarder.

    file: with the secret; None if it has none. peers: the other hosts by virtual address. end_outdated: ends the
    connections of secrets that are not accepted. on_note: called with sentences for the user.
    """

    def __init__(
        self,
        identity: HostIdentity,
        file: Path | None,
        peers: Mapping[str, MeshPeer],
        end_outdated: Callable[[], None],
        on_note: Callable[[str], None],
    ) -> None:
        self._identity = identity
        self._file = file and file.resolve()  # a relative path, or a link, leads elsewhere later
        self._peers = peers
        self._end_outdated = end_outdated
        self._on_note = on_note
        self._current: _Rotation | None = None
        self._ended: str | None = None
        """Name of the latest rotation that has ended on this host."""
        self._former: set[bytes] = set()
        """Secrets that are not accepted any more."""
        self._answers: dict[str, Rotated] = {}
        """Answers to `_step`, by virtual address."""
        self._step: Rotate | None = None
        """What this host has requested last."""
        self._is_initiator = False
        self._answered = asyncio.Event()

    # The initiator.

    async def rotate(self) -> str:
        """Replace the secret on all hosts that are connected; return who has it, for the user.

        Raises ValueError, without a change, if a host cannot take part.
        """
        name, secret = secrets.token_hex(8), secrets.token_hex(24)
        members = [*filter(_is_present, self._peers.values())]
        if self._is_initiator:
            raise ValueError("this host replaces the secret already")
        self._is_initiator = True
        try:
            problems = self._try_here(lambda: self._accept(name, secret, self._identity.address))
            problems = problems or await self._let(members, Rotate(name, "accept", secret))
            if problems:
                self._cancel(name)
                self._send(members, Rotate(name, "cancel", ""))
                raise ValueError(f"the secret was not replaced: {'; '.join(problems)}")
            problems = self._try_here(lambda: self._use(name))
            problems += await self._let(members, Rotate(name, "use", ""))
            self._send(members, Rotate(name, "end", ""))
            self._end(name)
        finally:
            self._is_initiator = False
        hosts = "".join(f", {_describe(peer)}" for peer in members)
        notes = [f"the new secret is on this host{hosts}; any other host needs a copy of its file"]
        return "\n".join([*notes, *(f"{problem}: copy the file there" for problem in problems)])

    async def _let(self, members: list[MeshPeer], request: Rotate) -> list[str]:
        """Let hosts take a step, and wait until all have; return why some have not. Removes those that have gone."""
        self._answers.clear()
        while True:
            members[:] = filter(_is_present, members)
            awaited = [peer for peer in members if peer.member.address not in self._answers]
            if not awaited:
                break
            self._answered.clear()
            self._send(awaited, request)  # again, as a connection may have been replaced
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._answered.wait(), PING_S)
        problems = ((peer, self._answers[peer.member.address].problem) for peer in members)
        return [f"{_describe(peer)} {problem}" for peer, problem in problems if problem is not None]

    def _try_here(self, step: Callable[[], None]) -> list[str]:
        return [] if (problem := self._try(step)) is None else [f"this host {problem}"]

    def _send(self, members: list[MeshPeer], request: Rotate) -> None:
        self._step = request
        for peer in members:
            peer.send(request)

    def answered(self, peer: MeshPeer, answer: Rotated) -> None:
        """Note the answer of a host."""
        if self._step is not None and (answer.rotation, answer.step) == (self._step.rotation, self._step.step):
            self._answers[peer.member.address] = answer
            self._answered.set()

    # Every host.

    def take(self, peer: MeshPeer, request: Rotate) -> None:
        """Take the step that another host requests, and answer."""
        match request.step:
            case "accept":
                problem = self._try(lambda: self._accept(request.rotation, request.secret, peer.member.address))
            case "use":
                problem = self._try(lambda: self._use(request.rotation))
            case "end":
                self._end(request.rotation)
                return
            case "cancel":
                self._cancel(request.rotation)
                return
        peer.send(Rotated(request.rotation, request.step, problem))

    def greet(self, peer: MeshPeer) -> None:
        """Let a host that is connected again end a rotation that has ended here."""
        if self._ended is not None:
            peer.send(Rotate(self._ended, "end", ""))

    def notice(self, transport: asyncio.BaseTransport) -> None:
        """Use a secret that this host has accepted, if the other end of a connection has proved to use it already.

        This host was not connected to the initiator when that requested it.
        """
        current = self._current
        if current is not None and self._identity.secret_of(transport) == current.secret:
            self._try(lambda: self._use(current.name))

    def _try(self, step: Callable[[], None]) -> str | None:
        """Take a step; return why that is not possible."""
        try:
            step()
        except OSError as error:
            problem = f"cannot write {self._file} ({error.strerror})"
        except ValueError as error:
            problem = str(error)
        else:
            return None
        self._on_note(f"mesh: this host {problem}")
        return problem

    def _accept(self, name: str, secret: str, initiator: str) -> None:
        current = self._current
        if current is not None:
            if current.name == name:
                return
            if current.initiator != initiator and self._is_connected(current.initiator):
                raise ValueError(f"takes part in a rotation that {current.initiator} has begun: try again later")
        if self._file is None:
            raise ValueError(NO_FILE)
        if check_secret(secret.encode()) in self._former:
            raise ValueError("has had that secret before")
        new = self._new_file
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{secret}\n")
            file.flush()
            os.fsync(file.fileno())
        self._current = _Rotation(name, secret.encode(), initiator)
        self._identity.set_secrets(*self._identity.secrets, secret.encode())

    def _use(self, name: str) -> None:
        """Raises OSError if the file cannot be replaced; the new secret is used nevertheless."""
        current = self._current
        if current is None or current.name != name:
            if self._ended == name:
                return
            raise ValueError("has not taken part in the rotation from its beginning: copy the file from another host")
        if not current.is_used:
            current.is_used = True
            self._identity.set_secrets(current.secret, *self._identity.secrets)
            assert self._file is not None
            os.replace(self._new_file, self._file)
            fsync_directory(self._file.parent)
            self._on_note(f"mesh: {self._file} has a new secret of the run")

    def _end(self, name: str) -> None:
        if self._current is not None and self._current.name == name:
            self._try(lambda: self._use(name))
            self._former |= {*self._identity.secrets} - {self._current.secret}
            self._identity.set_secrets(self._current.secret)
            self._current, self._ended = None, name
            asyncio.get_running_loop().call_later(END_S, self._end_outdated)

    def _cancel(self, name: str) -> None:
        current = self._current
        if current is not None and current.name == name and not current.is_used:
            self._identity.set_secrets(*(each for each in self._identity.secrets if each != current.secret))
            self._new_file.unlink(missing_ok=True)
            self._current = None

    @property
    def _new_file(self) -> Path:
        """A file of this host alone: the file of the secret may be on a disk that hosts share."""
        assert self._file is not None
        return self._file.with_name(f".{self._file.name}.{self._identity.address}")

    def _is_connected(self, address: str) -> bool:
        peer = self._peers.get(address)
        return self._is_initiator if peer is None else peer.lines is not None


def _is_present(peer: MeshPeer) -> bool:
    """Return whether a host is connected, or may be so again: a process that has ended has no key any more."""
    return peer.lines is not None or (not peer.ended and time.monotonic() - peer.heard_at < RETURN_S)


def _describe(peer: MeshPeer) -> str:
    return f"{peer.member.name} ({peer.member.address})"
