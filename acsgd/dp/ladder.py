"""What data-parallel modes have been measured to save and to cost, and the choice of dp.compress=auto among them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from acsgd.config.ranges import Range


class ModeRung(NamedTuple):
    """A data-parallel mode."""

    spec: str
    """Its dp.mode."""
    compression: float
    """Bytes of an fp32 all-reduce divided by those of the mode, on average over steps."""
    loss_cost: float = math.inf
    """Held-out loss above all-reduce's with its learning rate, when fine-tuning; infinite = auto does not choose it."""
    loss_cost_from_scratch: float = math.inf
    """The same from random weights."""
    work: float = 0.0
    """Computing time per parameter and step, in multiples of AdamW's, beyond that of all-reduce."""

    def cost(self, *, from_scratch: bool) -> float:
        """Return the loss cost of a run."""
        return self.loss_cost_from_scratch if from_scratch else self.loss_cost


_DILOCO = "diloco:inner={},outer_lr=1,momentum=0,bits=4,moment_correction=true"
MEASURED = {
    rung.spec: rung
    for rung in (
        ModeRung("allreduce", 1.0, 0.0, 0.0),
        ModeRung("allreduce:dtype=bf16", 2.0, 0.0002, 0.0002),
        ModeRung("cocktail_grad:topk=0.1,bits=4", 36.0, 0.0003, work=14.0),
        ModeRung(_DILOCO.format(15), 120.0, 0.0093, work=0.3),
        ModeRung("cocktail", 188.0, 0.0139, work=9.0),
        ModeRung("cocktail:random=0.05,topk=0.1", 548.0, 0.0173, 0.48, work=9.0),
        ModeRung(_DILOCO.format(75), 600.0, 0.0202, work=0.3),
        ModeRung("cocktail_grad:topk=0.015,bits=2", 200.0, 0.0236, 0.32, work=14.0),
        ModeRung("powersgd", 22.0, work=7.7),
        ModeRung("cocktail_grad", 134.0, work=14.0),
        ModeRung("sparseloco", 3000.0, work=0.9),
        ModeRung("local", math.inf),
    )
}
"""Modes by their spec; those without options stand for others of the mode. From docs/measurements/replicas.md, but for
the loss cost of bf16, which is taken to be that of activations."""


@dataclass(frozen=True)
class AutoMode:
    """Measure the links between replicas, and take the mode that costs the least loss among those whose step is the
    shortest; another one when the links change."""

    max_loss_cost: Annotated[float, Range(0, 10, above=True)] = 0.005
    """Largest loss cost of the mode, in the unit of the loss."""

    def rungs(self, *, from_scratch: bool) -> list[ModeRung]:
        """Return the modes that cost at most `max_loss_cost`, the cheapest first.

        Raises ValueError if it is all-reduce alone, without rounding.
        """
        by_cost = sorted(MEASURED.values(), key=lambda rung: rung.cost(from_scratch=from_scratch))
        found = [rung for rung in by_cost if rung.cost(from_scratch=from_scratch) <= self.max_loss_cost]
        if len(found) == 1:
            nearest, cost = by_cost[1].spec, by_cost[1].cost(from_scratch=from_scratch)
            raise ValueError(
                f"dp.compress: max_loss_cost={self.max_loss_cost:g} allows no mode but allreduce: the one that costs "
                f'least, "{nearest}", costs {cost:g}; give max_loss_cost={cost:g} or more, or remove dp.compress'
            )
        return found


COMPRESS: dict[str, type[AutoMode]] = {"auto": AutoMode}
