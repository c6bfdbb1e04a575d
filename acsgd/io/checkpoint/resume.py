"""Find the checkpoint a run goes on from: the newest that is complete, sound, and of the same training.

Nothing is passed over in silence: what is half-written, damaged or foreign is named.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from acsgd.errors import RunError
from acsgd.io.checkpoint.directory import CheckpointDirectory
from acsgd.io.checkpoint.progress import Identity, Progress
from acsgd.shards.disk import MANIFEST, CorruptFileError, ShardDirectory, StoredFile
from acsgd.topology import Groups


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint, opened for reading."""

    shards: ShardDirectory
    progress: Progress
    identity: Identity
    is_best: bool
    """Whether its evaluation was the best so far, and it was saved for that."""

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Read a checkpoint's manifest.

        Raises ValueError if `path` is no checkpoint of a run, CorruptFileError if its manifest is damaged.
        """
        shards = ShardDirectory(path)
        run = shards.manifest.run
        if run is None:
            raise ValueError(
                f"{path} holds a model, but no state of a run; to train from its weights: --model.name {path}"
            )
        progress, identity = Progress.from_dict(run["progress"]), Identity.from_dict(run["identity"])
        return cls(shards, progress, identity, is_best=run.get("best", False))

    @property
    def path(self) -> Path:
        """Its directory."""
        return self.shards.path


class Refusal(NamedTuple):
    """A checkpoint that was found and cannot be used."""

    path: Path
    why: str


@dataclass(frozen=True)
class Candidates:
    """The checkpoints a run may go on from, before their layers are read."""

    directory: CheckpointDirectory
    """The run's own."""
    wanted: Path | None
    """The one that was asked for; None = the newest."""
    checkpoints: list[Checkpoint]
    """The newest first; if one was asked for, that one, and then those that may be offered in its place."""
    refused: list[Refusal]

    def choose(
        self, groups: Groups, needed: Callable[[Checkpoint], Iterable[StoredFile]], *, timeout_s: float
    ) -> Checkpoint | None:
        """Return the first checkpoint that is sound for every rank, or None if there was nothing to choose from.

        needed: the files of a checkpoint that this rank will read. Called by every rank. Adds to `refused`. Raises
        RunError, which offers the newest sound one, if the one that was asked for is damaged, or if all are.
        """
        for checkpoint in self.checkpoints:
            why = _damage(groups, checkpoint, needed(checkpoint), timeout_s)
            if why is not None:
                self.refused.append(Refusal(checkpoint.path, why))
            elif self.wanted is None or checkpoint.path == self.wanted:
                return checkpoint
            else:
                is_own = checkpoint.path.resolve().parent == self.directory.path.resolve()
                raise RunError(
                    f"{self.refused[0].why}; to go on from the newest sound one, {checkpoint.path.name}: "
                    f"--checkpoint.resume {'auto' if is_own else checkpoint.path}"
                )
        if self.refused:
            raise RunError(
                f"no checkpoint is sound: {'; '.join(refusal.why for refusal in self.refused)}; "
                "to start anew, give another log.dir"
            )
        return None

    def set_aside(self) -> list[str]:
        """Rename what was refused, or a later start would take it for the newest; say so."""
        renamed = [self.directory.set_aside(path) for path, _ in self.refused]
        return [
            f"refused a checkpoint: {why}; it is now {path.name}"
            for (_, why), path in zip(self.refused, renamed, strict=True)
        ]

    def mark_best(self) -> None:
        """Let the link "best" lead to the best that is left.

        It does not if a run died between the two renames, of the checkpoint and of the link, or if it was set aside.
        """
        refused = {path for path, _ in self.refused}
        best = next((each for each in self.checkpoints if each.is_best and each.path not in refused), None)
        if self.wanted is None and best is not None and self.directory.best() != best.path:
            self.directory.mark_best(best.shards.step)


