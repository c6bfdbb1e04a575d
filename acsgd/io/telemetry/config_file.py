"""config.toml: the configuration of the run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from acsgd.config.options import Config
from acsgd.config.run_file import to_toml
from acsgd.io.telemetry.record import RunEvent, StepRecord


class ConfigFile:
    """Writes config.toml into the run directory, and again if it is removed during the run.

    notify: prints a sentence for the user.
    """

    def __init__(self, config: Config, run_dir: Path, *, notify: Callable[[str], None]) -> None:
        self._path, self._text, self._notify = run_dir / "config.toml", to_toml(config), notify
        self._write()

    def log(self, record: StepRecord) -> None:
        """Write the file again if it is gone. An error is left to the next step: metrics.jsonl reports it."""
        with contextlib.suppress(OSError):
            if not self._path.exists():
                self._write()
                self._notify(f"{self._path} was removed during the run; written again")

    def note(self, text: str) -> None:
        """Do nothing."""

    def event(self, event: RunEvent) -> None:
        pass

    def close(self, *, failed: bool) -> None:
        """Do nothing."""

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(self._text)
