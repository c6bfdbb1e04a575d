"""Load a whole model for inference: from layer shards, such as a checkpoint of a run, or from a Hugging Face model."""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from xxhash import xxh3_64

from acsgd.adapters.initial import BaseChecksum
from acsgd.adapters.inject import build_adapted, is_of_adapter
from acsgd.codecs.identity import DTYPES
from acsgd.comm.waits import Meter
from acsgd.commands.generation.adapter import PEFTAdapter, is_adapter
from acsgd.commands.generation.stages import StageModel, divide
from acsgd.commands.generation.trial import find_difference
from acsgd.commands.recorded import RecordedModel
from acsgd.config.adapters import Adapter, VirtualTokens, parse_adapter
from acsgd.config.options import Offload
from acsgd.errors import CorruptFileError, RunError
from acsgd.io.checkpoint.directory import checkpoints_of
from acsgd.layers.description import LayerSpec, ModelLayers
from acsgd.layers.padding import depends_on_length
from acsgd.layers.skeleton import fill_with_stand_ins, move_buffers, parameter_names, set_buffer, set_tied_parameter
from acsgd.model_classes import MODEL_CLASSES, ModelClass
from acsgd.notes import print_note
from acsgd.optim.fetch import FileParams, HostParams, LayerFetch, ParamSource
from acsgd.optim.ownership import OwnedWeights, Ownership
from acsgd.shards.check import describe_lost
from acsgd.shards.config import derive_layers, read_config
from acsgd.shards.disk import ShardDirectory, model_files
from acsgd.shards.files import CONFIG, has_tokenizer, read_json_object
from acsgd.shards.generation import GENERATION_CONFIG, read_generation_config
from acsgd.shards.hf_model import HFModel, names_of, tensor_of
from acsgd.shards.hub import find_model
from acsgd.shards.layer_tensors import layer_tensors
from acsgd.shards.locate import open_hf
from acsgd.shards.manifest import MANIFEST
from acsgd.shards.tokenizer import load_tokenizer, read_tokenizer
from acsgd.shards.writer import OpenTensor
from acsgd.streams import open_streams

