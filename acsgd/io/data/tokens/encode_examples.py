"""Tokens of examples for tasks with one example per row: labels of sequences, and target sequences."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from itertools import takewhile
from typing import Literal, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from acsgd.io.data.formats.base import Example, FormatError
from acsgd.io.data.formats.labels import Labels
from acsgd.io.data.sources.text import PIECE_CHARS, excerpt
from acsgd.io.data.tokens.encode import Encoded, EncoderState, flatten, with_specials
from acsgd.model_classes import TOKEN_TYPES

LongExample = Literal["truncate", "skip", "error"]
TOO_LONG = FormatError(f"has a text of more than {PIECE_CHARS:,} characters", "shorten it")


class ExampleTokens(NamedTuple):
    """Tokens of an example, truncated if that is asked."""

    parts: tuple[list[int], ...]
    """Tokens of the text or pair of texts, and their types if the model takes them; or of prompt and answer."""
    is_long: bool
    """Whether there are more than a row may have."""


class _ExampleEncoder:
    """Encodes examples of at most `sequence` tokens, with the special tokens that the tokenizer puts around texts.

    long: what is done with longer ones.
    """

    overlap = 0
    state: EncoderState = None
    _names: Sequence[str] = ("input_ids",)
    """What the tokenizer returns that is needed."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, sequence: int, long: LongExample) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)  # truncation changes its state, and with it its fingerprint
        self._lock = threading.Lock()  # so do target texts
        self._sequence = sequence
        self._long = long
        self._shown_limits = ""
        """Options with smaller limits for messages, if there are any."""
        self._num_long = self._num_with_control = 0
        self._is_within = False  # a record in parts

    @property
    def note(self) -> str | None:
        """Clause that describes examples that are too long, or chats whose messages have special tokens in their text.

        None if there are none.
        """
        done = "left out" if self._long == "skip" else "truncated"
        limit = self._shown_limits or f"{self._sequence} tokens"
        clauses = [f"longer than {limit} and {done}: {self._num_long:,}"] * (self._num_long > 0)
        if self._num_with_control:
            clauses.append(with_specials({"control tokens": self._num_with_control}))
        return "; ".join(clauses) or None

    def _texts_of(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None, *, limit: int = 0, as_target: bool = False
    ) -> tuple[list[list[list[int]]], list[bool]]:
        """Return the tokens of texts, or of pairs of texts, truncated if that is asked, and which were too long.

        With their types, if there are any. limit: maximum number of tokens below that of a sequence; 0 = none.
        """
        longest = min(self._sequence, limit or self._sequence)
        options = {"return_attention_mask": False, "verbose": False}
        arguments = {"text_target": texts} if as_target else {"text": texts, "text_pair": pairs}
        with self._lock:
            encoded = self._tokenizer(**arguments, **options)
            is_long = [len(each) > longest for each in encoded["input_ids"]]
            if self._long == "truncate" and any(is_long):
                encoded = self._tokenizer(**arguments, **options, truncation=True, max_length=longest)
        return [encoded[name] for name in self._names], is_long

    def _kept(
        self, examples: Sequence[Example], tokenized: Sequence[ExampleTokens | FormatError]
    ) -> tuple[list[int], dict[int, FormatError | None]]:
        """Return the indices of the examples that are kept, and why others are refused; count the too long ones."""
        kept, refused = list[int](), dict[int, FormatError | None]()
        for index, (example, tokens) in enumerate(zip(examples, tokenized, strict=True)):
            if self._is_within or not example.ends_document:
                refused[index] = None if self._is_within else TOO_LONG
                self._is_within = not example.ends_document
                continue
            if error := tokens if isinstance(tokens, FormatError) else self._refusal(example):
                refused[index] = error
                continue
            assert isinstance(tokens, ExampleTokens)
            if tokens.is_long and self._long == "error":
                raise ValueError(
                    f"{self._shown_limits or f'data.sequence={self._sequence}'} is too short for the example that "
                    f"begins with: {excerpt(example.text)}; give more, or data.long=truncate or skip"
                )
            self._num_long += tokens.is_long
            self._num_with_control += example.control_token is not None
            if not tokens.is_long or self._long == "truncate":
                kept.append(index)
        return kept, refused

    def _refusal(self, example: Example) -> FormatError | None:
        """Return why an example, the next one, is refused; None if it is not."""
        return None


