"""Deterministic sampler: the samples of a step are a function of the seed and the step, computed in O(1).

The global batch is ordered, cut into micro-batches, and these are dealt to replicas. So the samples of a step depend
neither on the number of ranks nor on whether the run was resumed.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

BLOCK = 1000
"""Maximum length of a block of the mixture, samples. Every block has the same number of samples of each source."""


def deal(micros: int, speeds: Sequence[float], fill: float = 0.0) -> tuple[range, ...]:
    """Return the micro-batches of the global batch of each replica: contiguous ranges in the order of the replicas.

    The replicas finish as early as any split allows in which each has at least one micro-batch, if there are enough.
    With equal speeds, their counts differ by at most 1.

    speeds: micro-batches per time of each replica; those with 0 get none. fill: time to fill and drain the pipeline of
    a replica, in micro-batches.
    """
    counts = [0] * len(speeds)
    ends = [(0.0, -replica) for replica, speed in enumerate(speeds) if speed > 0]
    heapq.heapify(ends)
    for _ in range(micros):
        replica = -ends[0][1]
        counts[replica] += 1
        heapq.heapreplace(ends, ((counts[replica] + 1 + fill) / speeds[replica], -replica))
    return tuple(range(start, stop) for start, stop in pairwise(accumulate(counts, initial=0)))


_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
"""Increment of SplitMix64."""


class Samples(NamedTuple):
    """Samples of a global batch, as four arrays [n]."""

    sources: Ints
    """Index of the source in the mixture."""
    indices: Ints
    """Index of the sequence in its source; of a streamed source the number of its earlier samples in the run."""
    ids: Ints
    """Sample id: index of the sequence in the concatenation of all sources, the same in every epoch. Samples of
    streamed sources have ids above these, each its own."""
    epochs: Ints
    """Number of earlier epochs of the source; 0 if it is streamed."""

    def expanded(self, unit: int) -> Samples:
        """Return the sequences of samples that consist of `unit` consecutive ones each."""
        sources, indices, ids, epochs = (np.repeat(field, unit) for field in self)
        offsets = np.arange(len(ids)) % unit
        return Samples(sources, indices * unit + offsets, ids * unit + offsets, epochs)

    def dealt(self, unit: int = 1) -> Samples:
        """Return the samples in the order in which they are dealt to micro-batches and replicas.

        Sorted by a hash of the sample id. So a sequence has about the same position in every batch and mostly returns
        to the same replica, whose links may have its activations in their caches. unit: number of consecutive samples
        that stay together.
        """
        order = np.argsort(_mix((self.ids // unit).astype(np.uint64)), kind="stable")
        return Samples(*(field[order] for field in self))


@dataclass(frozen=True)
class Sampler:
    """Samples of each step, a pure function of these fields and the step.

    The stream of samples consists of blocks. Each source has a fixed number of slots per block, in an order drawn per
    block. The slots of a source take its sequences, each once per epoch, in an order drawn per epoch.
    """

    seed: int
    batch: int
    """Global batch size, sequences per step over all replicas."""
    counts: tuple[int, ...]
    """Slots of each source per block: `block_counts`. (1,) = no weights: all sources are sampled as one."""
    sizes: tuple[int | None, ...]
    """Number of sequences of each source; None for a streamed one, which has to have a weight beside others."""
    unit: int = 1
    """Number of consecutive sequences of a source that are drawn together; divides `batch` and `sizes`."""

    @property
    def num_known(self) -> int:
        """Number of sequences of all sources that are not streamed."""
        return sum(size or 0 for size in self.sizes)

    def steps_of(self, epochs: float) -> int:
        """Return the number of steps of some epochs: of that many times the sequences of all sources, rounded up."""
        return math.ceil(Fraction(str(epochs)) * self.num_known / self.batch)

    def epochs(self, steps: int) -> tuple[float, ...]:
        """Return how often each source, or all of them sampled as one, are passed through in a number of steps.

        0 for streamed sources.
        """
        samples = steps * self.batch / sum(self.counts)
        sizes = (math.inf if size is None else size for size in self._sizes)
        return tuple(samples * count / size for count, size in zip(self.counts, sizes, strict=True))

    def drawn_before(self, step: int) -> tuple[int, ...]:
        """Return the number of samples of each source, or of all of them sampled as one, in all steps before one."""
        block, offset = divmod(step * self.batch, sum(self.counts))
        drawn = self._sources_of(np.array([block]))[0, :offset]
        return tuple(block * count + int((drawn == source).sum()) for source, count in enumerate(self.counts))

    def samples(self, step: int) -> Samples:
        """Return the global batch of a step, counted from 0. The cost does not depend on the step."""
        if self.unit > 1:
            sizes = tuple(None if size is None else size // self.unit for size in self.sizes)
            units = replace(self, batch=self.batch // self.unit, sizes=sizes, unit=1)
            return units.samples(step).expanded(self.unit)
        drawn, draws = self._draws(step)
        indices, ids, epochs = (np.zeros_like(draws) for _ in range(3))
        start = 0
        for source, size in enumerate(self._sizes):
            mine = drawn == source
            if size is None:
                indices[mine] = draws[mine]
                ids[mine] = self._id_of_streamed(source, draws[mine])
                continue
            epochs[mine], positions = np.divmod(draws[mine], size)
            indices[mine] = shuffled(positions, size, order_key(self.seed, source, epochs[mine]))
            ids[mine] = start + indices[mine]
            start += size
        if len(self._sizes) == len(self.sizes):
            return Samples(drawn, indices, ids, epochs)
        starts = np.cumsum([0, *(size or 0 for size in self.sizes[:-1])])
        sources = np.searchsorted(starts, ids, side="right") - 1
        return Samples(sources, ids - starts[sources], ids, epochs)

    def _id_of_streamed(self, source: int, draws: Ints) -> Ints:
        """Return the ids of samples of a streamed source, which do not depend on the length of the source."""
        streamed = [each for each, size in enumerate(self.sizes) if size is None]
        return self.num_known + draws * len(streamed) + streamed.index(source)

    @property
    def _sizes(self) -> tuple[int | None, ...]:
        """Number of sequences of each source; without weights, of all sources together."""
        return self.sizes if len(self.counts) == len(self.sizes) else (self.num_known,)

    def _draws(self, step: int) -> tuple[Ints, Ints]:
        """Return the source of each sample of a step, and the number of earlier samples of that source in the run."""
        size, first = sum(self.counts), step * self.batch
        if len(self.counts) == 1:  # all slots are of this source
            return np.zeros(self.batch, dtype=np.int64), first + np.arange(self.batch)
        blocks = np.arange(first // size, (first + self.batch - 1) // size + 1)
        sources = self._sources_of(blocks)
        draws = np.empty_like(sources)
        for source, count in enumerate(self.counts):
            mine = sources == source
            draws[mine] = (np.cumsum(mine, axis=1) - 1 + count * blocks[:, None])[mine]
        here = slice(first % size, first % size + self.batch)
        return sources.ravel()[here], draws.ravel()[here]

    def _sources_of(self, blocks: Ints) -> Ints:
        """Return the source of each slot of some blocks, [blocks, slots]."""
        size = sum(self.counts)
        slots = np.tile(np.arange(size), len(blocks))
        drawn = shuffled(slots, size, _key(self.seed, 0, np.repeat(blocks, size)))
        return np.searchsorted(np.cumsum(self.counts), drawn, side="right").reshape(len(blocks), size)


def block_counts(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the number of slots of each source per block, at least 1, for weights that sum to 1.

    The weights are met exactly if some block of at most BLOCK samples can, else within about 1 / BLOCK.
    """
    for size in range(1, BLOCK + 1):
        counts = [round(weight * size) for weight in weights]
        if min(counts) and np.allclose(np.array(weights) * size, counts, rtol=0, atol=1e-6):
            return tuple(counts)
    return tuple(max(1, round(weight * BLOCK)) for weight in weights)


