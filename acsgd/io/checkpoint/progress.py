"""State of a run besides tensors: its progress, its identity, and the options it trains with."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from transformers import PreTrainedConfig

from acsgd.config.options import Config
from acsgd.errors import CorruptFileError
from acsgd.io.checkpoint.source_identity import SourceIdentity, differing_sources, differing_weights
from acsgd.io.data.rows.streamed import StreamState
from acsgd.io.files.fields import Finite, Natural, from_json
from acsgd.metrics import EVAL_LOSS, Scores, is_better
from acsgd.optim.loss_scale import LossScale
from acsgd.shards.disk import ShardDirectory
from acsgd.shards.manifest import MANIFEST

WEIGHTS = "weights of data.sources"
"""Key in RunIdentity.data of the slots of each source per block."""
ADAPTER = "adapter.spec"
"""Key in RunIdentity.data of the adapter, which is absent if there is none."""
RECENT = 16
"""Number of losses whose mean a loss spike is measured against."""
VOLATILE = ("transformers_version", "_name_or_path", "architectures", "dtype", "use_cache")
"""Keys of a model config that do not change training."""
RECORDED = (
    *("model.dtype", "model.recompute", "model.freeze", "model.quantize", "model.dropout_mask"),
    *("optim", "pp", "dp"),
)
"""Options and sections of options that a checkpoint records: those that change training, besides RunIdentity."""


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


def _check_model_type(model: dict[str, Any]) -> None:
    if not isinstance(model.get("model_type"), str):
        raise ValueError('"model_type" is missing')


@dataclass(frozen=True)
class RunIdentity:
    """What a run must have in common with a checkpoint to resume from it: the model and the samples of each step."""

    model: Annotated[dict[str, Any], _check_model_type]
    """Config of the model, without VOLATILE keys."""
    tokenizer: str
    """Hash of the tokenizer."""
    texts: str
    """Hash of the tokens of all sources."""
    data: dict[str, Any]
    """Options on which the samples of a step depend."""
    sources: tuple[SourceIdentity, ...] = ()
    """Sources in their order; empty in checkpoints of older versions."""
    reading: dict[str, str] = field(default_factory=dict)
    """Options on which the tokens of all sources depend; empty in checkpoints of older versions."""

    @classmethod
    def of(
        cls,
        model: PreTrainedConfig,
        *,
        tokenizer: str,
        texts: str,
        data: Mapping[str, Any],
        sources: Iterable[SourceIdentity] = (),
        reading: Mapping[str, str] = MappingProxyType({}),
    ) -> RunIdentity:
        """Return the identity of a run. texts: a string of any length, which is hashed."""
        config = json.loads(model.to_json_string(use_diff=False))
        kept = {key: value for key, value in config.items() if key not in VOLATILE}
        digest = hashlib.sha256(texts.encode()).hexdigest()
        return cls(kept, tokenizer, digest, dict(data), tuple(sources), dict(reading))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)

    def digest(self) -> str:
        """Return a hash of the fields without those that only say why `texts` differ."""
        fields = {key: value for key, value in self.to_dict().items() if key not in ("sources", "reading")}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

    def difference(self, saved: RunIdentity) -> str | None:
        """Return a clause that says why this run cannot resume from a checkpoint of `saved`; None if it can."""
        ours, theirs = self.model["model_type"], saved.model["model_type"]
        if ours != theirs:
            return f'its model is of family "{theirs}", the run\'s of family "{ours}"'
        if differing := _differing(self.model, saved.model):
            return f"its model differs: {differing}"
        if self.tokenizer != saved.tokenizer:
            return "its tokenizer differs from the run's"
        if differing := _differing(*({ADAPTER: each.data.get(ADAPTER)} for each in (self, saved))):
            return f"it trains other parameters: {differing}"
        if differing := _differing(_without_weights(self.data), _without_weights(saved.data)):
            return f"its batches differ: {differing}"
        if self.texts != saved.texts:
            return self._differing_texts(saved)
        weights = differing_weights(self.sources, self.data.get(WEIGHTS), saved.data.get(WEIGHTS))
        return weights and f"its batches differ: {weights}"

    def _differing_texts(self, saved: RunIdentity) -> str:
        """Return a clause that says how the sources differ."""
        if saved.reading and (differing := _differing(self.reading, saved.reading)):
            return f"the records of data.sources are read differently: {differing}"
        named = differing_sources(self.sources, saved.sources) if saved.sources else None
        return named or "the text of data.sources differs from the text it was trained on"


def _without_weights(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key != WEIGHTS}


def _differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """List the first 3 keys whose values differ."""
    keys = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
    return ", ".join(f"{key} is {theirs.get(key)} in the checkpoint, {ours.get(key)} in the run" for key in keys[:3])


@dataclass(frozen=True)
class RunState:
    """State of a run in the manifest of a checkpoint."""

    progress: Progress
    identity: RunIdentity
    options: dict[str, str | None] = field(default_factory=dict)
    """Options that it was trained with, as of `recorded_options`; empty in checkpoints of older versions."""
    replicas: Natural | None = None
    """Number of replicas that saved it; None in checkpoints of older versions."""
    best: bool = False
    """Whether its value of checkpoint.best was the best so far."""
    origin: dict[str, str] = field(default_factory=dict)
    """Names of the "model" and the "sources" of the run, without directories; for the model card."""
    streams: tuple[StreamState | None, ...] = ()
    """Where each source of data.sources is read on, None if it is not streamed; empty if none is."""

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
    options = {
        f"{section}.{key}": None if value is None else str(value)
        for section, values in asdict(config).items()
        for key, value in values.items()
    }
    return {key: value for key, value in options.items() if key in RECORDED or key.partition(".")[0] in RECORDED}


def changed_options(saved: Mapping[str, str | None], present: Mapping[str, str | None]) -> list[str]:
    """List the options that both record, with different values: "optim.lr: 0.001 -> 0.0005"."""
    both = [key for key in present if key in saved and saved[key] != present[key]]
    return [f"{key}: {_value(saved[key])} -> {_value(present[key])}" for key in both]


def _value(value: str | None) -> str:
    return "not set" if value is None else value
