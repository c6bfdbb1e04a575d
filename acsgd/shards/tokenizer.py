"""Load the tokenizer in a model directory."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from acsgd.shards.files import blame

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""A directory with a tokenizer has at least one of these."""


def load_tokenizer(model_dir: Path, model_config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer in `model_dir`. Raises ValueError if it is missing, invalid or too large for the model."""
    # without any of these files, transformers returns an empty tokenizer
    if not any((model_dir / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(f"{model_dir} has no tokenizer ({', '.join(TOKENIZER_FILES)}); copy the model's there")
    with blame(model_dir, "has no tokenizer that transformers can load", "copy the model's tokenizer files again"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            model_dir, local_files_only=True, trust_remote_code=False
        )
    if len(tokenizer) > model_config.vocab_size:
        raise ValueError(
            f"the tokenizer in {model_dir} has {len(tokenizer)} tokens, but the model's vocabulary only "
            f"{model_config.vocab_size}; give the tokenizer that belongs to the model"
        )
    return tokenizer
