"""Options of delta, the size of its caches, and its coder with numbers that are not finite or too large."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from math import inf, nan
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from acsgd.codecs import basis
from acsgd.codecs.base import Codec, NotFiniteError, pack, unpack, wire_bytes
from acsgd.codecs.fixpoint import FixPoint
from acsgd.codecs.lossless import compress_
from acsgd.comm.waits import Meter
from acsgd.config.spec import from_spec
from acsgd.errors import RunError
from acsgd.pp.wire.cache import ActivationCache, HostMemoryStore
from acsgd.pp.wire.cache_plan import CachePlan, check_space, plan_capacity
from acsgd.pp.wire.channel import read_header
from acsgd.pp.wire.coder import EXACT, TensorSpec, TransferInfo
from acsgd.pp.wire.delta import Delta, DeltaCoder
from acsgd.pp.wire.frame import Header, MessageKind
from acsgd.pp.wire.link import Link, LinkFactory
from acsgd.pp.wire.mailbox import Received
from acsgd.streams import Streams

SHAPE = (3, 5, 8)
FP16_MAX = torch.finfo(torch.float16).max
CPU = Streams(torch.device("cpu"))

MISTAKES = {
    "delta:bit=4": ['"bits"', '"step"', '"cache_gib"', 'did you mean "bits"?'],
    "delta:seed=1": ['no option "seed"', '"first_bits"', '"cache_bits"'],
    "delta:step=1,rounding=stochastic": ["biased", "add transform=true"],
    "delta:scale=l2,rounding=stochastic": ["biased", "add transform=true"],
    "delta:bits=0": ["bits=0 is outside 1 to 8"],
    "delta:bits=9": ["bits=9 is outside 1 to 8"],
    "delta:bits=-1": ["bits=-1 is outside 1 to 8"],
    "delta:bits=2.5": ["int"],
    "delta:bits=4,bits=4": ["given twice"],
    "delta:step=-1": ["step=-1", "between 0 and 512"],
    "delta:step=513": ["step=513", "between 0 and 512"],
    "delta:step=nan": ["step=nan"],
    "delta:step=1,bits=1": ["bits=2 or more"],
    "delta:first_bits=9": ["first_bits=9 is outside 0 to 8"],
    "delta:first_bits=-1": ["first_bits=-1 is outside 0 to 8"],
    "delta:cache_bits=3": ["cache_bits=3 is none of 2, 4, 8 and 16"],
    "delta:cache_bits=32": ["cache_bits=32 is none of 2, 4, 8 and 16"],
    "delta:cache=tape": ["ram, disk"],
    "delta:cache_gib=-1": ["cache_gib=-1", "must be 0 (no limit) or more"],
    "delta:cache_gib=inf": ["cache_gib=inf"],
    "delta:cache_gib=nan": ["cache_gib=nan"],
    "delta:dims=group": ["group=0", "for example group=128"],
    "delta:group=16": ["group=16 needs dims=group"],
    "delta:scale=l3": ["max, l2"],
    "delta:transform=true": ["transform=true needs step", "use step=1"],
    "delta:step=1,transform=true,bits=8": ["one step per tensor", "remove bits, scale and dims"],
    "delta:step=1,transform=true,dims=token": ["remove bits, scale and dims"],
    "delta:step=1,transform=true,balance=1.5": ["balance=1.5 must lie between 0 and 1"],
    "delta:step=1,balance=0.5": ["add step=1.5,transform=true, or remove balance"],
    "delta:step=1,transform=true,rounding=stochastic,balance=0.5": ["no effect with rounding=stochastic"],
    "delta:memory=disk": ['"memory" is now called "cache"'],
    "delta:memory_bits=8": ['"memory_bits" is now called "cache_bits"'],
    "delta:memory_gib=1": ['"memory_gib" is now called "cache_gib"'],
    "delta:squeeze=true": ['"squeeze" is now called "entropy_coding"'],
}


def parse(spec: str) -> Delta:
    delta = from_spec(spec, {"delta": Delta}, key="pp.forward")
    assert isinstance(delta, Delta)
    return delta


def test_mistakes_in_a_spec_are_named() -> None:
    for spec, expected in MISTAKES.items():
        with pytest.raises(ValueError) as error:
            parse(spec)
        for text in [f'pp.forward="{spec}"', *expected]:
            assert text in str(error.value), spec


def test_bounds_of_the_options_work() -> None:
    for spec in ["delta", "delta:bits=1", "delta:bits=8,step=512", "delta:bits=2,step=0.001"]:
        ends = Ends(parse(spec))
        for step in range(4):
            ends.transfer(step, [0, 1, 2], activations(step))


@pytest.mark.parametrize("cache_bits", [16, 8, 2])
@pytest.mark.parametrize("per_step", [1, 6, 1000])
def test_cache_too_small_for_a_step_is_refused_and_the_advised_size_is_enough(per_step: int, cache_bits: int) -> None:
    specs = [TensorSpec(SHAPE, torch.float32), TensorSpec((3, 7), torch.float32)]
    entry_bytes = sum(map(parse(f"delta:cache_bits={cache_bits}").entry_bytes, specs))

    def capacity(gib: float, samples: int = 5000) -> int:
        delta = Delta(cache_bits=cache_bits, cache_gib=gib)  # type: ignore[arg-type]
        return plan_capacity(delta, entry_bytes, samples=samples, per_step=per_step)

    assert capacity(per_step * entry_bytes / 2**30) == per_step
    assert capacity(0) == 5000
    assert capacity(1.0, samples=17) == 17
    with pytest.raises(ValueError) as error:
        capacity((per_step - 0.5) * entry_bytes / 2**30)
    assert f"room for {per_step - 1} samples of {entry_bytes} bytes" in str(error.value)
    advised = re.search(r"give cache_gib=(\S+) or more", str(error.value))
    assert advised
    assert per_step <= capacity(float(advised[1])) <= 1.2 * per_step + 1


def test_caches_larger_than_the_free_space_are_refused_and_the_advised_size_fits(tmp_path: Path) -> None:
    for cache, place in (("ram", "this host"), ("disk", str(tmp_path))):
        delta = Delta(cache=cache)  # type: ignore[arg-type]
        check_space(delta, tmp_path / "cache", [2**20] * 2, processes=2)
        with pytest.raises(ValueError, match="ends of links need 2e") as error:
            check_space(delta, tmp_path / "cache", [10**6 * 2**30] * 2, processes=2)
        for text in (place, "for 2 processes", "fewer cache_bits"):
            assert text in str(error.value), cache
        assert ("or cache=disk" in str(error.value)) is (cache == "ram")
        advised = re.search(r"give cache_gib=([^,]+),", str(error.value))
        assert advised
        check_space(delta, tmp_path / "cache", [int(0.9 * float(advised[1]) * 2**30)] * 2, processes=2)


def test_a_cache_file_is_reused_only_for_equal_encodings(tmp_path: Path) -> None:
    """Encodings of a sample that differ, whether in size or not, do not read each other's files."""
    plan = CachePlan([9], tmp_path, ["block-00001"], "a", fresh=False)
    encodings = [
        (Delta(cache="disk", cache_bits=bits), TensorSpec(shape, dtype))  # type: ignore[arg-type]
        for bits in (8, 16)
        for shape in ((3, 4, 8), (3, 8, 4))
        for dtype in (torch.float32, torch.bfloat16)
    ]
    for delta, spec in encodings:
        for expected in (0, 1):
            cache = plan.open(0, "sender.hidden", delta, spec, CPU)
            assert len(cache) == expected, (delta, spec)
            if not expected:
                buffer = cache.reserve(5)
                assert buffer is not None
                cache.write(5, buffer, 0, 0)
            cache.close()


