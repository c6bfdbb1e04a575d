"""Checkpoints of hosts with disks of their own: which host holds which file, and how files get from one to another.

Ranks that see the same directory share a *disk*. Each disk has a directory of each checkpoint, with the same manifest
and some of the files that it lists. The first rank of a disk, its leader, sends and receives files for all its ranks.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from acsgd.errors import CorruptFileError, RunError, explain, reason
from acsgd.groups import Groups
from acsgd.io.checkpoint.directory import CheckpointDirectory
from acsgd.io.files.atomic import flush, fsync_directory, rename
from acsgd.io.files.checksum import new_file_checksum
from acsgd.shards.disk import ShardDirectory
from acsgd.shards.manifest import MANIFEST, Manifest, StoredFile

CHUNK_BYTES = 1 << 22
"""Maximum size of a message. run.timeout is the limit of each, so a link needs CHUNK_BYTES per run.timeout."""
TAG = 0x66696C65
"""Tag of the messages with parts of files, of which no other message of the group has."""


@dataclass(frozen=True)
class Disks:
    """Which ranks see the same directory. Default: all ranks."""

    members: tuple[tuple[int, ...], ...] = ((0,),)
    """Ranks of each disk, the leader first; in the order of their leaders."""
    names: tuple[str, ...] = ("",)
    """Host of each disk, for messages."""

    @property
    def is_shared(self) -> bool:
        """Whether all ranks see the same directory."""
        return len(self.members) == 1

    def is_leader(self, rank: int) -> bool:
        """Return whether a rank writes what is written once per disk."""
        return any(rank == ranks[0] for ranks in self.members)

    def of(self, rank: int) -> int:
        """Return the number of the disk of a rank."""
        return 0 if self.is_shared else next(disk for disk, ranks in enumerate(self.members) if rank in ranks)

    def hosts_of(self, holders: Mapping[str, Sequence[int]]) -> dict[str, list[str]]:
        """Return the hosts that hold each file. holders: their disks."""
        return {file: [self.names[disk] for disk in disks] for file, disks in holders.items()}


SHARED = Disks()


def place(origin: int, layers: Sequence[Collection[str]], layer: str, *, copies: int) -> tuple[int, ...]:
    """Return the disks that hold a file of a layer: the one on which it was written, then those of its copies.

    layers: which the ranks of each disk hold. Disks whose ranks hold the layer, and so read it when they resume, get
    copies first, then the next disks in a ring.
    """
    ring = [(origin + distance) % len(layers) for distance in range(len(layers))]
    return tuple(sorted(ring, key=lambda disk: (disk != origin, layer not in layers[disk]))[:copies])


class FileTransfer(NamedTuple):
    """A file that one disk sends to another."""

    file: StoredFile
    source: int
    target: int


def plan_transfers(
    files: Iterable[StoredFile], held: Sequence[Collection[str]], wanted: Sequence[Collection[str]]
) -> list[FileTransfer]:
    """Return the transfers after which each disk has the files that it wants, spread evenly over those that have them.

    held, wanted: names of files, by disk. A file that no disk holds is left out.
    """
    transfers, sent = [], [0] * len(held)
    for file in files:
        holders = [disk for disk, names in enumerate(held) if file.file in names]
        for target, names in enumerate(wanted):
            if file.file in names and holders and target not in holders:
                source = min(holders, key=lambda disk: sent[disk])
                sent[source] += file.bytes
                transfers.append(FileTransfer(file, source, target))
    return transfers


class RateLimit:
    """A limit of what one thread sends. bytes_per_s: None = no limit."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def wait(self, size: int) -> None:
        """Wait until some bytes may be sent."""
        time.sleep(max(0.0, self._free_at - time.monotonic()))
        self._free_at = time.monotonic() + (size / self._bytes_per_s if self._bytes_per_s else 0.0)


