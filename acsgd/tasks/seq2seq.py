"""Target sequences: an encoder reads the prompt, and a decoder predicts each token of the answer from those before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedConfig

from acsgd.config.adapters import PromptTuning
from acsgd.io.data.rows.base import INPUT_IDS, LABELS, MASK, Row
from acsgd.io.data.rows.labelled import PairRows
from acsgd.io.data.rows.layout import RowLayout
from acsgd.io.data.tokens.corpus import Corpus
from acsgd.io.data.tokens.encode import Encoded
from acsgd.io.data.tokens.encode_examples import PairEncoder
from acsgd.model_classes import IGNORED, MODEL_CLASSES
from acsgd.tasks.base import RowContext, ShownText, Task


class SequenceToSequence(Task):
    """Predicts the answer to a prompt. Prompt and answer have a row each."""

    name = "seq2seq"
    model_class = MODEL_CLASSES["seq2seq"]
    metrics = ("perplexity",)
    virtual_tokens = (PromptTuning,)

    def encoder(self, context: RowContext) -> PairEncoder:
        assert context.spec.truncation is not None
        return PairEncoder(context.tokenizer, *context.spec.truncation)

    def rows(self, corpus: Corpus, context: RowContext, layout: RowLayout | None = None) -> PairRows:
        start = getattr(context.model, "decoder_start_token_id", None)
        if not isinstance(start, int):
            raise ValueError(
                f'{context.name} has no first token of a decoder; set "decoder_start_token_id" in config.json'
            )
        return PairRows(corpus, context.spec.text_length, padding=context.spec.padding, start=start)

    def tokens_in_row(self, lengths: NDArray[np.int64], encoded: Encoded) -> NDArray[np.int64]:
        answers = np.diff(np.concatenate([[0], np.cumsum(encoded.targets)])[[0, *encoded.ends]])
        longest: NDArray[np.int64] = np.maximum(answers, lengths - answers)
        return longest

    def show(self, row: Row, model: PreTrainedConfig) -> tuple[str, Sequence[ShownText]]:
        """Return prompt and answer."""
        prompt, answer = row[INPUT_IDS][row[MASK] == 1], row[LABELS][row[LABELS] != IGNORED]
        padding = [len(row[name]) - len(text) for name, text in ((MASK, prompt), (LABELS, answer))]

        def shown(tokens: NDArray[Any], *, is_target: bool) -> ShownText:
            return ShownText(tokens, np.full(len(tokens), is_target))

        summary = f"{len(prompt)} and {len(answer)} tokens, {padding[0]} and {padding[1]} padding"
        return summary, [shown(prompt, is_target=False), shown(answer, is_target=True)]
