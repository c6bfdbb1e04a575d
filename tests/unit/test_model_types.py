"""Law: a model of any type is converted to shards and back bit for bit, and transformers loads it without a warning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from acsgd.shards.convert import from_hf
from acsgd.shards.export import to_hf
from acsgd.tasks import TASKS

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_key_value_heads": 2, "num_experts_per_tok": 2}
TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("lm", {}),
    "opt": ("lm", {"ffn_dim": 24, "word_embed_proj_dim": 8}),
    "gptj": ("lm", {"rotary_dim": 4}),
    "gpt_neo": ("lm", {"attention_types": [[["global", "local", "global"], 1]], "window_size": 4}),
    "gpt_neox": ("lm", {}),
    "bloom": ("lm", {}),
    "gemma2": ("lm", {"head_dim": 8, "num_key_value_heads": 1}),
    "qwen3": ("lm", {"head_dim": 8, "num_key_value_heads": 1}),
    "mixtral": ("lm", EXPERTS | {"num_local_experts": 3}),
    "deepseek_v3": (
        "lm",
        EXPERTS
        | {"n_routed_experts": 4, "moe_intermediate_size": 8, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}
        | {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
    ),
}
"""Task and options of a small model, by type."""


def save(directory: Path, model_type: str, **options: Any) -> PreTrainedModel:
    """Save a small model, all of its tensors with other values than its constructor gives them."""
    task, own = TYPES[model_type]
    config = AutoConfig.for_model(model_type, **SHAPE | own | options)
    torch.manual_seed(0)
    model: PreTrainedModel = TASKS[task].auto_class.from_config(config)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                tensor.add_(torch.randn(tensor.shape) / 8)
            assert tensor.isfinite().all(), name
    model.save_pretrained(directory)
    return model


def stored(directory: Path) -> dict[str, Tensor]:
    """Return all tensors in the files of a directory."""
    tensors = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
    return tensors


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("model_type", TYPES)
def test_conversion_to_shards_and_back_is_lossless(model_type: str, tie: bool, tmp_path: Path) -> None:
    source, shards, back = (tmp_path / name for name in ("source", "shards", "back"))
    model = save(source, model_type, tie_word_embeddings=tie)
    for convert, origin, target in ((from_hf, source, shards), (to_hf, shards, back)):
        target.mkdir()
        convert(origin, target)
    first, again = stored(source), stored(back)
    assert again.keys() == first.keys()
    for name, tensor in first.items():
        assert again[name].dtype == tensor.dtype, name
        assert torch.equal(again[name], tensor), name
    loaded, info = type(model).from_pretrained(back, output_loading_info=True)
    assert not any(info.values()), info
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    # each tensor is stored once: a tied one too
    assert sum(x.numel() for x in stored(shards).values()) == sum(x.numel() for x in stored_once(model).values())


def stored_once(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the parameters, tied ones once, and the stored buffers of a model."""
    keys = model.state_dict().keys()
    return dict(model.named_parameters()) | {name: x for name, x in model.named_buffers() if name in keys}
