"""Faults of hosts and of their network: two hosts, which are network namespaces, with a torchrun of two ranks each."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from acsgd.io.checkpoint.inspect import inspect
from benchmarks.common import netlab
from tests.lib.forks import save_model
from tests.lib.launched import TRAIN, Run, running
from tests.soak.area import ACCEPTED, Case, Outcome, UnavailableError
from tests.soak.oracle import MAX_QUOTED, refusal
from tests.soak.runs import checkpoints

HOSTS, RANKS = 2, 2
"""Number of hosts, ranks per host."""
PORT = 29500
START_S = 240.0
"""Maximum time until training starts, seconds, on a busy machine."""
TIMEOUT_S = 8.0
"""run.timeout, seconds."""
MARGIN_S = 30.0
"""Time that torchrun may take to end ranks that do not react to SIGTERM, seconds."""
LIMIT_S = 2 * TIMEOUT_S + MARGIN_S + 15.0
"""Time within which all processes that can end must have ended after a fault, seconds: one timeout of a message, one of
the report, torchrun's patience, and what a busy machine takes."""
SLOW_DISK = """
import os, runpy, sys, time
fsync = os.fsync
def slow(descriptor):
    time.sleep(0.3)
    fsync(descriptor)
os.fsync = slow
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Program that runs another with a slow disk, so that a save takes some seconds."""
LAST_STEP = 60


class Network:
    """One run per case, of two stages and two replicas, with one fault.

    After a fault that must end the run, every process ends within LIMIT_S with one sentence per host; after one that
    the run must survive, training goes on, and SIGTERM ends it with a save. The newest checkpoint is always valid.
    """

    deadline_s: ClassVar[float] = START_S + 3 * LIMIT_S + 60
    memory_bytes: ClassVar[int] = 2**40

    @classmethod
    def prepare(cls, directory: Path) -> None:
        """Write a model. Raises UnavailableError if this machine or user cannot create network namespaces."""
        try:
            with netlab.lab(hosts=HOSTS):
                pass
        except (RuntimeError, OSError) as error:
            raise UnavailableError(str(error)) from None
        save_model(directory / "model")
        (directory / "slow_disk.py").write_text(SLOW_DISK)

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def run(self, case: Case) -> Outcome:
        """Start a run, inject a fault, and check how the run ends."""
        draw = case.draw
        fault = draw.choice(list(FAULTS))
        host = draw.randrange(HOSTS)
        delay_s = draw.choice([0.0, 0.0, 0.02]) if Path("/dev/net/tun").exists() else 0.0
        stages = draw.choice([1, 2, 4])
        wait_s = draw.uniform(0.0, 1.5)
        last_save = fault.endswith("during the last save")
        case.describe(f"{fault}, host {host}, {stages} stages, network delay {delay_s:g} s, {wait_s:.2f} s in")
        options = {
            "model.name": self._directory / "model",
            "data.sources": "demo",
            "data.sequence": 16,
            "data.batch": 16,
            "pp.micro": 2,
            "pp.stages": stages,
            "optim.lr": 1e-3,
            "optim.steps": LAST_STEP if last_save else 1_000_000,
            "checkpoint.every": 1000 if last_save else 20,
            "checkpoint.keep": 3,
            "log.dir": case.directory / "runs/run",
            "log.to": "jsonl,text",
            "run.timeout": TIMEOUT_S,
        }
        flags = [f"--{key}={value}" for key, value in options.items()]
        program = [str(self._directory / "slow_disk.py"), TRAIN] if last_save else [TRAIN]
        with (
            netlab.lab(hosts=HOSTS, delay_s=delay_s) as lab,
            _started(lab, [*program, *flags], case.directory) as hosts,
        ):
            scene = Scene(lab, hosts, host, case.directory / "runs/run")
            scene.wait_for_save() if last_save else scene.wait_for_steps(3)
            time.sleep(0.0 if last_save else wait_s)
            outcome = FAULTS[fault](scene)
            scene.check_checkpoints()
        return outcome


