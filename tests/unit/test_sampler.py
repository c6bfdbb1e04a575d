"""Laws of the sampler, and of the micro-batches that replicas get."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from acsgd.io.data.sampler import Sampler, block_counts, deal, shuffled

MIXTURE = Sampler(seed=7, batch=12, counts=(3, 7), sizes=(11, 40))


def keys(number: int, count: int) -> np.ndarray:
    """Return `count` equal keys."""
    return np.full(count, number, dtype=np.uint64)


def test_a_shuffle_is_a_permutation() -> None:
    for size in (1, 2, 3, 4, 5, 16, 17, 100, 4097):
        for key in range(3):
            order = shuffled(np.arange(size), size, keys(key, size))
            assert sorted(order) == list(range(size)), size
        one = shuffled(np.array([size // 2]), size, keys(2, 1))
        assert one[0] == order[size // 2], size


def test_a_shuffle_is_uniform_in_every_position() -> None:
    """Chi-square of (size - 1)^2 degrees of freedom: mean d, deviation sqrt(2 d)."""
    draws = 2000
    for size in (2, 3, 5, 8, 16):
        orders = shuffled(np.tile(np.arange(size), draws), size, np.repeat(np.arange(draws, dtype=np.uint64), size))
        table = np.zeros((size, size))
        np.add.at(table, (np.tile(np.arange(size), draws), orders), 1)
        freedom = (size - 1) ** 2
        chi_square = ((table - draws / size) ** 2 / (draws / size)).sum()
        assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom), size


def test_all_orders_of_three_are_drawn_equally_often() -> None:
    draws = 6000
    orders = shuffled(np.tile(np.arange(3), draws), 3, np.repeat(np.arange(draws, dtype=np.uint64), 3))
    counts = Counter(map(tuple, orders.reshape(draws, 3).tolist()))
    assert len(counts) == 6
    assert all(abs(count - 1000) < 5 * np.sqrt(1000) for count in counts.values())


def test_every_epoch_has_each_sequence_once_in_a_new_order() -> None:
    sources, indices, *_ = (np.concatenate(f) for f in zip(*map(MIXTURE.samples, range(200)), strict=True))
    for source, size in enumerate(MIXTURE.sizes):
        visits = indices[sources == source]
        epochs = visits[: len(visits) // size * size].reshape(-1, size)
        assert len(epochs) > 10
        assert (np.sort(epochs, axis=1) == np.arange(size)).all()
        assert len({tuple(epoch) for epoch in epochs.tolist()}) == len(epochs)


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        ([1.0], (1,)),
        ([0.3, 0.7], (3, 7)),
        ([0.5, 0.25, 0.25], (2, 1, 1)),
        ([1 / 3, 2 / 3], (1, 2)),
        ([1 / 7] * 7, (1,) * 7),
        ([0.999, 0.001], (999, 1)),
    ],
)
def test_weights_hold_exactly_over_each_block(weights: list[float], counts: tuple[int, ...]) -> None:
    assert block_counts(weights) == counts
    sampler = Sampler(seed=1, batch=sum(counts), counts=counts, sizes=(5,) * len(counts))
    orders = []
    for block in range(6):
        sources = sampler.samples(block).sources
        assert tuple(np.bincount(sources, minlength=len(counts))) == counts
        orders.append(tuple(sources))
    assert len(counts) == 1 or len(set(orders)) > 1


def test_any_weights_hold_to_a_thousandth_and_keep_every_source() -> None:
    for weights in ([np.pi / 4, 1 - np.pi / 4], [1e-6, 1 - 1e-6], [0.12345, 0.54321, 0.33334]):
        counts = block_counts(weights)
        assert min(counts) >= 1, weights
        assert np.allclose(np.array(counts) / sum(counts), weights, rtol=0, atol=1.5e-3), weights


def test_the_stream_of_samples_does_not_depend_on_the_batch() -> None:
    def stream(batch: int) -> list[int]:
        sampler = Sampler(MIXTURE.seed, batch, MIXTURE.counts, MIXTURE.sizes)
        return np.concatenate([sampler.samples(step).ids for step in range(111 // batch)]).tolist()

    for batch in (1, 3, 10, 12, 37):
        assert stream(batch) == stream(111)[: len(stream(batch))], batch


def test_a_late_step_of_large_sources_can_be_sampled() -> None:
    large = Sampler(seed=2**63 - 1, batch=4, counts=(400, 600), sizes=(10**9, 3))
    sources, indices, ids, _ = large.samples(10**12)
    assert len(sources) == 4
    assert (indices < np.array(large.sizes)[sources]).all()
    assert (ids == indices + np.array([0, 10**9])[sources]).all()


def test_sample_ids_identify_the_sequences_of_a_mixture() -> None:
    seen: dict[int, tuple[int, int]] = {}
    for step in range(50):
        for source, index, sample, _ in zip(*MIXTURE.samples(step), strict=True):
            assert seen.setdefault(int(sample), (source, index)) == (source, index)
    assert sorted(seen) == list(range(sum(MIXTURE.sizes)))


def test_seeds_give_different_orders() -> None:
    orders = {tuple(Sampler(s, 12, MIXTURE.counts, MIXTURE.sizes).samples(0).ids) for s in range(20)}
    assert len(orders) == 20


def test_the_order_of_a_seed_never_changes() -> None:
    """A resumed run continues in the same order with any version of its libraries."""
    assert MIXTURE.samples(0).ids.tolist() == [33, 31, 12, 48, 25, 9, 49, 2, 11, 10, 32, 39]


def test_micro_batches_are_dealt_in_order_and_evenly() -> None:
    for micros, replicas in itertools.product([1, 4, 6, 7], [1, 2, 3, 4]):
        parts = deal(micros, [1.0] * replicas)
        assert list(itertools.chain(*parts)) == list(range(micros)), (micros, replicas)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1, (micros, replicas)


SPEEDS = ((1.0, 1.0), (1.0, 1.9), (1.0, 3.0), (2.0, 0.1, 1.0), (1.0, 0.0, 1.5), (0.0, 7.0))


@pytest.mark.parametrize(("micros", "fill"), list(itertools.product([1, 2, 4, 7, 12], [0.0, 2.5])))
@pytest.mark.parametrize("speeds", SPEEDS)
def test_no_other_split_lets_the_replicas_finish_earlier(micros: int, fill: float, speeds: tuple[float, ...]) -> None:
    def end(counts: Sequence[int]) -> float:
        return max((count + fill) / speed for count, speed in zip(counts, speeds, strict=True) if count)

    parts = deal(micros, speeds, fill)
    counts = [len(part) for part in parts]
    assert list(itertools.chain(*parts)) == list(range(micros))
    working = sum(speed > 0 for speed in speeds)
    splits = [
        split
        for split in itertools.product(range(micros + 1), repeat=len(speeds))
        if sum(split) == micros
        and all(speed > 0 or not count for count, speed in zip(split, speeds, strict=True))
        and sum(count > 0 for count in split) == min(micros, working)
    ]
    assert tuple(counts) in splits
    if micros >= working:
        assert end(counts) == min(map(end, splits))
