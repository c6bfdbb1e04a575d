"""Held-out sequences for evaluation: the end of each training source, or separate sources.

Each sequence is evaluated once, by one replica. Which sequences are held out depends on the sources, data.sequence and
data.eval_fraction, not on the number of ranks.

Shapes: M micro-batches per batch, B sequences per micro-batch, T tokens per sequence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from acsgd.io.data.rows.base import RowReader
from acsgd.io.data.sampler import Ints, deal
from acsgd.io.data.sources.base import ReadOptions
from acsgd.io.data.sources.sources import DEFAULTS, WeightedSource, parse_sources
from acsgd.layers.batch import Batch
from acsgd.model_classes import IGNORED


def parse_eval(
    spec: str | None, fraction: float, *, options: Sequence[ReadOptions] = DEFAULTS
) -> tuple[WeightedSource, ...]:
    """Return the sources of data.eval_sources, an empty tuple if it is None. Reads no text.

    fraction: data.eval_fraction, in [0, 1). Raises ValueError as `parse_sources` does, if both options are given, or if
    the sources have weights.
    """
    if fraction and spec is not None:
        raise ValueError(f"data.eval_fraction={fraction} and data.eval_sources are both given; remove one of them")
    sources = () if spec is None else parse_sources(spec, key="data.eval_sources", options=options)
    if any(weight is not None for _, weight in sources):
        raise ValueError(
            f'data.eval_sources="{spec}": evaluation reads every sequence of every source; remove the weights'
        )
    return sources


def split(sequences: int, fraction: float, unit: int = 1) -> int:
    """Return the number of training sequences of a source; the `fraction` at its end is held out.

    Sequence i has the tokens i T + 1 .. (i + 1) T as targets, so no target is both trained on and held out. If
    fraction > 0, at least one sequence is held out and at least one is trained on. unit: number of consecutive
    sequences that stay together. Raises ValueError if the source has fewer than two.
    """
    if fraction == 0:
        return sequences
    if unit > 1:
        return unit * split(sequences // unit, fraction)
    if sequences < 2:
        raise ValueError(
            f"data.eval_fraction={fraction} needs at least two sequences in each source, but one has {sequences}; use "
            "a shorter data.sequence, a longer text, or data.eval_sources"
        )
    return min(max(1, sequences - round(sequences * fraction)), sequences - 1)


def held_out(
    training: RowReader, separate: RowReader, fraction: float, *, replicas: int, replica: int, unit: int = 1
) -> HeldOut | None:
    """Return the held-out data of one replica, None if nothing is held out.

    training: data.sources; separate: data.eval_sources, may be empty; fraction: data.eval_fraction, 0 if they are not;
    unit: see `split`. Raises ValueError if a source is too short.
    """
    if not separate.rows and fraction == 0:
        return None
    reader = separate if separate.rows else training
    sizes = [len(rows) for rows in reader.rows]
    return HeldOut(
        reader,
        [range(0 if separate.rows else split(size, fraction, unit), size) for size in sizes],
        replicas=replicas,
        replica=replica,
        notes=separate.notes,  # those of the training sources are in BatchReader.notes
    )


@dataclass(frozen=True)
class HeldOut:
    """Reads one replica's batches of the held-out sequences. They are the same in every evaluation."""

    rows: RowReader
    ranges: Sequence[range]
    """Held-out rows of each source, contiguous."""
    replicas: int
    replica: int
    """Index of this replica."""
    notes: tuple[str, ...] = ()
    """Sentences for the user on the rows of each source of data.eval_sources."""

    def __len__(self) -> int:
        """Return the number of sequences, over all replicas."""
        return sum(map(len, self.ranges))

    def fingerprint(self) -> str:
        """Return a string that differs between hosts with different held-out data."""
        return f"{list(self.ranges)} {self.rows.fingerprint()}"

    def batches(self, micros: int, idle: Collection[int] = (), *, even: bool = False) -> Iterator[Batch]:
        """Yield this replica's sequences in batches of M = `micros` micro-batches; may be empty.

        idle: replicas that evaluate nothing. even: as many batches on each replica, the last ones only padding.
        The last batch is padded with copies of the last sequence whose labels are IGNORED. Sample ids and micro
        ids are indices in the held-out set, not those of training samples.
        """
        micro, mine = self.rows.micro, self._shares(idle)[self.replica]
        count = self.most_batches(micros, idle) if even else -(-len(mine) // micros)
        for first in range(mine.start, mine.start + count * micros, micros):
            yield self._batch(range(first, first + micros), end=min(mine.stop * micro, len(self)))

    def most_batches(self, micros: int, idle: Collection[int] = ()) -> int:
        """Return the highest number of batches of any replica if each of them has M = `micros` micro-batches or more.

        idle: see `batches`.
        """
        return max(-(-len(share) // micros) for share in self._shares(idle))

    def _shares(self, idle: Collection[int]) -> Sequence[range]:
        """Return the micro-batches of each replica."""
        return deal(-(-len(self) // self.rows.micro), [float(replica not in idle) for replica in range(self.replicas)])

    def _batch(self, micro_ids: range, end: int) -> Batch:
        """Read micro-batches; positions from `end` on in the held-out set are padding."""
        positions = np.arange(micro_ids.start * self.rows.micro, micro_ids.stop * self.rows.micro)
        sample_ids = torch.from_numpy(np.minimum(positions, max(end, 1) - 1)).view(len(micro_ids), self.rows.micro)
        rows = self.rows.read(*self._locate(sample_ids.flatten().numpy()))
        if rows.labels is not None:
            rows.labels.flatten(0, 1)[positions >= end] = IGNORED
        return Batch(rows.inputs, rows.labels, sample_ids, micro_ids, longest_rows=rows.longest_rows)

    def _locate(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return the source of each position in the held-out set, and the index of the sequence in that source."""
        sizes = np.array([len(indices) for indices in self.ranges])
        starts = np.array([indices.start for indices in self.ranges])
        ends = np.cumsum(sizes)
        sources = np.searchsorted(ends, positions, side="right")
        return sources, positions - (ends - sizes)[sources] + starts[sources]
