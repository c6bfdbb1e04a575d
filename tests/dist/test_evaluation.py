"""Laws: evaluation equals the Hugging Face model in eval mode, and does not affect training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
from lib.direct import descend, digest, draw_batch, gradients, make_config, session_of
from lib.models import DROPOUT, blocks_of, dropout_of
from lib.ranks import on_ranks
from lib.training import RELATIVE, SCHEDULES, TOPOLOGIES
from transformers import AutoModelForCausalLM

from acsgd.config.options import Config

TinyModel = Callable[..., Path]


def evaluate_on_rank(rank: int, world_size: int, store: Path, configs: Sequence[Config]) -> list[list[float]]:
    """Return this rank's part of the loss of two batches, for each config."""
    shares = []
    for number, config in enumerate(configs):
        with session_of(config, rank, world_size, f"{store}-{number}") as session:
            batches = [draw_batch(config, seed, session.job.micro_ids) for seed in range(2)]
            shares.append([session.pipeline.evaluate(batch, 0).loss.item() for batch in batches])
    return shares


def oracle_losses(config: Config) -> list[float]:
    """Return the loss of the Hugging Face model, summed over the targets, for the same two batches."""
    model = AutoModelForCausalLM.from_pretrained(config.model.name, dtype=torch.float32).eval()
    losses = []
    for seed in range(2):
        batch = draw_batch(config, seed)
        with torch.no_grad():
            logits = model(batch.inputs["input_ids"].flatten(0, 1), use_cache=False).logits.double()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("stages", "replicas"), TOPOLOGIES)
def test_the_sum_over_ranks_is_the_loss_of_the_model(
    stages: int, replicas: int, tiny_model: TinyModel, tmp_path: Path
) -> None:
    models = [
        tiny_model(family, **dropout_of(family), **blocks_of(family, 6 if stages == 4 else 2))
        for family in ("gpt2", "qwen2")
    ]
    turn = TOPOLOGIES.index((stages, replicas))
    configs = [  # each pair of topology, model, schedule and micro-batch
        make_config(models[(number + turn) % 2], tmp_path, stages=stages, schedule=schedule, micro=1 + number % 2)
        for number, schedule in enumerate(SCHEDULES)
    ]
    by_rank = on_ranks(stages * replicas, evaluate_on_rank, tmp_path / "store", configs)
    for config, *shares in zip(configs, *by_rank, strict=True):
        sums = [sum(of_batch) for of_batch in zip(*shares, strict=True)]
        assert sums == pytest.approx(oracle_losses(config), rel=RELATIVE), config.pp
        for rank, share in enumerate(shares):
            assert (share != [0.0, 0.0]) == (rank % stages == stages - 1), "only the last stage has a loss"


def train_on_rank(
    rank: int, world_size: int, store: Path, configs: Sequence[Config]
) -> dict[bool, list[tuple[list[float], str]]]:
    """Return the losses of three steps and a hash of the weights after them, for each config.

    By whether there is an evaluation before each step and between its backward and its update.
    """
    trained: dict[bool, list[tuple[list[float], str]]] = {False: [], True: []}
    for evaluated, (number, config) in product(trained, enumerate(configs)):
        with session_of(config, rank, world_size, f"{store}-{evaluated}-{number}") as session:
            losses = []
            for step in range(3):
                for phase in range(2):
                    if evaluated:
                        before = torch.get_rng_state()
                        session.pipeline.evaluate(draw_batch(config, 100 + step, session.job.micro_ids), step)
                        assert torch.equal(torch.get_rng_state(), before), "evaluation drew random numbers"
                    if phase == 0:
                        losses.append(
                            session.pipeline.run(draw_batch(config, step, session.job.micro_ids), step).item()
                        )
                descend(session.weights)
            trained[evaluated].append((losses, digest([w.param for w in session.weights] + gradients(session))))
    return trained


@pytest.mark.parametrize("others", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["few", "others"])
def test_an_evaluation_does_not_affect_training(others: bool, tiny_model: TinyModel, tmp_path: Path) -> None:
    gpt2 = tiny_model("gpt2", **DROPOUT, n_layer=2)
    configs = [make_config(gpt2, tmp_path, stages=2, schedule=SCHEDULES[1 if others else 2])]
    if others:
        llama = tiny_model("llama", attention_dropout=0.1, num_hidden_layers=2)
        configs.append(make_config(llama, tmp_path, stages=2, dtype="bf16", recompute="layers"))
    by_rank = on_ranks(2, train_on_rank, tmp_path / "store", configs)
    for trained in by_rank:
        assert trained[True] == trained[False]
    assert len({weights for trained in by_rank for _, weights in trained[False]}) > 1, "the hash is constant"
