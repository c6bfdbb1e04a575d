"""Metrics: their definitions, their choice by the data, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from lib.labelled import save_model, with_special_tokens
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from acsgd.config.options import CheckpointConfig, Config, DataConfig, EvalConfig, ModelConfig, OptimConfig
from acsgd.io.data.sources.glue import GLUE, Glue
from acsgd.launch import Launch
from acsgd.metrics import METRICS, Outcome, choose_metrics, compute_metrics, is_better
from acsgd.run.plan.job import prepare
from acsgd.tasks import TASKS


def f1_of(label: int, predictions: NDArray[np.float64], labels: NDArray[np.float64]) -> float:
    """Return the F1 score of a class by its definition."""
    hits = int(((predictions == label) & (labels == label)).sum())
    return 2 * hits / max(1, int((predictions == label).sum() + (labels == label).sum()))


@pytest.mark.parametrize("classes", [2, 4])
def test_metrics_of_classes_are_those_of_their_definitions(classes: int) -> None:
    draw = np.random.default_rng(classes)
    labels = draw.integers(classes, size=200).astype(np.float64)
    predictions = np.where(draw.random(200) < 0.6, labels, draw.integers(classes, size=200))
    found = compute_metrics(("accuracy", "f1", "matthews"), Outcome(1.0, predictions, labels))
    one_hot = [np.eye(classes)[each.astype(int)] for each in (predictions, labels)]
    centred = [each - each.mean(0) for each in one_hot]  # Gorodkin 2004
    covariance = [(a * b).sum() for a, b in itertools.product(centred, repeat=2)]
    f1s = [f1_of(label, predictions, labels) for label in range(classes)]
    assert found == pytest.approx(
        {
            "accuracy": (predictions == labels).mean(),
            "f1": f1s[1] if classes == 2 else np.mean(f1s),
            "matthews": covariance[1] / math.sqrt(covariance[0] * covariance[3]),
        }
    )


def test_metrics_of_numbers_are_those_of_their_definitions() -> None:
    draw = np.random.default_rng(0)
    labels = draw.permutation(50) / 7
    predictions = labels**3 + 5 * draw.random(50)
    ranks = [np.argsort(np.argsort(each)) for each in (predictions, labels)]
    found = compute_metrics(("eval_loss", "pearson", "spearman"), Outcome(0.5, predictions, labels))
    pearson, spearman = np.corrcoef(predictions, labels)[0, 1], np.corrcoef(*ranks)[0, 1]
    assert found == pytest.approx({"eval_loss": 0.5, "pearson": pearson, "spearman": spearman})


@pytest.mark.filterwarnings("error")
def test_metrics_without_a_value_are_not_numbers_and_never_the_best() -> None:
    labels, constant = np.arange(4.0), np.full(4, 2.5)
    assert all(math.isnan(v) for v in compute_metrics(("pearson", "spearman"), Outcome(0.1, constant, labels)).values())
    one_class = compute_metrics(("f1", "matthews"), Outcome(0.1, np.zeros(4), np.zeros(4)))
    assert one_class == {"f1": 0.0, "matthews": 0.0}
    empty = np.empty(0)
    assert compute_metrics(("perplexity",), Outcome(math.log(7.0), empty, empty)) == pytest.approx({"perplexity": 7.0})
    assert math.isfinite(compute_metrics(("perplexity",), Outcome(1e9, empty, empty))["perplexity"])
    assert not is_better("pearson", math.nan, None)
    assert is_better("pearson", -0.2, None)
    assert [name for name in METRICS if is_better(name, 0.1, 0.2)] == ["eval_loss", "perplexity"]
    assert not any(is_better(name, 0.2, 0.2) for name in METRICS)


def test_every_task_has_metrics_of_its_own() -> None:
    for task in TASKS.values():
        assert choose_metrics(None, task) == ("eval_loss", *task.metrics)
        known = [name for name, metric in METRICS.items() if metric.kind in (None, task.predictions)]
        assert len(known) > 1
        assert choose_metrics(", ".join(known), task) == tuple(known)
        assert choose_metrics("", task) == ("eval_loss",)


GLUE_METRICS = {
    "cola": ["matthews"],
    "mrpc": ["accuracy", "f1"],
    "qqp": ["accuracy", "f1"],
    "stsb": ["pearson", "spearman"],
}
"""Metrics of GLUE's leaderboard by task; that of the others is the accuracy."""


def run_on(sources: str, best: str | None, metrics: str | None, model: Path, run_dir: Path) -> Config:
    """Return a run of a classifier that evaluates."""
    return dataclasses.replace(
        Config(
            ModelConfig(str(model), task="classification"),
            DataConfig(sources=sources, sequence=8, batch=2, eval_sources=sources),
            OptimConfig(lr=1e-3, steps=1),
        ),
        checkpoint=CheckpointConfig(dir=str(run_dir / "run" / "checkpoints"), best=best),
        eval=EvalConfig(metrics=metrics),
    )


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "dev.tsv"
    path.write_text("gj04\t1\t\tOne sentence.\n")
    return path


@pytest.fixture
def classifier(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Path:
    return save_model(tmp_path / "bert", with_special_tokens(tokenizer), "bert", "classification", num_labels=2)


def test_metrics_are_chosen_by_the_task_of_glue(classifier: Path, table: Path, tmp_path: Path) -> None:
    for name, task in GLUE.items():
        kind, expected = TASKS["classification" if task.labels else "regression"], GLUE_METRICS.get(name, ["accuracy"])
        assert choose_metrics(None, kind, Glue(f"glue:{name}:{table}").metrics) == ("eval_loss", *expected)
        other = TASKS["regression" if task.labels else "classification"]
        assert choose_metrics(None, other, Glue(f"glue:{name}:{table}").metrics) == ("eval_loss", *other.metrics)
    for chosen, expected in ((None, "matthews"), ("f1", "f1")):
        config = run_on(f"glue:cola:{table}", expected, chosen, classifier, tmp_path)
        assert prepare(config, Launch()).metrics == ("eval_loss", expected)


REFUSED = [
    (
        "matthews",
        None,
        'checkpoint.best="matthews" is not a metric of this run\'s evaluations; use "eval_loss" or "acc',
    ),
    ("losses", None, 'checkpoint.best="losses" is not a metric of this run\'s evaluations; use "eval_loss" or "accura'),
    ("eval_loss", "acuracy", 'eval.metrics="acuracy": unknown metric "acuracy"; use "eval_loss", "accuracy", "f1" or'),
    (None, "f1,pearson", 'eval.metrics="f1,pearson": unknown metric "pearson" for model.task=classification; use "ev'),
]
"""Values of checkpoint.best and eval.metrics, and the beginning of the message."""


def test_a_metric_that_is_not_evaluated_is_refused_with_those_that_are(
    classifier: Path, table: Path, tmp_path: Path
) -> None:
    for best, metrics, message in REFUSED:
        config = run_on(f"glue:rte:{table}", best, metrics, classifier, tmp_path)
        with pytest.raises(ValueError) as refused:
            prepare(config, Launch())
        assert str(refused.value).startswith(message)
