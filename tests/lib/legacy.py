"""Checkpoints as AC-SGD, CocktailSGD and OpenChatKit wrote them, made from models of transformers by their rule.

Their stages were an nn.Sequential of an embedding, blocks and a head, whose modules had the names of transformers. The
blocks were those of an older transformers, which stored masks and rotary frequencies with them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

POSITIONS = 64
SHAPE = {"vocab_size": 96, "hidden_size": 16, "num_attention_heads": 2}
OLD: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 96, "n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": POSITIONS},
    "gpt_neo": SHAPE
    | {
        "num_layers": 4,
        "attention_types": [[["global", "local"], 2]],
        "window_size": 4,
        "max_position_embeddings": POSITIONS,
    },
    "gptj": {"vocab_size": 96, "n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": POSITIONS, "rotary_dim": 4},
    "gpt_neox": SHAPE | {"intermediate_size": 24, "num_hidden_layers": 4, "max_position_embeddings": POSITIONS},
    "opt": SHAPE
    | {"ffn_dim": 24, "num_hidden_layers": 4, "word_embed_proj_dim": 8, "max_position_embeddings": POSITIONS},
    "llama": SHAPE | {"intermediate_size": 24, "num_hidden_layers": 4, "max_position_embeddings": POSITIONS},
}
"""Options of small configs of the types of models that the replaced systems trained, by type."""


def old_model(model_type: str, *, dtype: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
    """Return a small model with a head of its own, as they trained, and with the buffers of an older transformers."""
    common = {"tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
    config = AutoConfig.for_model(model_type, **(common | OLD[model_type] | options))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for param in model.parameters():  # new biases are zeros, norms ones
        param.data = torch.randn(param.shape).mul_(0.3).to(dtype)  # buffers keep their precision
    return model.eval()


def old_deberta() -> PreTrainedModel:
    """Return a small DeBERTa as AC-SGD trained it, with relative embeddings, their norm and a convolution."""
    config = AutoConfig.for_model(
        "deberta-v2",
        **SHAPE,
        intermediate_size=24,
        num_hidden_layers=3,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        norm_rel_ebd="layer_norm",
        conv_kernel_size=3,
        max_position_embeddings=POSITIONS,
        position_buckets=8,
        share_att_key=True,
        type_vocab_size=0,
        position_biased_input=False,
    )
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(config).eval()


def save_deberta(model: PreTrainedModel, directory: Path) -> None:
    """Write the body of a DeBERTa as AC-SGD's converter did; the head was never saved."""
    directory.mkdir(parents=True, exist_ok=True)
    body = model.deberta
    position_ids = {"position_ids": torch.arange(POSITIONS)[None]}
    torch.save(dict(body.embeddings.state_dict()) | position_ids, directory / "pytorch_embs.pt")
    for index, block in enumerate(body.encoder.layer):
        torch.save(block.state_dict(), directory / f"pytorch_{index}.pt")
    torch.save(body.encoder.rel_embeddings.state_dict(), directory / "pytorch_rel_embs.pt")
    torch.save(body.encoder.LayerNorm.state_dict(), directory / "pytorch_ln.pt")
    torch.save(body.encoder.conv.state_dict(), directory / "pytorch_conv.pt")
    model.config.save_pretrained(directory)


def old_stage(model: PreTrainedModel) -> nn.Sequential:
    """Return a model as one stage of a replaced system."""
    match model.config.model_type:
        case "gpt2" | "gpt_neo":
            body = model.transformer
            first = {"wte": body.wte, "wpe": body.wpe}
            blocks, last = body.h, {"ln_f": body.ln_f, "lm_head": model.lm_head}
        case "gptj":
            body = model.transformer
            first = {"wte": body.wte}
            blocks, last = body.h, {"ln_f": body.ln_f, "lm_head": model.lm_head}
        case "gpt_neox":
            body = model.gpt_neox
            first = {"embed_in": body.embed_in}
            blocks, last = body.layers, {"final_layer_norm": body.final_layer_norm, "embed_out": model.lm_head}
        case "opt":
            body = model.model.decoder
            first = {"embed_tokens": body.embed_tokens, "embed_positions": body.embed_positions}
            blocks, last = body.layers, {"final_layer_norm": body.final_layer_norm, "lm_head": model.lm_head}
            if body.project_in is not None:
                first["project_in"], last["project_out"] = body.project_in, body.project_out
        case "llama":
            body = model.model
            first = {"embed_tokens": body.embed_tokens}
            blocks, last = body.layers, {"norm": body.norm, "lm_head": model.lm_head}
        case other:
            raise ValueError(other)
    return nn.Sequential(nn.ModuleDict(first), *blocks, nn.ModuleDict(last))


def old_buffers(model: PreTrainedModel, block: int) -> dict[str, Tensor]:
    """Return what the blocks of an older transformers stored besides parameters."""
    config = model.config
    mask = torch.tril(torch.ones(POSITIONS, POSITIONS, dtype=torch.uint8))[None, None]
    inv_freq = 10000.0 ** -(torch.arange(0, 8, 2) / 8)
    match config.model_type:
        case "gpt2":
            return {"attn.bias": mask, "attn.masked_bias": torch.tensor(-1e4)}
        case "gptj":
            return {"attn.bias": mask, "attn.masked_bias": torch.tensor(-1e9)}
        case "gpt_neo":
            if block % 2:
                mask = torch.bitwise_xor(mask, torch.tril(mask, -4))
            return {"attn.attention.bias": mask, "attn.attention.masked_bias": torch.tensor(-1e9)}
        case "gpt_neox":
            rotary = {"attention.rotary_emb.inv_freq": inv_freq[:1]}
            return {"attention.bias": mask.bool(), "attention.masked_bias": torch.tensor(-1e9)} | rotary
        case "llama":
            return {"self_attn.rotary_emb.inv_freq": inv_freq}
    return {}


def old_layers(model: PreTrainedModel) -> list[dict[str, Tensor]]:
    """Return the tensors of a model as they named them: embedding, blocks, head."""
    layers = [dict(module.state_dict()) for module in old_stage(model)]
    dtype = model.dtype
    for block, layer in enumerate(layers[1:-1]):
        buffers = old_buffers(model, block)
        layer |= {key: x.to(dtype) if x.is_floating_point() else x for key, x in buffers.items()}
    return layers


def save_layers(model: PreTrainedModel, directory: Path) -> None:
    """Write a model as their converters did, one file per layer, with config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    first, *blocks, last = old_layers(model)
    torch.save(first, directory / "pytorch_embs.pt")
    for index, block in enumerate(blocks):
        torch.save(block, directory / f"pytorch_{index}.pt")
    torch.save(last, directory / "pytorch_lm_head.pt")


def save_stages(model: PreTrainedModel, directory: Path, stages: int) -> None:
    """Write a model as their checkpoints, one file per pipeline rank with an equal number of blocks."""
    directory.mkdir(parents=True, exist_ok=True)
    layers = old_layers(model)
    per_stage = -(-(len(layers) - 2) // stages)
    for rank in range(stages):
        first = 1 + rank * per_stage if rank else 0
        last = 1 + (rank + 1) * per_stage if rank < stages - 1 else len(layers)
        numbered = {f"{i}.{key}": x for i, layer in enumerate(layers[first:last]) for key, x in layer.items()}
        torch.save(numbered, directory / f"prank_{rank}_checkpoint.pt")
        torch.save({"state": {}, "param_groups": [{"lr": 0.1}]}, directory / f"prank_{rank}_optimizer.pt")
    (directory / "meta.json").write_text('{"step": 10}')
