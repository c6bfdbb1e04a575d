"""The mesh of a host, which runs its forwarder in a thread, and the calls of the other processes of the host."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from acsgd.comm.addresses import listen, split_address
from acsgd.mesh.forwarder import Forwarder, is_taken
from acsgd.mesh.identity import HostIdentity

T = TypeVar("T")

END_S = 5.0
"""Time for the thread to start or to end, seconds."""
DRAWS = 3
"""Number of keys that a host tries whose virtual address is taken."""
DIRECTORY, SOCKET = "acsgd-host-", "mesh"
"""Start of the name of the temporary directory of a host, and name of the socket of its mesh there."""
PROBLEM = "error: "
"""Start of an answer to a request that has failed."""
PUBLISH_S = 5.0
"""Time for an answer to `publish`, seconds."""


@dataclass(frozen=True)
class MeshOptions:
    """How a host takes part in a mesh."""

    run: str
    secret: bytes
    secret_file: Path | None
    """File of the secret, which `rotate` replaces; None if it has none."""
    endpoints: tuple[str, ...]
    """host:port of the hosts that a newcomer dials."""
    listener: socket.socket | None
    """Accepts connections of other hosts; None = this host has no port."""
    announced: str | None
    """host:port at which other hosts dial this one; None = nowhere."""


class Mesh:
    """The forwarder of this host. Start it once; its thread ends with the process, or by `stop`.

    socket_path: where processes of this host connect, see `publish`; on_rejected: called, from the thread, with an
    address and why the process there cannot be of this mesh; on_note: called, from the thread, with sentences for the
    user.
    """

    def __init__(
        self,
        options: MeshOptions,
        socket_path: Path,
        *,
        on_rejected: Callable[[str, str], None],
        on_note: Callable[[str], None],
    ) -> None:
        self._options = options
        self._socket_path = socket_path
        self._on_rejected = on_rejected
        self._on_note = on_note
        self._identity = _draw_identity(options)
        self.address = self._identity.address
        """Virtual address of this host."""
        with listen(self.address) as server:
            self.daemon_port: int = server.getsockname()[1]
            """A free port for the daemon of this host."""
        self.daemons: list[str] = []
        """Addresses of the daemons at the endpoints, in their order, as far as they are known. Grows."""
        self._by_endpoint: dict[str, str] = {}
        if options.announced in options.endpoints:
            self._found(options.announced, f"{self.address}:{self.daemon_port}")
        self._loop: asyncio.AbstractEventLoop
        self._ended: asyncio.Event
        self.forwarder: Forwarder
        self._has_started = threading.Event()
        self._thread = threading.Thread(target=lambda: run_in_loop(self._main()), name="acsgd mesh", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()
        self._has_started.wait(END_S)

    def stop(self) -> None:
        """End all carried connections."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join(END_S)

    def has_ended(self, address: str) -> bool:
        """Return whether the process that listened at host:port, of another host, is known to have ended."""
        return self.forwarder.has_ended(*split_address(address))

    def precedes(self, endpoint: str) -> bool:
        """Return whether this host is at an endpoint before another one."""
        announced, endpoints = self._options.announced, self._options.endpoints
        return announced in endpoints and endpoint not in endpoints[: endpoints.index(announced) + 1]

    async def _main(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        options = self._options
        self.forwarder = forwarder = Forwarder(
            self._identity,
            secret_file=options.secret_file,
            announced=options.announced,
            daemon_port=self.daemon_port,
            dialed=tuple(each for each in options.endpoints if each != options.announced),
            on_endpoint=self._found,
            on_rejected=self._on_rejected,
            on_note=self._on_note,
        )

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.closing(writer):
                match await reader.readline():
                    case b"publish\n":
                        writer.write(" ".join(map(str, await forwarder.port_exchange.publish())).encode())
                    case b"run\n":
                        writer.write(options.run.encode())
                    case b"rotate\n":
                        try:
                            writer.write((await forwarder.rotation.rotate()).encode())
                        except ValueError as error:
                            writer.write(f"{PROBLEM}{error}".encode())

        server = await asyncio.start_unix_server(serve, self._socket_path)
        os.chmod(self._socket_path, 0o600)
        forwarder.start(options.listener)
        self._has_started.set()
        await self._ended.wait()
        server.close()
        forwarder.close()

    def _found(self, endpoint: str, daemon: str) -> None:
        """Note which daemon is at an endpoint. Two endpoints may lead to the same one."""
        self._by_endpoint[endpoint] = daemon
        found = [self._by_endpoint[each] for each in self._options.endpoints if each in self._by_endpoint]
        self.daemons[:] = dict.fromkeys(found)


def run_in_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in the event loop of uvloop where it is installed, else in that of asyncio; return its result."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    result: T = uvloop.run(main)
    return result


def _draw_identity(options: MeshOptions) -> HostIdentity:
    """Return an identity with a virtual address that is free, as far as the hosts at the endpoints know.

    Two hosts that start at the same moment can have equal ones; the forwarder notices that.
    """
    others = [each for each in options.endpoints if each != options.announced]
    for _ in range(DRAWS):
        identity = HostIdentity(options.secret, options.run)
        if not asyncio.run(is_taken(identity, others)):
            break
    return identity


def publish(socket_path: Path) -> set[int]:
    """Let the other hosts open the ports that have been opened at the virtual address of this host, and wait for that.

    socket_path: of the mesh of this host. Does nothing if that has ended. Returns the ports that another program has
    taken on another host: what connects to them there would reach that program.
    """
    with contextlib.suppress(OSError):
        return set(map(int, request(socket_path, "publish", PUBLISH_S).split()))
    return set()


def rotate(run: str | None) -> str:
    """Replace the secret of a run that has a host of this user on this machine; return which hosts have the new one.

    run: its name; None = the only one. Raises ValueError if that is not possible, OSError if that host ends meanwhile.
    """
    running = dict[str, Path]()
    for path in Path(tempfile.gettempdir()).glob(f"{DIRECTORY}*/{SOCKET}"):
        with contextlib.suppress(OSError):  # it has ended, or is of another user
            running[request(path, "run", PUBLISH_S)] = path
    names = ", ".join(sorted(running)) or "none"
    if run is None and len(running) == 1:
        (run,) = running
    if run not in running:
        problem = "give the name of a run" if run is None else f"no run {run} with a mesh"
        raise ValueError(f"{problem}; runs with a mesh, of this user on this host: {names}")
    if not (answer := request(running[run], "rotate", None)):
        raise ConnectionError("this host has ended meanwhile: type acsgd net rotate on another host of the run")
    return answer


def request(socket_path: Path, what: str, timeout_s: float | None) -> str:
    """Return the answer of the mesh of this host. Raises OSError; ValueError with a problem that it answers."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        connection.connect(str(socket_path))
        connection.sendall(f"{what}\n".encode())
        with connection.makefile() as file:
            answer = file.read()
    if answer.startswith(PROBLEM):
        raise ValueError(answer.removeprefix(PROBLEM))
    return answer
