"""Rows of language models: cut from the concatenation of all documents, or of whole documents (data.rows)."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from acsgd.io.data.rows.base import INPUT_IDS, LABELS, LENGTHS, Row, count_targets, describe_empty, read_window
from acsgd.io.data.rows.layout import RowLayout
from acsgd.io.data.rows.objectives import CAUSAL, Objective
from acsgd.io.data.sampler import Ints
from acsgd.io.data.tokens.corpus import Corpus
from acsgd.io.data.tokens.ends import TextEnds
from acsgd.io.files.arrays import sample
from acsgd.layers.masks import DOCUMENTS, NO_PREFIX, PREFIXES
from acsgd.model_classes import IGNORED

Flags = NDArray[np.bool_]


class ConcatRows:
    """Windows of `sequence` + 1 tokens, each overlapping the next by one token.

    So each token except the first is a target once per epoch. A remainder shorter than a row is dropped. Raises
    ValueError if the corpus is shorter than one row.
    """

    is_streamed = False

    def __init__(self, corpus: Corpus, sequence: int) -> None:
        self.corpus = corpus
        self._sequence = sequence
        if not len(self):
            tokens = len(corpus.tokens)
            raise ValueError(
                f"data.sequence={sequence}: {corpus.name} has {tokens} tokens, less than one sequence of "
                f"{sequence} + 1; use data.sequence={tokens - 1} or less, or a longer text"
            )

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what was skipped, and on rows without targets."""
        return (*self.corpus.notes, *describe_empty(self.corpus.name, self.num_empty(range(len(self))), len(self)))

    def fingerprint(self) -> tuple[object, ...]:
        """Return values that differ between hosts with different texts."""
        return self.corpus.fingerprint()

    @property
    def ends(self) -> TextEnds:
        """How the learned texts end."""
        return self.corpus.ends

    @property
    def format(self) -> str:
        """Name of the format of the records."""
        return self.corpus.format

    @property
    def mean_targets(self) -> float:
        """Mean number of target tokens of a row; as in the whole corpus, also if its end is dropped."""
        return self._sequence * self.corpus.target_fraction

    @cached_property
    def _targets(self) -> Ints:
        """Number of targets of each row of a corpus with prompts."""
        return count_targets(self.corpus, np.arange(len(self)) * self._sequence, np.full(len(self), self._sequence))

    def num_empty(self, rows: range) -> int:
        """Return how many of some rows have no target."""
        return 0 if self.corpus.targets is None else int((self._targets[rows.start : rows.stop] == 0).sum())

    def __len__(self) -> int:
        return max(0, len(self.corpus.tokens) - 1) // self._sequence

    def documents_in(self, rows: range) -> Flags:
        """Return of each document whether it is in some rows alone."""
        starts, stops = self.corpus.spans()
        return (starts >= rows.start * self._sequence) & (stops <= rows.stop * self._sequence + 1)

    def read(self, index: int, epoch: int = 0) -> Row:
        """Read a row: row i has the tokens i T .. (i + 1) T inclusive, of which the first is no target."""
        tokens, labels = read_window(self.corpus, index * self._sequence, (index + 1) * self._sequence)
        return {INPUT_IDS: tokens, LABELS: labels, LENGTHS: np.array([len(tokens), 0])}


class DocumentRows:
    """Rows of `sequence` tokens with the parts of documents that a layout puts there, then padding.

    The first token of a part is never a label. padding: token after the last part; isolate: whether rows have
    DOCUMENTS, the index of each token's part; objective: of the layout, too. Rows have PREFIXES, the index of the part
    for the tokens of its prefix, if the objective has prefixes.
    """

    is_streamed = False

    def __init__(
        self,
        corpus: Corpus,
        layout: RowLayout,
        sequence: int,
        *,
        padding: int,
        isolate: bool = False,
        objective: Objective = CAUSAL,
    ) -> None:
        self.corpus = corpus
        self.layout = layout
        self._sequence = sequence
        self._padding = padding
        self._isolate = isolate
        self._objective = objective

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what was skipped, on the number of rows, on padding and on rows without targets."""
        empty = describe_empty(self.corpus.name, self.num_empty(range(len(self))), len(self))
        return (*self.corpus.notes, self.layout.note, *empty)

    def fingerprint(self) -> tuple[object, ...]:
        """Return values that differ between hosts with different texts."""
        layout = self.layout
        sizes = len(self), len(layout.starts), layout.num_targets
        return (*self.corpus.fingerprint(), *sizes, layout.starts[sample(layout.starts)].tolist())

    @property
    def ends(self) -> TextEnds:
        """How the learned texts end."""
        return self.corpus.ends

    @property
    def format(self) -> str:
        """Name of the format of the records."""
        return self.corpus.format

    @property
    def mean_targets(self) -> float:
        """Mean number of target tokens of a row."""
        return self.layout.num_targets / len(self)

    def num_empty(self, rows: range) -> int:
        """Return how many of some rows have no target."""
        return int((self.layout.targets[rows.start : rows.stop] == 0).sum())

    def __len__(self) -> int:
        return len(self.layout.offsets) - 1

    def documents_in(self, rows: range) -> Flags:
        """Return of each document whether it is in some rows alone."""
        documents, _ = self.corpus.spans()
        first, last = self.layout.offsets[:][[rows.start, rows.stop]].tolist()
        owners = np.searchsorted(documents, self.layout.starts[:], side="right") - 1
        found = np.zeros(len(documents), dtype=np.bool_)
        found[owners[first:last]] = True
        found[np.delete(owners, slice(first, last))] = False
        return found

    def read(self, index: int, epoch: int = 0) -> Row:
        """Read a row."""
        first, last = self.layout.offsets[index : index + 2].tolist()
        starts, lengths = self.layout.starts[first:last].tolist(), self.layout.lengths[first:last].tolist()
        tokens = np.full(self._sequence, self._padding, dtype=np.int64)
        labels = np.full(self._sequence, IGNORED, dtype=np.int64)
        documents = np.full(self._sequence, last - first, dtype=np.int64)
        prefixes = np.full(self._sequence, NO_PREFIX, dtype=np.int64)
        place = 0
        for document, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            window = read_window(self.corpus, start, start + length)
            part = self._objective.apply(*window, self.corpus.before + start, epoch)
            here = slice(place, place + len(part.tokens))
            tokens[here], labels[here] = part.tokens, part.labels
            documents[here] = document
            prefixes[place : place + part.prefix] = document
            place = here.stop
        row = {INPUT_IDS: tokens, LABELS: labels, LENGTHS: np.array([place, 0])}
        row |= {DOCUMENTS: documents} if self._isolate else {}
        return row | {PREFIXES: prefixes} if self._objective.has_prefix else row
