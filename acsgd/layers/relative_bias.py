"""T5's relative position bias, which its first block computes and passes on: every stage computes it for itself.

The bias [1, heads, T, T] has no batch axis, depends on a small table of parameters alone, and is larger than the hidden
state: 33 million numbers against 1 million in t5-11b with 1024 tokens. The only rule for one kind of model.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from acsgd.layers.capture import BlockCall
from acsgd.layers.description import LayersError, Replicated


def relative_bias(model: PreTrainedModel, block: str, name: str) -> tuple[Replicated, list[str]]:
    """Return how to compute output `name` of a block, and the parameters needed. Raises LayersError if unknown."""
    attentions = [
        (path, module)
        for path, module in model.get_submodule(block).named_modules(prefix=block)
        if hasattr(module, "compute_bias") and hasattr(module, "has_relative_attention_bias")
    ]
    if not attentions:
        raise LayersError(f"{block} returns {name}, which has no batch axis and could not be sent between stages")
    tables = [path for path, module in attentions if module.has_relative_attention_bias]
    if name == "position_bias" and tables:
        return Replicated("relative_bias", tables[0]), [f"{tables[0]}.relative_attention_bias.weight"]
    return Replicated("default"), []  # zeros


def compute_relative_bias(model: nn.Module, how: Replicated, call: BlockCall) -> Tensor | None:
    """Return the argument of a block."""
    if how.kind == "default":
        return None
    length = call.hidden.shape[1]
    attention: Any = model.get_submodule(how.module)
    return cast(Tensor, attention.compute_bias(length, length, device=call.hidden.device))
