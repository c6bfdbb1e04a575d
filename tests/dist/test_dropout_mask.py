"""Laws of model.dropout_mask = "sample": the dropout mask of a sequence depends on (seed, sample, layer) alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from lib.direct import (
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
from lib.models import DROPOUT, blocks_of, dropout_of, first_modules, tiny_config
from lib.ranks import on_ranks
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from acsgd.config.options import Config
from acsgd.pp.stage import MicroBatch, Stage
from acsgd.streams import mix_seed

TinyModel = Callable[..., Path]
FAMILIES = ("gpt2", "qwen2")
STEPS = 2
SAMPLE = 7
OTHER_BATCHES = [
    MicroBatch(9, 0, 0, (SAMPLE,)),
    MicroBatch(0, 2, 5, (SAMPLE,)),
    MicroBatch(3, 1, 4, (2, SAMPLE)),
    MicroBatch(11, 0, 1, (5, SAMPLE, 3, 1)),
]
"""Micro-batches that hold the same sample in other steps, at other positions and with other samples."""
CUTS = [[range(4)], [range(2), range(2, 4)], [range(1), range(1, 2), range(2, 4)]]
"""Ways to split the layers up to the third block into stages."""


def per_sample(config: Config) -> Config:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, dropout_mask="sample"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sample_gives_the_same_activation_at_every_step_and_in_every_micro_batch(family: str) -> None:
    config = tiny_config(family, **dropout_of(family), **blocks_of(family, 3))
    first = MicroBatch(0, 0, 0, (SAMPLE,))
    expected = _activation(build_stages(config, CUTS[0], mask_per_sample=True), first)[0]
    for cuts in CUTS:
        stages = build_stages(config, cuts, mask_per_sample=True)
        for micro in [first, *OTHER_BATCHES]:
            row = micro.sample_ids.index(SAMPLE)
            assert torch.equal(_activation(stages, micro)[row], expected), (cuts, micro)
    stages = build_stages(config, CUTS[0], mask_per_sample=False)
    for micro in OTHER_BATCHES:
        row = micro.sample_ids.index(SAMPLE)
        new = _activation(stages, micro)[row]
        assert not torch.equal(new, expected), "dropout is not active"


@pytest.mark.parametrize("family", FAMILIES)
def test_masks_of_samples_differ(family: str) -> None:
    config = tiny_config(family, **dropout_of(family), **blocks_of(family, 3))
    same_text = _tokens([0]).expand(4, SEQUENCE)
    stages = build_stages(config, CUTS[0], mask_per_sample=True)
    rows = _activation(stages, MicroBatch(0, 0, 0, (3, 8, 3, 9)), same_text)
    assert torch.equal(rows[0], rows[2])
    assert len({digest([row]) for row in rows}) == 3


def gradients_on_rank(rank: int, world_size: int, store: Path, configs: Sequence[Config]) -> list[tuple[float, str]]:
    """Return, by config, the sum of this rank's parts of the losses, and a hash of all gradients and weights."""
    results = []
    for number, config in enumerate(configs):
        with session_of(config, rank, world_size, f"{store}-{number}") as session:
            loss, grads = 0.0, []
            for step in range(STEPS):
                loss += session.pipeline.run(draw_batch(config, step, session.job.micro_ids), step).item()
                grads.append(digest(gradients(session)))
                descend(session.weights)
            results.append((loss, f"{grads} {digest(weight.param for weight in session.weights)}"))
    return results


@pytest.mark.parametrize("stages", [1, 2])
def test_micro_batches_and_recomputation_change_no_bit(stages: int, tiny_model: TinyModel, tmp_path: Path) -> None:
    """Each sequence runs alone, so the order in which gradients are summed does not depend on the micro-batch size."""
    schedule = "interleaved:chunks=2" if stages > 1 else "gpipe"
    cuts = [(1, "none"), (2, "layers"), (6, "layers")]
    for family, dtype in [("gpt2", "fp32"), ("llama", "bf16")]:
        model = tiny_model(family, **dropout_of(family), **blocks_of(family, 2))
        by_step = [
            make_config(
                model, tmp_path, dtype=dtype, stages=stages, schedule=schedule, micro=micro, recompute=recompute
            )
            for micro, recompute in cuts
        ]
        configs = [*map(per_sample, by_step), by_step[0]]
        for *alike, other in on_ranks(stages, gradients_on_rank, tmp_path / f"store-{family}", configs):
            assert len({hashed for _, hashed in alike}) == 1
            # losses are positive; those of one micro-batch are added in fp32, micro-batches in fp64
            rounding = (SEQUENCES - 1) * 2.0**-24
            assert [loss for loss, _ in alike] == pytest.approx([alike[0][0]] * len(cuts), rel=rounding)
            assert other[1] != alike[0][1], "the masks of a sample are the same as those of a step"


