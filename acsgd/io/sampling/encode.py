"""Tokens of examples for language modelling, and which of them are targets."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from acsgd.io.formats.base import Example, Segment
from acsgd.shards.tokenizer import DocumentTokens

Label = int | float | str
"""Class, by its number or name, or value of a regression."""


class Encoded(NamedTuple):
    """Tokens of consecutive examples."""

    tokens: NDArray[np.uint32]
    targets: NDArray[np.bool_]
    """Whether each token is a target."""
    ends: NDArray[np.int64]
    """Positions after the last tokens of the documents that end here."""
    num_of_text: int
    """Number of tokens without special tokens around documents."""
    labels: Sequence[Label] = ()
    """Labels of the examples, for tasks that need them."""


class Encoder(Protocol):
    """Encodes the examples of a source, in order."""

    @property
    def key(self) -> str:
        """What the tokens depend on besides the tokenizer; part of the cache key."""
        ...

    @property
    def overlap(self) -> int:
        """Number of tokens so far that end a document and begin the next one."""
        ...

    @property
    def note(self) -> str | None:
        """Clause that describes the examples so far that are too long, None if there are none."""
        ...

    def encode(self, examples: Sequence[Example]) -> Encoded:
        """Return the tokens of examples. Raises ValueError if an example does not suit the task."""
        ...


class DocumentEncoder:
    """Encodes the examples of a source, in order, with special tokens around documents as of `DocumentTokens`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises ValueError if the tokenizer has no eos_token."""
        self.key = ""
        self.note = None
        self._tokenizer = tokenizer
        self._special = DocumentTokens.of(tokenizer)
        self._begin = self._special.begin
        self.overlap = len(self._special.begin) - len(self._special.begin_next)
        """Number of tokens that end a document and begin the next one. 0 after examples with special tokens."""

    def encode(self, examples: Sequence[Example]) -> Encoded:
        """Return the tokens of examples.

        A special token around a document is a target if the text beside it is. Raises ValueError if a text has a prompt
        and the tokenizer does not report which characters a token covers.
        """
        texts = [example.text for example in examples]
        is_masked = not all(segment.is_target for example in examples for segment in example.segments)
        if is_masked and not self._tokenizer.is_fast:
            raise ValueError(
                f"the tokenizer {self._tokenizer.name_or_path} does not report which characters a token covers, "
                "which masks of prompts need; give a model with a fast tokenizer, tokenizer.json"
            )
        # verbose=False: no warning if a document is longer than the model's maximum sequence
        options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        encoded = self._tokenizer(texts, return_offsets_mapping=is_masked, **options)
        parts: list[list[int]] = []
        flags: list[NDArray[np.bool_]] = []
        for index, (example, ids) in enumerate(zip(examples, encoded["input_ids"], strict=True)):
            begin, end = self._around(example)
            parts += [begin, ids, end]
            if is_masked:
                first, *_, last = (example.segments[0], *example.segments)
                text = _text_targets(example.segments, encoded["offset_mapping"][index])
                flags += [np.full(len(begin), first.is_target), text, np.full(len(end), last.is_target)]
        lengths = np.array([len(part) for part in parts])
        return Encoded(
            flatten(parts),
            np.concatenate(flags) if is_masked else np.ones(lengths.sum(), dtype=bool),
            np.cumsum(lengths)[2::3][[example.ends_document for example in examples]],
            int(lengths[1::3].sum()),
        )

    def _around(self, example: Example) -> tuple[list[int], list[int]]:
        """Return the special tokens before and after the text of the next example."""
        begin, end = self._begin, [self._special.end] if example.ends_document else []
        if example.has_special_tokens:
            begin, end, self.overlap = [], [], 0
        self._begin = []
        if example.ends_document:
            self._begin = self._special.begin_next if end else self._special.begin
        return begin, end


def flatten(parts: Sequence[Sequence[int]]) -> NDArray[np.uint32]:
    """Return the concatenation of lists of tokens."""
    return np.fromiter(chain.from_iterable(parts), np.uint32)


def _text_targets(segments: Sequence[Segment], spans: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Return which tokens stand for a character of a target. spans: first character of each token, and its end.

    Some tokenizers report an empty span, after it, for a token of blanks.
    """
    lengths = [len(segment.text) for segment in segments]
    is_target = np.repeat([segment.is_target for segment in segments], lengths)
    counts = np.concatenate([[0], np.cumsum(is_target)])
    starts, ends = np.array(spans, dtype=np.int64).reshape(-1, 2).T
    ends = np.maximum(ends, 1)
    targets: NDArray[np.bool_] = counts[ends] > counts[np.minimum(starts, ends - 1)]
    return targets
