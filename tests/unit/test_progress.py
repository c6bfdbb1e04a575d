"""How far a run has come goes through JSON unchanged, and a checkpoint of another training is told from one's own."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from typing import Any

import pytest
from transformers import AutoConfig, PreTrainedConfig

from acsgd.io.checkpoint.progress import RECENT, Identity, Progress
from acsgd.optim.loss_scale import LossScale

DATA = {"data.sequence": 32, "data.batch": 4, "data.seed": 0, "weights of data.sources": [1, 3]}
FULL = tuple([2.0] * RECENT)


def gpt2(**options: Any) -> PreTrainedConfig:
    return AutoConfig.for_model("gpt2", **{"n_layer": 2, "n_embd": 8, "n_head": 2, **options})


def identity(
    model: PreTrainedConfig | None = None,
    tokenizer: str = "t",
    texts: str = "some text",
    data: dict[str, Any] | None = None,
) -> Identity:
    return Identity.of(model or gpt2(), tokenizer=tokenizer, texts=texts, data={**DATA, **(data or {})})


def random_progress(seed: int) -> Progress:
    draw = random.Random(seed)

    def loss() -> float:
        return draw.choice([draw.random() * 10, draw.random() * 1e-310, math.nextafter(draw.random(), 2), 1 / 3])

    return Progress(
        step=draw.randrange(10**9),
        tokens=draw.randrange(10**18),
        skipped=draw.randrange(100),
        loss_scale=LossScale(2.0 ** draw.randrange(-10, 25), draw.randrange(2000), draw.random() < 0.5),
        recent=tuple(loss() for _ in range(draw.randrange(RECENT + 1))),
        eval_loss=draw.choice([None, loss()]),
        best_eval_loss=draw.choice([None, loss()]),
    )


@pytest.mark.parametrize("seed", range(50))
def test_progress_goes_through_json_bit_for_bit(seed: int) -> None:
    progress = random_progress(seed)
    again = Progress.from_dict(json.loads(json.dumps(progress.to_dict(), allow_nan=False)))
    assert again == progress
    assert repr(again) == repr(progress), "types as well"


def test_a_step_adds_to_what_was_done() -> None:
    progress = Progress(eval_loss=3.0)
    for step in range(RECENT + 5):
        progress = progress.after(float(step), 10, LossScale(2.0**step))
    assert (progress.step, progress.tokens, progress.skipped) == (RECENT + 5, 10 * (RECENT + 5), 0)
    assert progress.recent == tuple(float(step) for step in range(5, RECENT + 5))
    assert progress.loss == RECENT + 4
    assert progress.loss_scale == LossScale(2.0 ** (RECENT + 4))
    assert progress.eval_loss == 3.0


def test_a_step_left_out_counts_but_its_loss_does_not() -> None:
    before = Progress(step=3, tokens=7, skipped=1, recent=(2.0, 1.0))
    after = before.after(None, 5, LossScale())
    assert after == dataclasses.replace(before, step=4, tokens=12, skipped=2)


def test_the_best_evaluation_is_remembered() -> None:
    progress = Progress()
    for loss, best in [(3.0, 3.0), (2.0, 2.0), (2.5, 2.0)]:
        progress = progress.evaluated(loss)
        assert (progress.eval_loss, progress.best_eval_loss) == (loss, best)


@pytest.mark.parametrize(
    ("recent", "loss", "factor", "spike"),
    [
        (FULL, 6.0, 3.0, False),
        (FULL, math.nextafter(6.0, 7.0), 3.0, True),
        (FULL, 1e9, None, False),
        (FULL[1:], 1e9, 3.0, False),  # the first losses of a run fall too fast to be a measure
        ((), 1e9, 3.0, False),
        ((*FULL[1:], 34.0), 13.0, 3.0, True),  # the mean is 4
        ((*FULL[1:], 34.0), 12.0, 3.0, False),
    ],
)
def test_a_spike_is_measured_against_the_mean_of_a_full_row(
    recent: tuple[float, ...], loss: float, factor: float | None, spike: bool
) -> None:
    assert Progress(recent=recent).is_spike(loss, factor) is spike


def test_an_identity_goes_through_json_and_is_its_own() -> None:
    for model in (gpt2(), AutoConfig.for_model("llama", rope_theta=5e5), AutoConfig.for_model("qwen2")):
        ours = identity(model)
        saved = Identity.from_dict(json.loads(json.dumps(ours.to_dict())))
        assert saved == ours
        assert ours.difference(saved) is None


def test_what_does_not_change_training_is_no_difference() -> None:
    other = gpt2(use_cache=False, architectures=["GPT2LMHeadModel"], dtype="float16")
    other.transformers_version, other._name_or_path = "5.99.0", "elsewhere"
    assert identity().difference(identity(other)) is None


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (identity(AutoConfig.for_model("llama")), 'it is of family "llama", the run\'s model of family "gpt2"'),
        (identity(gpt2(n_layer=3)), "it is of another model: n_layer is 3 there and 2 here"),
        (identity(gpt2(attn_pdrop=0.3)), "it is of another model: attn_pdrop is 0.3 there and 0.1 here"),
        (identity(tokenizer="u"), "it was trained with another tokenizer than the run's model has"),
        (identity(data={"data.batch": 8}), "its batches were others: data.batch is 8 there and 4 here"),
        (identity(data={"data.seed": 1}), "its batches were others: data.seed is 1 there and 0 here"),
        (
            identity(data={"weights of data.sources": [3, 1]}),
            "its batches were others: weights of data.sources is [3, 1] there and [1, 3] here",
        ),
        (identity(texts="another"), "the texts of data.sources are not those it was trained on"),
    ],
)
def test_another_training_is_named(saved: Identity, message: str) -> None:
    assert identity().difference(saved) == message
