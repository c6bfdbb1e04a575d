"""torchrun's side: `torchrun --rdzv-backend acsgd` starts the daemon of this host; any torchrun ends with our errors.

To torchrun, each host is a run of its own. So it never restarts workers because another host joins or fails, and no
store is shared. Which hosts take part is decided between the daemons.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from signal import SIGTERM
from types import TracebackType
from typing import Any

from torch.distributed import HashStore
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from acsgd.comm.addresses import (
    LOOPBACK,
    find_address,
    find_interface,
    is_public,
    join_address,
    listen,
    listen_everywhere,
    parse_endpoints,
    split_address,
)
from acsgd.elastic.host.daemon import Daemon
from acsgd.elastic.host.joining import DaemonOptions
from acsgd.elastic.host.transport import Rejection
from acsgd.errors import explain
from acsgd.failures.report import REPORTED, print_error
from acsgd.io.files.cache import LEFTOVER_S
from acsgd.launch import is_restart_forbidden, publish_daemon, publish_mesh, run_secret
from acsgd.mesh.identity import NEW_SECRET, read_secret
from acsgd.mesh.mesh import DIRECTORY, SOCKET, Mesh, MeshOptions
from acsgd.notes import print_note

START_ATTEMPTS = 10
"""Number of addresses that a host tries."""


class AcsgdRendezvous(RendezvousHandler):
    """Rendezvous of one host with itself; starts the daemon that finds the other hosts."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._parameters = parameters
        self._daemon: Daemon | None = None
        self._mesh: Mesh | None = None
        self._socket: Path

    def get_backend(self) -> str:
        return "acsgd"

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Start the daemon, or let torchrun start the workers again. Raises SystemExit if that is useless."""
        if self._daemon is None:
            try:
                self._daemon, self._mesh, self._socket = _start_daemon(self._parameters)
            except (OSError, ValueError) as error:
                print_error(explain(error) or str(error))
                raise SystemExit(2) from None
            _shorten_stop(self._parameters.run_id, self.shutdown)
        elif is_restart_forbidden(self._socket):
            raise SystemExit(2)
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("localhost", 0))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0  # torchrun restarts the workers if any node waits

    def get_run_id(self) -> str:
        return self._parameters.run_id

    def shutdown(self) -> bool:
        if self._daemon is not None:
            self._daemon.stop()
        if self._mesh is not None:
            self._mesh.stop()
        return True


def rendezvous_handler() -> type[AcsgdRendezvous]:
    """Return the handler. Entry point of torchrun, which calls it whatever the backend is."""
    _shorten_summary()
    return AcsgdRendezvous


def _shorten_summary() -> None:
    """Let torchrun end with the error that workers have recorded, without a traceback and a block per worker.

    What it reports of other programs stays as it is.
    """
    former = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, ChildFailedError) and (text := _summary(error.failures)) is not None:
            print(text, file=sys.stderr)
        else:
            former(kind, error, trace)

    sys.excepthook = hook


def _shorten_stop(run: str, shutdown: Callable[[], object]) -> None:
    """Let torchrun of an elastic run end after a signal with a sentence and the exit code of a shell.

    shutdown: of the rendezvous, which torchrun does not call after a signal: threads of the daemon that run while the
    interpreter ends fail and print that.
    """
    former = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, SignalException):
            former(kind, error, trace)
            return
        shutdown()
        print(f"\ntorchrun: {error.sigval.name}: this host has left run {run}", file=sys.stderr)
        raise SystemExit(128 + error.sigval)

    sys.excepthook = hook


def _summary(failures: Mapping[int, ProcessFailure]) -> str | None:
    """Return the exit codes of the workers that torchrun has not ended itself, and their error; None without one."""
    errors = {rank: error for rank, each in failures.items() if (error := _recorded(each.message)) is not None}
    if not errors:
        return None
    first = min(errors, key=lambda rank: failures[rank].timestamp)
    codes: dict[int, list[str]] = {}
    for rank, each in sorted(failures.items()):
        if each.exitcode != -SIGTERM:
            codes.setdefault(each.exitcode, []).append(str(rank))
    ended = "; ".join(f"{code} of rank {', '.join(ranks)}" for code, ranks in codes.items())
    return f"\ntorchrun: exit code {ended}\nrank {first}: error: {errors[first]}"


def _recorded(message: Any) -> str | None:
    """Return the text that a worker has recorded as its error file has it; None if none has."""
    return message["extraInfo"].get(REPORTED) if isinstance(message, dict) else None


def _start_daemon(parameters: RendezvousParameters) -> tuple[Daemon, Mesh | None, Path]:
    """Start the daemon and, if wanted, the mesh; return them and the path of the daemon's socket.

    Raises OSError, ValueError.
    """
    endpoints = parse_endpoints(parameters.endpoint)
    directory = _temporary_directory()
    secret = _secret(parameters)
    if _wants_mesh(parameters, endpoints):
        return _start_in_mesh(parameters, endpoints, secret, directory)
    for attempt in range(START_ATTEMPTS):
        address = find_address(endpoints, parameters.local_addr)
        path = directory / str(attempt)
        daemon = Daemon(_options(parameters, address, endpoints, secret or parameters.run_id.encode()), path)
        try:
            daemon.start()
        except OSError as error:
            if error.errno == errno.EADDRINUSE and attempt < START_ATTEMPTS - 1:
                continue  # another torchrun of this machine took the port meanwhile
            raise
        break
    others = [each for each in endpoints if each != address]
    publish_daemon(path, interface=find_interface(split_address(address)[0], others))
    if parameters.get("mesh") is None and any(split_address(each)[0] not in LOOPBACK for each in others):
        print_note(
            f"run {parameters.run_id}: what hosts send to each other is not encrypted, since their addresses are "
            "private; --rdzv-conf mesh=true encrypts it"
        )
    return daemon, None, path


def _temporary_directory() -> Path:
    """Return a new directory for the sockets of this host, and remove those of this user's hosts that were killed."""
    directory = Path(tempfile.mkdtemp(prefix=DIRECTORY))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    with contextlib.suppress(OSError):  # a file system without locks
        _lock_directory(directory)
    for path in directory.parent.glob(f"{DIRECTORY}*"):
        with contextlib.suppress(OSError):  # of a host that runs, or removed meanwhile
            status = path.lstat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime >= LEFTOVER_S:
                descriptor = _lock_directory(path)
                shutil.rmtree(path)
                os.close(descriptor)
    return directory


