"""Metrics to Weights & Biases, online or offline.

Without login or network, a run is written to RUN_DIR/wandb/offline-run-*, which `wandb sync DIR` uploads. A run that
was resumed offline has one such directory per start, all with the id in RUN_DIR/wandb-id; synced in order of their
start, they are one run.

WANDB_PROJECT, WANDB_NAME and WANDB_MODE are respected. log.name overrides WANDB_NAME.
"""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from acsgd.config.options import Config
from acsgd.io.telemetry.record import RunEvent, StepRecord

if TYPE_CHECKING:
    import wandb

PROJECT = "acsgd"
"""Default project."""
INIT_TIMEOUT_S = 30.0
"""Time limit for a connection to the server; compute nodes often have a key but no internet access."""
FINISH_TIMEOUT_S = 60.0
"""Time limit for the upload at the end of a run; `wandb sync` uploads the rest."""


class WandbSink:
    """Logs to one wandb run, which a resumed run continues. Errors of wandb are reported once and do not end training.

    wandb ignores steps that a resumed run repeats.
    """

    def __init__(self, config: Config, run_dir: Path, resumed_at: int, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._run: wandb.Run | None = None
        try:
            self._run = _open(config, run_dir, _run_id(run_dir, is_new=resumed_at == 0), notify)
        except Exception as error:  # wandb raises errors of its own, of pydantic, of sockets and of its service
            self._disable(error)

    def log(self, record: StepRecord) -> None:
        """Log the numbers of a record, without those that are not finite."""
        if self._run is None:
            return
        numbers = {name: value for name, value in record.numbers().items() if name != "step" and value is not None}
        try:
            self._run.log(numbers, step=record.step)
        except Exception as error:
            self._disable(error)

    def note(self, text: str) -> None:
        """Do nothing: notes are for the terminal and the text logs."""

    def event(self, event: RunEvent) -> None:
        self.note(event.text)

    def close(self, *, failed: bool) -> None:
        """Finish the run; waits at most FINISH_TIMEOUT_S for its upload."""
        try:
            if self._run is not None:
                self._run.finish(exit_code=int(failed))
        except Exception as error:
            self._disable(error)
        with contextlib.suppress(Exception):  # already reported
            import wandb

            wandb.teardown()  # `finish` may return before the last block is written

    def _disable(self, error: Exception) -> None:
        self._run = None
        self._notify(f"wandb failed ({_first_line(error)}); training continues without it")


def _run_id(run_dir: Path, *, is_new: bool) -> str:
    """Return the id in run_dir/wandb-id. A new run writes a new id: wandb ignores repeated steps of an old one."""
    path = run_dir / "wandb-id"
    known = "" if is_new or not path.exists() else path.read_text().strip()
    if known:
        return known
    path.write_text(new := uuid.uuid4().hex[:8])
    return new


def _open(config: Config, run_dir: Path, run_id: str, notify: Callable[[str], None]) -> wandb.Run:
    """Start the run in the user's mode, falling back to offline, and print where to find it."""
    import wandb

    # from WANDB_PROJECT, WANDB_NAME, WANDB_MODE or wandb's own settings files
    user = wandb.setup(settings=wandb.Settings(silent=True)).settings

    def start(mode: Literal["offline"] | None = None) -> wandb.Run:
        return wandb.init(
            project=user.project or PROJECT,
            name=config.log.name or user.run_name or run_dir.resolve().name,
            id=run_id,
            resume="allow",
            mode=mode,
            dir=run_dir,
            config=dataclasses.asdict(config),
            settings=_private_settings(),
        )

    if user.mode == "disabled":
        return start()
    reason = "offline mode"
    if user.mode not in ("offline", "dryrun"):
        try:
            if wandb.login(prompt=False, verify=False):
                run = start()
                notify(f"wandb: {run.url}")
                return run
            reason = "not logged in"
        except Exception as error:
            reason = f"no connection ({_first_line(error)})"
            wandb.teardown()  # its service refuses the id of a run that failed to start
    run = start("offline")
    notify(f"wandb: {reason}; to upload the run later: wandb sync {Path(run.dir).parent}")
    return run


def _private_settings() -> wandb.Settings:
    """Return settings that disable all automatic collection: host, user, program, arguments, code, output."""
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
