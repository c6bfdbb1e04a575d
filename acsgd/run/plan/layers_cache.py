"""What is known of models, on disk: once per config and version of the libraries, layers are derived, compared with the
whole model, and their costs estimated."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedConfig

from acsgd.errors import CorruptFileError
from acsgd.io.files.cache import open_cached
from acsgd.io.files.fields import from_json
from acsgd.layers.description import ModelLayers, Verification
from acsgd.model_classes import ModelClass
from acsgd.notes import print_note, report_if_slow
from acsgd.shards.plan import layer_costs

FORMAT = 7
"""Version of the derivation and of the estimate of costs; part of every key."""


@dataclass(frozen=True)
class VerifiedLayers:
    """Layers that were compared with the whole model."""

    layers: ModelLayers
    verification: Verification


@dataclass(frozen=True)
class LayerCosts:
    """Costs of the layers of a model, first to last."""

    costs: tuple[float, ...]


class LayersCache:
    """Verified layers of models of one class, and their costs; a file for each config."""

    def __init__(self, directory: Path, model_class: ModelClass) -> None:
        self.directory = directory
        self._class = model_class

    def find(self, config: PreTrainedConfig) -> ModelLayers | None:
        """Return the layers of a model; None if they are not in the cache. Writes nothing."""
        try:
            return _read(self._path(config)).layers
        except (OSError, CorruptFileError):
            return None

    def verify(self, config: PreTrainedConfig, layers: ModelLayers, *, reports_wait: bool) -> Verification:
        """Compare the layers of a model with the whole model and keep them, unless they are in the cache.

        Called by every process of a host; one of them compares. Raises LayersError if they differ.
        """

        def compare(target: Path) -> None:
            with report_if_slow(print_note, lambda: f"comparing the layers of {config.model_type} with the model"):
                verified = VerifiedLayers(layers, self._class.verify(config, layers))
            target.write_text(json.dumps(asdict(verified)))

        return open_cached(self._path(config), compare, _read, reports_wait=reports_wait).verification

    def costs(
        self, config: PreTrainedConfig, layers: ModelLayers, sizes: Mapping[str, int], *, device: str
    ) -> tuple[float, ...]:
        """Return the costs of layers, estimated by `layer_costs` if they are not in the cache. Writes nothing."""
        try:
            return _read_costs(self._costs_path(config, layers, sizes, device), len(layers.layers))
        except (OSError, CorruptFileError):
            return tuple(layer_costs(self._class, config, layers, sizes, device=device))

    def keep_costs(
        self,
        config: PreTrainedConfig,
        layers: ModelLayers,
        sizes: Mapping[str, int],
        costs: tuple[float, ...],
        *,
        device: str,
    ) -> None:
        """Keep the costs of layers, unless they are in the cache. Called by every process of a host."""

        def write(target: Path) -> None:
            target.write_text(json.dumps(asdict(LayerCosts(costs))))

        path = self._costs_path(config, layers, sizes, device)
        open_cached(path, write, lambda path: _read_costs(path, len(layers.layers)), reports_wait=False)

    def _path(self, config: PreTrainedConfig, *more: object) -> Path:
        """Return the file of a model. more: what its content depends on, besides config and versions of libraries."""
        parts = [
            FORMAT,
            self._class.name,
            config.to_json_string(use_diff=False),
            transformers.__version__,
            torch.__version__,
            *more,
        ]
        return self.directory / f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}.json"

    def _costs_path(self, config: PreTrainedConfig, layers: ModelLayers, sizes: Mapping[str, int], device: str) -> Path:
        return self._path(config, layers, sorted(sizes.items()), device)


def _read(path: Path) -> VerifiedLayers:
    """Read an entry. Raises CorruptFileError."""
    try:
        return from_json(VerifiedLayers, json.loads(path.read_bytes()))
    except ValueError as error:
        raise CorruptFileError(path, f"does not hold the layers of a model: {error}") from None


def _read_costs(path: Path, layers: int) -> tuple[float, ...]:
    """Read the costs of a number of layers. Raises CorruptFileError."""
    try:
        costs = from_json(LayerCosts, json.loads(path.read_bytes())).costs
    except ValueError as error:
        raise CorruptFileError(path, f"does not hold the costs of layers: {error}") from None
    if len(costs) != layers or not all(cost >= 0 and math.isfinite(cost) for cost in costs):
        raise CorruptFileError(path, f"does not hold the costs of {layers} layers")
    return costs
