"""Tokens of examples for tasks with one example per row: labels of sequences, and target sequences."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import takewhile
from typing import Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from acsgd.io.formats.base import Example
from acsgd.io.sampling.encode import Encoded, flatten
from acsgd.io.sources.text import excerpt

Long = Literal["truncate", "skip", "error"]


class _ExampleEncoder:
    """Encodes examples of at most `sequence` tokens, with the special tokens that the tokenizer puts around texts.

    long: what is done with longer ones.
    """

    overlap = 0

    def __init__(self, tokenizer: PreTrainedTokenizerBase, sequence: int, long: Long) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)  # truncation changes its state, and with it its fingerprint
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

    def _tokenize(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None, *, as_target: bool = False
    ) -> tuple[list[list[int]], list[bool]]:
        """Return the tokens of texts, or of pairs of texts, truncated if that is asked, and which were too long."""
        options = {"return_attention_mask": False, "verbose": False}
        arguments = {"text_target": texts} if as_target else {"text": texts, "text_pair": pairs}
        ids = self._tokenizer(**arguments, **options)["input_ids"]
        is_long = [len(each) > self._sequence for each in ids]
        if self._long == "truncate" and any(is_long):
            ids = self._tokenizer(**arguments, **options, truncation=True, max_length=self._sequence)["input_ids"]
        return ids, is_long

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
    """Encodes texts, or pairs of texts in two segments, with labels."""

    _num_texts: int | None = None

    def encode(self, examples: Sequence[Example]) -> Encoded:
        """Return the tokens and the labels of examples. Raises ValueError if only some are pairs."""
        texts = [[segment.text for segment in example.segments] for example in examples]
        self._num_texts = self._num_texts or len(texts[0])
        if other := next((text for text in texts if len(text) != self._num_texts), None):
            raise ValueError(
                f"some examples have one text and some have two: {excerpt(' | '.join(other))}; divide them into two "
                "sources"
            )
        ids, is_long = self._tokenize(*([text[place] for text in texts] for place in range(self._num_texts)))
        kept = self._kept(examples, is_long)
        tokens = flatten([ids[index] for index in kept])
        ends = np.cumsum([len(ids[index]) for index in kept], dtype=np.int64)
        labels = [label for index in kept if (label := examples[index].label) is not None]
        assert len(labels) == len(kept)
        return Encoded(tokens, np.ones(len(tokens), dtype=bool), ends, len(tokens), labels)


class PairEncoder(_ExampleEncoder):
    """Encodes prompts for an encoder, and answers, the targets, for a decoder; each as a separate text."""

    def encode(self, examples: Sequence[Example]) -> Encoded:
        """Return the tokens of examples, those of the answer after those of the prompt.

        Raises ValueError if an example does not consist of a prompt and an answer.
        """
        texts = [_prompt_and_answer(example) for example in examples]
        prompts, long_prompts = self._tokenize([prompt for prompt, _ in texts])
        answers, long_answers = self._tokenize([answer for _, answer in texts], as_target=True)
        kept = self._kept(examples, [a or b for a, b in zip(long_prompts, long_answers, strict=True)])
        parts = [part for index in kept for part in (prompts[index], answers[index])]
        lengths = np.array([len(part) for part in parts], dtype=np.int64)
        targets = np.repeat(np.arange(len(parts)) % 2 == 1, lengths)
        return Encoded(flatten(parts), targets, np.cumsum(lengths)[1::2], int(lengths.sum()))


def _prompt_and_answer(example: Example) -> tuple[str, str]:
    """Return the text before the last targets, and these. Raises ValueError if one of them is missing."""
    answer = list(takewhile(lambda segment: segment.is_target, reversed(example.segments)))[::-1]
    prompt = example.segments[: len(example.segments) - len(answer)]
    texts = ["".join(segment.text for segment in part) for part in (prompt, answer)]
    if not all(texts):
        raise ValueError(
            f"an example has no prompt with an answer: {excerpt(example.text)}; use records with both, such as "
            '{"input": "...", "output": "..."}'
        )
    return texts[0], texts[1]
