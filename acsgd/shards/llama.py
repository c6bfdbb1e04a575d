"""Llama, Mistral and Qwen2: rotary positions and sliding-window masks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from acsgd.shards.layers import Decoder, State

MASKS = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}


class Context(NamedTuple):
    """Inputs common to all blocks."""

    masks: list[Any]
    """Mask of each block, in the form its attention implementation takes; the same object for blocks of one kind."""
    positions: Tensor
    rotary: tuple[Tensor, Tensor]


class Llama(Decoder):
    """transformers' LlamaForCausalLM, MistralForCausalLM and Qwen2ForCausalLM."""

    embeddings = ("model.embed_tokens",)
    blocks = "model.layers"
    norm = "model.norm"

    def rebuild_buffers(self, model: PreTrainedModel, device: torch.device) -> None:
        with device:
            model.model.rotary_emb = type(model.model.rotary_emb)(model.config)

    def embed(self, model: PreTrainedModel, tokens: Tensor) -> Tensor:
        return model.model.embed_tokens(tokens)

    def context(self, model: PreTrainedModel, state: State) -> Context:
        hidden = state["hidden"]
        positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        types = _attention_types(model.config)
        masks = {
            kind: MASKS[kind](model.config, hidden, attention_mask=None, past_key_values=None) for kind in set(types)
        }
        rotary = model.model.rotary_emb(hidden, position_ids=positions)
        return Context([masks[kind] for kind in types], positions, rotary)

    def block(self, block: nn.Module, index: int, hidden: Tensor, context: Any) -> Tensor:
        return block(
            hidden,
            attention_mask=context.masks[index],
            position_ids=context.positions,
            position_embeddings=context.rotary,
        )


def _attention_types(config: PreTrainedConfig) -> list[str]:
    """Return the attention type of each block: Qwen2 lists them, Mistral slides in all blocks, Llama in none."""
    listed: list[str] | None = getattr(config, "layer_types", None)
    if listed:
        return listed
    kind = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    return [kind] * config.num_hidden_layers
