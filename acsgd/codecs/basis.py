"""Quantization of activations and gradients in a basis of their channels that suits both the activations and the loss.

The loss is not equally sensitive to all directions in the space of channels, and differences of activations are small
in most of them. In this basis an error of the same size costs the same loss in each component (the metric is the mean
outer product of gradients, an empirical Fisher matrix), and components are uncorrelated (the Karhunen-Loeve transform,
Huang and Schultheiss 1963, "Block quantization of correlated Gaussian random variables"). So all have the same
quantization step, and the codes of most components are zero.

C = channels, in G groups of W neighbours, each with a basis of its own. N = vectors along the channels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from acsgd.codecs.base import Field, Wire
from acsgd.codecs.layout import layout_of
from acsgd.codecs.scales import MIN_SCALE, measure

MAX_WIDTH = 128
"""Largest number of channels that share a basis; it bounds the cost of a basis, and of its products per element."""
SAMPLE = 512
"""About the number of vectors of a message that count for mean outer products."""
FLOOR = 0.05
"""Least weight of a direction, times the mean of all: no direction may have any error."""
DECAY = 0.95
"""Factor of the older messages in mean outer products."""
_MAX_SCALE = 2.0**80
"""Larger scales are clipped, so that sums of decoded components are finite."""
_BISECTIONS = 8
"""Number of trial roundings with a balance."""


class Moments:
    """Mean outer product of vectors along the channels, [G, W, W], over the latest messages."""

    def __init__(self) -> None:
        self._mean: Tensor | None = None

    def add(self, x: Tensor) -> None:
        """Add the vectors of a message, [..., C]. They count by their direction; NaN and infinity count as nothing."""
        some = x.detach().reshape(matrix_shape(x.shape))
        some = some[:: max(1, len(some) // SAMPLE)].float()
        vectors = groups_of(some / some.abs().amax().clamp(min=MIN_SCALE))
        product = vectors.mT @ vectors
        product = product / product.diagonal(dim1=1, dim2=2).mean().clamp(min=MIN_SCALE)
        if self._mean is None:
            self._mean = torch.zeros_like(product)
        is_finite = product.isfinite().all() & (product.diagonal(dim1=1, dim2=2) > 0).any()
        self._mean = torch.where(is_finite, self._mean * DECAY + product, self._mean)

    def mean(self, width: int, groups: int, device: torch.device) -> Tensor:
        """Return it with a mean diagonal of 1; the identity if there were no vectors."""
        identity = torch.eye(width, device=device, dtype=torch.float64).expand(groups, width, width)
        if self._mean is None:
            return identity
        size = self._mean.diagonal(dim1=1, dim2=2).mean()
        return torch.where(size > 0, self._mean.double() / size.clamp(min=MIN_SCALE), identity)


def groups_of(x: Tensor) -> Tensor:
    """View the vectors of a tensor [..., C] by group, [G, N, W]."""
    _, channels = matrix_shape(x.shape)
    width = group_width(channels)
    return x.reshape(-1, channels // width, width).transpose(0, 1)


def group_width(channels: int) -> int:
    """Return W, the largest divisor of the number of channels up to MAX_WIDTH."""
    return next(width for width in range(min(channels, MAX_WIDTH), 0, -1) if channels % width == 0)


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the number of vectors along the channels, and that of channels; one channel unless there are two axes."""
    count = math.prod(shape)
    channels = shape[-1] if len(shape) > 1 and count else 1
    return count // channels, channels


