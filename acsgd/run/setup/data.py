"""Training and evaluation data of a job."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from acsgd.config.options import EPOCHS, Config, OptimConfig, in_steps
from acsgd.groups import Groups
from acsgd.io.data.batches import BatchReader
from acsgd.io.data.held_out import HeldOut, held_out, split
from acsgd.io.data.row_spec import RowSpec
from acsgd.io.data.rows.base import RowReader, Rows, describe, described
from acsgd.io.data.rows.documents import ConcatRows, DocumentRows
from acsgd.io.data.rows.labelled import PairRows
from acsgd.io.data.sampler import Sampler, block_counts
from acsgd.io.data.sources.base import ReadOptions, RecordCounts
from acsgd.io.data.sources.sources import LocalFile, WeightedSource, describe_shared, local_files
from acsgd.io.data.tokens.pipeline import encode_source
from acsgd.io.files.cache import TIMEOUT_S
from acsgd.run.plan.job import Job
from acsgd.run.setup.describe import has_padding
from acsgd.run.setup.rows import RowMaker, no_targets

ROWS = "properties of the rows"
"""Name of the text that rank 0 publishes."""
OF_TRAINED_TEXT = "held-out losses are those of text that is trained on"
STREAMS = "streams"
"""Directory in log.dir with the segments of streamed sources."""


class Data(NamedTuple):
    """Training and evaluation data of a job, as one replica reads them."""

    reader: BatchReader
    held_out: HeldOut | None
    """None if nothing is held out."""
    steps: int
    """Number of optimizer steps of the run."""
    notes: tuple[str, ...]
    """Sentences on the number of steps, and on sources whose sequences are trained on more than once."""
    spec: RowSpec


def open_data(job: Job, groups: Groups | None = None) -> Data:
    """Open the sources of a job. Tokenizes text into the cache if it is not there yet.

    groups: of a run, in which ranks that need no tokens get the properties of the rows from rank 0, which always needs
    some. Raises ValueError if a source cannot be read or is too short.
    """
    config, topology, maker = job.config, job.topology, row_maker(job)
    rows = _open_or_receive_rows(job, maker, [*job.sources, *job.eval_sources], groups)
    training, separate = (
        _reader_of(job, part, groups) for part in (rows[: len(job.sources)], rows[len(job.sources) :])
    )
    fraction, unit = maker.spec.eval_fraction, job.model.task.rows_per_example
    sampler = Sampler(
        seed=maker.spec.seed,
        batch=maker.spec.batch,
        counts=_slots(job, training.rows),
        sizes=tuple(None if each.is_streamed else split(len(each), fraction, unit) for each in training.rows),
        unit=unit,
    )
    held = held_out(training, separate, fraction, replicas=topology.replicas, replica=topology.replica, unit=unit)
    steps = _steps(config.optim, sampler)
    notes = (*_describe_steps(config, sampler, steps), *_describe_epochs(job.sources, sampler, steps))
    return Data(BatchReader(training, sampler, job.micro_ids), held, steps, notes, maker.spec)


def open_held_out(job: Job, groups: Groups | None = None) -> HeldOut:
    """Open what is held out alone, as `open_data` does."""
    config, topology, maker = job.config, job.topology, row_maker(job)
    reader = _reader_of(job, _open_or_receive_rows(job, maker, job.eval_sources or job.sources, groups), groups)
    separate, unit = reader if job.eval_sources else _reader_of(job, [], groups), job.model.task.rows_per_example
    fraction = config.data.eval_fraction
    held = held_out(reader, separate, fraction, replicas=topology.replicas, replica=topology.replica, unit=unit)
    assert held is not None
    return held


def held_out_records(job: Job) -> set[str]:
    """Return the places of the records that data.eval_fraction holds out as a whole.

    Raises ValueError if there are none, as `open_data` does, or if the rows have no records.
    """
    held, maker, places = open_held_out(job), row_maker(job), set[str]()
    for (source, _), rows, part in zip(job.sources, held.rows.rows, held.ranges, strict=True):
        assert isinstance(rows, ConcatRows | DocumentRows | PairRows)  # those of the tasks that generate text
        documents, number = rows.documents_in(part), 0
        for batch in encode_source(source, job.tokenizer, job.model.task.encoder(maker), RecordCounts()):
            for each in batch.parts:
                if documents[number]:
                    places.add(each.where)
                number += each.example.ends_document
    if not places:
        raise ValueError(
            f"data.eval_fraction={job.config.data.eval_fraction:g} holds out no record as a whole, only parts of some"
        )
    return places


def _slots(job: Job, rows: Sequence[Rows]) -> tuple[int, ...]:
    """Return the number of slots of each source per block; (1,) if the sources have no weights."""
    shares = []
    for (_, weight), each in zip(job.sources, rows, strict=True):
        if weight is None:
            return (1,)
        shares.append(weight / (each.mean_targets if job.config.data.weights == "tokens" else 1.0))
    return block_counts([share / math.fsum(shares) for share in shares])


def _steps(optim: OptimConfig, sampler: Sampler) -> int:
    """Return the number of optimizer steps of the run. Raises ValueError if its warm-up is longer."""
    steps = optim.num_steps if optim.epochs is None else sampler.steps_of(optim.epochs)
    warmup = int(in_steps(optim.warmup, sampler.steps_of))
    if warmup > steps:
        given = (
            f"optim.steps={steps}" if optim.epochs is None else f"the {steps} steps of optim.epochs={optim.epochs:g}"
        )
        length = "" if optim.warmup == warmup else f", {warmup} steps,"
        raise ValueError(f"optim.warmup={optim.warmup}{length} must be at most {given}")
    return steps


def _describe_steps(config: Config, sampler: Sampler, steps: int) -> list[str]:
    """Return a sentence on the numbers of steps that follow from epochs."""
    epochs = config.optim.epochs
    found = [] if epochs is None else [f"optim.epochs={epochs:g}: {steps:,} steps"]
    found += [
        f"{key}={given}: {sampler.steps_of(float(length[1])):,} steps"
        for key, given in config.lengths.items()
        if (length := EPOCHS.search(str(given)))
    ]
    sequences = f"{sampler.num_known:,} sequences per epoch, {sampler.batch:,} per step"
    return ["; ".join([*found, sequences])] if found else []


def _describe_epochs(sources: Sequence[WeightedSource], sampler: Sampler, steps: int) -> list[str]:
    """Return a sentence on each source that is trained on for more than one epoch."""
    epochs = sampler.epochs(steps)
    names = [source.name for source, _ in sources] if len(epochs) == len(sources) else ["all sources"]
    return [
        f"data.sources: {name}: {count:,.2f} epochs in {steps:,} steps"
        for name, count in zip(names, epochs, strict=True)
        if round(count, 2) > 1
    ]


def describe_overlaps(job: Job, training: Sequence[Rows], separate: Sequence[Rows]) -> Iterator[str]:
    """Yield a sentence on each evaluation source with text that is trained on, and one if a text is trained on twice.

    Lists the files of each source once, which may take seconds: for rank 0, once. training: rows of data.sources;
    separate: those of data.eval_sources, if any. Raises ValueError or OSError if a file was removed.
    """
    files = [local_files(source) for source, _ in job.sources]
    if _repeats_source(job, files):
        yield (
            f"data.sources={job.config.data.sources} lists a source, or a file of it, more than once, and its records "
            "are trained on as often; list it once and, to train on it more than on others, write SOURCE:WEIGHT"
        )
    trained, rows = [*chain.from_iterable(files)], [each.fingerprint() for each in training]
    for (source, _), each in zip(job.eval_sources, separate, strict=True):
        is_same = each.fingerprint() in rows
        shared = "has the text of a source in data.sources" if is_same else ""
        if shared := shared or describe_shared(local_files(source), trained):
            yield f"warning: data.eval_sources: {source.name} {shared}: {OF_TRAINED_TEXT}"


def _repeats_source(job: Job, files: Sequence[Sequence[LocalFile]]) -> bool:
    """Return whether a source of training, or a file of one, is listed twice, to be read in the same way.

    files: of each source.
    """
    names, earlier = set[tuple[str, ReadOptions]](), dict[ReadOptions, list[LocalFile]]()
    for (source, _), each in zip(job.sources, files, strict=True):  # not by fingerprints, which may need the network
        known = earlier.setdefault(source.options, [])
        if (source.name, source.options) in names or describe_shared(each, known):
            return True
        names.add((source.name, source.options))
        known += each
    return False


def _open_or_receive_rows(
    job: Job, maker: RowMaker, sources: Sequence[WeightedSource], groups: Groups | None
) -> list[Rows]:
    """Return the rows of each source, or their properties on ranks that need no tokens. groups: see `open_data`."""
    if groups is not None and not (job.wants_inputs or _wants_labels(job) or _wants_lengths(job, groups)):
        return [*described(groups.published_text(ROWS, timeout_s=TIMEOUT_S))]
    rows = maker.open(sources)
    for (source, _), each in zip(sources, rows, strict=True):
        is_divided = source.key == "data.sources" and not each.is_streamed
        known = split(len(each), maker.spec.eval_fraction, job.model.task.rows_per_example) if is_divided else len(each)
        for part, where in ((range(known), "any row"), (range(known, len(each)), "the rows of data.eval_fraction")):
            if part and each.num_empty(part) == len(part):
                raise ValueError(no_targets(source, where, is_learned=each.ends.documents > 0))
    if groups is not None and job.topology.rank == 0:
        groups.publish_text(ROWS, describe(rows))
    return [*rows]


def row_maker(job: Job) -> RowMaker:
    """Return what makes the rows of a job."""
    config, model, tokenizer = job.config, job.model.config, job.tokenizer
    spec = RowSpec.of(config, job.model.task, model, tokenizer, job.sources, virtual_tokens=job.shapes.virtual_tokens)
    return RowMaker(
        spec,
        model,
        tokenizer,
        config.model.name,
        job.paths.cache,
        job.is_first_on_host,
        stream_dir=job.paths.run / STREAMS,
    )


def _reader_of(job: Job, rows: Sequence[Rows], groups: Groups | None) -> RowReader:
    """Return the reader of what this rank needs of some rows."""
    return RowReader(
        rows,
        job.config.pp.micro,
        wants_inputs=job.wants_inputs,
        wants_labels=_wants_labels(job),
        wants_lengths=_wants_lengths(job, groups),
        virtual_tokens=job.shapes.virtual_tokens,
    )


def _wants_lengths(job: Job, groups: Groups | None) -> bool:
    """Whether this rank posts receives of messages whose sizes depend on the rows."""
    return groups is not None and groups.pp.open_communicator is not None and has_padding(job)


def _wants_labels(job: Job) -> bool:
    """Whether this rank computes the loss."""
    return len(job.layout.specs) - 1 in job.layout.stages
