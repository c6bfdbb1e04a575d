"""Optimizers of the table: their updates, and the state that they declare and hand over."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from acsgd.config.options import OptimConfig
from acsgd.config.spec import from_spec
from acsgd.optim import OPTIMIZERS
from acsgd.optim.base import Optimizer, OptimizerSpec
from acsgd.optim.per_weight import open_optimizer
from acsgd.optim.replay import ReplayOptimizer
from acsgd.optim.rounding import random_bits, round_stochastically
from acsgd.optim.schedule import learning_rate
from acsgd.shards.weights import Weight, WeightState, as_own_master
from acsgd.streams import Streams

CONFIG = OptimConfig(lr=0.01, steps=10, weight_decay=0.1, schedule="constant")
SHAPES = {"matrix": (4, 3), "embedding": (5, 3), "experts": (2, 4, 3), "norm": (4,)}
"""Of these weights, only "matrix" is a hidden matrix."""
INSTALLED = (
    "adamw",
    "adafactor",
    "lion",
    "muon",
    "schedule_free_adamw",
    "sgd",
    "sgd:nesterov=true",
    "sgd:momentum=0",
)
HAS_8BIT = importlib.util.find_spec("bitsandbytes") is not None
SPECS = (*INSTALLED, *(["adamw8bit"] if HAS_8BIT else []))
ROUNDING = 2.0**-24
"""Largest relative error of an operation in fp32."""


def test_every_optimizer_is_tested() -> None:
    assert {spec.partition(":")[0] for spec in SPECS} | {"adamw8bit"} == {*OPTIMIZERS}


def drawn(key: str, step: int) -> Tensor:
    """Return the gradient of a step, or with step -1 the initial weight."""
    return torch.randn(SHAPES[key], generator=torch.Generator().manual_seed(100 * (step + 1) + len(key)))


def new_weights(dtype: torch.dtype = torch.float32) -> list[Weight]:
    made = []
    for key in SHAPES:
        master = nn.Parameter(drawn(key, -1))
        param = master if dtype == torch.float32 else nn.Parameter(master.detach().to(dtype))
        made.append(Weight(key, param, master, is_hidden_matrix=key == "matrix"))
    return made


def opened(spec: str, weights: Sequence[Weight]) -> Optimizer:
    return open_optimizer(plugin_of(spec), weights, CONFIG, Streams(torch.device("cpu")))


def plugin_of(spec: str) -> OptimizerSpec:
    plugin: OptimizerSpec = from_spec(spec, OPTIMIZERS, key="optim.name")
    return plugin


def train(optimizer: Optimizer, weights: Sequence[Weight], steps: range) -> None:
    for step in steps:
        for weight in weights:
            weight.master.grad = drawn(weight.key, step)
        optimizer.step(step)


@pytest.mark.parametrize("spec", SPECS)
def test_the_state_is_what_the_optimizer_declares(spec: str) -> None:
    """A checkpoint with anything else is refused."""
    weights = new_weights()
    optimizer = opened(spec, weights)
    assert optimizer.state_of(weights) == {}
    train(optimizer, weights, range(2))
    held = {
        (name, key): (tuple(tensor.shape), tensor.dtype, bool((tensor < 0).any()))
        for name, by_key in optimizer.state_of(weights).items()
        for key, tensor in by_key.items()
    }
    states = from_spec(spec, OPTIMIZERS, key="optim.name").states
    shapes = {
        (state.name, weight.key): state.shape_for(weight.master, is_hidden_matrix=weight.is_hidden_matrix)
        for state in states
        for weight in weights
    }
    assert {each: shape for each, (shape, _, _) in held.items()} == {k: s for k, s in shapes.items() if s is not None}
    non_negative = {state.name for state in states if state.non_negative}
    assert all(dtype == torch.float32 for _, dtype, _ in held.values())
    assert not any(has_negative for (name, _), (_, _, has_negative) in held.items() if name in non_negative)


@pytest.mark.parametrize("spec", SPECS)
def test_an_optimizer_continues_bit_for_bit_from_the_state_of_another(spec: str) -> None:
    weights, others = new_weights(), new_weights()
    optimizer = opened(spec, weights)
    train(optimizer, weights, range(3))
    resumed = opened(spec, others)
    state = optimizer.state_of(weights)
    for weight, other in zip(weights, others, strict=True):
        other.master.data.copy_(weight.master)
        resumed.load_state_of(other, state)
    train(optimizer, weights, range(3, 6))
    train(resumed, others, range(3, 6))
    for weight, other in zip(weights, others, strict=True):
        assert torch.equal(weight.master, other.master)


@pytest.mark.parametrize("spec", SPECS)
def test_steps_are_repeated_bit_for_bit_on_a_state_that_arrives_later(spec: str) -> None:
    """That of another optimizer after step 2 arrives after step 4, for all weights but the last."""
    weights, others = new_weights(torch.bfloat16), new_weights(torch.bfloat16)
    optimizer = opened(spec, weights)
    replaying = ReplayOptimizer(opened(spec, others), partial(opened, spec))
    late, others_late = weights[:-1], others[:-1]
    for other in others_late:
        other.master.data.zero_()
    train(optimizer, weights, range(2))
    train(replaying, others, range(2))
    state = {name: {k: x.clone() for k, x in by_key.items()} for name, by_key in optimizer.state_of(late).items()}
    masters = {weight.key: weight.master.detach().clone() for weight in late}
    recording = replaying.record(others_late)
    train(optimizer, weights, range(2, 4))
    train(replaying, others, range(2, 4))
    assert recording.nbytes == 2 * sum(weight.master.nbytes for weight in late)

    for other in others_late:
        other.master.data.copy_(masters[other.key])
        replaying.load_state_of(other, state)
    replaying.replay(recording)
    for step in (4, 5):
        for weight, other in zip(weights, others, strict=True):
            assert torch.equal(weight.master, other.master)
            assert torch.equal(weight.param, other.param)
        assert_equal_states(optimizer.state_of(weights), replaying.state_of(others))
        train(optimizer, weights, range(step, step + 1))
        train(replaying, others, range(step, step + 1))
    assert len(recording.steps) == 2, "the recording has not ended"


def assert_equal_states(state: WeightState, other: WeightState) -> None:
    assert state.keys() == other.keys()
    for name, by_key in state.items():
        assert by_key.keys() == other[name].keys()
        assert all(torch.equal(tensor, other[name][key]) for key, tensor in by_key.items())


@pytest.mark.parametrize("spec", SPECS)
def test_parameters_are_the_rounded_values_of_training(spec: str) -> None:
    """Those of the masters, unless these are averages."""
    weights, averages = new_weights(torch.bfloat16), plugin_of(spec).averages
    optimizer = opened(spec, weights)
    train(optimizer, weights, range(3))
    for weight in weights:
        optimizer.copy_trained(weight, values := torch.empty_like(weight.master))
        assert torch.equal(weight.param, values.bfloat16())
        assert torch.equal(weight.master, values) is not averages
        assert not torch.equal(weight.master, drawn(weight.key, -1))


def without_masters() -> list[Weight]:
    params = {key: nn.Parameter(drawn(key, -1).bfloat16()) for key in SHAPES}
    return [Weight(key, x, as_own_master(x), is_hidden_matrix=key == "matrix") for key, x in params.items()]


@pytest.mark.parametrize("spec", [spec for spec in SPECS if not plugin_of(spec).averages])
def test_weights_without_masters_are_those_of_a_step_in_fp32_rounded_up_or_down(spec: str) -> None:
    weights = without_masters()
    config = dataclasses.replace(CONFIG, masters="none")
    optimizer = open_optimizer(plugin_of(spec), weights, config, Streams(torch.device("cpu")))
    for step in range(3):
        masters = {weight.key: nn.Parameter(weight.param.detach().float()) for weight in weights}
        copies = [weight._replace(param=masters[weight.key], master=masters[weight.key]) for weight in weights]
        exact, state = opened(spec, copies), optimizer.state_of(weights)
        for copy in copies:
            exact.load_state_of(copy, state)
        train(exact, copies, range(step, step + 1))
        train(optimizer, weights, range(step, step + 1))
        assert_equal_states(optimizer.state_of(weights), exact.state_of(copies))
        for weight in weights:
            assert weight.master.grad is not None
            assert weight.master.grad.dtype == torch.float32
            bits, rounded = (x.detach().float().view(torch.int32) for x in (masters[weight.key], weight.param))
            # the neighbour towards 0 has the upper 16 bits of the value, the other one is the next number
            assert ((rounded == bits & -(2**16)) | (rounded == (bits & -(2**16)) + 2**16)).all()


def test_rounding_keeps_the_expectation() -> None:
    """Of 4096 roundings of each value; those of a fraction p of the distance of two bf16 numbers are binomial."""
    tries, values = 4096, torch.cat((torch.linspace(1, 1 + 2**-7, 33), torch.linspace(-3e-6, -2.9e-6, 33)))
    weight = Weight("w", nn.Parameter(torch.empty(66, tries, dtype=torch.bfloat16)), nn.Parameter(torch.empty(())))
    out = weight.param.detach()
    round_stochastically(values[:, None].repeat(1, tries), random_bits(weight, 7), out=out)
    below = (values.view(torch.int32) & -(2**16)).view(torch.float32)
    above = ((values.view(torch.int32) & -(2**16)) + 2**16).view(torch.float32)
    share = ((values - below) / (above - below)).double()
    found = (out.float() == above[:, None]).double().mean(1)
    assert ((out.float() == above[:, None]) | (out.float() == below[:, None])).all()
    deviation = (share * (1 - share) / tries).sqrt()
    assert ((found - share).abs() <= 5 * deviation + 2**-16).all(), "16 random bits"


@pytest.mark.parametrize("key", ["embedding", "experts", "norm"])
def test_parts_of_a_weight_are_rounded_as_the_whole_one_and_no_two_steps_alike(key: str) -> None:
    values, whole = drawn(key, 0), torch.empty(SHAPES[key], dtype=torch.bfloat16)
    weight = Weight("w", nn.Parameter(whole), nn.Parameter(whole))
    round_stochastically(values, random_bits(weight, 0), out=whole)
    parts = whole.clone().zero_()
    for start, stop in ((0, 1), (1, len(parts))):
        part = Weight(f"w[{start}:{stop}]", nn.Parameter(parts[start:stop]), nn.Parameter(parts[start:stop]))
        round_stochastically(values[start:stop], random_bits(part, 0), out=parts[start:stop])
    assert torch.equal(parts, whole)
    bits = [random_bits(weight, step) for step in (0, 1)]
    bits.append(random_bits(weight._replace(key="v"), 0))
    assert len({tuple(each.rows.tolist()) for each in bits}) == 3


def test_infinite_values_and_nan_survive_rounding() -> None:
    of_cuda = torch.tensor([2**31 - 1, -1], dtype=torch.int32).view(torch.float32)  # all bits 1, with either sign
    special = torch.cat((torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0]), of_cuda))
    weight = Weight("w", nn.Parameter(special.bfloat16()), nn.Parameter(special))
    out = torch.ones(7, dtype=torch.bfloat16)
    for step in range(50):
        round_stochastically(special, random_bits(weight, step), out=out)
        torch.testing.assert_close(out.float(), special, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(out.signbit()[:5], special.signbit()[:5])
    empty = Weight("w", nn.Parameter(torch.empty(0, 4)), nn.Parameter(torch.empty(0, 4)))
    round_stochastically(empty.master, random_bits(empty, 0), out=torch.empty(0, 4, dtype=torch.bfloat16))


def decayed(weight: Tensor, step: int) -> Tensor:
    """Apply decoupled weight decay to matrices."""
    return weight * (1 - learning_rate(step, CONFIG) * (CONFIG.weight_decay if weight.dim() > 1 else 0.0))


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_is_its_formula_in_fp64(nesterov: bool) -> None:
    weights, steps = new_weights(), 5
    train(opened(f"sgd:momentum=0.8,nesterov={str(nesterov).lower()}", weights), weights, range(steps))
    for weight in weights:
        expected, momentum = drawn(weight.key, -1).double(), torch.zeros(SHAPES[weight.key]).double()
        for step in range(steps):
            grad = drawn(weight.key, step).double()
            momentum = 0.8 * momentum + grad
            expected = decayed(expected, step) - 0.01 * (grad + 0.8 * momentum if nesterov else momentum)
        # of each step, 6 operations on values below 8 (weights) and .01 * 5 * 4 * 1.8 (updates)
        assert (weight.master - expected).abs().max() <= 6 * steps * ROUNDING * 8


def test_lion_is_its_formula_in_fp64() -> None:
    weights, steps = new_weights(), 5
    train(opened("lion:beta1=0.8,beta2=0.95", weights), weights, range(steps))
    for weight in weights:
        expected, momentum = drawn(weight.key, -1).double(), torch.zeros(SHAPES[weight.key]).double()
        for step in range(steps):
            grad = drawn(weight.key, step).double()
            expected = decayed(expected, step) - 0.01 * (0.8 * momentum + 0.2 * grad).sign()
            momentum = 0.95 * momentum + 0.05 * grad
        assert (weight.master - expected).abs().max() <= 3 * steps * ROUNDING * 8


@pytest.mark.parametrize("warmup", [0, 3])
def test_schedule_free_adamw_is_its_formula_in_fp64(warmup: int) -> None:
    """Algorithm 1 of Defazio et al. 2024."""
    weights, config, steps = new_weights(torch.bfloat16), dataclasses.replace(CONFIG, warmup=warmup), 6
    plugin, (beta1, beta2) = plugin_of("schedule_free_adamw"), CONFIG.betas
    optimizer = open_optimizer(plugin, weights, config, Streams(torch.device("cpu")))
    train(optimizer, weights, range(steps))
    for weight in weights:
        x = z = drawn(weight.key, -1).double()
        second, sum_of_squares = torch.zeros(SHAPES[weight.key]).double(), 0.0
        for step in range(steps):
            grad, rate = drawn(weight.key, step).double(), learning_rate(step, config)
            y, decay = (1 - beta1) * z + beta1 * x, CONFIG.weight_decay if x.dim() > 1 else 0.0
            second = beta2 * second + (1 - beta2) * grad**2
            normalized = grad / ((second / (1 - beta2 ** (step + 1))).sqrt() + CONFIG.eps)
            z = z - rate * (normalized + decay * y)
            sum_of_squares += rate**2
            x = (1 - rate**2 / sum_of_squares) * x + rate**2 / sum_of_squares * z
        # of each step, 20 operations on values below 8
        assert (weight.master - x).abs().max() <= 20 * steps * ROUNDING * 8
        y = (1 - beta1) * z + beta1 * x
        assert (weight.param - y).abs().max() <= 2**-8 * y.abs().max()


def test_adafactor_is_that_of_torch() -> None:
    weights = new_weights()
    train(opened("adafactor:decay=-0.7,clip=2", weights), weights, range(5))
    expected = {key: nn.Parameter(drawn(key, -1)) for key in SHAPES}
    groups = [
        {"params": [expected[key] for key in SHAPES if key != "norm"], "weight_decay": CONFIG.weight_decay},
        {"params": [expected["norm"]], "weight_decay": 0.0},
    ]
    theirs = torch.optim.Adafactor(groups, lr=CONFIG.lr, beta2_decay=-0.7, d=2.0)
    for step in range(5):
        for key, param in expected.items():
            param.grad = drawn(key, step)
        theirs.step()
    assert all(torch.equal(weight.master, expected[weight.key]) for weight in weights)


def test_muon_is_that_of_torch_for_hidden_matrices_and_adamw_for_others() -> None:
    weights = new_weights()
    train(opened("muon:momentum=0.8,nesterov=false", weights), weights, range(5))
    expected = {key: nn.Parameter(drawn(key, -1)) for key in SHAPES}
    decay = {"lr": CONFIG.lr, "weight_decay": CONFIG.weight_decay}
    groups = [
        {"params": [expected["embedding"], expected["experts"]], **decay},
        {"params": [expected["norm"]], "lr": CONFIG.lr, "weight_decay": 0.0},
    ]
    options = {"momentum": 0.8, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"}
    theirs = [torch.optim.Muon([expected["matrix"]], **decay, **options), torch.optim.AdamW(groups, fused=True)]
    for step in range(5):
        for key, param in expected.items():
            param.grad = drawn(key, step)
        for optimizer in theirs:
            optimizer.step()
    assert all(torch.equal(weight.master, expected[weight.key]) for weight in weights)


def large_weight() -> Weight:
    """Return a weight whose moments are quantized: 16 blocks and a part of one."""
    master = nn.Parameter(torch.randn(65, 64, generator=torch.Generator().manual_seed(0)))
    return Weight("matrix", master, master)


def set_gradient(weight: Weight, step: int) -> None:
    grad = torch.randn(weight.master.shape, generator=torch.Generator().manual_seed(step + 1))
    weight.master.grad = grad * 10.0 ** -torch.arange(64)[None, :].remainder(4)


@pytest.mark.skipif(not HAS_8BIT, reason="bitsandbytes is not installed")
def test_adamw8bit_is_that_of_bitsandbytes_and_its_state_survives_fp32() -> None:
    from bitsandbytes.optim import AdamW8bit

    ours, theirs = large_weight(), large_weight()
    optimizer = opened("adamw8bit", [ours])
    options = {"lr": CONFIG.lr, "betas": CONFIG.betas, "eps": CONFIG.eps, "weight_decay": CONFIG.weight_decay}
    expected = AdamW8bit([theirs.master], **options)
    for step in range(6):
        set_gradient(ours, step)
        set_gradient(theirs, step)
        optimizer.step(step)
        expected.step()
        assert torch.equal(ours.master, theirs.master)
        state, resumed = optimizer.state_of([ours]), opened("adamw8bit", [ours])
        assert state["exp_avg"]["matrix"].unique().numel() < 17 * 256, "it was quantized"
        resumed.load_state_of(ours, state)
        optimizer = resumed


@pytest.mark.skipif(HAS_8BIT, reason="bitsandbytes is installed")
def test_adamw8bit_says_what_to_install() -> None:
    with pytest.raises(ValueError, match=r'adamw8bit": needs bitsandbytes, .* pip install "acsgd\[8bit\]"'):
        opened("adamw8bit", [])


def test_the_learning_rate_is_that_of_the_schedule() -> None:
    config = dataclasses.replace(CONFIG, schedule="linear", weight_decay=0.0)
    for spec in SPECS:
        weights = new_weights()
        train(plugin_of(spec).open(weights, config), weights, range(10, 11))
        assert all(torch.equal(weight.master, drawn(weight.key, -1)) for weight in weights), "0 at the end"


def test_nesterov_needs_momentum() -> None:
    with pytest.raises(ValueError, match=r'^optim\.name="sgd:momentum=0,nesterov=true": nesterov=true needs a mom'):
        from_spec("sgd:momentum=0,nesterov=true", OPTIMIZERS, key="optim.name")
