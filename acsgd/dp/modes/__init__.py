"""Data-parallel modes, by name. To add one, write its file and one line in the table; tests cover every entry."""

from __future__ import annotations

from acsgd.config.options import in_steps
from acsgd.config.spec import from_spec
from acsgd.dp.ladder import MEASURED
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


def measured_work(mode: str) -> float:
    """Return the computing time of a mode per parameter and step, in multiples of AdamW's; 0 = not measured.

    mode: dp.mode; its options are left out of account.
    """
    name = mode.partition(":")[0]
    return next((rung.work for spec, rung in MEASURED.items() if spec.partition(":")[0] == name and rung.work), 0.0)


def compression(mode: str) -> float:
    """Return the bytes of an fp32 all-reduce divided by those of a mode, on average over steps. mode: dp.mode.

    As measured with these options or else, but for the number of local steps, with the default ones; that of modes that
    were not measured is 32 / bits.
    """
    if mode in MEASURED:
        return MEASURED[mode].compression
    parsed, name = from_spec(in_steps(mode, lambda _: 1), MODES, key="dp.mode"), mode.partition(":")[0]
    if name in MEASURED and name != "allreduce":
        return MEASURED[name].compression * getattr(parsed, "inner", 1) / getattr(MODES[name](), "inner", 1)
    bits = 32 if getattr(parsed, "dtype", "fp32") == "fp32" else 16
    return 32 / getattr(parsed, "bits", bits) * getattr(parsed, "inner", 1)


def redundant_steps(mode: Mode) -> int:
    """Return the number of initial steps in which each replica computes all micro-batches."""
    return getattr(mode, "redundant_steps", 0)


def initial_steps(mode: Mode) -> int:
    """Return the number of steps at the start of a run that are exact or redundant; 1 if given in epochs."""
    return max(getattr(mode, "exact_steps", 0), redundant_steps(mode))


def overlaps_next_step(mode: Mode) -> bool:
    """Return whether the exchange of a mode travels behind the computations of the next step."""
    return isinstance(mode, Cocktail) or getattr(mode, "delay", 0) > 0
