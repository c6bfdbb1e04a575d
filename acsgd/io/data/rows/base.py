"""Interface of rows, and the tensors of micro-batches read from them.

Shapes: n rows, M micro-batches, B rows per micro-batch, T tokens per row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple, NoReturn, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from acsgd.io.data.sampler import Ints
from acsgd.io.data.tokens.corpus import Corpus
from acsgd.io.data.tokens.ends import TextEnds
from acsgd.layers.batch import Lengths, longest
from acsgd.model_classes import IGNORED

INPUT_IDS, LABELS, LENGTHS = "input_ids", "labels", "lengths"
"""Names of the tokens, of the labels, and of the numbers of input tokens without padding in a row: `Lengths`, int [2].
"""
MASK, DECODER_IDS = "attention_mask", "decoder_input_ids"
"""Names of the mask of padding, and of the tokens that enter a decoder beside those of an encoder."""

CHUNK = 2**20
"""Number of tokens whose targets are counted at a time."""

Row = Mapping[str, NDArray[Any]]
"""Inputs of the model, LABELS and LENGTHS of one sample by name. An array has the same shape in every row."""


class Rows(Protocol):
    """Samples of one corpus, or of one streamed source."""

    @property
    def is_streamed(self) -> bool:
        """Whether the number of rows is unknown. Then `read` takes the number of earlier reads in place of an index."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the user on what was skipped, and on padding."""
        ...

    def fingerprint(self) -> tuple[object, ...]:
        """Return values that differ between hosts with different texts."""
        ...

    @property
    def mean_targets(self) -> float:
        """Mean number of labels of a row that are not IGNORED."""
        ...

    def num_empty(self, rows: range) -> int:
        """Return how many of some rows have no target; 0 if they are streamed."""
        ...

    @property
    def ends(self) -> TextEnds:
        """How the learned texts end; of a streamed source, those read so far."""
        ...

    @property
    def format(self) -> str:
        """Name of the format of the records; empty if it is not known."""
        ...

    def __len__(self) -> int:
        """Return the number of rows; 0 if they are streamed."""
        ...

    def read(self, index: int, epoch: int = 0) -> Row:
        """Read one row from disk. epoch: number of earlier epochs; objectives draw anew in each."""
        ...


class RowTensors(NamedTuple):
    """Tensors of the rows of a batch, [M, B, ...]."""

    inputs: Mapping[str, Tensor] | None
    """Inputs of the model by name; None if they are not wanted."""
    labels: Tensor | None
    """Labels; None if they are not wanted."""
    num_tokens: int
    """Number of input tokens, without padding; 0 if neither is wanted."""
    longest_rows: Sequence[Lengths] | None
    """Longest row of each micro-batch, without padding; None if no rows are read."""


def count_targets(corpus: Corpus, starts: Ints, lengths: Ints) -> Ints:
    """Return the number of targets among the labels of windows of a corpus with prompts, in its order, see
    `read_window`."""
    assert corpus.targets is not None
    total, before = np.zeros(len(starts), np.int64), 0
    for first in range(0, len(corpus.targets) + 1, CHUNK):
        counts = before + np.cumsum([0, *corpus.targets[first : first + CHUNK]])
        for positions, sign in ((starts + 1, -1), (starts + 1 + lengths, 1)):
            here = slice(*np.searchsorted(positions, [first, first + CHUNK]))
            total[here] += sign * counts[positions[here] - first]
        before = counts[-1]
    return total


def describe_empty(name: str, empty: int, rows: int) -> tuple[str, ...]:
    """Return a sentence on rows of a source without target tokens, if there are any."""
    return (f"rows: {name}: {empty:,} of {rows:,} rows have no target tokens, and no loss",) if empty else ()


def read_window(corpus: Corpus, start: int, stop: int) -> tuple[Ints, Ints]:
    """Read inputs and labels: the tokens from `start` until `stop`, each with the next token, or IGNORED, as label."""
    window = corpus.tokens[start : stop + 1].astype(np.int64)
    labels = window[1:]
    if corpus.targets is not None:
        labels = np.where(corpus.targets[start + 1 : stop + 1], labels, IGNORED)
    return window[:-1], labels


