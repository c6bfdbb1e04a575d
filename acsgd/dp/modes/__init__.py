"""Data-parallel modes, by name. To add one, write its file and one line in the table; tests cover every entry."""

from __future__ import annotations

from acsgd.dp.modes.allreduce import AllReduce
from acsgd.dp.modes.cocktail import Cocktail
from acsgd.dp.modes.cocktail_grad import CocktailGrad
from acsgd.dp.modes.diloco import DiLoCo
from acsgd.dp.modes.local import Local
from acsgd.dp.modes.parameter_server import CentralPS, ShardedPS
from acsgd.dp.modes.powersgd import PowerSGD
from acsgd.dp.modes.quantized import Quantized
from acsgd.dp.modes.sparseloco import SparseLoCo

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
