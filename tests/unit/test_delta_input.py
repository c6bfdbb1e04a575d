"""What links that remember are given and cannot take: it is refused and named, or both ends go on alike."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import inf, nan
from pathlib import Path

import pytest
import torch
from torch import Tensor

from acsgd.codecs.base import NotFiniteError, pack, unpack, wire_bytes
from acsgd.config.spec import from_spec
from acsgd.pp.wire.cache import ActivationCache, HostMemoryStore
from acsgd.pp.wire.cache_plan import CachePlan, plan_capacity
from acsgd.pp.wire.coder import TensorSpec, TransferInfo
from acsgd.pp.wire.delta import Delta, DeltaCoder
from acsgd.streams import Streams

SHAPE = (3, 5, 8)
LARGEST = torch.finfo(torch.float16).max
CPU = Streams(torch.device("cpu"))


def parse(spec: str) -> Delta:
    delta = from_spec(spec, {"delta": Delta}, key="pp.forward")
    assert isinstance(delta, Delta)
    return delta


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("delta:bit=4", ['"bits"', '"step"', '"cache_gib"', 'did you mean "bits"?']),
        ("delta:rounding=stochastic", ['no option "rounding"', '"first_bits"', '"cache_bits"']),
        ("delta:bits=0", ["bits=0 is outside 1 to 8"]),
        ("delta:bits=9", ["bits=9 is outside 1 to 8"]),
        ("delta:bits=-1", ["bits=-1 is outside 1 to 8"]),
        ("delta:bits=2.5", ["int"]),
        ("delta:bits=4,bits=4", ["given twice"]),
        ("delta:step=-1", ["step=-1", "between 0 and 512"]),
        ("delta:step=513", ["step=513", "between 0 and 512"]),
        ("delta:step=nan", ["step=nan"]),
        ("delta:step=1,bits=1", ["bits=2 or more"]),
        ("delta:first_bits=9", ["first_bits=9 is outside 0 to 8"]),
        ("delta:first_bits=-1", ["first_bits=-1 is outside 0 to 8"]),
        ("delta:cache_bits=3", ["cache_bits=3 is none of 2, 4, 8 and 16"]),
        ("delta:cache_bits=32", ["cache_bits=32 is none of 2, 4, 8 and 16"]),
        ("delta:cache=tape", ["ram, disk"]),
        ("delta:cache_gib=-1", ["cache_gib=-1", "must be 0 (no limit) or more"]),
        ("delta:cache_gib=inf", ["cache_gib=inf"]),
        ("delta:cache_gib=nan", ["cache_gib=nan"]),
        ("delta:dims=group", ["group=0", "for example group=128"]),
        ("delta:group=16", ["group=16 needs dims=group"]),
        ("delta:scale=l3", ["max, l2"]),
    ],
)
def test_a_mistake_in_a_spec_is_named(spec: str, said: Sequence[str]) -> None:
    with pytest.raises(ValueError) as error:
        parse(spec)
    for words in [f'pp.forward="{spec}"', *said]:
        assert words in str(error.value)


@pytest.mark.parametrize("spec", ["delta", "delta:bits=1", "delta:bits=8,step=512", "delta:bits=2,step=0.001"])
def test_the_ends_of_what_is_allowed_work(spec: str) -> None:
    ends = Ends(parse(spec))
    for step in range(4):
        ends.visit(step, [0, 1, 2], activations(step))


@pytest.mark.parametrize("cache_bits", [16, 8, 2])
@pytest.mark.parametrize("at_once", [1, 6, 1000])
def test_a_memory_that_has_no_room_for_a_step_is_refused_and_what_is_advised_has(at_once: int, cache_bits: int) -> None:
    specs = [TensorSpec(SHAPE, torch.float32), TensorSpec((3, 7), torch.float32)]
    of_one = sum(map(parse(f"delta:cache_bits={cache_bits}").entry_bytes, specs))

    def capacity(gib: float, sequences: int = 5000) -> int:
        delta = Delta(cache_bits=cache_bits, cache_gib=gib)  # type: ignore[arg-type]
        return plan_capacity(delta, of_one, samples=sequences, per_step=at_once)

    assert capacity(at_once * of_one / 2**30) == at_once
    assert capacity(0) == 5000
    assert capacity(1.0, sequences=17) == 17
    with pytest.raises(ValueError) as error:
        capacity((at_once - 0.5) * of_one / 2**30)
    assert f"room for {at_once - 1} samples of {of_one} bytes" in str(error.value)
    advised = re.search(r"give cache_gib=(\S+) or more", str(error.value))
    assert advised
    assert at_once <= capacity(float(advised[1])) <= 1.2 * at_once + 1


def test_what_a_file_is_of_is_what_makes_entries_differ(tmp_path: Path) -> None:
    """Forms that encode the same sequence to other bytes, of as many bytes or not, do not read each other's files."""
    plan = CachePlan(9, tmp_path, ["block-00001"], "a", fresh=False)
    forms = [
        (Delta(cache="disk", cache_bits=bits), TensorSpec(shape, dtype))  # type: ignore[arg-type]
        for bits in (8, 16)
        for shape in ((3, 4, 8), (3, 8, 4))
        for dtype in (torch.float32, torch.bfloat16)
    ]
    for delta, spec in forms:
        for found in (0, 1):
            memory = plan.open(0, "sender.hidden", delta, spec, CPU)
            assert len(memory) == found
            if not found:
                room = memory.reserve(5)
                assert room is not None
                memory.write(5, room, 0, 0)
            memory.close()


