"""Tokens of examples for tasks with one example per row: labels of sequences, and target sequences."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from itertools import takewhile
from typing import Literal, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from acsgd.io.formats.base import Example
from acsgd.io.sampling.encode import Encoded, EncoderState, flatten
from acsgd.io.sources.text import excerpt
from acsgd.tasks import TOKEN_TYPES

Long = Literal["truncate", "skip", "error"]


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

    def __init__(self, tokenizer: PreTrainedTokenizerBase, sequence: int, long: Long) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)  # truncation changes its state, and with it its fingerprint
        self._lock = threading.Lock()  # so do target texts
        self._sequence = sequence
        self._long = long
        self._num_long = 0

    @property
    def key(self) -> str:
        """What the tokens depend on besides the tokenizer; part of the cache key."""
        return f"{type(self).__name__} {self._sequence} {self._long}"

    @property
    def note(self) -> str | None:
        """Clause that describes the examples that are too long, None if there are none."""
        done = "left out" if self._long == "skip" else "truncated"
        return f"longer than {self._sequence} tokens and {done}: {self._num_long:,}" if self._num_long else None

    def _texts_of(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None, *, as_target: bool = False
    ) -> tuple[list[list[list[int]]], list[bool]]:
        """Return the tokens of texts, or of pairs of texts, truncated if that is asked, and which were too long.

        With their types, if there are any.
        """
        options = {"return_attention_mask": False, "verbose": False}
        arguments = {"text_target": texts} if as_target else {"text": texts, "text_pair": pairs}
        with self._lock:
            encoded = self._tokenizer(**arguments, **options)
            is_long = [len(each) > self._sequence for each in encoded["input_ids"]]
            if self._long == "truncate" and any(is_long):
                encoded = self._tokenizer(**arguments, **options, truncation=True, max_length=self._sequence)
        return [encoded[name] for name in self._names], is_long

    def _kept(self, examples: Sequence[Example], is_long: Sequence[bool]) -> list[int]:
        """Return the indices of the examples that are kept, and count those that are too long."""
        for example, exceeds in zip(examples, is_long, strict=True):
            if not example.ends_document or (exceeds and self._long == "error"):
                remedy = "a longer data.sequence, or data.long=truncate or skip"
                raise ValueError(
                    f"data.sequence={self._sequence} is too short for the example that begins with: "
                    f"{excerpt(example.text)}; use {remedy if example.ends_document else 'shorter texts'}"
                )
        self._num_long += sum(is_long)
        return [index for index, exceeds in enumerate(is_long) if not exceeds or self._long == "truncate"]


class SequenceEncoder(_ExampleEncoder):
    """Encodes texts, or pairs of texts in two segments, with labels.

    has_types: whether the model takes types of tokens. They are those of the tokenizer, if it has any.
    """

    _num_texts: int | None = None

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, sequence: int, long: Long, *, has_types: bool = False
    ) -> None:
        super().__init__(tokenizer, sequence, long)
        if has_types and TOKEN_TYPES in tokenizer.model_input_names:
            self._names = ("input_ids", TOKEN_TYPES)

    @property
    def key(self) -> str:
        """What the tokens depend on besides the tokenizer; part of the cache key."""
        return " ".join([super().key, *self._names[1:]])

    def tokenize(self, examples: Sequence[Example]) -> Sequence[ExampleTokens]:
        """Return the tokens of the one or two texts of each example. Raises ValueError if only some are pairs."""
        num_texts = len(examples[0].segments)
        _check_texts(examples, num_texts)
        columns = ([example.segments[place].text for example in examples] for place in range(num_texts))
        encoded, is_long = self._texts_of(*columns)
        return [ExampleTokens(*each) for each in zip(zip(*encoded, strict=True), is_long, strict=True)]

    def encode(self, examples: Sequence[Example], tokenized: Sequence[ExampleTokens]) -> Encoded:
        """Return the tokens and the labels of examples. Raises ValueError if only some are pairs."""
        self._num_texts = self._num_texts or len(examples[0].segments)
        _check_texts(examples, self._num_texts)
        kept = self._kept(examples, [each.is_long for each in tokenized])
        tokens, *types = (
            flatten([tokenized[index].parts[place] for index in kept]) for place in range(len(self._names))
        )
        ends = np.cumsum([len(tokenized[index].parts[0]) for index in kept], dtype=np.int64)
        labels = [label for index in kept if (label := examples[index].label) is not None]
        assert len(labels) == len(kept)
        return Encoded(tokens, np.ones(len(tokens), dtype=bool), ends, len(tokens), labels, types[0] if types else None)


class PairEncoder(_ExampleEncoder):
    """Encodes prompts for an encoder, and answers, the targets, for a decoder; each as a separate text."""

    def tokenize(self, examples: Sequence[Example]) -> Sequence[ExampleTokens]:
        """Return the tokens of the prompt and of the answer of each example.

        Raises ValueError if an example does not consist of a prompt and an answer.
        """
        texts = [prompt_and_answer(example) for example in examples]
        [prompts], long_prompts = self._texts_of([prompt for prompt, _ in texts])
        [answers], long_answers = self._texts_of([answer for _, answer in texts], as_target=True)
        is_long = [a or b for a, b in zip(long_prompts, long_answers, strict=True)]
        return [ExampleTokens(*each) for each in zip(zip(prompts, answers, strict=True), is_long, strict=True)]

    def encode(self, examples: Sequence[Example], tokenized: Sequence[ExampleTokens]) -> Encoded:
        """Return the tokens of examples, those of the answer after those of the prompt."""
        kept = self._kept(examples, [each.is_long for each in tokenized])
        parts = [part for index in kept for part in tokenized[index].parts]
        lengths = np.array([len(part) for part in parts], dtype=np.int64)
        targets = np.repeat(np.arange(len(parts)) % 2 == 1, lengths)
        return Encoded(flatten(parts), targets, np.cumsum(lengths)[1::2], int(lengths.sum()))


def _check_texts(examples: Sequence[Example], number: int) -> None:
    """Raise ValueError unless all examples have a number of texts."""
    if other := next((example for example in examples if len(example.segments) != number), None):
        texts = " | ".join(segment.text for segment in other.segments)
        raise ValueError(
            f"some examples have one text and some have two: {excerpt(texts)}; divide them into two sources"
        )


def prompt_and_answer(example: Example) -> tuple[str, str]:
    """Return the text before the last targets, and these, without what a chat template writes after them.

    Raises ValueError if one of them is missing.
    """
    until = max((place for place, segment in enumerate(example.segments, 1) if segment.is_target), default=0)
    answer = list(takewhile(lambda segment: segment.is_target, reversed(example.segments[:until])))[::-1]
    prompt = example.segments[: until - len(answer)]
    texts = ["".join(segment.text for segment in part) for part in (prompt, answer)]
    if not all(texts):
        raise ValueError(
            f"an example has no prompt with an answer: {excerpt(example.text)}; use records with both, such as "
            '{"input": "...", "output": "..."}'
        )
    return texts[0], texts[1]
