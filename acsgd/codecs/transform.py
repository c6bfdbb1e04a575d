"""Uniform quantization in a basis of the channels, entropy-coded: for tensors that are sent once, without a cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from acsgd.codecs import basis
from acsgd.codecs.base import Wire, rounding_bound, saturate_

MAX_STEP = 512
"""Largest quantization step, root mean squares; with 8 bits, the levels then span the widest range of `fixpoint`."""


@dataclass(frozen=True)
class Transform:
    """Quantize in a basis of the channels in which few components are large, with one step; entropy-code the levels.

    Source: the transform coding of Huang and Schultheiss 1963, with entropy-coded levels instead of numbers of bits. A
    message takes as many bits as its components need. Between stages both ends keep a basis, and the sender replaces it
    from time to time; that of activations also follows the gradients that come back (codecs/basis.py). Elsewhere each
    message has a basis of its own, worth its bytes only if there are many more vectors than channels. Both ends
    multiply by the basis, so what they decode is equal only on devices of one kind.
    """

    entropy_coding: ClassVar[bool] = True
    encodes_nan: ClassVar[bool] = False

    step: float = 0.15
    """Quantization step, root mean squares of the components; above 0, up to 512. It is larger where a component would
    have more than 127 levels on a side."""

    def __post_init__(self) -> None:
        if not 0 < self.step <= MAX_STEP:
            raise ValueError(f"step={self.step} must lie above 0, up to {MAX_STEP} root mean squares; use 0.15")

    def wire(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Wire:
        """Return the fields of a message with a basis."""
        return basis.basis_field(shape), *basis.wire(shape)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return a basis, the levels, the size of a step and the shift towards 0."""
        if not x.numel():
            return tuple(x.new_zeros(field.shape, dtype=field.dtype) for field in self.wire(tuple(x.shape)))
        fitted = self._fit(x)
        return fitted, *basis.encode(x.detach().float(), basis.invert(fitted), self.step)

    def decode(self, fields: tuple[Tensor, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        fitted, *levels = fields
        return saturate_(basis.decode(tuple(levels), fitted, shape), dtype).to(dtype)

    def error_bound(self, x: Tensor) -> Tensor:
        """A step per component: half of it by rounding, and half at most by the shift."""
        fitted, _, size, _ = self.encode(x)
        groups, width, _ = fitted.shape
        per_channel = 1.01 * size.double() * fitted.double().abs().sum(1).view(groups * width)
        return rounding_bound(x, per_channel.expand(basis.matrix_shape(tuple(x.shape))).reshape(x.shape))

    def _fit(self, x: Tensor) -> Tensor:
        """Return the basis in which the components of a tensor are uncorrelated."""
        spread = basis.Moments()
        spread.add(x)
        return basis.fit_basis(basis.Moments(), spread, x)