@dataclass(frozen=True)
class RowReader:
    """Reads rows of several sources as tensors of micro-batches."""

    rows: Sequence[Rows]
    """Rows of each source, in the order of the mixture."""
    micro: int
    """B."""
    wants_inputs: bool = True
    wants_labels: bool = True
    wants_lengths: bool = False
    """Whether to read the rows for their lengths alone, if neither is wanted."""
    virtual_tokens: int = 0
    """Number of placeholders before the inputs of each row, without labels."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the user on the rows of each source."""
        return tuple(note for rows in self.rows for note in rows.notes)

    @property
    def ends(self) -> TextEnds:
        """How the learned texts of all sources end."""
        return TextEnds.union(rows.ends for rows in self.rows)

    @property
    def formats(self) -> set[str]:
        """Names of the formats of all sources, as far as they are known."""
        return {rows.format for rows in self.rows} - {""}

    def fingerprint(self) -> str:
        """Return a string that differs between hosts with different texts."""
        return repr([rows.fingerprint() for rows in self.rows])

    def read(self, sources: Ints, indices: Ints, epochs: Ints | None = None) -> RowTensors:
        """Read rows, given by source and index [n], from disk into new tensors. n: a multiple of B.

        epochs: number of earlier epochs of each row. Default: 0. Reads nothing if there are no rows.
        """
        if not (len(sources) and (self.wants_inputs or self.wants_labels or self.wants_lengths)):
            return RowTensors(None, None, 0, None)
        places = zip(sources, indices, np.zeros_like(indices) if epochs is None else epochs, strict=True)
        rows = [dict(self.rows[source].read(int(index), int(epoch))) for source, index, epoch in places]
        if self.virtual_tokens:
            rows = [_with_virtual_tokens(row, self.virtual_tokens) for row in rows]
        lengths = [Lengths(*row.pop(LENGTHS).tolist()) for row in rows]
        names = [name for name in rows[0] if (self.wants_labels if name == LABELS else self.wants_inputs)]
        tensors = {name: self._in_micros(np.stack([row[name] for row in rows])) for name in names}
        labels = tensors.pop(LABELS, None)
        longest_rows = [longest(lengths[first : first + self.micro]) for first in range(0, len(rows), self.micro)]
        return RowTensors(tensors if self.wants_inputs else None, labels, sum(map(sum, lengths)), longest_rows)

    def _in_micros(self, rows: NDArray[Any]) -> Tensor:
        return torch.from_numpy(rows).unflatten(0, (-1, self.micro))


def _with_virtual_tokens(row: Mapping[str, NDArray[Any]], count: int) -> dict[str, NDArray[Any]]:
    """Return a row with placeholders before its inputs. What enters a decoder, and its labels, get padding instead."""
    has_decoder = DECODER_IDS in row
    before = {INPUT_IDS: 0, MASK: 1} if has_decoder else {INPUT_IDS: 0, LABELS: IGNORED}
    after = {DECODER_IDS: 0, LABELS: IGNORED} if has_decoder else {}
    longer = {name: np.pad(row[name], (count, 0), constant_values=value) for name, value in before.items()}
    longer |= {name: np.pad(row[name], (0, count), constant_values=value) for name, value in after.items()}
    tokens, target = row[LENGTHS].tolist()
    return {**longer, LENGTHS: np.array([tokens + count, target])}


@dataclass(frozen=True)
class DescribedRows:
    """Rows of which only the properties are known. They cannot be read."""

    length: int
    values: Sequence[Any]
    """Fingerprint."""
    notes: tuple[str, ...]
    mean_targets: float
    """Mean number of labels of a row that are not IGNORED."""
    is_streamed: bool = False
    ends: ClassVar[TextEnds] = TextEnds()
    """Not known, as are `num_empty` and `format`."""
    format: ClassVar[str] = ""

    def num_empty(self, rows: range) -> int:
        """Return 0."""
        return 0

    def fingerprint(self) -> tuple[object, ...]:
        """Return the fingerprint of the rows that were opened."""
        return tuple(self.values)

    def __len__(self) -> int:
        return self.length

    def read(self, index: int, epoch: int = 0) -> NoReturn:
        """Raise AssertionError."""
        raise AssertionError("this rank needs no tokens")


def describe(rows: Sequence[Rows]) -> str:
    """Return a description of rows, for `described`."""
    found = (
        DescribedRows(len(each), each.fingerprint(), each.notes, each.mean_targets, each.is_streamed) for each in rows
    )
    return json.dumps([asdict(each) for each in found])


def described(text: str) -> list[DescribedRows]:
    """Return the rows that a text describes."""
    return [DescribedRows(**{**fields, "notes": tuple(fields["notes"])}) for fields in json.loads(text)]
