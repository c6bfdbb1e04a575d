"""Law: buffers take the pages of others of their size, and there are never more of them than once were in use."""

from __future__ import annotations

import array
import ctypes
import mmap
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from acsgd.optim import pages
from acsgd.optim.pages import PagePool, Pages

KIB = 1 << 10
SIZES = (4 * KIB, 64 * KIB, 64 * KIB, 64 * KIB, 100 * KIB + 1, 100 * KIB + 1, 256 * KIB, 256 * KIB)
ENTRY_BYTES = 8
"""Size of what /proc/self/pagemap says of a page: its two highest bits, whether it is in memory or swapped."""


@pytest.fixture(params=["moved", "dropped"])
def moves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether the system moves pages. Pages of other buffers are none of huge pages that they would share."""
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", mmap.MADV_NOHUGEPAGE)
    if request.param == "dropped":
        monkeypatch.setattr(pages, "_mremap", None)
    return request.param == "moved"


def resident_pages(pages: Pages) -> int:
    """Return how many pages of a buffer are in memory, or were swapped."""
    first, count = pages.buffer.data_ptr() // mmap.PAGESIZE, -(-pages.nbytes // mmap.PAGESIZE)
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(first * ENTRY_BYTES)
        entries = array.array("Q", file.read(count * ENTRY_BYTES))
    return sum(entry >> 62 > 0 for entry in entries)


def test_a_buffer_has_the_values_of_its_last_use_alone(moves: bool) -> None:
    draw, pool = random.Random(0), PagePool()
    buffers, used = [Pages(size) for size in SIZES], dict[int, int]()
    addresses = [each.buffer.data_ptr() for each in buffers]
    for number in range(400):
        i = draw.randrange(len(buffers))
        if i in used:
            assert bool((buffers[i].buffer == used.pop(i)).all())
            pool.give(buffers[i])
        else:
            pool.take(buffers[i])
            used[i] = number % 251 + 1
            buffers[i].buffer.fill_(used[i])
        assert all(bool((buffers[each].buffer == value).all()) for each, value in used.items())
    assert [each.buffer.data_ptr() for each in buffers] == addresses
    pool.drop()
    assert all(not each.buffer.any() for i, each in enumerate(buffers) if i not in used)


def test_no_more_pages_are_kept_than_were_in_use(moves: bool) -> None:
    draw, pool = random.Random(1), PagePool()
    buffers, used, peak = [Pages(size) for size in SIZES], list[Pages](), 0
    for _ in range(200):
        each = draw.choice(buffers)
        if each in used:
            used.remove(each)
            pool.give(each)
        elif len(used) < 3:
            used.append(each)
            peak = max(peak, sum(-(-each.nbytes // mmap.PAGESIZE) for each in used))
            pool.take(each)
            each.buffer.fill_(1)
        assert sum(map(resident_pages, used)) <= sum(map(resident_pages, buffers)) <= peak
    assert peak


def test_pages_are_moved_where_the_system_can(moves: bool) -> None:
    ctypes.set_errno(0)
    one, other = Pages(64 * KIB), Pages(64 * KIB)
    one.buffer.fill_(1)
    other.buffer.fill_(2)
    one.move_from(other)
    if moves and ctypes.get_errno() in pages._UNSUPPORTED:
        pytest.skip("this system moves no pages")
    assert not other.buffer.any()
    assert torch.equal(one.buffer, torch.full_like(one.buffer, 2 if moves else 1))
