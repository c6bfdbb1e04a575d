"""Rows of whole documents (data.rows = "pack" and "single")."""

from __future__ import annotations

import numpy as np

from acsgd.io.rows.base import INPUT_IDS, LABELS, Row, read_window
from acsgd.io.rows.layout import Layout
from acsgd.io.sampling.arrays import sample
from acsgd.io.sampling.tokens import Corpus
from acsgd.layers.documents import DOCUMENTS
from acsgd.tasks import IGNORED


class DocumentRows:
    """Rows of `sequence` tokens with the parts of documents that a layout puts there, then padding.

    The first token of a part is never a label. padding: token after the last part; isolate: whether rows have
    DOCUMENTS, the index of each token's part.
    """

    def __init__(self, corpus: Corpus, layout: Layout, sequence: int, *, padding: int, isolate: bool = False) -> None:
        self.corpus = corpus
        self.layout = layout
        self._sequence = sequence
        self._padding = padding
        self._isolate = isolate

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what was skipped, on the number of rows and on padding."""
        return (*self.corpus.notes, self.layout.note)

    def fingerprint(self) -> tuple[object, ...]:
        """Return values that differ between hosts with different texts."""
        return (*self.corpus.fingerprint(), self.layout.note, self.layout.starts[sample(self.layout.starts)].tolist())

    @property
    def mean_targets(self) -> float:
        """Mean number of target tokens of a row."""
        return self.layout.num_targets / len(self)

    def __len__(self) -> int:
        return len(self.layout.offsets) - 1

    def read(self, index: int) -> Row:
        """Read a row."""
        first, last = self.layout.offsets[index : index + 2].tolist()
        starts, lengths = self.layout.starts[first:last].tolist(), self.layout.lengths[first:last].tolist()
        tokens = np.full(self._sequence, self._padding, dtype=np.int64)
        labels = np.full(self._sequence, IGNORED, dtype=np.int64)
        documents = np.full(self._sequence, last - first, dtype=np.int64)
        place = 0
        for document, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            here = slice(place, place + length)
            tokens[here], labels[here] = read_window(self.corpus, start, start + length)
            documents[here] = document
            place += length
        row = {INPUT_IDS: tokens, LABELS: labels}
        return {**row, DOCUMENTS: documents} if self._isolate else row
