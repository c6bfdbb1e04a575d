"""The register of a run's views, one file per epoch, and the lease on the run directory that all hosts share."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import asdict
from pathlib import Path

from acsgd.elastic.membership.messages import View
from acsgd.io.files.atomic import write_once
from acsgd.io.files.fields import from_json
from acsgd.run.lock.lease import LeaseWatch

KEPT = 100
"""Number of epochs whose files are kept."""


class ViewRegister:
    """The recorded views of a run, in a directory that all of its hosts share, and that `write_once` can write to."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def newest(self) -> View | None:
        """Return the view of the highest epoch; None if there is none. Raises OSError, or ValueError for a bad file."""
        epochs = [int(path.stem) for path in self._directory.glob("*.json") if path.stem.isdecimal()]
        return self._read(max(epochs)) if epochs else None

    def record(self, view: View) -> View:
        """Register a view if its epoch is free; return the registered view of that epoch. Raises OSError."""
        write_once(self._path(view.epoch), json.dumps(asdict(view)))
        self._path(max(0, view.epoch - KEPT)).unlink(missing_ok=True)
        return self._read(view.epoch)

    def identity(self) -> str:
        """Return a random text, equal on all hosts that see this directory and on no others. Raises OSError."""
        path = self._directory / "id"
        write_once(path, secrets.token_hex(8))
        return path.read_text()

    def _path(self, epoch: int) -> Path:
        return self._directory / f"{epoch:08d}.json"

    def _read(self, epoch: int) -> View:
        return from_json(View, json.loads(self._path(epoch).read_text()))


ABANDONED_S = 5.0
"""Time for which nobody holds the lease on the run directory before its hosts count as ended, seconds."""
VIEWS = "views"
"""Directory of the register in the run directory."""


class RunDirectory:
    """The register of views in a run directory, and the lease on it."""

    def __init__(self, path: Path) -> None:
        self.register = ViewRegister(path / VIEWS)
        self._lease = LeaseWatch(path)
        self._leased_at = time.monotonic()

    def is_abandoned(self) -> bool:
        """Read the lease; return whether nobody has held it for ABANDONED_S. Blocks while the file system does."""
        now = time.monotonic()
        if not self._lease.has_expired():
            self._leased_at = now
        return now - self._leased_at >= ABANDONED_S