class Ends:
    """Both ends of a channel in one process."""

    def __init__(
        self,
        delta: Delta,
        dtype: torch.dtype = torch.float32,
        capacity: int = 100,
        *,
        shape: tuple[int, ...] = SHAPE,
        is_frozen: bool = False,
        are_gradients: bool = False,
        others: Sequence[Codec | Delta] = (),
    ) -> None:
        """others: codecs with an index from 2 on."""
        self.spec = TensorSpec(shape, dtype)
        self.caches = [ActivationCache(capacity, HostMemoryStore(delta.entry_bytes(self.spec), CPU)) for _ in range(2)]
        self.sender, self.receiver = (
            DeltaCoder([delta, *others], self.spec, cache, CPU, is_frozen=is_frozen, are_gradients=are_gradients)
            for cache in self.caches
        )

    def transfer(self, step: int, samples: Sequence[int], x: Tensor, codec: int = 1) -> Tensor:
        """Send a micro-batch; return what arrives. Raises NotFiniteError; the receiver then gets nothing."""
        info = TransferInfo(step, 0, codec, samples=tuple(samples))
        wire = self.sender.wire(info)
        assert self.receiver.wire(info) == wire
        self.is_coded = self.sender.uses_entropy_coding(info)
        assert self.receiver.uses_entropy_coding(info) == self.is_coded
        cached = self.receiver.wire(info._replace(hits_as_cached=True))
        assert wire_bytes(wire) <= self.sender.max_bytes
        fields = self.sender.encode(x, info)
        if len(fields) < len(wire):
            assert wire[: len(fields)] == cached
            wire = cached
        self.sent_bytes = wire_bytes(wire)
        message = torch.zeros(self.sent_bytes, dtype=torch.uint8)
        pack(fields, message)
        self.coded_bytes = compress_(message.clone(), wire) if self.is_coded else self.sent_bytes
        got = self.receiver.decode(unpack(message, wire), info)
        assert got.dtype == self.spec.dtype
        assert self.entries()[0] == self.entries()[1]
        return got

    def entries(self) -> list[dict[int, tuple[int, bytes]]]:
        return [
            {sample: (version, cache.read(sample).numpy().tobytes()) for sample, version in cache.versions().items()}
            for cache in self.caches
        ]

    def cached(self, sample: int) -> Tensor:
        """Return the decoded entry of a sample; for cache_bits=16."""
        return self.caches[0].read(sample).view(torch.float16)[: SHAPE[1] * SHAPE[2]].view(SHAPE[1:]).float()


