"""Metrics to Weights & Biases, online or offline.

Without login or network, a run is written to RUN_DIR/wandb/offline-run-*, which `wandb sync DIR` uploads. A run that
was resumed offline has one such directory per start, all with the id in RUN_DIR/wandb-id; synced in order of their
start, they are one run.

WANDB_PROJECT, WANDB_NAME and WANDB_MODE are respected. log.name overrides WANDB_NAME.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from acsgd.io.telemetry.trackers import FINISH_TIMEOUT_S, PROJECT, Steps, TrackedRun, first_line

if TYPE_CHECKING:
    import wandb

INIT_TIMEOUT_S = 30.0
"""Time limit for a connection to the server; compute nodes often have a key but no internet access."""


class Wandb:
    """A run of Weights & Biases. wandb ignores steps that a resumed run repeats."""

    def __init__(self, run: TrackedRun) -> None:
        with _torn_down_on_error():
            self._run = _open(run)

    def log(self, steps: Steps) -> None:
        with _torn_down_on_error():
            for step, numbers in steps:
                self._run.log(dict(numbers), step=step)

    def close(self, *, failed: bool) -> None:
        with _torn_down_on_error():
            self._run.finish(exit_code=int(failed))
        _tear_down()


@contextlib.contextmanager
def _torn_down_on_error() -> Iterator[None]:
    try:
        yield
    except Exception:
        _tear_down()
        raise


def _tear_down() -> None:
    """End wandb's service: `finish` may return before the last block is written."""
    with contextlib.suppress(Exception):  # the error before it is reported
        import wandb

        wandb.teardown()


def _open(tracked: TrackedRun) -> wandb.Run:
    """Start the run in the user's mode, falling back to offline, and print where to find it."""
    import wandb

    # from WANDB_PROJECT, WANDB_NAME, WANDB_MODE or wandb's own settings files
    user = wandb.setup(settings=wandb.Settings(silent=True)).settings

    def start(mode: Literal["offline"] | None = None) -> wandb.Run:
        return wandb.init(
            project=user.project or PROJECT,
            name=tracked.config.log.name or user.run_name or tracked.name,
            id=tracked.id,
            resume="allow",
            mode=mode,
            dir=tracked.directory,
            config=dataclasses.asdict(tracked.config),
            settings=_private_settings(),
        )

    if user.mode == "disabled":
        return start()
    reason = "offline mode"
    if user.mode not in ("offline", "dryrun"):
        try:
            if wandb.login(prompt=False, verify=False):
                run = start()
                tracked.notify(f"wandb: {run.url}")
                return run
            reason = "not logged in"
        except Exception as error:
            reason = f"no connection ({first_line(error)})"
            wandb.teardown()  # its service refuses the id of a run that failed to start
    run = start("offline")
    tracked.notify(f"wandb: {reason}; to upload the run later: wandb sync {Path(run.dir).parent}")
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
        finish_timeout=FINISH_TIMEOUT_S - 10,  # what follows must end in time, too
    )
