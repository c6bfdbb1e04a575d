"""Areas "leases" and "leases_on_fuse": processes compete for one run directory. Law: it never has two holders."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import ClassVar, NamedTuple

from acsgd.errors import RunError
from acsgd.failures.processes import ProcessIdentity
from acsgd.run.lock import lease, lock
from acsgd.run.lock.lease import Lease
from acsgd.run.lock.lock import RunLock
from tests.soak.area import ACCEPTED, Case, Outcome, UnavailableError

SPEED = 50
"""Factor by which the times of the lock are shortened."""
STALE_S = lease.STALE_S / SPEED
CASE_S = 4.0
"""Duration of the competition, seconds."""
CACHE_S = 30
"""Time for which names and missing names are cached, seconds: longer than a case."""
LISTING_S = 0.5
"""Maximum age of a listing, seconds."""
END_S = 20.0
"""Time within which a start must take over when all others were killed, seconds, on a busy machine."""


class Leases:
    """Processes that acquire the lease, check it as before a write, and release it, again and again.

    Some are killed; some are stopped, often until another has taken over, and continue. Each is on a host of its own,
    where only heartbeats show who is alive, or all are on one.
    """

    deadline_s: ClassVar[float] = CASE_S + 2 * END_S + 30
    memory_bytes: ClassVar[int] = 2**30

    @classmethod
    def prepare(cls, directory: Path) -> None:
        pass

    def __init__(self, directory: Path) -> None:
        lock.HEARTBEAT_S, lock.STALE_S = lock.HEARTBEAT_S / SPEED, STALE_S
        lease.STALE_S, lease.WAIT_S = STALE_S, END_S

    def run(self, case: Case) -> Outcome:
        draw = case.draw
        clients, kills, is_one_host = draw.randint(2, 4), draw.choice([0.1, 0.3, 0.6]), draw.random() < 0.3
        hosts = "one host" if is_one_host else "a host each"
        case.describe(f"{clients} processes on {hosts}, {kills:.0%} of the faults are kills")
        shared, log = case.directory / "shared", case.directory / "log"
        shared.mkdir()
        with self._views(shared, clients) as views:
            hosts_of = [0 if is_one_host else number for number in range(clients)]
            with contextlib.closing(Competition(draw, views, hosts_of, log)) as competition:
                competition.run(kills)
            _acquire_after_all(views[0])
        assert os.listdir(shared) == []
        check_tenures(log.read_text().splitlines())
        return ACCEPTED

    @contextlib.contextmanager
    def _views(self, shared: Path, number: int) -> Iterator[Sequence[Path]]:
        """Yield the directory as each process sees it."""
        yield [shared] * number


class LeasesOnFuse(Leases):
    """The same, each process through a mount of its own with caches that are out of date, as an NFS client may have.

    bindfs caches names and missing names; listings are up to LISTING_S old. Like an NFS client, it asks for a file
    when it is opened.
    """

    @classmethod
    def prepare(cls, directory: Path) -> None:
        """Raises UnavailableError if this machine or user cannot mount with bindfs."""
        if shutil.which("bindfs") is None:
            raise UnavailableError("needs bindfs: apt-get install bindfs")
        (directory / "shared").mkdir()
        try:
            with _mounted(directory / "shared", directory / "view"):
                pass
        except OSError as error:
            raise UnavailableError(f"cannot mount: {error}") from None

    @contextlib.contextmanager
    def _views(self, shared: Path, number: int) -> Iterator[Sequence[Path]]:
        with contextlib.ExitStack() as stack:
            views = [shared.with_name(f"view-{index}") for index in range(number)]
            yield [stack.enter_context(_mounted(shared, view)) for view in views]


class Competition:
    """Processes that run `hold_repeatedly`, number n on host hosts[n] with the view views[n] of the directory."""

    def __init__(self, draw: random.Random, views: Sequence[Path], hosts: Sequence[int], log: Path) -> None:
        self._draw = draw
        self._views = views
        self._hosts = hosts
        self._log = log
        self._log.touch()
        self._running = [self._start(number) for number in range(len(views))]

    def run(self, kills: float) -> None:
        """Kill and stop processes at random moments for CASE_S seconds. kills: fraction of kills."""
        end = time.monotonic() + CASE_S
        while time.monotonic() < end or not self._log.stat().st_size:
            time.sleep(self._draw.uniform(0.0, 0.3))
            number = self._newest_holder() if self._draw.random() < 0.7 else self._draw.randrange(len(self._running))
            victim = self._running[number]
            assert victim.is_alive(), f"process {number} ended by itself"
            if self._draw.random() < kills:
                victim.kill()
                victim.join()
                self._running[number] = self._start(number)
            else:
                os.kill(victim.pid or 0, signal.SIGSTOP)
                time.sleep(self._draw.uniform(0.0, 3.0) * STALE_S)
                os.kill(victim.pid or 0, signal.SIGCONT)

    def _newest_holder(self) -> int:
        """Return the number of the process that wrote the last line of the log; 0 if it has been killed."""
        pid = self._log.read_text().rpartition("\n")[0].rpartition("\n")[2].partition(".")[0]
        return next((number for number, process in enumerate(self._running) if str(process.pid) == pid), 0)

    def close(self) -> None:
        """Kill all processes."""
        for process in self._running:
            process.kill()
            process.join()

    def _start(self, number: int) -> BaseProcess:
        args = (self._hosts[number], self._views[number], self._log, self._draw.randrange(2**32))
        process = multiprocessing.get_context("fork").Process(target=hold_repeatedly, args=args, daemon=True)
        process.start()
        return process


def hold_repeatedly(host: int, directory: Path, log: Path, seed: int) -> None:
    """Acquire the lease, check it, release it, for ever.

    log: receives a line before each check, and one after it if it succeeded.
    """
    draw = random.Random(seed)
    process = dataclasses.replace(ProcessIdentity.current(), host=f"host-{host}", machine=f"machine {host}")
    if host == 0:
        process = ProcessIdentity.current()  # whose end others on this host see at once
    if directory.is_mount():
        _cache_listings()
    lines = os.open(log, os.O_WRONLY | os.O_APPEND)
    for tenure in itertools.count():
        lease = Lease(directory, "log.dir", process)
        with contextlib.suppress(RunError), RunLock([lease]) as held:
            lease.acquire(lambda note: None)
            held.start()
            for _ in range(draw.randint(1, 100)):
                os.write(lines, f"{process.pid}.{tenure} begins\n".encode())
                held.verify()
                os.write(lines, f"{process.pid}.{tenure} holds\n".encode())
                time.sleep(draw.uniform(0.0, 0.01))


class Tenure(NamedTuple):
    """The successful checks of one holder: lines of the log at which the first ended, and the last began."""

    first_end: int
    last_begin: int


def check_tenures(lines: Sequence[str]) -> None:
    """Raise AssertionError if two tenures overlap: each has a check that succeeded after one of the other's had.

    lines: "TENURE begins" or "TENURE holds", in the order in which they were written.
    """
    begun, tenures = dict[str, int](), dict[str, Tenure]()
    for index, line in enumerate(lines):
        name, _, event = line.partition(" ")
        if event == "begins":
            begun[name] = index
        else:
            tenures[name] = Tenure(tenures[name].first_end if name in tenures else index, begun[name])
    assert tenures, "nobody has held the lease"
    for (one, first), (other, second) in itertools.combinations(tenures.items(), 2):
        overlap = first.first_end < second.last_begin and second.first_end < first.last_begin
        assert not overlap, f"{one} and {other} held the lease at the same time"


def _acquire_after_all(directory: Path) -> None:
    """Acquire and release the lease as a process of another host."""
    started = time.monotonic()
    lease = Lease(directory, "log.dir", dataclasses.replace(ProcessIdentity.current(), machine="another"))
    lease.acquire(lambda note: None)
    lease.release()
    assert time.monotonic() - started < END_S, "a start waits longer than the limit after all others were killed"


@contextlib.contextmanager
def _mounted(source: Path, target: Path) -> Iterator[Path]:
    """Mount a directory through a file system that caches names and missing names."""
    target.mkdir()
    options = f"attr_timeout=0,entry_timeout={CACHE_S},negative_timeout={CACHE_S}"
    command = ["setpriv", "--pdeathsig", "TERM", "bindfs", "-f", "-o", options, str(source), str(target)]
    with subprocess.Popen(command, start_new_session=True) as server:  # which ends, and unmounts, with this process
        try:
            while not target.is_mount():
                if server.poll() is not None:
                    raise OSError(f"bindfs ended with exit code {server.returncode}")
                time.sleep(0.01)
            yield target
        finally:
            server.terminate()


def _cache_listings() -> None:
    """Let this process see listings that are up to LISTING_S old, also after its own changes."""
    iterdir = Path.iterdir
    cached = dict[Path, tuple[float, list[Path]]]()

    def listed(path: Path) -> Iterator[Path]:
        read_at, names = cached.get(path, (0.0, []))
        if time.monotonic() - read_at > LISTING_S:
            names = list(iterdir(path))
            cached[path] = time.monotonic(), names
        return iter(names)

    Path.iterdir = listed  # type: ignore[method-assign]