def basis_field(shape: tuple[int, ...]) -> Field:
    """Return the field of a basis of tensors of a shape."""
    _, channels = matrix_shape(shape)
    width = group_width(channels)
    return Field(torch.float16, (channels // width, width, width))


def fit_basis(gradients: Moments, differences: Moments, like: Tensor) -> Tensor:
    """Return the basis, fp16 [G, W, W]: its rows are components, as channels, by falling size.

    like: a tensor [..., C] on the device.
    """
    groups, width, _ = basis_field(like.shape).shape
    metric, spread = (each.mean(width, groups, like.device) for each in (gradients, differences))
    sizes, directions = torch.linalg.eigh(metric + FLOOR * torch.eye(width, device=like.device))
    root, inverse = (directions * sizes.pow(power)[:, None] @ directions.mT for power in (0.5, -0.5))
    _, components = torch.linalg.eigh(root @ spread @ root)
    return (components.flip(2).mT @ inverse).half()


def invert(basis: Tensor) -> Tensor:
    """Return the inverse of a basis, fp32 [G, W, W]."""
    return torch.linalg.inv_ex(basis.double()).inverse.float()  # unlike `inv`, without waiting for a device


def wire(shape: tuple[int, ...]) -> Wire:
    """Return the fields of `encode` for a tensor of a shape."""
    vectors, channels = matrix_shape(shape)
    return (
        Field(torch.uint8, (channels, vectors), has_rows=True),
        Field(torch.float32, (1,)),
        Field(torch.float16, (1,)),
    )


def gradients_of(gradients: Tensor, basis: Tensor) -> Tensor:
    """Return the gradients with respect to the components, fp32 [G, W, N], of those of a tensor, [..., C]."""
    return basis.float() @ groups_of(gradients.float()).mT


def encode(
    x: Tensor,
    inverse: Tensor,
    step: float,
    seed: int | None = None,
    *,
    balance: float = 0.0,
    gradients: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Quantize a tensor [..., C], fp32: return codes, the size of a quantization step, and the shift of decoded values.

    inverse: of the basis. step: quantization step, root mean squares of the components. seed: of stochastic rounding,
    whose expectation is `x`; None = to the nearest level, or with gradients of the components (see `gradients_of`) to
    its neighbour where that cancels a share, `balance`, of the sum of gradients times errors. Codes are uint8
    [W * G, N]: the first component of all groups, then the second.
    """
    shape = tuple(x.shape)
    unit = measure(x.reshape(-1), layout_of(shape, "tensor", 0), "rms").clamp(MIN_SCALE, _MAX_SCALE)
    parts = (inverse / unit).mT @ groups_of(x).mT  # [G, W, N], of which codes are copied in runs of N
    squares = parts.square()
    size = step * squares.mean().sqrt().clamp(min=MIN_SCALE)
    size = torch.maximum(size, squares.amax().sqrt() / 127)
    exact = parts.div_(size)
    if gradients is not None and seed is None:
        levels = torch.round(_balanced(exact, gradients, balance), out=squares)
    elif seed is None:
        levels = torch.round(exact, out=squares)  # new memory would take as long as the pass
    else:
        noise = squares.uniform_(generator=torch.Generator(x.device).manual_seed(seed))
        levels = noise.add_(exact).floor_()
    signs = levels.clamp_(-127, 127).to(torch.int8)
    codes = ((signs << 1) ^ (signs >> 7)).view(torch.uint8).transpose(0, 1).reshape(matrix_shape(shape)[1], -1)
    shift = exact.new_zeros(1, dtype=torch.float16) if seed is not None else _shift(levels, exact, signs)
    return codes, (size * unit).clamp(max=_MAX_SCALE).view(1), shift


def _balanced(exact: Tensor, gradients: Tensor, balance: float) -> Tensor:
    """Move components along or against their gradients, by half a step at most, so that rounding is balanced.

    Small differences that rounding leaves out in every visit of a sample are mostly those by which training lowers the
    loss. So without this the sum of gradients times errors is mostly positive.
    """
    unit = gradients / gradients.abs().amax().clamp(min=MIN_SCALE)  # the squares of small gradients would be 0
    unit /= unit.square().mean().sqrt().clamp(min=MIN_SCALE)
    apart = max(1, exact.shape[2] // SAMPLE)
    some, of_some = exact[..., ::apart].contiguous(), unit[..., ::apart].contiguous()
    plain = _first_order(some, some, of_some)
    of_some = of_some * plain.sign()
    low, high = torch.zeros_like(plain), torch.ones_like(plain)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        left = _first_order(_moved(some, of_some, middle), some, of_some)
        is_enough = left <= (1 - balance) * plain.abs()
        low, high = torch.where(is_enough, low, middle), torch.where(is_enough, middle, high)
    return _moved(exact, unit.mul_(plain.sign()), high)


def _moved(exact: Tensor, gradients: Tensor, root: Tensor) -> Tensor:
    """Subtract gradients times the square of `root`, which resolves small factors better, clamped to half a step."""
    return exact - (gradients * root.square()).clamp_(-0.5, 0.5)


def _first_order(moved: Tensor, exact: Tensor, gradients: Tensor) -> Tensor:
    """Return the sum of gradients times errors of components, steps, if `moved` is rounded and decoded with a shift."""
    errors = moved.round()
    signs = errors.sign()
    errors -= exact
    shift = torch.dot(errors.flatten(), signs.flatten()) / signs.count_nonzero().clamp(min=1)
    errors -= signs.mul_(shift.clamp(0, 0.5))
    return torch.dot(errors.flatten(), gradients.flatten())


def _shift(levels: Tensor, exact: Tensor, signs: Tensor) -> Tensor:
    """Return the mean distance of components from their levels towards 0, steps, fp16[1]. Overwrites `levels`."""
    outwards = levels.sign()
    excess = levels.sub_(exact).mul_(outwards).sum()
    return (excess / signs.count_nonzero().clamp(min=1)).clamp(0, 0.5).half().view(1)


def decode(fields: tuple[Tensor, ...], basis: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the decoded tensor, fp32, finite whatever the fields hold."""
    stream, scale, shift = fields
    finite = basis.float().nan_to_num(0.0, 0.0, 0.0)
    groups, width, _ = finite.shape
    codes = stream.view(width, groups, -1).transpose(0, 1).reshape(-1)
    code = torch.arange(256, device=stream.device)
    levels = torch.where(code % 2 == 1, -(code + 1), code).div(2)
    levels -= levels.sign() * shift.float().nan_to_num(0.0).clamp(0, 0.5)
    scaled = finite * scale.nan_to_num(0.0, 0.0, 0.0).clamp(0, _MAX_SCALE)
    parts = levels.index_select(0, codes.int()).view(groups, width, -1).mT @ scaled
    return parts.transpose(0, 1).reshape(shape)