@dataclass(frozen=True)
class FileExchange:
    """Sends files from disk to disk, while their ranks train or wait."""

    groups: Groups
    disks: Disks
    rate: float | None = None
    """Maximum number of bytes per second that a disk sends; None = no limit."""

    @property
    def _disk(self) -> int:
        return self.disks.of(self.groups.world.rank())

    def run(self, transfers: Sequence[FileTransfer], directory: Path) -> str:
        """Do this rank's part of some transfers, the same on all ranks; no-op on a rank that is no leader.

        directory: of the files, at the same path on all disks. A file that was received is verified and on disk, or
        absent. Returns why the first file could not be read, written or verified here, empty = all could. Raises
        RunError if another rank fails.
        """
        if not self.disks.is_leader(self.groups.world.rank()):
            return ""
        problems: list[str] = []
        failures: list[Exception] = []

        def send() -> None:
            try:
                problems.extend(self._send_all(transfers, directory))
            except Exception as failure:
                failures.append(failure)

        # Each waits only for transfers before it in the list, so both ways may be busy and nobody waits in a circle.
        sender = threading.Thread(target=send, name="send files", daemon=True)
        sender.start()
        problems.extend(self._receive_all(transfers, directory))
        self.groups.waits.poll(lambda within_s: _has_ended(sender, within_s), math.inf)
        for failure in failures:
            raise failure
        return next(iter(problems), "")

    def _send_all(self, transfers: Sequence[FileTransfer], directory: Path) -> Iterator[str]:
        limit = RateLimit(self.rate)
        for file, source, target in transfers:
            if source != self._disk:
                continue
            rank, path = self.disks.members[target][0], directory / file.file
            self._meet(file, target, rank)
            with _opened(path, "rb") as (content, problems):
                for size in _chunks(file.bytes, self.rate):
                    part = b""
                    with recorded(problems, path):
                        part = content.read(size) if content else b""
                    # the receiver waits for as many bytes as the manifest says, and finds out that they are others
                    tensor = torch.frombuffer(bytearray(part.ljust(size, b"\0")), dtype=torch.uint8)
                    limit.wait(size)
                    with self._errors(file, rank):
                        self.groups.waits.wait(self.groups.background.isend(tensor, rank, TAG))
            yield from problems

    def _receive_all(self, transfers: Sequence[FileTransfer], directory: Path) -> Iterator[str]:
        for file, source, target in transfers:
            if target != self._disk:
                continue
            rank = self.disks.members[source][0]
            self._meet(file, target, rank)
            digest, partial = new_file_checksum(), directory / f".{file.file}.partial"
            with _opened(partial, "wb") as (content, problems):
                for size in _chunks(file.bytes, self.rate):
                    buffer = torch.empty(size, dtype=torch.uint8)
                    with self._errors(file, rank):
                        self.groups.waits.wait(self.groups.background.irecv(buffer, rank, TAG))
                    digest.update(buffer.numpy().data)
                    with recorded(problems, partial):
                        if content and not problems:
                            content.write(buffer.numpy().data)
                with recorded(problems, partial):
                    if content and not problems:
                        content.flush()
                        os.fsync(content.fileno())
            if not problems and digest.hexdigest() != file.checksum:
                problems.append(f"{file.file} of {self.disks.names[source]} is not what its manifest says")
            with recorded(problems, partial):
                if problems:
                    partial.unlink(missing_ok=True)
                else:
                    partial.replace(directory / file.file)
                    fsync_directory(directory)
            yield from problems

    def _meet(self, file: StoredFile, target: int, rank: int) -> None:
        """Wait until the other end of a transfer is ready: until then, the limit of a message does not count."""
        self.groups.meet(f"file/{target}/{file.file}", rank, timeout_s=math.inf)

    @contextlib.contextmanager
    def _errors(self, file: StoredFile, rank: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            me, host = self.groups.world.rank(), socket.gethostname()
            raise RunError(
                f"rank {me} on {host}: the copy of {file.file} between ranks {me} and {rank} failed ({reason(error)})",
                awaited=[rank],
            ) from error


def _has_ended(thread: threading.Thread, within_s: float) -> bool:
    thread.join(min(within_s, threading.TIMEOUT_MAX))
    return not thread.is_alive()


def _chunks(size: int, rate: float | None) -> Iterator[int]:
    """Yield the sizes of the messages of a file: at most about one per second with a rate, bytes per second."""
    most = CHUNK_BYTES if rate is None else max(1, min(CHUNK_BYTES, int(rate)))
    for start in range(0, size, most):
        yield min(most, size - start)


@contextlib.contextmanager
def _opened(path: Path, mode: str) -> Iterator[tuple[Any, list[str]]]:
    """Open a file; yield None in its place, and why, if that fails."""
    problems: list[str] = []
    with contextlib.ExitStack() as stack:
        content = None
        with recorded(problems, path):
            content = stack.enter_context(path.open(mode))
        yield content, problems


@contextlib.contextmanager
def recorded(problems: list[str], path: Path) -> Iterator[None]:
    """Append the message of an OSError of a file to a list, and suppress it."""
    try:
        yield
    except OSError as error:
        named = OSError(error.errno, error.strerror, str(path))
        problems.append(explain(named) or str(named))


def share_manifests(
    directory: CheckpointDirectory, groups: Groups, disks: Disks, *, timeout_s: float, last_step: int | None = None
) -> tuple[list[str], list[str]]:
    """Let all disks have the manifests of all checkpoints that any of them has. A collective call.

    Where two have other checkpoints of the same step, as after a run went on without one of them, that of most disks
    counts, and the other is set aside. So are those after last_step. Returns sentences for the user, and why ranks
    could not write, empty = could.
    """
    rank = groups.world.rank()
    own, listed, notes = _list_manifests(directory, groups, disks, last_step, timeout_s)
    if all(each == listed[0] for each in listed):
        return notes, []
    counts = {step: Counter(each[step] for each in listed if step in each) for each in listed for step in each}
    chosen = {step: count.most_common(1)[0][0] for step, count in counts.items()}
    sources = {
        step: next(disk for disk, each in enumerate(listed) if each.get(step) == chosen[step]) for step in chosen
    }
    mine = {
        step: own[int(step)].decode()
        for step, disk in sources.items()
        if rank == disks.members[disk][0] and any(each.get(step) != chosen[step] for each in listed)
    }
    texts = groups.all_gather_text("sharing manifests", json.dumps(mine), timeout_s=timeout_s)
    problems: list[str] = []
    with recorded(problems, directory.path):
        for step, raw in (item for text in texts for item in json.loads(text).items() if disks.is_leader(rank)):
            if listed[disks.of(rank)].get(step) != chosen[step]:
                if int(step) in own:
                    directory.set_aside(directory.of(int(step)))
                _write_manifest(directory.of(int(step)), raw)
    # which all ranks of a disk read next
    failures = groups.all_gather_text("writing manifests", "".join(problems), timeout_s=timeout_s)
    others = [
        f"{directory.of(int(step))} of {disks.names[disk]} is another one than that of {disks.names[sources[step]]}, "
        "and set aside"
        for step in chosen
        for disk, each in enumerate(listed)
        if each.get(step, chosen[step]) != chosen[step]
    ]
    return [*notes, *others], failures


def _list_manifests(
    directory: CheckpointDirectory, groups: Groups, disks: Disks, last_step: int | None, timeout_s: float
) -> tuple[dict[int, bytes], list[dict[str, str]], list[str]]:
    """Set aside the checkpoints after a step, on all disks, and list the others. A collective call.

    Returns the manifests of this rank's disk, if it is the leader, their checksums by step of each disk, and sentences
    for the user.
    """
    rank, aside, own = groups.world.rank(), list[str](), dict[int, bytes]()
    if disks.is_leader(rank):
        if last_step is not None:
            aside = _set_later_aside(directory, last_step, disks.names[disks.of(rank)])
        own = _manifests(directory)
    mine = json.dumps([aside, {step: new_file_checksum(raw).hexdigest() for step, raw in own.items()}])
    texts = groups.all_gather_text("listing checkpoints of all hosts", mine, timeout_s=timeout_s)
    all_aside, digests = zip(*map(json.loads, texts), strict=True)
    return own, [digests[ranks[0]] for ranks in disks.members], [sentence for each in all_aside for sentence in each]


def _write_manifest(path: Path, raw: str) -> None:
    """Write the manifest of a checkpoint, whose directory need not exist."""
    path.mkdir(parents=True, exist_ok=True)
    (path / f".{MANIFEST}").write_text(raw)
    flush(path / f".{MANIFEST}")
    rename(path / f".{MANIFEST}", path / MANIFEST)


def _set_later_aside(directory: CheckpointDirectory, step: int, name: str) -> list[str]:
    """Set aside the checkpoints after a step on a disk; return sentences for the user. name: of the disk."""
    found: list[str] = []
    with recorded(found, directory.path):
        for later in [each for each in directory.steps() if each > step]:
            aside = directory.set_aside(path := directory.of(later))
            found.append(f"{path} of {name} is later than step {step} of the run; renamed to {aside.name}")
    return found


def _manifests(directory: CheckpointDirectory) -> dict[int, bytes]:
    """Return the manifests of the checkpoints in a directory, without those that are missing or corrupt."""
    found = {}
    for step in directory.steps():
        with contextlib.suppress(ValueError, CorruptFileError, OSError):
            Manifest.read(directory.of(step))
            found[step] = (directory.of(step) / MANIFEST).read_bytes()
    return found


def fetch(
    shards: ShardDirectory, needed: Collection[str], exchange: FileExchange, *, gives_up: bool, timeout_s: float
) -> None:
    """Get the files of a checkpoint that the ranks of a disk need, and it lacks or has corrupt, from other disks.

    needed: names of the files that this rank needs; gives_up: whether the checkpoint counts as corrupt if a file is on
    hosts alone that are absent: if any rank wants that. A collective call. Raises CorruptFileError on all ranks if a
    file is valid on no disk, RunError if absent hosts may have it, or if one could not be copied.
    """
    groups, disks, files = exchange.groups, exchange.disks, shards.manifest.files
    rank = groups.world.rank()
    members = disks.members[disks.of(rank)]
    share = files[members.index(rank) :: len(members)]  # the ranks of a disk verify its files together
    valid = [file.file for file in share if _is_valid(shards, file)]
    report = json.dumps({"valid": valid, "needed": [*needed], "gives_up": gives_up})
    texts = groups.all_gather_text("looking for files of a checkpoint", report, timeout_s=timeout_s)
    reports = [json.loads(text) for text in texts]
    held, wanted = (
        [{name for rank in ranks for name in reports[rank][key]} for ranks in disks.members]
        for key in ("valid", "needed")
    )
    for name in (file.file for file in files):
        if any(name in names for names in wanted) and not any(name in names for names in held):
            _report_missing(shards, name, disks, gives_up=any(report["gives_up"] for report in reports))
    error = exchange.run(plan_transfers(files, held, wanted), shards.path)
    errors = groups.all_gather_text("getting files of a checkpoint", error, timeout_s=math.inf)
    if any(errors):
        raise RunError(f"{shards.path} could not be completed from other hosts: {next(filter(None, errors))}")


def _report_missing(shards: ShardDirectory, name: str, disks: Disks, *, gives_up: bool) -> NoReturn:
    """Raise an error for a file that is valid on no disk. gives_up: see `fetch`."""
    holders = shards.manifest.hosts.get(name, ())
    absent, had_it = [host for host in holders if host not in disks.names], ", ".join(holders)
    if absent and not gives_up:
        raise RunError(
            f"{shards.path} needs {name} of {had_it}: start {' or '.join(absent)} as well; to give this checkpoint up, "
            "move it away on all hosts"
        )
    problem = f"is not valid on any host of this run{f'; {had_it} had it' if had_it else ''}"
    raise CorruptFileError(shards.path / name, problem)


def _is_valid(shards: ShardDirectory, file: StoredFile) -> bool:
    try:
        shards.verify(file)
    except CorruptFileError:
        return False
    return True
