"""The state of a rank, layer by layer: what it saves in a checkpoint and restores from one."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from acsgd.comm.waits import Meter
from acsgd.dp.exchange.sharded import gather_state
from acsgd.dp.modes import MODES
from acsgd.dp.resize import ReplicaState, add_tied_copy, fold_into, merge_tied_copy
from acsgd.dp.resize import restore as restore_replica
from acsgd.dp.sync import Mode
from acsgd.errors import RunError
from acsgd.groups import Groups
from acsgd.io.checkpoint.contents import LOCAL_OPTIMIZER, Contents, build_tensors, optimizer_spec
from acsgd.io.checkpoint.copies import FileExchange, fetch
from acsgd.io.checkpoint.identity import RunIdentity
from acsgd.io.checkpoint.progress import Progress, RunState, changed_options, recorded_options
from acsgd.io.checkpoint.resume import Checkpoint
from acsgd.io.checkpoint.saver import LayerState
from acsgd.io.telemetry.json_lines import METRICS
from acsgd.io.telemetry.record import StepRecord
from acsgd.notes import print_note, report_if_slow
from acsgd.optim.base import OptimizerSpec
from acsgd.optim.gradient_scale import LossScale
from acsgd.optim.ownership import join_parts
from acsgd.optim.schedule import learning_rate
from acsgd.pp.stage import Stage
from acsgd.run.initial_weights import check_base_of, check_start_of
from acsgd.run.plan.job import Job
from acsgd.run.session import Session
from acsgd.run.setup.build import build_session
from acsgd.run.setup.describe import describe_tied
from acsgd.run.setup.directories import describe_missing
from acsgd.run.setup.inputs import RunInputs
from acsgd.shards.disk import ShardDirectory
from acsgd.shards.load import LoadedLayer, WeightSource
from acsgd.shards.weights import Weight, WeightState, part_of

MASTER = "master"
"""Name of the fp32 masters where they are gathered with the state of the optimizer."""


class Start(NamedTuple):
    """Start of a run, from its first step or from a checkpoint."""

    session: Session
    progress: Progress
    newest: Path | None
    """Checkpoint that the run resumes from."""
    notes: list[str]
    """Messages for the user, on rank 0."""
    source: WeightSource | None
    """Where the weights of a run on disk are: the checkpoint, or the initial weights; None if not known."""
    unevaluated: StepRecord | None = None
    """Metrics of the last step if the run that has saved it did not complete its evaluation."""


def start(job: Job, inputs: RunInputs, groups: Groups, *, gives_up: bool = False) -> Start:
    """Build this rank's session and resume from the newest valid checkpoint, if there is any.

    gives_up: see `fetch`. Collective. Raises RunError if there are checkpoints and none that may be used is valid.
    """
    found = inputs.candidates
    if not groups.all_equal(inputs.identity.weights):
        raise RunError(
            f"model.name={job.config.model.name} holds other weights on some hosts; copy the same files to all of them"
        )
    of_weights = []
    if job.topology.rank == 0 and found.checkpoints:
        of_weights = check_start_of(job, found.checkpoints[0])
    exchange, is_leader = inputs.disks.exchange(job, groups), inputs.disks.checkpoints.is_leader(job.topology.rank)
    complete = partial(complete_files, job, exchange, gives_up=gives_up)
    checkpoint = found.choose(groups, complete, timeout_s=job.disk_timeout_s)
    if job.model.adapter is not None and checkpoint is not None and not exchange.disks.is_shared:
        check_base_of(job, checkpoint.shards)  # only now are its files on all hosts
    notes = [*of_weights, *(f"removed {path.name}: it is incomplete" for path in found.directory.leftovers())]
    if is_leader:
        notes += found.set_aside(job.paths.run / METRICS)
        found.mark_best()
        found.directory.path.mkdir(parents=True, exist_ok=True)
        notes += describe_missing(job)
    source = checkpoint.shards if checkpoint else inputs.weight_source
    assert source is not None
    with report_if_slow(print_note, lambda: f"loading {job.model.describe_size()}", enabled=job.topology.rank == 0):
        session = build_session(job, source, groups, inputs.cache_plan)
    notes += describe_tied(job, next(iter(session.stages.values())).composed.model)
    if checkpoint is None:
        return Start(session, Progress(loss_scale=LossScale.of(job.config)), None, notes, source)
    progress = restore(session, checkpoint)
    inputs.reader.restore(checkpoint.run.streams)
    notes.append(f"resuming from {checkpoint.path}: {progress}")
    notes += _describe_changes(job, inputs.identity, checkpoint, progress.loss_scale)
    if progress.best and checkpoint.run.held_out not in ("", inputs.held_out_key):
        progress = replace(progress, best={})
        notes.append("the evaluation data are others than those of the checkpoint: its best metrics do not count")
    left = checkpoint.run.unevaluated
    return Start(session, progress, checkpoint.path, notes, source, StepRecord(**left) if left else None)


def _describe_changes(job: Job, identity: RunIdentity, checkpoint: Checkpoint, loss_scale: LossScale) -> list[str]:
    """Return sentences on options that differ from those of a checkpoint. loss_scale: with which the run resumes."""
    notes = []
    if not _has_same_optimizer(job, checkpoint):
        saved, present = optimizer_spec(checkpoint.run), job.config.optim.name
        notes.append(f"the optimizer starts without state: the checkpoint has that of {saved}, not of {present}")
    if changed := changed_options(checkpoint.run.options, recorded_options(job.config)):
        notes.append(f"options that differ from those of the checkpoint: {'; '.join(changed)}")
    former = _former_mode(job, checkpoint)
    if former is not None and former.states and (checkpoint.run.replicas or 0) > 1:
        dropped = any(state.single == "add_to_gradient" for state in former.states)
        notes.append(
            f"what replicas of dp.mode={checkpoint.run.options['dp.mode']} had not exchanged yet is "
            + ("dropped" if dropped else "part of the weights now")
        )
    if differing := identity.differing_reading(checkpoint.run.identity):
        notes.append(
            "no text of this run is changed, but what it saves reads and writes others in another way than the "
            f"checkpoint: {differing}"
        )
    notes += _describe_rate(job, checkpoint.run)
    if loss_scale.dynamic and any(each.startswith("optim.loss_scale:") for each in changed):
        notes.append(f"optim.loss_scale is that of a new run: this one resumes with {loss_scale.value:g}")
    return notes


def _describe_rate(job: Job, run: RunState) -> list[str]:
    """Return a sentence on the learning rate if that of the next step is another than the checkpoint's options give."""
    step, present, options = run.progress.step, job.config.optim, run.options
    values = [options.get(f"optim.{name}") for name in ("lr", "steps", "warmup", "schedule")]
    if None in values or not 0 < step < present.num_steps:
        return []
    lr, steps, warmup, schedule = map(str, values)
    saved = replace(present, lr=float(lr), steps=int(steps), warmup=int(warmup), schedule=schedule)
    last, planned, now = (learning_rate(*each) for each in ((step - 1, saved), (step, saved), (step, present)))
    if now in (planned, last):
        return []
    return [f"the learning rate of step {step + 1} is {now:.3g}, after {last:.3g} in step {step}: its schedule changed"]


