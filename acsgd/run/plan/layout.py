"""How a run is laid out: the layers of each rank of a pipeline, the shapes of its batches, and its directories.

Layers are those that the user gives for each stage, or an even division of the estimated cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from acsgd.codecs.identity import DTYPES
from acsgd.config.options import Config
from acsgd.io.checkpoint.directory import CHECKPOINTS, CheckpointDirectory
from acsgd.pp.schedules.actions import Placement
from acsgd.pp.wire.coder import TensorSpec
from acsgd.run.plan.layers_cache import LayersCache
from acsgd.run.plan.model import RunModel, layers_cache
from acsgd.shards.plan import StageSpec, plan, plan_blocks, training_costs
from acsgd.streams import Streams
from acsgd.topology import Topology

Cut = tuple[tuple[int, ...], ...]
"""The layers of each position of a pipeline, by their indices in the model. Each layer has one position."""


@dataclass(frozen=True)
class StageLayout:
    """Which ranks of this rank's pipeline hold which stages, and which layers these are."""

    topology: Topology
    specs: tuple[StageSpec, ...]
    """Range of layers of each stage."""
    costs: tuple[float, ...] | None
    """Estimated cost of each layer; None if it was not needed for `specs`."""

    placement: Placement
    """Which rank of a pipeline holds which stages."""

    @property
    def stages(self) -> list[int]:
        """Indices of the stages this rank holds."""
        return self.placement.stages_of(self.topology.stage_rank)

    @property
    def shared_boundaries(self) -> list[int]:
        """Boundaries that this rank shares with another, by the stage before each."""
        here = [stage in self.stages for stage in range(len(self.specs))]
        return [boundary for boundary, (before, after) in enumerate(pairwise(here)) if before != after]

    @property
    def cut(self) -> Cut:
        """The layers of each position of a pipeline."""
        return layers_by_rank(self.placement, self.specs)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that this rank holds."""
        return self.cut[self.topology.stage_rank]

    @property
    def spans(self) -> dict[int, StageSpec]:
        """Range of layers of each stage that this rank holds."""
        return {stage: self.specs[stage] for stage in self.stages}

    def rank_of(self, stage: int) -> int:
        """Return the global rank that holds a stage of this rank's pipeline."""
        return self.topology.ranks_along("pipeline")[self.placement.rank_of(stage)]

    def rank_of_layer(self, layer: int) -> int:
        """Return the global rank that holds a layer of this rank's pipeline."""
        return self.rank_of(self.stage_of_layer(layer))

    def stage_of_layer(self, layer: int) -> int:
        """Return the stage of a layer."""
        return next(stage for stage, spec in enumerate(self.specs) if spec.first <= layer < spec.last)


@dataclass(frozen=True)
class BatchShapes:
    """Shapes of the batches of a run, with rows of the full length."""

    config: Config
    model: RunModel
    specs: tuple[StageSpec, ...]

    @property
    def num_micros(self) -> int:
        """Number of micro-batches of the global batch."""
        return self.config.data.batch // self.config.pp.micro

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of parameters and activations."""
        return DTYPES[self.config.model.dtype]

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of a micro-batch of the longest rows, by the symbols of shapes."""
        return sizes_of(self.config)

    @property
    def virtual_tokens(self) -> int:
        """Number of tokens of each sequence that stand for embeddings of an adapter."""
        return self.model.adapter.virtual_tokens if self.model.adapter else 0

    @property
    def max_targets(self) -> int:
        """Number of labels of the global batch, if none is ignored."""
        sizes = {**self.sizes, "batch": self.config.data.batch}
        return math.prod(sizes[size] for size in self.model.task.model_class.labels)

    @property
    def boundaries(self) -> list[dict[str, TensorSpec]]:
        """By boundary, shapes and dtypes of the tensors that a stage sends to the next, per micro-batch, by name."""
        sizes, dtype = self.sizes, self.dtype
        cuts = [self.model.description.boundary(spec.first) for spec in self.specs[1:]]
        return [
            {name: TensorSpec(*shape.resolve(sizes, dtype), shape.dims) for name, shape in cut.items()} for cut in cuts
        ]

    def max_lookups(self, inputs: Sequence[str], micros: int) -> int:
        """Return how many rows of a table some micro-batches look up at most. inputs: indices of the rows."""
        return micros * sum(math.prod(self.sizes[size] for size in self.model.inputs[name]) for name in inputs)


@dataclass(frozen=True)
class RunPaths:
    """Directories of a run."""

    config: Config

    @property
    def run(self) -> Path:
        """The run directory, log.dir."""
        return Path(self.config.log.dir)

    @property
    def cache(self) -> Path:
        """Directory of converted models and tokenized text, beside log.dir, shared with later runs."""
        return self.run.parent / "cache"

    @property
    def layers_cache(self) -> LayersCache:
        """Layers of models that were compared with the whole model."""
        return layers_cache(self.config)

    @property
    def checkpoints(self) -> CheckpointDirectory:
        """Directory of the run's checkpoints."""
        return CheckpointDirectory(Path(self.config.checkpoint.dir or self.run / CHECKPOINTS))


def sizes_of(config: Config) -> dict[str, int]:
    """Return the sizes of a micro-batch of the longest rows, by the symbols of shapes."""
    return {"batch": config.pp.micro, "sequence": config.data.sequence, "target": config.data.sequence}


def costs_of(config: Config, model: RunModel, stages: int, streams: Streams) -> tuple[float, ...] | None:
    """Return the estimated cost of each layer; None if there is nothing to balance."""
    if stages == 1 or stages > len(model.layers) or config.pp.blocks is not None:
        return None
    return layers_cache(config).costs(model.config, model.derived, sizes_of(config), device=streams.device.type)


def divide(config: Config, model: RunModel, stages: int, costs: Sequence[float] | None) -> list[StageSpec]:
    """Return the layers of each stage: those of pp.layers, or balanced by cost."""
    num_layers = len(model.layers)
    if stages > num_layers:
        raise ValueError(
            f"pp.stages={config.pp.stages} with pp.schedule={config.pp.schedule} needs {stages} stages, but the model "
            f"has {num_layers} layers (an embedding, {num_layers - 2} blocks, a head); use fewer stages or chunks"
        )
    if config.pp.blocks is not None:
        return plan_blocks(config.pp.blocks, num_layers - 2, stages)
    return [StageSpec(0, num_layers)] if costs is None else plan(training_costs(costs, model.description), stages)


def layers_by_rank(placement: Placement, specs: Sequence[StageSpec]) -> Cut:
    """Return the layers of each rank of a pipeline. specs: range of layers of each stage."""
    return tuple(
        tuple(layer for stage in placement.stages_of(rank) for layer in range(*specs[stage]))
        for rank in range(placement.ranks)
    )