NamedTensors = Iterator[tuple[str, Tensor]]
Gather = Callable[[str, str], list[str]]
"""Returns the text of each rank, given the purpose of the exchange and that of this rank."""


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
    stage: LoadedStage | None = None
    """None if the whole model is loaded."""
    offloaded: OffloadedBlocks | None = None
    """Blocks whose parameters have no values between uses; None = all have."""

    def describe(self) -> str:
        """Return a sentence on the model."""
        model = self.model
        millions = sum(param.numel() for param in model.parameters()) / 1e6
        dtype = str(model.dtype).removeprefix("torch.")
        kind = f"{type(model).__name__}, {millions:,.1f} M parameters, {dtype} on {model.device.type}"
        parts = [kind, self.adapter.describe() if self.adapter else "", self.stage.division if self.stage else ""]
        return f"{self.directory}: {', '.join(filter(None, parts))}"

    def digest(self) -> str:
        """Return a checksum of the description of the model: its manifest, or its config and the sizes of its files."""
        manifest = self.directory / MANIFEST
        if manifest.is_file():
            return xxh3_64(manifest.read_bytes()).hexdigest()
        sizes = sorted((path.name, path.stat().st_size) for path in self.directory.glob("*.safetensors*"))
        return xxh3_64(repr(sizes).encode() + (self.directory / CONFIG).read_bytes()).hexdigest()

    def own_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters that are loaded, by the first of their names, each while it has its values."""
        # what PEFT puts around a model renames the parameters
        keys = {self.model.get_parameter(names[0]): key for key, names in parameter_names(self.model).items()}
        offloaded = self.offloaded.params if self.offloaded is not None else frozenset[nn.Parameter]()
        for param, key in keys.items():
            if (self.stage is None or key in self.stage.names) and param not in offloaded:
                yield key, param
        if self.offloaded is not None:
            yield from ((keys[param], param) for param in self.offloaded.each())


class OffloadedBlocks:
    """Blocks of a model whose parameters are fetched before each call of a block; those of the next one behind it.

    layers: those of the blocks, in the order in which they run; source: where the parameters lie between uses, for
    which it takes them from the model, in place; fill: gives those of a layer their values.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[LayerSpec],
        source: ParamSource,
        fill: Callable[[LayerSpec], None],
    ) -> None:
        for layer in layers:
            fill(layer)
            source.add(layer, (), model)
        self._fetch = LayerFetch([[layer] for layer in layers], source, Meter())
        stacks = [(layer.block or "").rpartition(".")[0] for layer in layers]
        # the next token runs the blocks of the decoder alone
        first = stacks.index(stacks[-1]) if model.config.is_encoder_decoder else 0
        for group, layer in enumerate(layers):
            block, ahead = model.get_submodule(layer.block or ""), group + 1 if group + 1 < len(layers) else first
            block.register_forward_pre_hook(lambda *_, group=group, ahead=ahead: self._fetch.enter(group, ahead))
            block.register_forward_hook(lambda *_, group=group: self._fetch.leave(group), always_call=True)

    @property
    def params(self) -> frozenset[nn.Parameter]:
        """The parameters that are fetched."""
        return frozenset(each.param for group in self._fetch.groups for each in group)

    def each(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that are fetched, each while it has its values."""
        for group, params in enumerate(self._fetch.groups):
            with self._fetch.whole(group):
                yield from (each.param for each in params)


def check_offload(offload: Offload, device: torch.device) -> None:
    """Raise ValueError if parameters are to be kept in the memory in which they are anyway."""
    if offload == "cpu" and device.type == "cpu":
        raise ValueError(
            "--offload cpu has no effect: the device is the CPU, whose memory holds the weights anyway; give --offload "
            "disk, or remove it"
        )


class StagePlace(NamedTuple):
    """Which stage of a model is meant."""

    number: int
    """0 = first."""
    stages: int


class LoadedStage(NamedTuple):
    """A stage that was loaded in place of the whole model."""

    model: StageModel
    names: frozenset[str]
    """Its parameters and stored buffers, by the first of their names in the model."""
    division: str
    """Clause on the layers of each stage."""
    find_difference: Callable[[], str]
    """See `trial.find_difference`."""


def load(
    path: str,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    offload: Offload = "none",
    adapter: PEFTAdapter | None = None,
    place: StagePlace | None = None,
    gather: Gather = lambda name, text: [text],
) -> LoadedModel:
    """Load the model at a path, or of a Hugging Face id; of a run directory, its newest valid checkpoint.

    Of an adapter directory of PEFT, it is the model that the adapter names, with it.

    dtype: of the parameters; None = that of the run that trained them, else of config.json; offload: where the
    parameters of blocks lie between uses, as model.offload of a run; adapter: to put into the
    model; place: of the stage to load, with stand-ins in place of other parameters outside of blocks; None = all of
    them; gather: makes all ranks load the same checkpoint of a run directory, the newest that is valid on each. Raises
    ValueError if there is no model, if it is not one that generates text, or not the one that the adapter was trained
    on, or if it cannot be divided; CorruptFileError if a file is not as it was written; RunError if no checkpoint is
    valid.
    """
    check_offload(offload, device)
    if (place is not None or offload != "none") and (adapter is not None or is_adapter(Path(path))):
        raise ValueError(
            "an adapter directory of PEFT is put into a whole model on the device of one process; make a model of "
            "both: acsgd convert merge ADAPTER TARGET, and give that"
        )
    if adapter is None and is_adapter(Path(path)):
        adapter = PEFTAdapter.open(Path(path))
        path = adapter.find_base(f"MODEL --adapter {path}")
    load_from = functools.partial(_load, dtype=dtype, device=device, offload=offload, peft=adapter, place=place)
    checkpoints = {each.name: each for each in checkpoints_of(Path(path))[::-1]}
    by_rank = [json.loads(names) for names in gather("finding checkpoints", json.dumps([*checkpoints]))]
    if not any(by_rank):
        return load_from(find_model(path, option="model"))
    common = [each for name, each in checkpoints.items() if all(name in names for names in by_rank)]
    if not common:
        raise RunError(f"no checkpoint of {path} is on all hosts; give all of them the same run directory")
    return _load_newest(common, load_from, gather)


def _load_newest(paths: list[Path], load_from: Callable[[Path], LoadedModel], gather: Gather) -> LoadedModel:
    """Load the first checkpoint that is valid on all ranks, and report each one before it."""
    reasons = []
    for path in paths:
        loaded, problem = None, ""
        try:
            if not (path / MANIFEST).is_file():
                raise CorruptFileError(path, f"is incomplete: it has no {MANIFEST}")
            loaded = load_from(path)
        except CorruptFileError as error:
            problem = str(error)
        problems = [*dict.fromkeys(filter(None, gather(f"loading {path.name}", problem)))]
        if loaded is not None and not problems:
            return loaded
        reasons += problems
        if problem:
            print_note(f"skipped a checkpoint: {problem}")
    raise RunError(f"no checkpoint is valid: {'; '.join(reasons)}")


def _load(
    directory: Path,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    offload: Offload,
    peft: PEFTAdapter | None,
    place: StagePlace | None,
) -> LoadedModel:
    opened = _open(directory)
    if offload == "disk" and opened.stored is None:
        raise ValueError(
            f"--offload disk reads layer shards, and {directory} is a Hugging Face directory; convert it: acsgd "
            f"convert from-hf {directory} TARGET"
        )
    adapter = opened.adapter
    of_run = RecordedModel.of(str(directory)).options.get("model.dtype")
    own = DTYPES[of_run] if of_run else (peft and peft.dtype) or dtype_of(opened.config)
    model = build_adapted(opened.model_class, opened.config, adapter, dtype or own)
    if not model.can_generate():
        raise ValueError(f"{directory} holds a {type(model).__name__}, which does not generate text")
    if peft is not None and adapter is not None:
        raise ValueError(f"{directory} holds a model with an adapter already; give its base model, or no --adapter")
    stage = None if place is None else _find_stage(opened, directory, model, place)
    names = frozenset(names_of(model)) if stage is None else stage.names
    checksum, of_base = BaseChecksum(), peft.base_parameters(model) if peft else frozenset[str]()
    keys = frozenset[str]() if offload == "none" else _parameters_of_blocks(opened.layers()) & names
    if isinstance(adapter, VirtualTokens):  # which PEFT takes out of the blocks below
        keys -= {*filter(is_of_adapter, keys)}
    _fill(model, checksum.adding(opened.read(model, names - keys), of_base), device)
    offloaded = _offload(opened, model, keys, device, offload) if keys else None
    if missing := [name for name in parameter_names(model) if name in names and model.get_parameter(name).is_meta]:
        raise ValueError(describe_lost(directory, missing))
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
    _move(model, opened, stage, device)
    model.eval()
    return LoadedModel(directory, model, tokenizer, files, peft, stage, offloaded)


def _move(model: PreTrainedModel, opened: _Opened, stage: LoadedStage | None, device: torch.device) -> None:
    """Move what is not on the device yet; of a stage, the buffers, with stand-ins for the layers of others."""
    if stage is None:
        module: nn.Module = model  # the type of PreTrainedModel.to is that of a decorator
        module.to(device)
    else:
        fill_with_stand_ins(model, opened.layers().blocks, device, model.dtype)
        move_buffers(model, device)


def _parameters_of_blocks(layers: ModelLayers) -> frozenset[str]:
    """Return the parameters that lie within a block, and that no layer with another one uses.

    A layer also has those that forward uses behind its block, such as the last norm of an encoder.
    """
    blocks = dict[str, set[str | None]]()
    for layer in layers.layers:
        for key in layer.parameters:
            blocks.setdefault(key, set()).add(layer.block)
    return frozenset(key for key, (block, *others) in blocks.items() if not others and key.startswith(f"{block}."))


def _offload(
    opened: _Opened, model: PreTrainedModel, keys: frozenset[str], device: torch.device, offload: Offload
) -> OffloadedBlocks:
    """Load parameters of blocks to where they lie between uses, one block at a time."""
    streams, owned = open_streams(device.type, device.index or 0), OwnedWeights((), Ownership(0, 1))
    source: ParamSource = HostParams(owned, keys, streams)
    if offload == "disk":
        assert opened.stored is not None
        source = FileParams(owned, keys, opened.stored, streams)

    def fill(layer: LayerSpec) -> None:
        _fill(model, opened.read(model, keys.intersection(layer.parameters)), device)

    # a block that runs several times is one group
    layers = {layer.block: layer for layer in opened.layers().layers if keys.intersection(layer.parameters)}
    return OffloadedBlocks(model, [*layers.values()], source, fill)


OWN_CALLS = ("prefill_chunk_size", "guidance_scale", "prompt_lookup_num_tokens", "max_time")
"""Options of generation_config.json by which transformers calls a model more or less than once per token."""


def _find_stage(opened: _Opened, directory: Path, model: PreTrainedModel, place: StagePlace) -> LoadedStage:
    """Divide a model, whose parameters are not loaded, and return a stage. Raises ValueError."""
    options = read_generation_config(directory)
    if set_options := [name for name in OWN_CALLS if getattr(options, name, None) is not None]:
        raise ValueError(
            f"{directory / GENERATION_CONFIG}: {', '.join(set_options)} needs the model in one process; remove it, or "
            "start it without torchrun"
        )
    if opened.model_class.name != "lm":
        raise ValueError("encoder-decoders generate in one process; start it without torchrun")
    if isinstance(opened.adapter, VirtualTokens):
        raise ValueError("models with virtual tokens generate in one process; start it without torchrun")
    layers = opened.layers()
    if depends_on_length(opened.config, sequence=sys.maxsize) or len({*layers.blocks}) < len(layers.blocks):
        raise ValueError(
            f"{opened.config.model_type} keeps state outside of its cache, such as rotary frequencies that change with "
            "the length, or repeats blocks, so that it generates in one process; start it without torchrun"
        )
    specs = divide(model, layers, place.stages)
    spec = specs[place.number]
    own = layers.layers[slice(*spec)]
    # buffers of the last layer: those outside of blocks are among them
    buffers = {name for layer in (*own, layers.layers[-1]) for name in layer.buffers}
    names = frozenset(buffers.union(*(layer.parameters for layer in own)))
    spans = (f"{layers.layers[first].name} .. {layers.layers[last - 1].name}" for first, last in specs)
    division = f"in {place.stages} stages: {' | '.join(spans)}"
    find = functools.partial(find_difference, opened.model_class, opened.config, layers)
    return LoadedStage(StageModel(model, layers, spec), names, division, find)


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


class _Opened(NamedTuple):
    """A model directory whose description was read."""

    model_class: ModelClass
    config: PreTrainedConfig
    adapter: Adapter | None
    layers: Callable[[], ModelLayers]
    """Returns the layers of the model. Raises LayersError."""
    read: Callable[[PreTrainedModel, Collection[str]], NamedTensors]
    """Yields parameters and stored buffers of the model, those with one of the names. Raises CorruptFileError."""
    stored: Callable[[str], OpenTensor] | None
    """Returns where a parameter is in a file. None = in a Hugging Face directory."""


def _open(directory: Path) -> _Opened:
    """Open a model directory."""
    if os.path.lexists(directory / MANIFEST):
        shards = ShardDirectory(directory)
        shards.verify_model_files()
        model_files(directory)
        task, description = shards.manifest.task, shards.manifest.model
        is_verified = shards.verified_layers is not None
        config = read_config(directory, task, is_valid=lambda config: is_verified)
        adapter = parse_adapter(shards.manifest.adapter)
        read = functools.partial(_shard_tensors, shards)

        def stored(key: str) -> OpenTensor:
            return shards.stored(description.first_holder(key).name, key)

        return _Opened(MODEL_CLASSES[task], config, adapter, lambda: description, read, stored)
    task = "seq2seq" if read_json_object(directory / CONFIG).get("is_encoder_decoder") else "lm"
    opened = open_hf(directory, task)
    layers = functools.cache(functools.partial(derive_layers, directory, opened.config, task))
    return _Opened(MODEL_CLASSES[task], opened.config, None, layers, functools.partial(_hf_tensors, opened), None)


def _shard_tensors(shards: ShardDirectory, model: PreTrainedModel, names: Collection[str]) -> NamedTensors:
    """Yield parameters and stored buffers of layer shards by name; optimizer state is passed over.

    Raises CorruptFileError if a file is corrupt, or if its tensors are not those of the model.
    """
    description = shards.manifest.model
    for layer in description.layers:
        if not {*names}.isdisjoint(description.stored()[layer.name]):
            tensors = shards.tensors(layer.name, layer_tensors(model, description, layer.index))
            yield from ((name, tensor) for name, tensor in tensors.items() if name in names)


def _hf_tensors(opened: HFModel, model: PreTrainedModel, names: Collection[str]) -> NamedTensors:
    """Yield parameters and stored buffers of a Hugging Face directory by name, one at a time."""
    for name in names_of(model):
        if name in names:
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
