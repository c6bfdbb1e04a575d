"""Laws of a link that remembers, when its files, its disk, its numbers or one of its ends fail: only bytes are lost."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import shutil
from collections.abc import Sequence
from itertools import chain
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import test_delta
import torch
from lib.ranks import on_ranks
from test_delta import ENTRY, FILE_HEADER, MICRO, Sabotage, Seen, Start, Step, both, run_starts
from torch import Tensor

from acsgd.errors import RunError
from acsgd.pp.wire.cache import ActivationCache, EntryKey
from acsgd.pp.wire.cache_disk import DiskStore
from acsgd.pp.wire.delta import Delta
from acsgd.streams import Mark

DISK = Delta(cache="disk")
PLACE_BYTES = 2 * ENTRY + 4 + 20  # fp16, padded to 16 bytes; sample, version and checksum
STEPS: list[Step] = [[[0, 1], [2, 3], [4, 5]]]
ENDS = "sender", "receiver"
KILLED = 9


def whole_rows(first_step: int, steps: Sequence[Step], seen: Sequence[Seen]) -> list[set[int]]:
    """Return by step which samples arrived bit for bit, which those do that travel whole; seen: by the receiver."""
    found = []
    for step, (micros, one) in enumerate(zip(steps, seen, strict=True), start=first_step):
        ids = [*chain(*micros)]
        rows = zip(ids, torch.cat(one.received), test_delta.activations(step, ids), strict=True)
        found.append({sample for sample, got, sent in rows if torch.equal(got, sent)})
    return found


def spoil(directory: Path, rank: int, places: Sequence[int], offset: int) -> None:
    """Change a byte of some places in the file of a rank."""
    with (directory / f"block-00003.{ENDS[rank]}.hidden").open("r+b") as file:
        for place in places:
            position = FILE_HEADER + place * PLACE_BYTES + offset
            file.seek(position)
            byte = file.read(1)
            file.seek(position)
            file.write(bytes([byte[0] ^ 0x10]))


def both_lose_the_same(rank: int, directory: Path) -> None:
    spoil(directory, rank, [1, 4], 7)  # of equal versions: each end finds out by itself, when it reads


def each_loses_another(rank: int, directory: Path) -> None:
    spoil(directory, rank, [(1, 4)[rank]], 7)


def stamps_are_damaged(rank: int, directory: Path) -> None:
    spoil(directory, rank, [(1, 4)[rank]], PLACE_BYTES - 19)  # its sample: 256 * 16 more
    spoil(directory, rank, [(4, 1)[rank]], PLACE_BYTES - 9)  # its version


def all_files_are_gone_at_the_sender(rank: int, directory: Path) -> None:
    if rank == 0:
        (directory / "block-00003.sender.hidden").unlink()


def both_files_are_gone(rank: int, directory: Path) -> None:
    (directory / f"block-00003.{ENDS[rank]}.hidden").unlink()


@pytest.mark.parametrize(
    ("sabotage", "lost"),
    [
        (both_lose_the_same, {1, 4}),
        (each_loses_another, {1, 4}),
        (stamps_are_damaged, {1, 4}),
        (all_files_are_gone_at_the_sender, set(range(6))),
        (both_files_are_gone, set(range(6))),
    ],
)
def test_what_is_lost_at_either_end_or_both_travels_whole_once(
    sabotage: Sabotage, lost: set[int], tmp_path: Path
) -> None:
    _, receiver = both(tmp_path, DISK, [Start(STEPS * 2), Start(STEPS * 2, sabotage=sabotage)])
    assert whole_rows(2, STEPS * 2, receiver[1]) == [lost, set()]


def keep_a_copy(rank: int, directory: Path) -> None:
    file = directory / f"block-00003.{ENDS[rank]}.hidden"
    shutil.copy(file, file.with_suffix(".copy"))


def put_it_back(rank: int, directory: Path) -> None:
    file = directory / f"block-00003.{ENDS[rank]}.hidden"
    shutil.copy(file.with_suffix(".copy"), file)


def put_it_back_at_one_end(rank: int, directory: Path) -> None:
    if rank == 1:
        put_it_back(rank, directory)


@pytest.mark.parametrize(("restore", "lost"), [(put_it_back_at_one_end, set(range(6))), (put_it_back, set())])
def test_a_file_of_an_earlier_time_is_of_use_if_both_ends_have_it(
    restore: Sabotage, lost: set[int], tmp_path: Path
) -> None:
    starts = [Start(STEPS * 2), Start(STEPS, sabotage=keep_a_copy), Start(STEPS * 2, sabotage=restore)]
    sender, receiver = both(tmp_path, DISK, starts)
    assert whole_rows(3, STEPS * 2, receiver[2]) == [lost, set()]
    assert sender[0][-1].remembered != sender[1][-1].remembered


def test_a_boundary_that_moves_away_and_back_goes_on_with_what_it_left(tmp_path: Path) -> None:
    starts = [Start(STEPS), Start(STEPS * 2, cut="block-00004"), Start(STEPS)]
    _, receiver = both(tmp_path, DISK, starts)
    assert [whole_rows(*at) for at in ((0, STEPS, receiver[0]), (1, STEPS * 2, receiver[1]))] == [
        [set(range(6))],
        [set(range(6)), set()],
    ]
    assert whole_rows(3, STEPS, receiver[2]) == [set()]


def epochs(samples: int, count: int, seed: int) -> list[Step]:
    """Return steps of two micro-batches, in each epoch of which every sample comes once, in an order of its own."""
    draw, steps = random.Random(seed), []
    for _ in range(count):
        order = draw.sample(range(samples), samples)
        micros = [order[i : i + MICRO] for i in range(0, samples, MICRO)]
        steps += [micros[i : i + 2] for i in range(0, len(micros), 2)]
    return steps


def test_a_bounded_memory_finds_as_many_in_every_epoch_after_starts_with_less_and_more(tmp_path: Path) -> None:
    starts = [Start(epochs(12, 3, seed), capacity=capacity) for seed, capacity in enumerate((5, 2, 9))]
    _, receiver = both(tmp_path, DISK, starts)
    first = 0
    for number, (start, seen) in enumerate(zip(starts, receiver, strict=True)):
        per_step = whole_rows(first, start.steps, seen)
        whole = [len(set().union(*per_step[i : i + 3])) for i in range(0, len(per_step), 3)]
        assert whole[1:] == [12 - start.capacity] * 2
        assert whole[0] < 12 if number else whole[0] == 12
        first += len(start.steps)


# Faults within a start: put into the process of a rank before it begins.


def poisoned(rank: int, world_size: int, value: float, at: tuple[int, int], *args: Any) -> list[list[Seen]]:
    """Run starts in which one sample's activations of one step have something that is not finite."""
    plain = test_delta.activations

    def poison(step: int, ids: Sequence[int]) -> Tensor:
        x = plain(step, ids)
        for row, sample in zip(x, ids, strict=True):
            if (step, sample) == at:
                row[2, 3] = value
        return x

    test_delta.activations = poison
    return run_starts(rank, world_size, *args)


