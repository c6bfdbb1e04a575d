"""An elastic run of N processes without torchrun and daemons: which of them train, and where they stop, is scripted."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load

from acsgd import train
from acsgd.comm.waits import InterruptibleWaits
from acsgd.config.options import AdapterConfig, Config, ModelConfig
from acsgd.elastic.hooks import BackgroundJoin
from acsgd.elastic.membership.assignment import StoredCut
from acsgd.elastic.membership.plan import Plan, WorkerState, make_plan
from acsgd.elastic.requirements import possible_cuts, with_stages
from acsgd.elastic.state import transfer
from acsgd.elastic.state.channel import StateReceiver
from acsgd.elastic.state.handover import (
    complete_step,
    end_transfers,
    hand_over,
    join,
    restore_streams,
    run_missing_exchange,
    worker_state,
)
from acsgd.elastic.state.joins import JoiningRank, StateSource
from acsgd.elastic.state.snapshot_store import SnapshotStore
from acsgd.elastic.state.snapshots import Snapshots
from acsgd.elastic.state.transfer import LayersInMemory, layer_message
from acsgd.errors import WaitInterruptedError
from acsgd.groups import Groups, connect
from acsgd.io.checkpoint.progress import Progress
from acsgd.io.data.batches import BatchReader
from acsgd.io.data.stream.state import StreamState
from acsgd.io.files.fields import from_json
from acsgd.io.telemetry.metrics import Metrics
from acsgd.launch import Launch
from acsgd.layers.batch import Batch
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.plan.job import Job, prepare
from acsgd.run.plan.model import RunModel
from acsgd.run.report import Report
from acsgd.run.session import Session
from acsgd.run.setup import build, continued
from acsgd.run.setup.build import build_session
from acsgd.run.setup.data import open_data
from acsgd.run.setup.inputs import plan_activation_caches
from acsgd.run.step.hooks import LoopState, StepHook, StepHooks
from acsgd.run.step.pace import Pace
from acsgd.run.step.spikes import SKIP
from acsgd.shards.load import Constants, WeightSource
from lib.ordered import OrderedBackend, ordered_transport
from lib.patience import NO_LIMIT_S
from lib.training import TIMEOUT

SAMPLES = 100
"""Samples of which activation caches hold entries, with delta."""


class Return(NamedTuple):
    """Return to an earlier step of the same view, as after a loss spike."""

    after: int
    """Number of steps after which it happens, once."""
    to: int
    """Number of steps whose state is loaded."""


class ScriptedView(NamedTuple):
    """Which processes train together, and how they stop."""

    members: Sequence[int]
    """Processes, most senior first; those that are not in a view have ended."""
    until: int
    """Number of steps after which it ends."""
    late: Sequence[int] = ()
    """Members that are interrupted in the next step when they have reported it, before they apply it."""
    unsynced: Sequence[int] = ()
    """Members that are interrupted in the next step when they have applied it, before they apply its exchange. If none
    of both, the view ends between two steps."""
    unshared: Sequence[int] = ()
    """Members that are interrupted in the next step when it is applied with its exchange, before they share parts."""
    is_formed: bool = True
    """Whether it comes to training; else all members are interrupted while they connect their links."""
    returns: Return | None = None
    delay: tuple[int, int] | None = None
    """A member that joins, and the number of steps after which it takes the first state that has arrived."""
    ahead: int = 0
    """See `BackgroundJoin`."""
    skipped: int | None = None
    """Step, counted from 1, that leaves the weights as they are, as if its gradients were not finite."""
    one_host: Sequence[int] = ()
    """Processes of one host; each other one is a host, unless dp.domain says otherwise."""
    is_ordered: bool = False
    """Whether tensors of the device travel over an ordered transport, as over NCCL."""


class Trained(NamedTuple):
    """What one process has done."""

    losses: dict[int, float]
    """Loss of each completed step, counted from 1."""
    digests: dict[int, tuple[int, str]]
    """Stage, and digest of its global weights, after each step. Where replicas divide the state, number of the part and
    digest of it."""
    forward_bytes: dict[int, int]
    """Bytes of activations that all ranks sent in each step."""
    streams: dict[int, StreamState | None]
    """Where the first source was read on at the beginning of each view, by the number of steps before it."""
    origins: list[str]
    """Where the state came from in each view it was in: disk, memory or snapshot."""
    received_bytes: list[int]
    """Size of the state that other processes sent before each view that does not start from disk."""
    joining: dict[int, list[int]]
    """Replicas without all of their state in each step."""
    sent_between_hosts: int = 0
    """Size of the state that this process sent to those of other hosts before views, bytes."""


Script = Sequence[ScriptedView]


def train_in_views(
    rank: int, world_size: int, path: Path, runs: Mapping[str, tuple[Config, Script]]
) -> dict[str, Trained]:
    """Train in one view after another, as a worker of an elastic run does; return what it did by name of the run."""
    torch.set_num_threads(1)
    store, trained, models = dist.FileStore(str(path), world_size), {}, _Models()
    for name, (config, script) in runs.items():
        if not any(rank in view.members for view in script):
            trained[name] = Trained({}, {}, {}, {}, [], [], {})
            continue
        log = dataclasses.replace(config.log, dir=f"{config.log.dir}-{rank}")  # with streamed segments of its own
        process = _Process(rank, dist.PrefixStore(name, store), dataclasses.replace(config, log=log), models)
        for number, view in enumerate(script):
            try:
                process.run_view(number, view)
            except Exception as error:
                error.add_note(f"in view {number} of the run {name}")
                raise
        process.drop_session()
        trained[name] = Trained(
            process.losses,
            process.digests,
            process.forward_bytes,
            process.streams,
            process.origins,
            process.received_bytes,
            process.joining,
            process.sent_between_hosts,
        )
    return trained


class _Models:
    """Models and their initial weights, which the runs of a process have in common."""

    def __init__(self) -> None:
        self._models: dict[tuple[ModelConfig, AdapterConfig], RunModel] = {}
        self._weights: dict[tuple[ModelConfig, AdapterConfig], WeightSource] = {}
        self._cuts: dict[str, Sequence[StoredCut]] = {}

    def prepare(self, config: Config, rank: int, world_size: int) -> Job:
        key = config.model, config.adapter
        job = prepare(config, Launch(rank, rank, world_size), model=self._models.get(key))
        self._models[key] = job.model
        return job

    def cuts(self, config: Config) -> Sequence[StoredCut]:
        key = repr((config.model, config.adapter, config.pp, config.elastic))
        if key not in self._cuts:
            self._cuts[key] = possible_cuts(self.prepare(config, 0, config.pp.stages))
        return self._cuts[key]

    def weights(self, job: Job) -> WeightSource:
        key = job.config.model, job.config.adapter
        if key not in self._weights:
            self._weights[key] = open_weight_source(job)
        return self._weights[key]


class _Process:
    def __init__(self, number: int, store: dist.Store, config: Config, models: _Models) -> None:
        self._number = number
        self._one_host: Sequence[int] = ()
        self._store = store
        self._config = config
        self._models = models
        self._cuts = models.cuts(config)
        self._session: Session | None = None
        self._reader: BatchReader | None = None
        self._state = LoopState(Progress())
        self._transfers: StateSource | JoiningRank | None = None
        self._snapshots = SnapshotStore()
        self.losses: dict[int, float] = {}
        self.origins: list[str] = []
        self.digests: dict[int, tuple[int, str]] = {}
        self.forward_bytes: dict[int, int] = {}
        self.streams: dict[int, StreamState | None] = {}
        self.received_bytes: list[int] = []
        self.joining: dict[int, list[int]] = {}
        self.sent_between_hosts = 0
        self._communicators: list[OrderedBackend] = []

    def run_view(self, number: int, view: ScriptedView) -> None:
        """Take part in a view, or drop the state."""
        if self._number not in view.members:
            self.drop_session()
            self._state = LoopState(Progress())
            self._snapshots = SnapshotStore()
            return
        self._one_host = view.one_host
        plan = self._plan(number, view)
        name = self._name(self._number)
        rank = plan.rank_of(name)
        assert rank is not None
        is_holder = name in plan.holders and not plan.from_snapshot
        self.origins.append(plan.origin)
        if plan.from_snapshot:
            self._snapshots.return_to(plan.step)
            self._snapshots.complete(plan.step)
        if self._session is not None and is_holder:
            complete_step(self._session, self._state, plan, is_behind=name in plan.behind)
            self._note_step()
        config = with_stages(self._config, plan.stages)
        job = self._models.prepare(config, rank, len(plan.ranks))
        caches, reader = plan_activation_caches(job, SAMPLES, run_id="run", fresh=True), open_data(job).reader
        store, waits = dist.PrefixStore(f"view {number}", self._store), InterruptibleWaits()
        domain = (config.dp.domain or "")[self._number : self._number + 1]  # a letter per process
        divides = config.dp.shard != "none"
        with connect(
            job.topology,
            timeout=TIMEOUT,
            store=store,
            waits=waits,
            several_hosts=True,
            domain=domain,
            divides=divides,
            may_be_one=True,
        ) as groups:
            groups = self._over_ordered(groups) if view.is_ordered else groups
            if plan.from_disk:
                self._session = build_session(job, self._models.weights(job), groups, caches)
            else:
                restore_streams(reader, plan)
                if not is_holder:
                    self.drop_session()
                    self._state.restart(Progress())
                constants = Constants(self._models.weights(job), job.model.description)
                if not view.is_formed:
                    groups.wait_for_all("connecting", timeout_s=TIMEOUT.total_seconds())  # an abort would end that
                    self._fail_to_form(partial(hand_over, self._session, job, groups, plan, constants, caches))
                    groups.abort("the view was not formed")
                    return
                snapshot = self._snapshots.by_step.get(plan.step) if plan.from_snapshot else None
                with self._counting(plan):
                    joined = join(
                        self._session,
                        job,
                        groups,
                        plan,
                        constants,
                        host="127.0.0.1",
                        cache_plan=caches,
                        snapshot=snapshot,
                    )
                self._session, received_bytes, self._transfers, self._state.idle = joined
                self.received_bytes.append(received_bytes)
                self._state.progress = from_json(Progress, plan.progress)
                run_missing_exchange(self._session, self._state, plan)
                self._note_step()
            self._reader = reader
            self.streams[plan.step] = next(iter(reader.stream_states(plan.step)), None)
            snapshots = self._open_snapshots(self._session, groups, plan, number)
            with _delayed(view.delay[1] if view.delay and view.delay[0] == self._number else 0):
                self._train(self._session, reader, view, snapshots)
            reader.close()
            groups.wait_for_all("ending the view", timeout_s=TIMEOUT.total_seconds())
            self._session.abort("the view has ended")
            self._session = end_transfers(self._session, self._state, self._transfers)
            self._transfers = None
            groups.abort("the view has ended")
            assert all(communicator.is_aborted for communicator in self._communicators)
            assert self._communicators or len(view.members) == 1 or not view.is_ordered
        readers = [thread.name for thread in threading.enumerate() if thread.name.startswith("parameters")]
        assert len(readers) <= 1, "sessions that were replaced read no parameters"

    def drop_session(self) -> None:
        """Drop the state of this process."""
        if self._session is not None:
            self._session.close_stages()
        self._session = None

    def _name(self, number: int) -> str:
        """Return the name of a process as a worker; a domain is a host."""
        domain = (self._config.dp.domain or "")[number : number + 1]
        host = min(self._one_host) if number in self._one_host else number
        return f"{domain or host}/{number}"

    @contextlib.contextmanager
    def _counting(self, plan: Plan) -> Iterator[None]:
        """Count what this process sends to other hosts."""
        send_tensors, here = transfer.send_tensors, self._name(self._number).partition("/")[0]

        def counted(groups: Groups, to: int, layers: Sequence[Mapping[str, torch.Tensor]]) -> None:
            if plan.ranks[to].partition("/")[0] != here:  # those that several layers share travel once
                sizes = {name: tensor.nbytes for tensors in layers for name, tensor in tensors.items()}
                self.sent_between_hosts += sum(sizes.values())
            send_tensors(groups, to, layers)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transfer, "send_tensors", counted)
            yield

    def _over_ordered(self, groups: Groups) -> Groups:
        delayed = ordered_transport(self._number)

        def open_backend(*args: Any) -> OrderedBackend:
            backend = delayed.open(*args)
            assert isinstance(backend, OrderedBackend)
            self._communicators.append(backend)
            return backend

        transport = delayed._replace(open=open_backend)
        return groups.with_transport(transport, torch.device("cpu"), lambda axis, ranks: True)

    def _fail_to_form(self, hand_over: Callable[[], object]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for module in (build, continued):
                patch.setattr(module, "connect_stages", _interrupt)
            with pytest.raises(WaitInterruptedError):
                hand_over()

    def _plan(self, number: int, view: ScriptedView) -> Plan:
        """Report, and plan the view from the reports of all members."""
        mine = worker_state(self._session, self._state, self._reader)
        domain = "" if self._config.dp.shard == "none" else self._name(self._number).partition("/")[0]
        mine = dataclasses.replace(mine, snapshots=self._snapshots.reports(), domain=domain)
        self._store.set(f"{number}/{self._number}", json.dumps(dataclasses.asdict(mine)))
        states = {
            self._name(member): from_json(WorkerState, json.loads(self._store.get(f"{number}/{member}")))
            for member in view.members
        }
        low, micros = self._config.elastic.min_replicas, self._config.data.batch // self._config.pp.micro
        equal_micros = micros if self._config.dp.sums_passes else 0
        return make_plan(states, staying=list(states), cuts=self._cuts, min_replicas=low, equal_micros=equal_micros)

    def _open_snapshots(self, session: Session, groups: Groups, plan: Plan, epoch: int) -> Snapshots | None:
        """Return the snapshots of a run with a fixed interval."""
        chosen = self._config.elastic.snapshot
        if chosen == "auto":
            return None
        assert self._reader is not None
        return Snapshots(self._snapshots, session, self._reader, groups, plan.ranks, epoch=epoch, interval=int(chosen))

    def _train(self, session: Session, batches: BatchReader, view: ScriptedView, snapshots: Snapshots | None) -> None:
        """Train until the end of a view; complete each snapshot before the next step."""
        state = self._state
        state.has_reported = False
        pace = Pace(session, lambda _: None, state.idle)
        join = BackgroundJoin(session, self._transfers, state.progress.step, view.ahead)
        script = _Script(session, view)
        hooks = StepHooks([join, script, pace] if snapshots is None else [join, script, snapshots, pace], Metrics([]))
        while (step := state.progress.step) < view.until:
            script.before_step(state)
            train.train_step(
                session, batches.batch(step, pace.micros(step)), state.progress, hooks.report(state), state=state
            )
            returns = not hooks.after_step(state)
            self.joining[step + 1] = [*state.idle]
            if returns:
                continue
            hooks.before_next(state)
            self._note_step()
            joining = self._transfers if isinstance(self._transfers, JoiningRank) else None
            if joining is not None and joining._requested and session.job.plugins.mode.exchanges == "nothing":
                joining._receiver.wait(NO_LIMIT_S)  # without gradients that are recorded, nothing else makes it wait
            while snapshots is not None and snapshots.is_pending:
                time.sleep(0.005)
        if view.late or view.unsynced or view.unshared:
            with _interrupted(*(self._number in each for each in (view.late, view.unsynced, view.unshared))):
                self._begin_step(session, batches.batch(view.until, pace.micros(view.until)), hooks.report(state))
                self._note_step()

    def _begin_step(self, session: Session, batch: Batch, votes: Report) -> None:
        with contextlib.suppress(WaitInterruptedError):
            train.train_step(session, batch, self._state.progress, votes, state=self._state)

    @property
    def _is_incomplete(self) -> bool:
        """Whether some of the state of this process has not arrived."""
        return isinstance(self._transfers, JoiningRank) and self._transfers.is_pending

    def _note_step(self) -> None:
        """Note loss and weights if the last step is complete."""
        state, session = self._state, self._session
        assert session is not None
        if not state.is_synced or self._is_incomplete or state.progress.step == 0:
            return
        if state.record is not None and state.record.loss is not None:
            self.losses[state.progress.step] = state.record.loss
            self.forward_bytes[state.progress.step] = state.record.pp_forward_bytes
        if state.progress.step not in self.digests:  # a single replica that continues alone folds residuals into them
            stage, (part, parts) = session.job.topology.stage_rank, session.owned.ownership.place
            self.digests[state.progress.step] = stage * parts + part, _digest(session)


class _Script(StepHook):
    """Skips the update of a step, and returns to an earlier one, as a view says."""

    fields = (SKIP,)

    def __init__(self, session: Session, view: ScriptedView) -> None:
        self._session = session
        self._skipped = view.skipped
        self._returns = view.returns
        self._earlier: tuple[Progress, list[bytes]] | None = None

    def report(self, state: LoopState) -> Report:
        return {SKIP: state.progress.step + 1 == self._skipped}

    def before_step(self, state: LoopState) -> None:
        """Keep the state of the step to which the view returns."""
        if self._returns and state.progress.step == self._returns.to:
            self._earlier = state.progress, [layer_message(self._session, layer) for layer in self._session.layers]

    def after_step(self, state: LoopState) -> Progress | None:
        """Load the state of an earlier step, of which a rank that joins has only a part."""
        if self._returns is None or state.progress.step != self._returns.after:
            return None
        assert self._earlier is not None
        self._returns, (progress, layers) = None, self._earlier
        for layer, message in zip(self._session.layers, layers, strict=True):
            loaded = LayersInMemory()
            loaded.add(load(message))
            loaded.load_layer(layer, self._session)
        return progress


@contextlib.contextmanager
def _delayed(steps: int) -> Iterator[None]:
    """Let this process take no state in its first steps."""
    take, taken = StateReceiver.take, itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StateReceiver, "take", lambda receiver: None if next(taken) < steps else take(receiver))
        yield


@contextlib.contextmanager
def _interrupted(is_late: bool, is_unsynced: bool, is_unshared: bool) -> Iterator[None]:
    def exchange_in_vain(session: Session, step: int) -> None:
        for stage in session.stages.values():
            stage.sync.exchange(step, session.optimizer.second_moments(session.owned.of(stage.weights)))
        _interrupt()

    with pytest.MonkeyPatch.context() as patch:
        if is_late:
            patch.setattr(train, "apply_step", _interrupt)
        if is_unsynced:
            patch.setattr(Session, "sync_after_step", exchange_in_vain)
        if is_unshared:
            patch.setattr(Session, "share_parts", _interrupt)
        yield


def _interrupt(*args: Any, **options: Any) -> None:
    raise WaitInterruptedError("the view has ended")


def _digest(session: Session) -> str:
    """Return a digest of the global weights of a rank, and of its optimizer state if replicas have it in common.

    If replicas have nothing in common, of its own weights and optimizer state. Of the part that this rank has.
    """
    digest, exchanges = hashlib.sha256(), session.job.plugins.mode.exchanges
    for stage in session.stages.values():
        shared = None if exchanges == "nothing" else stage.sync.global_weights()
        own = session.owned.of(stage.weights)
        for weight in own:
            values = (weight.master if shared is None else shared[weight.key]).detach()
            digest.update(values.view(torch.uint8).numpy().tobytes())
        optimizer = {} if exchanges == "updates" else session.optimizer.state_of(own)
        for _, by_key in sorted(optimizer.items()):
            for _, tensor in sorted(by_key.items()):
                digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()[:16]
