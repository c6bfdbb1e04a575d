"""A run over five places of an internet, in which hosts come and go, and the laws that it must obey:

    .venv/bin/python -m benchmarks.runs.internet [--events 200] [--seed 1] [--stages 1] [--kinds relay kill ...]

Each place is a network namespace with a delay of 10 to 40 ms to the others' switch (so 20 to 80 ms between two places)
and a rate of 20 to 200 Mbit/s. Each host sees, by a mount namespace, one disk of its own, a tmpfs of 48 MB.

lab, office  open ports; container: behind a router that maps one port; home, cafe: behind routers, without a port. What
             these two send to each other passes through another host

Events follow from the seed, and from what is possible at the time; those of kinds that have occurred least are the
most probable. With --kinds they are of these kinds, where one of them is possible. With --stages 2, five hosts
are two replicas of two stages and a spare, and three are one replica and a spare.

kill      all processes of a host end at once; its disk stays
leave     a host leaves by Ctrl-C
for ever  a host is killed, and its disk is gone
return    a host starts with the disk that it had
join      a host starts with an empty disk
cut off   the link of a place is cut; heal: it is back
rebind    a router forgets its translations: connections through it stop without an end
relay     the host that passes on most between home and cafe is killed, and starts again
rotate    `acsgd net rotate`; then, if a place is free, a host with the former secret starts there, and must be refused
full      a disk is full until the next save; a host that ends because of that starts again
stop      the whole run is stopped, and started again with the disks at other places; some may be empty
fetch     `acsgd fetch` collects the newest checkpoint from the running hosts

Disks that are gone: at most one (checkpoint.copies - 1) before the next save. Hosts that are lost or cut off together
leave a majority. The laws: metrics.jsonl has each step once, on each disk, that of a spare the steps until it was one;
losses are those of one process that nothing disturbs; of the last checkpoint all files are there, each on two disks;
what is fetched is complete and valid; packets between places carry nothing but what is encrypted; no host prints an
error that its event does not explain.

Needs root, iproute2, nftables and conntrack.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import platform
import random
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from acsgd.commands.fetch import FetchCommand
from acsgd.commands.invitation import VERSION, Invitation
from acsgd.config.run_file import parse
from acsgd.io.files.checksum import file_checksum
from acsgd.mesh.mesh import rotate
from acsgd.shards.manifest import Manifest
from benchmarks.common import netlab
from tests.lib import scenes
from tests.lib.forked_torchrun import ForkedTorchrun, Host, forked_torchrun
from tests.lib.forks import finish
from tests.lib.launched import TRAIN
from tests.lib.patience import stretched, wait_until
from tests.lib.processes import CONTEXT

RUN = "internet"
PORT, MAPPED = 29400, 41000
SECRET = "the first secret of these hosts"
DISK_MB = 48
SAVE_EVERY = 10
"""Steps between checkpoints."""
LIMIT_S = 300.0
"""Time in which all hosts train again, seconds of a quiet machine."""
LONGEST_SILENCE_S = 10.0
"""Of elastic.silence on a busy machine, seconds: a host that counts as lost joins again, as after other events."""
TOLERANCE = 1e-4
"""Relative difference of losses: the order of sums differs, which hundreds of steps of AdamW amplify."""
MIN_CAPTURED_BYTES, CAPTURED_BYTES = 1 << 16, 1 << 22
MIN_RATIO = 0.97
"""Length of captured bytes after compression, relative to that before; of encrypted ones 1.0."""
FLAGS = ("--checkpoint.every", str(SAVE_EVERY), "--elastic.join_budget", "2", "--log.to", "jsonl,print")
REFUSED = "another secret"
"""What a host with a former secret prints."""


@dataclass(frozen=True)
class Place:
    """Where a host is. The first two are the endpoints of the run."""

    name: str
    conf: str
    """Its part of --rdzv-conf."""
    has_port: bool = True


PLACES = (
    Place("lab", f"listen=0.0.0.0:{PORT},announce={netlab.address(0)}:{PORT}"),
    Place("container", f"listen=0.0.0.0:{PORT},announce={netlab.address(1)}:{MAPPED}"),
    Place("home", "announce=none", has_port=False),
    Place("cafe", "announce=none", has_port=False),
    Place("office", f"listen=0.0.0.0:{PORT},announce={netlab.address(4)}:{PORT}"),
)
ENDPOINTS = (f"{netlab.address(0)}:{PORT}", f"{netlab.address(1)}:{MAPPED}")
ROUTERS: dict[str, dict[int, int]] = {"container": {MAPPED: PORT}, "home": {}, "cafe": {}}
"""Places behind routers, with the ports that these map."""
NAMES = tuple(place.name for place in PLACES)


@dataclass
class Event:
    """What has happened."""

    kind: str
    place: str
    after_step: int
    until_all_train_s: float | None = None
    """From the event to the first steps of all hosts that it left; None if the next event came before."""


@dataclass
class Internet:
    """A run of five hosts and what happens to it.

    inputs: as written by `scenes.prepare`; report: called with a line about each event; kinds: of events; empty = all.
    """

    directory: Path
    inputs: Path
    draw: random.Random
    stack: ExitStack
    report: Callable[[str], None]
    stages: int = 1
    kinds: Sequence[str] = ()
    events: list[Event] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    fetched: int = 0
    refused: int = 0

    def __post_init__(self) -> None:
        self._network = self.stack.enter_context(
            netlab.lab(hosts=len(PLACES), delay_s=[self.draw.uniform(0.01, 0.04) for _ in PLACES])
        )
        self._namespaces = dict(zip(NAMES, self._network.namespaces, strict=True))
        self._routers: dict[str, netlab.Router] = {}
        for name, ports in ROUTERS.items():
            router = netlab.behind_router(self._network, NAMES.index(name), ports)
            self._routers[name] = self.stack.enter_context(router)
            self._namespaces[name] = self._routers[name].namespace
        for host in range(len(PLACES)):
            self._network.limit(20 * 10 ** self.draw.random(), host)
        self._temporary = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="net-", dir="/tmp")))
        for name in (*NAMES, "stranger"):
            (self._temporary / name).mkdir()
        for name in ("disk", "disks", "hosts"):
            (self.directory / name).mkdir()
        self.capture = self.stack.enter_context(captured(self._network.namespaces[NAMES.index("office")]))
        self._flags = [*FLAGS, "--pp.stages", str(self.stages)]
        self._flags += ["--elastic.silence", f"{min(stretched(3.0), LONGEST_SILENCE_S):.1f}"]
        self._flags += ["--elastic.hang", f"{stretched(30.0):.1f}", "--run.timeout", f"{stretched(60.0):.1f}"]
        self._began = time.monotonic()
        self._secret = SECRET
        self._running: dict[str, ForkedTorchrun] = {}
        self._disks: dict[str, Path | None] = {}
        """By place; None: it is gone."""
        self._number = 0
        self._cut: set[str] = set()
        self._members: Sequence[str] = NAMES
        """Places of the hosts that have trained last, of which a majority must be connected."""
        self._unsaved_since: int | None = None
        """Step before which copies may have been on a disk that is gone; None if a later checkpoint is complete."""
        self._unsettled: list[tuple[Event, float]] = []
        """Events since all hosts have trained, and when they were."""

    # Hosts and disks.

    def _new_disk(self) -> Path:
        self._number += 1
        path = self.directory / "disks" / str(self._number)
        path.mkdir()
        netlab.run(f"mount -t tmpfs -o size={DISK_MB}m,mode=700 tmpfs {path}")
        self.stack.callback(netlab.run, f"umount -l {path}")
        return path

    def _start(self, name: str, *, secret: str | None = None, min_hosts: int = 2) -> ForkedTorchrun:
        """Start a host at a place, with the disk that is there, or an empty one. secret: not that of the run."""
        disk = self._disks.get(name) or self._new_disk()
        (disk / "secret").write_text(secret or self._secret)
        (disk / "secret").chmod(0o600)
        self._number += 1
        (directory := self.directory / "hosts" / f"{name}-{self._number}").mkdir()
        at = self.directory / "disk"
        arguments = ["--nnodes", f"{min_hosts}:8", "--nproc-per-node", "1", "--max-restarts", "1000"]
        arguments += ["--monitor-interval", "0.1", "--rdzv-backend", "acsgd", "--rdzv-id", RUN]
        arguments += ["--rdzv-endpoint", ",".join(ENDPOINTS)]
        conf = PLACES[NAMES.index(name)].conf
        arguments += ["--rdzv-conf", f"mesh=true,secret={at / 'secret'},{conf}"]
        arguments += [TRAIN, str(self.inputs / "run.toml"), "--log.dir", str(at / "run"), *self._flags]
        host = Host(
            arguments,
            {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            directory,
            self._namespaces[name],
            agent=partial(_set_up, str(self._temporary / name)),
            mounts=partial(netlab.use_disk, disk, at, self.directory / "disks"),
        )
        started = self.stack.enter_context(forked_torchrun(host))
        if secret is None:
            self._disks[name], self._running[name] = disk, started
        return started

    def _connected(self) -> list[str]:
        return [name for name in NAMES if name in self._running and name not in self._cut]

    def _lines(self, name: str) -> list[dict[str, Any]]:
        """Return the complete lines of metrics.jsonl on the disk at a place."""
        disk = self._disks[name]
        file = disk / "run/metrics.jsonl" if disk is not None else None
        text = file.read_text() if file is not None and file.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def last_step(self, name: str | None = None) -> int:
        """Return the last step on the disk at a place, by default on that with the most."""
        names = [name] if name is not None else [each for each, disk in self._disks.items() if disk is not None]
        return max((line["step"] for each in names for line in self._lines(each)[-40:] if "step" in line), default=0)

    def _newest_view(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the newest view on the disks at some places."""
        views = [line for name in names for line in self._lines(name) if "view" in line]
        none = {"view": 0, "hosts": 0, "spares": 0, "after_step": 0}
        return max(views, key=lambda line: int(line["view"]), default=none)

    def _have_done(self, step: int, names: Sequence[str]) -> bool:
        """Return whether all hosts at some places have completed a step, except for spares, which note no steps."""
        spares = self._newest_view(names)["spares"]
        return sum(self.last_step(name) >= step for name in names) >= len(names) - spares

    # Waiting.

    def settle(self) -> None:
        """Wait until all connected hosts have trained together since the latest event.

        There may be no new view: if nothing has happened, or a link was cut too briefly. Since each step needs all
        hosts of its view, two further steps on all disks show that all take part.
        """
        connected = self._connected()
        goal = self.last_step() + 2

        def have_trained() -> bool:
            newest = self._newest_view(connected)
            goal_in_view = max(goal, newest["after_step"] + 2)
            return newest["hosts"] == len(connected) and self._have_done(goal_in_view, connected)

        self._wait_until(have_trained, f"steps of {connected}")
        now = time.monotonic()
        for event, at in self._unsettled:
            event.until_all_train_s = now - at
        self._unsettled.clear()
        self._members = connected

    def _wait_for_steps(self, number: int) -> None:
        """Wait for more steps on each connected host."""
        goal = self.last_step() + number
        self._wait_until(lambda: self._have_done(goal, self._connected()), f"step {goal}")

    def _wait_for_save(self) -> None:
        """Wait for a checkpoint since the latest loss of a disk, with its copies."""
        if self._unsaved_since is None:
            return
        since = self._unsaved_since
        self._wait_until(lambda: (saved := self._complete()) is not None and saved > since, f"save after step {since}")
        self._unsaved_since = None

    def _complete(self) -> int | None:
        """Return the newest step of whose checkpoint each file is on two disks of connected hosts."""
        disks = [disk for name in self._connected() if (disk := self._disks[name]) is not None]
        with contextlib.suppress(OSError):  # being removed
            for step in sorted({path.name for disk in disks for path in _checkpoints(disk)}, reverse=True):
                if not _missing([disk / "run/checkpoints" / step for disk in disks]):
                    return int(step.removeprefix("step-"))
        return None

    def _wait_until(self, condition: Callable[[], object], what: str) -> None:
        def described() -> str:
            return f"no {what}: {self.describe()}"

        def holds() -> object:
            self._check_running()
            return condition()

        wait_until(holds, LIMIT_S, poll_s=0.25, describe=described)

    def _check_running(self) -> None:
        for name, host in self._running.items():
            assert host.exit_code is None, f"{name} has ended: {host.stderr[-3000:]} {self.describe()}"

    def describe(self) -> str:
        """Return the latest events, and the end of what each host has printed."""
        events = "; ".join(f"step {each.after_step}: {each.place} {each.kind}" for each in self.events[-10:])
        hosts = "\n".join(
            f"--- {name}, step {self.last_step(name)}, {self._newest_view([name])}\n{host.stderr[-1500:]}\n"
            f"{host.stdout[-700:]}"
            for name, host in self._running.items()
        )
        return f"{events}; cut {sorted(self._cut)}\n{hosts}"

    # Events.

    def start(self) -> None:
        """Start a host at each place."""
        for name in NAMES:
            self._start(name, min_hosts=len(PLACES))
        self.settle()

    def inject(self, number: int) -> None:
        """Let events occur: of the kinds that are possible, those that have occurred least are the most probable."""
        for _ in range(number):
            possible = self._possible()
            possible = {kind: possible[kind] for kind in self.kinds if kind in possible} or possible
            counts = Counter(event.kind for event in self.events)
            weights = {kind: (1 + counts[kind]) ** -2 for kind in sorted(possible)}
            (kind,) = self.draw.choices([*weights], [*weights.values()])
            name = self.draw.choice(possible[kind])
            event = Event(kind, name, self.last_step())
            self.events.append(event)
            began = time.monotonic()
            self.report(
                f"{began - self._began:.0f} s, step {event.after_step}: event {len(self.events)}, {kind} {name}"
            )
            if kind not in ("rotate", "rebind", "full", "fetch"):
                self._unsettled.append((event, began))
            getattr(self, f"_{kind.replace(' ', '_')}")(name)
            must_settle = not self._can_lose() or kind in ("for ever", "join", "return", "stop", "relay")
            if self._unsettled and (must_settle or self.draw.random() < 0.6):
                self.settle()
            elif not self._unsettled:
                self._wait_for_steps(self.draw.randint(1, 3))
                event.until_all_train_s = time.monotonic() - began
            else:
                time.sleep(self.draw.uniform(0.0, 2.0))

    def _can_lose(self) -> bool:
        return len({*self._members} & {*self._connected()}) > len(self._members) // 2 + 1

    def _possible(self) -> dict[str, list[str]]:
        """Return the kinds of events that may occur now, each with its places."""
        connected, is_settled = self._connected(), not self._unsettled
        is_whole = is_settled and not self._cut
        reached = [name for name in connected if name in NAMES[:2]]
        lost = [name for name in connected if self._can_lose() and reached != [name]]
        free = [name for name in NAMES if name not in self._running and name not in self._cut] if reached else []
        # its router does not lead back what is sent to the mapped port from behind it
        fetching = [name for name in connected if reached not in ([], ["container"]) or name != "container"]
        is_saved = is_settled and self._unsaved_since is None
        ports = [place.name for place in PLACES if place.has_port]
        events = {
            "kill": lost,
            "leave": lost if is_settled else [],
            "for ever": lost if is_saved else [],
            "return": [name for name in free if self._disks[name] is not None],
            "join": [name for name in free if self._disks[name] is None or is_saved],
            "cut off": lost,
            "heal": sorted(self._cut),
            "rebind": [name for name in connected if name in ("home", "cafe")] if is_settled else [],
            "relay": ["relay"] if is_whole and {"home", "cafe", *ports} <= {*connected} else [],
            "rotate": [name for name in connected if name in ports] if is_whole else [],
            "full": connected if is_whole and is_saved and len(connected) > 2 else [],
            "stop": ["all"] if is_whole and is_saved else [],
            "fetch": fetching if is_whole and is_saved and self._complete() is not None else [],
        }
        return {kind: places for kind, places in events.items() if places}

    def _kill(self, name: str) -> None:
        self._running.pop(name).kill()

    def _leave(self, name: str) -> None:
        host = self._running.pop(name)
        host.signal(signal.SIGINT)
        self._wait_until(lambda: not host.pids(), f"end of {name}")
        assert not host.errors, f"{name}, which leaves, prints {host.errors}"

    def _for_ever(self, name: str) -> None:
        self._unsaved_since = self.last_step()
        self._kill(name)
        self._lose_disk(name)
        self.settle()
        self._wait_for_save()

    def _lose_disk(self, name: str) -> None:
        disk, self._disks[name] = self._disks[name], None
        for path in disk.iterdir() if disk is not None else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _return(self, name: str) -> None:
        self._start(name)

    def _join(self, name: str) -> None:
        if self._disks[name] is not None:
            self._unsaved_since = self.last_step()
            self._lose_disk(name)
        self._start(name)
        self.settle()
        self._wait_for_save()

    def _cut_off(self, name: str) -> None:
        self._cut.add(name)
        self._network.cut(NAMES.index(name))

    def _heal(self, name: str) -> None:
        self._cut.discard(name)
        self._network.heal(NAMES.index(name))
        if name in self._routers:
            self._routers[name].rebind()

    def _rebind(self, name: str) -> None:
        self._routers[name].rebind()

    def _relay(self, _: str) -> None:
        names = [place.name for place in PLACES if place.has_port]
        relay = max(names, key=self._connections_with_homes)
        self._kill(relay)
        self.settle()
        self._start(relay)

    def _connections_with_homes(self, name: str) -> int:
        """Return the number of connections of a host with home and cafe."""
        homes = {socket.inet_aton(netlab.address(NAMES.index(home)))[::-1].hex().upper() for home in ("home", "cafe")}
        rows = netlab.run(f"ip netns exec {self._namespaces[name]} cat /proc/net/tcp").splitlines()[1:]
        return sum(row.split()[2].partition(":")[0] in homes for row in rows)

    def _rotate(self, name: str) -> None:
        former, disk = self._secret, self._disks[name]
        assert disk is not None
        tempfile.tempdir = str(self._temporary / name)
        try:
            rotate(RUN)
        finally:
            tempfile.tempdir = None
        self._secret = (disk / "secret").read_text().strip()
        assert self._secret != former
        self._wait_for_steps(1)
        free = [each for each in NAMES if each not in self._running and self._disks[each] is None]
        if free:
            stranger = self._start(free[0], secret=former)
            self._wait_until(lambda: stranger.exit_code is not None or REFUSED in stranger.stderr, "refusal")
            assert REFUSED in stranger.stderr, stranger.stderr
            stranger.kill()
            self.refused += 1

    def _full(self, name: str) -> None:
        disk, host = self._disks[name], self._running[name]
        assert disk is not None
        with (disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(1 << 20)):
                pass
        others = [each for each in self._connected() if each != name]
        goal = self.last_step() + SAVE_EVERY + 2

        def is_saved_without() -> bool:
            return host.exit_code is not None or self._have_done(goal, others)

        del self._running[name]
        self._wait_until(is_saved_without, "save without a disk")
        (disk / "filler").unlink()
        if host.exit_code is None:
            self._running[name] = host
        else:
            self._start(name)
            self._unsettled.append((self.events[-1], time.monotonic()))
            self.settle()
        self._wait_for_steps(1)

    def _stop(self, _: str) -> None:
        self._end()
        kept = [disk for disk in self._disks.values() if disk is not None]
        places = [name for name in NAMES if name not in NAMES[:2]]
        self.draw.shuffle(kept)
        self.draw.shuffle(places)
        for name in NAMES:
            self._disks[name] = None
        for name, disk in zip((*NAMES[:2], *places), kept, strict=False):
            self._disks[name] = disk
        for name in NAMES:
            self._start(name)

    def _end(self) -> None:
        """End all hosts by SIGTERM."""
        hosts = {**self._running}
        self._running.clear()
        for host in hosts.values():
            host.signal(signal.SIGTERM)
        self._wait_until(lambda: not any(host.pids() for host in hosts.values()), "end of all hosts")
        for name, host in hosts.items():
            assert not host.errors, f"{name} prints {host.errors}"

    def _fetch(self, name: str) -> None:
        file, target = self.directory / "invitation", self.directory / f"fetched-{len(self.events)}"
        options = f'log.dir = "{self.directory / "elsewhere"}"'
        invitation = Invitation(RUN, self._secret, ENDPOINTS, "1:8", "true", options, VERSION)
        file.write_text(invitation.encode())
        process = CONTEXT.Process(target=_fetch, args=(self._namespaces[name], self.directory, file, target))
        process.start()
        self._wait_until(lambda: process.exitcode is not None, "end of acsgd fetch")
        assert process.exitcode == 0, (self.directory / "fetch-errors").read_text()[-2000:]
        manifest = Manifest.read(target)
        assert all(
            file_checksum(target / each.file) == each.checksum for each in manifest.files if _is_layer(each.file)
        )
        shutil.rmtree(target)
        self.fetched += 1

    # The laws.

    def finish(self) -> dict[str, Any]:
        """Heal all, start all, fetch, end the run, and check the laws; return figures."""
        for name in sorted(self._cut):
            self._heal(name)
        for name in NAMES:
            if name not in self._running:
                self._start(name)
        self.settle()
        self._unsaved_since = self.last_step()
        self._wait_for_save()
        self._fetch("office")
        with contextlib.closing(self.capture):
            ratio = self.capture.ratio()
        assert ratio >= MIN_RATIO, f"what was captured is compressed to {ratio:.2f} of its length: it is not encrypted"
        self._end()
        disks = [disk for disk in self._disks.values() if disk is not None]
        steps = self.last_step()
        assert self._have_done(steps, NAMES), "metrics lack the last steps"
        losses = []
        for name in NAMES:
            lines = [line for line in self._lines(name) if "step" in line]
            assert [line["step"] for line in lines] == [*range(1, len(lines) + 1)], f"metrics of {name} lack steps"
            losses.append([line["loss"] for line in lines])
        losses.sort(key=len, reverse=True)
        for each in losses:
            pairs = enumerate(zip(each, losses[0], strict=False), 1)
            differing = [(step, *pair) for step, pair in pairs if pair[0] != pair[1]]
            assert not differing, f"disks have different losses: {differing[:5]}"
        saved = [disk / f"run/checkpoints/step-{steps:08d}" for disk in disks]
        assert not (missing := _missing(saved)), f"files of the last checkpoint are not on two disks: {missing}"
        return {
            "steps": steps,
            "views": self._newest_view(NAMES)["view"],
            "loss difference": scenes.check_losses(losses[0], self._calm_losses(steps), TOLERANCE),
            "fetched": self.fetched,
            "refused": self.refused,
            "captured": ratio,
        }

    def _calm_losses(self, steps: int) -> list[float]:
        """Return the losses of the same steps in one process that nothing disturbs."""
        calm = self.directory / "calm"
        flags = ("--log.dir", str(calm), "--log.to", "jsonl", "--optim.steps", str(steps))
        finish(parse([str(self.inputs / "run.toml"), *flags]), 1)
        return [json.loads(line)["loss"] for line in (calm / "metrics.jsonl").read_text().splitlines()]


