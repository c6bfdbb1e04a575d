"""Laws of the plan: the split into stages minimizes the cost of the slowest stage; costs include the head."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from typing import Any

import pytest
import torch
from lib.models import TINY, tiny_config
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.pytorch_utils import Conv1D

from acsgd.layers import recorders as known_values
from acsgd.model_classes import MODEL_CLASSES, ModelClass
from acsgd.run.plan.step_time import attention_share
from acsgd.shards import plan as shards_plan
from acsgd.shards.plan import (
    LayerWork,
    StageSpec,
    blocks_of,
    layer_costs,
    layer_work,
    plan,
    plan_blocks,
    plan_unequal,
    token_flops,
)


def costs_of(config: PreTrainedConfig, sequence: int, task: ModelClass = MODEL_CLASSES["lm"]) -> list[float]:
    return layer_costs(task, config, task.layers(config), {"batch": 1, "sequence": sequence}, device="cpu")


def slowest(costs: list[float], specs: list[StageSpec]) -> float:
    return max(sum(costs[slice(*spec)]) for spec in specs)


@pytest.mark.parametrize("seed", range(20))
def test_no_other_split_has_a_faster_slowest_stage(seed: int) -> None:
    draw = random.Random(seed)
    costs = [draw.choice([0.1, 1.0, 1.0, 1.0, 7.0]) for _ in range(draw.randint(1, 9))]
    for stages in range(1, len(costs) + 1):
        specs = plan(costs, stages)
        assert [layer for spec in specs for layer in range(*spec)] == list(range(len(costs)))
        assert all(spec.first < spec.last for spec in specs)
        assert len(specs) == stages
        every_cut = itertools.combinations(range(1, len(costs)), stages - 1)
        best = min(
            slowest(costs, [StageSpec(*pair) for pair in itertools.pairwise([0, *cut, len(costs)])])
            for cut in every_cut
        )
        assert slowest(costs, specs) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_no_other_split_over_unequal_stages_has_a_faster_slowest_one(seed: int) -> None:
    draw = random.Random(seed)
    layers, stages = draw.randint(4, 8), draw.randint(1, 4)
    costs = [[draw.choice([0.1, 1.0, 7.0]) for _ in range(layers)] for _ in range(stages)]
    largest = {draw.randrange(stages): draw.randint(1, 3)}

    def cost(cut: tuple[int, ...]) -> float:
        pairs = [*itertools.pairwise([0, *cut, layers])]
        is_allowed = all(last - first <= largest.get(stage, layers) for stage, (first, last) in enumerate(pairs))
        return max(sum(costs[n][slice(*pair)]) for n, pair in enumerate(pairs)) if is_allowed else math.inf

    best = min(map(cost, itertools.combinations(range(1, layers), stages - 1)))
    if best == math.inf:
        with pytest.raises(ValueError, match="the stages may have"):
            plan_unequal(costs, largest)
    else:
        specs = plan_unequal(costs, largest)
        assert cost(tuple(spec.first for spec in specs[1:])) == pytest.approx(best, rel=1e-12)
        assert plan_blocks(blocks_of(specs), layers - 2, stages) == specs


def test_costs_are_those_of_shorter_sequences_if_longer_ones_cannot_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    config, task, run = tiny_config("gpt2"), MODEL_CLASSES["lm"], list[dict[str, int]]()

    def layer_work(task: ModelClass, config: PreTrainedConfig, layers: object, sizes: Any) -> list[LayerWork]:
        run.append(sizes)
        if sizes["sequence"] > 16:
            raise DynamicOutputShapeException(None)
        return [LayerWork(sizes["sequence"], 0)]

    monkeypatch.setattr(shards_plan, "layer_work", layer_work)
    assert layer_costs(task, config, task.layers(config), {"batch": 3, "sequence": 64}, device="cpu") == [16]
    assert run == [{"batch": 3, "sequence": length} for length in (64, 32, 16)]
    assert token_flops(task, config, task.layers(config), {"batch": 3, "sequence": 64}) == 0


@pytest.mark.soak
def test_costs_are_those_of_shorter_sequences_if_values_of_large_masks_are_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = AutoConfig.for_model("longformer", num_hidden_layers=1, attention_window=[8], **sizes)
    task = MODEL_CLASSES["classification"]
    layers = task.layers(config)
    short, long = ({"batch": 1, "sequence": length} for length in (16, 32))
    expected = layer_costs(task, config, layers, short, device="cpu")
    assert layer_costs(task, config, layers, long, device="cpu") > expected
    monkeypatch.setattr(known_values, "LARGEST", 16 * 16)
    assert layer_costs(task, config, layers, long, device="cpu") == expected


@pytest.mark.parametrize(("family", "attention"), [("gpt2", "eager"), ("llama", "eager"), ("llama", "sdpa")])
def test_the_work_per_token_is_that_of_the_whole_model(family: str, attention: str) -> None:
    """By torch's counter, and by the formula of Chowdhery et al. 2022: 6 N + 12 L H Q T, without embeddings."""
    config, task, sequence = tiny_config(family), MODEL_CLASSES["lm"], 16
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    ids = torch.zeros(2, sequence, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    config._attn_implementation = attention
    found = token_flops(task, config, task.layers(config), {"batch": 2, "sequence": sequence})
    assert found == counter.get_total_flops() / ids.numel()
    used = [m.weight for m in model.modules() if isinstance(m, (torch.nn.Linear, Conv1D))]
    products = 12 * config.num_hidden_layers * config.hidden_size * sequence
    assert found == 6 * sum(weight.numel() for weight in used) + products


@pytest.mark.parametrize("sequence", [16, 512])
def test_the_scores_of_fused_attention_count(sequence: int) -> None:
    """They make the blocks, and attention within them, a larger part of a model with longer sequences."""
    config, task = tiny_config("llama"), MODEL_CLASSES["lm"]
    sizes, ids = {"batch": 1, "sequence": sequence}, torch.zeros(1, sequence, dtype=torch.long)
    eager = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        eager(input_ids=ids, use_cache=False)
    name = f"{type(eager).__name__}.model.layers.0"
    block, attention = (sum(counter.get_flop_counts()[each].values()) for each in (name, f"{name}.self_attn"))
    config._attn_implementation = "sdpa"
    _, first, *_ = layer_work(task, config, task.layers(config), sizes)
    assert first.flops == 3 * block
    assert attention_share(eager.model.layers[0], config, sequence) == pytest.approx(attention / block, rel=0.01)


def test_more_stages_than_layers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"more stages \(4\) than layers \(3"):
        plan([1.0, 1.0, 1.0], 4)


