"""What a run needs of its directories: which ranks see the same ones, whether they can be written, links, renames."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from acsgd.config.options import CheckpointConfig
from acsgd.errors import RefusedError, RunError, explain
from acsgd.groups import Groups
from acsgd.io.checkpoint.copies import (
    SHARED,
    Disks,
    FileExchange,
    FileTransfer,
    recorded,
    share_manifests,
)
from acsgd.io.checkpoint.directory import CheckpointDirectory
from acsgd.io.files.atomic import missing_operations, write_once
from acsgd.io.files.checksum import new_file_checksum
from acsgd.io.telemetry.json_lines import METRICS, JsonLinesSink, LoggedStart, StepLines
from acsgd.io.telemetry.metrics import FILE
from acsgd.io.telemetry.record import RunEvent
from acsgd.run.plan.job import Job
from acsgd.shards.manifest import StoredFile
from acsgd.shards.weights import weight_shape

PROBE = ".shared."
"""Start of the name of a file that each rank tries to be the first to write; the id of the run follows."""
VISIBLE_S = 30.0
"""Maximum time until a file that another host has written is seen, seconds: for that, NFS and FUSE cache attributes."""
POLL_S = 0.05


def find_disks(directory: Path, groups: Groups, *, host: str, timeout_s: float, known: Disks | None = None) -> Disks:
    """Find out which ranks see the same directory, and write to it once on each disk. A collective call.

    All ranks write a file of one name, whose content is that of the first to do so. host: name of this host; timeout_s:
    of a communication; known: returned if a rank cannot write, such as one with a full disk. Without it, that is a
    RefusedError there, a RunError elsewhere.
    """
    probe, mine = directory.absolute() / f"{PROBE}{groups.run_id}", secrets.token_hex(8)
    timeout_s += VISIBLE_S
    problem, seen = list[str](), ""
    try:
        with recorded(problem, directory):
            write_once(probe, mine)
        groups.wait_for_all("writing to the directories of the run", timeout_s=timeout_s)
        with recorded(problem, directory):
            seen = "" if problem else _read(probe)
        report = json.dumps((host, str(probe.parent), seen, "".join(problem)))
        texts = groups.all_gather_text("looking into the directories of the run", report, timeout_s=timeout_s)
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
    hosts, paths, found, problems = zip(*map(json.loads, texts), strict=True)
    if known is not None and any(problems):
        return known
    _check_all(problems, groups, "the directories of the run cannot be used")
    members = tuple(tuple(rank for rank, each in enumerate(found) if each == text) for text in dict.fromkeys(found))
    names = [hosts[ranks[0]] for ranks in members]
    full = [f"{hosts[ranks[0]]}:{paths[ranks[0]]}" for ranks in members]
    return Disks(
        members, tuple(full if names.count(name) > 1 else name for name, full in zip(names, full, strict=True))
    )


@dataclass(frozen=True)
class RunDisks:
    """Which ranks see the same run directory, and the same directory of checkpoints. Default: all ranks do."""

    log: Disks = SHARED
    checkpoints: Disks = SHARED

    def exchange(self, job: Job, groups: Groups) -> FileExchange:
        """Return what copies files of checkpoints from disk to disk."""
        return FileExchange(groups, self.checkpoints, job.config.checkpoint.bytes_per_s)


SHARED_DISKS = RunDisks()


def find_run_disks(job: Job, groups: Groups, *, host: str) -> RunDisks:
    """Find out which ranks see the same directories of a run. A collective call. host: name of this host."""
    if job.topology.world_size == 1:
        return RunDisks(*[Disks(names=(host,))] * 2)
    directories, timeout_s = (job.paths.run, job.paths.checkpoints.path), job.config.run.timeout
    return RunDisks(*(find_disks(directory, groups, host=host, timeout_s=timeout_s) for directory in directories))


def _check_all(problems: Sequence[str], groups: Groups, failure: str) -> None:
    """Raise an error if any rank reports a problem: RefusedError on these ranks, RunError on the others."""
    if failed := [rank for rank, problem in enumerate(problems) if problem]:
        text = f"{failure}: {problems[failed[0]]}"
        raise RefusedError(text) if groups.world.rank() in failed else RunError(text, awaited=failed)


def open_disks(
    job: Job,
    groups: Groups,
    disks: RunDisks,
    *,
    step: int | None = None,
    before: RunDisks | None = None,
) -> list[str]:
    """Prepare hosts with disks of their own: check that copies can be made, and let all know which checkpoints exist.

    A collective call. step: of a run that trains. Then checkpoints after it, of hosts that were away, are set aside,
    and nothing has to be written: a host with a full disk may train. before: which ranks shared a disk in the view
    before, as the user knows. Returns sentences for the user.
    """
    are_known = disks == before
    if disks.checkpoints.is_shared:
        return [] if are_known else _describe_shared(job, disks.checkpoints, before)
    exchange, timeout_s, resume = disks.exchange(job, groups), job.disk_timeout_s, job.config.checkpoint.resume
    if step is None:
        _check_copies(job.paths.checkpoints.path, exchange, timeout_s=timeout_s)
    notes = [] if are_known else [_describe_disks(job, disks.checkpoints)]
    if resume == "never":
        return notes
    directory = job.paths.checkpoints if resume == "auto" else CheckpointDirectory(Path(resume).expanduser().parent)
    others, problems = share_manifests(directory, groups, disks.checkpoints, timeout_s=timeout_s, last_step=step)
    failure = "manifests of checkpoints cannot be written"
    if step is None:
        _check_all(problems, groups, failure)
    return [*notes, *others, *(f"{failure}: {problem}" for problem in problems if problem)]


def check_room(job: Job, groups: Groups, disks: Disks) -> list[str]:
    """Check that each disk has room for the checkpoints that its hosts keep. A collective call.

    If one has not, raises RefusedError there, RunError elsewhere; with checkpoint.on_error=continue, returns sentences.
    """
    found: list[str] = []
    if disks.is_leader(job.topology.rank):
        with recorded(found, job.paths.checkpoints.path):
            found.append(_lack_of_room(job, disks))
    problems = groups.all_gather_text("comparing room for checkpoints", "".join(found), timeout_s=job.disk_timeout_s)
    if job.config.checkpoint.on_error == "stop":
        _check_all(problems, groups, "there is no room for the checkpoints of the run")
    return [each for each in problems if each]


def _lack_of_room(job: Job, disks: Disks) -> str:
    """Return how much room the disk of this rank lacks, and what to do; empty if it is enough. Raises OSError.

    The least size of a checkpoint counts: weights, and fp32 state of the optimizer that has their shape. Leftovers of
    saves count as free, since they are removed; so do checkpoints that are there, since new ones replace them, unless
    they are set aside.
    """
    config, directory = job.config.checkpoint, job.paths.checkpoints.path
    optimizer = job.plugins.optimizer.states
    weight_bytes = 2 if job.config.optim.masters == "none" else 4  # bf16 or fp32
    states = sum(state.shape is weight_shape and state.of_hidden_matrices is None for state in optimizer)
    share = min(config.copies, len(disks.members)) / len(disks.members)
    size = int((weight_bytes + 4 * states) * job.model.parameters.trained * share)
    steps, every = job.config.optim.steps, config.every_steps
    saves = -(-steps // every) if steps and every else 1  # at least
    count = min(saves, config.keep + 1)  # a new one is complete before the oldest is removed
    replaced = [*directory.glob(".step-*"), *([] if config.resume == "never" else directory.glob("step-*"))]
    present = sum(_size(path) for each in replaced for path in each.rglob("*"))
    existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free + present
    if count * size <= free:
        return ""
    fits = free // size - 1
    advice = f"lower checkpoint.keep to {fits}, " if 0 < fits < config.keep else ""
    return (
        f"{directory} of {disks.names[disks.of(job.topology.rank)]} has {free / 1e9:.2f} GB for checkpoints, and "
        f"{count} of at least {size / 1e9:.2f} GB each are to be there at once (checkpoint.keep={config.keep}, "
        f"copies={config.copies}): {advice}free space on its disk, or give another checkpoint.dir"
    )


def _size(path: Path) -> int:
    """Return the size of a file; 0 if another host has just removed it, or for a link without a target."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def _check_copies(directory: Path, exchange: FileExchange, *, timeout_s: float) -> None:
    """Send a small file from each disk to the next, as a save does. A collective call.

    If one could not be read or written, raises RefusedError there, RunError elsewhere. timeout_s: of a communication.
    """
    disks, groups = exchange.disks, exchange.groups
    content, count, rank = groups.run_id.encode(), len(disks.members), groups.world.rank()
    checksum = new_file_checksum(content).hexdigest()
    files = [StoredFile(f"{PROBE}{groups.run_id}.{disk}", len(content), checksum) for disk in range(count)]
    transfers = [FileTransfer(file, disk, (disk + 1) % count) for disk, file in enumerate(files)]
    if disks.is_leader(rank):
        (directory / files[disks.of(rank)].file).write_bytes(content)
    problems = groups.all_gather_text("copying a file", exchange.run(transfers, directory), timeout_s=timeout_s)
    if disks.is_leader(rank):
        for file in files:
            (directory / file.file).unlink(missing_ok=True)
    _check_all(problems, groups, "checkpoints could not be copied between hosts")