def find(directory: CheckpointDirectory, resume: str, identity: Identity) -> Candidates:
    """Look for what `checkpoint.resume` asks for: "auto", "never", or a checkpoint's path. Reads manifests only.

    Raises ValueError if the path is no checkpoint, one is of another training, or the run's directory holds newer
    ones than the run is to go on from.
    """
    steps = directory.steps()
    if resume == "never":
        if steps:
            raise ValueError(
                f"checkpoint.resume=never, but {directory.path} holds checkpoints of an earlier run, the newest of "
                f"step {steps[-1]}; give another log.dir, remove them, or use --checkpoint.resume auto"
            )
        return Candidates(directory, None, [], [])
    if resume == "auto":
        return _open(directory, None, [directory.of(step) for step in reversed(steps)], identity)
    wanted = _wanted(resume)
    candidates = _open(directory, wanted, [wanted], identity)
    _refuse_newer(directory, candidates, steps)
    candidates.checkpoints.extend(_others(wanted, identity))
    return candidates


def _wanted(resume: str) -> Path:
    """Return the checkpoint of a path, through links such as "best"."""
    path = Path(resume).expanduser()
    if not (path / MANIFEST).is_file():
        what = "is no complete checkpoint" if path.exists() else "does not exist"
        found = [each.of(each.steps()[-1]) for each in _directories(path) if each.steps()]
        example = found[0] if found else '".../step-00000100"'
        raise ValueError(f'checkpoint.resume={resume} {what}; give the path of a checkpoint, {example}, or "auto"')
    return Path(os.path.relpath(path.resolve())) if not path.is_absolute() else path.resolve()


def _directories(path: Path) -> list[CheckpointDirectory]:
    """Return where checkpoints may lie that a path was to lead to."""
    return [CheckpointDirectory(each) for each in (path, path / "checkpoints", path.parent)]


def _open(directory: CheckpointDirectory, wanted: Path | None, paths: Iterable[Path], identity: Identity) -> Candidates:
    checkpoints, refused = [], []
    for path in paths:
        if not (path / MANIFEST).is_file():
            refused.append(Refusal(path, f"{path} is half-written: it has no {MANIFEST}"))
            continue
        try:
            checkpoint = Checkpoint.open(path)
        except CorruptFileError as damage:
            refused.append(Refusal(path, str(damage)))
            continue
        if (difference := identity.difference(checkpoint.identity)) is not None:
            raise ValueError(
                f"cannot go on from {path}: {difference}; give what it was made with, or train a new run from its "
                f"weights: --model.name {path} --log.dir NEW"
            )
        checkpoints.append(checkpoint)
    return Candidates(directory, wanted, checkpoints, refused)


def _others(wanted: Path, identity: Identity) -> list[Checkpoint]:
    """Return the other checkpoints beside one, newest first, from which the run could go on as well."""
    siblings, others = CheckpointDirectory(wanted.parent), []
    for path in [siblings.of(step) for step in reversed(siblings.steps()) if siblings.of(step) != wanted]:
        with contextlib.suppress(ValueError, CorruptFileError):
            checkpoint = Checkpoint.open(path)
            if identity.difference(checkpoint.identity) is None:
                others.append(checkpoint)
    return others


def _refuse_newer(directory: CheckpointDirectory, candidates: Candidates, steps: Sequence[int]) -> None:
    wanted = next((c.shards.step for c in candidates.checkpoints if c.path == candidates.wanted), None)
    if wanted is not None and steps and steps[-1] > wanted:
        raise ValueError(
            f"checkpoint.resume={candidates.wanted} is of step {wanted}, but {directory.path} holds step {steps[-1]}, "
            "from which the next start would go on; give another log.dir, or move the newer ones away"
        )


def _damage(groups: Groups, checkpoint: Checkpoint, needed: Iterable[StoredFile], timeout_s: float) -> str | None:
    """Return what is wrong with a checkpoint, all ranks having looked at what they need."""
    damage = ""
    try:
        for file in needed:
            checkpoint.shards.verify(file)
    except CorruptFileError as error:
        damage = str(error)
    said = groups.all_gather_text(f"verify {checkpoint.path.name}", damage, timeout_s=timeout_s)
    return next(filter(None, said), None)