def layer_states(session: Session, idle: Collection[int] = ()) -> list[LayerState]:
    """Return what this rank saves of the state of its layers and tables, not copied.

    idle: replicas that save nothing of what replicas have in common.
    """
    return [state for stage in session.stages.values() for state in _stage_states(session, stage, idle)]


def _stage_states(session: Session, stage: Stage, idle: Collection[int]) -> Iterator[LayerState]:
    global_weights, replica_state = stage.sync.global_weights(), stage.sync.state_dict()
    owned, tables = session.owned, [*session.job.model.description.tables()]

    def state_of(name: str, position: int, weights: Sequence[Weight], constants: dict[str, Tensor]) -> LayerState:
        originals = [weight for weight in weights if not weight.is_copy]
        replica = part_of(replica_state, {each.key for each in owned.of(weights)})
        writer = owned.ownership.writer(position, idle)
        if global_weights is None:
            common = {MASTER: {each.key: each.master.detach() for each in owned.of(originals)}}
            common |= owned.state_of(session.optimizer, originals)
        else:  # each replica, or domain, has its own optimizer state
            common = {MASTER: {each.key: global_weights[each.key] for each in owned.of(originals)}}
            replica |= _local(owned.state_of(session.optimizer, weights))
            replica = _whole_state(session, replica, owned.ownership.owners[0])
        optimizer = _whole_state(session, common, writer)
        masters = optimizer.pop(MASTER, {})
        if session.peers.is_observer or not session.peers.is_leader:
            replica = {}
        if writer == owned.ownership.replica:
            return LayerState(name, position, masters, constants, optimizer, replica)
        return LayerState(name, position, None, {}, {}, replica)

    for layer in stage.layers:
        apart = [weight for weight in layer.weights if weight.key in tables and not weight.is_copy]
        others = [weight for weight in layer.weights if weight.key not in tables or weight.is_copy]
        yield state_of(layer.spec.name, layer.spec.index, others, layer.constants)
        for weight in apart:
            yield state_of(weight.key, tables.index(weight.key), [weight], {})._replace(is_table=True)


