"""Laws of whole runs in which replicas have local weights."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lib.models import DROPOUT
from lib.ranks import on_ranks
from lib.replica_runs import make_replica_config, resumed_at_half
from lib.resume import HALF, STEPS, TIMEOUT, TinyModel, checkpoint_of, train_ranks
from lib.training import batches_of, mask, train
from safetensors.torch import load_file

from acsgd.config.options import Config
from acsgd.dp.exchange.second_moments import by_rows
from acsgd.groups import connect
from acsgd.io.checkpoint.progress import Progress
from acsgd.launch import Launch
from acsgd.layers.batch import Batch
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.plan.job import prepare
from acsgd.run.setup.build import build_session
from acsgd.shards.disk import ShardDirectory
from acsgd.train import train_step

MODES = {
    "local": "fp32",
    "diloco:inner=4,fragments=2,delay=1,moment_correction=true": "bf16",
    "cocktail:random=0.5,topk=0.2,exact_steps=3": "fp32",
    "sparseloco:inner=3,chunk=256,moment_correction=true": "bf16",
    "cocktail_grad:topk=0.1,exact_steps=1": "bf16",
}
"""Dtype of the parameters, by mode."""
COPIED = (2, 3)
"""Positions of the modes with which pp.tied is "dense"."""


def weights_after(
    rank: int, world_size: int, store: Path, config: Config, batches: list[Batch] | None = None
) -> dict[str, torch.Tensor]:
    """Train on this rank, on the job's own batches with masked labels unless some are given; return the weights."""
    torch.set_num_threads(1)
    job = prepare(config, Launch(rank, rank, world_size))
    with connect(job.topology, timeout=TIMEOUT, store=dist.FileStore(str(store), world_size)) as groups:
        session = build_session(job, open_weight_source(job), groups)
        train(session, map(mask, batches_of(job)) if batches is None else batches)
        return {weight.key: weight.master.detach().clone() for weight in session.weights}


def test_a_replica_of_mode_local_trains_as_a_single_process_would(tiny_model: TinyModel, tmp_path: Path) -> None:
    """On its part of every batch; some labels are masked, more on one replica than on the other."""
    config = make_replica_config(tiny_model("llama", num_hidden_layers=2), tmp_path / "run", "local", stages=1)
    together = on_ranks(2, weights_after, tmp_path / "store", config)
    single = dataclasses.replace(config, data=dataclasses.replace(config.data, batch=4))
    for replica, ours in enumerate(together):
        batches = [mask(batch) for batch in batches_of(prepare(config, Launch(replica, replica, 2)))]
        [alone] = on_ranks(1, weights_after, tmp_path / f"store-{replica}", single, batches)
        assert any(not torch.equal(ours[key], together[1 - replica][key]) for key in ours)
        assert all(torch.equal(ours[key], alone[key]) for key in ours)


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_redundant_steps_are_those_of_one_replica(stages: int, tiny_model: TinyModel, tmp_path: Path) -> None:
    """Bit for bit, with dropout; half of the steps. Nothing but a checksum is sent, and no token counted twice."""
    model, of_runs = tiny_model("gpt2", **DROPOUT, n_layer=2), []
    for replicas, mode in enumerate(["allreduce", f"diloco:inner=2,redundant_steps={HALF}"], start=1):
        config = make_replica_config(model, tmp_path / str(replicas) / "run", mode, stages=stages)
        on_ranks(stages * replicas, train_ranks, tmp_path / f"store-{replicas}", [config])
        records = [json.loads(line) for line in (Path(config.log.dir) / "metrics.jsonl").read_text().splitlines()]
        of_runs.append((records, {path.name: load_file(path) for path in checkpoint_of(config, HALF).glob("*.safe*")}))
    (alone, one), (redundant, two) = of_runs
    for name, file in one.items():
        for replica in range(2):
            state = two[name.replace(".", f".replica-{replica:05d}.")]
            of_replica = two[name] | {key.removeprefix("optimizer."): tensor for key, tensor in state.items()}
            assert all(torch.equal(tensor, of_replica[key]) for key, tensor in file.items()), (name, replica)
    for step, (mine, other) in enumerate(zip(alone, redundant, strict=True)):
        assert mine["tokens"] == other["tokens"]
        assert step >= HALF or mine["loss"] == other["loss"]
        assert step >= HALF or mine["tokens_per_s"] * mine["step_s"] == pytest.approx(
            other["tokens_per_s"] * other["step_s"]
        )
    sent = [record["dp_bytes"] for record in redundant]
    assert not any(sent[:HALF])
    assert 0 < sent[HALF] < 1000


