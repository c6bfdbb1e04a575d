"""Initial values of parameters that the files of a model lack."""

from __future__ import annotations

import copy
from collections.abc import Collection

import torch
from torch import Tensor
from transformers import PreTrainedModel

from acsgd.seeds import mix_seed


@torch.no_grad()
def draw(model: PreTrainedModel, names: Collection[str]) -> dict[str, Tensor]:
    """Return new parameters, as transformers initialises them, the same in every conversion."""
    drawn: dict[str, Tensor] = {}
    for index, path in enumerate(dict.fromkeys(name.rpartition(".")[0] for name in names)):
        module = copy.deepcopy(model.get_submodule(path)).to_empty(device="cpu")
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(mix_seed(0, index))
            model._init_weights(module)
        drawn |= {f"{path}.{leaf}": param.detach() for leaf, param in module.named_parameters(recurse=False)}
    return {name: drawn[name] for name in names}