class SequenceEncoder(_ExampleEncoder):
    """Encodes texts, or pairs of texts in two segments, with labels. Its state is the number of texts of an example.

    labels: what they may be; has_types: whether the model takes types of tokens. They are those of the tokenizer, if it
    has any.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        sequence: int,
        long: LongExample,
        labels: Labels,
        *,
        has_types: bool = False,
    ) -> None:
        super().__init__(tokenizer, sequence, long)
        self._labels = labels
        if has_types and TOKEN_TYPES in tokenizer.model_input_names:
            self._names = ("input_ids", TOKEN_TYPES)

    def tokenize(self, examples: Sequence[Example]) -> Sequence[ExampleTokens]:
        """Return the tokens of the one or two texts of each example."""
        tokenized: dict[int, ExampleTokens] = {}
        for number in {len(example.segments) for example in examples}:
            indices = [index for index, example in enumerate(examples) if len(example.segments) == number]
            columns = ([examples[index].segments[place].text for index in indices] for place in range(number))
            encoded, is_long = self._texts_of(*columns)
            parts = zip(*encoded, strict=True)
            tokenized |= zip(indices, map(ExampleTokens, parts, is_long), strict=True)
        return [tokenized[index] for index in range(len(examples))]

    def encode(self, examples: Sequence[Example], tokenized: Sequence[ExampleTokens]) -> Encoded:
        """Return the tokens and the labels of examples. Refuses those whose label the model cannot learn.

        The first example decides whether examples have one text or two; those with another number are refused.
        """
        kept, refused = self._kept(examples, tokenized)
        tokens, *types = (
            flatten([tokenized[index].parts[place] for index in kept]) for place in range(len(self._names))
        )
        ends = np.cumsum([len(tokenized[index].parts[0]) for index in kept], dtype=np.int64)
        labels = np.array([self._number_of(examples[index]) for index in kept], dtype=np.float64)
        is_target = np.ones(len(tokens), dtype=bool)
        return Encoded(tokens, is_target, ends, len(tokens), labels, types[0] if types else None, refused)

    def _refusal(self, example: Example) -> FormatError | None:
        self.state = self.state or [len(example.segments)]
        if len(example.segments) != self.state[0]:
            found, first = ("one text", "two") if len(example.segments) == 1 else ("two texts", "one")
            return FormatError(f"has {found}, but the first record has {first}", "divide them into two sources")
        try:
            self._number_of(example)
        except FormatError as error:
            return error
        return None

    def _number_of(self, example: Example) -> float:
        """Return the label of an example as a number. Raises FormatError."""
        assert example.label is not None
        return self._labels.number_of(example.label)


class PairEncoder(_ExampleEncoder):
    """Encodes prompts for an encoder, and answers, the targets, for a decoder; each as a separate text."""

    def tokenize(self, examples: Sequence[Example]) -> Sequence[ExampleTokens | FormatError]:
        """Return the tokens of the prompt and of the answer of each example, or why there are none."""
        texts = [_prompt_and_answer_or_error(example) for example in examples]
        pairs = [text for text in texts if not isinstance(text, FormatError)]
        if not pairs:
            return [text for text in texts if isinstance(text, FormatError)]
        max_prompt, max_answer = examples[0].max_prompt, examples[0].max_answer
        limits = {"data.max_prompt": max_prompt, "data.max_answer": max_answer}
        self._shown_limits = " or ".join(f"{name}={limit}" for name, limit in limits.items() if limit)
        [prompts], long_prompts = self._texts_of([prompt for prompt, _ in pairs], limit=max_prompt)
        [answers], long_answers = self._texts_of([answer for _, answer in pairs], limit=max_answer, as_target=True)
        is_long = [a or b for a, b in zip(long_prompts, long_answers, strict=True)]
        tokenized = map(ExampleTokens, zip(prompts, answers, strict=True), is_long)
        return [text if isinstance(text, FormatError) else next(tokenized) for text in texts]

    def encode(self, examples: Sequence[Example], tokenized: Sequence[ExampleTokens | FormatError]) -> Encoded:
        """Return the tokens of examples, those of the answer after those of the prompt."""
        kept, refused = self._kept(examples, tokenized)
        parts = [part for index in kept if isinstance(each := tokenized[index], ExampleTokens) for part in each.parts]
        lengths = np.array([len(part) for part in parts], dtype=np.int64)
        targets = np.repeat(np.arange(len(parts)) % 2 == 1, lengths)
        return Encoded(flatten(parts), targets, np.cumsum(lengths)[1::2], int(lengths.sum()), refused=refused)


def _prompt_and_answer_or_error(example: Example) -> tuple[str, str] | FormatError:
    try:
        return prompt_and_answer(example)
    except FormatError as error:
        return error


def prompt_and_answer(example: Example) -> tuple[str, str]:
    """Return the text before the last targets, and these, without what a chat template writes after them.

    Raises FormatError if one of them is missing.
    """
    until = max((place for place, segment in enumerate(example.segments, 1) if segment.is_target), default=0)
    answer = list(takewhile(lambda segment: segment.is_target, reversed(example.segments[:until])))[::-1]
    prompt = example.segments[: until - len(answer)]
    texts = ["".join(segment.text for segment in part) for part in (prompt, answer)]
    if not all(texts):
        raise FormatError(
            f"has no prompt with an answer: {excerpt(example.text)}",
            'use records with both, such as {"input": "...", "output": "..."}',
        )
    return texts[0], texts[1]
