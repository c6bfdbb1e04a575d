"""Inputs of a job: training and evaluation data, initial weights, and checkpoints to resume from."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from acsgd.config.adapters import ADAPTERS
from acsgd.config.spec import to_spec
from acsgd.groups import Groups
from acsgd.io.checkpoint.identity import ADAPTER, WEIGHTS, RunIdentity, SourceIdentity, describe_options
from acsgd.io.checkpoint.resume import Candidates, find
from acsgd.io.data.batches import BatchReader
from acsgd.io.data.formats.formats import CHATS, describe_unused
from acsgd.io.data.held_out import HeldOut
from acsgd.io.data.row_spec import RowSpec
from acsgd.io.data.rows.ul2r import UL2R
from acsgd.io.files.read_ahead import read_ahead
from acsgd.layers.verify import PACKED, PREFIXED
from acsgd.pp.wire.cache_plan import CachePlan, plan_caches
from acsgd.run.initial_weights import check_base_of, checksum_of, open_weight_source
from acsgd.run.plan.job import Job
from acsgd.run.session import Session
from acsgd.run.setup.choices import describe_choices
from acsgd.run.setup.data import Data, describe_overlaps, open_data
from acsgd.run.setup.describe import describe_padding, has_padding
from acsgd.run.setup.directories import SHARED_DISKS, RunDisks
from acsgd.shards.chat_template import describe_date, describe_template
from acsgd.shards.load import WeightSource
from acsgd.shards.tokenizer import DocumentTokens, SpecialTokens, name_tokens
from acsgd.tasks.base import objective_of


@dataclass(frozen=True)
class RunInputs:
    """Inputs of a job, found and checked. No weights have been read yet."""

    reader: BatchReader
    held_out: HeldOut | None
    identity: RunIdentity
    """Identity that a checkpoint must have to be resumed from, with the initial weights of the run."""
    candidates: Candidates
    weight_source: WeightSource | None
    """Initial weights of a new run; None if there are checkpoints to resume from."""
    cache_plan: CachePlan | None
    """Size and place of the activation caches; None without delta."""
    steps: int
    """Number of optimizer steps of the run."""
    notes: tuple[str, ...]
    """Sentences on special tokens, skipped text, held-out data, epochs, padding, activation caches and options without
    effect; see `describe`."""
    disks: RunDisks = SHARED_DISKS

    @property
    def held_out_key(self) -> str:
        """Hash of the evaluation data; empty if there is none."""
        return hashlib.sha256(self.held_out.fingerprint().encode()).hexdigest() if self.held_out else ""

    def describe(self, session: Session, step: int) -> list[str]:
        """Return `notes`, and sentences on what the sources of the next step contain, for which it waits if streamed.

        These are about how the learned texts end, if generation with the files of the model would not stop there, a
        chat template that writes the date, and options of [data] that no format reads. On rank 0, which prints them,
        also those of `describe_overlaps`. Raises RunError if a streamed source cannot be read.
        """
        following = range(step, min(step + 1, self.steps))  # none after the last step
        for _ in read_ahead(self.reader.look_ahead, following, 0, waits=session.groups.waits):
            pass  # in a thread: an interrupt ends the wait
        job = session.job
        formats = self.reader.rows.formats | (self.held_out.rows.formats if self.held_out else set())
        ends = [] if job.model.task.has_labels else self.reader.rows.ends.notes(job.tokenizer, job.ends)
        found = [note for note in self.reader.notes if note not in self.notes]  # of streamed sources, known only now
        date = describe_date(job.tokenizer) if formats & {*CHATS} else []
        domains = describe_domains(session)
        of_data = [*found, *ends, *date, *describe_unused(job.config.data, formats)]
        if job.topology.rank == 0:
            separate = self.held_out.rows.rows if self.held_out is not None and job.eval_sources else ()
            of_data += describe_overlaps(job, self.reader.rows.rows, separate)
        return [*self.notes, *domains, *of_data]

    def fingerprint(self) -> str:
        """Return a string that must be equal on all ranks."""
        steps = [checkpoint.run.progress.step for checkpoint in self.candidates.checkpoints]
        return self.reader.fingerprint() + repr((self.held_out and self.held_out.fingerprint(), self.steps, steps))


def open_inputs(
    job: Job, groups: Groups | None = None, disks: RunDisks = SHARED_DISKS, *, has_caches: bool = False
) -> RunInputs:
    """Find and check the inputs of a job. Verified layers, tokens and converted weights get into the cache if need be.

    Writes nothing else. groups: see `open_data`; has_caches: whether this process has its activation caches already.
    Raises ValueError if an input is missing or invalid, or if a checkpoint has another identity.
    """
    verify_layers(job)
    data = open_data(job, groups)
    if groups is not None:  # else a thread that waits for a streamed source waits on
        groups.waits.on_interrupt(partial(data.reader.close, wait=False))
    reader, identity = data.reader, _identity(job, data)
    candidates = find(job.paths.checkpoints, job.config.checkpoint.resume, identity)
    if job.model.adapter is not None and candidates.checkpoints and disks.checkpoints.is_shared:
        check_base_of(job, candidates.checkpoints[0].shards)
    fresh = not candidates.checkpoints and not candidates.rejected
    known, known_length = reader.sampler.num_known, job.with_steps(data.steps, reader.sampler)
    plan = plan_activation_caches(known_length, known, run_id=identity.digest(), fresh=fresh, are_kept=has_caches)
    source = open_weight_source(job) if fresh else None
    saved = next((each.run.identity.weights for each in candidates.checkpoints), "")
    identity = replace(identity, weights=checksum_of(job, source) if source else saved)
    held_out_notes, plan_notes = data.held_out.notes if data.held_out else (), (plan.note,) if plan else ()
    of_data = (_describe_tokens(job, data.spec), *reader.notes, *held_out_notes, *data.notes)
    best = next((each.run.progress.best for each in candidates.checkpoints), {})
    choices = describe_choices(known_length, reader.sampler.epochs(data.steps), best)
    notes = (*of_data, *describe_padding(job), *plan_notes, *choices)
    return RunInputs(reader, data.held_out, identity, candidates, source, plan, data.steps, notes, disks)


def _identity(job: Job, data: Data) -> RunIdentity:
    """Return the identity of a run."""
    adapter, rows = job.model.adapter, data.reader.rows.rows
    return RunIdentity.of(
        job.model.config,
        tokenizer=data.spec.tokenizer,
        texts=data.reader.fingerprint(),
        data={
            **data.spec.recorded(),
            WEIGHTS: list(data.reader.sampler.counts),
            **({ADAPTER: to_spec(adapter, ADAPTERS)} if adapter else {}),
        },
        sources=[
            SourceIdentity.of(source.name, each.fingerprint())
            for (source, _), each in zip(job.sources, rows, strict=True)
        ],
        reading=describe_options(data.spec.reading) | describe_template(job.tokenizer),
    )


def _describe_tokens(job: Job, spec: RowSpec) -> str:
    """Return a sentence on special tokens and padding."""
    config, tokenizer = job.model.config, job.tokenizer
    if spec.begin is not None and spec.end is not None:
        objective, padding = objective_of(spec), None if spec.rows == "concat" else spec.padding
        denoising = f"; {objective.tokens.describe(tokenizer)}" if isinstance(objective, UL2R) else ""
        vocabulary = config.get_text_config().vocab_size
        return DocumentTokens(spec.begin, spec.end).describe(tokenizer, vocabulary, padding) + denoising
    special = SpecialTokens.of(tokenizer)
    around = [name_tokens(tokenizer, ids) or "no token of its own" for ids in special]
    return (
        f"tokens: a text begins with {around[0]} and ends with {around[1]}; padding is "
        f"{name_tokens(tokenizer, [spec.padding])}"
    )


def verify_layers(job: Job) -> None:
    """Verify the layers of the model if that was not done before, and store them and their costs in the cache."""
    model, cache, data = job.model, job.paths.layers_cache, job.config.data
    if not model.is_verified or data.isolate or data.objective != "causal" or has_padding(job):
        result = cache.verify(model.config, model.derived, reports_wait=job.is_first_on_host)
        if data.isolate and PACKED not in result.batches:
            raise ValueError(
                f"data.isolate: {model.config.model_type} does not keep the documents of a sequence apart; use "
                "data.rows=single, or remove data.isolate"
            )
        if data.objective != "causal" and PREFIXED not in result.batches:
            raise ValueError(
                f"data.objective={data.objective}: {model.config.model_type} cannot attend to a prefix in both "
                "directions, since not all masks of its attention are built by transformers; use another model, or "
                "remove data.objective"
            )
    if job.layout.costs is not None:
        cache.keep_costs(
            model.config, model.derived, job.shapes.sizes, job.layout.costs, device=job.streams.device.type
        )


def plan_activation_caches(
    job: Job, samples: int, *, run_id: str, fresh: bool, are_kept: bool = False
) -> CachePlan | None:
    """Plan the activation caches of this rank's links; None if no tensor of the run is cached.

    samples: number of training samples; run_id, fresh: see CachePlan; are_kept: see `plan_caches`. Raises ValueError
    if they do not fit.
    """
    delta, tensors = job.plugins.delta, job.cached_tensors
    if delta is None or not any(tensors) or job.topology.stages == 1:
        return None
    try:
        return plan_caches(
            delta,
            tensors,
            samples=samples,
            per_step=job.most_micros * job.config.pp.micro,
            ends=job.cached_boundaries,
            processes=job.local_world_size,
            directory=Path(job.config.log.dir) / "activation-cache",
            replica=job.topology.replica,
            first_layers=[job.model.layers[start].name for start, _ in job.layout.specs[1:]],
            run_id=run_id,
            fresh=fresh,
            are_kept=are_kept,
        )
    except ValueError as error:
        if job.plugins.ladder is not None:
            fewer = "auto:cached_gradients=false, with half of them, or auto:delta=false"
            raise ValueError(f"pp.compress: {error}; or --pp.compress {fewer}") from None
        raise ValueError(f"{job.plugins.delta_option(job.config.pp)}: {error}") from None


def describe_domains(session: Session) -> list[str]:
    """Return sentences on replicas that act as one or divide the weights, or on a dp.domain without effect."""
    job, domains, ownership = session.job, session.groups.domains, session.owned.ownership
    notes = [] if domains is None else [domains.describe()]
    if ownership.parts:
        where = "" if domains is None else " of its domain"
        count = len(ownership.owners)
        notes.append(
            f"dp.shard={job.config.dp.shard}: each replica owns a part of what the {count} replicas{where} share"
        )
    if domains is None and job.config.dp.domain is not None and job.domain and job.topology.replicas > 1:
        uneven = ", or, with dp.shard, not all have as many" if ownership.parts else ""
        notes.append(
            f"dp.domain={job.config.dp.domain} has no effect: all replicas are in one domain, or no domain has several "
            f"replicas of all stages{uneven}"
        )
    return notes


def describe_difference(job: Job, groups: Groups) -> str:
    """Return which options of two ranks differ, or what else to compare. Collective."""
    sections = asdict(job.config.common).items()
    mine = {f"{section}.{key}": str(value) for section, options in sections for key, value in options.items()}
    texts = groups.all_gather_text("comparing options", json.dumps(mine), timeout_s=job.disk_timeout_s)
    first = json.loads(texts[0])
    for rank, text in enumerate(texts):
        if text != texts[0]:
            other = json.loads(text)
            different = [f"{key}={first[key]} and {other[key]}" for key in first if first[key] != other[key]]
            return f"rank 0 and rank {rank} have {', '.join(different)}; give all hosts the same options"
    return "compare run files, flags, model configs and texts of all hosts"