def _whole_state(session: Session, state: WeightState, writer: int) -> WeightState:
    """Return the state of whole weights, not copied, given that of what this rank owns of them.

    If replicas own parts of them, a copy, and on the replica `writer` alone; all of them call it together.
    """
    ownership = session.owned.ownership
    if not ownership.parts:
        return state
    if writer not in ownership.owners:
        return {}
    return join_parts(gather_state(state, ownership.owners.index(writer), session.peers.owners, Meter()))


def _local(state: WeightState) -> WeightState:
    """Return the optimizer state of one replica under the names that it has in the files of the replica."""
    return {LOCAL_OPTIMIZER + name: by_key for name, by_key in state.items()}


@torch.no_grad()
def restore(session: Session, checkpoint: Checkpoint) -> Progress:
    """Restore weights, optimizer state and replica state from a checkpoint of a run of any number of ranks.

    The state of another data-parallel mode is folded into the weights, and the optimizer state of replicas with local
    weights into its mean. Returns the progress of that run.
    """
    has_same_optimizer, former = _has_same_optimizer(session.job, checkpoint), _former_mode(session.job, checkpoint)
    table = (former or session.job.plugins.mode).states
    for stage in session.stages.values():
        replicas: list[WeightState] = []
        for layer in stage.layers:
            states = _replica_states(session, checkpoint.shards, layer, table)
            folded = [] if former is None else states
            _restore_layer(session, checkpoint.shards, layer, table, folded, has_same_optimizer=has_same_optimizer)
            if has_same_optimizer:
                _restore_local_optimizer(session, layer.weights, states, as_mean=former is not None)
            else:
                _drop_local_optimizer(states)
            _merge_layer(replicas, [] if former is not None else states)
        stage.sync.load_state_dict(replicas)
    session.share_parts()
    progress = checkpoint.run.progress
    return replace(progress, loss_scale=LossScale.of(session.job.config, progress.loss_scale))


def complete_files(job: Job, exchange: FileExchange, checkpoint: Checkpoint, *, gives_up: bool) -> None:
    """Check the files of a checkpoint as `check_files` does, once this rank has them from other hosts. A collective.

    gives_up: see `fetch`.
    """
    shards = checkpoint.shards
    if shards.manifest.hosts or not exchange.disks.is_shared:
        layers = [job.model.layers[index].name for index in _layers_read(job)]
        needed = [file.file for layer in layers for file in shards.all_files_of(layer)]
        needed += [file.file for file in shards.manifest.model_files]
        fetch(shards, needed, exchange, gives_up=gives_up, timeout_s=job.disk_timeout_s)
    check_files(job, checkpoint)


def check_files(job: Job, checkpoint: Checkpoint) -> None:
    """Check the files of a checkpoint from which this rank restores its stages; on rank 0 also the model files.

    Raises CorruptFileError for the first that is corrupt or holds tensors that do not fit.
    """
    contents = Contents.of(checkpoint.shards, build_tensors(checkpoint.shards.manifest, job.model.config))
    for layer in sorted(_layers_read(job)):
        contents.check(layer)
    if job.topology.rank == 0:
        for file in checkpoint.shards.manifest.model_files:
            checkpoint.shards.verify(file)


def _layers_read(job: Job) -> set[int]:
    """Return the layers whose files this rank reads: its own, those of tied weights, and that of the outer buffers."""
    description = job.model.description
    own = {layer for index in job.layout.stages for layer in range(*job.layout.specs[index])}
    tied = {holders[0] for holders in description.tied().values() if own & {*holders}}
    return own | tied | ({len(description.layers) - 1} if description.layers[-1].buffers else set())


def _former_mode(job: Job, checkpoint: Checkpoint) -> Mode | None:
    """Return the data-parallel mode that saved a checkpoint if it is another than that of this run."""
    name = (checkpoint.run.options.get("dp.mode") or job.config.dp.mode).partition(":")[0]
    if name not in MODES or isinstance(job.plugins.mode, MODES[name]):
        return None
    return MODES[name]()


