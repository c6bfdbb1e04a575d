"""State of a run besides tensors: its progress, its identity, and the options it trains with."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from acsgd.config.options import Config
from acsgd.errors import CorruptFileError
from acsgd.io.checkpoint.identity import RunIdentity
from acsgd.io.data.stream.state import StreamState
from acsgd.io.files.fields import Finite, Natural, from_json
from acsgd.metrics import EVAL_LOSS, Scores, is_better
from acsgd.optim.gradient_scale import LossScale
from acsgd.shards.disk import FORMATS, ShardDirectory
from acsgd.shards.manifest import MANIFEST

RECENT = 16
"""Number of losses whose mean a loss spike is measured against."""
RECORDED = ("model", "optim", "pp", "dp")
"""Sections of options that a checkpoint records: those that change training."""
IN_IDENTITY = ("model.name", "model.task", "model.init")
"""Options of these sections that it does not: the config of the model and the weights take their place."""


@dataclass(frozen=True)
class Progress:
    """State of a run besides tensors. Data and dropout need no state: they are functions of the seed and `step`."""

    step: Natural = 0
    """Number of completed optimizer steps; the next one trains on batch `step`."""
    tokens: Natural = 0
    """Number of target tokens of these steps."""
    skipped: Natural = 0
    """Number of steps whose update was skipped."""
    loss_scale: LossScale = field(default_factory=LossScale)
    recent: tuple[Finite, ...] = ()
    """Losses of the last RECENT updates."""
    is_spike: bool = False
    """Whether the loss of the last step was a spike."""
    codecs: tuple[tuple[str, ...], ...] = ()
    """Codecs that pp.compress has chosen, by replica: of activations by link, of their gradients, and of rows of tied
    tables."""
    evaluation: dict[str, Finite] = field(default_factory=dict)
    """Metrics of the last evaluation by name, without those that are not finite."""
    best: dict[str, Finite] = field(default_factory=dict)
    """Best value so far of each metric that was evaluated."""

    def __str__(self) -> str:
        loss = "" if self.loss is None else f", loss {self.loss:.4f}"
        return f"step {self.step}, {self.tokens:,} tokens{loss}"

    @property
    def loss(self) -> float | None:
        """Loss of the last update."""
        return self.recent[-1] if self.recent else None

    def after(self, loss: float | None, tokens: int, loss_scale: LossScale, *, spike: float | None = None) -> Progress:
        """Return the progress after one more step.

        loss: None if its update was skipped. spike: loss spike threshold, a multiple of the mean of the last RECENT
        losses; None = no detection.
        """
        return replace(
            self,
            step=self.step + 1,
            tokens=self.tokens + tokens,
            skipped=self.skipped + (loss is None),
            loss_scale=loss_scale,
            recent=self.recent if loss is None else (*self.recent, loss)[-RECENT:],
            is_spike=self._is_spike(loss, spike),
        )

    def _is_spike(self, loss: float | None, factor: float | None) -> bool:
        """Return whether `loss` exceeds `factor` times the mean of the last RECENT losses. False if there are fewer."""
        if loss is None or factor is None or len(self.recent) < RECENT:
            return False
        return loss > factor * sum(self.recent) / RECENT

    @property
    def eval_loss(self) -> float | None:
        """Loss of the last evaluation."""
        return self.evaluation.get(EVAL_LOSS)

    def evaluated(self, scores: Scores) -> Progress:
        """Return the progress after an evaluation."""
        finite = {name: value for name, value in scores.items() if math.isfinite(value)}
        better = {name: value for name, value in finite.items() if is_better(name, value, self.best.get(name))}
        return replace(self, evaluation=finite, best={**self.best, **better})

    def improves(self, before: Progress, metric: str | None) -> bool:
        """Return whether the best value of a metric is another one than before. False for None, no metric."""
        return metric is not None and self.best.get(metric) != before.best.get(metric)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class RunState:
    """State of a run in the manifest of a checkpoint."""

    progress: Progress
    identity: RunIdentity
    options: dict[str, str | None] = field(default_factory=dict)
    """Options that it was trained with, see `recorded_options`; empty in checkpoints of older versions."""
    replicas: Natural | None = None
    """Number of replicas that saved it; None in checkpoints of older versions."""
    best: bool = False
    """Whether its value of checkpoint.best was the best so far."""
    origin: dict[str, str] = field(default_factory=dict)
    """Names of the "model" and the "sources" of the run, without directories; for the model card."""
    streams: tuple[StreamState | None, ...] = ()
    """Where each source of data.sources is read on, None if it is not streamed; empty if none is."""
    unevaluated: dict[str, Any] | None = None
    """Metrics of the last step, a line of metrics.jsonl, if its evaluation was left on a stop signal."""
    held_out: str = ""
    """Hash of the evaluation data, on which `Progress.best` depends; empty without any, and in older versions."""
    data: dict[str, Any] = field(default_factory=dict)
    """Options of [data] and eval.metrics by their names, and FORMATS, for commands that read records as the run does;
    empty in checkpoints of older versions."""

    @property
    def recorded(self) -> dict[str, Any]:
        """All options that are recorded, by their names."""
        return {**self.identity.data, **self.options, **self.data}

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)

    @classmethod
    def of(cls, shards: ShardDirectory) -> RunState | None:
        """Return the state of the run in a manifest; None for a converted model.

        Raises CorruptFileError if a field is missing or wrong.
        """
        if shards.manifest.run is None:
            return None
        try:
            state = from_json(cls, _with_present_names(shards.manifest.run))
            if state.progress.step != shards.step:
                raise ValueError(f"progress.step is {state.progress.step}, step is {shards.step}")
        except ValueError as error:
            raise CorruptFileError(
                shards.path / MANIFEST, f"is invalid: run.{error}; restore it from a copy, or remove {shards.path}"
            ) from None
        return state


def _with_present_names(run: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a run with the fields of Progress; older versions kept the evaluation loss alone."""
    progress = run.get("progress")
    if not isinstance(progress, dict) or "best_eval_loss" not in progress:
        return run
    former = {"eval_loss": "evaluation", "best_eval_loss": "best"}
    kept = {name: value for name, value in progress.items() if name not in former}
    losses = {present: progress.get(name) for name, present in former.items()}
    present = {name: {} if loss is None else {EVAL_LOSS: loss} for name, loss in losses.items()}
    return {**run, "progress": {**kept, **present}}


