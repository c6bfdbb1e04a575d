"""Hosts of a run, each a torchrun of its own on this machine, and the times at which lines of metrics.jsonl arrive."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from acsgd.elastic.register import ViewRegister

ROOT = Path(__file__).parents[2]
NAMES = ("a", "b", "c")
MARK = "ACSGD_BENCHMARK_HOST"
"""Environment variable of all processes of a host; its value is the host's directory."""
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Environment of torchrun's own rendezvous: workers open a store of their own at each start. In the agents' store, which
they share by default, workers that start again can find the addresses of those that have ended, and fail."""
LIMIT_S = 180.0
"""Time limit of a wait."""
POLL_S = 0.002


class Arrival(NamedTuple):
    """A line of metrics.jsonl."""

    at: float
    """When it was first seen, a time.monotonic()."""
    line: dict[str, Any]

    @property
    def is_step(self) -> bool:
        return "step" in self.line


class MetricsWatch:
    """Notes when each line of metrics.jsonl appears, to `POLL_S`. Steps and views that are logged again are ignored."""

    def __init__(self, path: Path) -> None:
        self.arrivals: list[Arrival] = []
        self._path, self._read_until, self._inode = path, 0, 0
        self._last_step = self._last_view = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="metrics watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    @property
    def last_step(self) -> int:
        return self._last_step

    @property
    def steps(self) -> list[Arrival]:
        return [arrival for arrival in list(self.arrivals) if arrival.is_step]

    @property
    def replicas(self) -> int:
        """Replicas of the newest view; 0 before the first."""
        views = [arrival.line["replicas"] for arrival in list(self.arrivals) if not arrival.is_step]
        return views[-1] if views else 0

    def find_view(self, since: float, replicas: int) -> int | None:
        """Return the index of the first view of so many replicas that arrived after a moment; None if there is none."""
        for index, (at, line) in enumerate(list(self.arrivals)):
            if at > since and line.get("event") == "view" and line["replicas"] == replicas:
                return index
        return None

    def _watch(self) -> None:
        while not self._closed.wait(POLL_S):
            with contextlib.suppress(FileNotFoundError):
                self._read()

    def _read(self) -> None:
        status = self._path.stat()
        if status.st_ino != self._inode or status.st_size < self._read_until:  # replaced, or truncated
            self._inode, self._read_until = status.st_ino, 0
        if status.st_size == self._read_until:
            return
        with self._path.open("rb") as file:
            file.seek(self._read_until)
            complete = file.read().rpartition(b"\n")[0]
        now = time.monotonic()
        try:
            lines = [json.loads(line) for line in complete.splitlines()]
        except ValueError:  # truncated and written again since the last look
            self._read_until = 0
            return
        self._read_until += len(complete) + 1 if complete else 0
        for line in lines:
            self._take(Arrival(now, line))

    def _take(self, arrival: Arrival) -> None:
        step, view = arrival.line.get("step", 0), arrival.line.get("view", 0)
        if step > self._last_step or view > self._last_view:
            self._last_step, self._last_view = max(step, self._last_step), max(view, self._last_view)
            self.arrivals.append(arrival)


class Hosts:
    """The hosts of one run. Use as a context: all of their processes are killed at its end.

    elastic: started with `--rdzv-backend acsgd`; c10d, static: with torchrun's own rendezvous.
    """

    def __init__(self, directory: Path, run_file: Path, rendezvous: str, flags: Sequence[str] = ()) -> None:
        directory.mkdir()
        self._directory, self._run_file, self._rendezvous, self._flags = directory, run_file, rendezvous, flags
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.run_dir = directory / "run"
        with contextlib.ExitStack() as open_ports:
            servers = [open_ports.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in NAMES]
            self._addresses = {
                name: f"127.0.0.1:{server.getsockname()[1]}" for name, server in zip(NAMES, servers, strict=True)
            }
        self.watch = MetricsWatch(self.run_dir / "metrics.jsonl")

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.watch.close()
        while pids := self.pids(*NAMES):
            send(signal.SIGKILL, pids)
            time.sleep(0.05)
        for process in self._processes.values():
            process.wait()

    def start(self, name: str, *, min_hosts: int = 1) -> None:
        """Start a host, or start it again."""
        (cwd := self._directory / name).mkdir(exist_ok=True)
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--max-restarts", "1000"]
        command += self._membership_flags(name, min_hosts)
        command += [str(ROOT / "train.py"), str(self._run_file), "--log.dir", str(self.run_dir), *self._flags]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        environment |= OWN_STORE if self._rendezvous == "c10d" else {}
        if name in self._processes:
            self._processes[name].wait(LIMIT_S)
        with (cwd / "output").open("ab") as output:
            self._processes[name] = subprocess.Popen(
                command,
                cwd=cwd,
                env=environment | {MARK: str(cwd)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def interrupt(self, name: str) -> float:
        """Press Ctrl-C on a host; return the time.monotonic() just before."""
        started = time.monotonic()
        self._processes[name].send_signal(signal.SIGINT)
        return started

    def start_all(self) -> None:
        """Start all hosts; return when they train."""
        for name in NAMES:
            self.start(name, min_hosts=len(NAMES))
        self.wait_until(lambda: self.watch.last_step >= 5)

    def _membership_flags(self, name: str, min_hosts: int) -> list[str]:
        if self._rendezvous == "static":
            host, _, port = self._addresses["a"].partition(":")
            ranks = ["--nnodes", str(len(NAMES)), "--node-rank", str(NAMES.index(name))]
            return [*ranks, "--master-addr", host, "--master-port", port]
        backend, used = ("acsgd", "ab") if self._rendezvous == "elastic" else ("c10d", "a")
        endpoints = ",".join(self._addresses[host] for host in used)
        nodes = ["--nnodes", f"{min_hosts}:{len(NAMES)}"]
        return [*nodes, "--rdzv-backend", backend, "--rdzv-endpoint", endpoints, "--rdzv-id", "benchmark"]

    def pids(self, *names: str) -> list[int]:
        """Return the processes of hosts."""
        return [pid for pid, _ in self._environments(names)]

    def workers(self, *names: str) -> list[int]:
        """Return the workers of hosts."""
        return [pid for pid, environment in self._environments(names) if b"LOCAL_RANK" in environment]

    def workers_by_rank(self) -> dict[int, int]:
        """Return the worker of each of torchrun's ranks."""
        found = self._environments(NAMES)
        return {int(environment[b"RANK"]): pid for pid, environment in found if b"RANK" in environment}

    def by_rank(self) -> list[str]:
        """Return the name of the host of each rank of an elastic run."""
        view = ViewRegister(self.run_dir / "views").newest()
        assert view is not None
        addresses = {host.id: host.address for host in view.hosts}
        names = {self._addresses[name]: name for name in "ab"}
        return [names.get(addresses[rank.partition("/")[0]], "c") for rank in view.plan.ranks]

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait. Raises TimeoutError with the last output of the hosts."""
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(self._last_output())
            time.sleep(POLL_S)

    def _last_output(self) -> str:
        files = [self._directory / name / "output" for name in NAMES]
        return "\n".join(f"host {file.parent.name}: {file.read_text()[-3000:]}" for file in files if file.exists())

    def _environments(self, names: Sequence[str]) -> list[tuple[int, dict[bytes, bytes]]]:
        marks = {f"{MARK}={self._directory / name}".encode() for name in names}
        return [(pid, _as_dict(entries)) for pid, entries in _all_environments() if not marks.isdisjoint(entries)]


def send(number: signal.Signals, pids: Sequence[int]) -> float:
    """Send a signal to processes; return the time.monotonic() just before."""
    started = time.monotonic()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return started


def cpu_s(pids: Sequence[int]) -> float:
    """Return the CPU time that processes have used."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])  # user, system
    return ticks / os.sysconf("SC_CLK_TCK")


def _all_environments() -> Iterator[tuple[int, list[bytes]]]:
    for directory in Path("/proc").iterdir():
        if directory.name.isdecimal():
            with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
                yield int(directory.name), (directory / "environ").read_bytes().split(b"\0")


def _as_dict(entries: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(entry.split(b"=", 1) for entry in entries if b"=" in entry)  # type: ignore[misc]
