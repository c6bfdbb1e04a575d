"""What a daemon reads and writes in the run directory, which all hosts share."""

from __future__ import annotations

import time
from pathlib import Path

from acsgd.elastic.register import ViewRegister
from acsgd.run.lease import LeaseWatch

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