def origin_of(config: Config) -> dict[str, str]:
    """Return the names of a run's model and sources, without directories: "a/b.txt:0.3" becomes "b.txt:0.3"."""
    model = Path(config.model.name)
    return {
        "model": model.resolve().name if model.exists() else config.model.name,
        "sources": re.sub(r"[^,]*/", "", config.data.sources),
    }


def recorded_options(config: Config) -> dict[str, str | None]:
    """Return the options that change training as text, None where an option is not set; without RunIdentity's."""
    return {
        name: None if value is None else str(value)
        for section in RECORDED
        for key, value in asdict(getattr(config.common, section)).items()
        if (name := f"{section}.{key}") not in IN_IDENTITY
    }


def data_options(config: Config, formats: Collection[str]) -> dict[str, Any]:
    """Return `RunState.data` of a configuration. formats: of the sources."""
    given = {f"data.{name}": value for name, value in asdict(config.data).items()}
    return given | {"eval.metrics": config.eval.metrics, FORMATS: sorted(formats)}


def changed_options(saved: Mapping[str, str | None], present: Mapping[str, str | None]) -> list[str]:
    """List the options that both record, with different values: "optim.lr: 0.001 -> 0.0005"."""
    both = [key for key in present if key in saved and saved[key] != present[key]]
    return [f"{key}: {_value(saved[key])} -> {_value(present[key])}" for key in both]


def _value(value: str | None) -> str:
    return "not set" if value is None else value
