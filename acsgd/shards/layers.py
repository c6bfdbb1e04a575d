"""A model as a list of layers, built from transformers' own modules.

B sequences of a micro-batch, T tokens, D hidden, V vocabulary.

What a layer takes and gives is a `State`, a dict of named tensors: {"tokens": [B, T]} enters the first layer,
{"logits": [B, T, V]} leaves the last, and what lies between is what travels from stage to stage.
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
    """One layer: the unit that is saved to one file and never split between stages."""

    name: str
    """Stem of its file."""
    kind: Literal["embed", "block", "head"]
    index: int
    """Place in the model, 0 = embedding; also the layer's number in every seed."""
    modules: tuple[str, ...]
    """Paths of its modules in the Hugging Face model; their parameters keep their Hugging Face names."""


class ModelFamily(Protocol):
    """What acsgd must know of a Hugging Face model to cut it into layers. One file per family."""

    def layers(self, config: PreTrainedConfig) -> list[LayerShard]:
        """List the layers, first to last."""
        ...

    def longest(self, config: PreTrainedConfig) -> int:
        """Return the longest sequence the model can take, in tokens."""
        ...

    def boundary(self, config: PreTrainedConfig, batch: int, sequence: int) -> dict[str, tuple[int, ...]]:
        """Name the tensors that travel between stages, and their shapes."""
        ...

    def rebuild_buffers(self, model: PreTrainedModel, device: torch.device) -> None:
        """Make on `device` the buffers of `model` that no file holds (rotary frequencies)."""
        ...

    def context(self, model: PreTrainedModel, state: State) -> Any:
        """Return what all blocks share for this input: masks, rotary tables. Opaque to the caller."""
        ...

    def call(self, model: PreTrainedModel, shard: LayerShard, state: State, context: Any) -> State:
        """Run one layer."""
        ...

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss summed over the target tokens; labels [B, T] of -100 are no targets."""
        ...


class Decoder:
    """What the families of decoder-only models share; a family states where its modules are."""

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
    """Build the Hugging Face model on the meta device: all of its structure, none of its memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def tied_keys(model: PreTrainedModel) -> dict[str, str]:
    """Map each tied parameter to the one it shares its values with: {"lm_head.weight": "...wte.weight"}."""
    return dict(model._tied_weights_keys or {}) if model.config.tie_word_embeddings else {}


def parameter_keys(model: PreTrainedModel, shard: LayerShard) -> list[str]:
    """List the Hugging Face names of all parameters of a layer, the tied ones included."""
    return [
        f"{path}.{name}"
        for path in shard.modules
        for name, _ in model.get_submodule(path).named_parameters(remove_duplicate=False)
    ]


def stored_keys(model: PreTrainedModel, shard: LayerShard) -> list[str]:
    """List the parameters that the layer's file holds: a tied copy is stored once, with its original."""
    tied = tied_keys(model)
    return [key for key in parameter_keys(model, shard) if key not in tied]