@dataclass
class Scene:
    """A run under way, and the host at which the fault happens."""

    lab: netlab.Lab
    hosts: list[Run]
    host: int
    run_dir: Path

    @property
    def run(self) -> Run:
        """torchrun and the ranks of the host with the fault."""
        return self.hosts[self.host]

    @property
    def other(self) -> int:
        """The host without the fault."""
        return 1 - self.host

    def steps(self) -> int:
        """Return the number of steps that metrics.jsonl has."""
        path = self.run_dir / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def wait_for_steps(self, number: int, limit_s: float = START_S) -> None:
        """Wait until that many more steps are done. Raises AssertionError if a host ends."""
        goal, deadline = self.steps() + number, time.monotonic() + limit_s
        while self.steps() < goal:
            assert time.monotonic() < deadline, f"no {number} steps within {limit_s:g} s: {self.output()}"
            assert all(run.process.poll() is None for run in self.hosts), f"the run ended: {self.output()}"
            time.sleep(0.05)

    def wait_for_save(self) -> None:
        """Wait until a checkpoint is being written."""
        deadline = time.monotonic() + START_S
        while not checkpoints(self.run_dir).leftovers():
            assert time.monotonic() < deadline, f"no save within {START_S:g} s: {self.output()}"
            assert all(run.process.poll() is None for run in self.hosts), f"the run ended: {self.output()}"
            time.sleep(0.005)

    def output(self) -> str:
        """Return the end of what each host printed."""
        return " | ".join(" ".join(run.stderr[-MAX_QUOTED:].split()) for run in self.hosts)

    def signal_torchrun(self, number: signal.Signals) -> None:
        """Send a signal to the torchrun of the host."""
        os.kill(_torchrun(self.run), number)

    def ended(self, hosts: list[int]) -> Outcome:
        """Wait until all processes of some hosts have ended, and check what they have printed."""
        self.wait_for_end(hosts)
        return self.reported(hosts)

    def wait_for_end(self, hosts: list[int], *, ranks_only: bool = False) -> None:
        """Wait until all processes, or all ranks, of some hosts have ended."""
        deadline = time.monotonic() + LIMIT_S
        for host in hosts:
            run = self.hosts[host]
            while left := run.ranks() if ranks_only else run.environments():
                run.process.poll()
                assert time.monotonic() < deadline, (
                    f"{len(left)} processes of host {host} run after {LIMIT_S:g} s: {self.output()}"
                )
                time.sleep(0.1)

    def reported(self, hosts: list[int]) -> Outcome:
        """Check that some hosts have printed one sentence each at most, together at least one."""
        errors = {host: self.hosts[host].errors for host in hosts}
        for host in hosts:
            ours = re.search(r'File "\S*/acsgd/(?!.*torch)\S*"', self.hosts[host].stderr)
            assert ours is None, f"host {host} prints a traceback: {self.output()}"
            assert len(errors[host]) <= 1, f"host {host} prints {len(errors[host])} errors: {errors[host]}"
        printed = [error for each in errors.values() for error in each]
        assert printed, f"no host says why: {self.output()}"
        outcomes = [refusal(error, ["rank", "torchrun", "store", "step-"]) for error in printed]
        return outcomes[0]

    def stopped(self) -> Outcome:
        """Check that training goes on, then that SIGTERM ends the run with a save."""
        self.wait_for_steps(2, LIMIT_S)
        for run in self.hosts:
            os.kill(_torchrun(run), signal.SIGTERM)
        self.wait_for_end([0, 1])
        errors = [error for run in self.hosts for error in run.errors]
        assert not errors, f"stopped with an error: {errors}"
        last = json.loads((self.run_dir / "metrics.jsonl").read_text().splitlines()[-1])["step"]
        steps = checkpoints(self.run_dir).steps()
        assert steps[-1:] == [last], f"stopped after step {last}, the checkpoints are {steps}"
        return ACCEPTED

    def check_checkpoints(self) -> None:
        """Check that all complete checkpoints are valid."""
        directory = checkpoints(self.run_dir)
        for step in directory.steps():
            (report,) = inspect(directory.of(step))
            assert not report.errors, f"a published checkpoint is corrupt: {report.errors}"