def test_pp_layers_counts_blocks() -> None:
    assert plan_blocks([2, 3, 0], 5, 3) == [(0, 3), (3, 6), (6, 7)]
    assert plan_blocks([5], 5, 1) == [(0, 7)]
    with pytest.raises(ValueError, match="leaves a stage without layers"):
        plan_blocks([3, 0, 2], 5, 3)


@pytest.mark.parametrize("family", TINY)
def test_the_head_of_a_small_model_with_a_large_vocabulary_costs_many_blocks(family: str) -> None:
    shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "vocab_size": 32000}
    config = AutoConfig.for_model(family, num_attention_heads=4, num_key_value_heads=4, **shape)
    costs = costs_of(config, 64)
    embed, *blocks, head = costs
    assert max(blocks) == min(blocks)
    # a block multiplies by about 12 D^2 weights, the head by D V: 21 times as many
    assert head > 8 * blocks[0]
    assert embed < head / 10
    specs = plan(costs, 2)
    assert specs[1].last - specs[1].first <= 2, "the head should be almost alone"


def test_costs_count_the_operations_of_matrix_products() -> None:
    """At width 1024 they are nearly all operations: 6 per weight and token, plus attention."""
    config = AutoConfig.for_model("gpt2", n_embd=1024, n_layer=1, n_head=16, vocab_size=1000)
    tokens, hidden = 128, 1024
    _, block, _ = costs_of(config, tokens)
    products = 6 * 12 * hidden**2 * tokens
    assert products < block < 1.5 * products


def test_a_block_unlike_the_others_gets_its_own_cost() -> None:
    config = AutoConfig.for_model("gpt2", n_embd=64, n_layer=3, n_head=2, vocab_size=100)
    alike = costs_of(config, 16)

    class WithAWideBlock(ModelClass):
        def build(self, config: PreTrainedConfig) -> PreTrainedModel:
            model = super().build(config)
            with torch.device("meta"):
                model.transformer.h[1].mlp = GPT2MLP(16 * config.n_embd, config)
            return model

    other = costs_of(config, 16, WithAWideBlock(*dataclasses.astuple(MODEL_CLASSES["lm"])))
    assert other[2] > 2 * alike[2]
    assert other[:2] + other[3:] == alike[:2] + alike[3:]
