"""Load the tokenizer in a model directory, and find which special tokens it puts around a text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from acsgd.shards.files import TOKENIZER_FILES, blame, has_tokenizer

SETTINGS = "tokenizer_config.json"
BEGIN = "add_bos_token"
"""Setting of whether the tokenizer puts bos_token before a text."""
BEGIN_WITH_BOS = ("opt",)
"""Types of models pretrained with bos_token before each document, which the class of their tokenizer leaves out unless
its files set `add_bos_token`."""
MAX_ID = 2**24
"""Largest id of a token. The tokenizers library allocates memory up to it, and aborts if there is too little."""


class SpecialTokens(NamedTuple):
    """Ids that a tokenizer puts around a text."""

    before: list[int]
    after: list[int]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> SpecialTokens:
        """Return the special tokens of a tokenizer."""
        encoded = tokenizer("a", return_special_tokens_mask=True)
        ids, mask = encoded["input_ids"], encoded["special_tokens_mask"]
        before = len(list(takewhile(bool, mask)))
        after = len(list(takewhile(bool, reversed(mask[before:]))))
        return cls(ids[:before], ids[len(ids) - after :])


class DocumentTokens(NamedTuple):
    """Ids of the special tokens between documents in training."""

    begin: list[int]
    """Before each document, as the tokenizer puts them before a text."""
    end: int
    """After each document: eos_token."""

    @property
    def begin_next(self) -> list[int]:
        """Ids before each document but the first: without a token that already ends the document before."""
        return [] if self.begin == [self.end] else self.begin

    def describe(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, padding: int | None = None) -> str:
        """Return a sentence on the tokens and on padding. vocabulary: number of ids of the model."""
        begin = f"begins with {name_tokens(tokenizer, self.begin)}" if self.begin else "begins with no token of its own"
        padded = "no sequence is padded" if padding is None else f"padding is {name_tokens(tokenizer, [padding])}"
        sentence = f"tokens: a document {begin} and ends with {name_tokens(tokenizer, [self.end])}; {padded}"
        if unused := vocabulary - len(tokenizer):
            sentence += f"; {unused} of the {vocabulary} ids of the model have no token"
        return sentence

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> DocumentTokens:
        """Return the tokens of a tokenizer. Raises ValueError if it has no eos_token."""
        end = tokenizer.eos_token_id
        if not isinstance(end, int):
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path} has no eos_token to put between documents; "
                'set "eos_token" in its tokenizer_config.json'
            )
        return cls(SpecialTokens.of(tokenizer).before, end)


def added_tokens(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the tokens that a tokenizer recognizes before it divides what is between them, such as eos_token.

    Without those of `unknown_tokens`.
    """
    return {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids} - {*unknown_tokens(tokenizer)}


def unknown_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token that stands for text that a tokenizer does not know; none if it is eos_token, as of GPT-2."""
    id_ = tokenizer.unk_token_id
    return [id_] if isinstance(id_, int) and id_ != tokenizer.eos_token_id else []


def padding_id(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> int:
    """Return the token with which rows are padded: that of the model, else of the tokenizer, else eos_token.

    Some classifiers find the end of a text by the model's.
    """
    text = config.get_text_config()
    ids = (getattr(text, "pad_token_id", None), tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((id_ for id_ in ids if isinstance(id_, int) and 0 <= id_ < text.vocab_size), 0)


def name_tokens(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Return ids with the text of their tokens: "2 ('</s>')"."""
    return " ".join(f"{id_} ({tokenizer.convert_ids_to_tokens(id_)!r})" for id_ in ids)


def load_tokenizer(
    directory: Path, model_config: PreTrainedConfig, model_dir: Path | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer in a directory. Raises ValueError if it is missing, invalid or too large for the model.

    model_dir: directory of the model, where model.tokenizer may name another.
    """
    remedy = "" if model_dir is None else ", or give another with model.tokenizer"
    tokenizer = read_tokenizer(directory, model_config, remedy=remedy)
    if len(tokenizer) > (vocabulary := model_config.get_text_config().vocab_size):
        # the conversion looks for the tokenizer in the model's directory
        copy = "" if model_dir in (None, directory) else f"copy its files to {model_dir} and "
        raise ValueError(
            f"the tokenizer in {directory} has {len(tokenizer)} tokens, but the model's vocabulary only "
            f"{vocabulary}; give the tokenizer that belongs to the model, or {copy}add rows for new tokens: acsgd "
            f"convert from-hf {model_dir or directory} TARGET --resize-embeddings"
        )
    return tokenizer


def read_tokenizer(model_dir: Path, model_config: PreTrainedConfig, *, remedy: str = "") -> PreTrainedTokenizerBase:
    """Load the tokenizer in `model_dir`, with the special tokens with which the model was pretrained.

    remedy: what else to do if it is missing. Raises ValueError if it is missing or invalid.
    """
    if not has_tokenizer(model_dir):
        raise ValueError(f"{model_dir} has no tokenizer ({', '.join(TOKENIZER_FILES)}); copy the model's there{remedy}")
    with blame(model_dir, "has no tokenizer that transformers can load", "copy the model's tokenizer files again"):
        _check_ids(model_dir / "tokenizer.json")
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            model_dir, local_files_only=True, trust_remote_code=False
        )
        if model_config.model_type in BEGIN_WITH_BOS and not _sets_begin(model_dir):
            setattr(tokenizer, BEGIN, True)
        if not isinstance(tokenizer.model_max_length, int | float):
            raise ValueError(f"model_max_length={tokenizer.model_max_length!r} is not a number")
    return tokenizer


def _sets_begin(model_dir: Path) -> bool:
    """Whether the files of a tokenizer say which token is put before a text."""
    if (model_dir / "tokenizer.json").is_file():
        return True
    settings = model_dir / SETTINGS
    return settings.is_file() and BEGIN in json.loads(settings.read_bytes())


def _check_ids(path: Path) -> None:
    """Raise ValueError if tokenizer.json has an id above MAX_ID. Its other errors are found when it is loaded."""
    if not path.is_file():
        return
    fields = json.loads(path.read_bytes())
    vocabulary, added = fields["model"].get("vocab", {}), fields.get("added_tokens") or []
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    if largest := max((id_ for id_ in [*ids, *(token["id"] for token in added)] if id_ > MAX_ID), default=None):
        raise ValueError(f"tokenizer.json has a token with the id {largest}")
