"""Rows of one example each, for tasks with inputs of their own: labels of sequences, and target sequences.

Shapes: T tokens per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from acsgd.io.data.rows.base import DECODER_IDS, INPUT_IDS, LABELS, LENGTHS, MASK, Row
from acsgd.io.data.sampler import Ints
from acsgd.io.data.tokens.corpus import Corpus
from acsgd.io.data.tokens.ends import TextEnds
from acsgd.io.files.arrays import sample
from acsgd.model_classes import IGNORED, TOKEN_TYPES


class _ExampleRows:
    """Rows of one example each: input_ids [T], padded at the end, and attention_mask [T]."""

    is_streamed = False
    texts_per_row = 1
    """Number of texts of an example that are padded to T tokens each."""

    def __init__(self, corpus: Corpus, sequence: int, *, padding: int) -> None:
        self.corpus = corpus
        self._sequence = sequence
        self._padding = padding

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what was skipped, and on padding."""
        padding = 1 - len(self.corpus.tokens) / (len(self) * self._sequence * self.texts_per_row)
        rows = f"rows: {self.corpus.name}: {len(self):,} examples in rows of {self._sequence} tokens"
        return (*self.corpus.notes, f"{rows}, {padding:.2%} padding{self._longest}")

    @property
    def _longest(self) -> str:
        """Clause on the longest example if it is shorter than a row."""
        longest = int(np.diff(self.corpus.offsets[:]).max())
        is_shorter = self.texts_per_row == 1 and longest < self._sequence
        return f"; the longest has {longest}, so that data.sequence={longest} would do" if is_shorter else ""

    def fingerprint(self) -> tuple[object, ...]:
        """Return values that differ between hosts with different texts."""
        offsets = self.corpus.offsets
        return (*self.corpus.fingerprint(), len(self), offsets[sample(offsets)].tolist())

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
        """Mean number of labels of a row."""
        return 1.0

    def num_empty(self, rows: range) -> int:
        """Return 0: each row has a label, or an answer."""
        return 0

    def __len__(self) -> int:
        return len(self.corpus.offsets) - 1

    def documents_in(self, rows: range) -> NDArray[np.bool_]:
        """Return of each example whether it is in some rows."""
        index = np.arange(len(self))
        return (index >= rows.start) & (index < rows.stop)

    def _span(self, index: int) -> tuple[int, int]:
        start, stop = self.corpus.offsets[index : index + 2].tolist()
        return start, stop

    def _inputs(self, tokens: NDArray[Any]) -> dict[str, Ints]:
        mask = _padded(np.ones(len(tokens)), self._sequence, 0)
        return {INPUT_IDS: _padded(tokens, self._sequence, self._padding), MASK: mask}


class LabelledRows(_ExampleRows):
    """Rows with a label.

    dtype: of the label; has_types: whether the model takes types of tokens. They are 0 for padding, and if the
    tokenizer has none.
    """

    def __init__(
        self,
        corpus: Corpus,
        sequence: int,
        *,
        padding: int,
        dtype: type[np.generic],
        has_types: bool = False,
    ) -> None:
        super().__init__(corpus, sequence, padding=padding)
        self._has_types = has_types
        assert corpus.labels is not None
        self._labels = corpus.labels[:].astype(dtype)

    def read(self, index: int, epoch: int = 0) -> Row:
        """Read a row."""
        start, stop = self._span(index)
        row = {**self._inputs(self.corpus.tokens[start:stop]), LABELS: self._labels[index]}
        row[LENGTHS] = np.array([stop - start, 0])
        if self._has_types:
            types = self.corpus.types
            row[TOKEN_TYPES] = _padded([] if types is None else types[start:stop], self._sequence, 0)
        return row


class PairRows(_ExampleRows):
    """Rows with a prompt for an encoder, and an answer for a decoder, which predicts each token from those before.

    start: token that enters the decoder first.
    """

    texts_per_row = 2

    def __init__(self, corpus: Corpus, sequence: int, *, padding: int, start: int) -> None:
        super().__init__(corpus, sequence, padding=padding)
        self._start = start

    @property
    def mean_targets(self) -> float:
        """Mean number of tokens of an answer."""
        return len(self.corpus.tokens) * self.corpus.target_fraction / len(self)

    def read(self, index: int, epoch: int = 0) -> Row:
        """Read a row, with labels [T], and decoder_input_ids [T]: the labels one place later."""
        assert self.corpus.targets is not None
        start, stop = self._span(index)
        tokens = self.corpus.tokens[start:stop]
        prompt = stop - start - int(self.corpus.targets[start:stop].sum())
        answer = tokens[prompt:]
        entering = np.concatenate([[self._start], answer[:-1]])
        return {
            **self._inputs(tokens[:prompt]),
            DECODER_IDS: _padded(entering, self._sequence, self._padding),
            LABELS: _padded(answer, self._sequence, IGNORED),
            LENGTHS: np.array([prompt, len(entering)]),
        }


def _padded(tokens: Sequence[int] | NDArray[Any], length: int, padding: int) -> Ints:
    padded = np.full(length, padding, dtype=np.int64)
    padded[: len(tokens)] = tokens
    return padded
