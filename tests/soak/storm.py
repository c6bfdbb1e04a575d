"""Area "storm": 200 events in one elastic run, whose hosts are killed, stopped, cut off, and join again."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import ClassVar, NamedTuple

from acsgd.config.run_file import parse
from acsgd.elastic.control import ENDED
from benchmarks.common import netlab
from tests.lib import scenes
from tests.lib.forked_torchrun import AGENT, WORKER, ForkedTorchrun, send
from tests.lib.forks import finish
from tests.lib.scenes import Scene, Shape
from tests.soak.area import Case, Outcome, UnavailableError

EVENTS = 200
SHAPE = Shape(1, 4, 1)
SURVIVOR = "a"
"""Host that is stopped and cut off, but never killed, so that its processes see all views."""
PACE_S = 0.2
"""Time added to each step, seconds: a storm lasts ten minutes, and the steps are repeated by the calm run."""
TIMEOUT_S = 15.0
"""run.timeout, seconds; what a view has abandoned ends then."""
FLAGS = ("--optim.lr", "1e-4", "--run.timeout", f"{TIMEOUT_S:g}")
TOLERANCE = 1e-4
"""Relative difference of losses after thousands of steps of AdamW, each summed in another order."""
EXTRA_FILES, EXTRA_THREADS, EXTRA_BYTES = 8, 4, 64 << 20
"""What processes of the surviving host may have more at the end than at the start."""
ALONE = "no endpoint of --rdzv-endpoint can be reached"
"""Error of a host that was cut off while it joined."""
LEFT = (ENDED, "this host's ranks end with it", ALONE)
"""Errors that a host may print which was to leave: also those of workers whose torchrun has ended before them."""
PROGRESS_S = 90.0
"""Time within which a step must follow when nothing is stopped or cut off."""
COLUMNS = ("events", "views", "steps", "loss difference", "files", "threads", "MB")


class Usage(NamedTuple):
    """What a process uses."""

    files: int
    threads: int
    resident_bytes: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        process = Path(f"/proc/{pid}")
        pages = int((process / "statm").read_text().split()[1])
        files, threads = (len(os.listdir(process / name)) for name in ("fd", "task"))
        return cls(files, threads, pages * os.sysconf("SC_PAGE_SIZE"))


class Storm:
    """One storm per case, of four hosts in network namespaces, with all-reduce."""

    deadline_s: ClassVar[float] = 3600.0
    memory_bytes: ClassVar[int] = 2**40

    @classmethod
    def prepare(cls, directory: Path) -> None:
        """Write the inputs. Raises UnavailableError if this machine or user cannot create network namespaces."""
        try:
            netlab.check(needs_tun=False)
        except RuntimeError as error:
            raise UnavailableError(str(error)) from None
        scenes.prepare(directory)

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def run(self, case: Case) -> Outcome:
        with ExitStack() as stack:
            network = stack.enter_context(netlab.lab(hosts=SHAPE.hosts))
            options = {"flags": FLAGS, "network": network}
            scene = stack.enter_context(
                scenes.opened(case.directory, self._directory, SHAPE, "allreduce", **options)  # type: ignore[arg-type]
            )
            weather = Weather(scene, network, case)
            weather.start()
            before = weather.usage()
            weather.inject(EVENTS)
            weather.clear()
            after = weather.usage()
            scene.end()
        check_usage(before, after)
        difference = scene.check(self._calm_losses(scene.watch.last_step), TOLERANCE)
        worker = f"{before[-1].files} - {after[-1].files}", f"{before[-1].threads} - {after[-1].threads}"
        memory = f"{before[-1].resident_bytes >> 20} - {after[-1].resident_bytes >> 20}"
        numbers = EVENTS, len(scene.hosts.events()), scene.watch.last_step, f"{difference:.1e}"
        return Outcome("accepted", row=(*map(str, numbers), *worker, memory))

    def _calm_losses(self, steps: int) -> list[float]:
        """Return the losses of the same steps in one process that nothing disturbs."""
        flags = ("--log.dir", str(self._directory / "calm"), "--log.to", "jsonl", "--optim.steps", str(steps), *FLAGS)
        config = parse([str(self._directory / "run.toml"), *flags])
        finish(config, 1)
        lines = (self._directory / "calm/metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]


class Weather:
    """Random events, one after another, some before the run has recovered from the one before."""

    def __init__(self, scene: Scene, network: netlab.Lab, case: Case) -> None:
        self._scene, self._network, self._case, self._draw = scene, network, case, case.draw
        self._cut: set[str] = set()
        self._stopped: list[tuple[float, list[int]]] = []
        """Processes that are stopped, and when they continue."""
        self._started = Counter[str]()
        self._counts = Counter[str]()
        self._events: list[str] = []
        self._left: dict[str, ForkedTorchrun] = {}

    def start(self) -> None:
        """Start all hosts."""
        for name in self._scene.names:
            self._start(name)
        self._scene.wait_for_replicas(SHAPE.hosts)

    def inject(self, events: int) -> None:
        """Let events occur while the run trains."""
        for _ in range(events):
            self._continue(time.monotonic())
            kind, event = self._draw.choice(self._possible())
            self._counts[kind] += 1
            event()
            self._case.describe(
                f"{sum(self._counts.values())} events, {dict(self._counts)}; {'; '.join(self._events[-8:])}"
            )
            if self._is_clear() and self._draw.random() < 0.6:
                self._wait_for_steps(self._draw.randint(1, 3))
            else:
                time.sleep(self._draw.uniform(0.0, 2.0))

    def clear(self) -> None:
        """Continue and heal everything; wait until all hosts train, and until what was abandoned has ended."""
        self._continue(float("inf"))
        for name in list(self._cut):
            self._heal(name)
        deadline = time.monotonic() + PROGRESS_S
        while self._scene.watch.replicas != SHAPE.hosts:
            assert time.monotonic() < deadline, f"not all hosts train again: {self._scene.output()}"
            for name in self._scene.names:
                if self._host(name) is None:
                    self._start(name)
            time.sleep(0.1)
        self._forget_lonely()
        for name, host in self._left.items():
            while host.pids():
                assert time.monotonic() < deadline, f"host {name}, which has left, has not ended: {host.stderr[-2000:]}"
                time.sleep(0.1)
            errors = [error for error in host.errors if not any(expected in error for expected in LEFT)]
            assert not errors, f"host {name}, which has left, prints {errors}"
        time.sleep(TIMEOUT_S + 2.0)
        self._wait_for_steps(3)

    def _forget_lonely(self) -> None:
        """Forget the hosts that have ended since they were cut off before they reached another host."""
        ended = {name: host for name, host in self._scene.running.items() if host.exit_code is not None}
        for name, host in ended.items():
            assert ALONE in host.stderr, f"host {name} has ended: {host.stderr[-2000:]}"
            del self._scene.running[name]

    def usage(self) -> list[Usage]:
        """Return what torchrun and the worker of the surviving host use."""
        host = self._scene.running[SURVIVOR + "0"]
        return [Usage.of(pid) for pid in (*host.pids(AGENT), *host.pids(WORKER))]

    def _possible(self) -> list[tuple[str, Callable[[], None]]]:
        names = self._scene.names
        present = [name for name in names if self._host(name) is not None]
        events: list[tuple[str, Callable[[], None]]] = []
        for name in present:
            if len(self._stopped) < 2:
                events += [("stop", lambda name=name: self._stop(name))]  # type: ignore[misc]
            if name not in self._cut and len(self._cut) < 2:
                events += [("partition", lambda name=name: self._cut_off(name))]  # type: ignore[misc]
            if name != SURVIVOR:
                events += [("kill", lambda name=name: self._kill(name))]  # type: ignore[misc]
                events += [("kill worker", lambda name=name: self._kill_worker(name))]  # type: ignore[misc]
                events += [("leave", lambda name=name: self._leave(name))]  # type: ignore[misc]
        for name in names:
            if name in self._cut:
                events += [("heal", lambda name=name: self._heal(name))] * 2  # type: ignore[misc]
            elif name not in present:
                events += [("join", lambda name=name: self._start(name))] * 4  # type: ignore[misc]
        return events

    def _host(self, name: str) -> str | None:
        """Return the key of the running host with a name, None if it does not run."""
        key = f"{name}{self._started[name] - 1}"
        host = self._scene.running.get(key)
        return key if host is not None and host.exit_code is None else None

    def _key(self, name: str) -> str:
        key = self._host(name)
        assert key is not None
        return key

    def _note(self, event: str) -> None:
        self._events.append(f"step {self._scene.watch.last_step}: {event}")

    def _start(self, name: str) -> None:
        self._note(f"{name} joins")
        key = f"{name}{self._started[name]}"
        self._started[name] += 1
        self._scene.start(key, restarts=1000, pace_s=PACE_S)

    def _kill(self, name: str) -> None:
        self._note(f"{name} is killed")
        self._scene.kill(self._key(name))

    def _kill_worker(self, name: str) -> None:
        self._note(f"a worker of {name} is killed")
        send(signal.SIGKILL, self._scene.running[self._key(name)].pids(WORKER))

    def _leave(self, name: str) -> None:
        self._note(f"{name} leaves")
        key = self._key(name)
        self._left[key] = self._scene.running.pop(key)
        self._left[key].signal(signal.SIGINT)

    def _stop(self, name: str) -> None:
        host = self._scene.running[self._key(name)]
        is_whole, seconds = self._draw.random() < 0.5, self._draw.uniform(0.1, 5.0)
        pids = host.pids() if is_whole else host.pids(WORKER)
        self._note(f"{name if is_whole else 'the worker of ' + name} is stopped for {seconds:.1f} s")
        send(signal.SIGSTOP, pids)
        self._stopped.append((time.monotonic() + seconds, pids))

    def _continue(self, now: float) -> None:
        for until, pids in self._stopped:
            if until <= now:
                send(signal.SIGCONT, pids)
        self._stopped = [(until, pids) for until, pids in self._stopped if until > now]

    def _cut_off(self, name: str) -> None:
        self._note(f"{name} is cut off")
        self._cut.add(name)
        self._network.cut("abcd".index(name))

    def _heal(self, name: str) -> None:
        self._note(f"{name} is connected again")
        self._cut.discard(name)
        self._network.heal("abcd".index(name))

    def _is_clear(self) -> bool:
        return not self._cut and not self._stopped

    def _wait_for_steps(self, number: int) -> None:
        goal = self._scene.watch.last_step + number
        events = "; ".join(self._events[-12:])
        with suppress(AssertionError):
            self._scene.wait_until(lambda: self._scene.watch.last_step >= goal, "steps", PROGRESS_S)
        assert self._scene.watch.last_step >= goal, (
            f"no {number} steps in {PROGRESS_S:g} s after {events}: {self._scene.output()}"
        )


def check_usage(before: list[Usage], after: list[Usage]) -> None:
    """Check that torchrun and a worker that have seen all views have not leaked."""
    assert len(after) == len(before) == 2, "the worker of the host that is never killed has ended"
    for name, was, now in zip(("torchrun", "the worker"), before, after, strict=True):
        assert now.files <= was.files + EXTRA_FILES, f"{name} had {was.files} files, and {now.files} at the end"
        assert now.threads <= was.threads + EXTRA_THREADS, f"{name} had {was.threads} threads, and {now.threads}"
        grown = now.resident_bytes - was.resident_bytes
        assert grown <= EXTRA_BYTES, f"{name} has grown by {grown >> 20} MB"