def activations(step: int, size: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    base, drift = (torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) for seed in (999, step))
    return (size * (base + 0.1 * drift)).to(dtype)


DELTAS = [Delta(), Delta(bits=1), Delta(step=1.0, first_bits=8), Delta(cache_bits=4), Delta(dims="token", scale="l2")]
DELTAS.append(Delta(step=1.0, transform=True))
BATCHES = [((0, 1, 2), 1), ((0, 7, 2), 2), ((0, 7, 2), 1), ((7, 8, 9), 0)]
"""Samples of a micro-batch, of which 7 to 9 are cache misses, and the row that is not finite."""


@pytest.mark.parametrize("delta", DELTAS, ids=repr)
def test_activations_that_are_not_finite_are_not_cached(delta: Delta) -> None:
    """They arrive as they are, or the coder raises; the entry of their sample is unchanged at both ends."""
    for value, (samples, row) in itertools.product((nan, inf, -inf), BATCHES):
        case = f"{value} in row {row} of {samples}"
        ends = Ends(delta)
        for step in range(2):
            ends.transfer(step, [0, 1, 2], activations(step))
        before = ends.entries()
        bad = activations(2)
        bad[row, 3, 4] = value
        try:
            got = ends.transfer(2, samples, bad)
        except NotFiniteError:
            assert ends.entries() == before, case
        else:
            assert samples[row] in (7, 8, 9), f"{case}: a difference that is not finite has no code"
            assert not delta.first_bits, case
            assert torch.equal(got[row], bad[row]) or value != value, case
            assert not got[row].isfinite().all(), case
            for entries, old in zip(ends.entries(), before, strict=True):
                assert entries.get(samples[row]) == old.get(samples[row]), case
        assert ends.transfer(3, [0, 1, 2], activations(3)).isfinite().all(), case