def _checkpoints(disk: Path) -> list[Path]:
    return sorted((disk / "run/checkpoints").glob("step-????????"))


def _missing(directories: Sequence[Path]) -> list[str]:
    """Return the files of a checkpoint that are not on two disks; its manifest if it is on none."""
    found = [path for path in directories if (path / "manifest.json").is_file()]
    if not found:
        return ["manifest.json"]
    files = Manifest.read(found[0]).files
    return [each.file for each in files if sum((path / each.file).is_file() for path in directories) < 2]


def _is_layer(name: str) -> bool:
    return not name.startswith("replica")


def _set_up(directory: str) -> None:
    """Make temporary directories of this process in a directory, and log what the mesh does."""
    tempfile.tempdir = directory
    logger = logging.getLogger("acsgd.mesh")
    logger.setLevel(logging.INFO)
    handler = logging.FileHandler("mesh.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False


def _fetch(namespace: str, directory: Path, file: Path, target: Path) -> None:
    """Fetch in this process, which is on a host of its own."""
    errors = os.open(directory / "fetch-errors", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    netlab.enter(namespace)
    os.environ["HOME"] = str(directory)
    FetchCommand(str(file), to=target).run()


class Capture:
    """The first bytes of TCP that pass the interface of a host. Captures in a thread."""

    def __init__(self, namespace: str) -> None:
        self._bytes = bytearray()
        opened = Future[socket.socket]()
        threading.Thread(target=self._run, args=(namespace, opened), daemon=True).start()
        self._socket = opened.result()

    def _run(self, namespace: str, opened: Future[socket.socket]) -> None:
        try:
            netlab.enter(namespace)
            packets = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0800))
            packets.bind(("eth0", 0x0800))  # within the host, between programs and the mesh, nothing is encrypted
        except BaseException as error:
            opened.set_exception(error)
            return
        opened.set_result(packets)
        with contextlib.suppress(OSError):
            while len(self._bytes) < CAPTURED_BYTES:
                packet = packets.recv(1 << 16)
                begin = 4 * (packet[0] & 15)
                if packet[9] == socket.IPPROTO_TCP:
                    self._bytes += packet[begin + 4 * (packet[begin + 12] >> 4) :]

    def ratio(self) -> float:
        """Return the length of the captured bytes after compression, relative to that before.

        Raises AssertionError if there are too few to tell.
        """
        captured = bytes(self._bytes)
        assert len(captured) >= MIN_CAPTURED_BYTES, f"{len(captured)} bytes were captured"
        return len(zlib.compress(captured)) / len(captured)

    def close(self) -> None:
        self._socket.close()


