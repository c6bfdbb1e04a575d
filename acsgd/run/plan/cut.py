"""Which layers each rank of a pipeline holds: those that the user gives, or an even division of the estimated cost."""

from __future__ import annotations

from collections.abc import Sequence

from acsgd.config.options import Config
from acsgd.pp.schedules.actions import Placement
from acsgd.run.plan.model import RunModel, layers_cache
from acsgd.shards.plan import StageSpec, plan, plan_blocks, training_costs
from acsgd.streams import Streams

Cut = tuple[tuple[int, ...], ...]
"""The layers of each position of a pipeline, by their indices in the model. Each layer has one position."""


def sizes_of(config: Config) -> dict[str, int]:
    """Return the sizes of a micro-batch of the longest rows, by the symbols of shapes."""
    return {"batch": config.pp.micro, "sequence": config.data.sequence, "target": config.data.sequence}


def costs_of(config: Config, model: RunModel, stages: int, streams: Streams) -> tuple[float, ...] | None:
    """Return the estimated cost of each layer; None if there is nothing to balance."""
    if stages == 1 or stages > len(model.layers) or config.pp.layers is not None:
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
    if config.pp.layers is not None:
        return plan_blocks(config.pp.layers, num_layers - 2, stages)
    return [StageSpec(0, num_layers)] if costs is None else plan(training_costs(costs, model.description), stages)


def layers_by_rank(placement: Placement, specs: Sequence[StageSpec]) -> Cut:
    """Return the layers of each rank of a pipeline. specs: range of layers of each stage."""
    return tuple(
        tuple(layer for stage in placement.stages_of(rank) for layer in range(*specs[stage]))
        for rank in range(placement.ranks)
    )
