"""Both ends of a delta memory stay equal bit for bit, near what was sent, and finite."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor

from acsgd import codecs
from acsgd.codecs import bits as bits_module
from acsgd.codecs.base import Codec, NotFiniteError, Wire
from acsgd.codecs.cache_update import decode_update, encode_update
from acsgd.codecs.fixpoint import FixPoint

SHAPE = (3, 21, 40)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ENTRY_DTYPES = (torch.float32, torch.float16)
PAIRS = [*product(DTYPES, ENTRY_DTYPES)]
DIMS = ("dims=channel", "dims=token", "dims=tensor", "dims=group,group=48")
SPECS = [f"fixpoint:bits={bits},{dims}" for bits in range(1, 9) for dims in DIMS]
SPECS += ["fixpoint:bits=3,centroids=true", "fixpoint:bits=4,rounding=stochastic", "fixpoint:bits=2,scale=l2"]
OTHERS = ["none", "none:dtype=bf16", "lloyd:bits=3", "hadamard"]


@dataclass(frozen=True)
class Plain:
    """A codec without its own way to update a memory."""

    inner: Codec

    def wire(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Wire:
        return self.inner.wire(shape, dtype)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.inner.encode(x)

    def decode(self, fields: tuple[Tensor, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.inner.decode(fields, shape, dtype)


def gaussian(seed: int, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def equal(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    """Whether two lists of tensors are equal bit for bit."""
    pairs = zip(a, b, strict=True)
    return all(torch.equal(one.view(-1).view(torch.uint8), two.view(-1).view(torch.uint8)) for one, two in pairs)


@pytest.mark.parametrize(("dtype", "m_dtype"), PAIRS)
@pytest.mark.parametrize("spec", SPECS + OTHERS)
def test_both_ends_remember_the_same_after_many_rounds(spec: str, dtype: torch.dtype, m_dtype: torch.dtype) -> None:
    codec = codecs.parse(spec)
    sender, receiver = gaussian(0, m_dtype), gaussian(0, m_dtype)
    for visit in range(20):
        fields = encode_update(codec, gaussian(0, dtype) + gaussian(visit, dtype) / 8, sender)
        decode_update(codec, fields, receiver, dtype)
        assert equal((sender,), (receiver,))


@pytest.mark.parametrize(("dtype", "m_dtype"), PAIRS)
@pytest.mark.parametrize("spec", SPECS)
def test_block_by_block_is_what_the_definition_says(
    spec: str, dtype: torch.dtype, m_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows of 40 or 48, eight are a block; the definition takes all at once."""
    monkeypatch.setattr(bits_module, "BLOCK", 512)
    codec, x, m = codecs.parse(spec), gaussian(1, dtype), gaussian(2, m_dtype)
    x[..., 7] = m[..., 7] = x[1, 2] = m[1, 2] = 0.5  # no difference in a column, nor in a row
    known, plain, before = m.clone(), m.clone(), m.clone()
    fields = encode_update(codec, x, known)
    assert equal(fields, encode_update(Plain(codec), x, plain))
    assert equal((known,), (plain,))
    arrived = decode_update(codec, fields, m, dtype)
    assert equal((arrived, m), (decode_update(Plain(codec), fields, before, dtype), before))


@pytest.mark.parametrize("m_dtype", ENTRY_DTYPES)
@pytest.mark.parametrize("spec", SPECS + OTHERS)
def test_the_sum_arrives_before_it_is_rounded(spec: str, m_dtype: torch.dtype) -> None:
    codec, m = codecs.parse(spec), gaussian(2, m_dtype)
    before = m.clone()
    fields = encode_update(codec, gaussian(1), m)
    arrived = decode_update(codec, fields, before.clone(), torch.float32)
    assert torch.equal(arrived, before.float() + codec.decode(fields, SHAPE, torch.float32))
    assert torch.equal(arrived.to(m_dtype), m)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("dims", ["channel", "token", "tensor"])
def test_a_memory_approaches_what_stays_the_same(dims: str, bits: int) -> None:
    """With scales of the largest magnitude, what remains is at most one step; fp16 rounds a scale by 2**-11 of it."""
    codec, x, m = FixPoint(bits, dims=dims), gaussian(1), torch.zeros(SHAPE)  # type: ignore[arg-type]
    error = float(x.abs().amax())
    for _ in range(6):
        encode_update(codec, x, m)
        rounding = 2.0**-23 * float(x.abs().amax())  # of the difference and of the sum
        error = error * 2.0 ** (1 - bits) * (1 + 2.0**-11) + rounding
        assert (x - m).abs().amax() <= error


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("codec", [FixPoint(4), Plain(FixPoint(4))])
def test_a_memory_saturates(codec: Codec, sign: int) -> None:
    x, m = torch.full((8, 8), sign * 1e6), torch.zeros(8, 8, dtype=torch.float16)
    at_sender, at_receiver = m.clone(), m.clone()
    for _ in range(3):
        fields = encode_update(codec, x, at_sender)
        arrived = decode_update(codec, fields, at_receiver, torch.float32)
    assert torch.equal(at_sender, torch.full_like(m, sign * torch.finfo(torch.float16).max))
    assert torch.equal(at_receiver, at_sender)
    assert (arrived - x).abs().amax() <= 1e6 / 8 * (1 + 2.0**-11)  # one step: what arrives is not clipped


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("codec", [FixPoint(4), FixPoint(1), Plain(FixPoint(4))])
def test_a_memory_survives_what_cannot_be_encoded(codec: Codec, bad: float) -> None:
    x, m = gaussian(1), gaussian(2, torch.float16)
    x[1, 2, 3] = bad
    with pytest.raises(NotFiniteError, match=r"\(1, 2, 3\)"):
        encode_update(codec, x, m)
    assert torch.equal(m, gaussian(2, torch.float16))


@pytest.mark.parametrize("spec", ["fixpoint:bits=3", "lloyd:bits=3"])
def test_neither_tensor_need_be_contiguous(spec: str) -> None:
    codec, x, m = codecs.parse(spec), gaussian(1), gaussian(2, torch.float16)
    apart = m.transpose(0, 1).contiguous().transpose(0, 1)
    fields = encode_update(codec, x.transpose(0, 1).contiguous().transpose(0, 1), apart)
    assert equal(fields, encode_update(codec, x, m))
    assert torch.equal(apart, m)


@pytest.mark.parametrize("spec", SPECS + OTHERS)
def test_nothing_is_an_update_of_nothing(spec: str) -> None:
    codec, m = codecs.parse(spec), torch.zeros(0, 8, dtype=torch.float16)
    fields = encode_update(codec, torch.zeros(0, 8), m)
    assert decode_update(codec, fields, m, torch.bfloat16).shape == (0, 8)


def test_gradients_are_left_alone() -> None:
    x, m = gaussian(1).requires_grad_(), gaussian(2)
    fields = encode_update(Plain(FixPoint(4)), x, m)
    assert not any(field.requires_grad for field in (*fields, m))
