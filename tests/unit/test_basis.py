"""Differences in a basis of the channels: errors that cost little of the loss, in few bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from acsgd.codecs import basis
from acsgd.codecs.base import Field, pack, wire_bytes
from acsgd.codecs.basis import Moments
from acsgd.codecs.fixpoint import FixPoint
from acsgd.codecs.lossless import compress_


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def moments(*messages: Tensor) -> Moments:
    found = Moments()
    for each in messages:
        found.add(each)
    return found


def coded_bytes(fields: tuple[Tensor, ...]) -> int:
    """Return the length of an entropy-coded message."""
    wire = tuple(Field(f.dtype, tuple(f.shape), has_rows=len(f.shape) == 2) for f in fields)
    message = torch.empty(wire_bytes(wire), dtype=torch.uint8)
    pack(fields, message)
    return compress_(message, wire)


def test_errors_cost_less_of_the_loss_in_fewer_bytes() -> None:
    """The second derivative of the loss is the mean outer product of gradients, as for a log-likelihood at its peak."""
    sensitivity = draw(32, 32, seed=1) * torch.logspace(0, -2, 32)
    x = draw(4, 100, 32, seed=2) @ (draw(32, 32, seed=3) * torch.logspace(0, -2, 32)[:, None])
    fitted = basis.fit_basis(moments(draw(5000, 32, seed=4) @ sensitivity.T), moments(x), x)
    fields = basis.encode(x, basis.invert(fitted), step=1.0)
    plain = FixPoint(4, "l2", 2.5 * 8, centroids=True)

    def cost(decoded: Tensor) -> float:
        return float(((decoded - x) @ sensitivity).square().mean())

    plain_fields = plain.encode(x)
    assert cost(basis.decode(fields, fitted, (4, 100, 32))) < 0.2 * cost(plain.decode(plain_fields, x.shape, x.dtype))
    assert coded_bytes(fields) < 0.9 * coded_bytes(plain_fields)


@pytest.mark.parametrize(("channels", "width"), [(24, 8), (14, 7), (11, 1), (8, 8)])
def test_components_are_within_half_a_step_and_the_shift(
    channels: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(basis, "MAX_WIDTH", 8)
    x = draw(3, 5, channels) * torch.logspace(0, 3, channels)
    fitted = basis.fit_basis(moments(draw(50, channels, seed=1)), moments(x), x)
    assert (fitted.dtype, tuple(fitted.shape)) == (torch.float16, (channels // width, width, width))
    inverse = basis.invert(fitted)
    fields = basis.encode(x, inverse, step=0.5)
    assert [(f.dtype, tuple(f.shape)) for f in fields] == [f[:2] for f in basis.wire(tuple(x.shape))]
    error = basis.groups_of(basis.decode(fields, fitted, tuple(x.shape)) - x) @ inverse
    components = basis.groups_of(x) @ inverse
    assert torch.allclose(fields[1], 0.5 * components.square().mean().sqrt())
    assert error.abs().max() <= (0.5 + float(fields[2])) * float(fields[1]) * 1.001
    outwards = (error * components.sign())[components.abs() > 0.51 * fields[1]]
    assert abs(float(outwards.mean())) < 0.05 * float(fields[1]), "decoded values are centroids"


def test_components_are_uncorrelated_and_equally_sensitive() -> None:
    gradients, x = draw(500, 6, seed=1) @ draw(6, 6, seed=2), draw(500, 6, seed=3) @ draw(6, 6, seed=4)
    fitted = basis.fit_basis(moments(gradients), moments(x), x)[0].double()
    metric = gradients.double().T @ gradients.double()
    sensitivity = fitted @ (metric / metric.trace() * 6 + basis.FLOOR * torch.eye(6)) @ fitted.T
    assert torch.allclose(sensitivity, torch.eye(6, dtype=torch.float64), atol=0.02)
    components = x.double() @ torch.linalg.inv(fitted)
    spread = components.T @ components
    assert torch.allclose(spread, spread.diagonal().diag(), atol=0.01 * float(spread.max()))
    assert (spread.diagonal().diff() <= 0).all()


def test_messages_count_by_direction_and_those_that_are_not_finite_as_nothing() -> None:
    first, second = draw(40, 4, seed=1), 1e-20 * draw(40, 4, seed=2)
    outer = [each.double().T @ each.double() for each in (first, second)]
    unit = [each / each.diagonal().mean() for each in outer]
    expected = basis.DECAY * unit[0] + unit[1]
    found = moments(first, first * torch.nan, torch.zeros(3, 4), first.clone().fill_(torch.inf), second)
    mean = found.mean(4, 1, first.device)
    assert torch.allclose(mean[0], expected / expected.diagonal().mean(), rtol=1e-5, atol=1e-5)
    assert torch.equal(Moments().mean(4, 1, first.device)[0], torch.eye(4, dtype=torch.float64))


@pytest.mark.parametrize("size", [1e-30, 1e-10, 1e23])
def test_the_unit_of_a_tensor_changes_no_code(size: float) -> None:
    x = draw(3, 5, 8)
    fitted = basis.fit_basis(moments(draw(50, 8, seed=1)), moments(x), x)
    plain, scaled = (basis.encode(each, basis.invert(fitted), step=0.5) for each in (x, x * size))
    assert torch.equal(scaled[0], plain[0])
    assert torch.allclose(scaled[1], plain[1] * size)
    decoded = basis.decode(scaled, fitted, (3, 5, 8))
    assert torch.allclose(decoded, basis.decode(plain, fitted, (3, 5, 8)) * size, rtol=1e-3, atol=1e-6 * size)
