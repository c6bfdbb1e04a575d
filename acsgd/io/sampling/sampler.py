"""Which samples each step trains on: a function of the seed and the step alone, in O(1).

The global batch is put in order and cut into micro-batches, and these are dealt to replicas, so neither the number of
ranks nor the past of a run changes what is learnt from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

BLOCK = 1000
"""Largest number of samples over which a mixture's weights are met."""


def deal(micros: int, replicas: int, replica: int) -> range:
    """Return which micro-batches of the global batch a replica gets.

    Contiguous, in the order of the replicas, and no replica gets two more than another.
    """
    return range(micros * replica // replicas, micros * (replica + 1) // replicas)


class Samples(NamedTuple):
    """Samples of a global batch; three arrays [n]."""

    sources: Ints
    """Position of the sample's source in the mixture."""
    indices: Ints
    """Which of the source's sequences it is."""
    ids: Ints
    """One number per sequence of the whole mixture, the same in every epoch."""

    def dealt(self) -> Samples:
        """Return the same samples in the order in which they are dealt to micro-batches and replicas.

        It is that of a hash of their ids, so a sequence has about the same place in every batch it is in and mostly
        comes back to the replica where it was, whose links may remember it.
        """
        order = np.argsort(_mix(self.ids.astype(np.uint64)), kind="stable")
        return Samples(*(field[order] for field in self))


@dataclass(frozen=True)
class Sampler:
    """Which samples each step trains on: a pure function of these numbers and the step.

    The mixture comes in blocks, in each of which every source has its fixed number of places, in an order drawn
    per block. A source's places take its sequences, each once per epoch, in an order drawn per epoch.
    """

    seed: int
    batch: int
    """Sequences per step, over all replicas."""
    counts: tuple[int, ...]
    """Places of each source in a block, as `block_counts` gives them."""
    sizes: tuple[int, ...]
    """Sequences of each source."""

    def samples(self, step: int) -> Samples:
        """Return the global batch of a step, counted from 0, at a cost that does not depend on the step."""
        sources, visits = self._places(step)
        indices = np.empty_like(visits)
        for source, size in enumerate(self.sizes):
            mine = sources == source
            epochs, positions = np.divmod(visits[mine], size)
            indices[mine] = shuffled(positions, size, _key(self.seed, 1 + source, epochs))
        offsets = np.cumsum([0, *self.sizes[:-1]])
        return Samples(sources, indices, offsets[sources] + indices)

    def _places(self, step: int) -> tuple[Ints, Ints]:
        """Return the source of each sample, and how many samples of that source came before it in the run."""
        size, first = sum(self.counts), step * self.batch
        blocks = np.arange(first // size, (first + self.batch - 1) // size + 1)
        slots = np.tile(np.arange(size), len(blocks))
        drawn = shuffled(slots, size, _key(self.seed, 0, np.repeat(blocks, size)))
        sources = np.searchsorted(np.cumsum(self.counts), drawn, side="right").reshape(len(blocks), size)
        visits = np.empty_like(sources)
        for source, count in enumerate(self.counts):
            mine = sources == source
            visits[mine] = (np.cumsum(mine, axis=1) - 1 + count * blocks[:, None])[mine]
        here = slice(first % size, first % size + self.batch)
        return sources.ravel()[here], visits.ravel()[here]


def block_counts(weights: Sequence[float]) -> tuple[int, ...]:
    """Return how often each source appears in a block, for weights that sum to 1.

    The shares are exact where a block of at most BLOCK samples makes them so, else to within about 1 / BLOCK.
    Every source appears.
    """
    for size in range(1, BLOCK + 1):
        counts = [round(weight * size) for weight in weights]
        if min(counts) and np.allclose(np.array(weights) * size, counts, rtol=0, atol=1e-6):
            return tuple(counts)
    return tuple(max(1, round(weight * BLOCK)) for weight in weights)


def shuffled(positions: Ints, size: int, keys: NDArray[np.uint64]) -> Ints:
    """Return where a permutation of range(size), one per key, sends each position. Arrays of one length.

    A Feistel network on the next power of four, walked until it lands in range (Black and Rogaway 2002,
    "Ciphers with arbitrary finite domains"): any position costs O(1), and no library's version changes it.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    values = positions.astype(np.uint64)
    outside = np.ones(len(values), dtype=bool)
    while outside.any():
        values[outside] = _feistel(values[outside], half, keys[outside])
        outside = values >= size
    return values.astype(np.int64)


def _feistel(values: NDArray[np.uint64], half: np.uint64, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Permute the numbers of 2 * `half` bits."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for _ in range(8):
        keys = _mix(keys)
        left, right = right, left ^ (_mix(keys ^ right) & mask)
    return (left << half) | right


def _key(seed: int, purpose: int, counters: Ints) -> NDArray[np.uint64]:
    """Return a random number for each counter."""
    base = _mix(_mix(np.array([seed], dtype=np.uint64)) ^ np.uint64(purpose))
    return _mix(base ^ counters.astype(np.uint64))


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One step of SplitMix64 (Steele, Lea and Flood 2014): all bits of the result depend on all of x."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