class Ends:
    """Both ends of a wire in one process, with the bytes of a message between them."""

    def __init__(self, delta: Delta, dtype: torch.dtype = torch.float32, capacity: int = 100) -> None:
        self.spec = TensorSpec(SHAPE, dtype)
        self.caches = [ActivationCache(capacity, HostMemoryStore(delta.entry_bytes(self.spec), CPU)) for _ in range(2)]
        self._sender, self._receiver = (DeltaCoder(delta, self.spec, memory, CPU) for memory in self.caches)

    def visit(self, step: int, samples: Sequence[int], x: Tensor) -> Tensor:
        """Send a micro-batch; return what arrives. Raises NotFiniteError, and then the receiver gets nothing."""
        visit = TransferInfo(step, 0, samples=tuple(samples))
        wire = self._sender.wire(visit)
        assert self._receiver.wire(visit) == wire
        assert wire_bytes(wire) <= self._sender.max_bytes
        message = torch.zeros(wire_bytes(wire), dtype=torch.uint8)
        pack(self._sender.encode(x, visit), message)
        got = self._receiver.decode(unpack(message, wire), visit)
        assert got.dtype == self.spec.dtype
        assert self.contents()[0] == self.contents()[1]
        return got

    def contents(self) -> list[dict[int, tuple[int, bytes]]]:
        return [
            {sample: (version, memory.read(sample).numpy().tobytes()) for sample, version in memory.versions().items()}
            for memory in self.caches
        ]

    def remembered(self, sample: int) -> Tensor:
        """Return what is remembered of a sample in 16 bits."""
        return self.caches[0].read(sample).view(torch.float16)[: SHAPE[1] * SHAPE[2]].view(SHAPE[1:]).float()


def activations(step: int, size: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    base, drift = (torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) for seed in (999, step))
    return (size * (base + 0.1 * drift)).to(dtype)


FORMS = [Delta(), Delta(bits=1), Delta(step=1.0, first_bits=8), Delta(cache_bits=4), Delta(dims="token", scale="l2")]


