"""One step's metrics, and what takes them."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol


class Record(NamedTuple):
    """One line of metrics.jsonl. Bytes are sums over all ranks, headers included."""

    step: int
    """Optimizer steps done."""
    loss: float | None
    """Mean over the target tokens of the global batch, before the step; None = not finite, and the step left out."""
    tokens: int
    """Target tokens trained on since the start of the run."""
    tokens_per_s: float
    step_s: float
    lr: float
    grad_norm: float | None
    """Before clipping; None = not finite, and the step left out."""
    pp_forward_bytes: int
    pp_backward_bytes: int
    """With the gradients of tied weights, where the two copies lie on different ranks."""
    dp_bytes: int
    """Since the line before: what replicas exchange after an update is in the next line, after the last one in none."""
    hidden_share: float
    peak_memory_bytes: int
    """Of the rank that has held most so far, among those of the first replica."""
    skipped: int = 0
    """Steps of the run so far whose update was left out."""
    loss_scale: float = 1.0
    """What fp16 multiplies the loss by in the next step."""
    save_stall_s: float = 0.0
    """Seconds of this step in which training stood still for a save."""
    eval_loss: float | None = None
    """Mean over the target tokens of the held-out split, after the step; None = not evaluated."""

    def numbers(self) -> dict[str, float | None]:
        """Return the fields as JSON takes them: None for what is not finite, no eval_loss where not evaluated."""
        numbers = {name: _finite(value) for name, value in self._asdict().items()}
        if self.eval_loss is None:
            del numbers["eval_loss"]
        return numbers


class Sink(Protocol):
    """Something that records are told to."""

    def log(self, record: Record) -> None:
        """Take one step's record."""
        ...

    def note(self, text: str) -> None:
        """Say something that is no number."""
        ...

    def close(self, *, failed: bool) -> None:
        """Write out what is left; failed: whether an error ends the run."""
        ...


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
