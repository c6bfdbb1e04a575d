"""Learning rate, decay, and masters that keep what bf16 cannot."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from acsgd.config import OptimConfig
from acsgd.optim import Optimizer, learning_rate
from acsgd.shards.base import Weight

CONFIG = OptimConfig(lr=1.0, steps=100, warmup=10)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_rate_rises_to_its_peak_and_falls_to_zero(schedule: str) -> None:
    config = dataclasses.replace(CONFIG, schedule=schedule)  # type: ignore[arg-type]
    rates = [learning_rate(step, config) for step in range(101)]
    assert rates[10] == max(rates) == 1.0
    assert rates[:11] == pytest.approx([(step + 1) / 11 for step in range(11)])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[55] == pytest.approx(0.5)
    assert rates[99] > rates[100] == 0.0


def test_without_warmup_the_first_step_has_the_peak() -> None:
    assert learning_rate(0, dataclasses.replace(CONFIG, warmup=0)) == 1.0


def weights(dtype: torch.dtype) -> list[Weight]:
    made = []
    for key, shape in (("matrix", (4, 3)), ("norm", (4,)), ("bias", (3,))):
        param = nn.Parameter(torch.ones(shape, dtype=dtype))
        master = param if dtype == torch.float32 else nn.Parameter(torch.ones(shape))
        made.append(Weight(key, param, master))
    return made


def test_norms_and_biases_do_not_decay() -> None:
    held = weights(torch.float32)
    optimizer = Optimizer(held, OptimConfig(lr=0.1, steps=10, weight_decay=0.5))
    for weight in held:
        weight.master.grad = torch.zeros_like(weight.master)
    assert optimizer.step(0) == 0.1
    assert torch.equal(held[0].param, torch.full((4, 3), 1 - 0.1 * 0.5))
    assert all(torch.equal(weight.param, torch.ones_like(weight.param)) for weight in held[1:])


def test_masters_add_up_steps_too_small_for_bf16() -> None:
    held = weights(torch.bfloat16)
    config = OptimConfig(lr=1e-4, steps=10**6, weight_decay=0.0)
    optimizer = Optimizer(held, config)
    for step in range(100):
        for weight in held:
            weight.master.grad = torch.ones_like(weight.master)
        optimizer.step(step)
        if step == 0:  # one step of 1e-4 is below the spacing of bf16 at 1, 2**-8
            assert torch.equal(held[0].param, torch.ones(4, 3, dtype=torch.bfloat16))
    for weight in held:
        assert torch.allclose(weight.master, torch.full_like(weight.master, 1 - 100 * 1e-4), atol=1e-5)
        assert torch.equal(weight.param, weight.master.bfloat16())
        assert weight.param.float().max() < 1
