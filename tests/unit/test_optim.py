"""Learning rate, weight decay, the variants of an AdamW step, fp32 masters, and the table of optimizers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from acsgd.config.options import Config, DataConfig, ModelConfig, OptimConfig, ReplicaConfig
from acsgd.config.spec import from_spec
from acsgd.dp import MODES
from acsgd.optim import OPTIMIZERS
from acsgd.optim.adamw import AdamW, AdamWOptimizer
from acsgd.optim.base import LocalStep
from acsgd.optim.offload import add_in_fp32
from acsgd.optim.schedule import RATE_SCHEDULES, learning_rate
from acsgd.run.plan.plugins import check_capabilities, parse_plugins
from acsgd.shards.weights import Weight

MODEL = ModelConfig("m")
CONFIG = OptimConfig(lr=1.0, steps=100, warmup=10)


SCHEDULES = {
    "linear": (0.5, 0.0),
    "linear:min=0.2": (0.6, 0.2),
    "cosine": (0.5, 0.0),
    "cosine:min=0.2": (0.6, 0.2),
    "constant": (1.0, 1.0),
    "polynomial": (0.25, 0.0),
    "polynomial:power=3,min=0.2": (0.3, 0.2),
    "exponential": (0.1, 0.01),
    "exponential:min=0.25": (0.5, 0.25),
    "wsd": (1.0, 0.0),
    "wsd:decay=1,min=0.2": (0.6, 0.2),
}
"""Values halfway and at the end."""


def test_every_schedule_is_tested() -> None:
    assert {spec.partition(":")[0] for spec in SCHEDULES} == {*RATE_SCHEDULES}


def test_gradients_are_added_whatever_their_strides() -> None:
    part = torch.arange(24, dtype=torch.bfloat16).view(6, 4)
    for total, added in ((torch.ones(6, 4), part), (torch.ones(4, 6), part.T), (torch.ones(6, 4).T, part.T)):
        add_in_fp32(total, added)
        assert torch.equal(total, 1 + added.float())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_learning_rate_rises_to_its_peak_and_falls_to_its_end(schedule: str) -> None:
    config = dataclasses.replace(CONFIG, schedule=schedule)
    rates = [learning_rate(step, config) for step in range(101)]
    assert rates[10] == max(rates) == 1.0
    assert rates[:11] == pytest.approx([(step + 1) / 11 for step in range(11)])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert (rates[55], rates[100]) == pytest.approx(SCHEDULES[schedule], abs=1e-15)
    assert rates[99] > rates[100] or schedule == "constant"


def test_wsd_stays_at_the_peak_until_it_falls_along_a_line() -> None:
    config = dataclasses.replace(CONFIG, schedule="wsd:decay=0.3")
    rates = [learning_rate(step, config) for step in range(10, 101)]
    assert rates[:64] == [1.0] * 64
    assert rates[63:] == pytest.approx([1 - step / 27 for step in range(28)], abs=1e-12)


@pytest.mark.parametrize("spec", ["cosine:min=2", "exponential:min=0", "wsd:decay=0", "steps"])
def test_a_wrong_schedule_is_refused_by_its_key(spec: str) -> None:
    config = Config(MODEL, DataConfig("demo", sequence=8, batch=2), dataclasses.replace(CONFIG, schedule=spec))
    with pytest.raises(ValueError, match=rf'^optim\.schedule="{spec}": '):
        parse_plugins(config)


def test_without_warmup_the_first_step_has_the_peak_learning_rate() -> None:
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
    optimizer = AdamWOptimizer(held, OptimConfig(lr=0.1, steps=10, weight_decay=0.5))
    for weight in held:
        weight.master.grad = torch.zeros_like(weight.master)
    optimizer.step(0)
    assert torch.equal(held[0].param, torch.full((4, 3), 1 - 0.1 * 0.5))
    assert all(torch.equal(weight.param, torch.ones_like(weight.param)) for weight in held[1:])


def trained(config: OptimConfig, steps: range, **how: Any) -> tuple[AdamWOptimizer, list[Weight]]:
    """Return weights after one plain step and some as `how` says."""
    held = weights(torch.float32)
    optimizer = AdamWOptimizer(held, config)
    for step in [0, *steps]:
        for weight in held:
            generator = torch.Generator().manual_seed(step)
            weight.master.grad = torch.randn(weight.master.shape, generator=generator)
        optimizer.step(step, LocalStep(**(how if step else {})))
    return optimizer, held


def test_a_step_without_momentum_equals_one_with_beta1_of_0() -> None:
    """Also after a step with momentum."""
    config = OptimConfig(lr=0.1, steps=10)
    _, ours = trained(config, range(1, 5), momentum=False)
    _, other = trained(dataclasses.replace(config, betas=(0.0, config.betas[1])), range(1, 5))
    for weight, expected in zip(ours, other, strict=True):
        assert torch.equal(weight.master, expected.master)


def test_frozen_second_moments_grow_only_to_those_of_a_first_gradient_and_first_moments_are_updated() -> None:
    """Against the formula in fp64. A step of fp32 rounds 12 times; weights and steps are below 2 and 4."""
    config = OptimConfig(lr=0.1, steps=10, betas=(0.9, 0.99), weight_decay=0.1)
    optimizer, held = trained(config, range(1, 5), frozen=True, replicas=2)
    _, start = trained(config, range(0))
    for weight, initial in zip(held, start, strict=True):
        grads = [torch.randn(initial.master.shape, generator=torch.Generator().manual_seed(step)) for step in range(5)]
        expected, first = initial.master.detach().double(), 0.1 * grads[0].double()
        second = 0.01 * grads[0].double().square()
        for step in range(1, 5):
            first = 0.9 * first + 0.1 * grads[step]
            alone = 0.01 / (1 - 0.99 ** (step + 1)) * (grads[step].double() / 2).square()  # corrected
            second = torch.maximum(second, (1 - 0.99) * alone)
            root = (second / (1 - 0.99)).sqrt()
            expected = expected * (1 - learning_rate(step, config) * (0.1 if initial.master.dim() > 1 else 0.0))
            expected -= learning_rate(step, config) * first / (1 - 0.9 ** (step + 1)) / (root + config.eps)
        steps = (expected - initial.master).abs().max() + 2
        assert (weight.master - expected).abs().max() <= 4 * 16 * 2.0**-24 * steps
        after = optimizer.second_moments([weight]).by_key[weight.key].double()
        assert torch.allclose(after, second, rtol=2.0**-18)
        assert bool((after < 1.01 * 0.01 * grads[0].square()).any()), "some are as before"


def test_a_row_first_seen_after_the_freeze_on_one_replica_moves_as_in_adamw() -> None:
    """The first step is equal; later ones are shorter by the growth of AdamW's bias correction, up to a quarter."""
    config, exact_steps, replicas = OptimConfig(lr=0.1, steps=10**6, warmup=0, weight_decay=0.0), 30, 4
    grad = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 2, 12).view(4, 3)
    held = [weights(torch.float32)[:1] for _ in range(1 + replicas)]
    optimizers = [AdamWOptimizer(each, config) for each in held]
    for step in range(exact_steps + 20):
        before = [each[0].master.detach().clone() for each in held]
        for index, (each, optimizer) in enumerate(zip(held, optimizers, strict=True)):
            here = step == exact_steps and index < 2  # on the first replica, and thus in the mean
            each[0].master.grad = grad / (1 if index else replicas) if here else torch.zeros(4, 3)
            frozen = index > 0 and step >= exact_steps
            optimizer.step(step, LocalStep(frozen=True, replicas=replicas) if frozen else LocalStep())
        exact, *local = (each[0].master.detach() - old for each, old in zip(held, before, strict=True))
        ratio = torch.stack(local).mean(0) / exact
        if step == exact_steps:
            assert torch.allclose(ratio, torch.ones_like(ratio), rtol=1e-3), step  # eps against the root of 1e-14
        elif step > exact_steps:
            assert bool((ratio <= 1 + 1e-3).all()), step
            assert bool((ratio >= 0.75).all()), step


