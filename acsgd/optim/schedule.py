"""The learning rate as a function of the optimizer step."""

from __future__ import annotations

import math

from acsgd.config.options import OptimConfig


def learning_rate(step: int, config: OptimConfig) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0.

    Rises linearly over the first `warmup` steps, peaks at step `warmup`, and would reach 0 at step `num_steps`.
    """
    if step < config.warmup:
        return config.lr * (step + 1) / (config.warmup + 1)
    rest = (step - config.warmup) / max(1, config.num_steps - config.warmup)
    shape = 1 - rest if config.schedule == "linear" else (1 + math.cos(math.pi * rest)) / 2
    return config.lr * shape
