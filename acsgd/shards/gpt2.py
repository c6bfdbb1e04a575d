"""GPT-2: learned positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask

from acsgd.shards.layers import Decoder, State


class GPT2(Decoder):
    """transformers' GPT2LMHeadModel."""

    embeddings = ("transformer.wte", "transformer.wpe")
    blocks = "transformer.h"
    norm = "transformer.ln_f"

    def embed(self, model: PreTrainedModel, tokens: Tensor) -> Tensor:
        gpt2: Any = model.transformer
        positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        return gpt2.drop(gpt2.wte(tokens) + gpt2.wpe(positions))

    def context(self, model: PreTrainedModel, state: State) -> Any:
        return create_causal_mask(model.config, state["hidden"], attention_mask=None, past_key_values=None)

    def block(self, block: nn.Module, index: int, hidden: Tensor, context: Any) -> Tensor:
        return block(hidden, attention_mask=context)