def _partition(scene: Scene) -> Outcome:
    scene.lab.cut(scene.host)
    return scene.ended([0, 1])


def _last_partition(scene: Scene) -> Outcome:
    scene.lab.cut(scene.host)
    scene.wait_for_end([0, 1])
    left = checkpoints(scene.run_dir).leftovers()
    assert not left, f"a half-written checkpoint was left: {[path.name for path in left]}"
    if checkpoints(scene.run_dir).steps():  # complete before the partition
        return ACCEPTED
    return scene.reported([0, 1])


def _short_outage(scene: Scene) -> Outcome:
    scene.lab.cut(scene.host)
    time.sleep(TIMEOUT_S / 4)
    scene.lab.heal(scene.host)
    return scene.stopped()


def _slow_network(scene: Scene) -> Outcome:
    for mbit in (1.0, 0.3, 5.0, None):
        scene.lab.limit(mbit)
        time.sleep(1.0)
    return scene.stopped()


def _killed_host(scene: Scene) -> Outcome:
    """Kill all processes of a host that can no longer send anything, as when its power fails."""
    scene.lab.cut(scene.host)
    while pids := scene.run.environments():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        scene.run.process.poll()
    return scene.ended([scene.other])


def _killed_torchrun(scene: Scene) -> Outcome:
    scene.signal_torchrun(signal.SIGKILL)
    return scene.ended([0, 1])


def _killed_rank(scene: Scene) -> Outcome:
    os.kill(min(scene.run.ranks().values()), signal.SIGKILL)
    return scene.ended([0, 1])


def _frozen_rank(scene: Scene) -> Outcome:
    os.kill(min(scene.run.ranks().values()), signal.SIGSTOP)
    return scene.ended([0, 1])


def _frozen_torchrun(scene: Scene) -> Outcome:
    """Freeze torchrun for longer than the timeout. Ranks may train on, or end; nothing may hang."""
    scene.signal_torchrun(signal.SIGSTOP)
    before = scene.steps()
    time.sleep(2 * TIMEOUT_S)
    trains = all(len(run.ranks()) == RANKS for run in scene.hosts) and scene.steps() > before
    if trains:
        scene.signal_torchrun(signal.SIGCONT)
        return scene.stopped()
    scene.wait_for_end([0, 1], ranks_only=True)
    scene.signal_torchrun(signal.SIGCONT)
    return scene.ended([0, 1])


FAULTS: dict[str, Callable[[Scene], Outcome]] = {
    "partition in a step": _partition,
    "partition during the last save": _last_partition,
    "link down for less than the timeout": _short_outage,
    "rates change": _slow_network,
    "host killed": _killed_host,
    "torchrun killed": _killed_torchrun,
    "rank killed": _killed_rank,
    "rank frozen": _frozen_rank,
    "torchrun frozen": _frozen_torchrun,
}


@contextlib.contextmanager
def _started(lab: netlab.Lab, program: list[str], directory: Path) -> Iterator[list[Run]]:
    """Start torchrun on every host; end all processes on exit."""
    with contextlib.ExitStack() as stack:
        hosts = []
        for host, namespace in enumerate(lab.namespaces):
            cwd = directory / f"host-{host}"
            cwd.mkdir()
            inside = ["ip", "netns", "exec", namespace, "env", "GLOO_SOCKET_IFNAME=eth0"]
            rendezvous = f"--nnodes {HOSTS} --node-rank {host} --nproc-per-node {RANKS} --master-addr"
            torchrun = [sys.executable, "-m", "torch.distributed.run", *rendezvous.split(), netlab.address(0)]
            command = [*inside, *torchrun, "--master-port", str(PORT), *program]
            hosts.append(stack.enter_context(running(command, cwd)))
        try:
            yield hosts
        finally:
            for run in hosts:  # a process that is stopped does not end
                for pid in run.environments():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)


def _torchrun(run: Run) -> int:
    """Return the pid of a host's torchrun: `ip` and `env` have become it."""
    return run.process.pid
