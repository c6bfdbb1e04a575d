"""What a run needs of the file system of its checkpoints: that all hosts see them, links, renames of directories."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from pathlib import Path

from acsgd.errors import RefusedError, RunError
from acsgd.groups import Groups
from acsgd.io.files.atomic import missing_operations
from acsgd.run.plan.job import Job

PROBE = ".shared."
"""Start of the name of the file that rank 0 writes and all others look for; the id of the run follows."""
VISIBLE_S = 30.0
"""Maximum time until a new file is seen on another host, seconds: the time for which NFS and FUSE cache attributes."""
POLL_S = 0.05


def check_shared(job: Job, groups: Groups) -> None:
    """Raise an error if a rank does not see what rank 0 writes to the checkpoint directory. A collective call.

    RefusedError on the ranks that do not see it, RunError with these as `awaited` on all others.
    """
    if job.topology.world_size == 1:
        return
    directory, rank = job.paths.checkpoints.path.absolute(), job.topology.rank
    probe, timeout_s = directory / f"{PROBE}{groups.run_id}", VISIBLE_S + job.config.run.timeout
    with contextlib.ExitStack() as stack:
        if rank == 0:
            for leftover in directory.glob(f"{PROBE}*"):
                leftover.unlink(missing_ok=True)
            probe.touch()
            stack.callback(probe.unlink, missing_ok=True)
        groups.wait_for_all("writing to the checkpoint directory", timeout_s=timeout_s)
        mine = json.dumps((socket.gethostname(), str(directory), _is_seen(probe, VISIBLE_S)))
        texts = groups.all_gather_text("looking into the checkpoint directory", mine, timeout_s=timeout_s)
    hosts, paths, seen = zip(*map(json.loads, texts), strict=True)
    if all(seen):
        return
    blind = [rank for rank, is_seen in enumerate(seen) if not is_seen]
    option = "log.dir" if job.config.checkpoint.dir is None else "checkpoint.dir"
    text = (
        f"{option} is not shared by all hosts: rank {blind[0]} on {hosts[blind[0]]} does not see in {paths[blind[0]]} "
        f"what rank 0 on {hosts[0]} writes to {paths[0]}, so no checkpoint could be completed; give --{option} on a "
        "file system that all hosts share, such as NFS"
    )
    raise RefusedError(text) if rank in blind else RunError(text, awaited=blind)


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


def _is_seen(path: Path, within_s: float) -> bool:
    """Return whether a file appears within some seconds."""
    until = time.monotonic() + within_s
    while not path.exists():
        if time.monotonic() >= until:
            return False
        for parent in path.parents:  # opening a directory lets NFS ask the server for what it has cached of it
            with contextlib.suppress(OSError):
                os.close(os.open(parent, os.O_RDONLY | os.O_DIRECTORY))
        time.sleep(POLL_S)
    return True
