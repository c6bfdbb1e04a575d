"""Policy for loss spikes: restore the newest valid checkpoint, and skip the batch of the spike from then on."""

from __future__ import annotations

from collections.abc import Callable

from acsgd.io.checkpoint.progress import Progress
from acsgd.run.checkpointing import Checkpointing
from acsgd.run.session import Session
from acsgd.run.state import restore


class SpikeGuard:
    """Detection of loss spikes, and recovery from them. All ranks decide alike, from losses that all know.

    skipped_steps: as of LoopState; updated. note: prints a sentence for the user.
    """

    def __init__(
        self, session: Session, checkpointing: Checkpointing, skipped_steps: set[int], note: Callable[[str], None]
    ) -> None:
        self._skipped_steps = skipped_steps
        self._session = session
        self._checkpointing = checkpointing
        self._threshold = session.job.config.optim.spike
        self._note = note

    def restore_before_spike(self, before: Progress, loss: float) -> Progress | None:
        """Restore the newest valid checkpoint if `loss`, of the step after `before`, is a spike.

        Returns the progress of that checkpoint; None if there is no spike, or no valid checkpoint: then training
        continues from the weights that the spike has updated.
        """
        if not before.is_spike(loss, self._threshold):
            return None
        spike = f"step {before.step + 1}: loss {loss:.4f} is a spike"
        checkpoint = self._checkpointing.newest_checkpoint(before.step)
        if checkpoint is None:
            self._note(f"{spike}; there is no valid checkpoint to restore: training continues")
            return None
        self._skipped_steps.add(before.step)
        restored = restore(self._session, checkpoint)
        self._note(f"{spike}; restored {checkpoint.path}, will skip this batch")
        return restored
