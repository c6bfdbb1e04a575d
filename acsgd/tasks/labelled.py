"""Labels of texts, or of pairs of texts: classes, and numbers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
from torch import Tensor
from transformers import PreTrainedConfig

from acsgd.io.data.formats.labels import Classes, Labels, RegressionLabels
from acsgd.io.data.rows.base import INPUT_IDS, LABELS, MASK, Row
from acsgd.io.data.rows.labelled import LabelledRows
from acsgd.io.data.rows.layout import RowLayout
from acsgd.io.data.tokens.corpus import Corpus
from acsgd.io.data.tokens.encode_examples import SequenceEncoder
from acsgd.layers.description import Head
from acsgd.model_classes import MODEL_CLASSES, TOKEN_TYPES
from acsgd.tasks.base import RowContext, ShownText, Task


class _Labelling(Task):
    """Predicts the label of a row."""

    has_labels = True

    @abstractmethod
    def labels(self, model: PreTrainedConfig) -> Labels: ...

    def encoder(self, context: RowContext) -> SequenceEncoder:
        assert context.spec.truncation is not None
        labels, has_types = self.labels(context.model), self._has_types(context)
        return SequenceEncoder(context.tokenizer, *context.spec.truncation, labels, has_types=has_types)

    def rows(self, corpus: Corpus, context: RowContext, layout: RowLayout | None = None) -> LabelledRows:
        return LabelledRows(
            corpus,
            context.spec.text_length,
            padding=context.spec.padding,
            dtype=self.labels(context.model).dtype,
            has_types=self._has_types(context),
        )

    def _has_types(self, context: RowContext) -> bool:
        return TOKEN_TYPES in self.model_class.inputs_of(context.model)

    def show(self, row: Row, model: PreTrainedConfig) -> tuple[str, Sequence[ShownText]]:
        """Return the text and its label."""
        tokens = row[INPUT_IDS][row[MASK] == 1]
        label = self.labels(model).describe(row[LABELS].item())
        summary = f"{len(tokens)} tokens, {len(row[MASK]) - len(tokens)} padding; label {label}"
        return summary, [ShownText(tokens, np.ones(len(tokens), dtype=bool))]


class Classification(_Labelling):
    """Predicts a class."""

    name = "classification"
    model_class = MODEL_CLASSES["classification"]
    predictions = "classes"
    metrics = ("accuracy",)

    def labels(self, model: PreTrainedConfig) -> Classes:
        return Classes(model)

    def predict(self, hidden: Tensor, head: Head, labels: Tensor) -> Tensor:
        """Return the class with the largest of the logits [B, C]."""
        return head(hidden).argmax(-1).double()


class Regression(_Labelling):
    """Predicts a number."""

    name = "regression"
    model_class = MODEL_CLASSES["regression"]
    predictions = "numbers"
    metrics = ("pearson", "spearman")

    def labels(self, model: PreTrainedConfig) -> RegressionLabels:
        return RegressionLabels()

    def predict(self, hidden: Tensor, head: Head, labels: Tensor) -> Tensor:
        """Return the logits [B, 1]."""
        return head(hidden).squeeze(-1).double()
