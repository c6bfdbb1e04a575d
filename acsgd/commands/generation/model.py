"""Load a whole model for inference: from layer shards, such as a checkpoint of a run, or from a Hugging Face model."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from acsgd.adapters.initial import BaseChecksum
from acsgd.adapters.inject import build_adapted
from acsgd.codecs.identity import DTYPES
from acsgd.commands.generation.adapter import PEFTAdapter, is_adapter
from acsgd.commands.recorded import RecordedModel
from acsgd.config.adapters import Adapter, VirtualTokens, parse_adapter
from acsgd.errors import CorruptFileError, RunError
from acsgd.io.checkpoint.directory import checkpoints_of
from acsgd.layers.skeleton import set_buffer, set_tied_parameter
from acsgd.model_classes import MODEL_CLASSES, ModelClass
from acsgd.notes import print_note
from acsgd.shards.check import first_names
from acsgd.shards.config import CONFIG, read_config
from acsgd.shards.disk import ShardDirectory, model_files
from acsgd.shards.files import read_json_object
from acsgd.shards.generation import GENERATION_CONFIG, read_generation_config
from acsgd.shards.hf_model import HFModel, names_of, tensor_of
from acsgd.shards.hub import find_model
from acsgd.shards.layer_tensors import layer_tensors
from acsgd.shards.locate import open_hf
from acsgd.shards.manifest import MANIFEST
from acsgd.shards.tokenizer import has_tokenizer, load_tokenizer, read_tokenizer

NamedTensors = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True)
class LoadedModel:
    """A model and its tokenizer."""

    directory: Path
    model: PreTrainedModel
    """In evaluation mode; no parameter requires gradients."""
    tokenizer: PreTrainedTokenizerBase
    tokenizer_directory: Path
    """Directory of the tokenizer, and of what else belongs to the texts of the model."""
    adapter: PEFTAdapter | None = None
    """Adapter directory of PEFT that is part of the model."""

    def describe(self) -> str:
        """Return a sentence on the model."""
        model = self.model
        millions = sum(param.numel() for param in model.parameters()) / 1e6
        dtype = str(model.dtype).removeprefix("torch.")
        kind = f"{type(model).__name__}, {millions:,.1f} M parameters, {dtype} on {model.device.type}"
        return f"{self.directory}: {kind}{f', {self.adapter.describe()}' if self.adapter else ''}"


def load(
    path: str, *, dtype: torch.dtype | None, device: torch.device, adapter: PEFTAdapter | None = None
) -> LoadedModel:
    """Load the model at a path, or of a Hugging Face id; of a run directory, its newest valid checkpoint.

    Of an adapter directory of PEFT, it is the model that the adapter names, with it.

    dtype: of the parameters; None = that of the run that trained them, else of config.json; adapter: to put into the
    model. Raises ValueError if there is no model, if it is not one that generates text, or not the one that the adapter
    was trained on; CorruptFileError if a file is not as it was written.
    """
    if adapter is None and is_adapter(Path(path)):
        adapter = PEFTAdapter.open(Path(path))
        path = adapter.find_base(f"MODEL --adapter {path}")
    load_from = functools.partial(_load, dtype=dtype, device=device, peft=adapter)
    if checkpoints := checkpoints_of(Path(path)):
        return _load_newest(checkpoints[::-1], load_from)
    return load_from(find_model(path, option="model"))


def _load_newest(paths: list[Path], load_from: Callable[[Path], LoadedModel]) -> LoadedModel:
    """Load the first valid checkpoint, and report each one before it."""
    reasons = []
    for path in paths:
        try:
            if not (path / MANIFEST).is_file():
                raise CorruptFileError(path, f"is incomplete: it has no {MANIFEST}")
            return load_from(path)
        except CorruptFileError as error:
            reasons.append(str(error))
            print_note(f"skipped a checkpoint: {error}")
    raise RunError(f"no checkpoint is valid: {'; '.join(reasons)}")


def _load(directory: Path, *, dtype: torch.dtype | None, device: torch.device, peft: PEFTAdapter | None) -> LoadedModel:
    task, config, adapter, read = _open(directory)
    of_run = RecordedModel.of(str(directory)).options.get("model.dtype")
    own = DTYPES[of_run] if of_run else (peft and peft.dtype) or dtype_of(config)
    model = build_adapted(task, config, adapter, dtype or own)
    if not model.can_generate():
        raise ValueError(f"{directory} holds a {type(model).__name__}, which does not generate text")
    if peft is not None and adapter is not None:
        raise ValueError(f"{directory} holds a model with an adapter already; give its base model, or no --adapter")
    checksum, of_base = BaseChecksum(), peft.base_parameters(model) if peft else frozenset[str]()
    _fill(model, checksum.adding(read(model), of_base), device)
    if missing := [name for name, param in model.named_parameters() if param.is_meta]:
        raise ValueError(f"{directory} lacks parameters of the model: {first_names(missing)}")
    if peft is not None:
        peft.check_base(directory, checksum)
        peft.resize(model)
    files = _tokenizer_directory(directory, peft, model.config.get_text_config())
    tokenizer = load_tokenizer(files, model.config.get_text_config())
    has_own = peft is not None and (files / GENERATION_CONFIG).is_file()
    model.generation_config = read_generation_config(files if has_own else directory)
    if isinstance(adapter, VirtualTokens):
        peft = PEFTAdapter.of_virtual_tokens(directory, model, adapter)
    if peft is not None:
        model = peft.apply(model)
    module: nn.Module = model  # the type of PreTrainedModel.to is that of a decorator
    module.to(device).eval()
    return LoadedModel(directory, model, tokenizer, files, peft)


def dtype_of(config: PreTrainedConfig) -> torch.dtype:
    """Return the dtype of the parameters of a model by its config."""
    return config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32


def _tokenizer_directory(directory: Path, adapter: PEFTAdapter | None, config: PreTrainedConfig) -> Path:
    """Return the directory of an adapter if it has a tokenizer, as it was trained with that; else that of the model.

    No text of training has tokens for which the model has no row, such as a token for padding that a trainer has added.
    """
    if adapter is None or not has_tokenizer(adapter.directory):
        return directory
    if (tokens := len(read_tokenizer(adapter.directory, config))) > config.vocab_size and has_tokenizer(directory):
        print_note(
            f"the tokenizer in {adapter.directory} has {tokens} tokens, more than the {config.vocab_size} of the "
            f"model; tokenizer and chat template are those of {directory}"
        )
        return directory
    return adapter.directory


def _open(
    directory: Path,
) -> tuple[ModelClass, PreTrainedConfig, Adapter | None, Callable[[PreTrainedModel], NamedTensors]]:
    """Open a model directory; return task, config and adapter, and a function that yields the tensors of the model."""
    if os.path.lexists(directory / MANIFEST):
        shards = ShardDirectory(directory)
        shards.verify_model_files()
        model_files(directory)
        task = shards.manifest.task
        is_verified = shards.verified_layers is not None
        config = read_config(directory, task, is_valid=lambda config: is_verified)
        adapter = parse_adapter(shards.manifest.adapter)
        return MODEL_CLASSES[task], config, adapter, functools.partial(_shard_tensors, shards)
    task = "seq2seq" if read_json_object(directory / CONFIG).get("is_encoder_decoder") else "lm"
    opened = open_hf(directory, task)
    return MODEL_CLASSES[task], opened.config, None, functools.partial(_hf_tensors, opened)


def _shard_tensors(shards: ShardDirectory, model: PreTrainedModel) -> NamedTensors:
    """Yield parameters and stored buffers of layer shards by name; optimizer state is passed over.

    Raises CorruptFileError if a file is corrupt, or if its tensors are not those of the model.
    """
    description = shards.manifest.model
    for layer in description.layers:
        yield from shards.tensors(layer.name, layer_tensors(model, description, layer.index)).items()


def _hf_tensors(opened: HFModel, model: PreTrainedModel) -> NamedTensors:
    """Yield parameters and stored buffers of a Hugging Face directory by name, one at a time."""
    for name in names_of(model):
        yield from opened.read([name]).items()


def _fill(model: PreTrainedModel, tensors: NamedTensors, device: torch.device) -> None:
    """Replace parameters and buffers of a model by loaded ones, under all names of tied parameters, in place."""
    names, buffers = names_of(model), dict(model.named_buffers())
    # what transformers' from_pretrained keeps in fp32, such as biases of routers
    fp32 = [pattern.replace("*", ".*") for pattern in model._get_dtype_plan(model.dtype)]
    for key, tensor in tensors:
        dtype = torch.float32 if any(re.search(pattern, key) for pattern in fp32) else tensor_of(model, key).dtype
        # a copy, because `tensor` lies in a memory-mapped file
        loaded = tensor.to(device=device, dtype=dtype, copy=True)
        if key in buffers:
            set_buffer(model, key, loaded)
        else:
            set_tied_parameter(model, names[key], nn.Parameter(loaded, requires_grad=False))
