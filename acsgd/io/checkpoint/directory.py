"""Names of checkpoints and of the files in them: what was written, and what an interrupted save has left."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from acsgd.errors import RunError, missing
from acsgd.io.files.atomic import UNSUPPORTED, flush, fsync_directory, rename
from acsgd.layers.description import ModelLayers
from acsgd.shards.manifest import MANIFEST, StoredFile

PartKind = Literal["layer", "table", "constants", "replica"]
"""Content of a file: trained parameters of a layer, or a tied weight, and state of the optimizer; tensors that never
change; state of a replica."""


@dataclass(frozen=True)
class WrittenFile:
    """Report of one written file."""

    kind: PartKind
    layer: str
    """Name of the layer, or of the tied weight."""
    entry: dict[str, Any]
    """See `StoredFile`."""
    replica: int
    """Index of the replica whose state is in it; 0 for other kinds."""

    @classmethod
    def of(cls, directory: Path, kind: PartKind, layer: str, file: StoredFile, replica: int = 0) -> WrittenFile:
        """Wait until a file is on disk; return the report of it."""
        flush(directory / file.file)
        return cls(kind, layer, asdict(file), replica)

    @property
    def stored(self) -> StoredFile:
        """Its entry in a manifest."""
        return StoredFile(**self.entry)


def files_of_layers(written: Sequence[WrittenFile], kind: PartKind, model: ModelLayers) -> dict[str, StoredFile]:
    """Return the file of a kind of each layer that has one, first layer first."""
    by_layer = {file.layer: file.stored for file in written if file.kind == kind}
    return {layer.name: by_layer[layer.name] for layer in model.layers if layer.name in by_layer}


def files_of_tables(written: Sequence[WrittenFile]) -> dict[str, StoredFile]:
    """Return the files of tied weights that have one of their own, by the names of these."""
    return {file.layer: file.stored for file in written if file.kind == "table"}


def files_of_replicas(written: Sequence[WrittenFile]) -> dict[str, list[StoredFile]]:
    """Return the files with the state of replicas, first replica first, by layer or tied weight."""
    by_layer: dict[str, list[StoredFile]] = {}
    for file in sorted(written, key=lambda file: (file.layer, file.replica)):
        if file.kind == "replica":
            by_layer.setdefault(file.layer, []).append(file.stored)
    return by_layer


def check_visible(directory: Path, names: Iterable[str]) -> None:
    """Raise RunError if files that ranks have written are not in the directory, as this rank sees it."""
    absent = [name for name in names if not (directory / name).is_file()]
    if absent:
        raise RunError(
            f"{directory} has no {', '.join(absent[:3])}, which other ranks have written; "
            "check the file system of checkpoint.dir"
        )


CHECKPOINTS = "checkpoints"
"""Name of the directory of checkpoints in a run directory."""
BEST = "best"
"""Name of the symbolic link to the checkpoint with the lowest evaluation loss."""
_NAME = re.compile(r"step-(\d{8,})")


def step_of(path: Path) -> int | None:
    """Return the step in the name of a checkpoint, None if the name is not one."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class CheckpointDirectory:
    """Checkpoints step-00000100/, step-00000200/, ...; those being written or removed have hidden names."""

    path: Path

    def of(self, step: int) -> Path:
        """Return the path of the checkpoint after `step` optimizer steps."""
        return self.path / f"step-{step:08d}"

    def partial(self, step: int, run_id: str) -> Path:
        """Return the path at which that checkpoint is written until it is complete.

        run_id: different for each start, so that ranks of a run that was stopped while another took over never write
        into a checkpoint of the other.
        """
        return self.path / f".step-{step:08d}.{run_id}.partial"

    def steps(self) -> list[int]:
        """Return the steps of all published checkpoints, oldest first."""
        if not self.path.is_dir():
            return []
        found = (step_of(path) for path in self.path.iterdir() if path.is_dir())
        return sorted(step for step in found if step is not None)

    def leftovers(self) -> list[Path]:
        """Return hidden files left by a run that ended while it saved or removed a checkpoint."""
        return sorted(self.path.glob(".step-*")) if self.path.is_dir() else []

    def publish(self, step: int, run_id: str) -> Path:
        """Rename the complete partial directory of a step into place, replacing an older save of the step."""
        path = self.of(step)
        old = self._hide(step, "old") if path.exists() else None
        rename(self.partial(step, run_id), path)
        fsync_directory(self.path)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)
        return path

    def remove(self, step: int) -> None:
        """Remove a checkpoint. It is hidden first, so no published checkpoint is ever incomplete."""
        shutil.rmtree(self._hide(step, "removed"), ignore_errors=True)

    def prune(
        self, newest: int, *, keep: int, keep_every: int | None, is_used: Callable[[Path], bool] = lambda path: False
    ) -> None:
        """Remove all but the `keep` newest checkpoints up to step `newest`, multiples of `keep_every`, and the best.

        is_used: returns whether one must not be removed now.
        """
        older = [step for step in self.steps() if step <= newest][:-keep]
        for step in older:
            if (
                not (keep_every and step % keep_every == 0)
                and self.of(step) != self.best()
                and not is_used(self.of(step))
            ):
                self.remove(step)

    def _hide(self, step: int, suffix: str) -> Path:
        """Give a checkpoint that is replaced or removed a hidden name, and return its path."""
        path, hidden = self.of(step), self.path / f".step-{step:08d}.{suffix}"
        shutil.rmtree(hidden, ignore_errors=True)
        try:
            path.rename(hidden)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            (path / MANIFEST).unlink(missing_ok=True)  # from now on it counts as incomplete
            rename(path, hidden)
        return hidden

    def set_aside(self, checkpoint: Path) -> Path:
        """Rename a corrupt checkpoint so that no run resumes from it, and return its new path."""
        aside = self.path / f"corrupt-{checkpoint.name}"
        shutil.rmtree(aside, ignore_errors=True)
        rename(checkpoint, aside)
        return aside

    def set_all_aside(self, metrics: Path) -> Path:
        """Move all checkpoints, the link to the best and the metrics into a new directory, and return it."""
        number = next(number for number in itertools.count(1) if not (self.path / f"earlier-{number}").exists())
        aside = self.path / f"earlier-{number}"
        aside.mkdir()
        for name in (*(self.of(step).name for step in reversed(self.steps())), BEST):
            if os.path.lexists(self.path / name):
                rename(self.path / name, aside / name)
        with contextlib.suppress(FileNotFoundError):  # of hosts that share it, but no checkpoints, one moves it
            rename(metrics, aside / metrics.name)
        return aside

    def mark_best(self, step: int) -> None:
        """Point the link "best" to the checkpoint of a step: a file with its name, if the file system has no links.

        A directory of this name, of a run that was copied with what its links point to, is renamed.
        """
        best = self.path / BEST
        if best.is_dir() and not best.is_symlink():
            shutil.rmtree(self.path / f"copied-{BEST}", ignore_errors=True)
            rename(best, self.path / f"copied-{BEST}")
        link, name = self.path / f".{BEST}", self.of(step).name
        link.unlink(missing_ok=True)
        try:
            link.symlink_to(name)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            link.write_text(name)
        rename(link, best)

    def best(self) -> Path | None:
        """Return the checkpoint that the link "best" points to, or its copy, of a run that was copied without links."""
        link = self.path / BEST
        if link.is_symlink():
            return self.path / os.readlink(link)
        if link.is_dir():
            return link
        return self.path / link.read_text() if link.is_file() else None

    def clean(self) -> None:
        """Remove leftovers. No other process may be saving here."""
        for path in self.leftovers():
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def checkpoints_of(path: Path) -> list[Path]:
    """Return the checkpoints in a directory, or in that of a run, oldest first; none if it is another directory.

    Raises ValueError if a run has saved none.
    """
    for directory in (CheckpointDirectory(path), CheckpointDirectory(path / CHECKPOINTS)):
        if steps := directory.steps():
            return [directory.of(step) for step in steps]
    if (path / CHECKPOINTS).is_dir():
        raise ValueError(f"{path} is a run directory without checkpoints; give one that has saved a checkpoint")
    return []


