"""Processes of tests, forked from a server that has imported everything but started no threads.

A process that has threads, such as that of the tests, must not be forked: a lock that a thread holds at that moment
stays locked in the new process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

from tests.lib import patience

PRELOAD = ["tests.lib.preload"]
WAIT_S = patience.NO_LIMIT_S
"""Maximum time to wait for a process that does not hang, seconds: the limit of the test is shorter."""

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(PRELOAD)
DIRECTORY = "ACSGD_TEST_SHARED"
"""Environment variable with the directory of what all tests share, also those of other processes: see lib/shared.py."""
SERVER = "ACSGD_TEST_SERVER"
"""Environment variable with the address of the server that other processes of these tests share."""


def start_shared_server() -> None:
    """Start the server, and let all processes that this one starts from now on use it. It ends with this process.

    Each server imports for as long as ten seconds. Not from Python 3.14 on, where a server forks only for the process
    that has started it: each process has its own, then.
    """
    if sys.version_info < (3, 14):
        forkserver.ensure_running()
        os.environ[SERVER] = forkserver._forkserver._forkserver_address


def _use_shared_server(address: str) -> None:
    server: Any = forkserver._forkserver
    server._forkserver_address, server._forkserver_alive_fd = address, os.open(os.devnull, os.O_RDONLY)
    server.ensure_running = resource_tracker.ensure_running  # the server is no child of this process


if SERVER in os.environ:
    _use_shared_server(os.environ[SERVER])


@contextlib.contextmanager
def started(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[BaseProcess]:
    """Run a module-level function in a process, which is killed on exit."""
    process = CONTEXT.Process(target=function, args=args, kwargs=kwargs, daemon=True)
    process.start()
    try:
        yield process
    finally:
        kill(process)


def kill(process: BaseProcess) -> None:
    """Kill a process, and wait for its end."""
    process.kill()
    process.join(WAIT_S)


def wait_until(condition: Callable[[], object], process: BaseProcess) -> None:
    """Wait until a condition is true. Raises AssertionError if the process has ended, or takes far too long."""

    def is_true() -> bool:
        assert process.is_alive()
        return bool(condition())

    patience.wait_until(is_true)


def wait_for_a_signal() -> NoReturn:
    """Wait to be killed or interrupted. (After signal.pause, a signal just before it would be waited for forever.)"""
    while True:
        time.sleep(0.01)