@pytest.mark.parametrize("delta", DELTAS, ids=repr)
def test_no_payload_makes_the_receivers_cache_infinite_or_nan(delta: Delta) -> None:
    """Even without the checksum, and for the values that a faulty sender might encode."""
    draw = torch.Generator().manual_seed(4)
    for case in range(30):
        ends = Ends(delta)
        for step in range(2):
            ends.transfer(step, [0, 1, 2], activations(step))
        for step, samples in enumerate([(0, 1, 2), (0, 7, 2), (8, 9, 1)], start=2):
            info = TransferInfo(step, 0, samples=samples)
            wire = ends.receiver.wire(info)
            payload = torch.randint(0, 256, (wire_bytes(wire),), generator=draw).byte()
            if case < 4:
                payload.fill_((0x00, 0x7F, 0x80, 0xFF)[case])
            ends.receiver.decode(unpack(payload, wire), info)
        codec, dtype = delta.cache_codec, delta.cache_dtype
        cache = ends.caches[1]
        for sample in cache.versions():
            fields = unpack(cache.read(sample), codec.wire(SHAPE[1:], dtype))
            assert all(field.isfinite().all() for field in fields), (case, sample)
            assert codec.decode(fields, SHAPE[1:], dtype).isfinite().all(), (case, sample)


def test_activations_too_large_for_fp16_saturate_in_the_cache() -> None:
    for dtype, limit in itertools.product((torch.float32, torch.bfloat16, torch.float16), (1e5, 1e30, 3e38)):
        size = min(limit, torch.finfo(dtype).max)
        case = f"{size} in {dtype}"
        ends, x = Ends(Delta(bits=4), dtype), torch.full(SHAPE, size).to(dtype)
        x[:, :, ::2] *= -1
        assert torch.equal(ends.transfer(0, [0, 1, 2], x), x), f"{case}: a cache miss is exact"
        assert torch.equal(ends.cached(0), x[0].float().clamp(-FP16_MAX, FP16_MAX)), case
        for step in range(1, 4):
            ends.transfer(step, [0, 1, 2], x)
            assert ends.cached(0).isfinite().all(), case
            assert torch.equal(ends.cached(0).sign(), x[0].float().sign()), case
        small = activations(0, dtype=dtype)  # it recovers: each step leaves at most one level of the range as error
        for step in range(4, 30):
            got = ends.transfer(step, [0, 1, 2], small)
        assert torch.allclose(got.float(), small.float(), atol=0.01, rtol=0.01), case


def test_difference_larger_than_the_largest_float_keeps_the_cache_finite() -> None:
    """An entry is at most 65504, so the difference to the largest float is still finite."""
    for dtype in (torch.float32, torch.bfloat16):
        ends, largest = Ends(Delta(bits=8), dtype), torch.finfo(dtype).max
        ends.transfer(0, [0, 1, 2], torch.full(SHAPE, -largest, dtype=dtype))
        ends.transfer(1, [0, 1, 2], torch.full(SHAPE, largest, dtype=dtype))
        assert ends.cached(0).isfinite().all(), dtype


@pytest.mark.parametrize("spec", ["delta:bits=4", "delta:step=0.5,transform=true", "delta:bits=4,cache_bits=8"])
@pytest.mark.parametrize("size", [1e-12, 1e-6])
def test_differences_of_gradients_are_smaller_than_gradients_however_small_these_are(spec: str, size: float) -> None:
    """fp16 has no numbers below 6e-8, so an entry would be 0, and the difference as large as the gradient."""
    ends = Ends(parse(spec), are_gradients=True)
    for step in range(3):
        x = activations(step, size)
        error = ends.transfer(step, [0, 1, 2], x) - x
    assert error.square().mean().sqrt() < 0.05 * size


