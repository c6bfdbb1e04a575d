"""Load a whole model for inference: from layer shards, such as a checkpoint of a run, or from a Hugging Face model."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from acsgd.errors import CorruptFileError, RunError
from acsgd.io.checkpoint.directory import CheckpointDirectory
from acsgd.layers.skeleton import set_parameter
from acsgd.notes import print_note
from acsgd.shards.check import FLOATING, check_tensors, expected_weights, first_names
from acsgd.shards.config import CONFIG
from acsgd.shards.disk import MANIFEST, ShardDirectory, model_files
from acsgd.shards.files import blame, read_json_object
from acsgd.shards.hub import find_model
from acsgd.shards.tokenizer import load_tokenizer
from acsgd.tasks import TASKS, Task

DTYPES = FLOATING | {torch.int64, torch.int32, torch.bool}
"""Dtypes of parameters and of stored buffers."""


@dataclass(frozen=True)
class LoadedModel:
    """A model and its tokenizer."""

    directory: Path
    model: PreTrainedModel
    """In evaluation mode; no parameter requires gradients."""
    tokenizer: PreTrainedTokenizerBase

    def describe(self) -> str:
        """Return a sentence on the model."""
        model = self.model
        millions = sum(param.numel() for param in model.parameters()) / 1e6
        dtype = str(model.dtype).removeprefix("torch.")
        return f"{self.directory}: {type(model).__name__}, {millions:,.1f} M parameters, {dtype} on {model.device.type}"


def load(path: str, *, dtype: torch.dtype | None, device: torch.device) -> LoadedModel:
    """Load the model at a path, or of a Hugging Face id; of a run directory, its newest valid checkpoint.

    dtype: of the parameters; None = that of config.json. Raises ValueError if there is no model, or if it is not one
    that generates text; CorruptFileError if a file is not as it was written.
    """
    for checkpoints in (CheckpointDirectory(Path(path)), CheckpointDirectory(Path(path) / "checkpoints")):
        if steps := checkpoints.steps():
            return _load_newest([checkpoints.of(step) for step in reversed(steps)], dtype, device)
    if (Path(path) / "checkpoints").is_dir():
        raise ValueError(f"{path} is a run directory without checkpoints; give one that has saved a checkpoint")
    return _load(find_model(path, option="model"), dtype, device)


def _load_newest(paths: list[Path], dtype: torch.dtype | None, device: torch.device) -> LoadedModel:
    """Load the first valid checkpoint, and report each one before it."""
    reasons = []
    for path in paths:
        try:
            if not (path / MANIFEST).is_file():
                raise CorruptFileError(path, f"is incomplete: it has no {MANIFEST}")
            return _load(path, dtype, device)
        except CorruptFileError as error:
            reasons.append(str(error))
            print_note(f"skipped a checkpoint: {error}")
    raise RunError(f"no checkpoint is valid: {'; '.join(reasons)}")


def _load(directory: Path, dtype: torch.dtype | None, device: torch.device) -> LoadedModel:
    is_shards = os.path.lexists(directory / MANIFEST)
    shards = ShardDirectory(directory) if is_shards else None
    if shards:
        shards.verify_model_files()
    config = _read_config(directory)
    config.dtype = dtype or config.dtype or torch.float32
    tokenizer = load_tokenizer(directory, config.get_text_config())
    task = _task(config, directory)
    model = _from_shards(shards, config, task, device) if shards else _from_hf(directory, config, task)
    if not model.can_generate():
        raise ValueError(f"{directory} holds a {type(model).__name__}, which does not generate text")
    module: nn.Module = model  # the type of PreTrainedModel.to is that of a decorator
    module.to(device).eval().requires_grad_(False)
    return LoadedModel(directory, model, tokenizer)


def _read_config(directory: Path) -> PreTrainedConfig:
    """Read config.json, whether or not the model could be trained. Raises ValueError."""
    model_files(directory)
    read_json_object(directory / CONFIG)
    with blame(directory / CONFIG, "is not a config that transformers can read", "correct it or download it again"):
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)


def _task(config: PreTrainedConfig, directory: Path) -> Task:
    name = "seq2seq" if config.is_encoder_decoder else "lm"
    if name not in TASKS:
        raise ValueError(f"{directory} holds an encoder-decoder ({config.model_type}); give a causal language model")
    return TASKS[name]


def _from_shards(shards: ShardDirectory, config: PreTrainedConfig, task: Task, device: torch.device) -> PreTrainedModel:
    """Build the model and load its parameters and stored buffers, layer by layer, in the dtype of `config`."""
    with blame(shards.path / CONFIG, "describes a model that cannot be built", "correct it or download it again"):
        model = task.build(config)
    expected = _stored_tensors(model)
    absent = set(expected)
    for file in shards.manifest.layers.values():
        stored = {key: tensor for key, tensor in shards.read(file).items() if "/" not in key}
        of_file = expected_weights({key: expected[key] for key in stored if key in expected})
        check_tensors(shards.path / file.file, stored, of_file, DTYPES, is_complete=True)
        _set_tensors(model, stored, device)
        absent -= stored.keys()
    if absent:
        raise CorruptFileError(shards.path, f"lacks parameters of the model: {first_names(sorted(absent))}")
    if os.path.lexists(path := shards.path / "generation_config.json"):
        read_json_object(path)
        with blame(path, "is not a generation config that transformers can read", "correct it or remove it"):
            model.generation_config = GenerationConfig.from_pretrained(shards.path, local_files_only=True)
    return model


def _stored_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the parameters, tied ones once, and the buffers that are stored with a model, by name."""
    stored = model.state_dict().keys()
    return dict(model.named_parameters()) | {name: x for name, x in model.named_buffers() if name in stored}


def _set_tensors(model: PreTrainedModel, tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Replace parameters and buffers of a model by loaded ones, under all names of tied parameters, in place."""
    names = defaultdict(list)
    for name, param in model.named_parameters(remove_duplicate=False):
        names[id(param)].append(name)
    buffers = dict(model.named_buffers())
    # what transformers' from_pretrained keeps in fp32, such as biases of routers
    fp32 = [pattern.replace("*", ".*") for pattern in model._get_dtype_plan(model.dtype)]
    for key, tensor in tensors.items():
        former = buffers[key] if key in buffers else model.get_parameter(key)
        dtype = torch.float32 if any(re.search(pattern, key) for pattern in fp32) else former.dtype
        # a copy, because `tensor` lies in a memory-mapped file
        loaded = tensor.to(device=device, dtype=dtype, copy=True)
        if key in buffers:
            path, _, leaf = key.rpartition(".")
            model.get_submodule(path)._buffers[leaf] = loaded
        else:
            param = nn.Parameter(loaded, requires_grad=False)
            for name in names[id(former)]:
                set_parameter(model, name, param)


def _from_hf(directory: Path, config: PreTrainedConfig, task: Task) -> PreTrainedModel:
    """Load a Hugging Face directory with transformers. Raises ValueError if a parameter is missing."""
    architecture = getattr(transformers, (config.architectures or [""])[0], None)
    if architecture is not None and not architecture.can_generate():
        raise ValueError(f"{directory} holds a {architecture.__name__}, which does not generate text")
    remedy = "download it again, or save it with transformers' save_pretrained"
    with blame(directory, "does not hold a model that transformers can load", remedy):
        model, report = task.auto_class.from_pretrained(
            directory,
            config=config,
            dtype=config.dtype,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    if report["missing_keys"]:
        raise ValueError(f"{directory} lacks parameters of the model: {first_names(sorted(report['missing_keys']))}")
    return model
