"""Area "hosts": hosts of an elastic run end, hang, leave and join at random. Law: the run is the calm one.

Each step is in metrics.jsonl once. With all-reduce the losses are those of one process that nothing disturbs.
"""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

from acsgd.config.run_file import parse
from tests.lib.forked_torchrun import ForkedTorchrun, send
from tests.lib.forks import save_model, started
from tests.lib.hosts import LIMIT_S, Hosts
from tests.soak.area import ACCEPTED, Case, Outcome

STEPS = 1000
RUN_FILE = f"""
[data]
sources = "demo"
sequence = 16
batch = 12
[pp]
micro = 2
[optim]
lr = 1e-3
steps = {STEPS}
[checkpoint]
every = 100
[elastic]
silence = 2.0
hang = 4.0
[run]
timeout = 60
[log]
to = "jsonl,print"
"""
MODES = (
    "allreduce",
    "sharded_ps",
    "cocktail",
    "cocktail_grad:topk=.1",
    "quantized:exact_steps=50",
    "diloco:inner=20",
    "diloco:inner=20,fragments=4,delay=2,bits=4",
    "sparseloco:inner=10,topk=.1",
    "powersgd:rank=2",
)
EXACT = ("allreduce", "sharded_ps")
"""Modes whose updates do not depend on the number of replicas."""
RELATIVE = 1e-3
"""Tolerance on losses: sums in another order differ by 1e-7, and thousands of steps of AdamW amplify that."""
PROGRESS_S = 120.0
"""Time within which a step must follow once every host is alive; starting one takes 10 s on a busy machine."""
NUM_HOSTS = 3
MIN_HOSTS = 2
"""Hosts that always suffice for a pipeline of two stages."""


class ElasticHosts:
    """One elastic run per case: 3 hosts of 1 or 2 workers, 1 or 2 stages, any data-parallel mode, 3 to 10 events."""

    deadline_s: ClassVar[float] = 900.0
    memory_bytes: ClassVar[int] = 2**40

    @classmethod
    def prepare(cls, directory: Path) -> None:
        save_model(directory / "model", tied=False)
        (directory / "run.toml").write_text(f'[model]\nname = "{directory / "model"}"\n{RUN_FILE}')
        calm = directory / "calm"
        config = parse([str(directory / "run.toml"), "--log.dir", str(calm), "--log.to", "jsonl"])
        with started(config, 1) as run:
            assert run.join(600.0) == [0], run.notes()

    def __init__(self, directory: Path) -> None:
        self._run_file = directory / "run.toml"
        self._calm = [json.loads(line)["loss"] for line in (directory / "calm/metrics.jsonl").read_text().splitlines()]

    def run(self, case: Case) -> Outcome:
        stages, workers, mode = case.draw.choice([1, 2]), case.draw.choice([1, 2]), case.draw.choice(MODES)
        forward = case.draw.choice(["none", "delta:bits=8"]) if stages == 2 else "none"
        flags = ("--pp.stages", str(stages), "--dp.mode", mode, "--pp.forward", forward)
        with ExitStack() as stack:
            storm = Storm(Hosts(case.directory, self._run_file, stack, workers, flags), case)
            storm.describe(f"{NUM_HOSTS} hosts of {workers} workers, {' '.join(flags)}")
            storm.start_hosts()
            storm.inject_events(case.draw.randint(3, 10))
            storm.wait_for_end()
        losses = [line["loss"] for line in storm.hosts.steps()]
        assert all(map(math.isfinite, losses))
        if mode in EXACT and forward == "none":
            pairs = enumerate(zip(losses, self._calm, strict=True), 1)
            differing = [(step, loss, calm) for step, (loss, calm) in pairs if abs(loss - calm) > RELATIVE * calm]
            assert not differing, f"losses differ from those of the calm run, first after {differing[0]}"
        return ACCEPTED


