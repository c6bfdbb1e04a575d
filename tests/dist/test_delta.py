"""Delta links: the activation caches of both ends are equal, bit for bit, after every step, whatever is lost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lib.links import (
    FILE_HEADER_BYTES,
    LAYER,
    MICRO,
    SLOT_BYTES,
    SPEC,
    LinkSession,
    Scenario,
    StepRecord,
    activations,
    cache_file,
    exact_samples,
    flip_bits,
    random_steps,
    run_both_ends,
)
from torch import Tensor

from acsgd.codecs.base import wire_bytes
from acsgd.codecs.fixpoint import FixPoint
from acsgd.codecs.identity import Identity
from acsgd.pp.wire.delta import Delta
from acsgd.pp.wire.frame import HEADER_BYTES

DISK = Delta(cache="disk")
STEPS = [[[0, 1], [2, 3], [4, 5]]]
ALL = set(range(6))
DELTAS = [
    Delta(bits=4),
    Delta(bits=2, dims="token", cache="disk"),
    Delta(bits=3, cache_bits=8, cache="disk"),
    Delta(bits=4, cache_bits=4),
    Delta(bits=1, cache_bits=2, cache="disk"),
    Delta(step=1.0, first_bits=8, cache="disk"),
    Delta(bits=2, entropy_coding=True),
    Delta(step=1.0, transform=True, cache="disk"),
]


def test_caches_are_equal_after_every_step(tmp_path: Path) -> None:
    session = LinkSession(random_steps(0, 12, 12), exact_steps=2)
    run_both_ends(tmp_path, {repr(delta): Scenario(delta, [session]) for delta in DELTAS})


def test_receiver_gets_what_plain_arithmetic_gives(tmp_path: Path) -> None:
    steps = [[[(2 * micro + row + 3 * step) % 8 for row in range(MICRO)] for micro in range(3)] for step in range(8)]
    scenarios = {cache: Scenario(Delta(bits=4, cache=cache), [LinkSession(steps)]) for cache in ("ram", "disk")}  # type: ignore[arg-type]
    for name, (_, (records,)) in run_both_ends(tmp_path, scenarios).items():
        check_arithmetic(name, steps, records)


def check_arithmetic(name: str, steps: Sequence[list[list[int]]], records: Sequence[StepRecord]) -> None:
    codec, cached = FixPoint(4), dict[int, Tensor]()
    for step, (micros, record) in enumerate(zip(steps, records, strict=True)):
        for ids, got in zip(micros, record.received, strict=True):
            a = activations(step, ids)
            hits = [row for row, sample in enumerate(ids) if sample in cached]
            expected = a.clone()
            if hits:
                m = torch.stack([cached[ids[row]] for row in hits]).float()
                fields = codec.encode(a[hits] - m)
                expected[hits] = m + codec.decode(fields, tuple(m.shape), torch.float32)
            assert torch.equal(got, expected), (name, step, ids)
            cached.update({sample: row.half() for sample, row in zip(ids, expected, strict=True)})


def test_sent_bytes_are_those_declared(tmp_path: Path) -> None:
    delta = Delta(bits=3)
    session = LinkSession([[[0, 1], [2, 3]], [[0, 4], [2, 3]]])
    (records,), _ = run_both_ends(tmp_path, {"": Scenario(delta, [session])})[""]
    exact, shape = Identity(), SPEC.shape[1:]
    first = 2 * wire_bytes(exact.wire(SPEC.shape))
    mixed = wire_bytes(exact.wire((1, *shape)) + delta.codec.wire((1, *shape)))
    second = mixed + wire_bytes(delta.codec.wire(SPEC.shape))
    assert [record.sent_bytes for record in records] == [2 * HEADER_BYTES + 4 * 8 + n for n in (first, second)]


@pytest.mark.parametrize("capacities", [(5,), pytest.param((1, 11), marks=pytest.mark.soak)])
def test_full_cache_keeps_the_same_samples_whatever_the_order(capacities: tuple[int, ...], tmp_path: Path) -> None:
    grid = [(cache, capacity, seed) for cache in ("ram", "disk") for capacity in capacities for seed in range(2)]
    scenarios = {
        f"{cache} {capacity} {seed}": Scenario(
            Delta(cache=cache),  # type: ignore[arg-type]
            [LinkSession(random_steps(seed, 12, 25), capacity=capacity)],
        )
        for cache, capacity, seed in grid
    }
    runs = run_both_ends(tmp_path, scenarios)
    kept: dict[tuple[str, int], set[int]] = {}
    for cache, capacity, seed in grid:
        (records,), _ = runs[f"{cache} {capacity} {seed}"]
        assert max(len(record.entries) for record in records) == capacity, (cache, capacity, seed)
        last = set(records[-1].entries)
        assert kept.setdefault((cache, capacity), last) == last, (cache, capacity, seed)


def test_later_session_reuses_cache_files(tmp_path: Path) -> None:
    steps = random_steps(1, 10, 8)
    (first, second), _ = run_both_ends(tmp_path, {"": Scenario(DISK, [LinkSession(steps), LinkSession(steps)])})[""]
    assert second[0].sent_bytes == 3 * (HEADER_BYTES + wire_bytes(DISK.codec.wire(SPEC.shape))) + 6 * 8
    untouched = set(first[-1].entries) - {i for ids in steps[0] for i in ids}
    assert untouched
    assert {i: second[0].entries[i] for i in untouched} == {i: first[-1].entries[i] for i in untouched}


@pytest.mark.parametrize("change", [{"layer": "block-00002"}, {"fresh": True}], ids=["moved boundary", "fresh run"])
def test_cache_file_of_something_else_is_not_used(change: dict[str, Any], tmp_path: Path) -> None:
    sessions = [LinkSession(STEPS), LinkSession(STEPS, **change)]
    (first, second), _ = run_both_ends(tmp_path, {"": Scenario(DISK, sessions)})[""]
    assert second[0].sent_bytes == first[0].sent_bytes


# Edits of cache files between two sessions.


def remove_at_sender(rank: int, directory: Path) -> None:
    if rank == 0:
        cache_file(rank, directory).unlink()


def remove_at_receiver(rank: int, directory: Path) -> None:
    if rank == 1:
        cache_file(rank, directory).unlink()


def remove_at_both(rank: int, directory: Path) -> None:
    cache_file(rank, directory).unlink()


def corrupt_two_entries_of_sender(rank: int, directory: Path) -> None:
    if rank == 0:
        flip_bits(cache_file(rank, directory), [0, 2], 7)


def corrupt_same_entries_of_both(rank: int, directory: Path) -> None:
    flip_bits(cache_file(rank, directory), [1, 4], 7)  # versions are equal: each end finds out when it reads


def corrupt_another_entry_of_each(rank: int, directory: Path) -> None:
    flip_bits(cache_file(rank, directory), [(1, 4)[rank]], 7)


def corrupt_keys(rank: int, directory: Path) -> None:
    flip_bits(cache_file(rank, directory), [(1, 4)[rank]], SLOT_BYTES - 19)  # the sample: 256 * 16 more
    flip_bits(cache_file(rank, directory), [(4, 1)[rank]], SLOT_BYTES - 9)  # the version


def truncate_at_receiver(rank: int, directory: Path) -> None:
    if rank == 1:
        path = cache_file(rank, directory)
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 30)


def corrupt_header_at_sender(rank: int, directory: Path) -> None:
    if rank == 0:
        with cache_file(rank, directory).open("r+b") as file:
            file.write(b"x")


EDITS = {
    remove_at_sender: ALL,
    remove_at_receiver: ALL,
    remove_at_both: ALL,
    corrupt_two_entries_of_sender: {0, 2},
    corrupt_same_entries_of_both: {1, 4},
    corrupt_another_entry_of_each: {1, 4},
    corrupt_keys: {1, 4},
    truncate_at_receiver: {5},
    corrupt_header_at_sender: ALL,
}
"""Edit -> samples that it makes cache misses."""


def test_lost_entries_are_cache_misses_once(tmp_path: Path) -> None:
    scenarios = {
        edit.__name__: Scenario(DISK, [LinkSession(STEPS * 2), LinkSession(STEPS * 2, edit=edit)]) for edit in EDITS
    }
    runs = run_both_ends(tmp_path, scenarios)
    for edit, lost in EDITS.items():
        sender, receiver = runs[edit.__name__]
        assert exact_samples(2, STEPS * 2, receiver[1]) == [lost, set()], edit.__name__
        hits_only = sender[0][1].sent_bytes
        assert sender[1][0].sent_bytes > hits_only, edit.__name__
        assert sender[1][1].sent_bytes == hits_only, edit.__name__


def test_crash_between_decoding_and_writing_makes_cache_misses_once(tmp_path: Path) -> None:
    sessions = [LinkSession(STEPS * 2, lost_writes=2), LinkSession(STEPS * 2)]
    sender, _ = run_both_ends(tmp_path, {"": Scenario(DISK, sessions)})[""]
    hits_only, after = sender[0][1].sent_bytes, sender[1][0].sent_bytes
    assert hits_only < after < sender[0][0].sent_bytes
    assert sender[1][1].sent_bytes == hits_only


def test_layout_of_cache_files(tmp_path: Path) -> None:
    """The edits above find what they change."""
    run_both_ends(tmp_path, {"": Scenario(DISK, [LinkSession(STEPS)])})
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "0").iterdir()}
    expected = FILE_HEADER_BYTES + len(ALL) * SLOT_BYTES
    assert sizes == {f"{LAYER}.sender.hidden": expected, f"{LAYER}.receiver.hidden": expected}
