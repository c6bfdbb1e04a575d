"""Hosts of a run, each a torchrun of its own on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from acsgd.elastic.host.register import DiskRegister
from benchmarks.common.metrics_watch import POLL_S, MetricsWatch
from benchmarks.common.netlab import Lab, address
from tests.lib.forked_torchrun import ForkedTorchrun, Host, send

ROOT = Path(__file__).parents[2]
NAMES = ("a", "b", "c")
ENDPOINTS = "ab"
"""Hosts with an endpoint."""
MARK = "ACSGD_BENCHMARK_HOST"
"""Environment variable of all processes of a host; its value is the host's directory."""
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Environment of torchrun's own rendezvous: workers open a store of their own at each start. In the agents' store,
which they share by default, workers that start again can find the addresses of those that have ended, and fail."""
PROCESS_CLOCK = 2
"""Kind of clock of a process, from which Linux makes the id of its clock."""
LIMIT_S = 180.0
"""Time limit of a wait."""


class Hosts:
    """The hosts of one run. Use as a context: all of their processes are killed at its end.

    rendezvous: elastic = with `--rdzv-backend acsgd`; c10d, static = torchrun's own; torchrun_flags: added; is_forked:
    whether hosts are forked from a process that has imported everything, where `start` does not say otherwise;
    network: on which the hosts are; None = all on this one.
    """

    def __init__(
        self,
        directory: Path,
        run_file: Path,
        rendezvous: str,
        flags: Sequence[str] = (),
        *,
        torchrun_flags: Sequence[str] = (),
        is_forked: bool = False,
        network: Lab | None = None,
    ) -> None:
        directory.mkdir()
        self._directory, self._run_file, self._rendezvous, self._flags = directory, run_file, rendezvous, flags
        self._torchrun_flags, self._is_forked, self._network = torchrun_flags, is_forked, network
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._forked: dict[str, ForkedTorchrun] = {}
        self.run_dir = directory / "run"
        with contextlib.ExitStack() as open_ports:
            servers = [open_ports.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in NAMES]
            ports = {name: server.getsockname()[1] for name, server in zip(NAMES, servers, strict=True)}
        hosts = {name: address(number) if network else "127.0.0.1" for number, name in enumerate(NAMES)}
        self._addresses = {name: f"{hosts[name]}:{ports[name]}" for name in NAMES}
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

    def start(self, name: str, *, min_hosts: int = 1, is_forked: bool | None = None) -> None:
        """Start a host, or start it again. is_forked: as for the class.

        A host takes the first endpoint that is free on its machine. So that `by_rank` is right, this returns when a
        forked host has its own; others take seconds.
        """
        is_forked = self._is_forked if is_forked is None else is_forked
        self._launch(name, min_hosts, is_forked)
        if is_forked and self._rendezvous == "elastic" and self._network is None and name in ENDPOINTS:
            self.wait_until(lambda: _listens(self._addresses[name]))

    def _launch(self, name: str, min_hosts: int, is_forked: bool) -> None:
        (cwd := self._directory / name).mkdir(exist_ok=True)
        arguments = ["--nproc-per-node", "1", "--max-restarts", "1000", *self._torchrun_flags]
        arguments += self._membership_flags(name, min_hosts)
        arguments += [str(ROOT / "train.py"), str(self._run_file), "--log.dir", str(self.run_dir), *self._flags]
        environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        environment |= OWN_STORE if self._rendezvous == "c10d" else {}
        if name in self._processes:
            self._processes.pop(name).wait(LIMIT_S)
        if name in self._forked:
            self._forked.pop(name).kill()
        if is_forked:
            namespace = self._network.namespaces[NAMES.index(name)] if self._network else None
            self._forked[name] = ForkedTorchrun(Host(arguments, environment, cwd, namespace))
            return
        command = [sys.executable, "-m", "torch.distributed.run", *arguments]
        with (cwd / "output").open("ab") as output:
            self._processes[name] = subprocess.Popen(
                command,
                cwd=cwd,
                env=os.environ | environment | {MARK: str(cwd)},
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
        backend, used = ("acsgd", ENDPOINTS) if self._rendezvous == "elastic" else ("c10d", "a")
        endpoints = ",".join(self._addresses[host] for host in used)
        nodes = ["--nnodes", f"{min_hosts}:{len(NAMES)}"]
        return [*nodes, "--rdzv-backend", backend, "--rdzv-endpoint", endpoints, "--rdzv-id", "benchmark"]

    def pids(self, *names: str) -> list[int]:
        """Return the processes of hosts."""
        forked = [pid for name in names if name in self._forked for pid in self._forked[name].pids()]
        return [pid for pid, _ in self._environments(names)] + forked

    def workers(self, *names: str) -> list[int]:
        """Return the workers of hosts."""
        forked = [pid for name in names if name in self._forked for pid in self._forked[name].workers]
        return [pid for pid, environment in self._environments(names) if b"LOCAL_RANK" in environment] + forked

    def workers_by_rank(self) -> dict[int, int]:
        """Return the worker of each of torchrun's ranks."""
        found = self._environments(NAMES)
        return {int(environment[b"RANK"]): pid for pid, environment in found if b"RANK" in environment}

    def by_rank(self) -> list[str]:
        """Return the name of the host of each rank of an elastic run."""
        view = DiskRegister(self.run_dir / "views").newest()
        assert view is not None
        addresses = {host.id: host.address for host in view.hosts}
        names = {self._addresses[name]: name for name in ENDPOINTS}
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


def _listens(address: str) -> bool:
    host, _, port = address.partition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1.0):
        return True
    return False


def cpu_s(pids: Sequence[int]) -> float:
    """Return the CPU time that processes have used."""
    return sum(time.clock_gettime(~pid << 3 | PROCESS_CLOCK) for pid in pids)


def _all_environments() -> Iterator[tuple[int, list[bytes]]]:
    for directory in Path("/proc").iterdir():
        if directory.name.isdecimal():
            with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
                yield int(directory.name), (directory / "environ").read_bytes().split(b"\0")


def _as_dict(entries: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(entry.split(b"=", 1) for entry in entries if b"=" in entry)  # type: ignore[misc]
