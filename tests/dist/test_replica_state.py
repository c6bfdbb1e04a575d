"""Law: the state of a data-parallel mode is saved and restored per replica."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from lib.ranks import on_ranks
from lib.resume import TIMEOUT, TinyModel, checkpoint_of, make_config, stopped_half_way
from lib.training import RELATIVE

from acsgd import train
from acsgd.config.options import Config, ReplicaConfig
from acsgd.dp import MODES
from acsgd.dp.modes.allreduce import AllReduce
from acsgd.dp.peers import Peers
from acsgd.dp.resize import ReplicaState
from acsgd.dp.sync import GradSync, Mode
from acsgd.errors import RunError
from acsgd.groups import connect
from acsgd.launch import Launch
from acsgd.optim.base import Capability
from acsgd.run.lock.lock import RunLock
from acsgd.run.plan.job import prepare
from acsgd.run.setup.inputs import open_inputs
from acsgd.shards.disk import ShardDirectory
from acsgd.shards.manifest import Manifest
from acsgd.shards.weights import Weight, WeightState


@dataclasses.dataclass(frozen=True)
class AccumulatingMode:
    """All-reduce whose replicas also accumulate their own gradients, as error feedback would."""

    inner: ClassVar[Mode] = AllReduce()

    @property
    def states(self) -> tuple[ReplicaState, ...]:
        return (ReplicaState("accumulated", merge="mean"),)

    @property
    def requires(self) -> frozenset[Capability]:
        return self.inner.requires

    def open(self, weights: Sequence[Weight], peers: Peers) -> GradSync:
        return _AccumulatingSync(weights, self.inner.open(weights, peers), peers.replica)  # type: ignore[return-value]


class _AccumulatingSync:
    def __init__(self, weights: Sequence[Weight], inner: GradSync, replica: int) -> None:
        self.accumulated = {weight.key: torch.zeros_like(weight.master) for weight in weights}
        self._weights, self._inner, self._replica = weights, inner, replica

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def grad_ready(self, weight: Weight, *, is_final: bool) -> None:
        if is_final:  # not yet summed over the replicas
            self.accumulated[weight.key] += weight.master.grad
        self._inner.grad_ready(weight, is_final=is_final)

    def state_dict(self) -> WeightState:
        return {"accumulated": self.accumulated}

    def load_state_dict(self, saved: Sequence[WeightState]) -> None:
        for key, tensor in self.accumulated.items():
            tensor.copy_(saved[self._replica]["accumulated"][key])


def train_with_state(rank: int, world_size: int, store: Path, config: Config) -> None:
    """Run on this rank in a mode with state."""
    _train(rank, world_size, store, config, has_state=True)


def train_without_state(rank: int, world_size: int, store: Path, config: Config) -> str:
    """Run on this rank in a mode without state; return the error."""
    with pytest.raises(RunError) as error:
        _train(rank, world_size, store, config, has_state=False)
    return str(error.value)


def _train(rank: int, world_size: int, store: Path, config: Config, *, has_state: bool) -> None:
    torch.set_num_threads(1)
    if has_state:
        MODES["accumulating"] = AccumulatingMode  # in this process, which ends with the run
        config = dataclasses.replace(config, dp=ReplicaConfig("accumulating"))
    job = prepare(config, Launch(rank, rank, world_size))
    with connect(job.topology, timeout=TIMEOUT, store=dist.FileStore(str(store), world_size)) as groups:
        train.train(job, open_inputs(job), groups, RunLock([]))


def saved_in(checkpoint: Path) -> dict[str, list[torch.Tensor]]:
    """Return the state of each replica by weight, verified."""
    shards = ShardDirectory(checkpoint)
    states = {layer: shards.replica_states(layer) for layer in shards.manifest.layers}
    return {
        key: [state["accumulated"][key] for state in of_layer]
        for of_layer in states.values()
        for key in of_layer[0]["accumulated"]
    }


@pytest.fixture(scope="module")
def whole(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Return an uninterrupted run on 2 stages x 2 replicas."""
    tmp_path = tmp_path_factory.mktemp("whole")
    config = make_config(tiny_model("llama", num_hidden_layers=2), tmp_path / "whole" / "run", "fp32", "none")
    config = dataclasses.replace(config, pp=dataclasses.replace(config.pp, stages=2))
    on_ranks(4, train_with_state, tmp_path / "store", config)
    return config


def test_state_is_restored_bit_for_bit_also_on_another_stage(whole: Config, tmp_path: Path) -> None:
    half = stopped_half_way(whole, tmp_path / "same")
    on_ranks(4, train_with_state, tmp_path / "store-same", half)
    files = [Manifest.read(checkpoint_of(config)).replicas for config in (whole, half)]
    assert files[0] == files[1]
    moved = stopped_half_way(whole, tmp_path / "moved", stages=1)
    on_ranks(2, train_with_state, tmp_path / "store-moved", moved)
    before, after = (saved_in(checkpoint_of(config)) for config in (whole, moved))
    assert before.keys() == after.keys()
    for key, replicas in before.items():
        assert not torch.equal(*replicas), "the replicas have the same state: nothing is shown"
        for one, other in zip(replicas, after[key], strict=True):
            assert torch.linalg.norm(one - other) <= RELATIVE * torch.linalg.norm(one), key


def test_a_mode_without_state_refuses_it(whole: Config, tmp_path: Path) -> None:
    half = stopped_half_way(whole, tmp_path / "refused")
    for error in on_ranks(4, train_without_state, tmp_path / "store-refused", half):
        assert "the checkpoint holds ['accumulated'] of another data-parallel mode" in error
