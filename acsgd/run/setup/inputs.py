"""Inputs of a job: training and evaluation data, initial weights, and checkpoints to resume from."""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from acsgd.adapters.base import check_base
from acsgd.adapters.initial import NewAdapter
from acsgd.config.adapters import ADAPTERS
from acsgd.config.spec import to_spec
from acsgd.errors import CorruptFileError
from acsgd.groups import Groups
from acsgd.io.checkpoint.progress import ADAPTER, WEIGHTS, RunIdentity
from acsgd.io.checkpoint.resume import Candidates, find
from acsgd.io.checkpoint.source_identity import SourceIdentity, describe_options
from acsgd.io.data.batches import BatchReader
from acsgd.io.data.held_out import HeldOut
from acsgd.io.data.rows.ul2r import UL2R
from acsgd.io.data.sources.streamed import Streamed
from acsgd.io.data.tokens.tokens import tokenizer_fingerprint
from acsgd.io.files.cache import open_cached
from acsgd.layers.verify import PACKED, PREFIXED
from acsgd.pp.wire.cache_plan import CachePlan, plan_caches
from acsgd.pp.wire.delta import Delta
from acsgd.run.plan.job import Job
from acsgd.run.setup.data import open_data, row_maker
from acsgd.run.setup.describe import describe_padding, has_padding
from acsgd.shards.convert import from_hf
from acsgd.shards.disk import ShardDirectory
from acsgd.shards.load import RandomWeights, WeightSource
from acsgd.shards.manifest import MANIFEST, VERSION, StoredFile
from acsgd.shards.tokenizer import DocumentTokens, SpecialTokens, name_tokens, padding_id


@dataclass(frozen=True)
class RunInputs:
    """Inputs of a job, found and checked. No weights have been read yet."""

    reader: BatchReader
    held_out: HeldOut | None
    identity: RunIdentity
    """Identity that a checkpoint must have to be resumed from."""
    candidates: Candidates
    weight_source: WeightSource | None
    """Initial weights of a new run; None if there are checkpoints to resume from."""
    cache_plan: CachePlan | None
    """Size and place of the activation caches; None without delta."""
    document_tokens: str
    """Sentence on the special tokens around documents, and on padding."""
    steps: int
    """Number of optimizer steps of the run."""
    data_notes: tuple[str, ...]
    """Sentences on the number of steps, on sources whose sequences are trained on more than once, and on padding."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on special tokens, formats, skipped text, held-out data, epochs and activation caches."""
        held_out = self.held_out.notes if self.held_out else ()
        cache = (self.cache_plan.note,) if self.cache_plan else ()
        return (self.document_tokens, *self.reader.notes, *held_out, *self.data_notes, *cache)

    def fingerprint(self) -> str:
        """Return a string that must be equal on all ranks."""
        steps = [checkpoint.run.progress.step for checkpoint in self.candidates.checkpoints]
        return self.reader.fingerprint() + repr((self.held_out and self.held_out.fingerprint(), self.steps, steps))


def open_inputs(job: Job, groups: Groups | None = None, *, has_caches: bool = False) -> RunInputs:
    """Find and check the inputs of a job. Verified layers, tokens and converted weights get into the cache if need be.

    Writes nothing else. groups: as of `open_data`; has_caches: whether this process has its activation caches already.
    Raises ValueError if an input is missing or invalid, or if a checkpoint has another identity.
    """
    verify_layers(job)
    reader, held, steps, notes = open_data(job, groups)
    data = job.config.data
    identity = RunIdentity.of(
        job.model.config,
        tokenizer=tokenizer_fingerprint(job.tokenizer),
        texts=reader.fingerprint(),
        data={
            "data.sequence": data.sequence,
            "data.batch": data.batch,
            "data.seed": data.seed,
            "data.eval_fraction": data.eval_fraction,
            WEIGHTS: list(reader.sampler.counts),
            **_row_options(job),
            **({ADAPTER: to_spec(job.model.adapter, ADAPTERS)} if job.model.adapter else {}),
        },
        sources=[
            SourceIdentity.of(source.name, rows.fingerprint())
            for (source, _), rows in zip(job.sources, reader.rows.rows, strict=True)
        ],
        reading=describe_options(job.sources[0].source.options),
    )
    candidates = find(job.paths.checkpoints, job.config.checkpoint.resume, identity)
    if job.model.adapter is not None and candidates.checkpoints:
        _check_base(job, candidates.checkpoints[0].shards)
    fresh = not candidates.checkpoints and not candidates.rejected
    known = reader.sampler.num_known
    cache_plan = plan_activation_caches(job, known, run_id=identity.digest(), fresh=fresh, are_kept=has_caches)
    source = open_weight_source(job) if fresh else None
    notes = (*notes, *describe_padding(job))
    return RunInputs(reader, held, identity, candidates, source, cache_plan, _describe_tokens(job), steps, notes)


def _row_options(job: Job) -> dict[str, object]:
    """Return what the rows depend on besides the sources."""
    config, options = job.config, dict[str, object]()
    if any(isinstance(source, Streamed) for source, _ in job.sources):
        options |= {"data.window": config.data.window}
    if job.model.task.name == "lm":
        special = DocumentTokens.of(job.tokenizer)
        options |= {"tokens before a document": special.begin, "token after a document": special.end}
    if config.rows != "concat":  # checkpoints of rows by concatenation do not record any
        options |= {"data.rows": config.rows, "data.long": config.long, "data.isolate": config.data.isolate}
    if config.data.objective != "causal":
        options |= {"data.objective": config.data.objective}
    if isinstance(objective := row_maker(job).objective, UL2R):
        tokens = objective.tokens
        options |= {"data.sentinels": config.data.sentinels, "data.modes": config.data.modes}
        options |= {"tokens of denoising": [*map(list, tokens.modes.values()), list(tokens.sentinels)]}
    return options


