"""Optimizers by name.

A new optimizer is one file and one line in the table.
"""

from __future__ import annotations

from acsgd.optim.adafactor import Adafactor
from acsgd.optim.adamw import AdamW
from acsgd.optim.adamw8bit import AdamW8bit
from acsgd.optim.base import OptimizerSpec
from acsgd.optim.lion import Lion
from acsgd.optim.muon import Muon
from acsgd.optim.schedule_free import ScheduleFreeAdamW
from acsgd.optim.sgd import SGD

OPTIMIZERS: dict[str, type[OptimizerSpec]] = {
    "adamw": AdamW,
    "adamw8bit": AdamW8bit,
    "adafactor": Adafactor,
    "lion": Lion,
    "muon": Muon,
    "schedule_free_adamw": ScheduleFreeAdamW,
    "sgd": SGD,
}
"""All of them update fp32 weights: masters, or copies of bf16 weights."""
