"""Messages damaged on their way between two processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor


def flip_bit(data: Tensor, bit: int) -> Tensor:
    """Return a copy of uint8[n] with one bit flipped. bit: counted from the end if negative."""
    damaged = data.clone()
    byte, bit = divmod(bit % (8 * len(data)), 8)
    damaged[byte] ^= 1 << bit
    return damaged


def damage_sends(patch: pytest.MonkeyPatch, bits: list[int | None]) -> None:
    """Flip a bit of each message that this process sends point to point: the first of `bits`, which is removed.

    Messages are sent unchanged if it is None, and while the list is empty.
    """
    isend = dist.isend

    def damaged_isend(tensor: Tensor, *args: Any, **options: Any) -> Any:
        bit = bits.pop(0) if bits else None
        return isend(tensor if bit is None else flip_bit(tensor, bit), *args, **options)

    patch.setattr(dist, "isend", damaged_isend)
