"""The directory of a run's checkpoints: their names, and how they come, stay and go, each whole or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from acsgd.shards.disk import fsync_directory

BEST = "best"
"""Name of the link to the checkpoint with the lowest evaluation loss."""
_NAME = re.compile(r"step-(\d{8,})")


def step_of(path: Path) -> int | None:
    """Return the step in a checkpoint's name, None if it is no checkpoint's."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class CheckpointDirectory:
    """step-00000100/, step-00000200/, ... and hidden ones that are being written or removed."""

    path: Path

    def of(self, step: int) -> Path:
        """Return the path of the checkpoint after `step` optimizer steps."""
        return self.path / f"step-{step:08d}"

    def partial(self, step: int) -> Path:
        """Return where that checkpoint is written before it is complete."""
        return self.path / f".step-{step:08d}.partial"

    def steps(self) -> list[int]:
        """List the steps of all checkpoints in place, oldest first."""
        if not self.path.is_dir():
            return []
        found = (step_of(path) for path in self.path.iterdir() if path.is_dir())
        return sorted(step for step in found if step is not None)

    def leftovers(self) -> list[Path]:
        """List what a run that died while it saved or removed a checkpoint has left."""
        return sorted(self.path.glob(".step-*")) if self.path.is_dir() else []

    def publish(self, step: int) -> Path:
        """Put a complete partial directory in place, over an older save of the same step."""
        path, old = self.of(step), self._hidden(step, "old")
        if path.exists():
            path.rename(old)
        self.partial(step).rename(path)
        fsync_directory(self.path)
        shutil.rmtree(old, ignore_errors=True)
        return path

    def remove(self, step: int) -> None:
        """Remove a checkpoint; it is out of sight before its first file is."""
        hidden = self._hidden(step, "removed")
        self.of(step).rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)

    def prune(self, newest: int, *, keep: int, keep_every: int | None) -> None:
        """Remove all but the `keep` newest checkpoints up to step `newest`, multiples of `keep_every`, and the best."""
        older = [step for step in self.steps() if step <= newest][:-keep]
        for step in older:
            if not (keep_every and step % keep_every == 0) and self.of(step) != self.best():
                self.remove(step)

    def _hidden(self, step: int, why: str) -> Path:
        """Return a free name out of sight for a checkpoint that makes room."""
        path = self.path / f".step-{step:08d}.{why}"
        shutil.rmtree(path, ignore_errors=True)
        return path

    def set_aside(self, checkpoint: Path) -> Path:
        """Rename a damaged checkpoint so that no run takes it for one, and return its new path."""
        aside = self.path / f"damaged-{checkpoint.name}"
        shutil.rmtree(aside, ignore_errors=True)
        return checkpoint.rename(aside)

    def mark_best(self, step: int) -> None:
        """Let the link "best" lead to a checkpoint."""
        link = self.path / f".{BEST}"
        link.unlink(missing_ok=True)
        link.symlink_to(self.of(step).name)
        link.rename(self.path / BEST)

    def best(self) -> Path | None:
        """Return the checkpoint that "best" leads to."""
        link = self.path / BEST
        return self.path / os.readlink(link) if link.is_symlink() else None

    def clean(self) -> None:
        """Remove leftovers; no other process may be saving here."""
        for path in self.leftovers():
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
