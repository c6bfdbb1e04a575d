"""Elastic runs under real torchrun agents: hosts end, join and leave, and the losses are those of a calm run."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from acsgd.config.run_file import parse
from tests.lib.forks import finish
from tests.lib.launched import ROOT, TRAIN, Run, running

TinyModel = Callable[..., Path]
STEPS = 120
YEAR_S = 365 * 86400.0
CLOCK = """
import time

real, real_ns = time.time, time.time_ns
time.time = lambda: real() + {clock_s}
time.time_ns = lambda: real_ns() + int({clock_s} * 10**9)
"""
"""Shifts the clock of all Python processes of a host."""
LIMIT_S = 150.0


class Hosts:
    """Hosts of one elastic run, each a torchrun of its own on this machine."""

    def __init__(self, directory: Path, run_file: Path, stack: ExitStack, workers: int, flags: tuple[str, ...]) -> None:
        self._directory, self._run_file, self._stack = directory, run_file, stack
        self._workers, self._flags = workers, flags
        self.run_dir = directory / "run"
        with ExitStack() as ports:
            servers = [ports.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
            self._endpoints = ",".join(f"127.0.0.1:{server.getsockname()[1]}" for server in servers)

    def start(self, name: str, *, min_hosts: int = 1, clock_s: float = 0.0) -> Run:
        """Start a host, or start it again. clock_s: by how much its clock is ahead."""
        (cwd := self._directory / name).mkdir(exist_ok=True)
        (cwd / "sitecustomize.py").write_text(CLOCK.format(clock_s=clock_s))
        command = ["env", f"PYTHONPATH={cwd}:{ROOT}", sys.executable, "-m", "torch.distributed.run"]
        command += ["--nnodes", f"{min_hosts}:4", "--nproc-per-node", str(self._workers)]
        command += ["--max-restarts", "3", "--monitor-interval", "0.1"]
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


@pytest.fixture
def run_file(tiny_model: TinyModel, tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(
        f"""
        [model]
        name = "{tiny_model()}"
        [data]
        sources = "demo"
        sequence = 32
        batch = 8
        [pp]
        micro = 1
        [optim]
        lr = 1e-3
        steps = {STEPS}
        [run]
        timeout = 60
        [log]
        to = "jsonl,print"
        """
    )
    return path


def kill(host: Run) -> None:
    """End a host as a power failure does: all of its processes at once."""
    for pid in host.environments():
        os.kill(pid, signal.SIGKILL)


def assert_same_losses(hosts: Hosts, run_file: Path, tmp_path: Path, *flags: str) -> None:
    """Check that each step was completed once, with the loss of one process that nothing disturbs."""
    finish(parse([str(run_file), "--log.dir", str(tmp_path / "calm"), "--log.to", "jsonl", *flags]), 1)
    calm = [json.loads(line) for line in (tmp_path / "calm/metrics.jsonl").read_text().splitlines()]
    steps = hosts.steps()
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert [line["tokens"] for line in steps] == [line["tokens"] for line in calm]
    losses, expected = (torch.tensor([line["loss"] for line in each]) for each in (steps, calm))
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)


def test_a_run_of_which_hosts_end_join_and_leave_is_the_calm_run(run_file: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        hosts = Hosts(tmp_path, run_file, stack, 1, ("--elastic.min_replicas", "2", "--checkpoint.every", "40"))
        clocks = {"a": 0.0, "b": -60.0, "c": YEAR_S}  # which nothing compares
        a, b, c = (hosts.start(name, min_hosts=3, clock_s=clock_s) for name, clock_s in clocks.items())
        hosts.wait_for_step(b, 3)
        worker = next(iter(c.ranks().values()))
        kill(a)  # it has the first endpoint, and probably rank 0
        hosts.wait_for_step(b, len(hosts.steps()) + 3)
        assert hosts.events()[-1]["left"], "the run has not noticed"
        assert hosts.lease_holder() in [*b.ranks().values(), *c.ranks().values()]

        os.kill(next(iter(b.ranks().values())), signal.SIGKILL)  # c waits for it, then sends its state
        hosts.wait_for_step(c, len(hosts.steps()) + 3)
        assert hosts.events()[-1]["copies"] == 1

        os.kill(b.process.pid, signal.SIGINT)  # b leaves; c waits again
        b.process.wait(LIMIT_S)
        assert next(iter(c.ranks().values())) == worker, "c was not disturbed"
        a = hosts.start("a2")
        assert a.process.wait(LIMIT_S) == 0
        assert c.process.wait(LIMIT_S) == 0
        assert next(iter(hosts.events()[-1]["joined"])), "the new host has not joined"
        assert not a.errors + b.errors + c.errors
        assert not a.environments() | c.environments()
        recoveries = [event["recovery_s"] for event in hosts.events()[1:]]
        assert len(recoveries) >= 3
        assert_same_losses(hosts, run_file, tmp_path)


def test_stages_on_hosts_that_hang_and_end(run_file: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        flags = ("--pp.stages", "2", "--elastic.hang", "3", "--elastic.silence", "2")
        hosts = Hosts(tmp_path, run_file, stack, 2, flags)
        a, b = (hosts.start(name, min_hosts=2) for name in "ab")
        hosts.wait_for_step(a, 3)
        stopped = next(iter(b.ranks().values()))
        os.kill(stopped, signal.SIGSTOP)
        started = time.monotonic()
        hosts.wait_for_replicas(a, 1)
        assert time.monotonic() - started < 30
        kill(b)
        assert a.process.wait(LIMIT_S) == 0
        assert not a.errors
        assert_same_losses(hosts, run_file, tmp_path)


def test_an_error_in_the_options_is_printed_once_and_workers_are_not_started_again(
    run_file: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        model = tmp_path / "none"
        host = Hosts(tmp_path, run_file, stack, 2, ("--model.name", str(model))).start("a")
        assert host.process.wait(LIMIT_S) == 2
        assert host.errors == [
            f"error: model.name={model} is not a directory; give a directory or a Hugging Face id, owner/name"
        ]
        assert "Traceback" not in host.stderr
