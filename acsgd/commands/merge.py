"""Merge an adapter directory of PEFT into its base model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from acsgd.adapters.inject import is_of_adapter
from acsgd.commands.generation.adapter import PEFTAdapter
from acsgd.commands.generation.model import load
from acsgd.config.adapters import NAME
from acsgd.model_classes import MODEL_CLASSES
from acsgd.shards.check import first_names
from acsgd.shards.config import derive_layers, read_config
from acsgd.shards.disk import copy_model_files, write_layer
from acsgd.shards.hf_model import names_of, tensor_of
from acsgd.shards.manifest import Manifest

TOKENS = ".token_adapter"
"""End of the path of PEFT's layer that trains some tokens, which lies within the one that replaces a table."""


def merge_peft(source: Path, base: str | None, target: Path) -> None:
    """Write a model that contains an adapter of PEFT as layer shards into `target`, an empty directory.

    base: model that the adapter was trained on; None = the one that the adapter names. Weights get the dtype of the
    model; the sum is computed in fp32, with the whole model in memory. Raises ValueError if they do not fit.
    """
    adapter = PEFTAdapter.open(source)
    if adapter.virtual_tokens:
        raise ValueError(f"{source} has virtual tokens, which are part of no weight; use acsgd generate --adapter")
    if (name := base or adapter.config.base_model_name_or_path) is None:
        raise ValueError(f"{source} does not name its base model; give it with --model")
    loaded = load(name, dtype=torch.float32, device=torch.device("cpu"), adapter=adapter)
    directory = loaded.directory
    task = "seq2seq" if loaded.model.config.is_encoder_decoder else "lm"
    config = read_config(directory, task)
    plain = MODEL_CLASSES[task].build(config)
    _merge(loaded.model, source)
    if apart := names_of(loaded.model).keys() - names_of(plain).keys():
        raise ValueError(
            f"{source} has trained {first_names(sorted(apart))} apart from what it is tied to by config.json of "
            f'{directory}; set "tie_word_embeddings": false there, and store both'
        )
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    params, layers = dict(plain.named_parameters()), derive_layers(directory, config, task)
    files = {}
    for layer, names in layers.stored().items():
        tensors = {name: tensor_of(loaded.model, name).detach() for name in names}
        cast = {name: tensor.to(dtype) if name in params else tensor for name, tensor in tensors.items()}
        files[layer] = write_layer(target, layer, cast)
    Manifest(0, task, layers, files, {}, copy_model_files(directory, target), run=None).write(target)


@torch.no_grad()
def _merge(model: PreTrainedModel, source: Path) -> None:
    """Replace PEFT's layers by those that they adapt, merged, and by the modules that were trained as a whole.

    Raises ValueError if a layer shares its weight with another one, which the adapter does not change.
    """
    around: list[tuple[str, Any]] = [
        (path, module)
        for path, module in model.named_modules()
        if hasattr(module, "get_base_layer") or hasattr(module, "modules_to_save")
    ]
    for path, module in around:
        if hasattr(module, "modules_to_save"):
            inner: nn.Module = module.modules_to_save[NAME]
        else:
            inner = module.get_base_layer()
            shared = [name for name, param in model.named_parameters(remove_duplicate=False) if param is inner.weight]
            if len(shared) > 1 and not path.endswith(TOKENS):  # PEFT trains tokens of all that share a table
                raise ValueError(
                    f"{source} changes {path}, but not {shared[-1]}, to which its weight is tied; a merged weight "
                    "would change both: use acsgd generate --adapter"
                )
            module.merge(safe_merge=True)
        model.set_submodule(path.removesuffix(TOKENS), inner)
    assert not [name for name, _ in model.named_parameters() if is_of_adapter(name)]