@pytest.mark.parametrize("spec", ["delta:step=1,transform=true", "delta:bits=3,dims=tensor"])
def test_small_differences_arrive_in_the_mean_of_visits_with_stochastic_rounding(spec: str) -> None:
    """Beside large ones that change from visit to visit, the nearest level is that of no difference."""
    draw = torch.Generator().manual_seed(0)
    for rounding, arrives in (("nearest", False), ("stochastic", True)):
        ends, found = Ends(parse(f"{spec},rounding={rounding}"), are_gradients=True), []
        ends.transfer(0, [0, 1, 2], torch.zeros(SHAPE))
        for step in range(1, 60):
            x = torch.zeros(SHAPE)
            x[:, :, 0], x[:, :, 1] = torch.randn(SHAPE[:2], generator=draw), 0.05
            found.append(ends.transfer(step, [0, 1, 2], x)[:, :, 1].mean())
        assert (abs(float(torch.stack(found).mean()) - 0.05) < 0.025) is arrives


def test_errors_of_stochastic_rounding_are_independent(tmp_path: Path) -> None:
    """Of the tensors and directions of all boundaries, and of the micro-batches of a step."""
    spec, sample = TensorSpec(SHAPE, torch.float32), (0, 1, 2)
    plan = CachePlan([9, 9], tmp_path, ["block-00001", "block-00002"], "a", fresh=True)
    codecs = [parse("delta:step=1,transform=true,rounding=stochastic")]
    boundaries = [{"hidden": spec, "other": spec}] * 2
    factory = LinkFactory(Mock(), Mock(), CPU, boundaries, codecs, codecs, Meter(), Meter(), plan)
    opens = (factory._activation_coder, factory._gradient_coder)
    coders = [each(*of, "sender") for each in opens for of in itertools.product(range(2), ("hidden", "other"))]
    found = set[bytes]()
    for coder, micro in itertools.product(coders, range(2)):
        fresh = factory._activation_coder(0, "hidden", "sender")  # in the same state, but for its random numbers
        assert isinstance(fresh, DeltaCoder)
        assert isinstance(coder, DeltaCoder)
        fresh._seed = coder._seed
        fresh.encode(activations(0), TransferInfo(0, 0, samples=sample))
        found.add(fresh.encode(activations(1), TransferInfo(1, micro, samples=sample))[1].numpy().tobytes())
    assert len(found) == 16


@pytest.mark.parametrize("delta", DELTAS, ids=repr)
def test_a_sample_may_come_twice_in_a_micro_batch(delta: Delta) -> None:
    for capacity in (0, 1, 2, 100):
        ends, seen = Ends(delta, capacity=capacity), set[int]()
        for step, samples in enumerate([(1, 1, 1), (1, 2, 1), (2, 2, 3), (3, 3, 1), (1, 2, 3)]):
            ends.transfer(step, samples, activations(step))
            seen |= set(samples)
            assert set(ends.entries()[0]) <= seen, capacity
            assert len(ends.entries()[0]) == min(capacity, len(seen)), capacity
        versions = ends.caches[0].versions().values()
        assert len(set(versions)) == len(versions), capacity


def test_the_last_row_of_a_sample_is_cached() -> None:
    ends, x = Ends(Delta()), activations(0)
    ends.transfer(0, [4, 4, 4], x)
    assert torch.equal(ends.cached(4), x[2].half().float())


