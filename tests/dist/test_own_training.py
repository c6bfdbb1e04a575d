"""Laws of whole runs in which every replica has weights of its own."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from lib.models import DROPOUT
from lib.ranks import on_ranks
from lib.resume import HALF, TIMEOUT, TinyModel, checkpoint_of, make_config, train_ranks
from lib.training import batches_of, mask, train
from safetensors.torch import load_file

from acsgd.config.options import Config, ReplicaConfig
from acsgd.dp.exchange.second_moments import by_rows
from acsgd.io.sampling.batches import Batch
from acsgd.run.build import build_session
from acsgd.run.inputs import open_weight_source
from acsgd.run.job import prepare
from acsgd.shards.disk import Manifest, ShardDirectory
from acsgd.topology import Launch, connect

MODES = {
    "local": "fp32",
    "diloco:inner=4,fragments=2,delay=1,moment_correction=true": "bf16",
    "cocktail:random=0.5,topk=0.2,exact_steps=3": "fp32",
    "sparseloco:inner=3,chunk=256,moment_correction=true": "bf16",
    "cocktail_grad:topk=0.1,exact_steps=1": "bf16",
}
"""With the dtype of the parameters."""


def own_weights(rank: int, world_size: int, store: Path, config: Config) -> dict[str, torch.Tensor]:
    """Train on this rank alone with its peers in mode "local"; return its weights."""
    return _weights_after(rank, world_size, store, config, None)


def lone_weights(
    rank: int, world_size: int, store: Path, config: Config, batches: list[Batch]
) -> dict[str, torch.Tensor]:
    """Train in one process on these batches; return the weights."""
    return _weights_after(rank, world_size, store, config, batches)


def _weights_after(
    rank: int, world_size: int, store: Path, config: Config, batches: list[Batch] | None
) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    job = prepare(config, Launch(rank, rank, world_size))
    with connect(job.topology, timeout=TIMEOUT, store=dist.FileStore(str(store), world_size)) as groups:
        worker = build_session(job, open_weight_source(job), groups)
        train(worker, map(mask, batches_of(job)) if batches is None else batches)
        return {weight.key: weight.master.detach().clone() for weight in worker.weights}


def test_a_replica_of_mode_local_trains_as_if_it_were_alone(tiny_model: TinyModel, tmp_path: Path) -> None:
    """On its share of every batch; some labels are no targets, more of one replica's than of the other's."""
    config = make_config(tiny_model("llama"), tmp_path / "run", "fp32", "none")
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, batch=8), dp=ReplicaConfig("local"))
    together = on_ranks(2, own_weights, tmp_path / "store", config)
    lone = dataclasses.replace(config, data=dataclasses.replace(config.data, batch=4))
    for replica, ours in enumerate(together):
        batches = [mask(batch) for batch in batches_of(prepare(config, Launch(replica, replica, 2)))]
        [alone] = on_ranks(1, lone_weights, tmp_path / f"store-{replica}", lone, batches)
        assert any(not torch.equal(ours[key], together[1 - replica][key]) for key in ours)
        assert all(torch.equal(ours[key], alone[key]) for key in ours)


def moments(
    rank: int, world_size: int, store: Path, config: Config
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return AdamW's two moments of each weight after a run, and the last gradient, as it was used."""
    torch.set_num_threads(1)
    job = prepare(config, Launch(rank, rank, world_size))
    with connect(job.topology, timeout=TIMEOUT, store=dist.FileStore(str(store), world_size)) as groups:
        worker = build_session(job, open_weight_source(job), groups)
        train(worker, batches_of(job))
        states = [(weight, worker.optimizer.state_of([weight])) for weight in worker.weights]
        return [
            (state["exp_avg"][weight.key], state["exp_avg_sq"][weight.key], weight.master.grad.clone())
            for weight, state in states
        ]


@pytest.mark.parametrize("mode", ["quantized:exact_steps=2", "cocktail_grad:moment_correction=false", "local"])
def test_the_optimizer_steps_as_the_mode_says(mode: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    """Second moments that stay are equal on all replicas; without momentum the first moment is the last gradient."""
    config = make_config(tiny_model("llama"), tmp_path / "run", "fp32", "none")
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, batch=8), dp=ReplicaConfig(mode))
    for mine, other in zip(*on_ranks(2, moments, tmp_path / "store", config), strict=True):
        first, second, grad = mine
        assert torch.equal(second, other[1]) == mode.startswith("quantized")
        assert torch.equal(first, grad) == mode.startswith("cocktail_grad")
        assert not torch.equal(first, other[0])


