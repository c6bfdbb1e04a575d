"""torchrun's side: `torchrun --rdzv-backend acsgd` starts the daemon of this host.

To torchrun, each host is a run of its own. So it never restarts workers because another host joins or fails, and no
store is shared. Which hosts take part is decided between the daemons.
"""

from __future__ import annotations

import errno
import socket
import tempfile
from pathlib import Path

from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from acsgd.elastic.daemon import Daemon
from acsgd.elastic.joining import DaemonOptions
from acsgd.errors import explain
from acsgd.launch import is_restart_forbidden, publish_daemon, run_secret
from acsgd.run.error_report import print_error

DEFAULT_PORT = 29400
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
    """Return the handler. Entry point of torchrun."""
    return AcsgdRendezvous


def _start_daemon(parameters: RendezvousParameters) -> tuple[Daemon, Path]:
    """Start the daemon at an address that is free; return it and the path of its socket. Raises OSError, ValueError."""
    endpoints = parse_endpoints(parameters.endpoint)
    directory = Path(tempfile.mkdtemp(prefix="acsgd-"))
    for attempt in range(START_ATTEMPTS):
        options = DaemonOptions(
            run=parameters.run_id,
            address=find_address(endpoints, parameters.local_addr),
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
    publish_daemon(path)
    return daemon, path


def parse_endpoints(text: str) -> tuple[str, ...]:
    """Return host:port of each endpoint of --rdzv-endpoint. Raises ValueError that says what to type."""
    endpoints = []
    for part in text.split(","):
        host, colon, port = part.strip().rpartition(":")
        if not colon:
            host, port = port, str(DEFAULT_PORT)
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(
                f"--rdzv-endpoint={text}: {part.strip() or 'an empty part'} is not host:port; give one or more hosts, "
                f"such as hostA:{DEFAULT_PORT},hostB:{DEFAULT_PORT}"
            )
        endpoints.append(f"{host}:{port}")
    return tuple(dict.fromkeys(endpoints))


def find_address(endpoints: tuple[str, ...], local_address: str | None) -> str:
    """Return host:port at which other hosts reach this one.

    It is the first endpoint that is this host's and whose port is free; else a free port of `local_address` (torchrun's
    --local-addr), or of the address from which this host reaches the first endpoint. Raises OSError if it reaches none.
    """
    for endpoint in endpoints:
        host, _, port = endpoint.rpartition(":")
        if _can_bind(host, int(port)):
            return endpoint
    host = local_address or _address_towards(endpoints)
    with socket.create_server((host, 0)) as server:
        return f"{host}:{server.getsockname()[1]}"


def _can_bind(host: str, port: int) -> bool:
    """Return whether an address is of this host, and nothing listens there."""
    try:
        with socket.create_server((host, port)):
            return True
    except OSError:
        return False


def _address_towards(endpoints: tuple[str, ...]) -> str:
    errors = []
    for endpoint in endpoints:
        host, _, port = endpoint.rpartition(":")
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((host, int(port)))  # sends nothing
                address: str = probe.getsockname()[0]
                return address
        except OSError as error:
            errors.append(f"{endpoint}: {error}")
    raise OSError(f"no endpoint of --rdzv-endpoint can be reached ({'; '.join(errors)})")