def shuffled(positions: Ints, size: int, keys: NDArray[np.uint64]) -> Ints:
    """Return the image of each position under the permutation of range(size) that its key selects.

    positions, keys: arrays of the same length. A Feistel network on the next power of four, iterated until the result
    is in range (cycle walking: Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). Costs O(1) per
    position and does not depend on the version of a library.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    values = positions.astype(np.uint64)
    outside = np.ones(len(values), dtype=bool)
    while outside.any():
        values[outside] = _feistel(values[outside], half, keys[outside])
        outside = values >= size
    return values.astype(np.int64)


def random_words(seed: int, count: int) -> NDArray[np.uint64]:
    """Return the first numbers of SplitMix64 with a seed below 2**64."""
    return _mix(np.array([seed], dtype=np.uint64) + np.arange(count, dtype=np.uint64) * _INCREMENT)


def _feistel(values: NDArray[np.uint64], half: np.uint64, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Permute the numbers of 2 * `half` bits with 8 Feistel rounds."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for _ in range(8):
        keys = _mix(keys)
        left, right = right, left ^ (_mix(keys ^ right) & mask)
    return (left << half) | right


def order_key(seed: int, source: int, counters: Ints) -> NDArray[np.uint64]:
    """Return the key of the order of a source for each counter: epoch, or segment of a streamed source."""
    return _key(seed, 1 + source, counters)


def _key(seed: int, purpose: int, counters: Ints) -> NDArray[np.uint64]:
    """Return a pseudo-random key for each counter."""
    base = _mix(_mix(np.array([seed], dtype=np.uint64)) ^ np.uint64(purpose))
    return _mix(base ^ counters.astype(np.uint64))


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply one step of SplitMix64 (Steele, Lea and Flood 2014)."""
    x = x + _INCREMENT
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
