"""torchft through the kill of a replica: three replicas of one process each, and its lighthouse, with its defaults."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

REPLICAS = 3
LIMIT_S = 120.0
WORKER = Path(__file__).with_name("torchft_worker.py")


def measure_torchft(
    python: Path, directory: Path, model: Path, rounds: int, report: Callable[[str], None]
) -> tuple[list[float], list[float]]:
    """Return the seconds from SIGKILL of a replica to the next step of others, and from its start to its first step.

    python: an interpreter that has torchft. Raises TimeoutError if there is no step for LIMIT_S.
    """
    directory.mkdir()
    with _lighthouse(python, directory) as address, contextlib.ExitStack() as stack:
        replicas = [Replica(python, directory, model, number, address, stack) for number in range(REPLICAS)]
        kills, joins = [], []
        for index in range(rounds):
            _wait_until(lambda: all(replica.replicas() == REPLICAS for replica in replicas))
            _wait_for_steps(replicas[0], 6)
            started = time.monotonic()
            replicas[-1].process.kill()
            replicas[-1].process.wait()
            kills.append(_next_step(replicas[:-1], started, REPLICAS - 1) - started)
            started = time.monotonic()
            replicas[-1].start()
            joins.append(_next_step(replicas[-1:], started, REPLICAS) - started)
            report(f"torchft, round {index + 1}: kill {kills[-1]:.2f}, join {joins[-1]:.2f}")
        return kills, joins


class Replica:
    """A process of torchft and its log."""

    def __init__(
        self, python: Path, directory: Path, model: Path, number: int, lighthouse: str, stack: contextlib.ExitStack
    ) -> None:
        self._directory, self._number = directory, number
        self._log = directory / f"steps-{number}"
        self._command = [str(python), str(WORKER), str(model), str(number), lighthouse, str(self._log)]
        self.process: subprocess.Popen[bytes]
        self.start()
        stack.callback(lambda: (self.process.kill(), self.process.wait()))

    def start(self) -> None:
        """Start it, or start it again."""
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with (self._directory / f"output-{self._number}").open("ab") as output:
            self.process = subprocess.Popen(self._command, env=environment, stdout=output, stderr=output)

    def lines(self) -> list[dict[str, Any]]:
        text = self._log.read_text() if self._log.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def replicas(self) -> int:
        """Number of replicas in its last step."""
        lines = self.lines()
        return lines[-1]["replicas"] if lines else 0


def _next_step(replicas: list[Replica], since: float, number: int) -> float:
    """Return the time of the first step with a number of replicas that is complete on one of these."""

    def times() -> list[float]:
        lines = [line for replica in replicas for line in replica.lines()]
        return [line["at"] for line in lines if line["at"] > since and line["replicas"] == number]

    _wait_until(times)
    return min(times())


def _wait_for_steps(replica: Replica, number: int) -> None:
    goal = len(replica.lines()) + number
    _wait_until(lambda: len(replica.lines()) >= goal)


def _wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"torchft has made no step for {LIMIT_S:g} s")
        time.sleep(0.005)


@contextlib.contextmanager
def _lighthouse(python: Path, directory: Path) -> Iterator[str]:
    """Start torchft's lighthouse; yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [str(python.with_name("torchft_lighthouse")), "--min_replicas", "1", "--bind", f"127.0.0.1:{port}"]
    with (directory / "lighthouse").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