def _describe_disks(job: Job, disks: Disks) -> str:
    """Return a sentence on what is saved where if hosts have disks of their own."""
    hosts, copies = len(disks.members), min(job.config.checkpoint.copies, len(disks.members))
    rest = (
        "each holds all files of each checkpoint"
        if copies == hosts
        else f"each file of a checkpoint is on {copies} of them"
        if copies > 1
        else "each file of a checkpoint is on one of them alone (checkpoint.copies=1)"
    )
    return f"{job.paths.checkpoints.path} is a directory of its own on {hosts} hosts, {', '.join(disks.names)}: {rest}"


def _describe_shared(job: Job, disks: Disks, before: RunDisks | None) -> list[str]:
    """Return sentences on what is saved where if there is one disk. before: as in `open_disks`."""
    if before is not None and not before.checkpoints.is_shared:
        path = job.paths.checkpoints.path
        return [f"until another host joins, checkpoints are saved in {path} of {disks.names[0]} alone, without copies"]
    config = job.config.checkpoint
    unused = [name for name in ("copies", "rate") if getattr(config, name) != getattr(CheckpointConfig, name)]
    cause = ": all ranks see the same checkpoints; remove it"
    cause = " until a host with a disk of its own joins" if job.is_elastic else cause
    return [f"checkpoint.{name}={getattr(config, name)} has no effect{cause}" for name in unused]


