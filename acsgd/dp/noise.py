"""How much of a replica's gradients is noise, and by how much a step of AdamW on them is too short for that.

AdamW divides by the root of the mean square of the gradients it sees. On one of R replicas that is signal + noise, of
their mean it is signal + noise / R: up to R times less, so the step on the mean would be up to sqrt(R) times longer,
and by how much differs from weight to weight. Measured for each weight (a matrix or a vector) as a whole, from random
projections of its gradient: a few numbers tell |mean of g|^2 and the mean of |g|^2, without exchanging g.

R replicas; W = weights of a stage; G = gradient of one as a matrix [rows, cols].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from acsgd.codecs.identity import Identity
from acsgd.dp.mean import OfCodec, told_mean
from acsgd.dp.peers import Peers
from acsgd.meter import Meter
from acsgd.shards.base import Weight
from acsgd.shards.disk import WeightState
from acsgd.shards.load import mix_seed

NOISE = "noise"
"""Name under which [2] numbers per weight are saved: running sums of |mean of g|^2 and of the mean of |g|^2."""
SKETCHES = 32
"""Numbers per weight: the ratio is off by about sqrt(2 / 32)."""
EVERY, KEPT = 8, 0.7
"""Steps between two measurements, and what an earlier one counts for in the next."""


class Noise:
    """Measures the weights of a stage, together with the same stage of all other replicas."""

    def __init__(self, weights: Sequence[Weight], peers: Peers) -> None:
        self._weights = tuple(weights)
        self._peers = peers
        self._sums = torch.zeros(len(self._weights), 2)
        self._gains = dict.fromkeys((weight.key for weight in weights), 1.0)

    def is_due(self, steps: int) -> bool:
        """Whether to measure after so many steps: more often at the start."""
        return steps % EVERY == 0 or steps in (1, 2, 4)

    def gain(self, key: str) -> float:
        """Return how many times longer a step on the mean gradient is than on this replica's, in [1, sqrt(R)]."""
        return self._gains[key]

    @torch.no_grad()
    def measure(self, step: int, meter: Meter) -> None:
        """Look at the gradients that the weights have. To be called in the thread of the peers, by all of them."""
        mine = torch.stack([sketch(weight.master.grad, step) for weight in self._weights])
        told = torch.cat([mine, mine.square().sum(1, keepdim=True)], 1)
        _, mean = told_mean(told.view(-1), OfCodec(Identity("fp32")), self._peers, meter)
        mean = mean.view_as(told)
        now = torch.stack([mean[:, :-1].square().sum(1), mean[:, -1]], 1)
        self._sums.mul_(KEPT).add_(now)
        self._set_gains()

    def state_dict(self) -> WeightState:
        """Return what has been measured."""
        return {NOISE: {weight.key: sums for weight, sums in zip(self._weights, self._sums, strict=True)}}

    def load_state_dict(self, saved: Sequence[WeightState]) -> None:
        """Take over what as many replicas have measured; of more or fewer it would not hold."""
        self._sums.zero_()
        if len(saved) == self._peers.size and all(NOISE in state for state in saved):
            for weight, sums in zip(self._weights, self._sums, strict=True):
                sums.copy_(saved[self._peers.replica][NOISE][weight.key])
        self._set_gains()

    def _set_gains(self) -> None:
        ratios = (self._sums[:, 0] / self._sums[:, 1]).nan_to_num(1.0).clamp(1 / self._peers.size, 1.0)
        gains = ratios.rsqrt().tolist()
        self._gains = {weight.key: gain for weight, gain in zip(self._weights, gains, strict=True)}


def sketch(grad: Tensor | None, step: int) -> Tensor:
    """Return random projections a^T G b of a gradient, fp32 [SKETCHES] in host memory; the mean of their squares is
    |G|^2.

    a [rows] and b [cols] are signs, drawn anew in each step: the same on all replicas and for copies of a weight.
    """
    if grad is None:
        return torch.zeros(SKETCHES)
    matrix = grad.view(len(grad), -1) if grad.dim() > 1 else grad.view(1, -1)
    generator = torch.Generator().manual_seed(mix_seed(0, step))
    left, right = (
        torch.randint(0, 2, (SKETCHES, n), generator=generator).mul_(2).sub_(1).to(grad.device, grad.dtype)
        for n in matrix.shape
    )
    return ((left @ matrix) * right).sum(1).cpu()