def test_a_link_may_leave_delta_for_another_codec_and_return() -> None:
    """What the other codecs send is cached, too, so that both ends hold the same entries after every step."""
    coarse, fine, quantized = Delta(bits=2), Delta(bits=8), FixPoint(8)
    ends, samples = Ends(coarse, others=[fine, quantized]), [0, 1, 2]
    steps = [1, 1, 3, 2, 0, 1, 3, 3, 1, 2]
    for step, codec in enumerate(steps):
        x, before = activations(step), [ends.cached(sample) for sample in samples] if step else []
        got = ends.transfer(step, samples, x, codec)
        if codec == 0 or step == 0:
            assert torch.equal(got, x)
        elif codec == 3:
            assert bool(((got - x).abs() <= quantized.error_bound(x)).all())
        else:
            difference, delta = x - torch.stack(before), {1: coarse, 2: fine}[codec]
            bound = delta.codec.error_bound(difference) + 1e-3 * (1 + x.abs())  # entries are fp16
            assert bool(((got - x).abs() <= bound).all()), step


@pytest.mark.parametrize("first_bits", [0, 8])
@pytest.mark.parametrize("spec", ["delta:step=1.5", "delta:step=1.5,transform=true"])
def test_a_message_with_hits_is_entropy_coded_whatever_its_misses_are(spec: str, first_bits: int) -> None:
    """A message of misses only is not. With a quarter of misses, coding saves a bit per element or more."""
    draw, shape = torch.Generator().manual_seed(0), (4, 64, 32)
    ends = Ends(parse(f"{spec},first_bits={first_bits}"), shape=shape)
    for step, samples in enumerate([(0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 9)]):
        ends.transfer(step, samples, torch.randn(shape, generator=draw))
        assert ends.is_coded is (step > 0)
    assert 8 * (ends.sent_bytes - ends.coded_bytes) >= math.prod(shape)


def test_a_basis_is_sent_when_as_many_elements_have_followed_the_last_one() -> None:
    ends, samples, had = Ends(parse("delta:step=1,transform=true")), [0, 1, 2], []
    ends.transfer(0, samples, activations(0))
    plain = wire_bytes(basis.wire(SHAPE))
    for step in range(1, 150):  # a basis has 64 elements, a message 120
        ends.transfer(step, samples, activations(step))
        had += [step] if ends.sent_bytes > plain else []
        assert ends.sent_bytes in (plain, plain + 128), step
    assert had == [1, 36, 71, 141]  # after 64 x 64 elements, as many, and twice as many