def end_without_update(rank: int, world_size: int, store: Path, config: Config) -> list[dict[str, torch.Tensor]]:
    """Make two redundant steps, the first on other data than other ranks, the second without targets.

    Returns the weights and the global weights after each.
    """
    torch.set_num_threads(1)
    job = prepare(config, Launch(rank, rank, world_size))
    with connect(job.topology, timeout=TIMEOUT, store=dist.FileStore(str(store), world_size)) as groups:
        session, progress, found = build_session(job, open_weight_source(job), groups), Progress(), []
        first, second, *_ = batches_of(job)
        assert second.labels is not None
        for batch in (first, dataclasses.replace(second, labels=torch.full_like(second.labels, -100))):
            result = train_step(session, batch, progress)
            assert result.updated == (batch is first)
            progress, [stage] = result.progress, session.stages.values()
            shared = stage.sync.global_weights()
            assert shared is not None
            for weights in ({weight.key: weight.master for weight in session.weights}, shared):
                found.append({key: tensor.detach().clone() for key, tensor in weights.items()})
        return found


def test_replicas_end_redundant_steps_with_equal_weights_also_without_an_update(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    mode = "diloco:inner=9,redundant_steps=2"
    config = make_replica_config(tiny_model("llama", num_hidden_layers=1), tmp_path / "run", mode, stages=1)
    one, other = on_ranks(2, end_without_update, tmp_path / "store", config)
    for key in one[0]:
        assert not torch.equal(one[0][key], other[0][key])
        assert all(torch.equal(weights[key], (one[0][key] + other[0][key]) / 2) for weights in (*one[2:], *other[2:]))


Moments = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""AdamW's two moments of each weight after a run, and the last gradient."""
STEPPED = ["quantized:exact_steps=2", "cocktail_grad:moment_correction=false", "local"]
CORRECTED = [
    "cocktail",
    "cocktail_grad",
    "sparseloco:inner=3,moment_correction=true",
    "diloco:inner=4,moment_correction=true",
]
MEASURED = 8
"""A step after which second moments are measured."""


def moments_after(rank: int, world_size: int, store: Path, configs: list[Config]) -> list[Moments]:
    torch.set_num_threads(1)
    results = []
    for number, config in enumerate(configs):
        job = prepare(config, Launch(rank, rank, world_size))
        file_store = dist.FileStore(f"{store}-{number}", world_size)
        with connect(job.topology, timeout=TIMEOUT, store=file_store) as groups:
            session = build_session(job, open_weight_source(job), groups)
            train(session, batches_of(job))
            states = [(weight, session.optimizer.state_of([weight])) for weight in session.weights]
            results.append([(s["exp_avg"][w.key], s["exp_avg_sq"][w.key], w.master.grad.clone()) for w, s in states])
    return results


@pytest.mark.parametrize(
    "corrected", [CORRECTED[:1], pytest.param(CORRECTED[1:], marks=pytest.mark.soak)], ids=["few", "others"]
)
def test_optimizer_steps_and_second_moments_are_those_of_the_mode(
    corrected: list[str], tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Frozen second moments are equal on all replicas, but for elements whose gradient is large for them; without
    momentum the first moment is the last gradient.

    Corrected second moments have equal row means on all replicas after a measurement, but differ within rows.
    """
    model = tiny_model("llama", num_hidden_layers=2)
    configs = [
        make_replica_config(model, tmp_path / f"run-{number}", mode, stages=1)
        for number, mode in enumerate([*STEPPED, *corrected])
    ]
    for number, config in list(enumerate(configs))[len(STEPPED) :]:
        configs[number] = dataclasses.replace(config, optim=dataclasses.replace(config.optim, steps=MEASURED + 1))
    by_config = list(zip(*on_ranks(2, moments_after, tmp_path / "store", configs), strict=True))
    for mode, replicas in zip(STEPPED, by_config, strict=False):
        for (first, second, grad), other in zip(*replicas, strict=True):
            equal = float((second == other[1]).float().mean())
            assert equal > 0.5 if mode.startswith("quantized") else equal < 0.5, (mode, equal)
            assert torch.equal(first, grad) == mode.startswith("cocktail_grad"), mode
            assert not torch.equal(first, other[0]), mode
    for mode, replicas in zip(corrected, by_config[len(STEPPED) :], strict=True):
        for (_, mine, _), (_, other, _) in zip(*replicas, strict=True):
            assert torch.allclose(by_rows(mine).mean(1), by_rows(other).mean(1), rtol=1e-5, atol=0), mode
            assert not torch.equal(mine, other), mode


@pytest.fixture(scope="module")
def whole(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> list[Config]:
    """Return an uninterrupted run of each mode on 2 stages x 2 replicas, of a model with a tied weight.

    In some both stages have a copy of it, in others one of them.
    """
    runs, model = tmp_path_factory.mktemp("local"), tiny_model("gpt2", **DROPOUT, n_layer=2)
    configs = [
        make_replica_config(
            model, runs / f"whole-{number}" / "run", mode, dtype, tied="dense" if number in COPIED else "rows"
        )
        for number, (mode, dtype) in enumerate(MODES.items())
    ]
    on_ranks(4, train_ranks, runs / "store", configs)
    return configs


def test_global_weights_change_in_the_second_half_of_a_run(whole: list[Config]) -> None:
    for config in whole:
        before, after = (load_file(checkpoint_of(config, step) / "table-00000.safetensors") for step in (HALF, STEPS))
        assert any(not torch.equal(before[name], after[name]) for name in before), config.dp.mode


def resumed(
    configs: list[Config], directory: Path, *, stages: int, ranks: int, tied: str | None = None
) -> list[Config]:
    """Resume all runs at their half on other ranks; return their configs. tied: as of `resumed_at_half`."""
    halves = [
        resumed_at_half(config, directory / f"resumed-{number}" / "run", stages=stages, tied=tied)
        for number, config in enumerate(configs)
    ]
    directory.mkdir(exist_ok=True)
    on_ranks(ranks, train_ranks, directory / "store", halves)
    return halves


def assert_copies_equal(config: Config) -> None:
    """Check the state of a tied weight and of its copy in the last checkpoint of a run."""
    directory = checkpoint_of(config)
    for replica in range(2):
        stems = ("table-00000", "head")
        files = [load_file(directory / f"{stem}.replica-{replica:05d}.safetensors") for stem in stems]
        names = {name.partition("/")[0] for name in files[0]} & {"local_weights", "residual"}
        assert names, config.dp.mode
        for name in (*names, "optimizer.exp_avg", "optimizer.exp_avg_sq"):
            original, copy = (file[f"{name}/transformer.wte.weight"] for file in files)
            assert original.any(), (config.dp.mode, name)
            assert torch.equal(original, copy), (config.dp.mode, name)


def test_copies_of_a_tied_weight_stay_equal_on_each_replica(whole: list[Config]) -> None:
    for number in COPIED:
        assert_copies_equal(whole[number])


def test_a_run_resumes_on_other_ranks(whole: list[Config], tmp_path: Path) -> None:
    """On one stage and three replicas; on two stages, from copies to rows and the other way."""
    rows, copies = (
        [whole[number] for number in range(len(whole)) if (number in COPIED) == copied] for copied in (0, 1)
    )
    cases = [(copies, 2, 2, "rows"), (rows[:2], 1, 3, None), (rows[2:], 2, 4, "dense")]
    for runs, stages, ranks, tied in cases:
        for config in resumed(runs, tmp_path / f"{stages}-{ranks}", stages=stages, ranks=ranks, tied=tied):
            shards, case = ShardDirectory(checkpoint_of(config)), (config.dp.mode, stages, ranks)
            assert not list(shards.corrupt_files()), case
            assert len(shards.replica_states("embed")) == (ranks // stages if ranks > stages else 0), case


def test_a_new_copy_of_a_tied_weight_gets_the_state_of_the_original(tiny_model: TinyModel, tmp_path: Path) -> None:
    """On two stages after one."""
    model = tiny_model("gpt2", **DROPOUT, n_layer=2)
    config = make_replica_config(model, tmp_path / "whole" / "run", "cocktail", stages=1, tied="dense")
    on_ranks(2, train_ranks, tmp_path / "store", [config])
    assert_copies_equal(*resumed([config], tmp_path / "two", stages=2, ranks=4))
