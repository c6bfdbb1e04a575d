"""Updates of activation caches: entries at both ends stay equal bit for bit, close to the activations, and finite."""

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
from acsgd.codecs.layout import Dims

SHAPE = (3, 21, 40)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ENTRY_DTYPES = (torch.float32, torch.float16)
PAIRS = [*product(DTYPES, ENTRY_DTYPES)]
DIMS = ("dims=channel", "dims=token", "dims=tensor", "dims=group,group=48")
FUSED = [f"fixpoint:bits={bits},{dims}" for bits in range(1, 9) for dims in DIMS]
FUSED += ["fixpoint:bits=3,centroids=true", "fixpoint:bits=4,rounding=stochastic", "fixpoint:bits=2,scale=l2"]
SPECS = [*FUSED, "none", "none:dtype=bf16", "lloyd:bits=3", "hadamard"]


@dataclass(frozen=True)
class Unfused:
    """A codec without its fused cache update."""

    inner: Codec

    @property
    def entropy_coding(self) -> bool:
        return self.inner.entropy_coding

    @property
    def encodes_nan(self) -> bool:
        return self.inner.encodes_nan

    def wire(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Wire:
        return self.inner.wire(shape, dtype)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.inner.encode(x)

    def decode(self, fields: tuple[Tensor, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.inner.decode(fields, shape, dtype)

    def error_bound(self, x: Tensor) -> Tensor:
        return self.inner.error_bound(x)


def gaussian(seed: int, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def equal(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    """Whether two lists of tensors are equal bit for bit."""
    pairs = zip(a, b, strict=True)
    return all(torch.equal(one.view(-1).view(torch.uint8), two.view(-1).view(torch.uint8)) for one, two in pairs)


@pytest.mark.parametrize("spec", SPECS)
def test_both_ends_hold_the_same_entry_after_each_update(spec: str) -> None:
    codec = codecs.parse(spec)
    for dtype, entry_dtype in PAIRS:
        sender, receiver = gaussian(0, entry_dtype), gaussian(0, entry_dtype)
        for step in range(5):
            fields = encode_update(codec, gaussian(0, dtype) + gaussian(step, dtype) / 8, sender)
            decode_update(codec, fields, receiver, dtype)
            assert equal((sender,), (receiver,)), (dtype, entry_dtype, step)


@pytest.mark.parametrize("spec", FUSED)
def test_fused_updates_equal_their_definition(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight rows of 40 or 48 elements are a block; the definition processes all at once."""
    monkeypatch.setattr(bits_module, "BLOCK", 512)
    codec = codecs.parse(spec)
    for dtype, entry_dtype in PAIRS:
        x, entry = gaussian(1, dtype), gaussian(2, entry_dtype)
        x[..., 7] = entry[..., 7] = x[1, 2] = entry[1, 2] = 0.5  # no difference in a column and in a row
        fused, unfused, before = entry.clone(), entry.clone(), entry.clone()
        fields = encode_update(codec, x, fused)
        assert equal(fields, encode_update(Unfused(codec), x, unfused)), (dtype, entry_dtype)
        assert equal((fused,), (unfused,)), (dtype, entry_dtype)
        y = decode_update(codec, fields, entry, dtype)
        expected = decode_update(Unfused(codec), fields, before, dtype)
        assert equal((y, entry), (expected, before)), (dtype, entry_dtype)


@pytest.mark.parametrize("spec", SPECS)
def test_the_sum_is_returned_before_it_is_rounded(spec: str) -> None:
    codec = codecs.parse(spec)
    for entry_dtype in ENTRY_DTYPES:
        entry = gaussian(2, entry_dtype)
        before = entry.clone()
        fields = encode_update(codec, gaussian(1), entry)
        y = decode_update(codec, fields, before.clone(), torch.float32)
        assert torch.equal(y, before.float() + codec.decode(fields, SHAPE, torch.float32)), entry_dtype
        assert torch.equal(y.to(entry_dtype), entry), entry_dtype


def test_entries_converge_to_constant_activations() -> None:
    """With scale=max the remaining difference is at most one step; fp16 rounds a scale by 2**-11 of it."""
    every_dims: tuple[Dims, ...] = ("channel", "token", "tensor")
    for dims, bits in product(every_dims, range(2, 9)):
        codec, x, entry = FixPoint(bits, dims=dims), gaussian(1), torch.zeros(SHAPE)
        error = float(x.abs().amax())
        for _ in range(6):
            encode_update(codec, x, entry)
            rounding = 2.0**-23 * float(x.abs().amax())  # of the difference and of the sum
            error = error * 2.0 ** (1 - bits) * (1 + 2.0**-11) + rounding
            assert (x - entry).abs().amax() <= error, (dims, bits)


def test_entries_saturate() -> None:
    codecs_of_both_kinds: tuple[Codec, ...] = (FixPoint(4), Unfused(FixPoint(4)))
    for codec, sign in product(codecs_of_both_kinds, (1, -1)):
        x, entry = torch.full((8, 8), sign * 1e6), torch.zeros(8, 8, dtype=torch.float16)
        at_sender, at_receiver = entry.clone(), entry.clone()
        for _ in range(3):
            fields = encode_update(codec, x, at_sender)
            y = decode_update(codec, fields, at_receiver, torch.float32)
        assert torch.equal(at_sender, torch.full_like(entry, sign * torch.finfo(torch.float16).max))
        assert torch.equal(at_receiver, at_sender)
        assert (y - x).abs().amax() <= 1e6 / 8 * (1 + 2.0**-11)  # one step: the returned sum is not clamped


def test_non_finite_activations_leave_the_entry_unchanged() -> None:
    refusing: tuple[Codec, ...] = (FixPoint(4), FixPoint(1), Unfused(FixPoint(4)))
    for codec, bad in product(refusing, (torch.nan, torch.inf)):
        x, entry = gaussian(1), gaussian(2, torch.float16)
        x[1, 2, 3] = bad
        with pytest.raises(NotFiniteError, match=r"\(1, 2, 3\)"):
            encode_update(codec, x, entry)
        assert torch.equal(entry, gaussian(2, torch.float16)), (codec, bad)


def test_tensors_need_not_be_contiguous() -> None:
    for spec in ("fixpoint:bits=3", "lloyd:bits=3"):
        codec, x, entry = codecs.parse(spec), gaussian(1), gaussian(2, torch.float16)
        strided = entry.transpose(0, 1).contiguous().transpose(0, 1)
        fields = encode_update(codec, x.transpose(0, 1).contiguous().transpose(0, 1), strided)
        assert equal(fields, encode_update(codec, x, entry)), spec
        assert torch.equal(strided, entry), spec


def test_empty_entries_can_be_updated() -> None:
    for spec in SPECS:
        codec, entry = codecs.parse(spec), torch.zeros(0, 8, dtype=torch.float16)
        fields = encode_update(codec, torch.zeros(0, 8), entry)
        assert decode_update(codec, fields, entry, torch.bfloat16).shape == (0, 8), spec


def test_updates_are_not_recorded_by_autograd() -> None:
    x, entry = gaussian(1).requires_grad_(), gaussian(2)
    fields = encode_update(Unfused(FixPoint(4)), x, entry)
    assert not any(field.requires_grad for field in (*fields, entry))