def _lock_directory(path: Path) -> int:
    """Lock a directory until this process ends or closes the descriptor, which is returned. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _options(parameters: RendezvousParameters, address: str, endpoints: Sequence[str], secret: bytes) -> DaemonOptions:
    return DaemonOptions(
        run=parameters.run_id,
        address=address,
        endpoints=endpoints,
        secret=secret,
        min_hosts=parameters.min_nodes,
        max_hosts=parameters.max_nodes,
    )


def _secret(parameters: RendezvousParameters) -> bytes | None:
    """Return the secret of the run, from a file or from the environment; None if none is given.

    Raises OSError, ValueError.
    """
    path, text = parameters.get("secret"), run_secret()
    secret = read_secret(Path(path)) if path is not None else None if text is None else text.encode()
    if secret == b"":
        raise ValueError(f"{path or 'ACSGD_SECRET'} is empty: the run has no secret; make one with {NEW_SECRET}")
    return secret


def _wants_mesh(parameters: RendezvousParameters, endpoints: Sequence[str]) -> bool:
    """Return whether the run has a mesh: as --rdzv-conf decides; else if hosts are reached by public addresses."""
    wanted = parameters.get_as_bool("mesh")
    if wanted is None:
        wanted = is_public(endpoints)
    for key in ("announce", "listen"):
        if not wanted and parameters.get(key) is not None:
            raise ValueError(f"--rdzv-conf {key}={parameters.get(key)} is of a mesh, which is off; add mesh=true")
    return wanted


def _start_in_mesh(
    parameters: RendezvousParameters, endpoints: tuple[str, ...], secret: bytes | None, directory: Path
) -> tuple[Daemon, Mesh, Path]:
    """Start the daemon and the mesh beneath it. Raises OSError, ValueError."""
    if secret is None:
        raise ValueError(
            f"a run with a mesh needs a secret: {NEW_SECRET}, copy the file to all hosts, and add secret=PATH to "
            "--rdzv-conf, or set ACSGD_SECRET; on a trusted network, --rdzv-conf mesh=false does without"
        )
    listener, announced = _entrance(parameters, endpoints)
    daemon: Daemon

    def on_rejected(address: str, problem: str) -> None:
        daemon.reject(Rejection(address, problem, is_in_view=not mesh.precedes(address)))

    file = parameters.get("secret")
    options = MeshOptions(parameters.run_id, secret, file and Path(file), endpoints, listener, announced)
    mesh = Mesh(options, directory / SOCKET, on_rejected=on_rejected, on_note=print_note)
    address = join_address(mesh.address, mesh.daemon_port)
    path = directory / "daemon"
    # a secret by which daemons sign would have to be replaced, too; in a mesh, they know each other by their address
    options_of_daemon = _options(parameters, address, mesh.daemons, parameters.run_id.encode())
    daemon = Daemon(options_of_daemon, path, mesh.has_ended)
    daemon.start()
    mesh.start()
    publish_daemon(path, interface=None)
    publish_mesh(mesh.address, directory / SOCKET)
    return daemon, mesh, path


def _entrance(parameters: RendezvousParameters, endpoints: tuple[str, ...]) -> tuple[socket.socket | None, str | None]:
    """Return the socket at which this host accepts other hosts, and the address that it announces; None for none.

    Raises OSError, ValueError.
    """
    announced, listening = parameters.get("announce"), parameters.get("listen")
    if announced == "none":
        return None, None
    at = listening or announced or find_address(endpoints, parameters.local_addr)
    host, port = split_address(at)
    try:  # the own name of a host may resolve to a loopback address, as on Debian
        listener = listen(host, port) if listening or host in LOOPBACK else listen_everywhere(port)
    except OSError as error:
        raise ValueError(
            f"{at}: this host cannot listen there ({error.strerror}); give another --rdzv-conf listen="
        ) from error
    return listener, announced or at
