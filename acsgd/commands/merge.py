"""Merge an adapter directory of PEFT into its base model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from acsgd.adapters.inject import is_of_adapter
from acsgd.commands.generation.adapter import PEFTAdapter
from acsgd.commands.generation.model import LoadedModel, dtype_of, load
from acsgd.config.adapters import NAME
from acsgd.model_classes import MODEL_CLASSES, UNTIED
from acsgd.shards.config import derive_layers, read_config
from acsgd.shards.disk import copy_model_files, list_model_files, model_files, write_layer
from acsgd.shards.export import write_config
from acsgd.shards.files import CONFIG, blame
from acsgd.shards.generation import GENERATION_CONFIG, set_ends
from acsgd.shards.hf_model import names_of, tensor_of
from acsgd.shards.layer_tensors import describe_tensors
from acsgd.shards.manifest import Manifest

TOKENS = ".token_adapter"
"""End of the path of PEFT's layer that trains some tokens, which lies within the one that replaces a table."""


def merge_peft(source: Path, base: str | None, target: Path, *, dtype: torch.dtype | None = None) -> None:
    """Write a model that contains an adapter of PEFT as layer shards into `target`, an empty directory.

    base: model that the adapter was trained on; None = the one that the adapter names. dtype: of the weights; None =
    that of the model, or of training if that is wider. The sum is computed in fp32, with the whole model in memory.
    Raises ValueError if adapter and model do not fit.
    """
    adapter = PEFTAdapter.open(source)
    if adapter.virtual_tokens:
        raise ValueError(f"{source} has virtual tokens, which are part of no weight; use acsgd generate --adapter")
    name = base or adapter.find_base("--model MODEL")
    loaded = load(name, dtype=torch.float32, device=torch.device("cpu"), adapter=adapter)
    directory = loaded.directory
    task = "seq2seq" if loaded.model.config.is_encoder_decoder else "lm"
    config = read_config(directory, task)
    config.get_text_config().vocab_size = loaded.model.config.get_text_config().vocab_size
    plain = MODEL_CLASSES[task].build(config)
    _merge(loaded.model, source)
    if apart := names_of(loaded.model).keys() - names_of(plain).keys():  # from what config.json ties them to
        setattr(config, UNTIED, sorted(apart))
        plain = MODEL_CLASSES[task].build(config)
    config.dtype = dtype or torch.promote_types(dtype_of(config), adapter.dtype or dtype_of(config))
    params, layers = dict(plain.named_parameters()), derive_layers(directory, config, task)
    files = {}
    for layer, names in layers.stored().items():
        tensors = {name: tensor_of(loaded.model, name).detach() for name in names}
        cast = {name: tensor.to(config.dtype) if name in params else tensor for name, tensor in tensors.items()}
        files[layer] = write_layer(target, layer, cast)
    _write_model_files(loaded, config, target)
    listed = list_model_files(target)
    described = describe_tensors(plain, layers, listed)
    Manifest(0, task, layers, files, {}, listed, run=None, tensors=described).write(target)


def _write_model_files(loaded: LoadedModel, config: PreTrainedConfig, target: Path) -> None:
    """Write the config of a model with an adapter, and the tokenizer and options that belong to it."""
    copy_model_files(loaded.directory, target)
    if (own := loaded.tokenizer_directory) != loaded.directory:
        for path in model_files(target):
            if path.name not in (CONFIG, GENERATION_CONFIG):
                path.unlink()
        for path in model_files(own):
            if path.name != CONFIG:
                shutil.copyfile(path, target / path.name)
        set_ends(config, own)
    write_config(config, target)


@torch.no_grad()
def _merge(model: PreTrainedModel, source: Path) -> None:
    """Replace PEFT's layers by those that they adapt, merged, and by the modules that were trained as a whole.

    Raises ValueError if PEFT cannot merge a layer, or a layer shares its weight with another one, which the adapter
    does not change.
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
            with blame(source, f"cannot be merged into {path}", "use acsgd generate --adapter"):
                module.merge(safe_merge=True)
            inner = module.get_base_layer()  # the merge of some methods replaces it
        model.set_submodule(path.removesuffix(TOKENS), inner)
    assert not [name for name, _ in model.named_parameters() if is_of_adapter(name)]
