"""Laws of recomputation: training is the same bit for bit, and only the inputs of the layers are kept in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lib.direct import (
    SEQUENCE,
    build_stages,
    descend,
    digest,
    draw_batch,
    gradients,
    make_config,
    session_of,
)
from lib.models import blocks_of, dropout_of, tiny_config
from lib.ranks import on_ranks
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedConfig

from acsgd.config.options import Config
from acsgd.pp.recompute import Recompute
from acsgd.pp.stage import MicroBatch, Stage

TinyModel = Callable[..., Path]
FAMILIES = ("gpt2", "qwen2")
MICRO = MicroBatch(0, 0, 0, (0, 1))
SEQUENCES = 2


def train_on_rank(rank: int, world_size: int, store: Path, configs: Sequence[Config]) -> list[tuple[list[float], str]]:
    """Return the losses of two steps and a hash of the weights and gradients after them, for each config."""
    trained = []
    for number, config in enumerate(configs):
        with session_of(config, rank, world_size, f"{store}-{number}") as session:
            losses = []
            for step in range(2):
                losses.append(session.pipeline.run(draw_batch(config, step, session.job.micro_ids), step).item())
                descend(session.weights)
            trained.append((losses, digest([w.param for w in session.weights] + gradients(session))))
    return trained


@pytest.mark.parametrize("family", [FAMILIES[0], pytest.param(FAMILIES[1], marks=pytest.mark.soak)])
def test_recomputation_is_the_same_training_bit_for_bit(family: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    model = tiny_model(family, **dropout_of(family), **blocks_of(family, 4))
    cut = {"stages": 2, "schedule": "interleaved:chunks=2"}
    configs = [
        make_config(model, tmp_path, recompute=recompute, **cut)
        for recompute in ("none", "layers", "every:2", "attention")
    ]
    undropped = make_config(tiny_model(family, **blocks_of(family, 4)), tmp_path, **cut)
    for *trained, other in on_ranks(2, train_on_rank, tmp_path / "store", [*configs, undropped]):
        assert trained == trained[:1] * len(configs)
        assert trained[0][1] != other[1], "no dropout took place"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dropout", [False, True])
def test_a_stage_keeps_the_inputs_of_its_layers(family: str, dropout: bool) -> None:
    config = tiny_config(family, **(dropout_of(family) if dropout else {}))
    hidden_bytes = _hidden_bytes(config)
    cuts = [range(3), range(3, 5), range(5, 8)]
    by_recompute = [build_stages(config, cuts, recompute=recompute) for recompute in (Recompute(), Recompute(1))]
    for usual, sparing in zip(*by_recompute, strict=True):
        # the output of a layer is the input of the next one or of the boundary; a loss is kept as sum and mean, in fp32
        num_layers = len(sparing.layers)
        given = (num_layers - 1) * hidden_bytes + 2 * 4 if sparing.is_last else num_layers * hidden_bytes
        assert _kept_by_forward(sparing, config) <= given + _context_bytes(sparing, config)
        # without recomputation each matrix product keeps its input: in a block the outputs of both norms, of the
        # attention and of the MLP's activation, each at least as large as the input of the block
        num_blocks = sum(layer.spec.block is not None for layer in usual.layers)
        assert _kept_by_forward(usual, config) >= given + 4 * num_blocks * hidden_bytes


@pytest.mark.parametrize("recompute", [Recompute(), Recompute(2), Recompute(attention=True)])
def test_an_evaluation_keeps_only_its_result(recompute: Recompute) -> None:
    config = tiny_config("llama")
    for stage in build_stages(config, [range(3), range(3, 8)], recompute=recompute):
        returned = 4 if stage.is_last else _hidden_bytes(config)
        assert _alive_after(stage.evaluate, MICRO, *_inputs(stage, config)) == returned


def _hidden_bytes(config: PreTrainedConfig) -> int:
    return SEQUENCES * SEQUENCE * int(config.hidden_size) * 4


def _inputs(stage: Stage, config: PreTrainedConfig) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor | None]:
    tokens = torch.zeros(SEQUENCES, SEQUENCE, dtype=torch.int64)
    hidden = torch.ones(SEQUENCES, SEQUENCE, config.hidden_size)
    return {"input_ids": tokens}, {} if stage.is_first else {"hidden": hidden}, tokens if stage.is_last else None


def _kept_by_forward(stage: Stage, config: PreTrainedConfig) -> int:
    return _alive_after(stage.forward, MICRO, *_inputs(stage, config))


def _context_bytes(stage: Stage, config: PreTrainedConfig) -> int:
    tokens = torch.zeros(SEQUENCES, SEQUENCE, dtype=torch.int64)
    layers = range(stage.layers[0].spec.index, stage.layers[-1].spec.index + 1)
    return _alive_after(stage.composed.context, {"input_ids": tokens}, layers)


def _alive_after(make: Callable[..., Any], *args: Any) -> int:
    """Return the bytes of the tensors that `make` creates and that are alive when it returns."""
    with _Storages() as storages:
        result = make(*args)
    alive = storages.alive()
    del result
    return alive


class _Storages(TorchDispatchMode):
    """Records every storage that an operation creates."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[StorageWeakRef, int] = {}
        self._given: set[StorageWeakRef] = set()

    def alive(self) -> int:
        """Return the bytes of the recorded storages that are alive."""
        return sum(nbytes for storage, nbytes in self._made.items() if not storage.expired())

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors([args, kwargs]):
            storage = StorageWeakRef(tensor.untyped_storage())
            if storage not in self._made:
                self._given.add(storage)
        result = operation(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = StorageWeakRef(tensor.untyped_storage())
            if storage not in self._given:
                self._made[storage] = tensor.untyped_storage().nbytes()
        return result


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor))
