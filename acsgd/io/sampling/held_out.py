"""Sequences to evaluate on: the end of each training text, or texts of their own. Each is read once, by one replica.

Which sequences are held out depends on the sources, data.sequence and data.eval_fraction, not on the number of ranks.
"""

# M micro-batches of a batch, B sequences of a micro-batch, T tokens of a sequence

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from acsgd.io.sampling.batches import Batch
from acsgd.io.sampling.sampler import Ints, deal
from acsgd.io.sampling.tokens import Corpus, Tokens, in_micros, num_sequences, read_windows, sampled
from acsgd.io.sources.sources import OnBad, WeightedSource, parse_sources

NO_TARGET = -100
"""The label of a token that no loss is taken of."""


def parse_eval(spec: str | None, share: float, *, bad: OnBad = "stop") -> tuple[WeightedSource, ...]:
    """Return the sources of data.eval_sources, none if it is None, checked as `parse_sources` does. Reads no text.

    Raises ValueError, too, if `share` is no share, both are asked for, or sources have weights.
    """
    _check(share, separate=spec is not None)
    sources = () if spec is None else parse_sources(spec, key="data.eval_sources", bad=bad)
    if len({weight for _, weight in sources}) > 1:
        raise ValueError(
            f'data.eval_sources="{spec}": every sequence of every source is evaluated on; leave out weights'
        )
    return sources


def split(sequences: int, share: float) -> int:
    """Return how many of a source's sequences are trained on when `share` of them, its end, is held out.

    Sequence i has the tokens i T + 1 .. (i + 1) T as targets, so no target is both trained on and held out; the one
    token that the last trained and the first held-out sequence share is a target of the former only.
    If share > 0, at least one is held out and one trained on. Raises ValueError if that cannot be.
    """
    _check(share)
    if share == 0:
        return sequences
    if sequences < 2:
        raise ValueError(
            f"data.eval_fraction={share} needs two sequences or more of each source, but one has {sequences}; use a "
            "shorter data.sequence, a longer text, or data.eval_sources"
        )
    return min(max(1, sequences - round(sequences * share)), sequences - 1)


def held_out(
    trained: Sequence[Corpus],
    separate: Sequence[Corpus],
    share: float,
    *,
    sequence: int,
    micro: int,
    replicas: int,
    replica: int,
    wants_tokens: bool = True,
    wants_labels: bool = True,
) -> HeldOut | None:
    """Return the ends of the training texts, or all of separate texts, to evaluate on; None if neither is asked for.

    trained: the sources of data.sources; separate: those of data.eval_sources, if any; share: data.eval_fraction.
    Raises ValueError if both are asked for, or a source is too short.
    """
    _check(share, separate=bool(separate))
    if not separate and share == 0:
        return None
    corpora = [corpus.tokens for corpus in separate or trained]
    sizes = [num_sequences(tokens, sequence) for tokens in corpora]
    return HeldOut(
        corpora,
        [range(0 if separate else split(size, share), size) for size in sizes],
        sequence=sequence,
        micro=micro,
        replicas=replicas,
        replica=replica,
        wants_tokens=wants_tokens,
        wants_labels=wants_labels,
        # of the texts that are trained on, the training data tells
        notes=tuple(corpus.skipped for corpus in separate if corpus.skipped),
    )


@dataclass(frozen=True)
class HeldOut:
    """Makes one replica's batches of the sequences to evaluate on, the same ones whenever asked."""

    corpora: Sequence[Tokens]
    """Each source's tokens."""
    ranges: Sequence[range]
    """Which sequences of each source are held out, in steps of 1."""
    sequence: int
    """T."""
    micro: int
    """B."""
    replicas: int
    replica: int
    """Which of the replicas this is."""
    wants_tokens: bool = True
    wants_labels: bool = True
    notes: tuple[str, ...] = ()
    """What the user should know about texts that only evaluation reads: a sentence for each that was read in part."""

    def __len__(self) -> int:
        """Return the number of sequences, over all replicas."""
        return sum(map(len, self.ranges))

    def fingerprint(self) -> str:
        """Return what differs between two hosts whose texts, or whose shares of them, do."""
        return f"{list(self.ranges)} {sampled(self.corpora)}"

    def batches(self, micros: int) -> Iterator[Batch]:
        """Yield this replica's sequences in batches of M = `micros`; none if there are too few for this replica.

        Where the sequences run out, the rest of a batch repeats the last one with no targets. Sample ids and micro ids
        count within the held-out set, from 0, and are no ids of training samples.
        """
        mine = deal(-(-len(self) // self.micro), self.replicas, self.replica)
        for first in range(mine.start, mine.stop, micros):
            yield self._batch(range(first, first + micros), end=min(mine.stop * self.micro, len(self)))

    def _batch(self, micro_ids: range, end: int) -> Batch:
        """Read micro-batches; the held-out sequences from `end` on are not this replica's."""
        positions = np.arange(micro_ids.start * self.micro, micro_ids.stop * self.micro)
        padding = positions >= end
        positions = np.minimum(positions, end - 1)
        tokens = labels = None
        if self.wants_tokens or self.wants_labels:
            windows = read_windows(self.corpora, self.sequence, *self._places(positions))
            tokens = in_micros(windows[:, :-1], self.micro) if self.wants_tokens else None
            targets = np.where(padding[:, None], NO_TARGET, windows[:, 1:])
            labels = in_micros(targets, self.micro) if self.wants_labels else None
        sample_ids = torch.from_numpy(positions).view(len(micro_ids), self.micro)
        return Batch(tokens, labels, sample_ids, micro_ids)

    def _places(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return the source of each position in the held-out set, and the sequence's index in it."""
        sizes = np.array([len(indices) for indices in self.ranges])
        starts = np.array([indices.start for indices in self.ranges])
        ends = np.cumsum(sizes)
        sources = np.searchsorted(ends, positions, side="right")
        return sources, positions - (ends - sizes)[sources] + starts[sources]


def _check(share: float, *, separate: bool = False) -> None:
    """Raise ValueError unless the held-out sequences are asked for in one way, or not at all."""
    if not 0 <= share < 1:
        raise ValueError(
            f"data.eval_fraction={share} is not a share of the text; use 0.05, say, or 0 to hold out nothing"
        )
    if share and separate:
        raise ValueError(f"data.eval_fraction={share} and data.eval_sources are both given; leave one of them out")
