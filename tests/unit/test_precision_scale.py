"""The fp16 loss scale: a power of two that falls at once, rises slowly and stays in bounds; the gradient scale."""

from __future__ import annotations

import dataclasses
import random
from typing import Literal

import pytest

from acsgd.config.options import Config, DataConfig, ModelConfig, OptimConfig
from acsgd.errors import RunError
from acsgd.optim.gradient_scale import GROWTH_STEPS, LARGEST_SCALE, SMALLEST_SCALE, GradientScale, LossScale


def config(dtype: Literal["fp32", "bf16", "fp16"], loss_scale: float = 65536.0) -> Config:
    optim = OptimConfig(lr=1e-3, steps=1, loss_scale=loss_scale)
    return Config(ModelConfig("m", dtype=dtype), DataConfig("demo", sequence=8, batch=1), optim)


def good(scale: LossScale, steps: int) -> LossScale:
    for _ in range(steps):
        scale = scale.after(overflowed=False)
    return scale


def test_an_overflow_halves_the_scale_and_resets_the_count() -> None:
    scale = LossScale(1024.0, good_steps=GROWTH_STEPS - 1, dynamic=True)
    assert scale.after(overflowed=True) == LossScale(512.0, 0, dynamic=True)


def test_the_scale_doubles_after_growth_steps_without_overflow_and_not_one_sooner() -> None:
    scale = LossScale(1024.0, dynamic=True)
    assert good(scale, GROWTH_STEPS - 1).value == 1024.0
    assert good(scale, GROWTH_STEPS) == LossScale(2048.0, 0, dynamic=True)
    assert good(scale, 3 * GROWTH_STEPS - 1).value == 4096.0
    interrupted = good(scale, GROWTH_STEPS - 1).after(overflowed=True)
    assert good(interrupted, GROWTH_STEPS - 1).value == 512.0


@pytest.mark.parametrize("seed", range(5))
def test_the_scale_stays_a_power_of_two_within_its_bounds(seed: int) -> None:
    draw = random.Random(seed)
    scale = LossScale(65536.0, dynamic=True)
    seen = set()
    for _ in range(200):
        if scale.value > SMALLEST_SCALE and draw.random() < 0.45 + 0.1 * (seed % 2):
            scale = scale.after(overflowed=True)
        else:  # the steps between change nothing
            scale = dataclasses.replace(scale, good_steps=GROWTH_STEPS - 1).after(overflowed=False)
        assert SMALLEST_SCALE <= scale.value <= LARGEST_SCALE
        assert scale.value.hex().startswith("0x1.0000000000000p")
        seen.add(scale.value)
    assert len(seen) > 5


def test_the_scale_does_not_grow_beyond_the_largest() -> None:
    assert good(LossScale(LARGEST_SCALE, dynamic=True), GROWTH_STEPS).value == LARGEST_SCALE


def test_an_overflow_at_the_smallest_scale_raises() -> None:
    scale = LossScale(2 * SMALLEST_SCALE, dynamic=True).after(overflowed=True)
    assert scale.value == SMALLEST_SCALE
    with pytest.raises(RunError, match=r"overflow fp16 even at a loss scale of 0\.000976562; use --model\.dtype bf16"):
        scale.after(overflowed=True)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("overflowed", [False, True])
def test_without_fp16_the_scale_is_always_one(dtype: Literal["fp32", "bf16"], overflowed: bool) -> None:
    scale = LossScale.of(config(dtype))
    assert scale == LossScale(1.0, 0, dynamic=False)
    for _ in range(3):
        assert scale.after(overflowed=overflowed) == scale


def test_an_fp16_run_resumes_with_its_scale_and_starts_anew_from_another_dtype() -> None:
    fp16 = LossScale(512.0, good_steps=7, dynamic=True)
    fp32 = LossScale.of(config("fp32"))
    assert LossScale.of(config("fp16", 1024.0)) == LossScale(1024.0, 0, dynamic=True)
    assert LossScale.of(config("fp16", 1024.0), fp16) == fp16
    assert LossScale.of(config("fp16", 1024.0), fp32) == LossScale(1024.0, 0, dynamic=True)
    for dtype in ("fp32", "bf16"):
        assert LossScale.of(config(dtype), fp16) == fp32


def test_gradients_are_of_the_mean_over_the_targets_they_were_summed_over() -> None:
    """Stages divide by all tokens of the batch, here 16, and backward starts from the loss scale, here 4."""
    scale = GradientScale.of(16, LossScale(4.0, dynamic=True))
    assert scale.mean_loss(3.0 / 16, 12.0) == 3.0 / 12
    assert scale.factors(12.0, [8.0, 4.0], local=False) == [16 / 12 / 4] * 2
    assert scale.factors(12.0, [8.0, 4.0], local=True) == [16 / 8 / 4, 16 / 4 / 4]
    assert scale.factors(0.0, [0.0], local=True) == [4.0], "no targets: gradients are 0, whatever the factor"
