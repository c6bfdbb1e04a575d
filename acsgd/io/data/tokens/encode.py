"""Tokens of examples for language modelling, and which of them are targets."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from acsgd.io.data.formats.base import Example, FormatError
from acsgd.io.data.tokens.text_tokens import (
    QUIET,
    PlainSpecials,
    PlainTokens,
    TextTokens,
    answers_of,
    prompt_tokens,
    with_targets,
)
from acsgd.shards.tokenizer import DocumentTokens, added_tokens


class Encoded(NamedTuple):
    """Tokens of consecutive examples."""

    tokens: NDArray[np.uint32]
    targets: NDArray[np.bool_]
    """Whether each token is a target."""
    ends: NDArray[np.int64]
    """Positions after the last tokens of the documents that end here."""
    num_of_text: int
    """Number of tokens without special tokens around documents."""
    labels: NDArray[np.float64] = np.empty(0)
    """Labels of the examples as numbers; empty if the task needs none."""
    types: NDArray[np.uint32] | None = None
    """Type of each token (token_type_ids), 0 in the first text of a pair, 1 in the second. None if none are needed."""
    refused: Mapping[int, FormatError | None] = MappingProxyType({})
    """Examples that are left out because of their tokens or labels, by index, and why; None for later parts of one."""


NONE = Encoded(np.empty(0, np.uint32), np.empty(0, bool), np.empty(0, np.int64), 0)
"""Tokens of no examples."""


EncoderState = list[Any] | None
"""What the tokens of later examples depend on, as JSON values; None before the first one, or if there is nothing."""


class Encoder(Protocol):
    """Encodes the examples of a source, in order."""

    state: EncoderState
    """May be set before the first example, to that of another encoder."""

    @property
    def overlap(self) -> int:
        """Number of tokens so far that end a document and begin the next one."""
        ...

    @property
    def note(self) -> str | None:
        """Clause that describes examples so far that are too long or suspicious, None if there are none."""
        ...

    def tokenize(self, examples: Sequence[Example]) -> Sequence[Any]:
        """Return what `encode` needs of each example. Most of the work; several threads may call it at a time.

        Raises ValueError if an example does not suit the task.
        """
        ...

    def encode(self, examples: Sequence[Example], tokenized: Sequence[Any]) -> Encoded:
        """Return the tokens of the next examples. Raises ValueError if an example does not suit the task."""
        ...


class DocumentEncoder:
    """Encodes the examples of a source, in order, with special tokens around documents as of `DocumentTokens`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises ValueError if the tokenizer has no eos_token."""
        self._num_with_control = self._num_with_plain = self._num_cut = 0
        self._tokenizer = tokenizer
        self._special = DocumentTokens.of(tokenizer)
        self._begin = self._special.begin
        self._lock: contextlib.AbstractContextManager[object] = (
            contextlib.nullcontext() if tokenizer.is_fast else threading.Lock()
        )
        self.overlap = len(self._special.begin) - len(self._special.begin_next)
        """Number of tokens that end a document and begin the next one. 0 after examples with special tokens."""

    @property
    def note(self) -> str | None:
        """Clause on texts cut by data.max_prompt or data.max_answer, or on chats whose messages have special tokens in
        their text; None if there are none."""
        if self._num_cut:
            return f"longer than data.max_prompt or data.max_answer and truncated: {self._num_cut:,}"
        counts = {"ordinary text": self._num_with_plain, "control tokens": self._num_with_control}
        return with_specials(counts) if any(counts.values()) else None

    @cached_property
    def _plain_specials(self) -> PlainSpecials:
        return PlainSpecials(self._tokenizer)

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(added_tokens(self._tokenizer))

    def tokenize(self, examples: Sequence[Example]) -> Sequence[TextTokens | FormatError]:
        """Return the tokens of the text of each example, or why it is refused.

        Raises ValueError if a text has a prompt and the tokenizer does not report which characters a token covers.
        """
        is_masked = not all(segment.is_target for example in examples for segment in example.segments)
        if is_masked and not self._tokenizer.is_fast:
            raise ValueError(
                f"the tokenizer {self._tokenizer.name_or_path} does not report which characters a token covers, "
                "which masks of prompts need; give a model with a fast tokenizer, tokenizer.json"
            )
        with self._lock:
            encoded = self._tokenizer([example.text for example in examples], add_special_tokens=False, **QUIET)
        ids: list[list[int]] = encoded["input_ids"]
        has_control = [example.control_token is not None for example in examples]
        if not is_masked and not (self._tokenizer.is_fast and any(has_control)):
            return [TextTokens(each, [(0, len(each))], has) for each, has in zip(ids, has_control, strict=True)]
        return self._with_targets(examples, [PlainTokens(*each) for each in zip(ids, encoded.encodings, strict=True)])

    def _with_targets(
        self, examples: Sequence[Example], usual: Sequence[PlainTokens]
    ) -> Sequence[TextTokens | FormatError]:
        """Return the tokens of examples. usual: by the tokenizer, with all special tokens recognized."""
        found = [
            (example.plain and self._plain_specials.encode(example.text, example.plain, tokens.ids)) or None
            for example, tokens in zip(examples, usual, strict=True)
        ]
        texts = [plain or tokens for plain, tokens in zip(found, usual, strict=True)]
        answers = [answers_of(example, *text, self._added) for example, text in zip(examples, texts, strict=True)]
        names = list(dict.fromkeys(answer.prompt for each in answers for answer in each))
        prompts = dict(zip(names, prompt_tokens(self._tokenizer, names), strict=True))
        results = []
        for example, text, plain, each in zip(examples, texts, found, answers, strict=True):
            tokens = with_targets(example, *text, each, prompts, self._tokenizer)
            if isinstance(tokens, TextTokens):
                tokens = tokens._replace(has_control=plain is None and example.control_token is not None)
            results.append(tokens)
        return results

    def encode(self, examples: Sequence[Example], tokenized: Sequence[TextTokens | FormatError]) -> Encoded:
        """Return the tokens of examples. A special token around a document is a target if the text beside it is."""
        parts: list[Sequence[int]] = []
        targets: list[tuple[int, int]] = []
        ends: list[int] = []
        refused: dict[int, FormatError | None] = {}
        total = num_of_text = 0
        for index, (example, text) in enumerate(zip(examples, tokenized, strict=True)):
            if isinstance(text, FormatError):
                refused[index] = text
                continue
            if example.ends_document and example.control_token is not None:
                self._num_with_control += text.has_control
                self._num_with_plain += not text.has_control
            begin, end = self._around(example)
            if example.max_prompt or example.max_answer:
                text = self._cut(example, text, len(end))
            start, stop = total + len(begin), total + len(begin) + len(text.ids)
            first, *_, last = (example.segments[0], *example.segments)
            targets += [(total, start)] * first.is_target
            targets += [(start + token, start + after) for token, after in text.targets]
            total = stop + len(end)
            targets += [(stop, total)] * last.is_target
            parts += [begin, text.ids, end]
            ends += [total] * example.ends_document
            num_of_text += len(text.ids)
        is_target = np.zeros(total, dtype=bool)
        for start, stop in targets:
            is_target[start:stop] = True
        return Encoded(flatten(parts), is_target, np.array(ends, dtype=np.int64), num_of_text, refused=refused)

    def _cut(self, example: Example, text: TextTokens, num_end: int) -> TextTokens:
        """Return a prompt and its answer within the limits of an example. num_end: tokens after the answer."""
        answer = text.targets[0][0] if text.targets else len(text.ids)
        first = answer if not example.max_prompt else min(answer, example.max_prompt)
        stop = len(text.ids) if not example.max_answer else min(len(text.ids), answer + example.max_answer - num_end)
        self._num_cut += first < answer or stop < len(text.ids)
        ids = [*text.ids[:first], *text.ids[answer:stop]]
        return text._replace(ids=ids, targets=[(first, len(ids))] if first < len(ids) else [])

    @property
    def state(self) -> EncoderState:
        """Special tokens before the next document, and `overlap`."""
        return [self._begin, self.overlap]

    @state.setter
    def state(self, state: EncoderState) -> None:
        if state is not None:
            self._begin, self.overlap = state

    def _around(self, example: Example) -> tuple[list[int], list[int]]:
        """Return the special tokens before and after the text of the next example."""
        begin, end = self._begin, [self._special.end] if example.ends_document else []
        if example.has_special_tokens:
            begin, end, self.overlap = [], [], 0
        self._begin = []
        if example.ends_document:
            self._begin = self._special.begin_next if end else self._special.begin
        return begin, end


def with_specials(counts: Mapping[str, int]) -> str:
    """Return a clause on chats whose messages have special tokens in their text.

    counts: number of such chats, by how the tokens are read.
    """
    clauses = [f"as {what} {count:,}" for what, count in counts.items() if count]
    return f"chats with special tokens of the tokenizer in the text of a message: {', '.join(clauses)}"


def flatten(parts: Sequence[Sequence[int]]) -> NDArray[np.uint32]:
    """Return the concatenation of lists of tokens."""
    return np.fromiter(chain.from_iterable(parts), np.uint32)
