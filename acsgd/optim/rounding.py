"""Stochastic rounding of fp32 weights to bf16.

bf16 has 8 significant bits, so an update of less than 2^-9 of a weight would be lost if it were rounded to nearest.
Rounded up or down at random, each with the probability that keeps the expectation, it counts on average (Gupta et al.
2015, arXiv:1502.02551; Zamirai et al. 2020, arXiv:2010.06192).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from acsgd.codecs.bits import block_size, in_blocks
from acsgd.optim.ownership import rows_of_key
from acsgd.shards.weights import Weight
from acsgd.streams import mix_seed

LOW_BITS = 0xFFFF
"""Bits of an fp32 number that bf16 does not have."""


class RandomBits(NamedTuple):
    """Random numbers of the rows and of the columns of a weight, int32, those of rows odd.

    Columns are those of the last dimension; a vector has one.

    The upper half of the product of both gives each element its bits, so that parts of a weight have those of the
    whole. Each is uniform, and two are as good as independent (multiply-shift hashing, Dietzfelbinger et al. 1997).
    They do not depend on the seed of the run.
    """

    rows: Tensor
    columns: Tensor


def random_bits(weight: Weight, step: int) -> RandomBits:
    """Return the random numbers of a weight, or of the part that its key names, in a step, on its device."""
    (key, start), shape = rows_of_key(weight.key), weight.param.shape
    columns = shape[-1] if len(shape) > 1 else 1
    start, rows = start * math.prod(shape[1:-1]), weight.param.numel() // max(1, columns)
    generator = torch.Generator().manual_seed(mix_seed(step, *key.encode()))
    numbers = torch.randint(-(2**31), 2**31, [columns + start + rows], dtype=torch.int32, generator=generator)
    numbers = numbers.to(weight.param.device)
    return RandomBits(numbers[columns + start :] | 1, numbers[:columns])


@torch.no_grad()
def round_stochastically(values: Tensor, bits: RandomBits, *, out: Tensor) -> None:
    """Round fp32 values to bf16, up or down at random, so that the expectation is the value.

    values: contiguous; inf and NaN stay. out: of the same shape, changed in place.
    """
    if not values.numel():
        return
    rows, columns = bits
    at_once = max(1, min(len(rows), block_size(values.device) // max(1, len(columns))))
    # of all blocks: on a CPU, new memory takes longer than the work
    sums, noise = torch.empty(2, at_once, len(columns), dtype=torch.int32, device=values.device)
    by_rows = (x.view(len(rows), -1) for x in (values, out.view(torch.int16)))
    for source, target, numbers in in_blocks(at_once, *by_rows, rows):
        high, low = sums[: len(numbers)], noise[: len(numbers)]
        torch.mul(numbers.unsqueeze(1), columns, out=low).bitwise_right_shift_(16).bitwise_and_(LOW_BITS)
        # all NaN become the one whose bits, with noise, are a NaN: those of CUDA, 0x7FFFFFFF, would become -0
        torch.nan_to_num(source, nan=math.nan, posinf=math.inf, neginf=-math.inf, out=high.view(torch.float32))
        target.copy_(high.add_(low).bitwise_right_shift_(16))