MEASURED = 8
"""A step after which second moments are measured."""


@pytest.mark.parametrize(
    "mode",
    ["cocktail", "cocktail_grad", "sparseloco:inner=3,moment_correction=true", "diloco:inner=4,moment_correction=true"],
)
def test_second_moments_are_as_large_on_all_replicas(mode: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    """By row, once they have been measured; each replica keeps the form of its own."""
    config = make_config(tiny_model("llama"), tmp_path / "run", "fp32", "none")
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, batch=8),
        optim=dataclasses.replace(config.optim, steps=MEASURED + 1),
        dp=ReplicaConfig(mode),
    )
    for (_, mine, _), (_, other, _) in zip(*on_ranks(2, moments, tmp_path / "store", config), strict=True):
        assert torch.allclose(by_rows(mine).mean(1), by_rows(other).mean(1), rtol=1e-5, atol=0)
        assert not torch.equal(mine, other)


def make_run(model: Path, run_dir: Path, mode: str, dtype: Literal["fp32", "bf16", "fp16"]) -> Config:
    config = make_config(model, run_dir, dtype, "none")
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, batch=8),
        dp=ReplicaConfig(mode),
        pp=dataclasses.replace(config.pp, stages=2),
    )


@pytest.fixture(scope="module", params=MODES.items(), ids=MODES)
def whole(request: pytest.FixtureRequest, tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Return a run on 2 stages x 2 replicas, of a model with a tied weight, that was never stopped."""
    mode, dtype = request.param
    runs = tmp_path_factory.mktemp("own")
    config = make_run(tiny_model("gpt2", **DROPOUT), runs / "whole" / "run", mode, dtype)
    on_ranks(4, train_ranks, runs / "store", [config])
    return config


def test_a_run_is_saved_and_goes_on_bit_for_bit(whole: Config, tmp_path: Path) -> None:
    half = dataclasses.replace(whole, log=dataclasses.replace(whole.log, dir=str(tmp_path / "half" / "run")))
    shutil.copytree(checkpoint_of(whole, HALF), checkpoint_of(half, HALF))
    on_ranks(4, train_ranks, tmp_path / "store-half", [half])
    ends = [Manifest.read(checkpoint_of(config)) for config in (whole, half)]
    assert ends[0].layers == ends[1].layers
    assert ends[0].replicas == ends[1].replicas
    assert len(ends[0].replicas["embed"]) == 2


def test_copies_of_a_tied_weight_stay_equal_on_each_replica(whole: Config) -> None:
    directory = checkpoint_of(whole)
    for replica in range(2):
        files = [load_file(directory / f"{layer}.replica-{replica:05d}.safetensors") for layer in ("embed", "head")]
        names = {name.partition("/")[0] for name in files[0]} & {"local_weights", "residual"}
        assert names
        for name in (*names, "optimizer.exp_avg", "optimizer.exp_avg_sq"):
            first, copy = (
                file[f"{name}/{key}"]
                for file, key in zip(files, ("transformer.wte.weight", "lm_head.weight"), strict=True)
            )
            assert first.any()
            assert torch.equal(first, copy), name


@pytest.mark.parametrize(("stages", "ranks"), [(1, 2), (2, 2), (1, 3)])
def test_a_run_goes_on_at_another_size(whole: Config, stages: int, ranks: int, tmp_path: Path) -> None:
    """As many steps later, from the same model; the mean of the replicas' weights is what it was."""
    moved = dataclasses.replace(
        whole,
        log=dataclasses.replace(whole.log, dir=str(tmp_path / "moved" / "run")),
        pp=dataclasses.replace(whole.pp, stages=stages),
    )
    shutil.copytree(checkpoint_of(whole, HALF), checkpoint_of(moved, HALF))
    on_ranks(ranks, train_ranks, tmp_path / "store-moved", [moved])
    shards = ShardDirectory(checkpoint_of(moved))
    assert not list(shards.corrupt_files())
    states = shards.replica_states("embed")
    assert len(states) == (ranks // stages if ranks > stages else 0)


def test_one_replica_is_told_that_its_mode_has_nothing_to_do(tiny_model: TinyModel, tmp_path: Path) -> None:
    config = make_run(tiny_model("gpt2", **DROPOUT), tmp_path / "run", "cocktail", "fp32")
    assert "dp.mode=cocktail has nothing to do: there is one replica" in prepare(config, Launch(0, 0, 2)).describe()
    assert "nothing to do" not in prepare(config, Launch(0, 0, 4)).describe()
