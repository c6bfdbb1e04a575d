"""All that a rank trains, layer by layer, on its way into a checkpoint and out of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from acsgd.dp.exchange.local_weights import OWN
from acsgd.dp.modes.powersgd import GRADIENT_ERROR
from acsgd.io.checkpoint.progress import Progress
from acsgd.io.checkpoint.resume import Checkpoint
from acsgd.io.checkpoint.saver import LayerState
from acsgd.optim.base import Optimizer
from acsgd.optim.loss_scale import LossScale
from acsgd.pp.stage import Stage
from acsgd.run.build import build_session
from acsgd.run.inputs import Inputs
from acsgd.run.job import Job
from acsgd.run.session import Session
from acsgd.shards.disk import ShardDirectory, StoredFile
from acsgd.shards.layers import LayerShard, stored_keys, tied_keys
from acsgd.shards.weights import Weight, WeightState
from acsgd.topology import Groups

MOMENTS = "optimizer."
"""How names begin of what the optimizer remembers of weights that each replica has of its own."""


class Start(NamedTuple):
    """Where a run begins, or goes on."""

    worker: Session
    progress: Progress
    newest: Path | None
    """The checkpoint it goes on from."""
    told: list[str]
    """What was found, on rank 0."""


def start(job: Job, inputs: Inputs, groups: Groups) -> Start:
    """Build this rank's worker, going on from the newest sound checkpoint if there is any.

    Called by every rank. Raises RunError if there are checkpoints and none that may be used is sound.
    """
    found = inputs.candidates
    checkpoint = found.choose(groups, partial(files_to_read, job), timeout_s=job.disk_timeout_s)
    told = [f"removed {path.name}: its writing never ended" for path in found.directory.leftovers()]
    if job.topology.rank == 0:
        told += found.set_aside()
        found.mark_best()
    source = checkpoint.shards if checkpoint else inputs.source
    assert source is not None
    worker = build_session(job, source, groups, inputs.cache_plan)
    if checkpoint is None:
        return Start(worker, Progress(loss_scale=LossScale.of(job.config)), None, told)
    progress = restore(worker, checkpoint)
    told.append(f"going on from {checkpoint.path}: {progress}")
    return Start(worker, progress, checkpoint.path, told)


def layer_states(worker: Session) -> list[LayerState]:
    """Return the state of every layer this rank holds, not copied."""
    return [state for stage in worker.stages.values() for state in _stage_states(stage, worker.optimizer)]


def _stage_states(stage: Stage, optimizer: Optimizer) -> Iterator[LayerState]:
    shared, remembered = stage.sync.global_weights(), stage.sync.state_dict()
    for shard, weights in stage.layers.items():
        owned = [weight for weight in weights if weight.copy_of is None]
        replica = _of_keys(remembered, {weight.key for weight in weights})
        if shared is None:
            masters = {weight.key: weight.master for weight in owned}
            yield LayerState(shard.name, shard.index, masters, optimizer.state_of(owned), replica)
        else:  # what the optimizer remembers belongs to this replica as well
            model = {weight.key: shared[weight.key] for weight in owned}
            moments = {MOMENTS + name: by_key for name, by_key in optimizer.state_of(weights).items()}
            yield LayerState(shard.name, shard.index, model, {}, replica | moments)


@torch.no_grad()
def restore(worker: Session, checkpoint: Checkpoint) -> Progress:
    """Give a worker the weights, and all that is remembered of them, of a run of any number of ranks.

    Returns how far that run had come.
    """
    for stage in worker.stages.values():
        replicas: list[WeightState] = []
        for shard, weights in stage.layers.items():
            _restore_layer(worker, checkpoint.shards, shard, weights)
            states = _replica_states(worker, checkpoint.shards, shard, weights)
            _restore_moments(worker, weights, [_popped(state, MOMENTS) for state in states])
            _extend(replicas, states)
        stage.sync.load_state_dict(replicas)
    progress = checkpoint.progress
    return replace(progress, loss_scale=LossScale.of(worker.job.config, progress.loss_scale))


def files_to_read(job: Job, checkpoint: Checkpoint) -> list[StoredFile]:
    """List the files of a checkpoint that this rank restores its stages from; rank 0 looks at the rest as well."""
    layers = {shard.name for index in job.stages for shard in job.layers[slice(*job.specs[index])]}
    if len(job.specs) - 1 in job.stages:
        layers.add(job.layers[0].name)  # a tied head is restored from the embedding
    manifest = checkpoint.shards.manifest
    files = [manifest.layers[layer] for layer in sorted(layers)]
    files += [file for layer in sorted(layers) for file in manifest.replicas.get(layer, [])]
    return files + (manifest.model_files if job.topology.rank == 0 else [])


def _restore_layer(worker: Session, checkpoint: ShardDirectory, shard: LayerShard, weights: Sequence[Weight]) -> None:
    tensors = checkpoint.tensors(shard.name, stored_keys(worker.model, shard))
    state = checkpoint.state(shard.name)
    embedding = worker.job.layers[0].name
    for weight in weights:
        if weight.copy_of is None:
            weight.master.copy_(tensors[weight.key])
            worker.optimizer.load_state_of(weight, state, weight.key)
        else:
            weight.master.copy_(checkpoint.tensor(embedding, weight.copy_of))
            worker.optimizer.load_state_of(weight, checkpoint.state(embedding), weight.copy_of)
        if weight.param is not weight.master:
            weight.param.copy_(weight.master)


def _replica_states(
    worker: Session, checkpoint: ShardDirectory, shard: LayerShard, weights: Sequence[Weight]
) -> list[WeightState]:
    """Return what each replica remembered of a layer; of a new copy of a tied weight, what it did of the first."""
    states = checkpoint.replica_states(shard.name)
    for weight in weights:
        if weight.copy_of is not None:
            embedding = checkpoint.replica_states(worker.job.layers[0].name)
            states += [{} for _ in embedding[len(states) :]]
            for state, first in zip(states, embedding, strict=True):
                for name, by_key in first.items():
                    if name == OWN or name.startswith(MOMENTS):
                        state.setdefault(name, {}).setdefault(weight.key, by_key[weight.copy_of])
    if shard == worker.job.layers[0] and worker.job.topology.stages == 1:
        _add_errors_of_copies(worker, checkpoint, states)
    return states


def _add_errors_of_copies(worker: Session, checkpoint: ShardDirectory, states: list[WeightState]) -> None:
    """Add, in place, to what replicas owe of tied weights what they did of the copies, which this run has not."""
    copies = checkpoint.replica_states(worker.job.layers[-1].name)
    states += [{} for _ in copies[len(states) :]]
    for copy, key in tied_keys(worker.model).items():
        for state, other in zip(states, copies, strict=False):
            error = other.get(GRADIENT_ERROR, {}).get(copy)
            if error is not None:
                errors = state.setdefault(GRADIENT_ERROR, {})
                errors[key] = errors[key] + error if key in errors else error


def _restore_moments(worker: Session, weights: Sequence[Weight], saved: Sequence[WeightState]) -> None:
    """Give the optimizer what it remembered on this replica, or, of another number of replicas, in the mean."""
    topology = worker.job.topology
    if len(saved) == topology.replicas:
        saved = [saved[topology.replica]]
    for weight in weights:
        mean = {
            name: {weight.key: torch.stack([state[name][weight.key] for state in saved]).mean(0)}
            for name in (saved[0] if saved else ())
            if weight.key in saved[0][name]
        }
        if mean:
            worker.optimizer.load_state_of(weight, mean, weight.key)


def _popped(state: WeightState, prefix: str) -> WeightState:
    """Take away, in place, what has a prefix, and return it without."""
    return {name.removeprefix(prefix): state.pop(name) for name in list(state) if name.startswith(prefix)}


def _of_keys(state: WeightState, keys: set[str]) -> WeightState:
    """Return the part of a state that belongs to some weights."""
    part = {name: {key: tensor for key, tensor in by_key.items() if key in keys} for name, by_key in state.items()}
    return {name: by_key for name, by_key in part.items() if by_key}


def _extend(replicas: list[WeightState], layer: list[WeightState]) -> None:
    """Add, in place, what each replica remembers of one more layer."""
    replicas += [{} for _ in layer[len(replicas) :]]
    for whole, part in zip(replicas, layer, strict=False):
        for name, by_key in part.items():
            whole.setdefault(name, {}).update(by_key)