def test_second_moments_accumulate_shares_of_the_squares() -> None:
    """Against the formula in fp64. A step of fp32 rounds 12 times; weights and steps are below 2 and 1."""
    config = OptimConfig(lr=0.1, steps=10, betas=(0.9, 0.99), weight_decay=0.1)
    shares = {"matrix": torch.tensor([1.0, 0.5, 0.25, 0.75]), "norm": torch.tensor([0.5]), "bias": torch.tensor([1.0])}
    optimizer, held = trained(config, range(1, 5), shares=shares)
    _, start = trained(config, range(0))
    for weight, initial in zip(held, start, strict=True):
        share = shares[weight.key].view(-1, *[1] * (initial.master.dim() - 1)).double()
        grads = [torch.randn(initial.master.shape, generator=torch.Generator().manual_seed(step)) for step in range(5)]
        expected = initial.master.detach().double()
        first, second = 0.1 * grads[0].double(), 0.01 * grads[0].double().square()
        for step in range(1, 5):
            rate, grad = learning_rate(step, config), grads[step].double()
            first, second = 0.9 * first + 0.1 * grad, 0.99 * second + 0.01 * share * grad.square()
            root = (second / (1 - 0.99 ** (step + 1))).sqrt() + config.eps
            expected = expected * (1 - rate * (0.1 if initial.master.dim() > 1 else 0.0))
            expected -= rate * first / (1 - 0.9 ** (step + 1)) / root
        steps = (expected - initial.master).abs().max() + 2
        assert (weight.master - expected).abs().max() <= 4 * 16 * 2.0**-24 * steps
        assert torch.allclose(optimizer.second_moments([weight]).by_key[weight.key].double(), second, rtol=2.0**-18)


