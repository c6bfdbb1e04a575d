"""Rows cut from the concatenation of all documents (data.rows = "concat")."""

from __future__ import annotations

import numpy as np

from acsgd.io.data.rows.base import INPUT_IDS, LABELS, LENGTHS, Row, read_window
from acsgd.io.data.tokens.tokens import Corpus


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
        """Sentence on what was skipped."""
        return self.corpus.notes

    def fingerprint(self) -> tuple[object, ...]:
        """Return values that differ between hosts with different texts."""
        return self.corpus.fingerprint()

    @property
    def mean_targets(self) -> float:
        """Mean number of target tokens of a row; as in the whole corpus, also if its end is dropped."""
        return self._sequence * self.corpus.target_fraction

    def __len__(self) -> int:
        return max(0, len(self.corpus.tokens) - 1) // self._sequence

    def read(self, index: int, epoch: int = 0) -> Row:
        """Read a row: row i has the tokens i T .. (i + 1) T inclusive, of which the first is no target."""
        tokens, labels = read_window(self.corpus, index * self._sequence, (index + 1) * self._sequence)
        return {INPUT_IDS: tokens, LABELS: labels, LENGTHS: np.array([len(tokens), 0])}
