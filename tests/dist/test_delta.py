"""Laws of a link that remembers: both ends remember the same, bit for bit, after every step, whatever happens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import pytest
import torch
from lib.ranks import on_ranks
from test_link import groups_of
from torch import Tensor

from acsgd.codecs.base import wire_bytes
from acsgd.codecs.fixpoint import FixPoint
from acsgd.codecs.identity import Identity
from acsgd.meter import Meter
from acsgd.pp.wire.cache import ActivationCache
from acsgd.pp.wire.cache_disk import HEADER_BYTES as FILE_HEADER
from acsgd.pp.wire.cache_disk import DiskStore
from acsgd.pp.wire.cache_plan import CachePlan
from acsgd.pp.wire.coder import TensorSpec, TransferInfo
from acsgd.pp.wire.delta import Delta
from acsgd.pp.wire.frame import HEADER_BYTES
from acsgd.pp.wire.link import Link, LinkFactory
from acsgd.streams import Streams

MICRO, TOKENS, WIDTH = 2, 5, 6
SPEC = TensorSpec((MICRO, TOKENS, WIDTH), torch.float32)
ENTRY = TOKENS * WIDTH
Step = list[list[int]]
"""Sample ids of the micro-batches of a step."""
Sabotage = Callable[[int, Path], None]
"""What happens to a rank's files (its rank, their directory) before a start."""


@dataclass
class Start:
    """One start of a run, from its first step to its end."""

    steps: Sequence[Step]
    cut: str = "block-00003"
    fresh: bool = False
    exact_steps: int = 0
    sabotage: Sabotage | None = None
    lost_writes: int = 0
    """How many of the last writes of rank 1 never reach the disk."""
    capacity: int = 100


@dataclass
class Seen:
    """What a rank has of one step."""

    remembered: dict[int, tuple[int, bytes]]
    """Version and entry, by sample."""
    received: list[Tensor] = field(default_factory=list)
    sent_bytes: int = 0


def activations(step: int, ids: Sequence[int]) -> Tensor:
    """Return what a model in training would make of some samples: it changes a little in each step."""
    rows = []
    for sample in ids:
        base = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(sample))
        drift = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1000 * step + sample))
        rows.append(base + 0.05 * drift)
    return torch.stack(rows)


def run_starts(
    rank: int, world_size: int, store: Path, delta: Delta, directory: Path, starts: Sequence[Start]
) -> list[list[Seen]]:
    """Make some starts, one after another, as rank 0, the sender, or rank 1; return what was seen after each step."""
    seen, step = [], 0
    with groups_of(rank, world_size, store) as groups:
        for start in starts:
            if start.sabotage is not None:
                start.sabotage(rank, directory)
            groups.all_gather_text(f"start {step}", "", timeout_s=30.0)
            meter = Meter()
            plan = CachePlan(start.capacity, directory, [start.cut], "test", start.fresh)
            factory = LinkFactory(
                *(groups.pp, Streams(torch.device("cpu")), {"hidden": SPEC}, delta, Identity(), meter, Meter(), plan)
            )
            link = factory.open(0, peer=1 - rank, downstream=rank == 0)
            seen.append([])
            for number, ids in enumerate(start.steps):
                upcoming = start.steps[min(number + 1, len(start.steps) - 1)]
                seen[-1].append(one_step(rank, link, meter, step, ids, upcoming, exact=number < start.exact_steps))
                step += 1
            if rank == 1:
                lose_writes(memory_of(link), start.lost_writes)
            link.close()
    return seen


def one_step(rank: int, link: Link, meter: Meter, step: int, micros: Step, upcoming: Step, *, exact: bool) -> Seen:
    meter.reset()
    link.begin_step([i for ids in micros for i in ids], [i for ids in upcoming for i in ids])
    received = []
    for micro, ids in enumerate(micros):
        visit = TransferInfo(step, micro, exact, tuple(ids))
        if rank == 0:
            link.send(visit, {"hidden": activations(step, ids)})
        else:
            link.inbox.post()
            received.append(link.receive(visit)["hidden"])
    link.outbox.drain()
    memory = memory_of(link)
    return Seen(contents(memory), received, meter.sent_bytes)


def memory_of(link: Link) -> ActivationCache:
    (memory,) = link._cache_sync._caches
    return memory


