"""Progress and identity of a run: exact round trips through JSON, and the differences that prevent a resume."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from typing import Any

import pytest
from transformers import AutoConfig, PreTrainedConfig

from acsgd.io.checkpoint.identity import WEIGHTS, RunIdentity, SourceIdentity
from acsgd.io.checkpoint.progress import RECENT, Progress
from acsgd.io.files.fields import from_json
from acsgd.optim.gradient_scale import LossScale

DATA = {"data.sequence": 32, "data.batch": 4, "data.seed": 0, "weights of data.sources": [1, 3]}
FULL = tuple([2.0] * RECENT)


def gpt2(**options: Any) -> PreTrainedConfig:
    return AutoConfig.for_model("gpt2", **{"n_layer": 2, "n_embd": 8, "n_head": 2, **options})


def identity(
    model: PreTrainedConfig | None = None,
    tokenizer: str = "t",
    texts: str = "some text",
    data: dict[str, Any] | None = None,
    **fields: Any,
) -> RunIdentity:
    return RunIdentity.of(model or gpt2(), tokenizer=tokenizer, texts=texts, data={**DATA, **(data or {})}, **fields)


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
        is_spike=draw.random() < 0.5,
        evaluation=draw.choice([{}, {"eval_loss": loss(), "matthews": -loss()}]),
        best=draw.choice([{}, {"eval_loss": loss(), "matthews": -loss()}]),
    )


def test_progress_survives_json_bit_for_bit() -> None:
    for seed in range(50):
        progress = random_progress(seed)
        restored = from_json(Progress, json.loads(json.dumps(progress.to_dict(), allow_nan=False)))
        assert restored == progress, seed
        assert repr(restored) == repr(progress), f"seed {seed}: types differ"


def test_a_step_advances_the_progress() -> None:
    progress = Progress(evaluation={"eval_loss": 3.0})
    for step in range(RECENT + 5):
        progress = progress.after(float(step), 10, LossScale(2.0**step))
    assert (progress.step, progress.tokens, progress.skipped) == (RECENT + 5, 10 * (RECENT + 5), 0)
    assert progress.recent == tuple(float(step) for step in range(5, RECENT + 5))
    assert progress.loss == RECENT + 4
    assert progress.loss_scale == LossScale(2.0 ** (RECENT + 4))
    assert progress.eval_loss == 3.0


def test_a_skipped_step_counts_but_its_loss_does_not() -> None:
    before = Progress(step=3, tokens=7, skipped=1, recent=(2.0, 1.0))
    after = before.after(None, 5, LossScale())
    assert after == dataclasses.replace(before, step=4, tokens=12, skipped=2)


@pytest.mark.parametrize(
    ("metric", "values", "bests"),
    [
        ("eval_loss", [3.0, 2.0, 2.5, 2.0], [3.0, 2.0, 2.0, 2.0]),
        ("matthews", [-0.1, 0.0, 0.5, 0.2, 0.5], [-0.1, 0.0, 0.5, 0.5, 0.5]),
        ("pearson", [math.nan, 0.3, math.nan, math.inf, 0.2], [None, 0.3, 0.3, 0.3, 0.3]),
    ],
)
def test_the_best_value_of_each_metric_is_kept(metric: str, values: list[float], bests: list[float | None]) -> None:
    """The direction is that of the metric; an equal value is no improvement, and what is not finite never is."""
    progress, former = Progress(), None
    for value, best in zip(values, bests, strict=True):
        before, progress = progress, progress.evaluated({metric: value, "f1": 0.5})
        assert progress.best.get(metric) == best
        assert progress.evaluation.get(metric) == (value if math.isfinite(value) else None)
        assert progress.improves(before, metric) == (best != former)
        assert not progress.improves(before, None)
        former = best


@pytest.mark.parametrize(
    ("recent", "loss", "factor", "spike"),
    [
        (FULL, 6.0, 3.0, False),
        (FULL, math.nextafter(6.0, 7.0), 3.0, True),
        (FULL, 1e9, None, False),
        (FULL[1:], 1e9, 3.0, False),  # the first losses of a run fall too fast
        ((), 1e9, 3.0, False),
        ((*FULL[1:], 34.0), 13.0, 3.0, True),  # the mean is 4
        ((*FULL[1:], 34.0), 12.0, 3.0, False),
    ],
)
def test_a_spike_is_measured_against_the_mean_of_the_last_losses(
    recent: tuple[float, ...], loss: float, factor: float | None, spike: bool
) -> None:
    after = Progress(recent=recent).after(loss, 5, LossScale(), spike=factor)
    assert after.is_spike is spike
    assert not after.after(None, 5, LossScale(), spike=factor).is_spike, "it was the loss of an earlier step"


def test_an_identity_survives_json() -> None:
    for model in (gpt2(), AutoConfig.for_model("llama", rope_theta=5e5), AutoConfig.for_model("qwen2")):
        ours = identity(model)
        saved = from_json(RunIdentity, json.loads(json.dumps(ours.to_dict())))
        assert saved == ours
        assert ours.difference(saved) is None


def test_keys_that_do_not_change_training_are_ignored() -> None:
    other = gpt2(use_cache=False, architectures=["GPT2LMHeadModel"], dtype="float16")
    other.transformers_version, other._name_or_path = "5.99.0", "elsewhere"
    assert identity().difference(identity(other)) is None


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (identity(AutoConfig.for_model("llama")), 'its model is of family "llama", the run\'s of family "gpt2"'),
        (identity(gpt2(n_layer=3)), "its model differs: n_layer is 3 in the checkpoint, 2 in the run"),
        (identity(gpt2(attn_pdrop=0.3)), "its model differs: attn_pdrop is 0.3 in the checkpoint, 0.1 in the run"),
        (identity(tokenizer="u"), "its tokenizer differs from the run's"),
        (identity(gpt2(bos_token_id=None), tokenizer="u"), "its tokenizer differs from the run's"),
        (identity(gpt2(bos_token_id=None)), "its model differs: bos_token_id is not set in the checkpoint, 50256 in"),
        (identity(data={"data.batch": 8}), "its batches differ: data.batch is 8 in the checkpoint, 4 in the run"),
        (identity(data={"data.seed": 1}), "its batches differ: data.seed is 1 in the checkpoint, 0 in the run"),
        (
            identity(data={"weights of data.sources": [3, 1]}),
            "its batches differ: weights of data.sources are [3, 1] in the checkpoint, [1, 3] in the run",
        ),
        (identity(data={"weights of data.sources": 5}), "its batches differ: weights of data.sources are 5 in the ch"),
        (identity(texts="another"), "the text of data.sources differs from the text it was trained on"),
    ],
)
def test_a_difference_is_named(saved: RunIdentity, message: str) -> None:
    assert str(identity().difference(saved)).startswith(message)


def of_sources(spec: str, weights: list[int], **reading: str) -> RunIdentity:
    """Return the identity of a run on sources: "a.jsonl=first b/c.txt=second" has two with these texts."""
    sources = [SourceIdentity.of(*each.split("=")) for each in spec.split()]
    options = {f"data.{name}": value for name, value in reading.items()}
    return identity(texts=spec, data={WEIGHTS: weights}, sources=sources, reading={"data.format": "auto", **options})


OURS = of_sources("data/a.jsonl=1 b.txt=2 c.txt=3", [1, 2, 3])


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (of_sources("data/a.jsonl=1 b.txt=5 c.txt=3", [1, 2, 3]), "the contents of b.txt changed"),
        (of_sources("old/a.jsonl=5 b.txt=6 c.txt=3", [1, 2, 3]), "the contents of a.jsonl, b.txt changed"),
        (
            of_sources("b.txt=2 a.jsonl=1 c.txt=3", [1, 2, 3]),
            "the order of data.sources is b.txt, a.jsonl, c.txt in the checkpoint, a.jsonl, b.txt, c.txt in the run",
        ),
        (of_sources("a.jsonl=1 c.txt=3", [1, 3]), "data.sources has b.txt, which it was not trained on"),
        (
            of_sources("a.jsonl=1 b.txt=2 c.txt=3 hf:o/d=4", [1, 1, 1, 1]),
            "data.sources lacks d, which it was trained on",
        ),
        (
            of_sources("a.jsonl=1 a.jsonl=1 b.txt=2 c.txt=3", [1, 1, 2, 3]),
            "data.sources lacks a.jsonl, which it was trained on",
        ),
        (
            of_sources("a.jsonl=5 x.txt=2 y.txt=4", [1, 2, 3]),
            "the contents of a.jsonl changed, data.sources lacks y.txt, which it was trained on, "
            "data.sources has c.txt, which it was not trained on",
        ),
        (
            of_sources("data/a.jsonl=1 b.txt=2 c.txt=3", [3, 2, 1]),
            "its batches differ: weights of data.sources are a.jsonl:3, b.txt:2, c.txt:1 in the checkpoint, "
            "a.jsonl:1, b.txt:2, c.txt:3 in the run",
        ),
        (
            of_sources("data/a.jsonl=1 b.txt=2 c.txt=3", [1]),
            "its batches differ: weights of data.sources are not given in the checkpoint, a.jsonl:1, b.txt:2, c.txt:3 "
            "in the run",
        ),
        (
            of_sources("a.jsonl=9 b.txt=8 c.txt=7", [1, 2, 3], format="oig"),
            "the records of data.sources are read differently: data.format is oig in the checkpoint, auto in the run",
        ),
        (of_sources("data/a.jsonl=9 b.txt=2 c.txt=3", [1, 2, 3], other="x"), "the contents of a.jsonl changed"),
        (identity(texts="x", data=OURS.data), "the text of data.sources differs from the text it was trained on"),
    ],
)
def test_sources_that_differ_are_named(saved: RunIdentity, message: str) -> None:
    assert OURS.difference(saved) == message


def test_options_that_change_no_text_of_the_run_are_named() -> None:
    """Those that one of the two does not record are not: older versions recorded fewer."""
    saved = dataclasses.replace(OURS, reading={"data.format": "text", "data.more": "1"})
    assert OURS.difference(saved) is None
    assert OURS.differing_reading(saved) == "data.format is text in the checkpoint, auto in the run"
    assert OURS.differing_reading(dataclasses.replace(OURS, reading={})) == ""


def test_sources_may_have_other_names_with_the_same_text() -> None:
    moved = dataclasses.replace(OURS, sources=of_sources("x=1 y=2 z=3", []).sources)
    assert OURS.difference(moved) is None
    assert OURS.digest() == moved.digest()
    older = dataclasses.replace(OURS, sources=(), reading={})
    assert OURS.difference(older) is None
