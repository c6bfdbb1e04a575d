"""Lossless conversion between Hugging Face checkpoints and layer shards, with one layer in memory at a time."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from acsgd.shards import family_of
from acsgd.shards.disk import Manifest, ShardDirectory, copy_model_files, write_layer
from acsgd.shards.layers import meta_model, stored_keys, tied_keys

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def read_config(path: Path) -> PreTrainedConfig:
    """Read config.json of a Hugging Face or shard directory.

    Raises ValueError if it is missing, invalid, or of an unknown model family.
    """
    if not (path / "config.json").is_file():
        raise ValueError(f"{path} has no config.json; give a Hugging Face model directory or a layer-shard directory")
    try:
        family_of(
            json.loads((path / "config.json").read_text())["model_type"]
        )  # first: the error of transformers lists hundreds of families
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise ValueError(f"{path / 'config.json'} is not a config that transformers can read: {first_line}") from None


def from_hf(source: Path, target: Path) -> None:
    """Convert a Hugging Face directory with safetensors to layer shards in `target`, an empty directory.

    Tensors keep their dtype and bits. Raises ValueError if parameters are missing or would be lost.
    """
    config = read_config(source)
    model = meta_model(config)
    files = locate_parameters(source, model)
    layers = {}
    for shard in family_of(config.model_type).layers(config):
        tensors = _read({key: files[key] for key in stored_keys(model, shard)})
        layers[shard.name] = write_layer(target, shard.name, tensors)
    Manifest(step=0, layers=layers, replicas={}, model_files=copy_model_files(source, target), run=None).write(target)


def to_hf(source: Path, target: Path, *, dtype: str | None = None) -> None:
    """Convert layer shards to a Hugging Face directory in `target`, an empty directory.

    dtype: "float32", "bfloat16" or "float16" to cast to; None = keep each tensor's dtype and bits.
    """
    directory = ShardDirectory(source)
    config = read_config(source)
    model = meta_model(config)
    shards = family_of(config.model_type).layers(config)
    weight_map: dict[str, str] = {}
    total = 0
    dtypes = set()
    for number, shard in enumerate(shards, start=1):
        tensors = directory.tensors(shard.name, stored_keys(model, shard))
        if dtype is not None:
            tensors = {key: tensor.to(DTYPES[dtype]) for key, tensor in tensors.items()}
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, target / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
        dtypes |= {tensor.dtype for tensor in tensors.values()}
    copy_model_files(source, target)
    config.architectures = [type(model).__name__]
    if len(dtypes) == 1:
        config.dtype = dtypes.pop()
    config.save_pretrained(target)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (target / INDEX).write_text(json.dumps(index, indent=2))


def locate_parameters(source: Path, model: PreTrainedModel) -> dict[str, tuple[Path, str]]:
    """Map each parameter of `model` to its file in a Hugging Face directory and its name in that file.

    Reads only headers, and the values of tied parameters that are stored twice. Raises ValueError if parameters are
    missing, if tied ones differ, or if the directory holds tensors that the model does not have.
    """
    located = _match(source, model)
    tied = tied_keys(model)
    missing = [key for key, _ in model.named_parameters(remove_duplicate=False) if key not in {*located, *tied}]
    if missing:
        raise ValueError(f"{source} lacks {len(missing)} parameters of the model: {', '.join(missing[:3])}")
    _check_ties(located, tied, source)
    return located


def _match(source: Path, model: PreTrainedModel) -> dict[str, tuple[Path, str]]:
    known = set(dict(model.named_parameters(remove_duplicate=False)))
    located, unexpected = {}, []
    for name, path in _tensor_files(source).items():
        # models saved without their head lack the prefix: "h.0..." for GPT-2
        prefixed = f"{model.base_model_prefix}.{name}"
        if name in known or prefixed in known:
            located[name if name in known else prefixed] = (path, name)
        elif not _may_be_dropped(name, model):
            unexpected.append(name)
    if unexpected:
        raise ValueError(
            f"{source} holds {len(unexpected)} tensors that {type(model).__name__} does not have and that would be "
            f"lost: {', '.join(sorted(unexpected)[:3])}"
        )
    return located


def _check_ties(files: dict[str, tuple[Path, str]], tied: dict[str, str], source: Path) -> None:
    """Raise ValueError if a parameter that config.json ties to another was saved with other values."""
    for copy, original in tied.items():
        if copy in files:
            tensors = _read({copy: files[copy], original: files[original]})
            if not torch.equal(tensors[copy], tensors[original]):
                raise ValueError(
                    f"{source}: config.json ties {copy} to {original}, but their values differ; "
                    'set "tie_word_embeddings": false in config.json to keep both'
                )


def _tensor_files(source: Path) -> dict[str, Path]:
    """Map the name of each tensor of a Hugging Face directory to its file."""
    if (source / INDEX).is_file():
        weight_map = json.loads((source / INDEX).read_text())["weight_map"]
        absent = sorted({name for name in weight_map.values() if not (source / name).is_file()})
        if absent:
            raise ValueError(f"{source / INDEX} names missing files: {', '.join(absent[:3])}")
        return {name: source / file for name, file in weight_map.items()}
    if (source / SINGLE).is_file():
        with safe_open(source / SINGLE, framework="pt") as file:
            return dict.fromkeys(file.keys(), source / SINGLE)
    raise ValueError(
        f"{source} has neither {SINGLE} nor {INDEX}; acsgd reads safetensors only (pickled weights can run code): "
        "save the model with transformers' save_pretrained, or train new weights with --model.init scratch"
    )


def _may_be_dropped(name: str, model: PreTrainedModel) -> bool:
    """Whether a tensor is a buffer that old versions of transformers saved and new ones compute."""
    patterns = model._keys_to_ignore_on_load_unexpected or []
    return any(re.search(pattern, name) for pattern in [*patterns, r"attn\.masked_bias$", r"rotary_emb\.inv_freq$"])


def _read(located: dict[str, tuple[Path, str]]) -> dict[str, Tensor]:
    by_file = defaultdict(list)
    for key, (path, name) in located.items():
        by_file[path].append((key, name))
    tensors: dict[str, Tensor] = {}
    for path, names in by_file.items():
        with safe_open(path, framework="pt") as file:
            tensors |= {key: file.get_tensor(name) for key, name in names}
    return tensors
