"""The modes among which dp.compress=auto chooses, with what each costs in loss and in computing time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from acsgd.config.ranges import Range


class ModeRung(NamedTuple):
    """A data-parallel mode."""

    spec: str
    """Its dp.mode."""
    loss_cost: float
    """Held-out loss above that of all-reduce with its learning rate, when fine-tuning."""
    loss_cost_from_scratch: float
    """The same from random weights; infinite = not measured."""
    work: float
    """Computing time per parameter and step, in multiples of AdamW's, beyond that of all-reduce."""

    def cost(self, *, from_scratch: bool) -> float:
        """Return the loss cost of a run."""
        return self.loss_cost_from_scratch if from_scratch else self.loss_cost


_DILOCO = "diloco:inner={},outer_lr=1,momentum=0,bits=4,moment_correction=true"
RUNGS = (
    ModeRung("allreduce", 0.0, 0.0, 0.0),
    ModeRung("allreduce:dtype=bf16", 0.0002, 0.0002, 0.0),
    ModeRung("cocktail_grad:topk=0.1,bits=4", 0.0003, math.inf, 18.0),
    ModeRung(_DILOCO.format(15), 0.0093, math.inf, 0.3),
    ModeRung("cocktail", 0.0139, math.inf, 10.0),
    ModeRung("cocktail:random=0.05,topk=0.1", 0.0173, 0.48, 10.0),
    ModeRung(_DILOCO.format(75), 0.0202, math.inf, 0.3),
    ModeRung("cocktail_grad:topk=0.015,bits=2", 0.0236, 0.32, 18.0),
)
"""By loss cost when fine-tuning. The costs and the work are in docs/measurements/replicas.md, but for the cost of bf16,
which is taken to be that of activations."""


@dataclass(frozen=True)
class AutoMode:
    """Measure the links between replicas at the start, and take the mode that costs the least loss among those whose
    step is the shortest. A resumed run keeps the mode of its checkpoint."""

    max_loss_cost: Annotated[float, Range(0, 10, above=True)] = 0.005
    """Largest loss cost of the mode, in the unit of the loss."""

    def rungs(self, *, from_scratch: bool) -> list[ModeRung]:
        """Return the modes that cost at most `max_loss_cost`, the cheapest first.

        Raises ValueError if it is all-reduce alone, without rounding.
        """
        by_cost = sorted(RUNGS, key=lambda rung: rung.cost(from_scratch=from_scratch))
        found = [rung for rung in by_cost if rung.cost(from_scratch=from_scratch) <= self.max_loss_cost]
        if len(found) == 1:
            nearest, cost = by_cost[1].spec, by_cost[1].cost(from_scratch=from_scratch)
            raise ValueError(
                f"dp.compress: max_loss_cost={self.max_loss_cost:g} allows no mode but allreduce: the one that costs "
                f'least, "{nearest}", costs {cost:g}; give max_loss_cost={cost:g} or more, or remove dp.compress'
            )
        return found


COMPRESS: dict[str, type[AutoMode]] = {"auto": AutoMode}
