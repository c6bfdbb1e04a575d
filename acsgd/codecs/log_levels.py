"""Logarithmic quantization of fp32 numbers to one byte each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from acsgd.codecs.message import compressed, decompressed

STEPS_PER_OCTAVE = 2
"""Levels are powers of the square root of 2."""


@dataclass(frozen=True)
class LogLevels:
    """Message codec that rounds each number to a sign and a power of the square root of 2, and entropy-codes the bytes.

    The relative error is at most 19 %. Each number is encoded independently of the others, so equal numbers in
    different vectors stay equal.
    """

    LOWEST, HIGHEST = 2.0**-56, 2.0**7
    """Range of magnitudes. Numbers that round to less become 0, larger ones the highest level."""

    def max_bytes(self, n: int) -> int:
        return n

    def encode(self, x: Tensor) -> Tensor:
        """Return the message of a vector. NaN and infinity become 0: callers detect them elsewhere."""
        levels = x.abs().div_(self.LOWEST).log2_().mul_(STEPS_PER_OCTAVE).round_()
        levels = levels.nan_to_num_(-1, -1, -1).clamp_(max=126)
        return compressed(torch.where(levels < 0, 0, 2 * levels + 1 + (x < 0)).to(torch.uint8))

    def decode(self, message: Tensor, n: int) -> Tensor:
        """Raises ValueError for a corrupt message."""
        codes = decompressed(message, n).cpu()
        levels = torch.arange(127).div(STEPS_PER_OCTAVE).exp2().mul_(self.LOWEST)
        values = torch.cat([torch.zeros(1), torch.stack([levels, -levels], 1).view(-1), torch.zeros(1)])
        return values[codes.long()].to(message.device)

    def error_bound(self, x: Tensor) -> Tensor:
        magnitude = x.double().abs()
        relative = 2.0 ** (0.5 / STEPS_PER_OCTAVE) - 1 + 1e-4  # half a step, and the rounding of log2
        bound = relative * magnitude + (magnitude - self.HIGHEST).clamp(min=0)
        return torch.where(magnitude < self.LOWEST, magnitude.clamp(max=self.LOWEST), bound)
