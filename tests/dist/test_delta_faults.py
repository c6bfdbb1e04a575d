"""Delta links when files are restored, numbers are not finite, a disk is full or an end dies: only bytes are lost."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
from collections.abc import Iterator
from functools import partial
from itertools import chain
from math import inf, nan
from pathlib import Path
from typing import Any

from lib.links import (
    MICRO,
    LinkSession,
    Scenario,
    Step,
    cache_file,
    exact_samples,
    run_both_ends,
    run_scenarios,
)
from lib.processes import WAIT_S, started
from torch import Tensor

from acsgd.errors import RunError
from acsgd.pp.wire.cache import EntryKey
from acsgd.pp.wire.cache_disk import DiskStore
from acsgd.pp.wire.delta import Delta
from acsgd.streams import StreamEvent

DISK = Delta(cache="disk")
STEPS: list[Step] = [[[0, 1], [2, 3], [4, 5]]]
ALL = set(range(6))
KILLED = 9


def backup(rank: int, directory: Path) -> None:
    file = cache_file(rank, directory)
    shutil.copy(file, file.with_suffix(".copy"))


def restore(rank: int, directory: Path) -> None:
    file = cache_file(rank, directory)
    shutil.copy(file.with_suffix(".copy"), file)


def restore_at_receiver(rank: int, directory: Path) -> None:
    if rank == 1:
        restore(rank, directory)


def epochs(samples: int, count: int, seed: int) -> list[Step]:
    """Return steps of two micro-batches, with every sample once per epoch, in a random order."""
    draw, steps = random.Random(seed), []
    for _ in range(count):
        order = draw.sample(range(samples), samples)
        micros = [order[i : i + MICRO] for i in range(0, samples, MICRO)]
        steps += [micros[i : i + 2] for i in range(0, len(micros), 2)]
    return steps


def test_old_files_moved_boundaries_and_other_capacities(tmp_path: Path) -> None:
    old = [LinkSession(STEPS * 2), LinkSession(STEPS, edit=backup)]
    moved = [LinkSession(STEPS), LinkSession(STEPS * 2, layer="block-00004"), LinkSession(STEPS)]
    bounded = [LinkSession(epochs(12, 3, seed), capacity=capacity) for seed, capacity in enumerate((5, 2, 9))]
    runs = run_both_ends(
        tmp_path,
        {
            "restored at both": Scenario(DISK, [*old, LinkSession(STEPS * 2, edit=restore)]),
            "restored at one": Scenario(DISK, [*old, LinkSession(STEPS * 2, edit=restore_at_receiver)]),
            "moved": Scenario(DISK, moved),
            "bounded": Scenario(DISK, bounded),
        },
    )
    for name, lost in {"restored at both": set[int](), "restored at one": ALL}.items():
        sender, receiver = runs[name]
        assert exact_samples(3, STEPS * 2, receiver[2]) == [lost, set()], "an old file is of use if both ends have it"
        assert sender[0][-1].entries != sender[1][-1].entries, name
    _, receiver = runs["moved"]
    assert exact_samples(0, STEPS, receiver[0]) == [ALL]
    assert exact_samples(1, STEPS * 2, receiver[1]) == [ALL, set()]
    assert exact_samples(3, STEPS, receiver[2]) == [set()], "back at its first place, it finds its file"
    _, receiver = runs["bounded"]
    first = 0
    for number, (session, records) in enumerate(zip(bounded, receiver, strict=True)):
        per_step = exact_samples(first, session.steps, records)
        misses = [len(set().union(*per_step[i : i + 3])) for i in range(0, len(per_step), 3)]
        assert misses[1:] == [12 - session.capacity] * 2, "every epoch has the same number of hits"
        assert misses[0] < 12 if number else misses[0] == 12
        first += len(session.steps)


def test_step_with_nan_leaves_both_caches_unchanged(tmp_path: Path) -> None:
    scenarios = {
        f"{delta} {value}": Scenario(delta, [LinkSession(STEPS * 5, poison=(2, 3, value))])
        for delta in (DISK, Delta(step=1.0, first_bits=4))
        for value in (nan, inf)
    }
    for name, ((sender,), (receiver,)) in run_both_ends(tmp_path, scenarios).items():
        before, during, after = (sender[step].entries for step in (1, 2, 3))
        for sample in ALL:
            assert (before[sample] == during[sample]) is (sample in (2, 3)), (name, "that micro-batch, and no other")
            assert during[sample] != after[sample], name
        for step, record in enumerate(receiver):
            assert [bool(x.isfinite().all()) for x in record.received] == [True, step != 2, True], name
        if not scenarios[name].delta.first_bits:
            assert exact_samples(0, STEPS * 2, receiver[:2]) == [ALL, set()], name
            assert exact_samples(3, STEPS * 2, receiver[3:]) == [set(), set()], name


@contextlib.contextmanager
def full_disk(rank: int, *, at: int, fits: int) -> Iterator[None]:
    """Let rank `at` have no space from its 10th to its 15th write, except for `fits` bytes."""
    pwritev, writes = os.pwritev, 0

    def full(file: int, parts: list[Any], offset: int) -> int:
        nonlocal writes
        writes += 1
        if rank != at or not 10 <= writes <= 15:
            return pwritev(file, parts, offset)
        if fits:
            return os.pwrite(file, b"".join(map(bytes, parts))[:fits], offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.pwritev = full
    yield
    os.pwritev = pwritev


def test_entries_that_a_full_disk_loses_are_cache_misses(tmp_path: Path) -> None:
    epoch = [[[i, i + 1], [i + 2, i + 3], [i + 4, i + 5]] for i in (0, 6, 12)]
    scenarios = {
        f"rank {at}, {fits} bytes fit": Scenario(DISK, [LinkSession(epoch * 4)], partial(full_disk, at=at, fits=fits))
        for at, fits in ((0, 0), (1, 0), (1, 40))
    }
    for name, ((sender,), (receiver,)) in run_both_ends(tmp_path, scenarios).items():
        for micros, ours, theirs in zip(epoch * 4, sender, receiver, strict=True):
            for sample in chain(*micros):
                assert ours.entries[sample] == theirs.entries[sample], (name, sample)
        lost = [{9, 10, 11}, {12, 13, 14}]  # of writes 10 to 12 and 13 to 15
        assert exact_samples(0, epoch * 4, receiver)[3:] == [set(), *lost, *[set()] * 6], name


def until_killed(rank: int, at_write: int, *args: Any) -> None:
    """Run scenarios in which rank 1 is killed before it writes an entry for the `at_write`-th time."""
    write, writes = DiskStore.write, 0

    def last(store: DiskStore, slot: int, entry: Tensor, key: EntryKey, event: StreamEvent) -> None:
        nonlocal writes
        writes += 1
        if rank == 1 and writes == at_write:
            for pending in store._writes.values():
                pending.result()
            os._exit(KILLED)
        write(store, slot, entry, key, event)

    DiskStore.write = last  # type: ignore[method-assign]
    try:
        run_scenarios(rank, 2, *args)
    except RunError:
        return
    raise AssertionError("the other end continued alone")


def test_end_that_dies_between_decoding_and_writing_loses_what_it_had_not_written(tmp_path: Path) -> None:
    killed = {"": Scenario(DISK, [LinkSession(STEPS * 8)])}
    args = 4 * 6 + 4, tmp_path / "killed", tmp_path, killed
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(started(until_killed, rank, *args)) for rank in range(2)]
        for process in ranks:
            process.join(WAIT_S)
        assert [process.exitcode for process in ranks] == [0, KILLED]
    _, (receiver,) = run_both_ends(tmp_path, {"": Scenario(DISK, [LinkSession(STEPS * 2)])})[""]
    first, second = exact_samples(0, STEPS * 2, receiver)
    assert 3 in first, "its version differs at the end that lives"
    assert first <= {3, 4, 5}, "the others were written before"
    assert second == set()