def contents(memory: ActivationCache) -> dict[int, tuple[int, bytes]]:
    return {sample: (version, memory.read(sample).numpy().tobytes()) for sample, version in memory.versions().items()}


def lose_writes(memory: ActivationCache, count: int) -> None:
    """Undo the last writes of a store, as if its process had been killed before them."""
    if count:
        store = memory._store
        assert isinstance(store, DiskStore)
        for place in list(store._writes)[-count:]:
            store._writes[place].result()
            with store._path.open("r+b") as file:
                file.seek(store._offset(place))
                file.write(bytes(store._nbytes + 20))


def shuffled_steps(seed: int, samples: int, steps: int, micros: int = 3) -> list[Step]:
    """Return steps of samples drawn with repetition, so that some come twice in a step, and in a micro-batch."""
    draw = random.Random(seed)
    return [[[draw.randrange(samples) for _ in range(MICRO)] for _ in range(micros)] for _ in range(steps)]


def both(tmp_path: Path, delta: Delta, starts: Sequence[Start]) -> tuple[list[list[Seen]], list[list[Seen]]]:
    sender, receiver = on_ranks(2, run_starts, tmp_path / "store", delta, tmp_path / "activation-cache", starts)
    for one, other in zip(chain(*sender), chain(*receiver), strict=True):
        assert one.remembered == other.remembered
        assert one.remembered
    return sender, receiver


FORMS = [
    Delta(bits=4),
    Delta(bits=2, dims="token", cache="disk"),
    Delta(bits=3, cache_bits=8, cache="disk"),
    Delta(bits=4, cache_bits=4),
    Delta(bits=1, cache_bits=2, cache="disk"),
    Delta(step=1.0, first_bits=8, cache="disk"),
    Delta(bits=2, entropy_coding=True),
]


@pytest.mark.parametrize("delta", FORMS, ids=repr)
def test_both_ends_remember_the_same_after_every_step(delta: Delta, tmp_path: Path) -> None:
    both(tmp_path, delta, [Start(shuffled_steps(0, 12, 12), exact_steps=2)])


@pytest.mark.parametrize("cache", ["ram", "disk"])
def test_the_receiver_gets_what_plain_arithmetic_says(cache: str, tmp_path: Path) -> None:
    delta = Delta(bits=4, cache=cache)  # type: ignore[arg-type]
    steps = [[[(2 * micro + row + 3 * step) % 8 for row in range(MICRO)] for micro in range(3)] for step in range(8)]
    _, (receiver,) = both(tmp_path, delta, [Start(steps)])
    codec, remembered = FixPoint(4), dict[int, Tensor]()
    for step, (micros, seen) in enumerate(zip(steps, receiver, strict=True)):
        for ids, got in zip(micros, seen.received, strict=True):
            a = activations(step, ids)
            known = [row for row, sample in enumerate(ids) if sample in remembered]
            expected = a.clone()
            if known:
                m = torch.stack([remembered[ids[row]] for row in known]).float()
                fields = codec.encode(a[known] - m)
                expected[known] = m + codec.decode(fields, tuple(m.shape), torch.float32)
            assert torch.equal(got, expected)
            remembered.update({sample: row.half() for sample, row in zip(ids, expected, strict=True)})


def test_what_is_sent_is_what_is_declared(tmp_path: Path) -> None:
    delta = Delta(bits=3)
    sender, _ = both(tmp_path, delta, [Start([[[0, 1], [2, 3]], [[0, 4], [2, 3]]])])
    whole, rest = Identity(), delta.codec
    shape = SPEC.shape[1:]
    first = 2 * wire_bytes(whole.wire(SPEC.shape))
    mixed = wire_bytes(whole.wire((1, *shape)) + rest.wire((1, *shape))) + wire_bytes(rest.wire(SPEC.shape))
    assert [seen.sent_bytes for seen in sender[0]] == [2 * HEADER_BYTES + 4 * 8 + n for n in (first, mixed)]


