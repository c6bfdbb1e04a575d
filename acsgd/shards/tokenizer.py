"""Load the tokenizer in a model directory."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from acsgd.shards.files import blame

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "spm.model",
    "sentencepiece.bpe.model",
)
"""A directory with a tokenizer has at least one of these."""
MAX_ID = 2**24
"""Largest id of a token. The tokenizers library allocates memory up to it, and aborts if there is too little."""


def load_tokenizer(model_dir: Path, model_config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer in `model_dir`. Raises ValueError if it is missing, invalid or too large for the model."""
    # without any of these files, transformers returns an empty tokenizer
    if not any((model_dir / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(f"{model_dir} has no tokenizer ({', '.join(TOKENIZER_FILES)}); copy the model's there")
    with blame(model_dir, "has no tokenizer that transformers can load", "copy the model's tokenizer files again"):
        _check_ids(model_dir / "tokenizer.json")
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            model_dir, local_files_only=True, trust_remote_code=False
        )
        if not isinstance(tokenizer.model_max_length, int | float):
            raise ValueError(f"model_max_length={tokenizer.model_max_length!r} is not a number")
    if len(tokenizer) > (vocabulary := model_config.get_text_config().vocab_size):
        raise ValueError(
            f"the tokenizer in {model_dir} has {len(tokenizer)} tokens, but the model's vocabulary only "
            f"{vocabulary}; give the tokenizer that belongs to the model"
        )
    return tokenizer


def _check_ids(path: Path) -> None:
    """Raise ValueError if tokenizer.json has an id above MAX_ID. Its other errors are found when it is loaded."""
    if not path.is_file():
        return
    fields = json.loads(path.read_bytes())
    vocabulary, added = fields["model"].get("vocab", {}), fields.get("added_tokens") or []
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    if largest := max((id_ for id_ in [*ids, *(token["id"] for token in added)] if id_ > MAX_ID), default=None):
        raise ValueError(f"tokenizer.json has a token with the id {largest}")
