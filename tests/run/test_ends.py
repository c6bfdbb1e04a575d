"""How runs end that cannot go on: every rank ends, soon, and one message names the one at fault."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from acsgd.run.failures import GRACE_S
from acsgd.run.signals import REPEAT_S, WATCH_S

ROOT = Path(__file__).parents[2]
TRAIN = str(ROOT / "train.py")
TinyModel = Callable[..., Path]
HOST = socket.gethostname()
TIMEOUT_S = 10.0
MARGIN_S = 10.0
"""For the end of a process that has torch in it, on a busy machine."""

FAULTY = """
import os, runpy, signal, sys, time
import acsgd.pp.stage as stage
forward, rank = stage.Stage.forward, os.environ.get("RANK", "0")
_, at_rank, fault, *sys.argv = sys.argv
def faulty(self, micro, *args, **options):
    if rank == at_rank and micro.step == 2:
        print("at fault", flush=True)
        exec(fault)
    return forward(self, micro, *args, **options)
stage.Stage.forward = faulty
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script in which one rank does something in a forward of the third step: RANK CODE SCRIPT ARGUMENTS."""
STOP = "os.kill(os.getpid(), signal.SIGSTOP)"
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
RAISE = "raise ValueError('a fault of its own')"


class Run:
    """A command under way, with all processes that come of it."""

    def __init__(self, command: list[str], cwd: Path) -> None:
        self._mark = f"ACSGD_TEST_RUN={cwd}"
        self._out, self._err = cwd / "stdout", cwd / "stderr"
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        environment |= dict([self._mark.split("=", 1)])
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )

    @property
    def stdout(self) -> str:
        return self._out.read_text()

    @property
    def stderr(self) -> str:
        return self._err.read_text()

    @property
    def errors(self) -> list[str]:
        return [line for line in self.stderr.splitlines() if line.startswith("error: ")]

    def environments(self) -> dict[int, list[str]]:
        """Return the environment of each process of this run that has not ended, by process id."""
        found = {}
        for directory in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
                environment = (directory / "environ").read_text(errors="replace").split("\0")
                if self._mark in environment:
                    found[int(directory.name)] = environment
        return found

    def ranks(self) -> dict[int, int]:
        """Return the process id of each rank that has not ended."""
        pids = {}
        for pid, environment in self.environments().items():
            ranks = [entry.removeprefix("RANK=") for entry in environment if entry.startswith("RANK=")]
            pids |= {int(rank): pid for rank in ranks}
        return pids

    def wait_until(self, holds: Callable[[], object], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline, f"{self.stdout}\n{self.stderr}"
            time.sleep(0.05)

    def wait_for_fault(self) -> None:
        self.wait_until(lambda: "at fault" in self.stdout, 120)


@contextlib.contextmanager
def running(command: list[str], cwd: Path) -> Iterator[Run]:
    """Start a command; end all that came of it, whatever happened."""
    run = Run(command, cwd)
    try:
        yield run
    finally:
        while pids := run.environments():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            run.process.poll()
            time.sleep(0.05)
        run.process.wait()


@pytest.fixture
def command(tiny_model: TinyModel, tmp_path: Path) -> Callable[..., list[str]]:
    """Return a function that gives the command of a run without end, in which one rank may have a fault."""
    (tmp_path / "faulty.py").write_text(FAULTY)
    settings = {
        "model.name": tiny_model(),
        "data.sources": "demo",
        "data.sequence": 32,
        "data.batch": 8,
        "pp.micro": 2,
        "optim.lr": 1e-3,
        "optim.steps": 100_000,
        "log.dir": tmp_path / "run",
        "run.timeout": TIMEOUT_S,
    }

    def make(processes: int, stages: int, at_rank: int, fault: str, **changes: object) -> list[str]:
        launcher = [sys.executable]
        if processes > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        flags = [f"--{key}={value}" for key, value in (settings | {"pp.stages": stages} | changes).items()]
        return [*launcher, "faulty.py", str(at_rank), fault, TRAIN, *flags]

    return make


@pytest.mark.parametrize(
    ("stages", "at_rank", "fault"), [(4, 1, STOP), (4, 2, STOP), (2, 3, STOP), (4, 1, KILL), (2, 3, KILL)]
)
def test_a_rank_that_hangs_or_dies_is_named_once_and_all_others_end(
    stages: int, at_rank: int, fault: str, command: Callable[..., list[str]], tmp_path: Path
) -> None:
    with running(command(4, stages, at_rank, fault), tmp_path) as run:
        run.wait_for_fault()
        # of a dead rank gloo tells at once, of one that hangs only the timeout
        run.wait_until(lambda: not run.ranks().keys() - {at_rank}, TIMEOUT_S + min(GRACE_S, TIMEOUT_S / 4) + MARGIN_S)
        assert len(run.errors) == 1, run.stderr
        told = run.errors[0]
        assert f"; rank {at_rank} on {HOST} is silent: ended or hanging" in told
        assert told.startswith("error: step 3, stage ")
        assert ", action " in told.partition(": rank ")[0]
        assert f"rank {at_rank}" in told.partition(";")[0] or f"{at_rank}]" in told.partition(";")[0]
        assert "Traceback" not in run.stderr.partition("torch.distributed.elastic")[0]


def test_a_ranks_own_fault_is_told_with_its_traceback_and_nothing_else(
    command: Callable[..., list[str]], tmp_path: Path
) -> None:
    with running(command(4, 4, 2, RAISE), tmp_path) as run:
        assert run.process.wait(120) == 1
        assert run.errors == [f"error: rank 2 on {HOST}: ValueError: a fault of its own"]
        own = run.stderr.partition(run.errors[0])[2].partition("\n\n")[0]
        assert own.splitlines()[1] == "Traceback (most recent call last):"
        assert "in faulty" in own
        assert run.stderr.count("ValueError: a fault of its own") == 2


def test_no_rank_outlives_its_torchrun(command: Callable[..., list[str]], tmp_path: Path) -> None:
    with running(command(2, 2, 0, "pass", **{"run.timeout": 600}), tmp_path) as run:
        run.wait_for_fault()
        run.process.kill()
        run.process.wait()
        run.wait_until(lambda: not run.ranks(), WATCH_S + MARGIN_S)
        message = f"error: torchrun, process {run.process.pid}, has ended; this host's ranks end with it"
        assert run.errors == [message], run.stderr


def test_a_second_interrupt_ends_at_once_without_a_traceback(command: Callable[..., list[str]], tmp_path: Path) -> None:
    with running(command(1, 1, 0, "time.sleep(600)"), tmp_path) as run:
        run.wait_for_fault()
        run.process.send_signal(signal.SIGINT)
        time.sleep(REPEAT_S / 2)
        run.process.send_signal(signal.SIGINT)  # as from a terminal, and passed on by torchrun
        time.sleep(REPEAT_S)
        assert run.process.poll() is None
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(MARGIN_S) == 130
        assert "Traceback" not in run.stderr


@pytest.mark.parametrize("to_torchrun", [False, True])
def test_a_second_interrupt_ends_a_rank_that_waits_inside_gloo(
    to_torchrun: bool, command: Callable[..., list[str]], tmp_path: Path
) -> None:
    with running(command(2, 2, 1, STOP, **{"run.timeout": 600}), tmp_path) as run:
        run.wait_for_fault()
        waiting = run.ranks()[0]
        target = run.process.pid if to_torchrun else waiting
        os.kill(target, signal.SIGINT)
        time.sleep(2 * REPEAT_S)
        assert waiting in run.ranks().values()
        os.kill(target, signal.SIGINT)
        run.wait_until(lambda: 0 not in run.ranks(), MARGIN_S)
        assert not run.errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_training_starts_ends_at_once_without_a_traceback(
    number: signal.Signals, tmp_path: Path
) -> None:
    with running([sys.executable, TRAIN], tmp_path) as run:
        maps = Path(f"/proc/{run.process.pid}/maps")
        run.wait_until(lambda: "libtorch" in maps.read_text(), 60)  # among the imports
        run.process.send_signal(number)
        assert run.process.wait(MARGIN_S) == -number
        assert run.stderr == ""


CHILD = """
import os, subprocess, sys, time
from acsgd.run.signals import end_with_torchrun
if sys.argv[1] == "parent":
    subprocess.Popen([sys.executable, __file__, "child", *sys.argv[2:]])
else:
    if "watch" in sys.argv:
        end_with_torchrun(os.getppid(), is_main="speak" in sys.argv)
    print("started", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("mode", ["watch speak", "watch", ""])
def test_a_process_ends_with_its_parent_only_if_that_is_torchrun(mode: str, tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    with running([sys.executable, "child.py", "parent", *mode.split()], tmp_path) as run:
        run.wait_until(lambda: "started" in run.stdout, 60)
        run.process.kill()
        run.process.wait()
        if mode:
            run.wait_until(lambda: not run.environments(), WATCH_S + MARGIN_S)
        else:
            time.sleep(3 * WATCH_S)
            assert len(run.environments()) == 1
        assert len(run.errors) == ("speak" in mode)