def test_a_basis_is_inverted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes are those of the inverse of the basis that was sent, as of one that is computed for each message."""
    ends, samples, fitted = Ends(parse("delta:step=1,transform=true")), (0, 1, 2), torch.empty(0)
    invert = basis.invert
    monkeypatch.setattr(basis, "invert", inverted := Mock(wraps=invert))
    ends.transfer(0, samples, activations(0))
    for step in range(1, 40):
        difference = activations(step) - torch.stack([ends.cached(sample) for sample in samples])
        fields = ends.sender.encode(activations(step), TransferInfo(step, 0, samples=samples))
        fitted = fields[0] if step in (1, 36) else fitted
        anew = basis.encode(difference, invert(fitted), 1.0)
        assert all(torch.equal(*each) for each in zip(fields[-3:], anew, strict=True)), step
    assert inverted.call_count == 2


def test_differences_in_one_direction_are_in_one_component() -> None:
    ends, samples = Ends(parse("delta:step=1,transform=true")), (0, 1, 2)
    ends.transfer(0, samples, activations(0))
    drift = activations(1)[:, :, :1] * torch.linspace(-1, 1, SHAPE[2])
    fields = ends.sender.encode(
        torch.stack([ends.cached(sample) for sample in samples]) + drift, TransferInfo(1, 0, samples=samples)
    )
    assert fields[1][0].any()
    assert not fields[1][1:].any()


def test_received_gradients_decide_which_errors_are_small() -> None:
    """A link that receives gradients of one channel only sends that channel with the smallest error."""

    def errors(channel: int, *, is_downstream: bool) -> Tensor:
        ends, gradients = Ends(parse("delta:step=2,transform=true")), torch.zeros(SHAPE)
        gradients[:, :, channel] = activations(7)[:, :, channel]
        inbox, sender = (
            Mock(receive=lambda _: Received({"hidden": gradients}, None)),
            Mock(coders={"hidden": ends.sender}),
        )
        ends.transfer(0, [0, 1, 2], activations(0))
        Link(Mock(), inbox, Mock(), sender, is_downstream=is_downstream).receive(TransferInfo(0, 0))
        return (ends.transfer(1, [0, 1, 2], activations(1)) - activations(1)).square().mean((0, 1))

    second, fifth = (errors(channel, is_downstream=False) for channel in (2, 5))
    assert second[2] < 0.3 * fifth[2]
    assert fifth[5] < 0.3 * second[5]
    # the end that receives activations has no use for them
    assert torch.equal(errors(2, is_downstream=True), errors(5, is_downstream=True))


def test_a_balance_uses_the_gradients_that_the_sender_has_cached() -> None:
    """Those of all hits of a message: rounding is to the nearest level while one of them has none."""
    shape, draw = (3, 100, 8), torch.Generator().manual_seed(0)
    first, x, gradients = (torch.randn(shape, generator=draw) for _ in range(3))

    def change(balance: float, samples: Sequence[int]) -> float:
        """Return the first-order change of the loss with gradients of these samples in the cache."""
        ends = Ends(parse(f"delta:step=2,transform=true,balance={balance}"), shape=shape)
        of_gradients = Ends(parse("delta"), shape=shape, are_gradients=True)
        of_gradients.transfer(0, samples, gradients)
        ends.sender.gradients = of_gradients.receiver
        ends.transfer(0, [0, 1, 2], first)
        return abs(float(((ends.transfer(1, [0, 1, 2], x) - x) * gradients).sum()))

    plain = change(0.0, [0, 1, 2])
    assert change(1.0, [0, 1, 7]) == plain
    assert change(1.0, [0, 1, 2]) < 0.1 * plain


def test_the_sender_of_activations_has_the_gradients_that_it_caches(tmp_path: Path) -> None:
    plan, spec = CachePlan([9], tmp_path, ["block-00001"], "a", fresh=True), TensorSpec(SHAPE, torch.float32)
    for backward, is_downstream in ((Delta(), True), (Delta(), False), (FixPoint(8), True)):
        codecs = [parse("delta:step=1,transform=true,balance=0.5")], [backward]
        factory = LinkFactory(Mock(), Mock(), CPU, [{"hidden": spec}], *codecs, Meter(), Meter(), plan)
        activations, gradients = (each["hidden"] for each in factory._coders(0, downstream=is_downstream))
        assert isinstance(activations, DeltaCoder)
        assert activations.gradients is (gradients if is_downstream and backward == Delta() else None)


def test_gradients_are_noted_by_links_that_use_a_transform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by one that may not use it, nor with another codec of the link: noting takes 1 % of a fast step."""
    plan = CachePlan([9, 9], tmp_path, ["block-00001", "block-00002"], "a", fresh=True)
    boundaries = [{"hidden": TensorSpec(SHAPE, torch.float32)}] * 2
    codecs = [parse("delta"), parse("delta:step=1,transform=true")]
    factory = LinkFactory(
        Mock(),
        Mock(),
        CPU,
        boundaries,
        codecs,
        [],
        Meter(),
        Meter(),
        plan,
        deltas_at=lambda boundary, *, of_gradients=False: codecs[: boundary + 1],
    )
    monkeypatch.setattr(basis.Moments, "add", add := Mock())
    for boundary in range(2):
        coder = factory._activation_coders(boundary, "sender")["hidden"]
        assert isinstance(coder, DeltaCoder)
        for codec in range(3):
            coder.encode(activations(0), TransferInfo(codec, 0, codec, samples=(0, 1, 2)))
            add.reset_mock()
            coder.add_gradients(activations(0))
            assert add.call_count == (boundary == 1 and codec == 2)


