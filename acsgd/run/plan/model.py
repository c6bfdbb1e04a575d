"""The model of a run, found and described."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from acsgd.adapters.inject import build_adapted, with_adapter
from acsgd.codecs.identity import DTYPES
from acsgd.config.adapters import Adapter, parse_adapter
from acsgd.config.options import Config, ModelConfig
from acsgd.launch import Launch
from acsgd.layers.description import LayerSpec, ModelLayers
from acsgd.layers.quantize import QuantizedFormat, least_bytes
from acsgd.layers.skeleton import parameter_names
from acsgd.model_classes import ModelClass
from acsgd.run.plan.layers_cache import LayersCache
from acsgd.run.plan.limits import ParameterCount, check_memory, check_sequence
from acsgd.run.plan.plugins import has_masters
from acsgd.shards.config import derive_layers, longest_sequence
from acsgd.shards.generation import set_special_tokens
from acsgd.shards.hub import find_tokenizer
from acsgd.shards.locate import FoundModel, open_model
from acsgd.shards.tokenizer import load_tokenizer
from acsgd.streams import Streams
from acsgd.tasks import find_task
from acsgd.tasks.base import Task


class RunModel(NamedTuple):
    """The model of a run, as its files describe it. No weights are loaded."""

    directory: Path
    """Directory of config.json and, unless model.init is "scratch", the weights."""
    tokenizer: Path
    """Directory of the tokenizer."""
    config: PreTrainedConfig
    parameters: ParameterCount
    """Number of parameters of the whole model, with its adapter."""
    task: Task
    derived: ModelLayers
    """Layers as derived from the model's forward."""
    description: ModelLayers
    """Layers of the run, with its adapter and the parameters that it freezes."""
    adapter: Adapter | None
    quantization: QuantizedFormat | None
    """Of the frozen linear layers of blocks."""
    is_verified: bool
    """Whether the layers were compared with the whole model when it was converted."""
    token_flops: float = 0.0
    """Arithmetic operations per token in training, see `token_flops`; 0 = unknown, or of no use."""

    @property
    def has_other_tokenizer(self) -> bool:
        """Whether the tokenizer is not the one in the model's directory, but that of model.tokenizer."""
        return self.tokenizer != self.directory

    @property
    def inputs(self) -> Mapping[str, tuple[str, ...]]:
        """Inputs of forward by name, each with the names of its sizes."""
        return self.task.model_class.inputs_of(self.config)

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """All layers of the model, first to last."""
        return self.description.layers

    def build(self, dtype: torch.dtype) -> PreTrainedModel:
        """Build the model with its adapter, its parameters on the meta device."""
        return build_adapted(
            self.task.model_class,
            self.config,
            self.adapter,
            dtype,
            blocks=self.derived.blocks,
            quantization=self.quantization,
        )

    def describe_size(self) -> str:
        """Return the size in words, for messages."""
        return f"a model of {self.parameters.all:,} parameters in {len(self.layers)} layers"


def open_run_model(config: Config, launch: Launch, streams: Streams, *, trains: bool = True) -> RunModel:
    """Find the model. Raises ValueError if it is invalid, or does not fit the sequence length or the memory.

    trains: whether gradients need memory.
    """
    owners = _most_owners(config, launch)
    check = partial(
        check_memory,
        dtype=DTYPES[config.model.dtype],
        stages=config.pp.stages,
        processes=launch.local_world_size,
        streams=streams,
        has_masters=has_masters(config),
        trains=trains,
        shards=1 if config.dp.shard == "none" else owners,
        gradient_shards=owners if config.dp.sums_passes else 1,
        weight_shards=owners if config.dp.shard == "weights" else 1,
        offloads=config.optim.offload == "cpu",
        params=config.model.offload,
    )
    return _describe(config, check, trains=trains)


