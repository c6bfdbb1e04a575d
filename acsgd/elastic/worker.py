"""A worker of an elastic run: one process that trains in one view after another."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

from acsgd.comm.process_groups import VirtualHost
from acsgd.comm.store import StoreError
from acsgd.comm.waits import InterruptibleWaits
from acsgd.config.options import Config
from acsgd.elastic.control import Control
from acsgd.elastic.hooks import STOPS, BackgroundJoin, JoinProgress, Pause
from acsgd.elastic.host.model_files import ModelFiles
from acsgd.elastic.membership.domains import MIN_REPLICAS
from acsgd.elastic.membership.messages import (
    Broken,
    Done,
    End,
    Hello,
    Host,
    Idle,
    Leave,
    Run,
    Setup,
    Stop,
    Stopped,
    View,
)
from acsgd.elastic.membership.plan import Plan, WorkerState
from acsgd.elastic.requirements import check_elastic, setup_of, with_stages
from acsgd.elastic.state.handover import (
    ViewStart,
    complete_step,
    end_transfers,
    is_run_over,
    join,
    restore_streams,
    run_missing_exchange,
    worker_state,
)
from acsgd.elastic.state.joins import JoiningRank, StateSource
from acsgd.elastic.state.snapshot_store import SnapshotStore
from acsgd.elastic.state.snapshots import Snapshots, describe_snapshots, open_snapshots
from acsgd.elastic.view_resources import (
    ViewLock,
    ViewMetrics,
    connect_store,
    find_view_disks,
    open_store,
    view_events,
)
from acsgd.errors import AfterLastStepError, ConnectError, RefusedError, RunError, SaveError, WaitInterruptedError
from acsgd.failures.failures import RunContext
from acsgd.failures.signals import StopSignals
from acsgd.failures.stdio import enter_training
from acsgd.groups import Groups, connect
from acsgd.io.checkpoint.progress import Progress
from acsgd.io.data.batches import BatchReader
from acsgd.io.files.fields import from_json
from acsgd.io.telemetry.metrics import Metrics
from acsgd.io.telemetry.record import StepRecord
from acsgd.launch import Launch
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.plan.job import Job, prepare
from acsgd.run.plan.model import RunModel
from acsgd.run.plan.transports import HostLinks
from acsgd.run.report import StepSummary
from acsgd.run.session import Session
from acsgd.run.setup.build import open_transports
from acsgd.run.setup.directories import RunDisks, check_room, open_disks, share_metrics
from acsgd.run.setup.inputs import RunInputs, describe_domains, open_inputs
from acsgd.run.setup.measured import find_transports
from acsgd.run.setup.resume import Start, start
from acsgd.run.step.checkpointing import Checkpointing
from acsgd.run.step.hooks import LoopState, StepHook
from acsgd.run.step.run import TrainingRun, open_run, text_log_of
from acsgd.shards.load import Constants
from acsgd.train import run_steps

LOST_PARTS = "the hosts that are here do not hold all parts of the state (dp.shard): training continues from step %d"
"""Printed in a view that starts from the newest checkpoint, or from step 0, though hosts were in views before."""


def run_elastic(config: Config, launch: Launch, context: RunContext, end: Callable[[int], None]) -> None:
    """Take part in an elastic run until it ends.

    context: receives what failure reports need; end: ends the process, from any thread.
    """
    context.run_dir = Path(config.log.dir)
    with contextlib.ExitStack() as stack:
        signals = context.signals = stack.enter_context(StopSignals(end))
        job = prepare(config, replace(launch, rank=0, world_size=config.pp.stages))
        check_elastic(job)
        inputs = open_inputs(job)  # every worker may get a rank that reads tokens
        control = stack.enter_context(contextlib.closing(Control(Path(launch.daemon))))
        domain = "" if config.dp.shard == "none" else job.domain
        worker = ElasticWorker(config, launch, control, job.model, domain)
        stack.callback(worker.close)
        context.end_set_up()
        signals.on_signal(lambda: control.send(Leave()))
        worker.run(setup_of(job, inputs), signals, context)


def _virtual_host(launch: Launch) -> VirtualHost | None:
    """Return where a process listens; None without a mesh."""
    if launch.mesh is None:
        return None
    from acsgd.mesh.mesh import publish  # imports cryptography

    address, socket_path = launch.mesh
    return VirtualHost(address, partial(publish, Path(socket_path)))


class ElasticWorker:
    """One process of an elastic run. Keeps the weights and the optimizer state of its stages from view to view."""

    def __init__(self, config: Config, launch: Launch, control: Control, model: RunModel, domain: str = "") -> None:
        """domain: see `WorkerState`."""
        self._config = config
        self._domain = domain
        self._model = model
        self._launch = launch
        self._control = control
        self._session: Session | None = None
        self._is_connected = False
        """Whether `_session` is that of the present view."""
        self._reader: BatchReader | None = None
        """Of the view in which `_session` was trained."""
        self._replica_id = 0
        """See WorkerState; of `_session`."""
        self._state = LoopState(Progress())
        self._transfers: StateSource | JoiningRank | None = None
        """Background transfers of the present view in which this worker takes part."""
        self._progress: JoinProgress | None = None
        """Lines about how far this host has joined, if this worker prints them."""
        self._snapshots = SnapshotStore()
        self._metrics = ViewMetrics()
        self._lock = ViewLock()
        self._has_dropped_save = False
        self._saved_step = 0
        """Step of the newest checkpoint that this worker knows of."""
        self._view: View | None = None
        """The view in which this worker has trained last, or has waited while others trained."""
        self._disks: RunDisks | None = None
        """Which ranks of the view in which this worker has trained last saw the same directories."""
        self._host_links: HostLinks | None = None
        """The latest measurement of links between hosts, in the views so far."""
        self._stopped_at: float | None = time.monotonic()
        """When training stopped in the view before; None on a spare while others train."""
        self._host = _virtual_host(launch)
        self._store = open_store(self._host)

    def run(self, setup: Setup, signals: StopSignals, context: RunContext) -> None:
        """Train in the views that the daemon sends, until the run ends or this host leaves it.

        Raises RunError if the run has failed on this worker.
        """
        name, size = str(self._launch.local_rank), self._launch.local_world_size
        self._control.send(Hello(name, size, os.getpid(), setup, self._report()))
        has_reported = True
        while True:
            match self._control.next_message():
                case Run() as run:
                    has_reported = False
                    if self._run_view(run, signals, context):
                        self._control.send(Done())
                        return
                case Stop() if has_reported:
                    pass  # a more urgent request; a second report could reach the daemon when the next view runs
                case Stop():
                    has_reported = True
                    self._stopped_at = self._stopped_at or time.monotonic()
                    self._store = open_store(self._host)
                    self._control.send(Stopped(self._report()))
                case End(error=error):
                    if error is not None:
                        raise RefusedError(error)
                    return

    def close(self) -> None:
        """Close the logs and release the lock."""
        if self._session is not None:
            self._session.close()
        self._metrics.close()
        self._lock.close()

    def _report(self) -> WorkerState:
        """Return the state of this worker, which has stopped."""
        state = worker_state(self._session, self._state, self._reader, self._store.port)
        snapshots = self._snapshots.reports()
        kept = replace(state, snapshots=snapshots, saved_step=self._saved_step, replica_id=self._replica_id)
        return replace(kept, domain=self._domain)

    def _run_view(self, run: Run, signals: StopSignals, context: RunContext) -> bool:
        """Train in a view, until it ends; return whether the run has ended."""
        view = run.view
        self._return_to(view.plan, run.worker)
        rank = view.plan.rank_of(run.worker)
        if run.started_at is not None:
            self._progress = JoinProgress(run.run, run.started_at)
        if rank is None:
            self._wait_as_spare(view)
            return False
        waits = InterruptibleWaits()
        self._state.has_reported = self._state.is_paused = self._state.is_stopped = False
        self._control.attach(waits)
        try:
            self._train(run, rank, waits, signals, context)
            assert self._session is not None
            is_over = is_run_over(view, self._state, self._session.job.config.optim.num_steps)
            is_stopped = self._state.is_stopped
        except WaitInterruptedError:
            return False
        except AfterLastStepError as error:
            self._control.send(Done())  # else hosts would form another view without this one, or start it again
            raise RefusedError(str(error)) from error
        except SaveError as error:
            if rank in error.ranks:
                raise RefusedError(f"{error.failure}; fix the cause and start this host again") from error
            self._has_dropped_save = True
            self._control.send(Broken(view.epoch, error.failure))
            return False
        except RunError as error:
            if not (error.awaited or isinstance(error, ConnectError | StoreError)):
                raise
            self._control.send(Broken(view.epoch, str(error)))
            return False
        finally:
            self._leave_view(view)
        if is_stopped and not is_over:
            self._control.send(Idle())
        return is_over

    def _return_to(self, plan: Plan, name: str) -> None:
        """Bring the state and the snapshots that this worker keeps to the step at which a view begins."""
        if self._session is not None and name in plan.holders and not plan.from_snapshot:
            complete_step(self._session, self._state, plan, is_behind=name in plan.behind)
        if plan.ranks and plan.from_disk:
            self._snapshots.return_to(0)
        elif plan.from_snapshot:
            self._snapshots.return_to(plan.step)
            self._snapshots.complete(plan.step)

    def _leave_view(self, view: View) -> None:
        """End the communication of a view. The state stays, unless parts of it were still to come."""
        self._control.detach()
        self._stopped_at = time.monotonic()
        if self._session is not None and self._is_connected:
            self._session.abort(f"view {view.epoch} has ended")
        self._is_connected = False
        self._session = end_transfers(self._session, self._state, self._transfers)
        self._transfers = None

    def _drop_session(self) -> None:
        """Drop the state of this rank."""
        if self._session is not None:
            self._session.close_stages()
        self._session = None

    def _wait_as_spare(self, view: View) -> None:
        """Drop the state, which others change from now on; keep it if nobody trains."""
        plan, low = view.plan, self._config.elastic.min_replicas
        too_few = f"fewer than elastic.min_replicas={low} replicas of {plan.stages} stages are left"
        if divides := bool(self._domain):
            too_few = (
                f"the hosts that are left have no {max(low, MIN_REPLICAS)} replicas, as many on each, that can divide "
                f"the state (dp.shard={self._config.dp.shard}, elastic.min_replicas={low})"
            )
        if self._progress is not None:
            self._progress.wait_as_spare(too_few if divides and not plan.ranks else None)
        if plan.ranks:
            self._drop_session()
            self._view, self._stopped_at = view, None
        elif self._session is not None and self._config.elastic.below_min == "end":
            raise RefusedError(f"{too_few} (elastic.below_min=end); start the run again on more hosts")

    def _train(self, run: Run, rank: int, waits: InterruptibleWaits, signals: StopSignals, context: RunContext) -> None:
        """Form the groups of a view, bring the state of this rank there, and train."""
        view, job = run.view, self._prepare(run, rank, waits)
        with contextlib.ExitStack() as stack:
            groups = stack.enter_context(self._connect(job, view, waits))
            transports = find_transports(job, groups, self._host_links)
            self._host_links = transports.links or self._host_links
            groups, notes = open_transports(job, groups, transports)
            stack.enter_context(groups.naming_lost_ranks())
            disks = find_view_disks(job, groups, view)
            lock = self._lock.of(job, groups, view, job.config.run.timeout, disks)
            step = None if view.plan.from_disk else view.plan.step
            notes += check_room(job, groups, disks.checkpoints) if step is None else []
            notes += open_disks(job, groups, disks, step=step, before=self._disks)
            inputs = self._open_inputs(job, groups, disks)
            stack.callback(inputs.reader.close, wait=False)
            job = job.with_steps(inputs.steps, inputs.reader.sampler)
            stack.enter_context(text_log_of(job))
            begun = self._begin(job, inputs, groups, view)
            self._reader = inputs.reader
            metrics = self._open_metrics(begun.start, inputs, groups, disks, notes, view.plan)
            snapshots = open_snapshots(self._snapshots, begun.start.session, inputs.reader, groups, view)
            if snapshots is not None:
                stack.callback(snapshots.close)
            hooks = partial(self._hooks, snapshots)
            training = stack.enter_context(
                open_run(begun.start, inputs, lock, signals, metrics, self._state, stops=STOPS, extra=hooks)
            )
            if self._progress is not None:
                self._progress.enter_view(job.topology.replica, begun.received_bytes, self._transfers)
            self._report_start(view, begun, groups, metrics, snapshots)
            self._view, self._disks = view, disks
            context.start_training()
            enter_training()
            self._run_steps(training)

    def _prepare(self, run: Run, rank: int, waits: InterruptibleWaits) -> Job:
        """Return the job of a rank of a view."""
        plan, hosts = run.view.plan, run.view.hosts
        config = with_stages(self._config, plan.stages)
        if not plan.is_first:  # the run's own checkpoints
            config = replace(config, checkpoint=replace(config.checkpoint, resume="auto"))
        launch = replace(self._launch, rank=rank, world_size=len(plan.ranks))
        first = rank % len(hosts)  # so that ranks do not all get files from the same host
        addresses = [host.address for host in (*hosts[first:], *hosts[:first])]
        files = ModelFiles(addresses, run.run, bytes.fromhex(run.key), waits)
        return replace(prepare(config, launch, model=self._model), get_model_file=files.get)

    def _connect(self, job: Job, view: View, waits: InterruptibleWaits) -> contextlib.AbstractContextManager[Groups]:
        """Return the groups of a view, open while the context is."""
        is_first = job.topology.rank == 0
        store = self._store if is_first else connect_store(view.host_of(0), view.plan.store_port, waits)
        timeout = timedelta(seconds=job.config.run.timeout)
        return connect(
            job.topology,
            timeout=timeout,
            store=store,
            waits=waits,
            several_hosts=True,
            host=self._host,
            domain=job.domain,
            divides=job.config.dp.shard != "none",
            may_be_one=True,
            connections=job.config.run.connections,
            congestion=job.config.run.congestion,
        )

    def _open_inputs(self, job: Job, groups: Groups, disks: RunDisks) -> RunInputs:
        """Open the inputs of a view. All ranks call it together."""
        has_caches = self._session is not None and bool(self._session.caches)
        inputs = open_inputs(job, groups, disks, has_caches=has_caches)
        if self._reader is not None:
            inputs.reader.keep_known(self._reader)  # a save may come before the first batch of the view
        return inputs

    def _open_metrics(
        self,
        begin: Start,
        inputs: RunInputs,
        groups: Groups,
        disks: RunDisks,
        notes: Sequence[str],
        plan: Plan,
    ) -> Metrics:
        """Return the metrics of a view, with its notes and those that are given. All ranks call it together."""
        job = begin.session.job
        metrics = self._metrics.of(job, self._state, disks.log)
        of_metrics = share_metrics(job, groups, disks.log, metrics.file)
        for note in [*self._notes(job, inputs, begin, plan), *notes, *of_metrics]:
            metrics.note(note)
        return metrics

    def _run_steps(self, run: TrainingRun) -> None:
        """Train until the view ends. First save again if the save in the view before has failed."""
        if self._has_dropped_save:
            run.checkpointing.request_save()
        try:
            run_steps(run)
        finally:
            self._saved_step = run.checkpointing.newest_step
            self._has_dropped_save = run.checkpointing.is_saving

    def _hooks(self, snapshots: Snapshots | None, checkpointing: Checkpointing) -> list[StepHook]:
        """Return the participants of the step boundary that only elastic runs have."""
        assert self._session is not None
        num_steps, state = self._session.job.config.optim.num_steps, self._state
        hooks: list[StepHook] = [
            BackgroundJoin(self._session, self._transfers, begun_at=state.progress.step),
            Pause(self._control, checkpointing, self._session.owned.ownership, num_steps, before=state.summary),
        ]
        if self._progress is not None:
            hooks.append(self._progress)
        return hooks if snapshots is None else [*hooks, snapshots]

    def _report_start(
        self, view: View, begun: ViewStart, groups: Groups, metrics: Metrics, snapshots: Snapshots | None
    ) -> None:
        """Wait until all ranks are ready to train, and log the events of the view. All ranks call it together."""
        job, needed_bytes = begun.start.session.job, snapshots.memory_bytes() if snapshots else 0
        has_room = snapshots is not None and snapshots.has_room
        assert self._stopped_at is not None
        seconds, step, record = time.monotonic() - self._stopped_at, begun.start.progress.step, self._state.record
        last = record.fields() if record is not None and record.step == step else None
        before = (self._view.epoch, [asdict(host) for host in self._view.hosts]) if self._view else (0, None)
        mine = json.dumps((begun.received_bytes, needed_bytes, has_room, seconds, before, last))
        texts = groups.all_gather_text("setting up", mine, timeout_s=job.disk_timeout_s)
        reports = [json.loads(text) for text in texts]
        moved, needed, have_room, all_seconds, all_before, records = zip(*reports, strict=True)
        if self._view is None and snapshots is not None:
            interval, most_bytes = job.config.elastic.snapshot, max(needed)
            metrics.note(describe_snapshots(interval, snapshots.budget, most_bytes, have_room=all(have_room)))
        if last is None and self._state.is_open and (logged := next(filter(None, records), None)):
            self._state.record = StepRecord(**logged)  # which this rank logs once the step is closed
        # the same lines on all hosts: as the first rank knows that was not away
        first = max(range(len(all_before)), key=lambda rank: int(all_before[rank][0]))
        hosts = all_before[first][1]
        known = None if hosts is None else [Host(**host) for host in hosts]
        for event in view_events(view, known, step, all_seconds[first], sum(moved)):
            metrics.event(event)

    def _begin(self, job: Job, inputs: RunInputs, groups: Groups, view: View) -> ViewStart:
        """Return the session of this rank: from disk, from its own memory, or from that of other ranks."""
        plan = view.plan
        replica_id = plan.replica_ids[job.topology.replica] if job.plugins.mode.exchanges == "nothing" else 0
        if plan.from_disk:
            self._drop_session()
            begin = start(job, inputs, groups, gives_up=self._config.elastic.force or self._view is not None)
            self._session, self._is_connected, self._replica_id = begin.session, True, replica_id
            self._state.restart(begin.progress)
            if begin.unevaluated is not None:
                self._state.reopen(begin.unevaluated, job.topology)
            return ViewStart(begin)
        assert plan.progress is not None
        restore_streams(inputs.reader, plan)
        if plan.from_snapshot or plan.ranks[job.topology.rank] not in plan.holders:
            self._drop_session()
            self._state.restart(Progress())
            self._state.summary = StepSummary(plan.summary) if plan.summary else None
        newest = inputs.candidates.checkpoints[0] if inputs.candidates.checkpoints else None
        has_all_files = newest is not None and inputs.disks.checkpoints.is_shared
        source = newest.shards if newest and has_all_files else inputs.weight_source or open_weight_source(job)
        constants = Constants(source, job.model.description)
        snapshot = self._snapshots.by_step.get(plan.step) if plan.from_snapshot else None
        host, caches = view.host_of(job.topology.rank), inputs.cache_plan
        joined = join(self._session, job, groups, plan, constants, host=host, cache_plan=caches, snapshot=snapshot)
        self._session, received_bytes, self._transfers, self._state.idle = joined
        self._is_connected, self._replica_id = True, replica_id
        progress = from_json(Progress, plan.progress)
        self._state.progress, self._state.is_open = progress, plan.is_open
        run_missing_exchange(self._session, self._state, plan)
        begin = Start(self._session, progress, newest.path if newest else None, [], source)
        return ViewStart(begin, received_bytes)

    def _notes(self, job: Job, inputs: RunInputs, begin: Start, plan: Plan) -> list[str]:
        """Return what rank 0 prints at the start of a view; what does not change, in the first alone."""
        # also of processes that have just started, as all of a host do after one of them has ended
        has_lost = job.config.dp.shard != "none" and plan.from_disk and not plan.is_first
        lost = [LOST_PARTS % begin.progress.step] if has_lost else []
        if self._view:
            return [*describe_domains(begin.session), *lost, *begin.notes]
        described = [job.describe(), begin.session.describe(), *inputs.describe(begin.session, begin.progress.step)]
        if job.config.elastic.replan:
            described.append("if the number of stages changes (elastic.replan), training stops until layers have moved")
        return [*described, *lost, *begin.notes]
