"""A small elastic run in which faults are injected, and the laws that it must obey whatever happens."""

from __future__ import annotations

import json
import math
import shutil
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from acsgd.config.run_file import parse
from benchmarks.common import netlab
from benchmarks.common.metrics_watch import MetricsWatch
from tests.lib.forked_torchrun import ForkedTorchrun, Setup, send
from tests.lib.forks import save_model, started
from tests.lib.hosts import Hosts
from tests.lib.injection import FAULTS, RETURNS, TRACE, All, Pace, trace
from tests.lib.patience import stretched, wait_until

HANG_S, SILENCE_S = stretched(3.0), stretched(2.0)
RUN_FILE = f"""
[data]
sources = "demo"
sequence = 16
batch = 12
eval_fraction = 0.0001
[pp]
micro = 2
[optim]
lr = 1e-3
schedule = "constant"
steps = 100000
[eval]
every = 20
[checkpoint]
every = 50
[elastic]
silence = {SILENCE_S}
hang = {HANG_S}
[run]
timeout = {stretched(30)}
[log]
to = "jsonl,print"
"""
CALM_STEPS = 120
"""Number of steps of the runs to which losses are compared."""
PACE_S = 0.03
"""Time added to each step, seconds, so that a run does not take thousands of them."""
LIMIT_S = 60.0
TOLERANCE = 1e-5
"""Relative difference of losses, of modes that sum gradients exactly: another order of the sum, amplified by AdamW."""
PORT = 29400


class Shape(NamedTuple):
    """Pipelines and where their ranks are."""

    stages: int
    hosts: int
    workers: int
    """Per host."""

    @property
    def replicas(self) -> int:
        return self.hosts * self.workers // self.stages


SHAPES = {"1x3": Shape(1, 3, 1), "2x2": Shape(2, 4, 1), "2x3": Shape(2, 3, 2)}
"""Stages x replicas."""
MODES: dict[str, tuple[str, ...]] = {
    "allreduce": (),
    "cocktail": ("--dp.mode", "cocktail"),
    "cocktail_grad": ("--dp.mode", "cocktail_grad:topk=.1"),
    "diloco": ("--dp.mode", "diloco:inner=10"),
    "delta": ("--pp.forward", "delta:bits=8"),
}
EXACT = ("allreduce",)
"""Modes with the losses of a run that nothing disturbs."""


class Row(NamedTuple):
    """What a fault did to a run."""

    fault: str
    run: str
    """Stages x replicas, and the mode."""
    view_s: float | None
    """From the fault to the line of the first view that follows it, seconds; None if no view follows."""
    step_s: float | None
    """From the fault to the line of the first step after that."""
    steps_lost: int
    """Number of steps that were done again."""
    difference: float
    """Largest relative difference to a loss of the calm run."""
    verdict: str

    def cells(self) -> list[str]:
        """Return the columns as text."""
        times = ["-" if seconds is None else f"{seconds:.2f}" for seconds in (self.view_s, self.step_s)]
        return [self.fault, self.run, *times, str(self.steps_lost), f"{self.difference:.1e}", self.verdict]


COLUMNS = ("fault", "run", "view, s", "next step, s", "steps lost", "loss difference", "verdict")


class TracedStep(NamedTuple):
    """A step that a worker has completed, as `injection.trace` notes it."""

    view: int
    pid: int
    step: int
    files: int
    threads: int
    resident_bytes: int


