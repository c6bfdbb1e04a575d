"""AdamW's second moments, averaged over replicas that step on their own gradients.

Early in a run a second moment is a mean over few gradients, and what one replica divides by is noisy: a large part of
the gap between steps made apart and steps made together. Later they change slowly. So they are averaged after 1, 2, 4,
8, ... steps, in about 3 bits each: of no weight in a long run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from acsgd.codecs.squeeze import squeeze_, unsqueeze
from acsgd.dp.mean import parts, served_mean
from acsgd.dp.peers import Peers
from acsgd.meter import Meter

LOWEST = -100
"""Power of two of the smallest moment that is told from 0; moments are squares of gradients."""
PER_OCTAVE = 2


class LogLevels:
    """Numbers from 0 on, rounded to powers of the square root of 2: wrong by at most 19 %, of whatever size they are.

    A byte each, before the entropy coder.
    """

    def max_bytes(self, n: int) -> int:
        return n

    def encode(self, x: Tensor) -> Tensor:
        codes = x.log2().sub_(LOWEST).mul_(PER_OCTAVE).round_().clamp_(0, 255).to(torch.uint8).cpu()
        return codes[: squeeze_(codes)] if len(codes) else codes

    def decode(self, message: Tensor, n: int) -> Tensor:
        codes = message.cpu()
        if len(codes) < n:
            codes = torch.empty(n, dtype=torch.uint8)
            unsqueeze(message.cpu(), codes)
        values = codes.to(message.device).float().div_(PER_OCTAVE).add_(LOWEST).exp2_()
        return values.masked_fill_(codes.to(message.device) == 0, 0.0)


def is_due(steps: int) -> bool:
    """Whether moments are averaged after so many local steps: after each power of two."""
    return steps > 0 and steps & (steps - 1) == 0


@torch.no_grad()
def average(held: Sequence[Tensor], peers: Peers, meter: Meter) -> None:
    """Replace second moments, the same tensors on every replica, by about their mean, equal on all.

    To be called in the thread of the peers, by all of them.
    """
    if not held:
        return
    flat = torch.cat([each.view(-1) for each in held])
    mean = torch.cat(served_mean(parts(flat, peers.size), None, LogLevels(), peers, meter).mean)
    for each, piece in zip(held, mean.split([each.numel() for each in held]), strict=True):
        each.copy_(piece.view(each.shape))
