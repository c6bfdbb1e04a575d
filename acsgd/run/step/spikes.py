"""Policy for loss spikes: restore the newest valid checkpoint, and skip the batch of the spike from then on."""

from __future__ import annotations

from collections.abc import Callable

from acsgd.io.checkpoint.progress import Progress
from acsgd.run.report import Report, StepField, on_any
from acsgd.run.session import Session
from acsgd.run.setup.resume import restore
from acsgd.run.step.checkpointing import Checkpointing
from acsgd.run.step.hooks import LoopState, StepHook

SKIP = StepField("skip", on_any)
"""Whether the update of the step is to be skipped: its loss was a spike."""


class SpikeGuard(StepHook):
    """Recovery from loss spikes. The decision depends on the progress alone, which is equal on all ranks.

    The steps to skip are part of the loop state, from which another loop may continue. note: prints a sentence for the
    user.
    """

    fields = (SKIP,)

    def __init__(self, session: Session, checkpointing: Checkpointing, note: Callable[[str], None]) -> None:
        self._session = session
        self._checkpointing = checkpointing
        self._note = note

    def report(self, state: LoopState) -> Report:
        return {SKIP: state.progress.step in state.skipped_steps}

    def after_step(self, state: LoopState) -> Progress | None:
        """Restore the newest valid checkpoint if the loss of the last step was a spike; return its progress.

        Without a valid checkpoint, training continues from the weights that the spike has updated.
        """
        progress = state.progress
        if not progress.is_spike:
            return None
        spike = f"step {progress.step}: loss {progress.recent[-1]:.4f} is a spike"
        checkpoint = self._checkpointing.newest_checkpoint(progress.step - 1)
        if checkpoint is None:
            self._note(f"{spike}; there is no valid checkpoint to restore: training continues")
            return None
        state.skipped_steps.add(progress.step - 1)
        restored = restore(self._session, checkpoint)
        self._note(f"{spike}; restored {checkpoint.path}, will skip this batch")
        return restored