def share_metrics(
    job: Job, groups: Groups, disks: Disks, sink: JsonLinesSink | None, *, resumed_at: int | None = None
) -> list[str]:
    """Let all run directories have the same lines of metrics.jsonl up to the last step.

    A host that was away lacks some, and may have those of steps that others have repeated without it. A collective
    call. sink: of a leader, which writes the file; resumed_at: completed steps of a run without views, which then
    writes an event, as a view does. Returns a sentence for the user if that fails.
    """
    if FILE not in job.config.log.to.split(","):
        return []
    problems, now = list[str](), time.time()
    if not disks.is_shared:
        problems, now = _share_lines(job, groups, disks, sink)
    if resumed_at is not None and sink is not None and (not disks.is_shared or sink.start != LoggedStart()):
        view, before = sink.start
        started = {"after_view": view, "started_at": max(round(now, 3), before + 1)}  # the clock may have been put back
        sink.event(RunEvent("start", resumed_at, f"started at step {resumed_at}", started))
    return problems


def _share_lines(job: Job, groups: Groups, disks: Disks, sink: JsonLinesSink | None) -> tuple[list[str], float]:
    """Send the lines that other disks lack. Returns sentences for the user, and the time, the same on all ranks."""
    directory, timeout_s, rank = job.paths.run, job.disk_timeout_s, groups.world.rank()
    lines, here = StepLines(directory / METRICS), disks.of(rank)
    if sink is not None:
        sink.flush()  # what it still holds is replaced by the lines of another host
    mine = json.dumps((time.time(), *((sink.start, lines.last_step()) if sink is not None else ())))
    texts = [*map(json.loads, groups.all_gather_text("comparing metrics", mine, timeout_s=timeout_s))]
    ends = [(LoggedStart(*texts[ranks[0]][1]), int(texts[ranks[0]][2])) for ranks in disks.members]
    now = max(float(text[0]) for text in texts)
    for disk in range(len(ends)) if disks.is_leader(rank) else ():
        _tail(directory, disk).unlink(missing_ok=True)  # of an exchange that was interrupted
    if all(end == ends[0] for end in ends):
        return [], now
    source, files, problem = ends.index(max(ends)), list[tuple[int, int, StoredFile]](), ""
    if rank == disks.members[source][0]:
        try:
            files = [*_write_tails(lines, ends, directory)]
        except OSError as error:
            problem = explain(error) or str(error)
    mine = json.dumps([(disk, step, asdict(file)) for disk, step, file in files])
    listed = groups.all_gather_text("listing missing metrics", mine, timeout_s=timeout_s)[disks.members[source][0]]
    files = [(disk, step, StoredFile(**file)) for disk, step, file in json.loads(listed)]
    transfers = [FileTransfer(file, source, disk) for disk, _, file in files]
    problem = FileExchange(groups, disks).run(transfers, directory) or problem
    if sink is not None:
        try:
            for disk, step, file in files:
                if disk == here and not problem:
                    sink.replace_after(step, (directory / file.file).read_bytes())
            for disk in range(len(ends)):
                _tail(directory, disk).unlink(missing_ok=True)
        except OSError as error:
            problem = explain(error) or str(error)
    problems = groups.all_gather_text("completing metrics", problem, timeout_s=math.inf)
    failed = [f"{lines.path} lacks lines on some hosts: {problem}" for problem in problems if problem]
    return failed, now


