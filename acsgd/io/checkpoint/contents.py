"""Check of the tensors of a checkpoint against those that its model, optimizer and data-parallel mode declare.

The model declares the weights, `OptimizerSpec.states` the state of the optimizer, `Mode.states` the state of each
replica. The check reads every value: a tensor whose shape is not that of its weight would corrupt memory in a fused
optimizer; one that is missing or not finite would change training without an error.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from acsgd.config.adapters import parse_adapter
from acsgd.config.spec import from_spec
from acsgd.errors import CorruptFileError
from acsgd.io.checkpoint.progress import RunState
from acsgd.model_classes import MODEL_CLASSES
from acsgd.shards.check import FLOATING, Expected, check_tensors, first_names
from acsgd.shards.disk import ShardDirectory
from acsgd.shards.layer_tensors import describe_tensors
from acsgd.shards.manifest import MANIFEST, Manifest, ModelTensors
from acsgd.shards.weights import StateTensor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from acsgd.dp.resize import ReplicaState
    from acsgd.dp.sync import Mode
    from acsgd.optim.base import OptimizerSpec

LOCAL_OPTIMIZER = "optimizer."
"""Prefix of the names of optimizer state that is saved per replica, since replicas have local weights."""

DEFAULT_OPTIMIZER = "adamw"
"""Optimizer of checkpoints that do not record it."""


@dataclass(frozen=True)
class Contents:
    """The tensors of a shard directory, layer by layer."""

    shards: ShardDirectory
    tensors: ModelTensors
    """Those of the model."""
    run: RunState | None
    """State of the run; None for a converted model, which has weights only."""
    optimizer: Sequence[StateTensor] | None
    """State of the optimizer that saved the checkpoint; None = unknown."""
    mode: Sequence[ReplicaState] | None
    """State of the data-parallel mode that saved the checkpoint; None = unknown."""

    @classmethod
    def of(cls, shards: ShardDirectory, tensors: ModelTensors) -> Contents:
        """Declare what a shard directory must hold. tensors: of the model.

        Raises CorruptFileError if its manifest does not list exactly the layers of the model.
        """
        layers, manifest = {layer.name for layer in shards.manifest.model.layers}, shards.manifest
        if differing := sorted((layers ^ manifest.layers.keys()) | (manifest.constants.keys() - layers)):
            raise CorruptFileError(
                shards.path / MANIFEST, f"is invalid: its layers are not those of the model ({first_names(differing)})"
            )
        run = RunState.of(shards)
        if run is None:
            return cls(shards, tensors, None, (), ())
        return cls(shards, tensors, run, _optimizer_states(run), _mode_states(run))

    @functools.cached_property
    def _hidden_matrices(self) -> frozenset[str]:
        return frozenset(self.tensors.hidden_matrices)

    def _without_memory(self, keys: Iterable[str]) -> dict[str, Tensor]:
        """Return tensors of the model on the meta device."""
        return {key: torch.empty(self.tensors.shapes[key], device="meta") for key in keys}

    def check(self, index: int) -> None:
        """Verify the files of a layer, and check key, shape, dtype and values of each tensor in them.

        Raises CorruptFileError that names the file and the first tensor that is wrong.
        """
        manifest, path, shards = self.shards.manifest, self.shards.path, self.shards
        layer = manifest.model.layers[index]
        read, constants = functools.cache(shards.read), shards.read_constants(layer.name)
        replicas = shards.replica_files_of(layer.name)

        frozen, own_constants = {*manifest.model.frozen}, {*manifest.model.own_constants(index)}
        weights = self._without_memory(key for key in layer.parameters if key not in frozen)
        own = [*manifest.model.own_parameters(index), *layer.buffers]
        originals = self._without_memory(key for key in own if key not in own_constants)
        is_local = any(
            key.startswith(LOCAL_OPTIMIZER) for files in replicas for file in files.values() for key in read(file)
        )
        has_masters = self.run is None or self.run.options.get("optim.masters") != "none"
        saved_as, shapes = None if has_masters else torch.bfloat16, self.tensors.shapes
        expected = {key: Expected(shapes[key], is_trained=key not in own_constants, dtype=saved_as) for key in own}
        if constants:
            file = path / manifest.constants[layer.name].file
            check_tensors(file, constants, {key: expected.pop(key) for key in constants}, FLOATING, is_complete=True)
        if not is_local:
            expected |= self._expected_optimizer(originals, originals)
        dtypes, files = FLOATING if self.run is None else {torch.float32}, shards.files_of(layer.name)
        for name, part in shards.split(layer.name, expected).items():
            tensors = read(files[name])
            check_tensors(path / files[name].file, tensors, part, dtypes, is_complete=self.optimizer is not None)

        expected = self._expected_mode(weights, originals)
        if is_local:
            expected |= self._expected_optimizer(weights, originals, prefix=LOCAL_OPTIMIZER)
        for name, part in shards.split(layer.name, expected).items():
            self._check_replicas(name, part, [read(each[name]) for each in replicas if name in each])

    def _check_replicas(
        self, name: str, expected: Mapping[str, Expected], replicas: Sequence[Mapping[str, Tensor]]
    ) -> None:
        """Check the tensors of all replicas of a layer or of a tied weight with files of its own. name: its name."""
        listed = self.shards.manifest.replicas.get(name, [])
        self._check_count(name, len(listed), is_required=any(each.required for each in expected.values()))
        is_complete = self.mode is not None and self.optimizer is not None
        of_file = {self.shards.path / entry.file: tensors for entry, tensors in zip(listed, replicas, strict=True)}
        for file, tensors in of_file.items():
            check_tensors(file, tensors, expected, {torch.float32}, is_complete=is_complete)
        _check_equal_keys(of_file)

    def _check_count(self, name: str, count: int, *, is_required: bool) -> None:
        """Check the number of replicas whose state is listed for a layer or a tied weight."""
        replicas = self.run.replicas if self.run else None
        if replicas is not None and count != replicas and (count or is_required):
            raise CorruptFileError(
                self.shards.path / MANIFEST,
                f"is invalid: it lists the state of {count} replicas for {name}, but {replicas} saved it",
            )

    def _expected_optimizer(
        self, weights: Mapping[str, Tensor], originals: Collection[str], prefix: str = ""
    ) -> dict[str, Expected]:
        """Return name and properties of each tensor of the optimizer. originals: weights that are not tied copies."""
        has_updates = self.run is not None and self.run.progress.step > self.run.progress.skipped
        hidden = self._hidden_matrices
        return {
            f"{prefix}{state.name}/{key}": Expected(
                shape, required=has_updates and key in originals, non_negative=state.non_negative
            )
            for state in self.optimizer or ()
            for key, weight in weights.items()
            if (shape := state.shape_for(weight, is_hidden_matrix=key in hidden)) is not None
        }

    def _expected_mode(self, weights: Mapping[str, Tensor], originals: Collection[str]) -> dict[str, Expected]:
        """Return name and properties of each tensor of the data-parallel mode."""
        several = self.run is not None and self.run.replicas is not None and self.run.replicas > 1
        return {
            f"{state.name}/{key}": Expected(
                shape, required=several and state.required and key in originals, may_be_nan=state.may_be_nan
            )
            for state in self.mode or ()
            for key, weight in weights.items()
            if (shape := state.shape(weight)) is not None
        }


def build_tensors(manifest: Manifest, config: PreTrainedConfig) -> ModelTensors:
    """Return the tensors of the model of a manifest, by building it. config: that of the model."""
    from acsgd.adapters.inject import build_adapted  # imports transformers' code of models, which takes seconds

    model = build_adapted(MODEL_CLASSES[manifest.task], config, parse_adapter(manifest.adapter))
    return describe_tensors(model, manifest.model, manifest.model_files)


def optimizer_spec(run: RunState) -> str:
    """Return the value of optim.name of the run that saved a checkpoint."""
    return run.options.get("optim.name") or DEFAULT_OPTIMIZER


def _optimizer_states(run: RunState) -> Sequence[StateTensor] | None:
    """Return the state of the optimizer that saved a checkpoint; None if this installation does not have it."""
    from acsgd.optim import OPTIMIZERS  # as in `_mode_states`

    try:
        optimizer: OptimizerSpec = from_spec(optimizer_spec(run), OPTIMIZERS, key="optim.name")
    except ValueError:
        return None
    return optimizer.states


def _mode_states(run: RunState) -> Sequence[ReplicaState] | None:
    """Return the state of the data-parallel mode that saved a checkpoint; None if it is not recorded or not known."""
    from acsgd.dp import MODES  # takes a tenth of a second, which a converted model need not wait for

    try:
        mode: Mode = from_spec(run.options.get("dp.mode") or "", MODES, key="dp.mode")
    except ValueError:
        return None
    return mode.states


def _check_equal_keys(replicas: Mapping[Path, Mapping[str, Tensor]]) -> None:
    """Raise CorruptFileError if a replica lacks a tensor that another one has."""
    every = set().union(*replicas.values())
    for path, tensors in replicas.items():
        if missing := sorted(every - tensors.keys()):
            raise CorruptFileError(path, f"is invalid: it lacks {first_names(missing)}, which other replicas have")