def _restore_layer(
    session: Session,
    checkpoint: ShardDirectory,
    layer: LoadedLayer,
    table: Sequence[ReplicaState],
    folded: Sequence[WeightState],
    *,
    has_same_optimizer: bool,
) -> None:
    """Restore the weights of a layer, with the states of another mode folded in, and their optimizer state."""
    description = session.job.model.description
    read = functools.cache(checkpoint.state)
    for weight in layer.weights:
        first = description.first_holder(weight.key).name
        session.owned.load(weight, fold_into(table, folded, weight.key, checkpoint.tensor(first, weight.key)))
        if has_same_optimizer:
            session.owned.load_state(session.optimizer, [weight], read(first))


def _replica_states(
    session: Session, checkpoint: ShardDirectory, layer: LoadedLayer, of_mode: Sequence[ReplicaState]
) -> list[WeightState]:
    """Return the saved state of each replica for one layer, adapted to the copies of tied weights that this run has.

    of_mode: the state of the mode that saved it.
    """
    job = session.job
    first_holders = {weight.key: job.model.description.first_holder(weight.key).name for weight in layer.weights}
    own = {  # not that of copies which this run does not have
        key for key, first in first_holders.items() if first == layer.spec.name
    } | {weight.key for weight in layer.weights if weight.is_copy}
    saved = [part_of(state, own) for state in checkpoint.replica_states(layer.spec.name)]
    table = [*of_mode, *_local_states(job.plugins.optimizer)]
    for weight in layer.weights:
        if not weight.is_tied:
            continue
        first, holders = first_holders[weight.key], job.model.description.tied()[weight.key]
        here = [index for index in holders if job.layout.rank_of_layer(index) == job.topology.rank]
        if weight.is_copy:
            add_tied_copy(table, saved, checkpoint.replica_states(first), weight.key)
        elif weight.key not in own:
            _merge_layer(saved, [part_of(state, {weight.key}) for state in checkpoint.replica_states(first)])
        former = holders[1:] if weight.has_remote_lookups else here[1:]
        for index in former:
            copies = checkpoint.replica_states(job.model.layers[index].name)
            merge_tied_copy(of_mode, saved, copies, weight.key)
    return saved


def _local_states(optimizer: OptimizerSpec) -> list[ReplicaState]:
    """Return the table of the optimizer state as replicas with local weights save it."""
    return [ReplicaState(LOCAL_OPTIMIZER + state.name, merge="mean", shape=state.shape) for state in optimizer.states]


def _restore_local_optimizer(
    session: Session, weights: Sequence[Weight], saved: Sequence[WeightState], *, as_mean: bool
) -> None:
    """Restore optimizer state that was saved per replica, and remove it from `saved`, in place.

    as_mean: whether this run has it in common, as the mean, and not per replica.
    """
    peers, by_key = session.peers, {weight.key: weight.master for weight in weights}
    here = {"replica": 0, "replicas": 1} if as_mean else {"replica": peers.replica, "replicas": peers.size}
    local = {}
    for state in _local_states(session.job.plugins.optimizer):
        local[state.name.removeprefix(LOCAL_OPTIMIZER)] = restore_replica(state, saved, by_key, **here)
        for each in saved:
            each.pop(state.name, None)
    for weight in weights:
        if any(weight.key in tensors for tensors in local.values()):
            session.owned.load_state(session.optimizer, [weight], local)


def _drop_local_optimizer(saved: Sequence[WeightState]) -> None:
    """Remove optimizer state that was saved per replica from `saved`, in place."""
    for each in saved:
        for name in [name for name in each if name.startswith(LOCAL_OPTIMIZER)]:
            del each[name]


def _has_same_optimizer(job: Job, checkpoint: Checkpoint) -> bool:
    """Return whether the optimizer of this run saved the checkpoint, maybe with other options."""
    saved, _, _ = optimizer_spec(checkpoint.run).partition(":")
    return saved == job.config.optim.name.partition(":")[0]


def _merge_layer(replicas: list[WeightState], layer: list[WeightState]) -> None:
    """Add the state of one more layer to that of each replica, in place."""
    replicas += [{} for _ in layer[len(replicas) :]]
    for whole, part in zip(replicas, layer, strict=False):
        for name, by_key in part.items():
            whole.setdefault(name, {}).update(by_key)
