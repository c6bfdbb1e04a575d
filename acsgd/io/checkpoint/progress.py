"""How far a run has come, and what must be the same for another start to go on with it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from transformers import PreTrainedConfig

from acsgd.optim.loss_scale import LossScale

RECENT = 16
"""Losses that a spike is measured against."""
VOLATILE = ("transformers_version", "_name_or_path", "architectures", "dtype", "use_cache")
"""Keys of a model's config that say nothing of what it computes in training."""


@dataclass(frozen=True)
class Progress:
    """The part of a run's state that is no tensor. Data and dropout are functions of the seed and `step` alone."""

    step: int = 0
    """Optimizer steps done; the next one trains on batch `step`."""
    tokens: int = 0
    """Target tokens of these steps."""
    skipped: int = 0
    """Steps whose update was left out."""
    loss_scale: LossScale = field(default_factory=LossScale)
    recent: tuple[float, ...] = ()
    """Losses of the last RECENT updates."""
    eval_loss: float | None = None
    """Of the last evaluation."""
    best_eval_loss: float | None = None

    def __str__(self) -> str:
        loss = "" if self.loss is None else f", loss {self.loss:.4f}"
        return f"step {self.step}, {self.tokens:,} tokens{loss}"

    @property
    def loss(self) -> float | None:
        """Loss of the last update."""
        return self.recent[-1] if self.recent else None

    def after(self, loss: float | None, tokens: int, loss_scale: LossScale) -> Progress:
        """Return the progress after one more step; loss: None if its update was left out."""
        return replace(
            self,
            step=self.step + 1,
            tokens=self.tokens + tokens,
            skipped=self.skipped + (loss is None),
            loss_scale=loss_scale,
            recent=self.recent if loss is None else (*self.recent, loss)[-RECENT:],
        )

    def evaluated(self, loss: float) -> Progress:
        """Return the progress after an evaluation."""
        best = loss if self.best_eval_loss is None else min(loss, self.best_eval_loss)
        return replace(self, eval_loss=loss, best_eval_loss=best)

    def is_spike(self, loss: float, factor: float | None) -> bool:
        """Whether a loss is more than `factor` times the mean of the recent ones, of which there must be RECENT."""
        return factor is not None and len(self.recent) == RECENT and loss > factor * sum(self.recent) / RECENT

    def to_dict(self) -> dict[str, Any]:
        """Return what `from_dict` reads, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Progress:
        """Read what `to_dict` gave."""
        return cls(**{**fields, "loss_scale": LossScale(**fields["loss_scale"]), "recent": tuple(fields["recent"])})


@dataclass(frozen=True)
class Identity:
    """What makes two starts the same training: the model, and which text step t trains on."""

    model: dict[str, Any]
    """The model's config, without what does not change training."""
    tokenizer: str
    """A hash."""
    texts: str
    """A hash of the tokens of all sources."""
    data: dict[str, Any]
    """The keys of [data] on which the samples of a step depend."""

    @classmethod
    def of(cls, model: PreTrainedConfig, *, tokenizer: str, texts: str, data: Mapping[str, Any]) -> Identity:
        """Collect what identifies a run; `texts` may be long."""
        config = json.loads(model.to_json_string(use_diff=False))
        kept = {key: value for key, value in config.items() if key not in VOLATILE}
        return cls(kept, tokenizer, hashlib.sha256(texts.encode()).hexdigest(), dict(data))

    def to_dict(self) -> dict[str, Any]:
        """Return what `from_dict` reads, for JSON."""
        return asdict(self)

    def digest(self) -> str:
        """Return a hash that changes with any of it."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Identity:
        """Read what `to_dict` gave."""
        return cls(**fields)

    def difference(self, saved: Identity) -> str | None:
        """Say in one sentence why a run cannot go on from what another has saved; None if it can."""
        ours, theirs = self.model["model_type"], saved.model["model_type"]
        if ours != theirs:
            return f'it is of family "{theirs}", the run\'s model of family "{ours}"'
        if differing := _differing(self.model, saved.model):
            return f"it is of another model: {differing}"
        if self.tokenizer != saved.tokenizer:
            return "it was trained with another tokenizer than the run's model has"
        if differing := _differing(self.data, saved.data):
            return f"its batches were others: {differing}"
        if self.texts != saved.texts:
            return "the texts of data.sources are not those it was trained on"
        return None


def _differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """List the first keys whose values differ."""
    keys = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
    return ", ".join(f"{key} is {theirs.get(key)} there and {ours.get(key)} here" for key in keys[:3])
