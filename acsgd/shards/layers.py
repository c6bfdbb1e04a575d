"""A model as a list of layers, built from transformers' own modules.

Shapes: B sequences of a micro-batch, T tokens, D hidden size, V vocabulary size.

Input and output of a layer are a `State`, a dict of named tensors: {"tokens": [B, T]} for the first layer,
{"logits": [B, T, V]} from the last. What is between is also what stages send to each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

State = dict[str, Tensor]


@dataclass(frozen=True)
class LayerShard:
    """One layer of a model: stored in one file and never split between stages."""

    name: str
    """Name of its file, without suffix."""
    kind: Literal["embed", "block", "head"]
    index: int
    """Position in the model, 0 = embedding; also part of every seed that concerns the layer."""
    modules: tuple[str, ...]
    """Paths of its modules in the Hugging Face model."""


class ModelFamily(Protocol):
    """How to split the Hugging Face models of one family into layers and run them. One file per family."""

    def layers(self, config: PreTrainedConfig) -> list[LayerShard]:
        """List the layers, first layer first."""
        ...

    def longest(self, config: PreTrainedConfig) -> int:
        """Return the maximum sequence length of the model, in tokens."""
        ...

    def boundary(self, config: PreTrainedConfig, batch: int, sequence: int) -> dict[str, tuple[int, ...]]:
        """Return name and shape of each tensor sent between stages."""
        ...

    def rebuild_buffers(self, model: PreTrainedModel, device: torch.device) -> None:
        """Create on `device` the buffers of `model` that are not in any file, such as rotary frequencies."""
        ...

    def context(self, model: PreTrainedModel, state: State) -> Any:
        """Return what all blocks need besides the hidden state: masks, rotary tables. Opaque to the caller."""
        ...

    def call(self, model: PreTrainedModel, shard: LayerShard, state: State, context: Any) -> State:
        """Run one layer."""
        ...

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss summed over the target tokens; labels [B, T] of -100 are ignored."""
        ...


class Decoder:
    """Base of the decoder-only families; a family sets the paths of its modules."""

    embeddings: tuple[str, ...]
    blocks: str
    norm: str
    head = "lm_head"

    def layers(self, config: PreTrainedConfig) -> list[LayerShard]:
        num_blocks = config.num_hidden_layers
        return [
            LayerShard("embed", "embed", 0, self.embeddings),
            *(LayerShard(f"block-{i:05d}", "block", i + 1, (f"{self.blocks}.{i}",)) for i in range(num_blocks)),
            LayerShard("head", "head", num_blocks + 1, (self.norm, self.head)),
        ]

    def longest(self, config: PreTrainedConfig) -> int:
        return int(config.max_position_embeddings)

    def boundary(self, config: PreTrainedConfig, batch: int, sequence: int) -> dict[str, tuple[int, ...]]:
        return {"hidden": (batch, sequence, config.hidden_size)}

    def rebuild_buffers(self, model: PreTrainedModel, device: torch.device) -> None:
        pass

    def context(self, model: PreTrainedModel, state: State) -> Any:
        raise NotImplementedError

    def embed(self, model: PreTrainedModel, tokens: Tensor) -> Tensor:
        """Return the hidden state [B, T, D] that enters the first block."""
        raise NotImplementedError

    def block(self, block: nn.Module, index: int, hidden: Tensor, context: Any) -> Tensor:
        """Run block `index`: [B, T, D] -> [B, T, D]."""
        raise NotImplementedError

    def call(self, model: PreTrainedModel, shard: LayerShard, state: State, context: Any) -> State:
        if shard.kind == "embed":
            return {"hidden": self.embed(model, state["tokens"])}
        hidden = state["hidden"]
        if shard.kind == "block":
            block = model.get_submodule(shard.modules[0])
            return {"hidden": self.block(block, shard.index - 1, hidden, context)}
        norm, head = (model.get_submodule(path) for path in shard.modules)
        return {"logits": head(norm(hidden))}

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(
            logits.view(-1, logits.shape[-1]).float(), labels.reshape(-1), ignore_index=-100, reduction="sum"
        )


def meta_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Build the Hugging Face model on the meta device: its structure, without memory for weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def tied_keys(model: PreTrainedModel) -> dict[str, str]:
    """Map each tied parameter to the one whose values it shares: {"lm_head.weight": "...wte.weight"}."""
    return dict(model._tied_weights_keys or {}) if model.config.tie_word_embeddings else {}


def parameter_keys(model: PreTrainedModel, shard: LayerShard) -> list[str]:
    """List the Hugging Face names of all parameters of a layer, including tied ones."""
    return [
        f"{path}.{name}"
        for path in shard.modules
        for name, _ in model.get_submodule(path).named_parameters(remove_duplicate=False)
    ]


def stored_weights(model: PreTrainedModel, shard: LayerShard) -> dict[str, nn.Parameter]:
    """Return the parameters in the layer's file, by key; their values may be on the meta device."""
    return {key: model.get_parameter(key) for key in stored_keys(model, shard)}


def stored_keys(model: PreTrainedModel, shard: LayerShard) -> list[str]:
    """List the parameters in the layer's file: all but tied copies, which are stored with their original."""
    tied = tied_keys(model)
    return [key for key in parameter_keys(model, shard) if key not in tied]