def test_gradients_are_those_of_one_process_with_the_same_masks(tiny_model: TinyModel, tmp_path: Path) -> None:
    for family in FAMILIES:
        config = per_sample(
            make_config(tiny_model(family, **dropout_of(family), **blocks_of(family, 2)), tmp_path, micro=3)
        )
        with session_of(config, 0, 1, str(tmp_path / family)) as session:
            session.pipeline.run(draw_batch(config, 0), 0)
            found = {weight.key: weight.master.grad for weight in session.weights}
        expected = oracle_gradients(config)
        assert found.keys() == expected.keys()
        for key, grad in found.items():
            assert torch.equal(grad, expected[key]), key


def oracle_gradients(config: Config) -> dict[str, Tensor]:
    """Return the gradients of the first step, computed by the Hugging Face model one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(config.model.name, dtype=torch.float32).train()
    batch, sample = draw_batch(config, 0), 0
    for index, module in enumerate(first_modules(model)):

        def reseed(*_: object, layer: int = index) -> None:
            torch.manual_seed(mix_seed(config.data.seed, sample, layer))

        module.register_forward_pre_hook(reseed)
    sequences = zip(
        batch.inputs["input_ids"].flatten(0, 1), batch.labels.flatten(0, 1), batch.sample_ids.flatten(), strict=True
    )
    for tokens, labels, sample_id in sequences:
        sample = sample_id.item()
        logits = model(tokens[None], use_cache=False).logits[0]
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / (SEQUENCES * SEQUENCE)
        loss.backward()
    return {key: weight.grad for key, weight in model.named_parameters()}


def test_a_model_without_dropout_is_unaffected(tiny_model: TinyModel, tmp_path: Path) -> None:
    for family in FAMILIES:
        by_step = make_config(tiny_model(family, **blocks_of(family, 2)), tmp_path, micro=3)
        usual, by_sample = (
            gradients_on_rank(0, 1, tmp_path / f"{family}-{number}", [config])
            for number, config in enumerate([by_step, per_sample(by_step)])
        )
        assert by_sample == usual
        assert _calls(tiny_config(family)) == 1
        assert _calls(tiny_config(family, **dropout_of(family))) == 3


def evaluate_on_rank(rank: int, world_size: int, store: Path, config: Config) -> tuple[float, str, str]:
    """Return this rank's part of an evaluation loss, and hashes of the gradients before and after the evaluation."""
    with session_of(config, rank, world_size, str(store)) as session:
        batch = draw_batch(config, 0, session.job.micro_ids)
        session.pipeline.run(batch, 0)
        before = digest(gradients(session))
        held_out = dataclasses.replace(batch, sample_ids=torch.zeros_like(batch.sample_ids))
        loss = session.pipeline.evaluate(held_out, 0).loss.item()
        session.pipeline.run(batch, 0)
        return loss, before, digest(gradients(session))


def test_an_evaluation_is_the_same_and_does_not_affect_training(tiny_model: TinyModel, tmp_path: Path) -> None:
    config = make_config(
        tiny_model("gpt2", **DROPOUT, n_layer=2),
        tmp_path,
        stages=2,
        micro=2,
        schedule="interleaved:chunks=2",
        recompute="layers",
    )
    usual = on_ranks(2, evaluate_on_rank, tmp_path / "usual", config)
    for (loss, _, _), (same_loss, before, after) in zip(
        usual, on_ranks(2, evaluate_on_rank, tmp_path / "store", per_sample(config)), strict=True
    ):
        assert same_loss == loss
        assert after == before


def _tokens(sample_ids: Sequence[int]) -> Tensor:
    """Return tokens [B, T] that depend on the sample ids alone."""
    generators = [torch.Generator().manual_seed(sample_id) for sample_id in sample_ids]
    return torch.stack([torch.randint(VOCABULARY, (SEQUENCE,), generator=generator) for generator in generators])


def _activation(stages: Sequence[Stage], micro: MicroBatch, tokens: Tensor | None = None) -> Tensor:
    """Return the output of the last stage, [B, T, D]."""
    inputs = {"input_ids": _tokens(micro.sample_ids) if tokens is None else tokens}
    state: dict[str, Tensor] = {}
    for stage in stages:
        state = stage.forward(micro, inputs, state)
    return state["hidden"]


def _calls(config: PreTrainedConfig) -> int:
    """Return the number of times a block runs in the forward of a micro-batch of three sequences."""
    (stage,) = build_stages(config, [range(2)], mask_per_sample=True)
    calls = []
    first_modules(stage.composed.model)[1].register_forward_hook(lambda *_: calls.append(1))
    stage.forward(MicroBatch(0, 0, 0, (1, 2, 3)), {"input_ids": _tokens([1, 2, 3])}, {})
    return len(calls)
