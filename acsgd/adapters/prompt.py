"""Prompt tuning: the first tokens of each sequence are virtual, their embeddings are trained.

The rows of a batch begin with placeholders in place of virtual tokens. So all tensors of the model have the length of
the rows, and the model's own forward computes positions and masks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from acsgd.adapters.spec import NAME, PromptTuning
from acsgd.seeds import mix_seed


class PromptedEmbedding(nn.Module):
    """An embedding of tokens whose first outputs of each sequence are trained parameters.

    base_layer: the embedding; count: number of virtual tokens. New parameters are on the meta device.
    """

    def __init__(self, base_layer: nn.Module, count: int) -> None:
        super().__init__()
        self.base_layer = base_layer
        width: Any = base_layer.embedding_dim
        self.prompt = nn.ModuleDict({NAME: nn.Embedding(count, width, device="meta")})

    @property
    def weight(self) -> Tensor:
        """Table of the embedding."""
        table: Tensor = self.base_layer.weight  # type: ignore[assignment]
        return table

    @property
    def virtual(self) -> Tensor:
        """Embeddings of virtual tokens, [n, D]."""
        embeddings: Tensor = self.prompt[NAME].weight  # type: ignore[assignment]
        return embeddings

    def forward(self, ids: Tensor) -> Tensor:
        """Return embeddings [B, T, D]; the first n of `ids` [B, T] are placeholders."""
        embedded: Tensor = self.base_layer(ids)
        virtual = self.virtual.to(embedded.dtype)
        return torch.cat([virtual.expand(len(ids), -1, -1), embedded[:, len(virtual) :]], dim=1)


def prompt_config(adapter: PromptTuning, width: int | None = None, tokenizer: Path | None = None) -> Any:
    """Return PEFT's config of prompt tuning. width: of embeddings; tokenizer: directory, for init=text."""
    from peft import PromptTuningConfig

    is_text = adapter.init == "text" and tokenizer is not None
    return PromptTuningConfig(
        task_type="CAUSAL_LM",
        num_virtual_tokens=adapter.tokens,
        token_dim=width,  # type: ignore[arg-type]
        num_transformer_submodules=1,
        prompt_tuning_init="TEXT" if is_text else "RANDOM",
        prompt_tuning_init_text=adapter.text if is_text else None,
        tokenizer_name_or_path=str(tokenizer) if is_text else None,
    )


def embedding_path(model: PreTrainedModel) -> str:
    """Return the path of the embedding of tokens."""
    embedding = model.get_input_embeddings()
    return next(path for path, module in model.named_modules() if module is embedding)


def inject_prompt(model: PreTrainedModel, adapter: PromptTuning) -> None:
    """Replace the embedding of a model by one with virtual tokens, in place."""
    path, embedding = embedding_path(model), model.get_input_embeddings()
    assert isinstance(embedding, nn.Module)
    model.set_submodule(path, PromptedEmbedding(embedding, adapter.tokens))


def draw_prompt(embedding: nn.Module, adapter: PromptTuning, tokenizer: Path, *, seed: int) -> dict[str, Tensor]:
    """Return initial parameters of a PromptedEmbedding, as PEFT initializes them. embedding: with its weights."""
    from peft import PromptEmbedding

    width: Any = embedding.embedding_dim
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(mix_seed(seed, adapter.tokens))
        drawn = PromptEmbedding(prompt_config(adapter, width, tokenizer), embedding).embedding.weight
    return {f"prompt.{NAME}.weight": drawn.detach()}
