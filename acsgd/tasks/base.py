"""Interface of tasks, with the defaults of those with one example per row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from acsgd.config.adapters import VirtualTokens, parse_adapter
from acsgd.config.options import Config, DataConfig
from acsgd.io.data.formats.labels import Labels
from acsgd.io.data.row_spec import LongDocument, RowPlacement, RowSpec
from acsgd.io.data.rows.base import Row, Rows
from acsgd.io.data.rows.layout import RowLayout
from acsgd.io.data.rows.objectives import CAUSAL, Objective, PrefixLM
from acsgd.io.data.rows.streamed import cut_examples
from acsgd.io.data.rows.ul2r import UL2R
from acsgd.io.data.stream.segments import Cutter
from acsgd.io.data.tokens.corpus import Corpus
from acsgd.io.data.tokens.encode import Encoded, Encoder
from acsgd.layers.description import Head
from acsgd.metrics import Kind
from acsgd.model_classes import IGNORED, ModelClass


def objective_of(spec: RowSpec) -> Objective:
    """Return what is learned of documents."""
    match spec.objective:
        case "prefix":
            return PrefixLM(spec.seed)
        case "ul2r":
            assert spec.denoising is not None
            return UL2R(spec.denoising, spec.seed)
        case "causal":
            return CAUSAL


@dataclass(frozen=True)
class RowContext:
    """What rows are made with, besides their source."""

    spec: RowSpec
    model: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    name: str
    """model.name, for messages."""
    cache_dir: Path
    """Directory of tokens and layouts."""
    reports_wait: bool = True
    """See `open_cached`."""


class ShownText(NamedTuple):
    """A text of a row, as `acsgd data show` prints it."""

    tokens: NDArray[Any]
    is_target: NDArray[np.bool_]
    title: str | None = None


class Task(ABC):
    """What a model is trained for: the class of models, the data, the loss and the metrics."""

    name: ClassVar[str]
    """Name in model.task."""
    model_class: ClassVar[ModelClass]
    predictions: ClassVar[Kind | None] = "tokens"
    """Kind of its predictions, which metrics are for; None = none."""
    metrics: ClassVar[Sequence[str]] = ()
    """Metrics besides the loss, unless others are chosen."""
    layouts: ClassVar[Sequence[RowPlacement]] = ("single",)
    """Values of data.rows that it takes."""
    long_policies: ClassVar[Sequence[LongDocument]] = ("truncate", "skip", "error")
    """Values of data.long that it takes, the default first."""
    rows_per_example: ClassVar[int] = 1
    """Number of consecutive rows that the loss needs together, such as 2 for pairs."""
    has_documents: ClassVar[bool] = False
    """Whether rows are cut from documents between special tokens, by data.objective."""
    has_labels: ClassVar[bool] = False
    """Whether records need a label, so that their format is "label"."""
    virtual_tokens: ClassVar[tuple[type[VirtualTokens], ...]] = ()
    """Adapters that may put virtual tokens before the inputs of a row."""

    def layout(self, data: DataConfig) -> RowPlacement:
        """Return how documents are put into rows: data.rows, with "auto" resolved."""
        return self.layouts[0] if data.rows == "auto" else data.rows

    def long(self, data: DataConfig) -> LongDocument:
        """Return what is done with a document that is longer than a row: data.long, with "auto" resolved."""
        return self.long_policies[0] if data.long == "auto" else data.long

    def check(self, config: Config) -> None:
        """Raise ValueError for the first option that the task does not take."""
        data, layout, long = config.data, self.layout(config.data), self.long(config.data)
        adapter = parse_adapter(config.adapter.spec)
        if isinstance(adapter, VirtualTokens) and not self._takes(adapter, data):
            raise ValueError(
                f'adapter.spec="{config.adapter.spec}": virtual tokens are for model.task=lm with '
                "data.objective=causal and without data.isolate; prompt_tuning also for model.task=seq2seq; use lora"
            )
        if data.objective != "causal" and not self.has_documents:
            raise ValueError(f"data.objective={data.objective} is for model.task=lm; remove data.objective")
        if layout not in self.layouts:
            raise ValueError(
                f"data.rows={layout} is for model.task=lm; {self.name} has one example per row: remove data.rows"
            )
        if long not in self.long_policies:
            *others, last = self.long_policies
            raise ValueError(
                f"data.long={long} is for model.task=lm; use data.long={', '.join(others)} or {last} for {self.name}"
            )
        if config.pp.micro % self.rows_per_example:
            raise ValueError(
                f"pp.micro={config.pp.micro} divides an example of {self.name}, which has {self.rows_per_example} "
                f"rows; use a multiple of {self.rows_per_example}"
            )
        if self.rows_per_example > 1 and config.model.dropout_mask == "sample":
            raise ValueError(
                f"model.dropout_mask=sample computes one row at a time, but {self.name} needs "
                f"{self.rows_per_example}; remove model.dropout_mask"
            )
        if data.long != "auto" and layout == "concat":
            raise ValueError(
                f"data.long={long} applies to whole documents, but data.rows=concat cuts them where a sequence ends; "
                "give data.rows=pack or single, or remove data.long"
            )
        if data.isolate and layout != "pack":
            raise ValueError(f"data.isolate needs data.rows=pack, but data.rows={layout}; add --data.rows pack")

    def _takes(self, adapter: VirtualTokens, data: DataConfig) -> bool:
        return isinstance(adapter, self.virtual_tokens) and data.objective == "causal" and not data.isolate

    def labels(self, model: PreTrainedConfig) -> Labels | None:
        """Return what the labels of records may be; None without `has_labels`."""
        return None

    @abstractmethod
    def encoder(self, context: RowContext) -> Encoder:
        """Return what makes tokens of the examples of a source."""

    def cutter(self, context: RowContext) -> Cutter:
        """Return what makes the rows of a segment of a streamed source."""
        assert context.spec.window is not None, "the source is not streamed"
        return cut_examples(context.spec.window)

    @abstractmethod
    def rows(self, corpus: Corpus, context: RowContext, layout: RowLayout | None = None) -> Rows:
        """Return the rows of a corpus. layout: of documents, if it is known. Raises ValueError."""

    def tokens_in_row(self, lengths: NDArray[np.int64], encoded: Encoded) -> NDArray[np.int64]:
        """Return the number of tokens of each document that need a row. lengths: numbers of all tokens of each."""
        return lengths

    @abstractmethod
    def show(self, row: Row, model: PreTrainedConfig) -> tuple[str, Sequence[ShownText]]:
        """Return a summary of a row, and its texts."""

    @property
    def sums_positions(self) -> bool:
        """Whether the loss is the sum of those of any parts of the T positions of hidden states and labels.

        Then their logits need not exist at once. Override it with `loss`, if this is so.
        """
        return type(self).loss is Task.loss and len(self.model_class.labels) == 2

    def loss(self, hidden: Tensor, head: Head, labels: Tensor, label_smoothing: float) -> Tensor:
        """Return the loss of a micro-batch summed over its targets, fp32.

        hidden: what enters the model's head; label_smoothing: fraction, as of optim.label_smoothing.
        """
        return self.model_class.loss(head(hidden), labels, label_smoothing)

    def num_targets(self, labels: Tensor) -> int:
        """Return the number of summands of the loss, by which it is divided over the global batch: labels, or examples.

        labels: of any number of micro-batches, [M, B, ...], of which those that are IGNORED do not count.
        """
        return int((labels != IGNORED).sum())

    def predict(self, hidden: Tensor, head: Head, labels: Tensor) -> Tensor | None:
        """Return the prediction of each row, fp64 [B], in evaluations; None for tasks that predict tokens.

        Metrics compare them with the labels, if each row has one.
        """
        return None