def _write_tails(
    lines: StepLines, ends: Sequence[tuple[LoggedStart, int]], directory: Path
) -> Iterator[tuple[int, int, StoredFile]]:
    """Write the lines that each other disk lacks to a file; yield the disk, the step up to which it keeps its own.

    lines: of the newest start, of two the longer; they have the last execution of each step. ends: newest start and
    last step of each disk. What follows a start has been executed once. So a file has the same lines as these up to the
    smallest step that a start follows which it does not know. No such start is before the lines of a file that was
    removed during the run, so a file keeps the lines of steps that are not here.
    """
    newest, starts = max(ends), lines.starts_after(min(ends)[0])
    for disk, (known, step) in enumerate(ends):
        if (known, step) != newest:
            kept = min([step, *(after for start, after in starts if start > known)])
            file, raw = _tail(directory, disk), lines.after(kept)
            file.write_bytes(raw)
            yield disk, kept, StoredFile(file.name, len(raw), new_file_checksum(raw).hexdigest())


def _tail(directory: Path, disk: int) -> Path:
    """Return the file with the lines that a disk lacks, while they are sent."""
    return directory / f".{METRICS}.{disk}"


def describe_missing(job: Job) -> list[str]:
    """Return a sentence on what the file system of the checkpoint directory lacks, and on what follows from it."""
    directory, config = job.paths.checkpoints.path, job.config
    consequences = {
        "symbolic links": "best is a file with the name of a checkpoint" if config.checkpoint.best else None,
        "hard links": "every checkpoint has its own copy of what is not trained"
        if job.model.description.frozen
        else None,
        "renames of directories": "files are moved one by one, and a save that is interrupted leaves an incomplete "
        "checkpoint, which the next start passes over",
    }
    missing = [(name, each) for name in missing_operations(directory) if (each := consequences[name]) is not None]
    if not missing:
        return []
    names, effects = zip(*missing, strict=True)
    return [f"{directory} is on a file system without {' and '.join(names)}: {'; '.join(effects)}"]


def _read(path: Path) -> str:
    """Return the content of a file, once another host's is seen. Raises OSError."""
    until = time.monotonic() + VISIBLE_S
    while True:
        with contextlib.suppress(FileNotFoundError):
            if text := path.read_text():
                return text
        if time.monotonic() >= until:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        for parent in path.parents:  # opening a directory lets NFS ask the server for what it has cached of it
            with contextlib.suppress(OSError):
                os.close(os.open(parent, os.O_RDONLY | os.O_DIRECTORY))
        time.sleep(POLL_S)