def test_gradients_that_do_not_travel_have_no_cache(tmp_path: Path) -> None:
    spec = TensorSpec(SHAPE, torch.float32)
    plan = CachePlan([9, 9], tmp_path, ["block-00001", "block-00002"], "a", fresh=True)
    delta = [Delta(entropy_coding=True)]
    factory = LinkFactory(Mock(), Mock(), CPU, [{"hidden": spec}] * 2, delta, delta, Meter(), Meter(), plan, frozen=1)
    coders = [factory._gradient_coder(boundary, "hidden", "sender") for boundary in range(2)]
    assert [isinstance(coder, DeltaCoder) for coder in coders] == [False, True]
    assert [boundary for boundary, _ in factory.caches] == [1]
    assert plan_capacity(Delta(cache_gib=1.0), 0, samples=9, per_step=3) == 9, "ends without caches"


def test_a_message_of_other_counts_of_elements_in_bases_is_refused() -> None:
    """An end that is opened alone would expect a basis where there is none, or use another one."""
    ends, samples, delta = Ends(parse("delta:step=1,transform=true")), (0, 1, 2), parse("delta:step=1,transform=true")
    for step in range(2):
        ends.transfer(step, samples, activations(step))
    anew = DeltaCoder([delta], ends.spec, ends.caches[1], CPU)
    info, header = TransferInfo(2, 0, samples=samples), Header(MessageKind.ACTIVATION, 0, 0, 2, 0, 0)
    message = torch.frombuffer(
        bytearray(header.pack(torch.empty(0).byte(), ends.sender.context(info))), dtype=torch.uint8
    )
    assert read_header(message, header, 0, context=ends.receiver.context(info)) == header
    with pytest.raises(RunError, match="corrupt message"):
        read_header(message, header, 0, context=anew.context(info))


def test_a_transfer_without_samples_is_exact_and_leaves_the_cache_unchanged() -> None:
    ends, x = Ends(Delta()), activations(0)
    ends.transfer(0, [0, 1, 2], x)
    before = ends.entries()
    assert torch.equal(ends.transfer(1, [], 2 * x), 2 * x)
    assert ends.entries() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_frozen_activations_that_are_cached_are_not_sent(dtype: torch.dtype) -> None:
    """Only misses are; what arrives are the entries, which stay as they are."""
    ends, x = Ends(Delta(entropy_coding=True), dtype, is_frozen=True), activations(0, size=1e4, dtype=dtype)
    x[0, 0, 0] = torch.finfo(dtype).max
    assert torch.equal(ends.transfer(0, [0, 1, 2], x), x)
    before = ends.entries()
    got = ends.transfer(1, [0, 1, 2], x)
    assert ends.sent_bytes == 0
    assert torch.equal(got, x.float().clamp(-FP16_MAX, FP16_MAX).half().to(dtype))
    assert ends.entries() == before
    got = ends.transfer(2, [0, 7, 2], x)
    assert ends.sent_bytes == wire_bytes(EXACT.wire((1, *SHAPE[1:]), dtype))
    assert torch.equal(got[1], x[1])
    changed = x.clone()
    changed[2, 1, 1] *= 1.5  # as by dropout: all hits are sent
    got = ends.transfer(3, [0, 1, 2], changed)
    assert ends.sent_bytes == wire_bytes(Delta().codec.wire(SHAPE))
    assert not torch.equal(got, x)


def test_activations_above_trained_layers_are_always_sent() -> None:
    ends, x = Ends(Delta()), activations(0)
    for step in range(2):
        ends.transfer(step, [0, 1, 2], x)
    assert ends.sent_bytes == wire_bytes(Delta().codec.wire(SHAPE))
    coarse = Ends(Delta(cache_bits=4), is_frozen=True)  # its entries are too coarse to be used as activations
    for step in range(2):
        coarse.transfer(step, [0, 1, 2], x)
    assert coarse.sent_bytes > 0