@pytest.mark.parametrize("cache", ["ram", "disk"])
@pytest.mark.parametrize("capacity", [1, 5, 11])
def test_a_full_memory_keeps_the_same_samples_at_both_ends_whatever_the_order(
    cache: str, capacity: int, tmp_path: Path
) -> None:
    delta = Delta(cache=cache)  # type: ignore[arg-type]
    kept = []
    for seed in range(2):
        path = tmp_path / str(seed)
        path.mkdir()
        sender, _ = both(path, delta, [Start(shuffled_steps(seed, 12, 25), capacity=capacity)])
        assert max(len(seen.remembered) for seen in sender[0]) == capacity
        kept.append(set(sender[0][-1].remembered))
    assert kept[0] == kept[1]


def test_a_later_start_goes_on_with_what_is_on_disk(tmp_path: Path) -> None:
    steps = shuffled_steps(1, 10, 8)
    delta = Delta(cache="disk")
    sender, _ = both(tmp_path, delta, [Start(steps), Start(steps)])
    again = sender[1][0]
    assert again.sent_bytes == 3 * (HEADER_BYTES + wire_bytes(delta.codec.wire(SPEC.shape))) + 6 * 8
    untouched = set(sender[0][-1].remembered) - {i for ids in steps[0] for i in ids}
    assert untouched
    assert {i: again.remembered[i] for i in untouched} == {i: sender[0][-1].remembered[i] for i in untouched}


@pytest.mark.parametrize(
    ("first", "second"),
    [({}, {"cut": "block-00002"}), ({}, {"fresh": True})],
    ids=["the boundary has moved", "the run begins anew"],
)
def test_what_is_of_something_else_is_not_used(first: dict, second: dict, tmp_path: Path) -> None:  # type: ignore[type-arg]
    steps = [[[0, 1], [2, 3]]]
    sender, _ = both(tmp_path, Delta(cache="disk"), [Start(steps, **first), Start(steps, **second)])
    assert sender[1][0].sent_bytes == sender[0][0].sent_bytes


def remove_one_end(rank: int, directory: Path) -> None:
    if rank == 1:
        (directory / "block-00003.receiver.hidden").unlink()


def flip_bytes_of_two_entries(rank: int, directory: Path) -> None:
    if rank == 0:
        size = 2 * ENTRY + 4 + 20  # fp16, padded to 16 bytes; sample, version and checksum
        with (directory / "block-00003.sender.hidden").open("r+b") as file:
            for place in (0, 2):
                file.seek(FILE_HEADER + place * size + 7)
                file.write(b"\xff\xee")


def cut_short(rank: int, directory: Path) -> None:
    if rank == 1:
        path = directory / "block-00003.receiver.hidden"
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 30)


def spoil_header(rank: int, directory: Path) -> None:
    if rank == 0:
        with (directory / "block-00003.sender.hidden").open("r+b") as file:
            file.write(b"x")


@pytest.mark.parametrize(
    ("sabotage", "lost"),
    [(remove_one_end, 6), (flip_bytes_of_two_entries, 2), (cut_short, 1), (spoil_header, 6)],
    ids=["one file is gone", "two entries are damaged", "a file is cut short", "a header is damaged"],
)
def test_what_one_end_has_lost_travels_whole_once(sabotage: Sabotage, lost: int, tmp_path: Path) -> None:
    delta, steps = Delta(cache="disk"), [[[0, 1], [2, 3], [4, 5]]]
    sender, receiver = both(tmp_path, delta, [Start(steps * 2), Start(steps * 2, sabotage=sabotage)])
    normal = sender[0][1].sent_bytes
    assert sender[1][0].sent_bytes > normal
    assert sender[1][1].sent_bytes == normal
    exact = [torch.equal(got, activations(2, ids)) for got, ids in zip(receiver[1][0].received, steps[0], strict=True)]
    rows = [
        torch.equal(row, a)
        for got, ids in zip(receiver[1][0].received, steps[0], strict=True)
        for row, a in zip(got, activations(2, ids), strict=True)
    ]
    assert sum(rows) == lost, exact


def test_a_crash_between_decoding_and_writing_costs_one_whole_visit(tmp_path: Path) -> None:
    delta, steps = Delta(cache="disk"), [[[0, 1], [2, 3], [4, 5]]]
    sender, _ = both(tmp_path, delta, [Start(steps * 2, lost_writes=2), Start(steps * 2)])
    normal, after = sender[0][1].sent_bytes, sender[1][0].sent_bytes
    assert normal < after < sender[0][0].sent_bytes
    assert sender[1][1].sent_bytes == normal
