"""What the workers of an elastic run must have in common, and which options they cannot have."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, replace
from pathlib import Path

import torch
import transformers

from acsgd.config.options import Config
from acsgd.elastic.membership.domains import MIN_REPLICAS
from acsgd.elastic.membership.messages import Setup, SharedFiles
from acsgd.io.data.sources.sources import files_of
from acsgd.pp.schedules.programs import RankPrograms
from acsgd.pp.schedules.schedules import is_chosen
from acsgd.run.initial_weights import base_checksums, base_directory
from acsgd.run.plan.job import Job
from acsgd.run.plan.layout import Cut, divide, layers_by_rank
from acsgd.run.plan.limits import check_memory
from acsgd.run.plan.partition import most_replicas
from acsgd.run.plan.plugins import has_masters
from acsgd.run.setup.inputs import RunInputs
from acsgd.versions import digest_of_code


def check_elastic(job: Job) -> None:
    """Raise ValueError for options that do not work while hosts join and leave."""
    config = job.config
    if any(state.tied == "equal" for state in job.plugins.mode.states) and (key := _copied_weight(job)):
        raise ValueError(
            f"dp.mode={config.dp.mode} keeps state per replica, and several stages have copies of {key}: elastic runs "
            "cannot keep these equal yet; use allreduce, sharded_ps, central_ps or powersgd, or pp.stages=1"
        )
    if job.plugins.delta is not None and job.plugins.delta.cache == "disk":
        raise ValueError(
            f"{job.plugins.delta_option(config.pp)}: the files of caches belong to replicas, whose ranks change in an "
            "elastic run; use cache=ram"
        )
    _check_given(config)
    mode = job.plugins.mode
    if config.elastic.join_moments == "rounded" and (
        mode.exchanges == "gradients" or "frozen_second_moments" in mode.requires
    ):
        raise ValueError(
            f"elastic.join_moments=rounded: replicas of dp.mode={config.dp.mode} need equal moments; remove it, or use "
            "cocktail, cocktail_grad, diloco, sparseloco or local"
        )
    low, micros = config.elastic.min_replicas, config.data.batch // config.pp.micro
    if low > micros:
        raise ValueError(
            f"elastic.min_replicas={low} replicas cannot share the {micros} micro-batches of data.batch; give "
            f"--elastic.min_replicas {micros} or less, a smaller pp.micro, or a larger data.batch"
        )
    if config.elastic.replan and config.pp.blocks is not None:
        raise ValueError(
            f"pp.layers={list(config.pp.blocks)} is for pp.stages={config.pp.stages}, but elastic.replan changes the "
            "number of stages; remove pp.layers or elastic.replan"
        )
    ladder = job.plugins.ladder
    if config.elastic.replan and ladder is not None and (ladder.fixed_forward or ladder.fixed_backward):
        raise ValueError(
            "elastic.replan changes the number of links, of which some have given codecs: remove elastic.replan, or "
            "pp.forward and pp.backward of single links"
        )
    _check_domains(job)


def _check_domains(job: Job) -> None:
    """Raise ValueError if replicas divide state, and those of a host would not hold all of it, or not in all views."""
    config, of_host = job.config, job.local_world_size // job.config.pp.stages
    shard, none = f"dp.shard={config.dp.shard}", "or --dp.shard none"
    if config.dp.shard == "none":
        return
    if of_host < MIN_REPLICAS and config.dp.domain is None:
        raise ValueError(
            f"{shard}: in an elastic run the replicas of a host divide the state, so that a host that is lost takes "
            f"nothing that another does not have; this host has {of_host}, give it --nproc-per-node "
            f"{MIN_REPLICAS * config.pp.stages} or more, {none}"
        )
    if config.dp.local == "none":
        raise ValueError(
            f"{shard}: dp.local=none divides the state among all hosts, and a host that is lost would take a part with "
            f"it; use --dp.local auto, {none}"
        )
    if config.elastic.replan:
        raise ValueError(
            f"{shard}: elastic.replan changes the layers of a rank, and with them the parts; remove elastic.replan, "
            f"{none}"
        )
    if config.elastic.max_replicas is not None and config.elastic.max_replicas < MIN_REPLICAS:
        raise ValueError(
            f"{shard} divides the state among {MIN_REPLICAS} replicas at least; use --elastic.max_replicas "
            f"{MIN_REPLICAS}, {none}"
        )
    # with dp.domain, hosts may have fewer replicas than domains
    _check_numbers(job, of_host if config.dp.domain is None else max(MIN_REPLICAS, most_replicas(config)))


def _check_numbers(job: Job, most: int) -> None:
    """Raise ValueError if domains of up to `most` replicas have no number of replicas together that may train."""
    config, low, high = job.config, job.config.elastic.min_replicas, most_replicas(job.config)
    domain = "host" if config.dp.domain is None else "domain"
    shard, micros, numbers = f"dp.shard={config.dp.shard}", equal_micros(job), range(MIN_REPLICAS, most + 1)

    def may_train(low: int, high: int) -> bool:
        totals = {domains * each for each in numbers for domains in range(1, high // each + 1)}
        return any(low <= total and (not micros or micros % total == 0) for total in totals)

    if not may_train(1, job.shapes.num_micros):
        raise ValueError(
            f"{shard} needs as many micro-batches on each replica, of {job.shapes.num_micros} in a step (data.batch / "
            f"pp.micro), and a {domain} has {most} replicas; use a data.batch of "
            f"{config.pp.micro * most * -(-job.shapes.num_micros // most)}, or --dp.shard "
            f"{'optimizer' if micros else 'none'}"
        )
    if not may_train(low, high):
        divides = f", whose number divides the {micros} micro-batches of a step" if micros else ""
        raise ValueError(
            f"{shard}: no {domain}s with up to {most} replicas each, as many on all, have {low} to {high} replicas "
            f"together{divides}; change elastic.min_replicas={low}, elastic.max_replicas="
            f"{config.elastic.max_replicas} or data.batch, or give --dp.shard none"
        )


def equal_micros(job: Job) -> int:
    """Return the number of micro-batches of a step if all replicas need the same number of them, else 0."""
    return job.shapes.num_micros if job.config.dp.sums_passes else 0


def _check_given(config: Config) -> None:
    """Raise ValueError for options that are chosen by what ranks measure at the start of a run."""
    if is_chosen(config.pp.schedule) and config.pp.stages > 1:
        raise ValueError(
            "pp.schedule=auto measures all ranks at the start, and those of an elastic run come and go; give the "
            "schedule that is the fastest by acsgd plan RUN.toml --calibrate"
        )
    if config.pp.layers == "auto" and config.pp.stages > 1:
        raise ValueError(
            "pp.layers=auto measures all ranks at the start, and those of an elastic run come and go; give the blocks "
            "of each stage, such as --pp.layers 8 4, or let faster replicas get more work: --data.deal speed"
        )
    if config.pp.hosts is not None and config.pp.stages > 1:
        raise ValueError(
            "pp.hosts orders the hosts of a run that keeps them; an elastic run gives each rank to the worker that "
            "holds most of its layers: remove pp.hosts"
        )
    if config.dp.compress is not None:
        raise ValueError(
            f"dp.compress={config.dp.compress} measures the links between replicas, and those of an "
            "elastic run come and go; give the mode, such as --dp.mode cocktail"
        )


def _copied_weight(job: Job) -> str | None:
    """Return a tied weight of which several ranks of a pipeline have copies, None if there is none."""
    return next((tied.key for tied in job.tied if not tied.lookups), None)


def setup_of(job: Job, inputs: RunInputs) -> Setup:
    """Return what all workers of a run must have in common."""
    parts = _options(job) | {
        # checksums, since each host reads frozen weights from its own files
        "model": job.model.config.to_json_string() + base_checksums(job),
        "data": inputs.reader.fingerprint(),
        "versions": f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}",
        "code": digest_of_code(),
    }
    digests = {name: hashlib.sha256(text.encode()).hexdigest()[:12] for name, text in parts.items()}
    elastic = job.config.elastic
    return Setup(
        cuts=possible_cuts(job),
        run_dir=str(Path(job.config.log.dir).resolve()),
        min_replicas=elastic.min_replicas,
        max_replicas=most_replicas(job.config),
        silence_s=elastic.silence,
        hang_s=elastic.hang,
        force=elastic.force,
        parts=digests,
        files=SharedFiles(
            str(job.paths.checkpoints.path.resolve()),
            str(base_directory(job).resolve()),
            tuple(str(Path(name).expanduser().resolve()) for name in files_of(job.config.data)),
            job.config.checkpoint.bytes_per_s,
        ),
        equal_micros=equal_micros(job),
    )


def possible_cuts(job: Job) -> tuple[Cut, ...]:
    """Return the cuts that pipelines of the run may have, most stages first.

    With elastic.replan, those of all numbers of stages up to pp.stages whose weights and gradients fit the memory.
    """
    cuts = [job.layout.cut]
    while job.config.elastic.replan and len(cuts[-1]) > 1 and _fits(job, len(cuts[-1]) - 1):
        cuts.append(_cut_of(job, len(cuts[-1]) - 1))
    return tuple(cuts)


def _cut_of(job: Job, ranks: int) -> Cut:
    """Return the layers of each position of a pipeline of fewer ranks, as `prepare` divides them."""
    stages = ranks * job.plugins.schedule.chunks
    specs = divide(job.config, job.model, stages, None if stages == 1 else job.layout.costs)
    return layers_by_rank(RankPrograms(job.plugins.schedule, ranks, 0).placement, specs)


def with_stages(config: Config, stages: int) -> Config:
    """Return the options with another number of ranks per pipeline."""
    return replace(config, pp=replace(config.pp, stages=stages))


def _fits(job: Job, stages: int) -> bool:
    """Return whether the processes of this host have memory for pipelines of some number of stages."""
    config = job.config
    try:
        check_memory(
            job.model.parameters,
            job.shapes.dtype,
            stages,
            job.local_world_size,
            job.streams,
            has_masters=has_masters(config),
            offloads=config.optim.offload == "cpu",
            params=config.model.offload,
        )
    except ValueError:
        return False
    return True


def _options(job: Job) -> dict[str, str]:
    """Return the value of each option that must be equal on all hosts, by the name that a user types."""
    sections = asdict(job.config.common)
    return {f"{name}.{key}": repr(value) for name, section in sections.items() for key, value in section.items()}
