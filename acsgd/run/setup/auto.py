"""Choose the options that are given as "auto", by what the ranks measure at the start of a run."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from acsgd.dp.ladder import MEASURED
from acsgd.errors import CorruptFileError
from acsgd.groups import Groups
from acsgd.io.checkpoint.resume import Checkpoint
from acsgd.io.telemetry.record import RunEvent
from acsgd.launch import Launch
from acsgd.notes import print_note, report_if_slow
from acsgd.pp.schedules.schedules import CANDIDATES, is_chosen
from acsgd.run.plan.choose import (
    NO_TIME,
    MeasuredRanks,
    ModePlanner,
    TimedOrder,
    TimedRun,
    timed_divisions,
    timed_orders,
    with_options,
)
from acsgd.run.plan.job import Job
from acsgd.run.plan.partition import Partition
from acsgd.run.plan.planner import check_fit
from acsgd.run.plan.plugins import parse_modes
from acsgd.run.plan.rates import LinkRate
from acsgd.run.plan.transports import Transports
from acsgd.run.setup.measured import gather_reports, measure_hosts, measure_ranks


class Chosen(NamedTuple):
    """An option that was chosen at the start of a run."""

    option: str
    value: str
    text: str
    """A sentence for the user."""

    def event(self, step: int) -> RunEvent:
        """Return the choice as an event. step: completed ones."""
        return RunEvent("choice", step, self.text, {"option": self.option, "value": self.value})


def chooses_hosts(job: Job) -> bool:
    """Return whether pp.hosts=auto has several hosts to order."""
    topology = job.topology
    return job.config.pp.hosts == "auto" and topology.stages > 1 and job.local_world_size < topology.world_size


def choose_hosts(job: Job, groups: Groups) -> tuple[Job, Chosen]:
    """Return the job with the order of hosts that pp.hosts=auto takes, whose groups are others. A collective call.

    Raises ValueError if hosts have different numbers of processes.
    """
    with report_if_slow(print_note, lambda: "measuring links between hosts", enabled=job.topology.rank == 0):
        measured = measure_hosts(job, groups)
        fastest, *_ = timed = timed_orders(job, measured)
        plain = next(each for each in timed if each.hosts == tuple(range(len(each.hosts))))
        found, partition = fastest, _with_hosts(job, fastest)
        if found != plain and not _has_room(partition, job, groups):
            found, partition = plain, _with_hosts(job, plain)
    shown = " ".join(map(str, found.hosts))
    before = "" if found.step_s == plain.step_s else f", {plain.step_s:.3g} s in the order of their numbers"
    if found != fastest:
        before = f", {fastest.step_s:.3g} s as {' '.join(map(str, fastest.hosts))}, for which a rank lacks memory"
    (sender, receiver), slowest = max(measured.links.items(), key=lambda each: 1 / each[1].bytes_per_s)
    text = (
        f"pp.hosts=auto takes {shown}: a step of {job.micros_per_replica} micro-batches is predicted to take "
        f"{found.step_s:.3g} s{before}; the slowest link between hosts, from {sender} to {receiver}, "
        f"{describe_link(slowest)}"
    )
    return _with(job, partition), Chosen("pp.hosts", shown, text)


def _with_hosts(job: Job, order: TimedOrder) -> Partition:
    return with_options(job, replace(job.config, pp=replace(job.config.pp, hosts=order.hosts)))


def _has_room(partition: Partition, job: Job, groups: Groups) -> bool:
    """Return whether all ranks have memory for their stages, or get fewer layers later. A collective call."""
    if job.config.pp.layers == "auto":
        return True
    topology, per_host = partition.topology, partition.local_world_size
    launch = Launch(topology.rank, topology.rank % per_host, topology.world_size, per_host)
    return not any(of_rank["is_refused"] for of_rank in gather_reports(groups, job, _fit(partition, launch)))


def choose_options(job: Job, launch: Launch, groups: Groups, transports: Transports) -> tuple[Job, list[Chosen]]:
    """Return the job with what pp.schedule=auto, pp.layers=auto and dp.compress=auto take. A collective call.

    Returns the job as it is if none is given, or there is nothing to choose: one stage, or one replica. The mode is
    that of the checkpoint to resume from, if there is one with several replicas whose mode is allowed. Raises
    ValueError if this rank has no memory for the layers that are measured, or no division fits the ranks.
    """
    config, topology, chosen = job.config, job.topology, list[Chosen]()
    wants_schedule = topology.stages > 1 and is_chosen(config.pp.schedule)
    wants_layers = topology.stages > 1 and config.pp.layers == "auto"
    wants_mode = topology.replicas > 1 and config.dp.compress is not None
    if not (wants_schedule or wants_layers or wants_mode):
        return job, chosen
    with report_if_slow(print_note, lambda: "measuring layers and links", enabled=topology.rank == 0):
        measured = measure_ranks(job, groups, transports)
        if wants_schedule or wants_layers:
            timed = timed_divisions(job, measured)
            found = _first_fitting(timed, measured, job, launch, groups)
            job = _with(job, found.partition)
        if wants_schedule:
            chosen.append(_describe_division("pp.schedule", found.schedule, found, timed, measured))
        if wants_layers:
            alike = [each for each in timed if each.schedule == found.schedule]
            chosen.append(_describe_division("pp.layers", found.layers, found, alike, measured))
        if wants_mode:
            planner = ModePlanner(job, measured, parse_modes(config))
            planner.keep(_fitting_modes(planner, job, launch, groups))
            timed, kept = planner.timed(measured.replica_link), _kept_mode(job, groups)
            taken = next((each for each in timed if each.mode == kept), timed[0])
            chosen.append(_describe_mode(job, taken, timed, measured, is_kept=taken.mode == kept))
            has_nccl = any(transports.uses_nccl("replica", line) for line in topology.lines("replica"))
            # whose communicators are those of one kind of mode
            job = replace(_with(job, taken.partition), modes=None if has_nccl else planner)
    return job, chosen


def _with(job: Job, partition: Partition) -> Job:
    """Return a job with another division over its ranks."""
    return replace(job, **{each.name: getattr(partition, each.name) for each in fields(Partition)})


def _kept_mode(job: Job, groups: Groups) -> str | None:
    """Return the mode of the newest checkpoint that any rank may resume from, None without one. A collective call.

    None also for one of a single replica, which has no state of a mode.
    """
    saved = [each["saved"] for each in gather_reports(groups, job, {"saved": _saved_mode(job)}) if each["saved"]]
    newest: tuple[int, str] | None = max(map(tuple, saved), default=None)
    return newest[1] if newest else None


def _saved_mode(job: Job) -> tuple[int, str] | None:
    """Return step and mode of the newest checkpoint on this host, None without one of several replicas."""
    directory, resume = job.paths.checkpoints, job.config.checkpoint.resume
    paths = [directory.of(step) for step in reversed(directory.steps())]
    for path in {"auto": paths, "never": []}.get(resume, [Path(resume).expanduser()]):
        with suppress(ValueError, OSError, CorruptFileError):  # the resume itself says what is wrong
            run = Checkpoint.open(path).run
            mode = run.options.get("dp.mode")
            return (run.progress.step, mode) if mode and (run.replicas or 0) > 1 else None
    return None


def _first_fitting(
    timed: Sequence[TimedRun], measured: MeasuredRanks, job: Job, launch: Launch, groups: Groups
) -> TimedRun:
    """Return the first run that fits the memory of all ranks. A collective call.

    With pp.layers=auto, ranks that a run does not fit get fewer layers. If none fits, returns the first that may, since
    activations on GPUs are estimates, or raises ValueError. With given layers, 1F1B is known to fit.
    """
    likely, reason = None, ""
    for each in timed:
        if each.schedule == CANDIDATES[0] and job.config.pp.layers != "auto":
            return each
        run: TimedRun | None = each
        largest = dict[int, int]()
        while run is not None:
            fits = gather_reports(groups, job, _fit(run.partition, launch))
            reason = next((of_rank["reason"] for of_rank in fits if of_rank["reason"]), "")
            if not reason:
                return run
            likely = likely or (None if any(of_rank["is_refused"] for of_rank in fits) else run)
            ranks = (replace(job.topology, rank=rank) for rank, of_rank in enumerate(fits) if of_rank["reason"])
            full = {each.stage_rank for each in ranks}
            run = _relieved(run, full, largest, measured) if job.config.pp.layers == "auto" else None
    if likely is None:
        raise ValueError(reason)
    return likely


def _fitting_modes(planner: ModePlanner, job: Job, launch: Launch, groups: Groups) -> list[str]:
    """Return the modes for which all ranks have memory; all-reduce is known to fit. A collective call."""
    found = {mode: _fit(partition, launch)["reason"] for mode, partition in planner.partitions.items()}
    reports = gather_reports(groups, job, found)
    return [mode for mode in found if mode == "allreduce" or not any(each[mode] for each in reports)]


def _fit(partition: Partition, launch: Launch) -> dict[str, Any]:
    """Return why a run does not fit the memory of this rank, "" if it does, and whether that is sure."""
    try:
        return {"reason": check_fit(partition.config, launch, partition.model, partition.streams), "is_refused": False}
    except ValueError as error:
        return {"reason": str(error), "is_refused": True}


def _relieved(
    run: TimedRun, positions: Collection[int], largest: dict[int, int], measured: MeasuredRanks
) -> TimedRun | None:
    """Return a run in which ranks have fewer layers, None without one. largest: see `plan_unequal`; lowered here."""
    layout, config = run.partition.layout, run.partition.config
    stages = [stage for position in positions for stage in layout.placement.stages_of(position)]
    largest.update({stage: len(range(*layout.specs[stage])) - 1 for stage in stages})
    undivided = replace(run.partition, config=replace(config, pp=replace(config.pp, layers="auto")))
    try:
        return timed_divisions(undivided, measured, largest)[0]
    except ValueError:  # the other ranks may not have as many layers as remain
        return None


def _describe_division(
    option: str, value: str, found: TimedRun, timed: Sequence[TimedRun], measured: MeasuredRanks
) -> Chosen:
    """Return which value of pp.schedule or pp.layers is taken, and why. timed: that run and those with others."""
    micros = found.partition.micros_per_replica
    compute = [1e3 * (sum(each.forward_s) + sum(each.backward_s)) for each in measured.layers]
    values = {each.schedule if option == "pp.schedule" else each.layers: each.step_s for each in reversed(timed)}
    times = ", ".join(f"{other} {values[other]:.3g} s" for other in reversed(values) if other != value)
    slowest = functools.reduce(LinkRate.slower_of, measured.links.values())
    text = (
        f"{option}=auto takes {value}: a step of {micros} micro-batches is predicted to take {found.step_s:.3g} s "
        f"({times or 'as balanced by cost'}); all layers take {min(compute):.3g} to {max(compute):.3g} ms for a "
        f"micro-batch on a rank, and the slowest link {describe_link(slowest)}"
    )
    return Chosen(option, value, text)


def _describe_mode(
    job: Job, taken: TimedRun, timed: Sequence[TimedRun], measured: MeasuredRanks, *, is_kept: bool
) -> Chosen:
    """Return which mode is taken, and why. timed: with all modes; is_kept: whether it is that of the checkpoint."""
    from_scratch, spec = job.config.model.init == "scratch", job.config.dp.compress
    cost = MEASURED[taken.mode].cost(from_scratch=from_scratch)
    times = ", ".join(f"{each.mode} {each.step_s:.3g} s" for each in timed if each is not taken)
    how = f"keeps {taken.mode}, the mode of the checkpoint" if is_kept else f"takes {taken.mode}"
    text = (
        f"dp.compress={spec} {how}: a step is predicted to take {taken.step_s:.3g} s ({times}), at a loss "
        f"cost of {cost:g}; the slowest link between replicas {describe_link(measured.replica_link)}"
    )
    return Chosen("dp.mode", taken.mode, text)


def describe_link(link: LinkRate) -> str:
    """Return rate and delay of a link, for the user."""
    if link == NO_TIME:
        return "is NCCL"
    return f"has {8e-6 * link.bytes_per_s:.3g} Mbit/s and a delay of {1e3 * link.delay_s:.2g} ms"
