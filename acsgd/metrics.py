"""Metrics of an evaluation, by name: numbers computed from the loss, or from predictions and labels.

To add one, write a function of an `Outcome` and one line in METRICS.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from acsgd.config.spec import suggest

EVAL_LOSS = "eval_loss"
"""Name of the metric that every evaluation has."""
MAX_EXPONENT = 700.0
"""Loss above which the perplexity is not finite in fp64."""

Kind = Literal["tokens", "classes", "numbers"]
"""Kind of predictions."""
FloatArray = NDArray[np.float64]
Scores = Mapping[str, float]
"""Value of each metric by its name."""


class Outcome(NamedTuple):
    """What an evaluation found on the whole set."""

    loss: float
    """Mean loss over the target tokens, or over the examples."""
    predictions: FloatArray
    """Class, or value of a regression, of each example; empty for tasks that predict tokens."""
    labels: FloatArray
    """Label of each example."""


class Metric(NamedTuple):
    """A number computed from an outcome."""

    meaning: str
    kind: Kind | None
    """Kind of the predictions that it is for; None = any."""
    compute: Callable[[Outcome], float]
    """Returns the value; NaN where it is not defined."""
    lower_is_better: bool = False


def _perplexity(outcome: Outcome) -> float:
    return math.exp(min(outcome.loss, MAX_EXPONENT))


def _accuracy(outcome: Outcome) -> float:
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(outcome.labels, outcome.predictions))


def _f1(outcome: Outcome) -> float:
    from sklearn.metrics import f1_score

    is_binary = max(outcome.labels.max(initial=0), outcome.predictions.max(initial=0)) <= 1
    return float(f1_score(*_true_first(outcome), average="binary" if is_binary else "macro", zero_division=0.0))


def _matthews(outcome: Outcome) -> float:
    from sklearn.metrics import matthews_corrcoef

    if _is_constant(outcome):  # 0 by convention; scikit-learn may warn
        return 0.0
    return float(matthews_corrcoef(*_true_first(outcome)))


def _pearson(outcome: Outcome) -> float:
    from scipy.stats import pearsonr

    return _correlation(pearsonr, outcome)


def _spearman(outcome: Outcome) -> float:
    from scipy.stats import spearmanr

    return _correlation(spearmanr, outcome)


def _true_first(outcome: Outcome) -> tuple[FloatArray, FloatArray]:
    return outcome.labels, outcome.predictions


def _correlation(correlate: Callable[[FloatArray, FloatArray], Any], outcome: Outcome) -> float:
    """Return a correlation; NaN where it is not defined, of which scipy warns."""
    return math.nan if _is_constant(outcome) else float(correlate(*_true_first(outcome)).statistic)


def _is_constant(outcome: Outcome) -> bool:
    """Return whether the labels or the predictions are all equal."""
    return min(len(np.unique(values)) for values in _true_first(outcome)) < 2


METRICS: Mapping[str, Metric] = {
    EVAL_LOSS: Metric(
        "Mean loss over the target tokens, or the examples.",
        None,
        lambda outcome: outcome.loss,
        lower_is_better=True,
    ),
    "perplexity": Metric("Exponential of the mean loss.", "tokens", _perplexity, lower_is_better=True),
    "accuracy": Metric("Fraction of the examples whose class is predicted.", "classes", _accuracy),
    "f1": Metric("F1 score of class 1; of more than two classes, the mean of their F1 scores.", "classes", _f1),
    "matthews": Metric("Matthews correlation coefficient of the classes.", "classes", _matthews),
    "pearson": Metric("Pearson correlation of predictions and labels.", "numbers", _pearson),
    "spearman": Metric("Spearman rank correlation of predictions and labels.", "numbers", _spearman),
}
"""Metrics by name; numbers of classes and correlations are those of scikit-learn and scipy."""


class TaskMetrics(Protocol):
    """What a task says of its metrics."""

    @property
    def name(self) -> str:
        """Name in model.task."""
        ...

    @property
    def predictions(self) -> Kind | None:
        """Kind of its predictions; None = no metric but the loss is for them."""
        ...

    @property
    def metrics(self) -> Sequence[str]:
        """Metrics besides the loss, unless others are chosen."""
        ...


def choose_metrics(chosen: str | None, task: TaskMetrics, suggested: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the names of the metrics of a run, EVAL_LOSS first.

    chosen: eval.metrics; suggested: metrics of the data, used if there is no choice and the task has them. Raises
    ValueError if a chosen metric is unknown or not of the task.
    """
    known = {name: metric for name, metric in METRICS.items() if metric.kind in (None, task.predictions)}
    if chosen is None:
        names = [name for name in suggested if name in known] or task.metrics
    else:
        names = [name.strip() for name in chosen.split(",") if name.strip()]
    for name in names:
        if name not in known:
            if not {*name.split()} - {*known}:
                raise ValueError(f'eval.metrics="{chosen}": write commas between names: {",".join(name.split())}')
            of_task = f" for model.task={task.name}" if name in METRICS else ""
            raise ValueError(f'eval.metrics="{chosen}": unknown metric "{name}"{of_task}{suggest(name, known)}')
    return tuple(dict.fromkeys((EVAL_LOSS, *names)))


def compute_metrics(names: Sequence[str], outcome: Outcome) -> dict[str, float]:
    """Return metrics of an outcome by name."""
    return {name: METRICS[name].compute(outcome) for name in names}


def is_better(name: str, value: float, former: float | None) -> bool:
    """Return whether a value of a metric is better than a former one; NaN and infinities never are. None = no value."""
    if not math.isfinite(value):
        return False
    return former is None or (value < former if METRICS[name].lower_is_better else value > former)


def describe(scores: Scores) -> str:
    """Return the values for the user: "held-out loss 0.4312, matthews 0.5123"."""
    return ", ".join(f"{'held-out loss' if name == EVAL_LOSS else name} {value:.4f}" for name, value in scores.items())