def best_checkpoint(path: Path) -> Path:
    """Return the best checkpoint in a directory, or in that of a run. Raises ValueError if there is none."""
    for directory in (CheckpointDirectory(path), CheckpointDirectory(path / CHECKPOINTS)):
        if best := directory.best():
            return best
    # not by the option's name, in place of which a command shows its own --best
    raise ValueError(f"{path} has no best checkpoint, since its run had no metric to choose one by; leave out --best")


def directories_at(path: Path) -> list[Path]:
    """Return all checkpoints of a run, oldest first; else the path itself, a checkpoint or a layer-shard directory.

    Raises ValueError if it is none of these.
    """
    if path.is_symlink():  # "best"
        path = path.parent / path.readlink()
    if not path.is_dir():
        problem = "is not a directory" if path.exists() else missing(path)
        raise ValueError(f"{path} {problem}; give a checkpoint, a layer-shard directory or a run directory")
    if checkpoints := checkpoints_of(path):
        return checkpoints
    if step_of(path) is None and not (path / MANIFEST).is_file():
        raise ValueError(
            f"{path} has no checkpoints and no {MANIFEST}; "
            "give a checkpoint, a layer-shard directory or a run directory"
        )
    return [path]


def newest_checkpoint(path: Path) -> Path:
    """Return the newest checkpoint of a run directory; the path itself if it is not that of a run."""
    return (checkpoints_of(path) or [path])[-1]