@pytest.mark.parametrize("delta", [DISK, Delta(step=1.0, first_bits=4)], ids=repr)
@pytest.mark.parametrize("value", [nan, inf])
def test_a_step_with_nan_leaves_both_ends_as_they_were(value: float, delta: Delta, tmp_path: Path) -> None:
    args = value, (2, 3), tmp_path / "store", delta, tmp_path / "activation-cache", [Start(STEPS * 5)]
    (sender,), (receiver,) = on_ranks(2, poisoned, *args)
    assert [seen.remembered for seen in sender] == [seen.remembered for seen in receiver]
    before, during, after = (sender[step].remembered for step in (1, 2, 3))
    for sample in range(6):
        assert (before[sample] == during[sample]) is (sample in (2, 3)), "all of that micro-batch, and no other"
        assert during[sample] != after[sample]
    for step, seen in enumerate(receiver):
        finite = [bool(x.isfinite().all()) for x in seen.received]
        assert finite == [True, step != 2, True]
    if not delta.first_bits:
        assert [len(rows) for rows in whole_rows(0, STEPS * 2, receiver[:2])] == [6, 0]
        assert whole_rows(3, STEPS * 2, receiver[3:]) == [set(), set()]


def on_a_full_disk(rank: int, world_size: int, full_at: int, wrote: int, *args: Any) -> list[list[Seen]]:
    """Run starts in which one end has no room from its 10th to its 15th write; wrote: bytes that still fit."""
    pwritev, writes = os.pwritev, 0

    def full(file: int, parts: list[Any], offset: int) -> int:
        nonlocal writes
        writes += 1
        if rank != full_at or not 10 <= writes <= 15:
            return pwritev(file, parts, offset)
        if wrote:
            return os.pwrite(file, b"".join(map(bytes, parts))[:wrote], offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.pwritev, test_delta.contents = full, readable
    return run_starts(rank, world_size, *args)


def readable(memory: ActivationCache) -> dict[int, tuple[int, bytes]]:
    """Return what a memory has, but for what is lost and not found out yet, as that has not been asked for."""
    found = {}
    for sample, (place, version) in memory._table.items():
        entry = memory._store.read(place, EntryKey(sample, version))
        if entry is not None:
            found[sample] = version, entry.numpy().tobytes()
    return found


@pytest.mark.parametrize(("full_at", "wrote"), [(0, 0), (1, 0), (1, 40)])
def test_a_disk_that_is_full_for_a_while_at_one_end_costs_whole_visits(
    full_at: int, wrote: int, tmp_path: Path
) -> None:
    epoch = [[[i, i + 1], [i + 2, i + 3], [i + 4, i + 5]] for i in (0, 6, 12)]
    args = full_at, wrote, tmp_path / "store", DISK, tmp_path / "activation-cache", [Start(epoch * 4)]
    (sender,), (receiver,) = on_ranks(2, on_a_full_disk, *args)
    for micros, one, other in zip(epoch * 4, sender, receiver, strict=True):
        for sample in chain(*micros):
            assert one.remembered[sample] == other.remembered[sample]
    lost = [{9, 10, 11}, {12, 13, 14}]  # of writes 10 to 12 and 13 to 15
    assert whole_rows(0, epoch * 4, receiver)[3:] == [set(), *lost, *[set()] * 6]


def until_killed(rank: int, at_put: int, *args: Any) -> None:
    """Run starts of which rank 1 does not survive what it has decoded for the `at_put`-th time."""
    put, puts = DiskStore.write, 0

    def last(store: DiskStore, place: int, entry: Tensor, stamp: EntryKey, mark: Mark) -> None:
        nonlocal puts
        puts += 1
        if rank == 1 and puts == at_put:
            for write in store._writes.values():
                write.result()
            os._exit(KILLED)
        put(store, place, entry, stamp, mark)

    DiskStore.write = last  # type: ignore[method-assign]
    try:
        run_starts(rank, 2, *args)
    except RunError:
        return
    raise AssertionError("the other end went on alone")


def test_an_end_that_dies_between_decoding_and_writing_costs_what_it_had_not_written(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    args = 4 * 6 + 4, tmp_path / "killed", DISK, tmp_path / "activation-cache", [Start(STEPS * 8)]
    ranks = [context.Process(target=until_killed, args=(rank, *args)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0, KILLED]
    _, (receiver,) = both(tmp_path, DISK, [Start(STEPS * 2)])
    first, second = whole_rows(0, STEPS * 2, receiver)
    assert 3 in first, "its version is another at the end that lives"
    assert first <= {3, 4, 5}, "the others were written before"
    assert second == set()
