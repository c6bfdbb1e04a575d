"""Hosts of an elastic run on this machine, each a torchrun of its own."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from tests.lib.forked_torchrun import ForkedTorchrun, Host, Setup, forked_torchrun, nothing
from tests.lib.launched import TRAIN
from tests.lib.ports import free_addresses

LIMIT_S = 150.0
SECRET = "ACSGD_SECRET"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


class Hosts:
    """Hosts of one elastic run.

    workers: of each host; flags: of all hosts; endpoints: of hosts on a network of their own; has_own_disks: whether
    hosts do not share the run directory.
    """

    def __init__(
        self,
        directory: Path,
        run_file: Path,
        stack: ExitStack,
        workers: int,
        flags: tuple[str, ...],
        *,
        endpoints: Sequence[str] = (),
        has_own_disks: bool = False,
    ) -> None:
        self._directory, self._run_file, self._stack = directory, run_file, stack
        self._workers, self._flags = workers, flags
        self._has_own_disks = has_own_disks
        self.run_dir = directory / "run"
        """That which is read, also if each host has its own."""
        self.endpoints = list(endpoints) or free_addresses(2)

    def start(
        self,
        name: str,
        *,
        min_hosts: int = 1,
        restarts: int = 3,
        clock_s: float = 0.0,
        agent: Setup = nothing,
        worker: Setup = nothing,
        namespace: str | None = None,
        secret: str | None = None,
        conf: str = "",
        disk: str = "",
        flags: Sequence[str] = (),
    ) -> ForkedTorchrun:
        """Start a host.

        restarts: how often torchrun starts its workers again; clock_s: by how much its clock is ahead; agent, worker:
        run first in the process of torchrun and in those of the workers; conf: torchrun's --rdzv-conf; disk: name of
        the host whose own disk it gets, by default an empty one; flags: of this host.
        """
        (directory := self._directory / name).mkdir()
        if disk:
            (directory / "run").symlink_to(self.disk_of(disk))
        arguments = ["--nnodes", f"{min_hosts}:4", "--nproc-per-node", str(self._workers)]
        arguments += ["--max-restarts", str(restarts), "--monitor-interval", "0.1"]
        arguments += ["--rdzv-backend", "acsgd", "--rdzv-endpoint", ",".join(self.endpoints), "--rdzv-id", "test"]
        arguments += ["--rdzv-conf", conf] if conf else []
        run_dir = "run" if self._has_own_disks else str(self.run_dir)
        arguments += [TRAIN, str(self._run_file), "--log.dir", run_dir, *self._flags, *flags]
        if clock_s:
            agent, worker = partial(_shift_clock, clock_s, agent), partial(_shift_clock, clock_s, worker)
        environment = ENVIRONMENT | ({SECRET: secret} if secret is not None else {})
        host = Host(arguments, environment, directory, namespace, agent, worker)
        return self._stack.enter_context(forked_torchrun(host))

    def disk_of(self, name: str) -> Path:
        """Return the run directory on the disk of a host."""
        return self._directory / name / "run"

    def lines(self) -> list[dict[str, Any]]:
        """Return the complete lines of metrics.jsonl."""
        file = self.run_dir / "metrics.jsonl"
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.lines() if "step" in line]

    def events(self) -> list[dict[str, Any]]:
        """Return the events of new views."""
        return [line for line in self.lines() if "view" in line]

    def hosts_that(self, event: str) -> list[str]:
        """Return the addresses of the hosts that "hung", "left" or "joined", in order."""
        return [line["host"] for line in self.lines() if line.get("event") == event]

    def lease_holder(self) -> int:
        """Return the process that holds the lease on the run directory."""
        (lease,) = (self.run_dir / ".lock").iterdir()
        pid: int = json.loads(lease.read_text())["pid"]
        return pid

    def wait_for_step(self, host: ForkedTorchrun, step: int) -> int:
        """Wait until a step is complete; return the number of complete steps."""
        host.wait_until(lambda: len(self.steps()) >= step, LIMIT_S)
        return len(self.steps())

    def wait_for_replicas(self, host: ForkedTorchrun, replicas: int) -> None:
        """Wait until the run has trained with a number of replicas."""
        host.wait_until(lambda: any(event["replicas"] == replicas for event in self.events()), LIMIT_S)


def _shift_clock(seconds: float, then: Setup) -> None:
    """Shift the clock of this process."""
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + seconds
    time.time_ns = lambda: real_ns() + int(seconds * 10**9)
    then()
