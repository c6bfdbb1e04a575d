"""Laws of the loss scale and of fp16: the scale moves gradients into the range of fp16 and changes nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lib.direct import (
    RATE,
    SEQUENCE,
    SEQUENCES,
    VOCABULARY,
    build_stages,
    descend,
    digest,
    draw_batch,
    gradients,
    make_config,
    session_of,
)
from lib.models import blocks_of, tiny_config
from lib.ranks import on_ranks
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from acsgd.config.options import Config
from acsgd.pp.stage import MicroBatch, Stage

TinyModel = Callable[..., Path]
SCALE = 2.0**16
ROUNDING = 2.0**-11
"""Relative rounding error of fp16."""
STEPS = 8


def gradients_on_rank(
    rank: int, world_size: int, store: Path, cases: Sequence[tuple[Config, float]]
) -> list[tuple[float, str, str]]:
    """Return, for each config and loss scale, this rank's part of the loss, and hashes of its gradients before and
    after division by the scale.
    """
    results = []
    for number, (config, scale) in enumerate(cases):
        with session_of(config, rank, world_size, f"{store}-{number}") as session:
            loss = session.pipeline.run(draw_batch(config, 0, session.job.micro_ids), 0, scale).item()
            grads = gradients(session)
            results.append((loss, digest(grads), digest(grad / scale for grad in grads)))
    return results


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_power_of_two_changes_no_bit(world_size: int, tiny_model: TinyModel, tmp_path: Path) -> None:
    models = [tiny_model(family, **blocks_of(family, 2)) for family in ("gpt2", "llama")]
    configs = [make_config(model, tmp_path, stages=2) for model in models]
    cases = [(config, scale) for scale in (1.0, SCALE) for config in configs]
    for results in on_ranks(world_size, gradients_on_rank, tmp_path / "store", cases):
        usual, scaled = results[: len(configs)], results[len(configs) :]
        for (loss, grads, _), (loss_scaled, grads_scaled, unscaled) in zip(usual, scaled, strict=True):
            assert (loss_scaled, unscaled) == (loss, grads)
            assert grads_scaled != grads


def train_on_rank(rank: int, world_size: int, store: Path, configs: Sequence[Config]) -> list[list[float]]:
    """Return this rank's part of the losses of some steps with loss scale SCALE, for each config."""
    trained = []
    for number, config in enumerate(configs):
        with session_of(config, rank, world_size, f"{store}-{number}") as session:
            losses = []
            for step in range(STEPS):
                losses.append(session.pipeline.run(draw_batch(config, 0, session.job.micro_ids), step, SCALE).item())
                descend(session.weights, SCALE)
            trained.append(losses)
    return trained


def oracle_losses(config: Config) -> tuple[list[float], list[float]]:
    """Train the Hugging Face model in fp32; return the losses, and a bound on the error of each in fp16.

    To first order, rounding every weight and every result x of an operation moves the loss by at most u |x dL/dx|.
    A gradient is the end of a chain of no more operations than there are, forward and backward, each of which adds u
    to its relative error; so what the steps have gained may be wrong by this part.
    """
    model = AutoModelForCausalLM.from_pretrained(config.model.name, dtype=torch.float32).train()
    batch = draw_batch(config, 0)
    losses, bounds = [], []
    for _ in range(STEPS):
        model.zero_grad()
        with _Results() as results:
            logits = model(batch.inputs["input_ids"].flatten(0, 1), use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
            loss = loss / (SEQUENCES * SEQUENCE)
        loss.backward()
        losses.append(loss.item())
        rounded = [x for x in [*model.parameters(), *results.made] if x.grad is not None]
        moved = ROUNDING * sum((x * x.grad).abs().sum().item() for x in rounded)
        bounds.append(moved + 2 * len(results.made) * ROUNDING * (losses[0] - losses[-1]))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=RATE)
    return losses, bounds


class _Results(TorchFunctionMode):
    """Keeps the differentiable results of all operations, and their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []

    def __torch_function__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.requires_grad and result.is_floating_point():
            result.retain_grad()
            self.made.append(result)
        return result


@pytest.mark.parametrize("family", ["gpt2", pytest.param("qwen2", marks=pytest.mark.soak)])
def test_fp16_is_the_same_training_up_to_its_rounding(family: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    configs = [make_config(tiny_model(family, **blocks_of(family, 2)), tmp_path, stages=2, dtype="fp16")]
    for config, *shares in zip(configs, *on_ranks(2, train_on_rank, tmp_path / "store", configs), strict=True):
        losses = [sum(of_step) for of_step in zip(*shares, strict=True)]
        exact, bounds = oracle_losses(config)
        assert all(abs(loss - oracle) <= bound for loss, oracle, bound in zip(losses, exact, bounds, strict=True))
        assert losses != exact, "nothing was rounded"
        assert exact[0] - exact[-1] > 2 * bounds[-1], "no training would pass as well"


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_gradients_below_the_smallest_fp16_number_vanish_without_a_scale(family: str) -> None:
    """The gradient of a logit is at most 1 / targets; half of the smallest fp16 number is 2**-25."""
    targets = 2.0**26
    small, scaled, large = (
        _one_gradient(family, targets=targets_of, scale=scale)
        for targets_of, scale in ((targets, 1.0), (targets, targets), (1, 1.0))
    )
    assert not any(grad.any() for grad in small)
    assert all(grad.any() for grad in large)
    assert digest(scaled) == digest(large)


def _one_gradient(family: str, *, targets: float, scale: float) -> list[Tensor]:
    (stage,) = build_stages(tiny_config(family), [range(8)], dtype=torch.float16, targets=targets)
    _forward_and_backward(stage, 0, scale)
    return _masters_gradients(stage)


def test_gradients_of_micro_batches_are_summed_in_fp32() -> None:
    (stage,) = build_stages(tiny_config("llama"), [range(8)], dtype=torch.float16)
    each = []
    for micro in range(3):
        stage.sync.begin_step(0)
        _forward_and_backward(stage, micro, SCALE)
        each.append([grad.clone() for grad in _masters_gradients(stage)])
    stage.sync.begin_step(0)
    for micro in range(3):
        _forward_and_backward(stage, micro, SCALE)
    assert all(weight.param.dtype == torch.float16 and weight.param.grad is None for weight in stage.weights)
    sums = _masters_gradients(stage)
    assert all(grad.dtype == torch.float32 for grad in sums)
    assert digest(sums) == digest(a + b + c for a, b, c in zip(*each, strict=True))


def _forward_and_backward(stage: Stage, micro: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(micro)
    tokens = torch.randint(VOCABULARY, (2, SEQUENCE), generator=generator)
    stage.forward(
        MicroBatch(0, micro, micro, (2 * micro, 2 * micro + 1)), {"input_ids": tokens}, {}, tokens.roll(-1, -1)
    )
    stage.backward(micro, None, last=False, scale=scale)


def _masters_gradients(stage: Stage) -> list[Tensor]:
    return [weight.master.grad for weight in stage.weights if weight.master.grad is not None]