@pytest.mark.parametrize("value", [nan, inf, -inf])
@pytest.mark.parametrize("delta", FORMS, ids=repr)
@pytest.mark.parametrize(("samples", "row"), [((0, 1, 2), 1), ((0, 7, 2), 2), ((0, 7, 2), 1), ((7, 8, 9), 0)])
def test_of_what_is_not_finite_nothing_is_learnt(
    samples: tuple[int, ...], row: int, delta: Delta, value: float
) -> None:
    """It arrives as such, or the coder says so; what is remembered of its sequence is what it was, at both ends."""
    ends = Ends(delta)
    for step in range(2):
        ends.visit(step, [0, 1, 2], activations(step))
    before = ends.contents()
    bad = activations(2)
    bad[row, 3, 4] = value
    try:
        got = ends.visit(2, samples, bad)
    except NotFiniteError:
        assert ends.contents() == before
    else:
        assert samples[row] in (7, 8, 9), "a difference that is not finite has no code"
        assert not delta.first_bits
        assert torch.equal(got[row], bad[row]) or value != value
        assert not got[row].isfinite().all()
        for one, old in zip(ends.contents(), before, strict=True):
            assert one.get(samples[row]) == old.get(samples[row])
    got = ends.visit(3, [0, 1, 2], activations(3))
    assert got.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e5, 1e30, 3e38])
def test_what_is_too_large_for_a_memory_saturates_there(size: float, dtype: torch.dtype) -> None:
    size = min(size, torch.finfo(dtype).max)
    ends, x = Ends(Delta(bits=4), dtype), torch.full(SHAPE, size).to(dtype)
    x[:, :, ::2] *= -1
    assert torch.equal(ends.visit(0, [0, 1, 2], x), x), "the first visit is exact"
    assert torch.equal(ends.remembered(0), x[0].float().clamp(-LARGEST, LARGEST))
    for step in range(1, 4):
        ends.visit(step, [0, 1, 2], x)
        assert ends.remembered(0).isfinite().all()
        assert torch.equal(ends.remembered(0).sign(), x[0].float().sign())
    small = activations(0, dtype=dtype)  # and it comes back: each visit leaves a level of the range at most
    for step in range(4, 30):
        got = ends.visit(step, [0, 1, 2], small)
    assert torch.allclose(got.float(), small.float(), atol=0.01, rtol=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_difference_that_fp32_cannot_hold_costs_no_sequence(dtype: torch.dtype) -> None:
    """A memory is at most 65504, so the difference to the largest float is still one."""
    ends, largest = Ends(Delta(bits=8), dtype), torch.finfo(dtype).max
    ends.visit(0, [0, 1, 2], torch.full(SHAPE, -largest, dtype=dtype))
    ends.visit(1, [0, 1, 2], torch.full(SHAPE, largest, dtype=dtype))
    assert ends.remembered(0).isfinite().all()


@pytest.mark.parametrize("delta", FORMS, ids=repr)
@pytest.mark.parametrize("capacity", [0, 1, 2, 100])
def test_a_sequence_may_come_twice_in_a_micro_batch(delta: Delta, capacity: int) -> None:
    ends, seen = Ends(delta, capacity=capacity), set[int]()
    for step, samples in enumerate([(1, 1, 1), (1, 2, 1), (2, 2, 3), (3, 3, 1), (1, 2, 3)]):
        ends.visit(step, samples, activations(step))
        seen |= set(samples)
        assert set(ends.contents()[0]) <= seen
        assert len(ends.contents()[0]) == min(capacity, len(seen))
    versions = ends.caches[0].versions().values()
    assert len(set(versions)) == len(versions)


def test_the_last_of_two_visits_in_a_micro_batch_is_remembered() -> None:
    ends, x = Ends(Delta()), activations(0)
    ends.visit(0, [4, 4, 4], x)
    assert torch.equal(ends.remembered(4), x[2].half().float())


def test_a_visit_without_samples_is_as_it_is_and_leaves_no_trace() -> None:
    ends, x = Ends(Delta()), activations(0)
    ends.visit(0, [0, 1, 2], x)
    before = ends.contents()
    assert torch.equal(ends.visit(1, [], 2 * x), 2 * x)
    assert ends.contents() == before