@contextlib.contextmanager
def captured(namespace: str) -> Iterator[Capture]:
    """Capture until the end."""
    with contextlib.closing(Capture(namespace)) as capture:
        yield capture


def run(
    directory: Path,
    inputs: Path,
    draw: random.Random,
    events: int,
    report: Callable[[str], None],
    *,
    stages: int = 1,
    kinds: Sequence[str] = (),
) -> Internet:
    """Let events occur in a run, and check the laws; return it. Raises AssertionError."""
    with ExitStack() as stack:
        internet = Internet(directory, inputs, draw, stack, report, stages, kinds)
        internet.start()
        internet.inject(events)
        internet.figures = internet.finish()
    return internet


def event_table(events: Sequence[Event]) -> Table:
    """Return the number of events of each kind, and the times until all hosts trained."""
    table = Table(title="Events", title_justify="left")
    for column in ("event", "number", "until all train, s: median", "max"):
        table.add_column(column, justify="left" if column == "event" else "right")
    by_kind = defaultdict[str, list[Event]](list)
    for event in events:
        by_kind[event.kind].append(event)
    for kind, found in sorted(by_kind.items()):
        times = [each.until_all_train_s for each in found if each.until_all_train_s is not None]
        shown = (f"{statistics.median(times):.1f}", f"{max(times):.1f}") if times else ("", "")
        table.add_row(kind, str(len(found)), *shown)
    return table


def main() -> None:
    """Run, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", default=(), help="kinds of events. Default: all")
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/internet.json"), help="path of the results")
    options, console = parser.parse_args(), Console(width=120)
    netlab.check(needs_tun=True, needs_nat=True)
    with tempfile.TemporaryDirectory(prefix="internet-") as scratch:
        directory = Path(scratch)
        (inputs := directory / "inputs").mkdir()
        scenes.prepare(inputs)
        draw = random.Random(options.seed)
        chosen = {"stages": options.stages, "kinds": options.kinds}
        internet = run(directory, inputs, draw, options.events, partial(print, file=sys.stderr, flush=True), **chosen)
    console.print(event_table(internet.events))
    console.print(", ".join(f"{key} {value:.3g}" for key, value in internet.figures.items()))
    about = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    events = [vars(each) for each in internet.events]
    result = {"about": about, "seed": options.seed, **chosen, "figures": internet.figures, "events": events}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
