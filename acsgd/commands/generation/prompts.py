"""Prompts as token ids: special tokens, chat templates, and the maximum length of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from acsgd.commands.generation.model import LoadedModel
from acsgd.shards.tokenizer import SpecialTokens, name_tokens

Conversation = list[dict[str, Any]]
"""Messages of a chat, each with "role" and "content", as chat templates take them."""

Prompt = str | Conversation


@dataclass(frozen=True)
class PromptEncoder:
    """Turns prompts into token ids, by the conventions of the tokenizer and the model."""

    tokenizer: PreTrainedTokenizerBase
    before: list[int]
    """Ids that the tokenizer puts before a prompt."""
    after: list[int]
    """Ids that the tokenizer puts after a prompt."""
    ends: list[int]
    """Ids that end a generated text."""
    padding: int
    """Id that fills up shorter prompts of a batch; they are masked."""
    max_positions: int | None
    """Maximum number of tokens of the model. None = any number."""
    is_encoder_decoder: bool

    @classmethod
    def of(cls, loaded: LoadedModel) -> PromptEncoder:
        """Return the encoder of a model's prompts."""
        tokenizer, model = loaded.tokenizer, loaded.model
        special = SpecialTokens.of(tokenizer)
        ends = _ends(model, tokenizer)
        padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (ends or [0])[0]
        positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        virtual = loaded.adapter.virtual_tokens if loaded.adapter else 0
        return cls(
            tokenizer,
            before=special.before,
            after=special.after,
            ends=ends,
            padding=padding,
            max_positions=None if positions is None else positions - virtual,
            is_encoder_decoder=model.config.is_encoder_decoder,
        )

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return bool(self.tokenizer.chat_template)

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the ids of a prompt; the chat template is applied to messages.

        Raises ValueError, a clause without the place of the prompt, if it is empty or too long for the model.
        """
        if isinstance(prompt, str):
            return self._checked(self._tokenized(prompt, add_special_tokens=True))
        return self.encode_text(self._chat(prompt))

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of a prompt that contains the special tokens it needs. Raises ValueError as `encode`."""
        return self._checked(self._tokenized(text, add_special_tokens=False))

    def _checked(self, ids: list[int]) -> list[int]:
        """Return the ids of a prompt. Raises ValueError if the model cannot take them."""
        if not ids:
            raise ValueError("the prompt has no tokens; give a text")
        if self.max_new_tokens(len(ids)) < 1:
            longest = (self.max_positions or 0) - (not self.is_encoder_decoder)
            raise ValueError(
                f"the prompt has {len(ids)} tokens, the model takes at most {longest} and a new one; shorten the prompt"
            )
        return ids

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
        parts = [
            f"a prompt begins with {self._names(self.before)}" if self.before else "no token is put before a prompt",
            f"{self._names(self.ends)} ends a text" if self.ends else "no token ends a text before --max-new-tokens",
            f"padding with {self._names([self.padding])}"
            + (", since the tokenizer has no padding token" if self.tokenizer.pad_token_id is None else ""),
        ]
        if self.after:
            parts.insert(1, f"{self._names(self.after)} is put after it")
        return f"tokens: {'; '.join(parts)}"

    def _tokenized(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError("the prompt is not valid UTF-8; correct it") from None
        return self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]

    def _chat(self, messages: Conversation) -> str:
        if not self.has_chat_template:
            raise ValueError("messages need a chat template, which the tokenizer does not have; give texts as prompts")
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates raise errors of every class
            raise ValueError(f"the chat template refuses the messages ({error}); correct them") from None
        assert isinstance(text, str)
        return text

    def _names(self, ids: Sequence[int]) -> str:
        return name_tokens(self.tokenizer, ids)


def _ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that end a text: of generation_config.json or config.json, else of the tokenizer."""
    assert model.generation_config is not None
    ends = model.generation_config.eos_token_id
    if ends is None:
        ends = tokenizer.eos_token_id
    found = [ends] if isinstance(ends, int) else list(ends or ())
    if not all(isinstance(id_, int) for id_ in found):
        raise ValueError(
            f"generation_config.json: eos_token_id={ends!r} is neither an id nor a list of ids; correct it"
        )
    return found