def test_the_first_step_may_already_have_shares() -> None:
    """With a share s, the first AdamW step has length lr / sqrt(s)."""
    config = OptimConfig(lr=0.1, steps=10, weight_decay=0.0)
    held = weights(torch.float32)
    for weight in held:
        weight.master.grad = torch.ones_like(weight.master)
    AdamWOptimizer(held, config).step(0, LocalStep(shares={weight.key: torch.tensor([0.25]) for weight in held}))
    assert all(torch.allclose(1 - weight.master, torch.tensor(0.2), rtol=1e-5) for weight in held)


def test_shares_of_gradients_of_any_size_leave_no_second_moment_negative() -> None:
    """Squares below the smallest normal number are rounded to few bits, so a difference of two could be negative."""
    config = OptimConfig(lr=0.1, steps=10, betas=(0.9, 0.95))
    sizes = torch.logspace(-26, -14, 4096)
    [weight] = [each for each in weights(torch.float32) if each.key == "norm"]
    weight.master.data = torch.zeros(len(sizes))
    weight.master.grad = sizes
    optimizer = AdamWOptimizer([weight], config)
    optimizer.step(0, LocalStep(shares={"norm": torch.full((8,), 1 / 64)}))
    assert weight.master.isfinite().all()
    assert (optimizer.second_moments([weight]).by_key["norm"] >= 0).all()


def test_a_frozen_step_without_moments_is_a_plain_step() -> None:
    """As where all steps so far were skipped, since the loss scale was too large."""
    config = OptimConfig(lr=0.1, steps=10)
    held = weights(torch.float32)
    optimizer = AdamWOptimizer(held, config)
    for weight in held:
        weight.master.grad = torch.ones_like(weight.master)
    assert optimizer.state_of(held) == {}, "as when a run is saved"
    optimizer.step(3, LocalStep(frozen=True))
    assert all((weight.master < 1 - 0.5 * learning_rate(3, config)).all() for weight in held)


def test_a_mode_may_only_use_what_the_optimizer_supports() -> None:
    config = Config(MODEL, DataConfig("demo", sequence=8, batch=2), OptimConfig(lr=1.0, steps=1, name="sgd"))
    for spec, mode in MODES.items():
        required = mode().requires
        check_capabilities(config, required, AdamW.capabilities)
        for capability in required:
            other = dataclasses.replace(config, dp=ReplicaConfig(spec))
            with pytest.raises(
                ValueError, match=rf'^dp\.mode="{spec}" requires {capability}, .* use optim\.name="adamw"'
            ):
                check_capabilities(other, required, AdamW.capabilities - {capability})


def test_an_unknown_optimizer_is_refused_with_the_known_names() -> None:
    with pytest.raises(ValueError, match=r'optim\.name="adam": unknown name "adam"; use "adamw"'):
        from_spec("adam", OPTIMIZERS, key="optim.name")


def test_masters_accumulate_steps_too_small_for_bf16() -> None:
    held = weights(torch.bfloat16)
    config = OptimConfig(lr=1e-4, steps=10**6, weight_decay=0.0)
    optimizer = AdamWOptimizer(held, config)
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
