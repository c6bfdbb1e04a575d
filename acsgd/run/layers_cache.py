"""Layers of models on disk: derived and compared with the whole model once per config and version of the libraries."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedConfig

from acsgd.errors import CorruptFileError
from acsgd.fields import from_json
from acsgd.io.cache import open_cached
from acsgd.layers.description import ModelLayers
from acsgd.layers.verify import Verification
from acsgd.notes import print_note, report_if_slow
from acsgd.tasks import Task

FORMAT = 1
"""Version of the derivation; part of every key."""


@dataclass(frozen=True)
class VerifiedLayers:
    """Layers that were compared with the whole model."""

    layers: ModelLayers
    verification: Verification


class LayersCache:
    """Verified layers of models for one task, a file for each config."""

    def __init__(self, directory: Path, task: Task) -> None:
        self._directory = directory
        self._task = task

    def find(self, config: PreTrainedConfig) -> ModelLayers | None:
        """Return the layers of a model; None if they are not in the cache. Writes nothing."""
        try:
            return _read(self._path(config)).layers
        except (OSError, CorruptFileError):
            return None

    def verify(self, config: PreTrainedConfig, layers: ModelLayers, *, reports_wait: bool) -> None:
        """Compare the layers of a model with the whole model and keep them, unless they are in the cache.

        Called by every process of a host; one of them compares. Raises LayersError if they differ.
        """

        def compare(target: Path) -> None:
            with report_if_slow(print_note, lambda: f"comparing the layers of {config.model_type} with the model"):
                verified = VerifiedLayers(layers, self._task.verify(config, layers))
            target.write_text(json.dumps(asdict(verified)))

        open_cached(self._path(config), compare, _read, reports_wait=reports_wait)

    def _path(self, config: PreTrainedConfig) -> Path:
        parts = [
            FORMAT,
            self._task.name,
            config.to_json_string(use_diff=False),
            transformers.__version__,
            torch.__version__,
        ]
        return self._directory / f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}.json"


def _read(path: Path) -> VerifiedLayers:
    """Read an entry. Raises CorruptFileError."""
    try:
        return from_json(VerifiedLayers, json.loads(path.read_bytes()))
    except ValueError as error:
        raise CorruptFileError(path, f"does not hold the layers of a model: {error}") from None
