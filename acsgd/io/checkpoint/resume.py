"""Find the checkpoint to resume from: the newest that is complete, valid, and of the same run identity.

Every incomplete or corrupt checkpoint that is passed over is reported.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

from acsgd.errors import CorruptFileError, RunError
from acsgd.groups import Groups
from acsgd.io.checkpoint.directory import CHECKPOINTS, CheckpointDirectory
from acsgd.io.checkpoint.identity import RunIdentity
from acsgd.io.checkpoint.progress import RunState
from acsgd.shards.disk import ShardDirectory
from acsgd.shards.manifest import MANIFEST


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint, open for reading."""

    shards: ShardDirectory
    run: RunState

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Read a checkpoint's manifest.

        Raises ValueError if `path` is not a checkpoint of a run, CorruptFileError if its manifest is corrupt.
        """
        shards = ShardDirectory(path)
        run = RunState.of(shards)
        if run is None:
            raise ValueError(f"{path} holds a model without run state; to train from its weights: --model.name {path}")
        return cls(shards, run)

    @property
    def path(self) -> Path:
        """Its directory."""
        return self.shards.path


class Rejected(NamedTuple):
    """An incomplete or corrupt checkpoint."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Candidates:
    """Checkpoints a run may resume from. Only their manifests have been read."""

    directory: CheckpointDirectory
    """Directory of the run's own checkpoints."""
    requested: Path | None
    """The path in checkpoint.resume; None = the newest."""
    checkpoints: list[Checkpoint]
    """Newest first. If one was requested: that one, then those to suggest in its place."""
    rejected: list[Rejected]
    has_earlier: bool = False
    """Whether the directory has checkpoints of an earlier run, from which the run must not resume."""

    def choose(self, groups: Groups, check: Callable[[Checkpoint], None], *, timeout_s: float) -> Checkpoint | None:
        """Return the first checkpoint that is valid on every rank, None if there are no candidates. A collective call.

        check: raises CorruptFileError if a file that this rank reads is corrupt or invalid; all ranks call it
        together. Appends to `rejected`.
        Raises RunError if the requested checkpoint, or every checkpoint, is corrupt; suggests the newest valid one.
        """
        for checkpoint in self.checkpoints:
            reason = _verify(groups, checkpoint, check, timeout_s)
            if reason is not None:
                self.rejected.append(Rejected(checkpoint.path, reason))
            elif self.requested is None or checkpoint.path == self.requested:
                return checkpoint
            else:
                is_own = checkpoint.path.resolve().parent == self.directory.path.resolve()
                raise RunError(
                    f"{self.rejected[0].reason}; to resume from the newest valid one, {checkpoint.path.name}: "
                    f"--checkpoint.resume {'auto' if is_own else checkpoint.path}"
                )
        if self.rejected:
            raise RunError(
                f"no checkpoint is valid: {'; '.join(rejected.reason for rejected in self.rejected)}; "
                "to start a new run, give another log.dir"
            )
        return None

    def set_aside(self, metrics: Path) -> list[str]:
        """Rename the rejected checkpoints, and move those of an earlier run, so that no later start finds them.

        metrics: file of the run, which is moved with the latter. Returns sentences for the user.
        """
        notes = [
            f"set aside a checkpoint: {reason}; renamed to {self.directory.set_aside(path).name}"
            for path, reason in self.rejected
        ]
        if self.has_earlier:
            moved = self.directory.set_all_aside(metrics)
            notes.append(f"checkpoint.resume=never: the checkpoints of the earlier run are in {moved} now")
        return notes

    def mark_best(self) -> None:
        """Point the link "best" to the best remaining checkpoint.

        Needed if the former best was set aside, or if a run was killed between publishing a checkpoint and linking it.
        """
        rejected = {path for path, _ in self.rejected}
        best = next((each for each in self.checkpoints if each.run.best and each.path not in rejected), None)
        if self.requested is None and best is not None and self.directory.best() != best.path:
            self.directory.mark_best(best.shards.step)


def refuse(path: Path, difference: str) -> NoReturn:
    """Raise ValueError for a run that differs from a checkpoint so that it cannot resume. difference: a clause."""
    raise ValueError(
        f"cannot resume from {path}: {difference}; use what it was trained with, or start a new run: --log.dir NEW or "
        f"--checkpoint.resume never; from the weights of this checkpoint: --model.name {path} --log.dir NEW"
    )


def find(directory: CheckpointDirectory, resume: str, identity: RunIdentity) -> Candidates:
    """Find the checkpoints that checkpoint.resume allows. Reads manifests only.

    resume: "auto", "never", or the path of a checkpoint. Raises ValueError if the path is not a checkpoint, if a
    checkpoint has another identity, or if `directory` holds newer checkpoints than the requested one.
    """
    steps = directory.steps()
    if resume == "never":
        return Candidates(directory, None, [], [], has_earlier=bool(steps))
    if resume == "auto":
        return _open(directory, None, [directory.of(step) for step in reversed(steps)], identity)
    requested = _requested(resume)
    candidates = _open(directory, requested, [requested], identity)
    _check_newest(directory, candidates, steps)
    candidates.checkpoints.extend(_alternatives(requested, identity))
    return candidates