def _describe_tokens(job: Job) -> str:
    """Return a sentence on special tokens and padding."""
    config, tokenizer = job.model.config, job.tokenizer
    padding = None if job.config.rows == "concat" else padding_id(tokenizer, config)
    if job.model.task.name == "lm":
        objective = row_maker(job).objective
        denoising = f"; {objective.tokens.describe(tokenizer)}" if isinstance(objective, UL2R) else ""
        vocabulary = config.get_text_config().vocab_size
        return DocumentTokens.of(tokenizer).describe(tokenizer, vocabulary, padding) + denoising
    special = SpecialTokens.of(tokenizer)
    around = [name_tokens(tokenizer, ids) or "no token of its own" for ids in special]
    assert padding is not None
    return (
        f"tokens: a text begins with {around[0]} and ends with {around[1]}; padding is "
        f"{name_tokens(tokenizer, [padding])}"
    )


def verify_layers(job: Job) -> None:
    """Verify the layers of the model, unless they are, and keep them and their costs in the cache."""
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


def open_weight_source(job: Job) -> WeightSource:
    """Return the initial weights. Converts a Hugging Face directory into the cache if it is not there yet."""
    model, source = job.model, _open_base(job)
    if model.adapter is None:
        return source
    built = model.task.build(model.config)
    seed = job.config.data.seed
    return NewAdapter(
        source, built, model.description, model.adapter, model.task.name, seed=seed, tokenizer=model.directory
    )


def base_checksums(job: Job) -> str:
    """Return the checksums of the files of the model whose parameters are frozen, by an adapter or by model.freeze.

    Empty if none are, or if the weights are drawn.
    """
    if job.model.adapter is None and not job.config.model.freeze:
        return ""
    base = _open_base(job)
    if not isinstance(base, ShardDirectory):
        return ""
    return repr(sorted((layer, entry.checksum) for layer, entry in base.manifest.layers.items()))


def _check_base(job: Job, checkpoint: ShardDirectory) -> None:
    """Raise RunError if the adapter of a checkpoint was trained on another model, as far as this rank's layers show."""
    base = _open_base(job)
    if isinstance(base, ShardDirectory):
        layers = [
            job.model.layers[index].name for stage in job.layout.stages for index in range(*job.layout.specs[stage])
        ]
        check_base(checkpoint, base, layers, name=job.config.model.name)


def _open_base(job: Job) -> WeightSource:
    """Return the initial weights of the model without its adapter."""
    if job.config.model.init == "scratch":
        return RandomWeights(job.model.task, job.model.config, job.model.derived, seed=job.config.data.seed)
    if (job.model.directory / MANIFEST).is_file():
        return ShardDirectory(job.model.directory)
    files = sorted(
        path
        for path in job.model.directory.iterdir()
        if path.suffix in (".safetensors", ".bin", ".json") and path.is_file()
    )
    state = repr([(path.resolve(), path.stat().st_size, path.stat().st_mtime_ns) for path in files])
    task = job.model.task.name
    name = f"{job.model.directory.name}-{task}-{VERSION}-{hashlib.sha256(state.encode()).hexdigest()[:16]}"

    def convert(target: Path) -> None:
        target.mkdir(exist_ok=True)
        from_hf(job.model.directory, target, task=task, layers=job.model.derived)

    path = job.paths.cache / "models" / name
    return open_cached(path, convert, CachedModel, resumable=True, reports_wait=job.is_first_on_host)


class CachedModel(ShardDirectory):
    """A model in the cache. A corrupt one is not opened again, so that the next start converts it again."""

    def __init__(self, path: Path) -> None:
        """Read the manifest. Raises CorruptFileError if it is missing, or a file has another size than it says."""
        if not os.path.lexists(path / MANIFEST):
            raise CorruptFileError(path / MANIFEST, "is missing")
        super().__init__(path)
        for entry in self.manifest.files:
            file = path / entry.file
            if not file.is_file() or file.stat().st_size != entry.bytes:
                raise CorruptFileError(
                    file, f"is corrupt: it was written with {entry.bytes} bytes, and has another size"
                )

    def verify(self, entry: StoredFile) -> Path:
        try:
            return super().verify(entry)
        except CorruptFileError as error:
            with contextlib.suppress(OSError):
                (self.path / MANIFEST).unlink(missing_ok=True)
            raise CorruptFileError(
                error.path, f"{error.problem}; start again, and the model is converted again"
            ) from None


def plan_activation_caches(
    job: Job, samples: int, *, run_id: str, fresh: bool, are_kept: bool = False
) -> CachePlan | None:
    """Plan the activation caches of this rank's links; None without delta or without links.

    samples: number of training samples; run_id, fresh: see CachePlan; are_kept: as of `plan_caches`. Raises ValueError
    if they do not fit.
    """
    delta = job.plugins.forward
    if not isinstance(delta, Delta) or job.topology.stages == 1:
        return None
    try:
        return plan_caches(
            delta,
            [boundary.values() for boundary in job.shapes.boundaries],
            samples=samples,
            per_step=len(job.micro_ids) * job.config.pp.micro,
            ends=[
                cut for stage in job.layout.stages for cut in (stage - 1, stage) if 0 <= cut < len(job.layout.specs) - 1
            ],
            processes=job.local_world_size,
            directory=Path(job.config.log.dir) / "activation-cache",
            replica=job.topology.replica,
            first_layers=[job.model.layers[start].name for start, _ in job.layout.specs[1:]],
            run_id=run_id,
            fresh=fresh,
            are_kept=are_kept,
        )
    except ValueError as error:
        raise ValueError(f'pp.forward="{job.config.pp.forward}": {error}') from None
