"""Configurations of small models of many types, with the options that make their layers differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoConfig,
    PreTrainedConfig,
)

from acsgd.model_classes import MODEL_CLASSES, ModelClass

VOCABULARY = 96
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
WITHOUT_KEY_VALUE_HEADS = {key: value for key, value in SHAPE.items() if key != "num_key_value_heads"}
BOTH_STACKS = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
}
CAUSAL: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "llama": SHAPE,
    "opt": WITHOUT_KEY_VALUE_HEADS | {"ffn_dim": 48, "word_embed_proj_dim": 16},
    "gptj": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "rotary_dim": 4},
    "gpt_neo": {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
    | {"window_size": 8, "max_position_embeddings": 64},
    "gpt_neox": WITHOUT_KEY_VALUE_HEADS,
    "bloom": {"hidden_size": 32, "n_layer": 3, "n_head": 4},
    "gemma2": SHAPE | {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
    "qwen3": SHAPE | {"head_dim": 8},
    "mixtral": SHAPE | {"num_local_experts": 4, "sliding_window": 8},
    "deepseek_v3": WITHOUT_KEY_VALUE_HEADS
    | {
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
    "roformer": WITHOUT_KEY_VALUE_HEADS | {"is_decoder": True},
    "granite": SHAPE | {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5},
}
"""By type, the options of a decoder; its blocks differ where the type allows it."""
CLASSIFIERS: dict[str, dict[str, Any]] = {
    "deberta-v2": WITHOUT_KEY_VALUE_HEADS
    | {
        "relative_attention": True,
        "position_buckets": 8,
        "pos_att_type": ["p2c", "c2p"],
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "conv_kernel_size": 3,
        "position_biased_input": False,
        "type_vocab_size": 0,
        "pooler_hidden_size": 32,
        "num_labels": 3,
    },
    "albert": WITHOUT_KEY_VALUE_HEADS | {"embedding_size": 16, "num_hidden_groups": 1, "num_labels": 3},
}
SEQ2SEQ: dict[str, dict[str, Any]] = {
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "feed_forward_proj": "gated-gelu"},
    "bart": BOTH_STACKS,
}
TYPES = {name: options for group in (CAUSAL, CLASSIFIERS, SEQ2SEQ) for name, options in group.items()}


def small_config(model_type: str, **options: Any) -> PreTrainedConfig:
    """Return a small config of a type of TYPES without dropout, its options overridden by `options`."""
    config = AutoConfig.for_model(
        model_type,
        **{"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} | TYPES[model_type],
    )
    for name, value in vars(config).items():
        if isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
    for name, value in options.items():
        setattr(config, name, value)
    return config


def task_of(model_type: str) -> ModelClass:
    """Return what a type of TYPES is trained for."""
    groups = {"lm": CAUSAL, "classification": CLASSIFIERS, "seq2seq": SEQ2SEQ}
    return next(MODEL_CLASSES[task] for task, types in groups.items() if model_type in types)


def tensors_in(directory: Path) -> dict[str, Tensor]:
    """Return all tensors in the safetensors files of a directory."""
    tensors: dict[str, Tensor] = {}
    for path in directory.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors
