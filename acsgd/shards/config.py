"""Read config.json of a model directory and check that a model of it can be built and run."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from acsgd.shards import family_of
from acsgd.shards.files import blame, read_json_object
from acsgd.shards.layers import meta_model

CONFIG = "config.json"
REMEDY = "correct it or download it again"
MAX_BLOCKS = 99_999
"""Maximum number of blocks: file names of layers have five digits."""
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "n_inner",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
"""Names, common to the families or of one of them, of sizes that are at least 1."""


def read_config(directory: Path) -> PreTrainedConfig:
    """Read config.json of a Hugging Face or shard directory.

    Runs a model of one block on the meta device, which needs no memory, since transformers checks types but few values.
    Raises ValueError if the file is missing or invalid, or describes a quantized model or one of an unknown family.
    """
    path = directory / CONFIG
    if not os.path.lexists(path):
        raise ValueError(f"{directory} has no {CONFIG}; give a Hugging Face model directory or a layer-shard directory")
    fields = read_json_object(path)
    model_type = fields.get("model_type")
    if not isinstance(model_type, str):
        raise ValueError(f'{path} has no "model_type" that is a text; download it again')
    family_of(model_type)  # first: the error of transformers lists hundreds of families
    if fields.get("quantization_config") is not None:
        raise ValueError(
            f'{path} is of a quantized model ("quantization_config"); acsgd trains floating-point weights: give the '
            "model it was quantized from"
        )
    with blame(path, "is not a config that transformers can read", REMEDY):
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    _check_sizes(config, path)
    with blame(path, "describes a model that cannot be built", REMEDY):
        _run_one_block(config)
    return config


def parameter_count(config: PreTrainedConfig) -> int:
    """Return the number of parameters of a model whose blocks are all alike, without building all of them."""
    one, two = (sum(param.numel() for param in meta_model(_shortened(config, n)).parameters()) for n in (1, 2))
    return one + (config.num_hidden_layers - 1) * (two - one)


def _check_sizes(config: PreTrainedConfig, path: Path) -> None:
    """Raise ValueError for a number of blocks or another size that no model has."""
    names = config.attribute_map
    for name in ("num_hidden_layers", *SIZES):
        value: Any = getattr(config, name, None)
        highest = MAX_BLOCKS if name == "num_hidden_layers" else 2**31 - 1
        if value is not None and not (isinstance(value, int) and 1 <= value <= highest):
            raise ValueError(
                f"{path}: {names.get(name, name)}={value!r} must be a whole number from 1 to {highest}; {REMEDY}"
            )


def _run_one_block(config: PreTrainedConfig) -> None:
    """Run embedding, first block and head on two tokens on the meta device. Raises what transformers and torch do."""
    config = _shortened(config, 1)
    model, family = meta_model(config), family_of(config.model_type)
    family.rebuild_buffers(model, torch.device("meta"))
    state = {"tokens": torch.empty(1, 2, dtype=torch.long, device="meta")}
    context: Any = None
    with torch.no_grad():
        for shard in family.layers(config):
            if shard.kind == "block":
                context = family.context(model, state)
            state = family.call(model, shard, state, context)


def _shortened(config: PreTrainedConfig, blocks: int) -> PreTrainedConfig:
    """Return a copy of a config with another number of blocks."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = blocks
    return config
