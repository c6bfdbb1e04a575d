"""Commands as a user types them, with all processes that they start."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.lib.patience import wait_until

ROOT = Path(__file__).parents[2]
TRAIN = str(ROOT / "train.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
MARGIN_S = 30.0
"""Time limit for the end of a process that has loaded torch, seconds on a quiet machine."""


class Output:
    """Standard output and error of a command, as files in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._out, self._err = directory / "stdout", directory / "stderr"

    @property
    def stdout(self) -> str:
        return self._out.read_text()

    @property
    def stderr(self) -> str:
        return self._err.read_text()

    @property
    def errors(self) -> list[str]:
        """Lines of stderr that begin with "error: "."""
        return [line for line in self.stderr.splitlines() if line.startswith("error: ")]

    def wait_until(self, condition: Callable[[], object], limit_s: float) -> None:
        """Wait until a condition is true. Raises AssertionError after `limit_s` seconds of a quiet machine."""
        wait_until(condition, limit_s, poll_s=0.05, describe=lambda: f"{self.stdout}\n{self.stderr}")


class Run(Output):
    """A running command. output: descriptor of its standard output and error, instead of files in `cwd`."""

    def __init__(self, command: list[str], cwd: Path, *, output: int | None = None) -> None:
        super().__init__(cwd)
        self._mark = f"ACSGD_TEST_RUN={cwd}"
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        environment |= dict([self._mark.split("=", 1)])
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                command,
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out if output is None else output,
                stderr=err if output is None else output,
            )

    def wait(self, limit_s: float = MARGIN_S) -> int:
        """Wait for the end of the command, at most `limit_s` seconds of a quiet machine; return its exit code."""
        self.wait_until(lambda: self.process.poll() is not None, limit_s)
        return self.process.wait()

    def environments(self) -> dict[int, list[str]]:
        """Return the environment of each process of this command that still runs, by pid."""
        found = {}
        for directory in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
                environment = (directory / "environ").read_text(errors="replace").split("\0")
                if self._mark in environment:
                    found[int(directory.name)] = environment
        return found

    def ranks(self) -> dict[int, int]:
        """Return the pid of each rank that still runs."""
        pids = {}
        for pid, environment in self.environments().items():
            ranks = [entry.removeprefix("RANK=") for entry in environment if entry.startswith("RANK=")]
            pids |= {int(rank): pid for rank in ranks}
        return pids


@contextlib.contextmanager
def running(command: list[str], cwd: Path, *, output: int | None = None) -> Iterator[Run]:
    """Start a command; kill all its processes on exit. output: as in `Run`."""
    run = Run(command, cwd, output=output)
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
