"""Data-parallel modes, by name. To add one, write its file and one line in the table; tests cover every entry."""

from __future__ import annotations

import math

from acsgd.config.spec import from_spec
from acsgd.dp.modes.allreduce import AllReduce
from acsgd.dp.modes.cocktail import Cocktail
from acsgd.dp.modes.cocktail_grad import CocktailGrad
from acsgd.dp.modes.diloco import DiLoCo
from acsgd.dp.modes.local import Local
from acsgd.dp.modes.parameter_server import CentralPS, ShardedPS
from acsgd.dp.modes.powersgd import PowerSGD
from acsgd.dp.modes.quantized import Quantized
from acsgd.dp.modes.sparseloco import SparseLoCo
from acsgd.dp.sync import Mode

MODES = {
    "allreduce": AllReduce,
    "sharded_ps": ShardedPS,
    "central_ps": CentralPS,
    "powersgd": PowerSGD,
    "quantized": Quantized,
    "cocktail_grad": CocktailGrad,
    "local": Local,
    "cocktail": Cocktail,
    "diloco": DiLoCo,
    "sparseloco": SparseLoCo,
}

COMPRESSION = {
    "powersgd": 22.0,
    "cocktail_grad": 134.0,
    "cocktail_grad:topk=0.1,bits=4": 36.0,
    "cocktail_grad:topk=0.015,bits=2": 200.0,
    "cocktail": 188.0,
    "cocktail:random=0.05,topk=0.1": 548.0,
    "sparseloco": 100.0,
    "local": math.inf,
}
"""Bytes of an fp32 all-reduce divided by those of the mode, with these options or, in place of others, default ones, by
docs/measurements/replicas.md. That of other modes is 32 / bits."""


def compression(mode: str) -> float:
    """Return the bytes of an fp32 all-reduce divided by those of a mode, on average over steps. mode: dp.mode."""
    parsed = from_spec(mode, MODES, key="dp.mode")
    bits = 32 if getattr(parsed, "dtype", "fp32") == "fp32" else 16
    usual = COMPRESSION.get(mode.partition(":")[0], 32 / getattr(parsed, "bits", bits))
    return COMPRESSION.get(mode, usual) * getattr(parsed, "inner", 1)


def overlaps_next_step(mode: Mode) -> bool:
    """Return whether the exchange of a mode travels behind the computations of the next step."""
    return isinstance(mode, Cocktail) or getattr(mode, "delay", 0) > 0
