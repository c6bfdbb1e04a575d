"""The learning rate as a function of the optimizer step."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Annotated, Protocol

from acsgd.config.options import OptimConfig
from acsgd.config.ranges import Range
from acsgd.config.spec import from_spec

MINIMUM = Range(0, 1)
"""Of a final learning rate, as a fraction of the peak."""


class RateSchedule(Protocol):
    """A learning-rate schedule, chosen by a spec string; a frozen dataclass."""

    def factor(self, done: float) -> float:
        """Return the learning rate as a fraction of the peak.

        done: fraction of the steps after the warm-up that are complete, 0 at the peak, less than 1.
        """
        ...


@dataclass(frozen=True)
class Linear:
    """Falls along a line."""

    min: Annotated[float, MINIMUM] = 0.0
    """Value at the last step, a fraction of the peak."""

    def factor(self, done: float) -> float:
        return 1 - (1 - self.min) * done


@dataclass(frozen=True)
class Cosine:
    """Falls along half a cosine (Loshchilov and Hutter 2017, arXiv:1608.03983, without restarts)."""

    min: Annotated[float, MINIMUM] = 0.0
    """Value at the last step, a fraction of the peak."""

    def factor(self, done: float) -> float:
        return self.min + (1 - self.min) * (1 + math.cos(math.pi * done)) / 2


@dataclass(frozen=True)
class Constant:
    """Stays at the peak."""

    def factor(self, done: float) -> float:
        return 1.0


@dataclass(frozen=True)
class Polynomial:
    """Falls as a power of the remaining fraction of steps."""

    power: Annotated[float, Range(0, 100, above=True)] = 2.0
    """Exponent; 1 = linear."""
    min: Annotated[float, MINIMUM] = 0.0
    """Value at the last step, a fraction of the peak."""

    def factor(self, done: float) -> float:
        return self.min + (1 - self.min) * (1 - done) ** self.power


@dataclass(frozen=True)
class Exponential:
    """Falls by the same factor in each step."""

    min: Annotated[float, Range(0, 1, above=True)] = 0.01
    """Value at the last step, a fraction of the peak."""

    def factor(self, done: float) -> float:
        return float(self.min**done)


@dataclass(frozen=True)
class WarmupStableDecay:
    """Stays at the peak, then falls along a line (Hu et al. 2024, arXiv:2404.06395, section 4)."""

    decay: Annotated[float, Range(0, 1, above=True)] = 0.2
    """Fraction of the steps after the warm-up in which it falls."""
    min: Annotated[float, MINIMUM] = 0.0
    """Value at the last step, a fraction of the peak."""

    def factor(self, done: float) -> float:
        return 1 - (1 - self.min) * max(0.0, (done - (1 - self.decay)) / self.decay)


RATE_SCHEDULES: dict[str, type[RateSchedule]] = {
    "linear": Linear,
    "cosine": Cosine,
    "constant": Constant,
    "polynomial": Polynomial,
    "exponential": Exponential,
    "wsd": WarmupStableDecay,
}


@functools.cache
def parse_schedule(spec: str) -> RateSchedule:
    """Parse the value of optim.schedule. Raises ValueError."""
    schedule: RateSchedule = from_spec(spec, RATE_SCHEDULES, key="optim.schedule")
    return schedule


def learning_rate(step: int, config: OptimConfig) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0.

    Rises linearly over the first `warmup` steps, peaks at step `warmup`, and would reach its end at step `num_steps`.
    """
    warmup = config.num_warmup
    if step < warmup:
        return config.lr * (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, config.num_steps - warmup)
    return config.lr * parse_schedule(config.schedule).factor(done)
