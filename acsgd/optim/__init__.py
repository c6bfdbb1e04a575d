"""Optimizers by name; learning-rate schedules, gradient clipping and the loss scale.

A new optimizer is one file and one line in the table.
"""

from __future__ import annotations

from acsgd.optim.adamw import AdamW
from acsgd.optim.base import OptimizerSpec

OPTIMIZERS: dict[str, type[OptimizerSpec]] = {"adamw": AdamW}
