"""Non-finite tensors found in a training step, and which of them is the origin of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

Phase = Literal["weight", "forward", "backward", "reduce"]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""In causal order: a NaN in one phase spreads to the next."""


@dataclass(frozen=True)
class NonFiniteTensor:
    """A tensor that holds a NaN or inf."""

    phase: Phase
    """Where it appeared: a weight before the step, a forward, a backward, or a gradient reduced over replicas."""
    stage: int
    micro: int | None
    """Index of the micro-batch in the global batch; None for weights and reduced gradients."""
    tensor: str
    """By Hugging Face names: "output of transformer.h.3.mlp.c_fc", "gradient of transformer.h.3.ln_1.weight"."""
    value: Literal["nan", "inf"]
    """The value found; "nan" if there are both."""

    def __str__(self) -> str:
        micro = "" if self.micro is None else f", micro-batch {self.micro}"
        return f"{self.tensor} ({self.value}; {self.phase}, stage {self.stage}{micro})"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> NonFiniteTensor:
        """Restore from `to_dict`."""
        return cls(**fields)


def first_non_finite(found: Sequence[NonFiniteTensor]) -> NonFiniteTensor:
    """Return the origin of the non-finite tensors of one step, of which there must be at least one.

    A weight affects everything computed from it. Otherwise a NaN stays within its micro-batch until gradients are
    summed, and spreads to later stages in the forward and to earlier stages in the backward. Ties: the first listed.
    """
    return min(found, key=_causal_order)


def _causal_order(tensor: NonFiniteTensor) -> tuple[int, int, int]:
    along_pipeline = -tensor.stage if tensor.phase == "backward" else tensor.stage
    return PHASES.index(tensor.phase), -1 if tensor.micro is None else tensor.micro, along_pipeline