class Storm:
    """Events that hit the hosts of a run, one after another, some before the run has recovered from the one before."""

    def __init__(self, hosts: Hosts, case: Case) -> None:
        self.hosts = hosts
        self._draw, self._case = case.draw, case
        self._events: list[str] = []
        self._started = 0
        self._alive: dict[str, ForkedTorchrun] = {}

    def start_hosts(self) -> None:
        """Start the run."""
        for _ in range(NUM_HOSTS):
            self._start(min_hosts=NUM_HOSTS)

    def describe(self, event: str) -> None:
        """Describe the case by all events so far."""
        self._events.append(event)
        self._case.describe("; ".join(self._events))

    def inject_events(self, events: int) -> None:
        """Let events happen while the run trains."""
        self._wait_for_progress(self._draw.randint(1, 100))
        for _ in range(events):
            if len(self._alive) < MIN_HOSTS:
                self._start()
            elif self._is_over():
                return
            else:
                self._draw.choice(self._possible())()
            if len(self._alive) >= MIN_HOSTS and self._draw.random() < 0.7:
                self._wait_for_progress(self._draw.randint(1, 100))
            else:
                time.sleep(self._draw.uniform(0.0, 2.0))

    def wait_for_end(self) -> None:
        """Wait for the end of the run, with enough hosts; check what it leaves."""
        while len(self._alive) < MIN_HOSTS and not self._is_over():
            self._start()
        survivors = list(self._alive.values())
        while not all(host.exit_code is not None for host in survivors):
            self._wait_for_progress(100)
        steps = [line["step"] for line in self.hosts.steps()]
        assert steps == list(range(1, STEPS + 1)), f"{len(steps)} lines are not the steps 1 to {STEPS}, each once"
        for host in survivors:
            assert host.wait(LIMIT_S) == 0, f"a host ended with {host.exit_code}: {host.stderr[-2000:]}"
            assert not host.pids(), "processes have outlived torchrun"

    def _possible(self) -> list[Callable[[], None]]:
        events = [self._kill_host, self._kill_worker, self._stop_worker, self._stop_host, self._leave]
        return [*events, self._start] if len(self._alive) < NUM_HOSTS else events

    def _start(self, *, min_hosts: int = 1) -> None:
        name = f"host {self._started}"
        self.describe(f"{name} starts")
        self._started += 1
        self._alive[name] = self.hosts.start(name, min_hosts=min_hosts, restarts=100)

    def _kill_host(self) -> None:
        name = self._choose("is killed")
        self._alive.pop(name).kill()

    def _leave(self) -> None:
        name = self._choose("leaves")
        self._alive.pop(name).signal(signal.SIGINT)

    def _kill_worker(self) -> None:
        send(signal.SIGKILL, self._choose_worker("is killed"))

    def _stop_worker(self) -> None:
        seconds = self._draw.uniform(0.1, 8.0)
        _stop(self._choose_worker(f"is stopped for {seconds:.1f} s"), seconds)

    def _stop_host(self) -> None:
        seconds = self._draw.uniform(0.1, 6.0)
        name = self._choose(f"is stopped for {seconds:.1f} s")
        _stop(self._alive[name].pids(), seconds)

    def _choose(self, event: str) -> str:
        name = self._draw.choice(sorted(self._alive))
        self.describe(f"after step {len(self.hosts.steps())}, {name} {event}")
        return name

    def _choose_worker(self, event: str) -> list[int]:
        """Return the process of a worker, none if its host has not started it yet."""
        name = self._choose(f"has a worker that {event}")
        pids = self._alive[name].workers
        return [self._draw.choice(pids)] if pids else []

    def _is_over(self) -> bool:
        return len(self.hosts.steps()) == STEPS

    def _wait_for_progress(self, steps: int) -> None:
        """Wait until the run has made some steps or has ended."""
        deadline, last = time.monotonic() + PROGRESS_S, len(self.hosts.steps())
        while len(self.hosts.steps()) in range(last, last + steps) and not self._is_over():
            output = "\n".join(f"{name}: {host.stderr[-1500:]}" for name, host in self._alive.items())
            output += "".join(f"\n{event}" for event in self.hosts.events())
            assert time.monotonic() < deadline, f"no {steps} steps after step {last} in {PROGRESS_S:g} s\n{output}"
            assert any(host.exit_code is None for host in self._alive.values()), f"all hosts have ended\n{output}"
            time.sleep(0.05)
        time.sleep(0.05)


def _stop(pids: list[int], seconds: float) -> None:
    """Stop processes for a while."""
    send(signal.SIGSTOP, pids)
    time.sleep(seconds)
    send(signal.SIGCONT, pids)
