"""Law: a NaN or inf is traced to the stage, the tensor and the micro-batch in which it first appeared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from math import inf, nan
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from lib.direct import digest, draw_batch, gradients, make_config, session_of
from lib.models import DROPOUT
from lib.ranks import on_ranks
from torch import Tensor, nn

from acsgd.config.options import Config, ReplicaConfig
from acsgd.pp.nan_probe import NonFiniteTensor, first_non_finite
from acsgd.pp.stage import MicroBatch, Stage
from acsgd.run.session import Session
from acsgd.shards.weights import Weight

TinyModel = Callable[..., Path]


class Plant(NamedTuple):
    """A NaN or inf to inject."""

    kind: str
    """One of the kinds of `_plant`."""
    where: str
    """A weight's or a module's Hugging Face name."""
    micro: int | None
    """Index of the micro-batch in the global batch; None for all."""
    phase: Any
    """Phase in which it must be found."""
    tensor: str
    """Name under which it must be reported; {} stands for `where`."""
    value: float = nan


TABLE = "transformer.wte.weight"
"""The embedding, which is also the head, and on the stage of the head."""
PLANTS = [
    Plant("weight", "transformer.h.3.ln_1.weight", None, "weight", "weight {}"),
    Plant("weight", "transformer.h.0.mlp.c_fc.bias", None, "weight", "weight {}", inf),
    Plant("weight", TABLE, None, "weight", "weight {}"),
    Plant("output", "transformer.wte", 5, "forward", "output of {}"),
    Plant("output", "transformer.h.1.mlp.c_fc", 4, "forward", "output of {}"),
    Plant("output", "transformer.h.3.attn", 0, "forward", "output of {}"),
    Plant("output", "lm_head", 1, "forward", "output of {}", -inf),
    Plant("loss", "lm_head", 2, "forward", "loss"),
    Plant("gradient", "transformer.h.1.mlp.c_proj", 3, "backward", "gradient of the output of {}"),
    Plant("gradient", "transformer.h.2.attn.c_attn", 5, "backward", "gradient of the output of {}", inf),
    Plant("weight's gradient", "transformer.h.2.mlp.c_fc.weight", 2, "backward", "gradient of {}"),
    Plant("sum", "transformer.h.2.ln_2.bias", None, "reduce", "gradient summed over replicas of {}"),
    Plant("sum", TABLE, None, "reduce", "gradient summed over replicas of {}"),
]
CUTS = [
    # ranks of a pipeline, replicas, blocks per stage, schedule, recompute
    (2, 1, (1, 1, 1, 1), "interleaved:chunks=2", "none"),
    (2, 2, (2, 2), "1f1b", "layers"),
]


@pytest.mark.parametrize(("stages", "replicas", "blocks", "schedule", "recompute"), CUTS)
def test_the_injected_tensor_is_found(
    stages: int,
    replicas: int,
    blocks: tuple[int, ...],
    schedule: str,
    recompute: str,
    tiny_model: TinyModel,
    tmp_path: Path,
) -> None:
    model = tiny_model("gpt2", **DROPOUT, n_layer=4)
    config = make_config(model, tmp_path, stages=stages, layers=blocks, schedule=schedule, recompute=recompute)
    by_rank = on_ranks(stages * replicas, find_on_rank, tmp_path / "store", config, PLANTS)
    for plant, *reports in zip(PLANTS, *by_rank, strict=True):
        value: Any = "nan" if plant.value != plant.value else "inf"
        planted = NonFiniteTensor(
            plant.phase, _stage_of(plant.where, blocks), plant.micro, plant.tensor.format(plant.where), value
        )
        found = [NonFiniteTensor.from_dict(fault) for fault in reports if fault is not None]
        assert first_non_finite(found) == first_non_finite(found[::-1]) == planted


@pytest.mark.parametrize("recompute", ["none", "layers"])
def test_it_is_found_if_sequences_run_one_by_one(recompute: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    options = {"micro": 2, "dropout_mask": "sample", "recompute": recompute}
    config = make_config(tiny_model("gpt2", **DROPOUT, n_layer=4), tmp_path, stages=2, layers=(2, 2), **options)
    plants = [
        Plant("output", "transformer.h.1.mlp.c_fc", 1, "forward", "output of {}"),
        Plant("gradient", "transformer.h.3.attn.c_attn", 2, "backward", "gradient of the output of {}"),
        Plant("weight's gradient", "transformer.h.2.mlp.c_fc.weight", 0, "backward", "gradient of {}"),
    ]
    by_rank = on_ranks(2, find_on_rank, tmp_path / "store", config, plants)
    for plant, *reports in zip(plants, *by_rank, strict=True):
        planted = NonFiniteTensor(
            plant.phase, _stage_of(plant.where, (2, 2)), plant.micro, plant.tensor.format(plant.where), "nan"
        )
        assert first_non_finite([NonFiniteTensor.from_dict(fault) for fault in reports if fault is not None]) == planted


def test_a_sum_of_which_replicas_own_parts_is_checked_at_its_owner(tiny_model: TinyModel, tmp_path: Path) -> None:
    config = make_config(tiny_model("gpt2", n_layer=1), tmp_path, stages=1)
    config = replace(config, dp=ReplicaConfig(shard="weights"))
    plants = [Plant("sum", "transformer.h.0.mlp.c_fc.weight", None, "reduce", "")]
    [first], [second] = on_ranks(2, find_on_rank, tmp_path / "store", config, plants)
    assert NonFiniteTensor.from_dict(first) == NonFiniteTensor(
        "reduce", 0, None, "gradient summed over replicas of transformer.h.0.mlp.c_fc.weight[0:16]", "nan"
    )
    assert second is None


def test_an_overflow_on_the_wire_is_found_at_the_receiver(tiny_model: TinyModel, tmp_path: Path) -> None:
    config = make_config(
        tiny_model("llama", num_hidden_layers=2), tmp_path, stages=2, layers=(1, 1), forward="none:dtype=fp16"
    )
    too_large = [Plant("output", "model.layers.0", 3, "forward", "", value=1e6)]
    by_rank = on_ranks(2, find_on_rank, tmp_path / "store", config, too_large)
    assert by_rank[0][0]["phase"] == "backward"
    assert NonFiniteTensor.from_dict(by_rank[1][0]) == NonFiniteTensor(
        "forward", 1, 3, "input of model.layers.1", "inf"
    )


def find_on_rank(
    rank: int, world_size: int, store: Path, config: Config, plants: Sequence[Plant]
) -> list[dict[str, Any] | None]:
    """Return what this rank finds of each plant."""
    found = []
    with session_of(config, rank, world_size, str(store)) as session:
        batch = draw_batch(config, 0, session.job.micro_ids)
        for plant in plants:
            with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as cleanup:
                _plant(plant, session, patch, cleanup)
                session.pipeline.run(batch, 0)
                fault = session.pipeline.find_non_finite(batch, session.owned, 0)
                found.append(None if fault is None else fault.to_dict())
    return found


def search_on_rank(rank: int, world_size: int, store: Path, config: Config, scale: float) -> None:
    """Check that a search in a finite step finds nothing and has the same results as the step."""
    with session_of(config, rank, world_size, str(store)) as session:
        batch = draw_batch(config, 0, session.job.micro_ids)
        loss, grads = session.pipeline.run(batch, 0, scale), digest(gradients(session))
        assert session.pipeline.find_non_finite(batch, session.owned, 0, scale) is None
        assert digest(gradients(session)) == grads
        for stage in session.stages.values():
            assert not any(m._forward_hooks or m._forward_pre_hooks for m in stage.composed.model.modules())
            assert not any(weight.param._backward_hooks for weight in stage.weights)
        assert session.pipeline.run(batch, 0, scale) == loss
        assert digest(gradients(session)) == grads


@pytest.mark.parametrize(("world_size", "micro", "dropout_mask"), [(1, 1, "step"), (4, 2, "sample")])
def test_a_search_has_no_side_effects(
    world_size: int, micro: int, dropout_mask: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    stages = min(world_size, 2)
    options = {"dtype": "bf16", "recompute": "layers", "dropout_mask": dropout_mask}
    config = make_config(tiny_model("gpt2", **DROPOUT, n_layer=2), tmp_path, stages=stages, micro=micro, **options)
    on_ranks(world_size, search_on_rank, tmp_path / "store", config, 4.0)


def _stage_of(name: str, blocks: Sequence[int]) -> int:
    if not name.startswith("transformer.h."):
        if name == TABLE:
            return len(blocks) - 1
        return 0 if name.startswith("transformer") else len(blocks) - 1
    return sum(end <= int(name.split(".")[2]) for end in accumulate(blocks))


def _plant(plant: Plant, session: Session, patch: pytest.MonkeyPatch, cleanup: contextlib.ExitStack) -> None:
    """Inject the value on the ranks that hold the tensor; into weights and sums on the first replica only.

    patch, cleanup: undo it.
    """
    for stage in session.stages.values():
        keys = {weight.key for weight in stage.weights}
        if not any(key.startswith(plant.where) for key in keys) and plant.where not in stage.modules():
            continue
        spoil = _spoiler(plant, stage, session.job.micro_ids, patch)
        weights = {weight.key: weight.param for weight in stage.weights}
        if plant.kind in ("output", "gradient"):
            of_gradient = plant.kind == "gradient"
            module = stage.composed.model.get_submodule(plant.where)
            cleanup.callback(module.register_forward_hook(_hook(spoil, of_gradient=of_gradient)).remove)
        elif plant.kind == "loss":
            criterion = stage.head_loss.criterion
            patch.setattr(criterion, "loss", _then(criterion.loss, spoil))
        elif plant.kind == "weight's gradient":
            cleanup.callback(weights[plant.where].register_hook(spoil).remove)
        elif session.job.topology.replica == 0:
            if plant.kind == "weight":
                last = weights[plant.where].data[-1]
                cleanup.callback(last.copy_, last.clone())
                last.fill_(plant.value)
            else:
                summed = session.owned.of([each for each in stage.weights if each.key == plant.where])
                patch.setattr(stage.sync, "wait", _then(stage.sync.wait, partial(_spoil_sum, summed)))


def _then(first: Callable[..., Any], second: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda *args: second(first(*args))


def _spoil_sum(weights: Sequence[Weight], _: None) -> None:
    for weight in weights:
        assert weight.master.grad is not None
        weight.master.grad.fill_(nan)


def _spoiler(plant: Plant, stage: Stage, micros: range, patch: pytest.MonkeyPatch) -> Callable[[Tensor], Tensor]:
    """Return a function that puts the value into a tensor while the stage runs the micro-batch."""
    forward, backward = stage.forward, stage.backward
    current = -1

    def watched_forward(micro: MicroBatch, *args: Any) -> Any:
        nonlocal current
        current = micro.global_index
        return forward(micro, *args)

    def watched_backward(micro: int, *args: Any, **options: Any) -> Any:
        nonlocal current
        current = micros[micro]
        return backward(micro, *args, **options)

    def spoil(tensor: Tensor) -> Tensor:
        if current != plant.micro:
            return tensor
        spoilt = tensor.clone()
        spoilt.view(-1)[-1] = plant.value
        return spoilt

    patch.setattr(stage, "forward", watched_forward)
    patch.setattr(stage, "backward", watched_backward)
    return spoil


def _hook(spoil: Callable[[Tensor], Tensor], *, of_gradient: bool) -> Callable[[nn.Module, Any, Any], Any]:
    """Return a forward hook that spoils a module's (first) output, or the gradient of it."""

    def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
        first, *others = output if isinstance(output, tuple) else (output,)
        if of_gradient:
            first.register_hook(spoil)
            return None
        return (spoil(first), *others) if others else spoil(first)

    return hook