@dataclass
class Scene:
    """A run of several hosts. Those with letters of NAMES are started first."""

    hosts: Hosts
    watch: MetricsWatch
    shape: Shape
    mode: str
    directory: Path
    network: netlab.Lab | None = None
    running: dict[str, ForkedTorchrun] = field(default_factory=dict)
    fault_at: float = 0.0
    view_s: float | None = None
    step_s: float | None = None
    steps_lost: int = 0

    @property
    def names(self) -> list[str]:
        """The hosts that are there at the start; "a" and "b" have the endpoints."""
        return list("abcd"[: self.shape.hosts])

    def start(
        self, name: str, *, worker: Sequence[Setup] = (), pace_s: float = PACE_S, **options: Any
    ) -> ForkedTorchrun:
        """Start a host. worker, options: as of `Hosts.start`."""
        setups = All((trace, Pace(pace_s), *worker))
        if self.network is not None:
            options["namespace"] = self.network.namespaces["abcd".index(name[0])]
        host = self.hosts.start(name, worker=setups, **options)
        self.running[name] = host
        return host

    def start_all(self, injected: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Start all hosts; return when they train. injected: options of `start` by host."""
        for name in self.names:
            self.start(name, min_hosts=len(self.names), **(injected or {}).get(name, {}))
        self.wait_for_steps(1)

    def wait_for_steps(self, number: int) -> None:
        """Wait until that many more steps are done."""
        goal = self.watch.last_step + number
        self.wait_until(lambda: self.watch.last_step >= goal, f"{number} steps after step {goal - number}")

    def wait_for_replicas(self, replicas: int) -> None:
        """Wait until a number of replicas trains."""
        self.wait_until(lambda: self.watch.replicas == replicas, f"{replicas} replicas")
        self.wait_for_steps(2)

    def wait_until(self, condition: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> None:
        wait_until(condition, limit_s, poll_s=0.005, describe=lambda: f"no {what}: {self.output()}")

    def output(self) -> str:
        """Return the end of what each host printed, those that have ended first, and the views."""
        hosts = sorted(self.running.items(), key=lambda item: item[1].exit_code is None)
        printed = [f"{name}: {host.stderr[-1500:]} {host.stdout[-800:]}" for name, host in hosts]
        return "\n".join([*printed, *map(str, self.hosts.events())])

    # Faults.

    def kill(self, *names: str) -> None:
        """End hosts as a power failure does."""
        pids = [pid for name in names for pid in self.running[name].pids()]
        self.fault_at = send(signal.SIGKILL, pids)
        for name in names:
            self.running.pop(name).kill()

    def send(self, number: signal.Signals, pids: Sequence[int]) -> None:
        """Send a signal to some processes."""
        self.fault_at = send(number, pids)

    def mark_fault(self) -> None:
        """Note that a fault is about to occur."""
        self.fault_at = time.monotonic()

    def wait_for_fault(self, number: int = 1) -> None:
        """Wait until processes have inflicted a number of faults on themselves; forget the host that has died."""
        path = self.directory / FAULTS

        def faults() -> list[list[str]]:
            return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

        self.wait_until(lambda: len(faults()) >= number, f"{number} faults")
        at, host = faults()[number - 1]
        self.fault_at = float(at)
        if host in self.running:
            self.running.pop(host).kill()

    def recover(self) -> None:
        """Wait for the first view after the fault, and for its first step."""

        def first(kind: str, since: float) -> float | None:
            return next((at for at, line in list(self.watch.arrivals) if at > since and kind in line), None)

        self.wait_until(lambda: first("view", self.fault_at), "view after the fault")
        view_at = first("view", self.fault_at)
        assert view_at is not None
        self.wait_until(lambda: first("step", view_at), "step after the view")
        step_at = first("step", view_at)
        assert step_at is not None
        self.view_s, self.step_s = view_at - self.fault_at, step_at - self.fault_at

    def stay_calm(self, seconds: float) -> None:
        """Check that training continues for a time, in the same view."""
        views, step = len(self.hosts.events()), self.watch.last_step
        time.sleep(seconds)
        assert len(self.hosts.events()) == views, f"there is another view: {self.hosts.events()[views:]}"
        assert self.watch.last_step > step, f"no step in {seconds:g} s: {self.output()}"

    # The end, and the laws.

    def traced(self) -> list[TracedStep]:
        """Return the steps of all workers, in the order in which they were completed."""
        lines = (self.directory / TRACE).read_text().splitlines()
        return [TracedStep(*map(int, line.split())) for line in lines]

    def returning(self) -> set[int]:
        """Return the views that return to an earlier step; their events may be dropped when a later one does, too."""
        path = self.directory / RETURNS
        return set(map(int, path.read_text().split())) if path.exists() else set()

    def end(self) -> None:
        """End the run by SIGTERM on all hosts, once each takes part: one that still starts has nothing to save."""
        self.wait_for_steps(3)
        self.wait_until(self._all_take_part, "step on each host")
        ended = [name for name, host in self.running.items() if host.exit_code is not None]
        assert not ended, f"hosts {ended} have ended: {self.output()}"
        for host in self.running.values():
            host.signal(signal.SIGTERM)
        self.wait_until(lambda: not any(host.pids() for host in self.running.values()), "end of all processes")
        for name, host in self.running.items():
            assert not host.errors, f"host {name} prints {host.errors}"

    def _all_take_part(self) -> bool:
        trained = {step.pid for step in self.traced()}
        return all(trained.intersection(host.pids()) for host in self.running.values() if host.exit_code is None)

    def check(self, calm: Sequence[float], tolerance: float = TOLERANCE) -> float:
        """Check the laws of a run that has ended; return the largest relative difference of losses."""
        steps = self.hosts.steps()
        numbers = [line["step"] for line in steps]
        assert numbers == list(range(1, len(numbers) + 1)), f"steps are missing or logged twice: {numbers}"
        saved = sorted(path.name for path in (self.hosts.run_dir / "checkpoints").glob("step-*"))
        assert saved[-1] == f"step-{numbers[-1]:08d}", f"the run ended after step {numbers[-1]}, saved are {saved}"
        check_trace(self.traced(), self.returning())
        return check_losses([line["loss"] for line in steps], calm, tolerance if self.mode in EXACT else math.inf)


def check_losses(losses: Sequence[float], calm: Sequence[float], tolerance: float) -> float:
    """Check that losses are finite, and those of the calm run; return the largest relative difference."""
    assert all(map(math.isfinite, losses)), "a loss is not finite"
    differences = [abs(loss - expected) / expected for loss, expected in zip(losses, calm, strict=False)]
    first = next((step for step, value in enumerate(differences, 1) if value > tolerance), None)
    assert first is None, f"losses differ by {max(differences):.1e}, first after step {first}"
    return max(differences)


def check_trace(steps: Sequence[TracedStep], returning: Collection[int] = ()) -> None:
    """Check that no two views trained at the same time, and that no worker has leaked.

    Once a later view has completed a step, a worker completes at most one step of an earlier view: that which all of
    its ranks had reported. The steps of a view follow those of the views before, whose last one slower ranks may
    complete in the new view, unless a view between returns to an earlier step.

    Connections and waits that a view has abandoned may last until run.timeout, which is longer than a scene: so each
    view may leave some.

    steps: in the order in which they were completed; returning: views that return to an earlier step.
    """
    by_view: defaultdict[int, list[int]] = defaultdict(list)
    by_worker: defaultdict[int, list[TracedStep]] = defaultdict(list)
    late, newest = Counter[tuple[int, int]](), 0
    for step in steps:
        by_view[step.view].append(step.step)
        by_worker[step.pid].append(step)
        newest = max(newest, step.view)
        late[step.view, step.pid] += step.view < newest
    for (view, pid), count in late.items():
        assert count <= 1, f"views {view} and {newest} have both trained: {count} late steps of worker {pid}"
    for before, after in pairwise(sorted(by_view)):
        last, first = max(by_view[before]), min(by_view[after])
        returns = any(before < view <= after for view in returning)
        assert last <= first or returns, (
            f"views {before} and {after} have both trained: until step {last}, from step {first}"
        )
    for pid, own in by_worker.items():
        first, last, changes = own[0], own[-1], len({step.view for step in own}) - 1
        assert last.files <= first.files * (1 + changes), f"worker {pid}: {first.files} files, then {last.files}"
        assert last.threads <= first.threads + 4 * (1 + changes), (
            f"worker {pid}: {first.threads} threads, then {last.threads}"
        )


def prepare(directory: Path) -> None:
    """Write the model and the run file of all scenes."""
    save_model(directory / "model", tied=False)
    (directory / "run.toml").write_text(f'[model]\nname = "{directory / "model"}"\n{RUN_FILE}')


def calm_losses(directory: Path, mode: str, replicas: int) -> list[float]:
    """Return the losses of a run that nothing disturbs. replicas: of a mode whose losses depend on that."""
    replicas = 1 if mode in EXACT else replicas
    path = directory / f"calm-{mode}-{replicas}.json"
    if not path.exists():
        stages = 2 if mode == "delta" else 1
        flags = ("--log.dir", str(directory / mode), "--log.to", "jsonl", "--pp.stages", str(stages), *MODES[mode])
        lines: list[str] = []
        with started(parse([str(directory / "run.toml"), *flags]), stages * replicas) as run:
            while len(lines) < CALM_STEPS:
                assert run.processes[0].is_alive(), run.notes()
                time.sleep(0.1)
                metrics = directory / mode / "metrics.jsonl"
                lines = metrics.read_text().splitlines()[:-1] if metrics.exists() else []
        shutil.rmtree(directory / mode)
        path.write_text(json.dumps([json.loads(line)["loss"] for line in lines]))
    losses: list[float] = json.loads(path.read_text())
    return losses


@contextmanager
def opened(
    directory: Path,
    inputs: Path,
    shape: Shape,
    mode: str,
    *,
    flags: Sequence[str] = (),
    network: netlab.Lab | None = None,
) -> Iterator[Scene]:
    """Open a scene without hosts; kill all processes on exit. inputs: as written by `prepare`."""
    with ExitStack() as stack:
        all_flags = ("--pp.stages", str(shape.stages), *MODES[mode], *flags)
        endpoints = [f"{netlab.address(host)}:{PORT}" for host in (0, 1)] if network is not None else []
        hosts = Hosts(directory, inputs / "run.toml", stack, shape.workers, all_flags, endpoints=endpoints)
        watch = MetricsWatch(hosts.run_dir / "metrics.jsonl")
        stack.callback(watch.close)
        yield Scene(hosts, watch, shape, mode, directory, network)
