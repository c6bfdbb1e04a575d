"""Tensors in a basis of the channels: errors that cost little of the loss, in few bytes."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from acsgd.codecs import basis
from acsgd.codecs.base import Field, NotFiniteError, pack, wire_bytes
from acsgd.codecs.basis import Moments
from acsgd.codecs.fixpoint import FixPoint
from acsgd.codecs.lossless import compress_
from acsgd.codecs.transform import Transform
from acsgd.comm.waits import Meter
from acsgd.layers.batch import Lengths
from acsgd.layers.description import Dim
from acsgd.pp.wire.coder import TensorSpec, TransferInfo
from acsgd.pp.wire.link import Link, LinkFactory
from acsgd.pp.wire.mailbox import Received
from acsgd.pp.wire.shared_basis import TransformCoder
from acsgd.streams import Streams

CPU = Streams(torch.device("cpu"))


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


def test_stochastic_rounding_is_unbiased_and_within_a_step() -> None:
    x, fitted = draw(3, 5, 8), basis.fit_basis(moments(draw(50, 8, seed=1)), moments(draw(3, 5, 8)), draw(3, 5, 8))
    inverse, errors = basis.invert(fitted), []
    for seed in range(60):
        fields = basis.encode(x, inverse, 1.5, seed)
        assert not fields[2], "no shift towards 0"
        errors.append(basis.groups_of(basis.decode(fields, fitted, (3, 5, 8)) - x) @ inverse / fields[1])
    assert torch.stack(errors).abs().max() <= 1.001
    assert torch.stack(errors).mean(0).abs().max() < 5 * 0.5 / 60**0.5
    assert torch.equal(basis.encode(x, inverse, 1.5, 3)[0], basis.encode(x, inverse, 1.5, 3)[0])


@pytest.mark.parametrize("size", [1e-30, 1.0, -1e20])
def test_a_balance_cancels_a_share_of_the_first_order_change(size: float) -> None:
    """Whatever its sign and the unit of gradients; levels stay neighbours of what they represent."""
    x, plain = draw(4, 200, 32), float("nan")
    gradients = size * (draw(4, 200, 32, seed=2) - x)
    gradients[0, :20] *= 20
    fitted = basis.fit_basis(moments(gradients), moments(x), x)
    inverse = basis.invert(fitted)
    parts = basis.gradients_of(gradients, fitted)
    for balance in (0.0, 0.5, 1.0):
        fields = basis.encode(x, inverse, 1.5, balance=balance, gradients=parts)
        product = float(((basis.decode(fields, fitted, (4, 200, 32)) - x) * (gradients / size)).sum())
        plain = product if balance == 0 else plain
        assert product == pytest.approx((1 - balance) * plain, abs=0.05 * abs(plain)), balance
        levels = basis.decode((*fields[:2], torch.zeros(1)), fitted, (4, 200, 32))
        assert bool((basis.groups_of(levels - x) @ inverse / fields[1]).abs().le(1.001).all()), balance
    assert torch.equal(
        basis.encode(x, inverse, 1.5, balance=1.0, gradients=0 * parts)[0], basis.encode(x, inverse, 1.5)[0]
    )


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


HIDDEN = TensorSpec((2, 40, 8), torch.float32, (Dim("batch", 0), Dim("sequence", 0), Dim(None, 8)))


class Ends:
    """Both ends of a link whose first codec is a Transform."""

    def __init__(self, spec: TensorSpec = HIDDEN) -> None:
        factory = LinkFactory(Mock(), Mock(), CPU, [], [], [], Meter(), Meter())
        self.sender, self.receiver = (factory._coder([Transform(0.2)], spec) for _ in range(2))

    def transfer(self, step: int, x: Tensor, codec: int = 1, lengths: Lengths | None = None) -> tuple[Tensor, int]:
        """Return what arrives of a tensor, and the number of fields."""
        info = TransferInfo(step, 0, codec, lengths=lengths)
        wire = self.sender.wire(info)
        assert self.receiver.wire(info) == wire
        assert wire_bytes(wire) <= self.sender.max_bytes
        assert self.receiver.context(info) == self.sender.context(info)
        fields = self.sender.encode(x, info)
        assert [(f.dtype, tuple(f.shape)) for f in fields] == [f[:2] for f in wire]
        return self.receiver.decode(fields, info), len(fields)


def test_ends_of_a_link_keep_a_basis_until_as_many_elements_have_followed() -> None:
    ends, had, contexts = Ends(), [], set()
    mix = draw(8, 8, seed=1) * torch.logspace(0, -2, 8)[:, None]
    for step in range(22):  # a basis has 64 elements, a message 640
        x = draw(2, 40, 8, seed=step) @ mix
        got, fields = ends.transfer(step, x)
        assert (got - x).square().mean().sqrt() < 0.1 * x.square().mean().sqrt(), step
        had += [step] if fields == 4 else []
        contexts.add(ends.sender.context(TransferInfo(step, 0)))
    assert len(contexts) == 22, "an end with another basis is detected"
    assert had == [0, 7, 14]  # after 64 x 64 elements, and as many
    context = ends.sender.context(TransferInfo(22, 0))
    assert torch.equal(ends.transfer(22, x, codec=0)[0], x), "the lossless codec"
    assert ends.sender.context(TransferInfo(23, 0)) == context


@pytest.mark.parametrize("shape", [(2,), (2, 3, 130)])
def test_where_channels_are_tokens_messages_have_bases_of_their_own(shape: tuple[int, ...]) -> None:
    """Of 130 tokens, bases of 65 are smaller than one of 128."""
    sequence = Dim("sequence", 0)
    dims = Dim("batch", 0), *(Dim(None, 3), sequence)[: len(shape) - 1], sequence
    ends = Ends(TensorSpec((*shape, 130), torch.float32, dims))
    for step, length in enumerate((130, 24, 8, 128)):
        x = draw(*ends.sender.shape(TransferInfo(0, 0, lengths=Lengths(length))), seed=step)
        got, fields = ends.transfer(step, x, lengths=Lengths(length))
        assert (got - x).square().mean().sqrt() < 0.1
        assert fields == 4


def test_a_message_that_cannot_be_sent_changes_no_basis() -> None:
    ends, x = Ends(), draw(2, 40, 8)
    with pytest.raises(NotFiniteError):
        ends.sender.encode(x / 0, TransferInfo(0, 0))
    assert ends.transfer(1, x)[1] == 4


def test_received_gradients_decide_which_errors_of_activations_are_small() -> None:
    ends, gradients = Ends(), torch.zeros(2, 40, 8)
    gradients[:, :, 3] = 1
    factory = LinkFactory(Mock(), Mock(), CPU, [{"hidden": ends.sender.spec}], [Transform(1)], [], Meter(), Meter())
    ends.sender, ends.receiver = (factory._activation_coders(0, side)["hidden"] for side in ("sender", "receiver"))
    inbox = Mock(receive=lambda _: Received({"hidden": gradients}, None))
    sender = Mock(coders={"hidden": ends.sender})
    link, x = Link(Mock(), inbox, Mock(), sender, is_downstream=False), draw(2, 40, 8)
    for step in range(8):  # the last message has the second basis
        got, fields = ends.transfer(step, x)
        link.receive(TransferInfo(step, 0))
    error = (got - x).square().mean((0, 1))
    assert fields == 4
    assert error[3] < 0.1 * error.mean()


def test_gradients_are_noted_while_messages_are_in_a_basis(monkeypatch: pytest.MonkeyPatch) -> None:
    codecs = [FixPoint(8), Transform(1)]
    factory = LinkFactory(Mock(), Mock(), CPU, [{"hidden": Ends().sender.spec}], codecs, [], Meter(), Meter())
    coder = factory._activation_coders(0, "sender")["hidden"]
    assert isinstance(coder, TransformCoder)
    for codec in (1, 2, 1):
        coder.encode(draw(2, 40, 8), TransferInfo(0, 0, codec))
        with monkeypatch.context() as patch:
            patch.setattr(Moments, "add", add := Mock())
            coder.add_gradients(draw(2, 40, 8))
        assert add.call_count == (codec == 2)


def test_large_components_have_steps_within_their_range() -> None:
    x = draw(2, 40, 8)
    x[0, 0] *= 1e4
    fields = Transform(0.1).encode(x)
    assert int(fields[1].max()) in (253, 254)
    assert ((Transform(0.1).decode(fields, (2, 40, 8), x.dtype) - x).abs() <= Transform(0.1).error_bound(x)).all()
