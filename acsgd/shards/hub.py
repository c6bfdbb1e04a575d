"""Find the directory of a model, downloading it from the Hugging Face Hub if needed."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedConfig

from acsgd.config.options import ModelConfig
from acsgd.shards.convert import locate_parameters, read_config
from acsgd.shards.disk import MANIFEST
from acsgd.shards.layers import meta_model


def open_model(model: ModelConfig) -> tuple[Path, PreTrainedConfig]:
    """Return a model's local directory and its config; download the model if its name is a Hugging Face id.

    Raises ValueError if the model cannot be found or read, or if it is pretrained and lacks weights.
    """
    directory = _find_model(model.name, weights=model.init == "pretrained")
    config = read_config(directory)
    if model.init == "pretrained" and not (directory / MANIFEST).is_file():
        locate_parameters(directory, meta_model(config))
    return directory, config


def _find_model(name: str, *, weights: bool) -> Path:
    """Return the local directory of a model; weights: whether a download includes them."""
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
    return _find_model(_download(name, weights=weights), weights=weights)


def _download(name: str, *, weights: bool) -> str:
    """Download config, tokenizer and optionally weights of a Hugging Face id into its cache; return the directory."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.txt", "*.model", "*.jinja", *(["*.safetensors"] if weights else [])]
    try:
        # subfolders of a repository hold the same weights in other formats
        return snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*/*"])
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise ValueError(
            f"model.name={name} is neither a local directory nor a model on the Hugging Face Hub: {first_line}"
        ) from None
