"""On each host of `acsgd launch --hosts`: starts torchrun, and stops it upon a message of the launcher, or its end.

Standard input has one JSON object per line: the `TorchrunJob`, then {"signal": NAME}, or {} every few seconds. Its
end, or SILENCE_S seconds without a line, mean that the connection is lost: torchrun is stopped like by SIGTERM, so
that the run saves, and is killed if it has not ended after TorchrunJob.grace_s. Imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from acsgd.launch import environment_with, torchrun
from acsgd.versions import installed_versions

READY = "acsgd launch: ready "
"""Start of the supervisor's first line, before a JSON object with a free port there and its `installed_versions`.
What a shell's start-up files print comes before."""
JOB_S = 600
"""Seconds without a job after which the launcher counts as lost: more than it waits for all hosts."""
BEAT_S = 5.0
"""Seconds between two lines of the launcher."""
SILENCE_S = 60.0
"""Seconds without a line after which the connection counts as lost."""
POLL_S = 0.2
"""Seconds between two looks at torchrun."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


@dataclass(frozen=True)
class TorchrunJob:
    """What a host runs."""

    arguments: list[str]
    """Of torchrun, before -m acsgd."""
    run_file: str
    """Content of RUN.toml."""
    options: list[str]
    """Options of the run."""
    environment: dict[str, str]
    """Variables for torchrun."""
    grace_s: float
    """Maximum time to end after a signal, seconds."""
    name: str
    """Unique name. A host on which it still runs, for a connection that was lost, first waits for its end."""

    def line(self) -> str:
        """Return the line by which it is sent."""
        return json.dumps(dataclasses.asdict(self))


def supervise() -> int:
    """Run the job that standard input names; return torchrun's exit code."""
    launcher = _Launcher()
    for number in STOP_SIGNALS:
        signal.signal(number, launcher.on_signal)
    with socket.create_server(("", 0)) as probe:
        answer = {"port": probe.getsockname()[1], "versions": installed_versions()}
        print(f"{READY}{json.dumps(answer)}", flush=True)
    signal.alarm(JOB_S)
    if not (line := sys.stdin.readline()):
        return 1
    signal.alarm(0)
    job = TorchrunJob(**json.loads(line))
    threading.Thread(target=launcher.listen, daemon=True).start()
    with _locked(job.name), tempfile.NamedTemporaryFile("w", prefix="acsgd-", suffix=".toml") as run_file:
        if launcher.is_lost:  # while this one waited
            return 1
        run_file.write(job.run_file)
        run_file.flush()
        process = subprocess.Popen(
            torchrun([*job.arguments, "-m", "acsgd", run_file.name, *job.options]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment_with(job.environment),
            start_new_session=True,  # what ends the session of the connection must not end it unsaved
        )
        assert process.stdout is not None
        assert process.stderr is not None
        outputs = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
        pumps = [threading.Thread(target=_pump, args=(source, sink.fileno()), daemon=True) for source, sink in outputs]
        for pump in pumps:
            pump.start()
        code = _wait(process, launcher, job.grace_s)
        for pump in pumps:
            pump.join(BEAT_S)  # a process that torchrun has left behind may hold the pipe
    return code


@contextlib.contextmanager
def _locked(name: str) -> Iterator[None]:
    """Hold the lock of a job on this host. Blocks while another supervisor has it: torchrun may still save there."""
    path = Path(tempfile.gettempdir(), f"acsgd-{name}.lock")
    while True:
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_same(file, path):  # not removed by the supervisor that had it
                try:
                    yield
                finally:
                    path.unlink()
                return


def _is_same(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


class _Launcher:
    """The launcher, as this host knows it."""

    def __init__(self) -> None:
        self.signals: queue.Queue[int] = queue.Queue()
        """Signals for torchrun, those of the launcher and those that this process received."""
        self._heard_at = time.monotonic()
        self._has_ended = False

    @property
    def is_lost(self) -> bool:
        """Whether the connection has ended, or has been silent for too long."""
        return self._has_ended or time.monotonic() - self._heard_at > SILENCE_S

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal to this process."""
        self.signals.put(number)

    def listen(self) -> None:
        """Read what the launcher sends, until the connection ends."""
        self._heard_at = time.monotonic()
        with contextlib.suppress(OSError, ValueError):  # the last line may be cut
            for line in sys.stdin:
                self._heard_at = time.monotonic()
                if name := json.loads(line).get("signal"):
                    self.signals.put(signal.Signals[name])
        self._has_ended = True


def _wait(process: subprocess.Popen[bytes], launcher: _Launcher, grace_s: float) -> int:
    """Wait for the end of torchrun and pass signals on; kill it if it outlives the first by the grace time."""
    killed_at = math.inf
    while process.poll() is None:
        try:
            process.send_signal(launcher.signals.get(timeout=POLL_S))
        except queue.Empty:
            if time.monotonic() >= killed_at:
                process.kill()  # its workers end with it
            if killed_at < math.inf or not launcher.is_lost:
                continue
            process.terminate()
        killed_at = min(killed_at, time.monotonic() + grace_s)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _pump(source: IO[bytes], sink: int) -> None:
    """Copy output until its end, also when nobody reads it any more: then torchrun must not fail for that."""
    while part := os.read(source.fileno(), 1 << 16):
        with contextlib.suppress(OSError):
            os.write(sink, part)


if __name__ == "__main__":
    sys.exit(supervise())
