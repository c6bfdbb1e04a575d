"""When the state of a run is saved, and what is reported of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from acsgd.errors import RunError
from acsgd.io.checkpoint.progress import Identity, Progress
from acsgd.io.checkpoint.resume import Checkpoint
from acsgd.io.checkpoint.saver import Saver
from acsgd.run.session import Asks, Session
from acsgd.run.state import Start, layer_states
from acsgd.topology import Groups


class Saves:
    """When a run is saved, and what is told of it. A context manager, as `Saver` is.

    tell: takes a sentence for the user.
    """

    def __init__(
        self, worker: Session, saver: Saver, identity: Identity, newest: Path | None, tell: Callable[[str], None]
    ) -> None:
        self.newest = newest
        """The newest complete checkpoint, as far as this rank has heard."""
        self._worker = worker
        self._saver = saver
        self._identity = identity
        self._tell = tell
        self._config = worker.job.config.checkpoint
        self._saved_at = time.monotonic()
        self._is_taken = False

    @classmethod
    def open(cls, begun: Start, identity: Identity, groups: Groups, *, tell: Callable[[str], None]) -> Saves:
        """Return the saves of a run that has just begun."""
        job = begun.worker.job
        saver = Saver(
            job.checkpoints,
            job.config.checkpoint,
            model_dir=job.model_dir,
            layers=[shard.name for shard in job.layers],
            topology=job.topology,
            groups=groups,
            streams=job.streams,
            timeout_s=job.disk_timeout_s,
        )
        return cls(begun.worker, saver, identity, begun.newest, tell)

    def __enter__(self) -> Saves:
        self._saver.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._saver.__exit__(*exception)

    def asks(self, *, stop: bool) -> Asks:
        """Return what this rank asks of all at the end of the present step."""
        every_s, ended = self._config.every_s, self._saver.ended
        is_time = every_s is not None and time.monotonic() - self._saved_at >= every_s
        # one clock decides, or ranks would ask for one save twice
        save = is_time and self._worker.job.topology.rank == 0
        return Asks(stop=stop, save=save, report=ended is not None and ended.error is not None)

    def save(self, progress: Progress, *, asked: bool, evaluated: bool) -> float:
        """`take` and `write` at once."""
        stall_s = self.take(progress, asked=asked, evaluated=evaluated)
        self.write()
        return stall_s

    def take(self, progress: Progress, *, asked: bool, evaluated: bool) -> float:
        """Copy the state for a checkpoint if one is asked for, or if the evaluation just made was the best so far.

        Returns the seconds for which training stood still. Raises RunError if the one before has failed.
        """
        best = evaluated and self._config.best and progress.eval_loss == progress.best_eval_loss
        if not (asked or best):
            return 0.0
        started = time.perf_counter()
        self.hear(wait=True)
        run = {"progress": progress.to_dict(), "identity": self._identity.to_dict()}
        self._saver.take(progress.step, layer_states(self._worker), run, best=best)
        self._saved_at, self._is_taken = time.monotonic(), True
        return time.perf_counter() - started

    def write(self) -> None:
        """Start to write what was taken, if anything was."""
        if self._is_taken:
            self._saver.write()
        self._is_taken = False

    def hear(self, *, wait: bool, last: bool = False) -> None:
        """Tell how the save under way has ended, if it has; wait: after waiting for it, which all ranks do together.

        last: the run ends with it. Raises RunError if it failed, unless the run is to go on without.
        """
        ended, stops = self._saver.ended, last or self._config.on_error == "stop"
        if not wait and (ended is None or (ended.error is not None and stops)):
            return  # a failure ends the run on all ranks at once: when they have told each other, after the next step
        outcome = self._saver.take_outcome()
        if outcome is None:
            return
        if outcome.error is None:
            self.newest = outcome.path
            self._tell(f"saved {outcome.path}, on disk after {outcome.seconds:.1f} s")
            return
        newest = "there is no checkpoint yet" if self.newest is None else f"the newest checkpoint is {self.newest}"
        told = f"step {outcome.step} could not be saved: {outcome.error}; {newest}"
        if stops:
            raise RunError(f"{told}; put that right, and start the run again")
        self._tell(f"{told}; training goes on (checkpoint.on_error)")

    def newest_sound(self) -> Checkpoint | None:
        """Return the newest checkpoint, waiting for the one under way; called by all ranks together."""
        self.hear(wait=True)
        return None if self.newest is None else Checkpoint.open(self.newest)