def _most_owners(config: Config, launch: Launch) -> int:
    """Return the largest number of replicas that may divide the weights: where hosts are domains, those of one."""
    replicas, of_host = max(1, launch.world_size // config.pp.stages), launch.local_world_size // config.pp.stages
    if launch.daemon:  # the world is not known yet
        return max(1, of_host)
    in_hosts = config.dp.local == "auto" and config.dp.domain is None and 1 < of_host < replicas
    return of_host if in_hosts and launch.local_world_size % config.pp.stages == 0 else replicas


def describe_run_model(config: Config) -> RunModel:
    """Describe the model by its config.json alone, whatever memory there is. Raises ValueError if it is invalid."""
    return _describe(config, lambda count: None, config_only=True)


def _describe(
    config: Config, check: Callable[[ParameterCount], None], *, trains: bool = True, config_only: bool = False
) -> RunModel:
    """Find and describe the model. check: raises ValueError if so many parameters do not fit; trains: see
    `open_run_model`.
    """
    task, cache = find_task(config.model.task), layers_cache(config)
    found = open_model(
        replace(config.model, task=task.model_class.name),
        is_valid=lambda config: cache.find(config) is not None,
        has_adapter=not trains,
        config_only=config_only,
    )
    _set_attention(found.config, config.model.attention, task.model_class)
    tokenizer = found.directory if config_only else _find_tokenizer(config.model, found)
    check_sequence(config.data.sequence, longest_sequence(found.config))
    has_frozen = config.model.freeze is not None or config.adapter.spec is not None
    quantization = None if config.model.quantize == "none" else config.model.quantize
    # before the model is built, which takes memory itself
    count = _least_count(found.num_parameters, quantization, has_frozen=has_frozen)
    check(count)
    derived = (
        found.layers or cache.find(found.config) or derive_layers(found.directory, found.config, task.model_class.name)
    )
    adapter = parse_adapter(config.adapter.spec)
    description = _freeze(derived, config.model.freeze, trains=trains)
    if has_frozen:
        built = build_adapted(task.model_class, found.config, adapter, blocks=derived.blocks, quantization=quantization)
        if adapter is not None:
            description = with_adapter(derived, built, adapter, task.model_class.name)
        count = ParameterCount.of(built, parameter_names(built), description.frozen)
        check(count)
    return RunModel(
        found.directory,
        tokenizer,
        found.config,
        count,
        task,
        derived,
        description,
        adapter,
        quantization,
        is_verified=found.layers is not None,
    )


def _set_attention(config: PreTrainedConfig, attention: str, model_class: ModelClass) -> None:
    """Let a model use the attention of model.attention. Raises ValueError if it has no such one."""
    if attention == "sdpa" and not model_class.has_sdpa(config):
        raise ValueError(f"model.attention=sdpa: {config.model_type} has no sdpa; use --model.attention eager, or auto")
    if attention != "auto":
        config._attn_implementation = attention


def _find_tokenizer(options: ModelConfig, found: FoundModel) -> Path:
    """Return the directory of the tokenizer. The model's config gets the special tokens of one from elsewhere."""
    if options.tokenizer is None or (tokenizer := find_tokenizer(options.tokenizer)) == found.directory:
        return found.directory
    loaded = load_tokenizer(tokenizer, found.config, found.directory)
    if loaded.pad_token is None and options.task != "lm":  # whose rows are padded
        raise ValueError(
            f"the tokenizer in {tokenizer} has no pad_token, which model.task={options.task} needs; set "
            '"pad_token" in its tokenizer_config.json'
        )
    set_special_tokens(found.config, loaded)
    return tokenizer


def _least_count(parameters: int, quantization: QuantizedFormat | None, *, has_frozen: bool) -> ParameterCount:
    """Return the count that needs least memory, if which parameters are frozen or quantized is not known yet."""
    if quantization is not None:
        return ParameterCount(0, parameters, parameters, least_bytes(parameters, quantization))
    return ParameterCount(0, parameters) if has_frozen else ParameterCount(parameters, 0)


def _freeze(layers: ModelLayers, patterns: str | None, *, trains: bool) -> ModelLayers:
    """Return the layers without training for the parameters that model.freeze names. Raises ValueError.

    trains: if not, the last layer counts as trained anyway, since a model has one that is.
    """
    if patterns is None:
        return layers
    kept = () if trains else layers.layers[-1].parameters
    try:
        return layers.freeze([pattern.strip() for pattern in patterns.split(",")], kept)
    except ValueError as error:
        raise ValueError(f'model.freeze="{patterns}": {error}') from None


def layers_cache(config: Config) -> LayersCache:
    """Return the layers of models that were compared with the whole model."""
    return LayersCache(Path(config.log.dir).parent / "cache" / "layers", find_task(config.model.task).model_class)
