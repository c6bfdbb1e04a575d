"""How replicas agree. To add a mode, write its file and one line in the table; that also gets it tested."""

from __future__ import annotations

from acsgd.dp.allreduce import AllReduce
from acsgd.dp.central_ps import CentralPS
from acsgd.dp.cocktail import Cocktail
from acsgd.dp.cocktail_grad import CocktailGrad
from acsgd.dp.diloco import DiLoCo
from acsgd.dp.local import Local
from acsgd.dp.powersgd import PowerSGD
from acsgd.dp.quantized import Quantized
from acsgd.dp.sharded_ps import ShardedPS
from acsgd.dp.sparseloco import SparseLoCo

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
