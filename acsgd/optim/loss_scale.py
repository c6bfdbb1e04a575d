"""fp16's loss scale."""

from __future__ import annotations

from dataclasses import dataclass, replace

from acsgd.config.options import Config
from acsgd.errors import RunError

GROWTH_STEPS = 2000
"""Steps without overflow after which a loss scale is doubled, as in torch.amp.GradScaler."""
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-10, 2.0**24


@dataclass(frozen=True)
class LossScale:
    """What the loss is multiplied by before backward, so that small gradients do not vanish in fp16.

    Dynamic as in Micikevicius et al. 2018, arXiv:1710.03740, section 3.2: halved when gradients overflow, doubled
    after GROWTH_STEPS steps without. In the other types it is 1 and stays.
    """

    value: float = 1.0
    good_steps: int = 0
    """Steps since the scale last changed."""
    dynamic: bool = False

    @classmethod
    def of(cls, config: Config, saved: LossScale | None = None) -> LossScale:
        """Return the scale that a run begins with, or goes on with if it has saved one in fp16."""
        if config.model.dtype != "fp16":
            return cls()
        return saved if saved and saved.dynamic else cls(config.optim.loss_scale, dynamic=True)

    def after(self, *, overflowed: bool) -> LossScale:
        """Return the scale of the next step. Raises RunError if no scale is small enough."""
        if not self.dynamic:
            return self
        if overflowed and self.value <= SMALLEST_SCALE:
            raise RunError(
                f"gradients overflow fp16 even at a loss scale of {self.value:g}; use --model.dtype bf16, or a smaller "
                "optim.lr"
            )
        if overflowed:
            return replace(self, value=self.value / 2, good_steps=0)
        if self.good_steps + 1 == GROWTH_STEPS:
            return replace(self, value=max(self.value, min(self.value * 2, LARGEST_SCALE)), good_steps=0)
        return replace(self, good_steps=self.good_steps + 1)
