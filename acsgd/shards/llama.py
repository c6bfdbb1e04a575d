"""Llama, Mistral and Qwen2: rotary positions, and masks that may slide."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from acsgd.shards.layers import Decoder, State

MASKS = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}


class Context(NamedTuple):
    """What all blocks share: one mask per kind of attention, and the rotary tables."""

    masks: list[Any]
    """One per block, in whatever form the attention implementation takes; blocks of one kind share theirs."""
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
        kinds = _attention_kinds(model.config)
        masks = {
            kind: MASKS[kind](model.config, hidden, attention_mask=None, past_key_values=None) for kind in set(kinds)
        }
        rotary = model.model.rotary_emb(hidden, position_ids=positions)
        return Context([masks[kind] for kind in kinds], positions, rotary)

    def block(self, block: nn.Module, index: int, hidden: Tensor, context: Any) -> Tensor:
        return block(
            hidden,
            attention_mask=context.masks[index],
            position_ids=context.positions,
            position_embeddings=context.rotary,
        )


def _attention_kinds(config: PreTrainedConfig) -> list[str]:
    """Return each block's kind of attention: Qwen2 lists them, Mistral has one window for all, Llama none."""
    listed: list[str] | None = getattr(config, "layer_types", None)
    if listed:
        return listed
    kind = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    return [kind] * config.num_hidden_layers
