"""The store of a view, with which its workers open their groups. Each worker has one ready, in case it gets rank 0."""

from __future__ import annotations

import os
import select
import socket
from datetime import timedelta

import torch.distributed as dist

from acsgd.errors import RunError, reason
from acsgd.store import call_in_thread
from acsgd.waits import Waits

STORE_TIMEOUT_S = 8.0
"""Time to connect to the store of a view, seconds."""


def open_store() -> dist.TCPStore:
    """Open a store on a free port of this host."""
    timeout = timedelta(seconds=STORE_TIMEOUT_S)
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timeout)


def connect_store(host: str, port: int, waits: Waits) -> dist.TCPStore:
    """Connect to the store of a view. Raises RunError if its host does not answer, WaitInterruptedError."""
    try:
        _check_that_it_listens(host, port, waits)
        timeout = timedelta(seconds=STORE_TIMEOUT_S)
        return call_in_thread(
            lambda: dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout),
            timeout_s=STORE_TIMEOUT_S,
            waits=waits,
        )
    except (OSError, RuntimeError) as error:
        cause = reason(error) or f"no answer in {STORE_TIMEOUT_S:g} s"
        raise RunError(f"the store of rank 0 at {host}:{port} cannot be reached ({cause})", awaited=[0]) from error


def _check_that_it_listens(host: str, port: int, waits: Waits) -> None:
    """Raise OSError if no process listens at an address, WaitInterruptedError.

    A store was opened before its port was announced. But the client of torch tries again for the whole timeout if
    its port is closed.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setblocking(False)
        probe.connect_ex(address)
        if not waits.poll(lambda slice_s: bool(select.select([], [probe], [], slice_s)[1]), STORE_TIMEOUT_S):
            raise TimeoutError(f"no answer in {STORE_TIMEOUT_S:g} s")
        if error := probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(error, os.strerror(error))
