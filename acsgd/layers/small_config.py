"""A small version of a model's config with the same flags, for a comparison that needs weights and arithmetic."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from acsgd.layers.capture import find_blocks, parent_of

VOCABULARY = 512
WINDOW = 8
"""Sliding windows and attention chunks become this short, so that short sequences are longer than they are."""
EXPERTS = 16
POSITIONS = 64
"""Maximum length of sequences, if that of the config is less: the compared sequences have fewer tokens."""
FACTORS = (1, 2, 4, 8, 16, 32, 64)
"""Divisors of the widths."""

_IS_NOISE = re.compile(r"drop|jitter")
_IS_DEPTH = re.compile(r"layer|depth|num_blocks")
_IS_VOCABULARY = re.compile(r"(?<!type_)vocab_size|^n_words$")
_IS_TOKEN = re.compile(r"_token_id$|_token_index$|^(pad|bos|eos|sep|cls|mask|unk)_(idx|index)$")
_IS_WINDOW = re.compile(r"window|attention_chunk_size|local_attention|index_topk$")
_IS_MAXIMUM = re.compile(r"^max_position_embeddings$|^n_positions$|^n_ctx$|^max_seq_len$|^max_sequence_length$")
_IS_EXPERTS = re.compile(r"experts$")
_IS_SELECTION = re.compile(r"per_tok|shared|top|zero|null|group")
_IS_HEADS = re.compile(r"heads$|n_head$")
_IS_WIDTH = re.compile(
    r"hidden_size|intermediate_size|ffn_dim|n_embd|n_inner|d_model|d_ff|embed_dim|embedding_size|d_ssm|hidden_dim"
    r"|lru_width|dim_ff|^dim$|_proj_dim"
)
_IS_PER_HEAD = re.compile(r"head|per_layer")


def small_configs(config: PreTrainedConfig, model: PreTrainedModel) -> Iterator[PreTrainedConfig]:
    """Yield versions of a config, in order of preference: of real widths first; if need be, with all blocks.

    All have fp32 weights, a small vocabulary, short windows, few experts and no dropout. Some may be invalid.
    model: built from the config.
    """
    heads = [
        value for key, value in vars(config.get_text_config()).items() if _IS_HEADS.search(key) and _is_size(value)
    ]
    for depths in (_depths(model), {}):
        short = _shorten(config, depths)
        for factor in (*FACTORS, *heads):  # heads: an odd number of them has no other divisor
            yield _narrow(short, factor)


def maximum_length(config: PreTrainedConfig) -> int | None:
    """Return the length of the longest sequences that all parts of a model take; None if it has no limit."""
    return min(
        (
            value
            for part in _parts(config)
            for name, value in vars(part).items()
            if _IS_MAXIMUM.search(name) and _is_size(value)
        ),
        default=None,
    )


def _shorten(config: PreTrainedConfig, depths: Mapping[int, int]) -> PreTrainedConfig:
    """Return the config with other numbers of blocks, by their present number, and smaller sizes besides widths."""
    small = copy.deepcopy(config)
    for part in _parts(small):
        part.dtype = torch.float32
        for name, value in list(vars(part).items()):
            setattr(part, name, _shortened(name, value, depths))
    return small


def _narrow(config: PreTrainedConfig, factor: int) -> PreTrainedConfig:
    """Return the config with widths and numbers of heads divided by a factor; the width of a head stays."""
    small = copy.deepcopy(config)
    for part in _parts(small):
        for name, value in list(vars(part).items()):
            if not _is_size(value):
                continue
            if _IS_HEADS.search(name):
                setattr(part, name, max(value // factor, 1))
            elif _IS_WIDTH.search(name) and not _IS_PER_HEAD.search(name) and value % factor == 0:
                setattr(part, name, value // factor)
    return small


def _shortened(name: str, value: Any, depths: Mapping[int, int]) -> Any:
    if isinstance(value, list | tuple) and len(value) in depths:
        return value[: depths[len(value)]]
    if isinstance(value, str) and "pattern" in name and len(value) in depths:
        return value[: depths[len(value)]]
    if isinstance(value, float) and _IS_NOISE.search(name):
        return 0.0
    if not _is_size(value):
        return value
    if _IS_TOKEN.search(name):
        return value % VOCABULARY
    if _IS_DEPTH.search(name):
        return depths.get(value, value)
    if _IS_VOCABULARY.search(name):
        return min(value, VOCABULARY)
    if _IS_MAXIMUM.search(name):
        return max(value, POSITIONS)
    if _IS_WINDOW.search(name):
        return min(value, WINDOW)
    if _IS_EXPERTS.search(name) and not _IS_SELECTION.search(name):
        return min(value, EXPERTS)
    return value


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Yield a config and the configs inside it."""
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value)


def _depths(model: PreTrainedModel) -> dict[int, int]:
    """Return, by the length of a list of blocks, the length of its shortest beginning with a block of every kind.

    At least 3, so that there is a block between the first and the last.
    """
    depths: dict[int, int] = {}
    for path, length in Counter(map(parent_of, find_blocks(model))).items():
        kinds = [_kind(block) for block in model.get_submodule(path).children()]
        shortest = max(kinds.index(kind) for kind in kinds) + 1
        depths[length] = min(length, max(shortest, 3, depths.get(length, 0)))
    return depths


def _kind(block: nn.Module) -> Hashable:
    """Return what tells blocks apart: the types, options and shapes of their modules. Numbers count blocks, too."""
    modules = []
    for name, module in block.named_modules():
        options = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        flags = [
            (key, value if isinstance(value, bool | str) else type(value)) for key, value in sorted(options.items())
        ]
        modules.append((name, type(module), tuple(flags)))
    return tuple(modules), tuple((name, param.shape) for name, param in block.named_parameters())