def _requested(resume: str) -> Path:
    """Return the path of the requested checkpoint, with links such as "best" resolved."""
    path = Path(resume).expanduser()
    if not (path / MANIFEST).is_file():
        problem = "is not a complete checkpoint" if path.exists() else "does not exist"
        found = [each.of(each.steps()[-1]) for each in _directories(path) if each.steps()]
        example = found[0] if found else '".../step-00000100"'
        raise ValueError(f'checkpoint.resume={resume} {problem}; give the path of a checkpoint, {example}, or "auto"')
    return Path(os.path.relpath(path.resolve())) if not path.is_absolute() else path.resolve()


def _directories(path: Path) -> list[CheckpointDirectory]:
    """Return directories that may hold the checkpoint that a wrong path was meant to name."""
    return [CheckpointDirectory(each) for each in (path, path / CHECKPOINTS, path.parent)]


def _open(
    directory: CheckpointDirectory, requested: Path | None, paths: Iterable[Path], identity: RunIdentity
) -> Candidates:
    checkpoints, rejected = [], []
    for path in paths:
        if not (path / MANIFEST).is_file():
            rejected.append(Rejected(path, f"{path} is incomplete: it has no {MANIFEST}"))
            continue
        try:
            checkpoint = Checkpoint.open(path)
        except CorruptFileError as error:
            rejected.append(Rejected(path, str(error)))
            continue
        if (difference := identity.difference(checkpoint.run.identity)) is not None:
            refuse(path, difference)
        checkpoints.append(checkpoint)
    return Candidates(directory, requested, checkpoints, rejected)


def _alternatives(requested: Path, identity: RunIdentity) -> list[Checkpoint]:
    """Return the checkpoints beside the requested one from which the run can resume, newest first."""
    siblings, others = CheckpointDirectory(requested.parent), []
    for path in [siblings.of(step) for step in reversed(siblings.steps()) if siblings.of(step) != requested]:
        with contextlib.suppress(ValueError, CorruptFileError):
            checkpoint = Checkpoint.open(path)
            if identity.difference(checkpoint.run.identity) is None:
                others.append(checkpoint)
    return others


def _check_newest(directory: CheckpointDirectory, candidates: Candidates, steps: Sequence[int]) -> None:
    """Raise ValueError if the run's directory holds a newer checkpoint than the requested one."""
    requested = next((c.shards.step for c in candidates.checkpoints if c.path == candidates.requested), None)
    if requested is not None and steps and steps[-1] > requested:
        raise ValueError(
            f"checkpoint.resume={candidates.requested} is of step {requested}, but {directory.path} holds step "
            f"{steps[-1]}, from which a later start would resume; give another log.dir, or move the newer ones away"
        )


def newest_valid(
    paths: Sequence[Path], groups: Groups, check: Callable[[Checkpoint], None], *, timeout_s: float
) -> tuple[Checkpoint | None, list[str]]:
    """Return the first checkpoint that is valid on every rank, and why those before it are not. A collective call.

    paths: of checkpoints of this run, newest first; those of rank 0 count on all ranks. check: as in `choose`.
    """
    texts = groups.all_gather_text("listing checkpoints", json.dumps(list(map(str, paths))), timeout_s=timeout_s)
    reasons: list[str] = []
    for path in map(Path, json.loads(texts[0])):
        checkpoint, error = None, ""
        try:
            checkpoint = Checkpoint.open(path)
        except (CorruptFileError, ValueError) as failure:
            error = str(failure)
        reason = _first_error(groups, error, timeout_s)
        if reason is None:  # on no rank, so `check` may be a collective call
            assert checkpoint is not None
            reason = _verify(groups, checkpoint, check, timeout_s)
        if reason is None:
            return checkpoint, reasons
        reasons.append(reason)
    return None, reasons


def _verify(
    groups: Groups, checkpoint: Checkpoint, check: Callable[[Checkpoint], None], timeout_s: float
) -> str | None:
    """Check the files that any rank needs; return the error of the first rank, None if all are valid."""
    error = ""
    try:
        check(checkpoint)
    except CorruptFileError as failure:
        error = str(failure)
    return _first_error(groups, error, timeout_s)


def _first_error(groups: Groups, error: str, timeout_s: float) -> str | None:
    """Return the first error of any rank, None if no rank has one. error: that of this rank, empty = none."""
    errors = groups.all_gather_text("verifying a checkpoint", error, timeout_s=timeout_s)
    return next(filter(None, errors), None)
