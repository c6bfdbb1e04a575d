"""Language modelling: rows of documents, of which each token is predicted from those before."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import numpy as np
from transformers import PreTrainedConfig

from acsgd.config.adapters import PrefixTuning, PromptTuning
from acsgd.config.options import Config, DataConfig
from acsgd.io.data.row_spec import LongDocument, RowPlacement, RowStage
from acsgd.io.data.rows.base import INPUT_IDS, LABELS, LENGTHS, Row, Rows
from acsgd.io.data.rows.documents import ConcatRows, DocumentRows
from acsgd.io.data.rows.layout import RowLayout, make_layout, open_layout
from acsgd.io.data.rows.streamed import cut_concat, cut_documents
from acsgd.io.data.rows.ul2r import UL2R
from acsgd.io.data.stream.segments import Cutter
from acsgd.io.data.tokens.corpus import Corpus
from acsgd.io.data.tokens.encode import DocumentEncoder
from acsgd.layers.masks import DOCUMENTS
from acsgd.model_classes import IGNORED, MODEL_CLASSES
from acsgd.tasks.base import RowContext, ShownText, Task, objective_of


class LanguageModelling(Task):
    """Predicts the next token of documents, which are put into rows as data.rows asks."""

    name = "lm"
    model_class = MODEL_CLASSES["lm"]
    metrics = ("perplexity",)
    layouts: ClassVar[Sequence[RowPlacement]] = ("concat", "pack", "single")
    long_policies: ClassVar[Sequence[LongDocument]] = ("split", "truncate", "skip", "error")
    has_documents = True
    virtual_tokens = (PromptTuning, PrefixTuning)

    def layout(self, data: DataConfig) -> RowPlacement:
        return "pack" if data.rows == "auto" and data.objective != "causal" else super().layout(data)

    def check(self, config: Config) -> None:
        data = config.data
        if data.objective != "causal" and data.rows == "concat":
            raise ValueError(
                f"data.rows=concat cuts documents anywhere, but data.objective={data.objective} needs their "
                "beginnings; use data.rows=pack or single"
            )
        super().check(config)

    def encoder(self, context: RowContext) -> DocumentEncoder:
        return DocumentEncoder(context.tokenizer)

    def cutter(self, context: RowContext) -> Cutter:
        spec = context.spec
        assert spec.window is not None, "the source is not streamed"
        if spec.rows == "concat":
            return cut_concat(spec.window, spec.text_length)
        assert spec.long is not None
        return cut_documents(spec.window, spec.text_length, spec.rows, spec.long, objective_of(spec))

    def rows(self, corpus: Corpus, context: RowContext, layout: RowLayout | None = None) -> Rows:
        spec, length = context.spec, context.spec.text_length
        if spec.rows == "concat":
            return ConcatRows(corpus, length)
        objective = objective_of(spec)
        if isinstance(objective, UL2R) and corpus.targets is not None:
            raise ValueError(
                f"data.objective=ul2r is for texts, but {corpus.name} has prompts; learn them, too, with "
                "data.targets=all, or use data.objective=prefix"
            )
        if layout is None:
            assert spec.long is not None
            layout = open_layout(
                context.cache_dir / "rows" / f"{corpus.key}-{spec.key(RowStage.LAYOUT, corpus.key)}",
                partial(make_layout, corpus, length, spec.rows, spec.long, objective),
                reports_wait=context.reports_wait,
            )
        assert spec.isolate is not None
        return DocumentRows(corpus, layout, length, padding=spec.padding, isolate=spec.isolate, objective=objective)

    def show(self, row: Row, model: PreTrainedConfig) -> tuple[str, Sequence[ShownText]]:
        """Return the documents of a row, each with the label of its last token at its end."""
        length = int(row[LENGTHS][0])
        tokens, labels = row[INPUT_IDS][:length], row[LABELS][:length]
        documents = row.get(DOCUMENTS, np.zeros(length))[:length]
        starts = [0, *(np.flatnonzero(np.diff(documents)) + 1).tolist()]
        texts = []
        for number, (start, stop) in enumerate(zip(starts, [*starts[1:], length], strict=True), start=1):
            seen = np.concatenate([tokens[start:stop], labels[stop - 1 : stop]])
            is_target = np.concatenate([[False], labels[start:stop] != IGNORED])
            known = seen != IGNORED
            texts.append(ShownText(seen[known], is_target[known], f"document {number}" if DOCUMENTS in row else None))
        learned, padding = int((labels != IGNORED).sum()), len(row[INPUT_IDS]) - length
        parts = f"{len(starts)} documents, " if DOCUMENTS in row else ""
        return f"{parts}{length} tokens, {learned} labels, {padding} padding", texts
