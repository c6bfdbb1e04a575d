"""Logarithmic quantization of fp32 numbers into one byte each."""

from __future__ import annotations

import torch
from torch import Tensor

from acsgd.codecs.entropy import compress_, decompress


class LogLevels:
    """Numbers rounded to a sign and a power of the square root of 2: wrong by at most 19 %, a byte each before Huffman.

    What a number becomes depends on no other, so copies of a weight stay equal in different company.
    """

    LOWEST, HIGHEST = 2.0**-56, 2.0**7
    """Absolute values: what rounds to less is 0, what is larger becomes the highest."""

    def max_bytes(self, n: int) -> int:
        return n

    def encode(self, x: Tensor) -> Tensor:
        """Not finite becomes 0: the exchange of the weights says so."""
        levels = x.abs().div_(self.LOWEST).log2_().mul_(2).round_().nan_to_num_(-1, -1, -1).clamp_(max=126)
        codes = torch.where(levels < 0, 0, 2 * levels + 1 + (x < 0)).to(torch.uint8).cpu()
        return (codes[: compress_(codes)] if len(codes) else codes).to(x.device)

    def decode(self, message: Tensor, n: int) -> Tensor:
        codes = message.cpu()
        if len(codes) < n:
            codes = torch.empty(n, dtype=torch.uint8)
            decompress(message.cpu(), codes)
        levels = torch.arange(127).div(2).exp2().mul_(self.LOWEST)
        values = torch.cat([torch.zeros(1), torch.stack([levels, -levels], 1).view(-1), torch.zeros(1)])
        return values[codes.long()].to(message.device)
