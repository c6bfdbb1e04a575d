"""torchrun's side: `torchrun --rdzv-backend acsgd` starts the daemon of this host; any torchrun ends with our errors.

To torchrun, each host is a run of its own. So it never restarts workers because another host joins or fails, and no
store is shared. Which hosts take part is decided between the daemons.
"""

from __future__ import annotations

import atexit
import errno
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from signal import SIGTERM
from types import TracebackType
from typing import Any

from torch.distributed import HashStore
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from acsgd.comm.addresses import find_address, find_interface, parse_endpoints, split_address
from acsgd.elastic.host.daemon import Daemon
from acsgd.elastic.host.joining import DaemonOptions
from acsgd.errors import explain
from acsgd.failures.report import REPORTED, print_error
from acsgd.launch import is_restart_forbidden, publish_daemon, run_secret

START_ATTEMPTS = 10
"""Number of addresses that a host tries."""


class AcsgdRendezvous(RendezvousHandler):
    """Rendezvous of one host with itself; starts the daemon that finds the other hosts."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._parameters = parameters
        self._daemon: Daemon | None = None
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
                self._daemon, self._socket = _start_daemon(self._parameters)
            except (OSError, ValueError) as error:
                print_error(explain(error) or str(error))
                raise SystemExit(2) from None
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


def _start_daemon(parameters: RendezvousParameters) -> tuple[Daemon, Path]:
    """Start the daemon at an address that is free; return it and the path of its socket. Raises OSError, ValueError."""
    endpoints = parse_endpoints(parameters.endpoint)
    directory = Path(tempfile.mkdtemp(prefix="acsgd-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    for attempt in range(START_ATTEMPTS):
        address = find_address(endpoints, parameters.local_addr)
        options = DaemonOptions(
            run=parameters.run_id,
            address=address,
            endpoints=endpoints,
            secret=(run_secret() or parameters.run_id).encode(),
            min_hosts=parameters.min_nodes,
            max_hosts=parameters.max_nodes,
        )
        path = directory / str(attempt)
        daemon = Daemon(options, path)
        try:
            daemon.start()
        except OSError as error:
            if error.errno == errno.EADDRINUSE and attempt < START_ATTEMPTS - 1:
                continue  # another torchrun of this machine took the port meanwhile
            raise
        break
    others = [each for each in endpoints if each != address]
    publish_daemon(path, interface=find_interface(split_address(address)[0], others))
    return daemon, path
