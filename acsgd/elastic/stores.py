"""The store of a view, with which its workers open their groups. Each worker has one ready, in case it gets rank 0."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from acsgd.errors import RunError, reason

STORE_TIMEOUT_S = 8.0
"""Time to connect to the store of a view, seconds."""


def open_store() -> dist.TCPStore:
    """Open a store on a free port of this host."""
    timeout = timedelta(seconds=STORE_TIMEOUT_S)
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timeout)


def connect_store(host: str, port: int) -> dist.TCPStore:
    """Connect to the store of a view. Raises RunError if its host does not answer."""
    try:
        timeout = timedelta(seconds=STORE_TIMEOUT_S)
        return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    except RuntimeError as error:
        raise RunError(
            f"the store of rank 0 at {host}:{port} cannot be reached ({reason(error)})", awaited=[0]
        ) from error
