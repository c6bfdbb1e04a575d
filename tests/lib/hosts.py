"""Hosts of an elastic run on this machine, each a torchrun of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.lib.launched import ROOT, TRAIN, Run, running

CLOCK = """
import time

real, real_ns = time.time, time.time_ns
time.time = lambda: real() + {clock_s}
time.time_ns = lambda: real_ns() + int({clock_s} * 10**9)
"""
"""Shifts the clock of all Python processes of a host."""
LIMIT_S = 150.0


class Hosts:
    """Hosts of one elastic run. flags: of all of them."""

    def __init__(self, directory: Path, run_file: Path, stack: ExitStack, workers: int, flags: tuple[str, ...]) -> None:
        self._directory, self._run_file, self._stack = directory, run_file, stack
        self._workers, self._flags = workers, flags
        self.run_dir = directory / "run"
        with ExitStack() as ports:
            servers = [ports.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
            self._endpoints = ",".join(f"127.0.0.1:{server.getsockname()[1]}" for server in servers)

    def start(self, name: str, *, min_hosts: int = 1, clock_s: float = 0.0, restarts: int = 3) -> Run:
        """Start a host, or start it again.

        clock_s: by how much its clock is ahead; restarts: how often torchrun starts its workers again.
        """
        (cwd := self._directory / name).mkdir(exist_ok=True)
        (cwd / "sitecustomize.py").write_text(CLOCK.format(clock_s=clock_s))
        command = ["env", f"PYTHONPATH={cwd}:{ROOT}", sys.executable, "-m", "torch.distributed.run"]
        command += ["--nnodes", f"{min_hosts}:4", "--nproc-per-node", str(self._workers)]
        command += ["--max-restarts", str(restarts), "--monitor-interval", "0.1"]
        command += ["--rdzv-backend", "acsgd", "--rdzv-endpoint", self._endpoints, "--rdzv-id", "test"]
        command += [TRAIN, str(self._run_file), "--log.dir", str(self.run_dir), *self._flags]
        return self._stack.enter_context(running(command, cwd))

    def lines(self) -> list[dict[str, Any]]:
        """Return the complete lines of metrics.jsonl."""
        file = self.run_dir / "metrics.jsonl"
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.lines() if "step" in line]

    def events(self) -> list[dict[str, Any]]:
        return [line for line in self.lines() if "event" in line]

    def lease_holder(self) -> int:
        """Return the process that holds the lease on the run directory."""
        (lease,) = (self.run_dir / ".lock").iterdir()
        pid: int = json.loads(lease.read_text())["pid"]
        return pid

    def wait_for_step(self, host: Run, step: int) -> int:
        """Wait until a step is complete; return the number of complete steps."""
        host.wait_until(lambda: len(self.steps()) >= step, LIMIT_S)
        return len(self.steps())

    def wait_for_replicas(self, host: Run, replicas: int) -> None:
        """Wait until the run trains with a number of replicas."""
        host.wait_until(lambda: self.events() and self.events()[-1]["replicas"] == replicas, LIMIT_S)


def kill(host: Run) -> None:
    """End a host as a power failure does: all of its processes at once."""
    for pid in host.environments():
        os.kill(pid, signal.SIGKILL)
