"""Laws of whole runs in modes that reduce gradients; PowerSGD's residuals are restored, those of tied copies, too."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lib.models import DROPOUT
from lib.ranks import on_ranks
from lib.replica_runs import make_replica_config, resumed_at_half
from lib.resume import HALF, TIMEOUT, TinyModel, checkpoint_of, train_ranks
from lib.training import losses_of_rank

from acsgd.config.options import Config, ReplicaConfig
from acsgd.groups import connect
from acsgd.io.checkpoint.resume import Checkpoint
from acsgd.launch import Launch
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.plan.job import prepare
from acsgd.run.setup.build import build_session
from acsgd.run.setup.resume import restore
from acsgd.shards.disk import ShardDirectory
from acsgd.shards.weights import WeightState

TIED = "transformer.wte.weight"
U = 2.0**-24


@pytest.fixture(scope="module")
def whole(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Return an uninterrupted run on 2 stages x 2 replicas, of a model with copies of a tied weight."""
    directory = tmp_path_factory.mktemp("whole")
    model = tiny_model("gpt2", **DROPOUT, n_layer=2)
    mode = "powersgd:rank=2,exact_steps=3"
    config = make_replica_config(model, directory / "run", mode, "bf16", tied="dense")
    on_ranks(4, train_ranks, directory / "store", [config])
    return config


def test_two_replicas_train_the_same_bit_for_bit_in_every_exact_mode(tiny_model: TinyModel, tmp_path: Path) -> None:
    """The sum of two numbers depends on no order; messages sent during backward hold final gradients."""
    plain = make_replica_config(
        tiny_model("gpt2", **DROPOUT, n_layer=2), tmp_path / "run", "allreduce:bucket_mb=0.01", "fp32", stages=1
    )
    modes = ["sharded_ps:bucket_mb=0.01", "central_ps:bucket_mb=0.001", "powersgd:exact_steps=99", "powersgd"]
    configs = [plain, *(dataclasses.replace(plain, dp=ReplicaConfig(mode)) for mode in modes)]
    expected, *exact, lossy = on_ranks(2, losses_of_rank, tmp_path / "store", configs)[0]
    assert all(losses == expected for losses in exact)
    assert lossy != expected


def restored_residuals(rank: int, world_size: int, store: Path, config: Config) -> WeightState:
    """Return the residuals of this rank, restored from the half of a run."""
    job = prepare(config, Launch(rank, rank, world_size))
    with connect(job.topology, timeout=TIMEOUT, store=dist.FileStore(str(store), world_size)) as groups:
        session = build_session(job, open_weight_source(job), groups)
        restore(session, Checkpoint.open(checkpoint_of(config, HALF)))
        states = [stage.sync.state_dict() for stage in session.stages.values()]
        dist.barrier()
        residuals = {key: x.clone() for state in states for key, x in state["gradient_residual"].items()}
        return {"gradient_residual": residuals}


def residuals_of(states: list[WeightState], key: str) -> list[torch.Tensor]:
    """Return all residuals of a weight, of a tied one those of all copies, fp64."""
    return [state["gradient_residual"][key].double() for state in states if key in _residuals(state)]


def _residuals(state: WeightState) -> dict[str, torch.Tensor]:
    return state.get("gradient_residual", {})


@pytest.mark.parametrize(
    ("stages", "ranks", "tied"),
    [
        (1, 1, "rows"),
        (2, 4, "rows"),
        (2, 6, "dense"),
        (3, 3, "dense"),
    ],
)
def test_residuals_are_conserved_on_other_ranks(
    stages: int, ranks: int, tied: str, whole: Config, tmp_path: Path
) -> None:
    """Where one rank holds the weight, it gets the residuals of the former copies, too.

    The sum of both is rounded once, and so is each share of another number of replicas.
    """
    config = resumed_at_half(whole, tmp_path / "run", stages=stages, tied=tied)
    now = on_ranks(ranks, restored_residuals, tmp_path / "store", config)
    shards = ShardDirectory(checkpoint_of(whole, HALF))
    before = [state for layer in shards.manifest.layers for state in shards.replica_states(layer)]
    keys = {key for state in before for key in _residuals(state)}
    assert TIED in keys
    for key in keys:
        saved, ours = residuals_of(before, key), residuals_of(now, key)
        missing = torch.stack(ours).sum(0) - torch.stack(saved).sum(0)
        assert all(residual.any() for residual in saved)
        assert missing.norm() <= 2 * U * sum(residual.norm() for residual in saved)
    copies = len(residuals_of(now, TIED)) - len(residuals_of(now, "transformer.h.0.attn.c_attn.weight"))
    assert (copies > 0) == (stages > 1 and tied == "dense")
