"""Where a NaN or inf came from: what one rank found, and which of all ranks' findings is the origin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

Phase = Literal["weight", "forward", "backward", "reduce"]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""In the order in which what is wrong in one spoils the next."""


@dataclass(frozen=True)
class NonFiniteTensor:
    """A tensor that is not finite."""

    phase: Phase
    """In what it was found: a weight before the step, a forward, a backward, or a gradient's sum over replicas."""
    stage: int
    micro: int | None
    """The micro-batch's place in the global batch; None of a weight and of a sum, which belong to all."""
    tensor: str
    """By Hugging Face names: "output of transformer.h.3.mlp.c_fc", "gradient of transformer.h.3.ln_1.weight"."""
    value: Literal["nan", "inf"]
    """What is in it; "nan" if both."""

    def __str__(self) -> str:
        micro = "" if self.micro is None else f", micro-batch {self.micro}"
        return f"{self.tensor} ({self.value}; {self.phase}, stage {self.stage}{micro})"

    def to_dict(self) -> dict[str, Any]:
        """Return it as what JSON can say."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> NonFiniteTensor:
        """Read what `to_dict` gave."""
        return cls(**fields)


def first_non_finite(faults: Sequence[NonFiniteTensor]) -> NonFiniteTensor:
    """Return the origin of all faults of one step, of which there is at least one.

    A bad weight spoils all that it takes part in. Else micro-batches spoil one another only in their sum, and what
    is wrong in one travels down the stages forward and up the stages backward. Of equals, the first in the list.
    """
    return min(faults, key=_order)


def _order(fault: NonFiniteTensor) -> tuple[int, int, int]:
    along = -fault.stage if fault.phase == "backward" else fault.stage
    return PHASES.index(fault.phase), -1 if fault.micro is None else fault.micro, along
