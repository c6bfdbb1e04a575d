"""Find a model's directory, fetch it from the Hugging Face Hub if needed, and load its tokenizer."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from acsgd.config.options import ModelConfig
from acsgd.shards.convert import locate, read_config
from acsgd.shards.disk import MANIFEST
from acsgd.shards.layers import meta_model

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""One of these makes a directory a tokenizer's."""


def open_model(model: ModelConfig) -> tuple[Path, PreTrainedConfig]:
    """Return the model's directory, which has the weights unless they are drawn anew, and its config."""
    directory = _find_model(model.name, scratch=model.init == "scratch")
    config = read_config(directory)
    if model.init == "pretrained" and not (directory / MANIFEST).is_file():
        locate(directory, meta_model(config))
    return directory, config


def _find_model(name: str, *, scratch: bool) -> Path:
    """Return the local directory of `model.name`, fetching a Hugging Face id if it is not a directory."""
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(
                f"model.name={name} is a directory without config.json; give a Hugging Face model directory or a "
                "layer-shard directory"
            )
        return path
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(f"model.name={name} is not a directory; give a directory or a Hugging Face id, owner/name")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    weights = [] if scratch else ["*.safetensors"]
    try:
        patterns = ["*.json", "*.txt", "*.model", "*.jinja", *weights]
        # folders of a repository hold the same weights in other formats
        fetched = snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*/*"])
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise ValueError(
            f"model.name={name} is neither a directory here nor a model the Hugging Face hub gives: {first_line}"
        ) from None
    return _find_model(fetched, scratch=scratch)


def load_tokenizer(model_dir: Path, model_config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    if not any((model_dir / name).is_file() for name in TOKENIZER_FILES):  # else transformers makes an empty one
        raise ValueError(f"{model_dir} has no tokenizer ({', '.join(TOKENIZER_FILES)}); copy the model's there")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise ValueError(f"{model_dir} has no tokenizer that transformers can load: {first_line}") from None
    if len(tokenizer) > model_config.vocab_size:
        raise ValueError(
            f"the tokenizer in {model_dir} has {len(tokenizer)} tokens, but the model's vocabulary only "
            f"{model_config.vocab_size}; give the tokenizer that belongs to the model"
        )
    return tokenizer
