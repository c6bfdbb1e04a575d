"""Prompts as token ids: special tokens, and the maximum length of a model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from acsgd.commands.generation.model import LoadedModel
from acsgd.commands.recorded import RecordedModel
from acsgd.io.data.formats.base import Example
from acsgd.io.data.tokens.text_tokens import PlainSpecials, plain_prompt_tokens, prompt_tokens
from acsgd.shards.generation import ends_of
from acsgd.shards.tokenizer import SpecialTokens, name_tokens


class PromptIds(NamedTuple):
    """Ids of a prompt."""

    ids: list[int]
    cut_by: str = ""
    """Option of the run whose limit the prompt exceeds, so that it has lost its end; empty if there is none."""


def describe_cuts(cut_by: Iterable[str]) -> list[str]:
    """Return a clause on each option of the run by which prompts are truncated. cut_by: of each prompt."""
    counts = Counter(filter(None, cut_by))
    return [f"longer than {name} of the run and truncated, as in training: {n:,}" for name, n in counts.items()]


@dataclass(frozen=True)
class PromptEncoder:
    """Turns prompts into token ids, by the conventions of the tokenizer and the model."""

    tokenizer: PreTrainedTokenizerBase
    before: list[int]
    """Ids that the tokenizer puts before a prompt."""
    after: list[int]
    """Ids that the tokenizer puts after the prompt of an encoder; none after one that the model continues."""
    ends: list[int]
    """Ids that end a generated text."""
    padding: int
    """Id that fills up shorter prompts of a batch; they are masked."""
    max_positions: int | None
    """Maximum number of tokens of the model. None = any number."""
    is_encoder_decoder: bool
    sequence: int = 0
    """Maximum number of tokens of a prompt of an encoder in the run, which has truncated longer ones; 0 = no limit."""

    @classmethod
    def of(cls, loaded: LoadedModel) -> PromptEncoder:
        """Return the encoder of a model's prompts."""
        tokenizer, model = loaded.tokenizer, loaded.model
        special = SpecialTokens.of(tokenizer)
        assert model.generation_config is not None
        text = model.config.get_text_config(decoder=True)
        ends = [id_ for id_ in ends_of(model.generation_config, tokenizer) if id_ < text.vocab_size]
        padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (ends or [0])[0]
        positions = getattr(text, "max_position_embeddings", None)
        virtual = loaded.adapter.virtual_tokens if loaded.adapter else 0
        return cls(
            tokenizer,
            before=special.before,
            after=special.after if model.config.is_encoder_decoder else [],
            ends=ends,
            padding=padding,
            max_positions=None if positions is None else positions - virtual,
            is_encoder_decoder=model.config.is_encoder_decoder,
            sequence=_sequence_of(loaded, virtual) if model.config.is_encoder_decoder else 0,
        )

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return bool(self.tokenizer.chat_template)

    def encode(self, prompt: Example) -> PromptIds:
        """Return the ids of a prompt, with which the texts of a training run that continue it begin.

        Raises ValueError, a clause without the place of the prompt, if it is empty or too long for the model.
        """
        try:
            prompt.text.encode()
        except UnicodeEncodeError:
            raise ValueError("the prompt is not valid UTF-8; correct it") from None
        ids, cut_by = self._within_limit(prompt)
        if not (self.is_encoder_decoder or prompt.has_special_tokens):
            ids = [*self.before, *ids]
        if not ids:
            raise ValueError("the prompt has no tokens; give a text")
        if self.max_new_tokens(len(ids)) < 1:
            longest = (self.max_positions or 0) - (not self.is_encoder_decoder)
            raise ValueError(
                f"the prompt has {len(ids)} tokens, the model takes at most {longest} and a new one; shorten the prompt"
            )
        return PromptIds(ids, cut_by)

    def _within_limit(self, prompt: Example) -> PromptIds:
        limits = {"data.max_prompt": prompt.max_prompt, "data.sequence": self.sequence}
        name, limit = min(limits.items(), key=lambda each: each[1] or math.inf)
        ids = self._text_ids(prompt)
        if not 0 < limit < len(ids):
            return PromptIds(ids)
        if self.is_encoder_decoder:  # keeps the token after it
            ids = self.tokenizer(prompt.text, verbose=False, truncation=True, max_length=limit)["input_ids"]
        return PromptIds(ids[:limit], name)

    def _text_ids(self, prompt: Example) -> list[int]:
        if self.is_encoder_decoder:
            ids: list[int] = self.tokenizer(prompt.text, verbose=False)["input_ids"]
            return ids
        if prompt.plain and self.tokenizer.is_fast:
            found = plain_prompt_tokens(self.tokenizer, self._plain_specials, prompt.text, prompt.plain)
            if found is not None:
                return found
        [tokens] = prompt_tokens(self.tokenizer, [prompt.text])
        return tokens.ids

    @cached_property
    def _plain_specials(self) -> PlainSpecials:
        return PlainSpecials(self.tokenizer)

    def max_new_tokens(self, prompt_tokens: int) -> int:
        """Return the maximum number of new tokens after a prompt."""
        if self.max_positions is None:
            return 2**31
        if self.is_encoder_decoder:  # each side has all positions; the start token of the decoder takes one
            return self.max_positions - 1 if prompt_tokens <= self.max_positions else 0
        return self.max_positions - prompt_tokens

    def decode(self, ids: list[int]) -> str:
        """Return the text of generated ids, without special tokens."""
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    def describe(self) -> str:
        """Return a sentence on the special tokens."""
        ending = f"{self._names(self.ends)} {'ends' if len(self.ends) == 1 else 'end'} a text"
        parts = [
            f"a prompt begins with {self._names(self.before)}" if self.before else "no token is put before a prompt",
            ending if self.ends else "no token ends a text before --max-new-tokens",
            f"padding with {self._names([self.padding])}"
            + (", since the tokenizer has no padding token" if self.tokenizer.pad_token_id is None else ""),
        ]
        if self.after:
            parts.insert(1, f"{self._names(self.after)} is put after it")
        return f"tokens: {'; '.join(parts)}"

    def _names(self, ids: Sequence[int]) -> str:
        return name_tokens(self.tokenizer, ids)


def _sequence_of(loaded: LoadedModel, virtual_tokens: int) -> int:
    """Return the maximum number of tokens to which the run that saved a model has truncated texts; 0 if it has not."""
    recorded = RecordedModel.of(str(loaded.tokenizer_directory)).options
    is_truncated = recorded.get("data.long", "auto") in ("auto", "truncate")
    return recorded.get("data.sequence", virtual_tokens) - virtual_tokens if is_truncated else 0
