"""Metrics to Weights & Biases: one run per job, from one rank, with login and network or without.

A run without them is kept in RUN_DIR/wandb/offline-run-*, which `wandb sync DIR` uploads. A job that was resumed
offline has one such directory for each start, all with the id in RUN_DIR/wandb-id; synced in the order of their
start they are one run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from acsgd.config.options import Config
from acsgd.io.telemetry.record import Record

if TYPE_CHECKING:
    import wandb

PROJECT = "acsgd"
INIT_TIMEOUT_S = 30.0
"""After which a server counts as out of reach; a compute node often knows a key but has no way out."""
FINISH_TIMEOUT_S = 60.0
"""After which the end of a run waits no longer for its upload; `wandb sync` uploads the rest."""


def check_installed(to: str) -> None:
    """Raise ValueError if log.to, `to`, asks for wandb and it is not installed."""
    if "wandb" not in to.split(","):
        return
    spec = importlib.util.find_spec("wandb")
    if spec is None or spec.origin is None:  # a directory ./wandb, as wandb leaves them, is a namespace without origin
        raise ValueError(f'log.to="{to}" needs wandb: pip install "acsgd[wandb]"')


class WandbSink:
    """A run of wandb that a resumed job goes on with. Whatever fails in it is told once and ends no training.

    A step that a resumed job makes again is not logged again: wandb keeps what it has.
    """

    def __init__(self, config: Config, run_dir: Path, *, resumed_at: int, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._run: wandb.Run | None = None
        try:
            self._run = _open(config, run_dir, _run_id(run_dir, is_new=resumed_at == 0), tell)
        except Exception as error:  # wandb raises its own errors, pydantic's, those of sockets and of a service
            self._give_up(error)

    def log(self, record: Record) -> None:
        """Log the record's numbers at its step; what was not finite stays a gap."""
        if self._run is None:
            return
        numbers = {name: value for name, value in record.numbers().items() if name != "step" and value is not None}
        try:
            self._run.log(numbers, step=record.step)
        except Exception as error:
            self._give_up(error)

    def note(self, text: str) -> None:
        """Leave notes to the terminal and the text logs."""

    def close(self, *, failed: bool) -> None:
        """Finish the run, waiting at most FINISH_TIMEOUT_S for its upload; what is written by then is whole."""
        try:
            if self._run is not None:
                self._run.finish(exit_code=int(failed))
        except Exception as error:
            self._give_up(error)
        with contextlib.suppress(Exception):  # told before, if it fails
            import wandb

            wandb.teardown()  # `finish` alone may return before the last block is in the file

    def _give_up(self, error: Exception) -> None:
        self._run = None
        self._tell(f"wandb failed ({_first_line(error)}); training goes on without it")


def _run_id(run_dir: Path, *, is_new: bool) -> str:
    """Return the id in run_dir/wandb-id, made there for a fresh start: wandb would drop its steps from an old run."""
    path = run_dir / "wandb-id"
    known = "" if is_new or not path.exists() else path.read_text().strip()
    if known:
        return known
    path.write_text(new := uuid.uuid4().hex[:8])
    return new


def _open(config: Config, run_dir: Path, run_id: str, tell: Callable[[str], None]) -> wandb.Run:
    """Start the run, online if possible, in the mode the user told wandb, and tell where it is to be found."""
    import wandb

    def start(mode: Literal["offline"] | None = None) -> wandb.Run:
        return wandb.init(
            project=PROJECT,
            name=config.log.name or run_dir.resolve().name,
            id=run_id,
            resume="allow",
            mode=mode,
            dir=run_dir,
            config=dataclasses.asdict(config),
            settings=_private_settings(),
        )

    told_mode = wandb.setup(settings=wandb.Settings(silent=True)).settings.mode  # WANDB_MODE or wandb's own files
    if told_mode == "disabled":
        return start()
    why = "offline, as wandb is told to be"
    if told_mode not in ("offline", "dryrun"):
        try:
            if wandb.login(prompt=False, verify=False):
                run = start()
                tell(f"wandb: {run.url}")
                return run
            why = "not logged in"
        except Exception as error:
            why = f"no connection ({_first_line(error)})"
            wandb.teardown()  # its service refuses the id of a run that failed to start
    run = start("offline")
    tell(f"wandb: {why}; to upload the run later: wandb sync {Path(run.dir).parent}")
    return run


def _private_settings() -> wandb.Settings:
    """Return settings with which wandb collects nothing by itself: no host, user, program, arguments, code, output."""
    import wandb

    return wandb.Settings(
        host="",
        console="off",
        save_code=False,
        label_disable=True,
        x_disable_machine_info=True,
        x_disable_stats=True,
        x_save_requirements=False,
        init_timeout=INIT_TIMEOUT_S,
        finish_timeout=FINISH_TIMEOUT_S,
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
