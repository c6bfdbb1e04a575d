"""Policy for loss spikes: restore the newest valid checkpoint, and skip the batch of the spike from then on."""

from __future__ import annotations

from collections.abc import Callable

from acsgd.run.setup.resume import restore
from acsgd.run.setup.session import Session
from acsgd.run.step.after_step import StepSnapshots
from acsgd.run.step.checkpointing import Checkpointing
from acsgd.run.step.loop_state import LoopState


class SpikeGuard:
    """Recovery from loss spikes. The decision depends on the progress alone, which is equal on all ranks.

    state, snapshots: updated. note: prints a sentence for the user.
    """

    def __init__(
        self,
        session: Session,
        state: LoopState,
        snapshots: StepSnapshots,
        checkpointing: Checkpointing,
        note: Callable[[str], None],
    ) -> None:
        self._session = session
        self._state = state
        self._snapshots = snapshots
        self._checkpointing = checkpointing
        self._note = note

    def restore_after_spike(self) -> bool:
        """Restore the newest valid checkpoint if the loss of the last step was a spike; return whether it was restored.

        Without a valid checkpoint, training continues from the weights that the spike has updated.
        """
        progress = self._state.progress
        if not progress.is_spike:
            return False
        spike = f"step {progress.step}: loss {progress.recent[-1]:.4f} is a spike"
        checkpoint = self._checkpointing.newest_checkpoint(progress.step - 1)
        if checkpoint is None:
            self._note(f"{spike}; there is no valid checkpoint to restore: training continues")
            return False
        self._state.skipped_steps.add(progress.step - 1)
        restored = restore(self._session, checkpoint)
        self._state.return_to(restored)
        self._snapshots.return_to(restored.step)
        self._note(f"{spike}; restored {checkpoint.path}, will skip this batch")
        return True
