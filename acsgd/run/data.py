"""Training and evaluation data of a job."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from acsgd.io.rows.base import RowReader, Rows
from acsgd.io.rows.concat import ConcatRows
from acsgd.io.rows.documents import DocumentRows
from acsgd.io.rows.labelled import LabelledRows, PairRows
from acsgd.io.rows.layout import open_layout
from acsgd.io.sampling.batches import BatchReader
from acsgd.io.sampling.encode import DocumentEncoder, Encoder
from acsgd.io.sampling.encode_examples import PairEncoder, SequenceEncoder
from acsgd.io.sampling.held_out import HeldOut, held_out, split
from acsgd.io.sampling.sampler import Sampler, block_counts
from acsgd.io.sampling.tokens import Corpus, tokenize_all
from acsgd.io.sources.sources import WeightedSource
from acsgd.run.job import Job
from acsgd.shards.tokenizer import padding_id


def open_data(job: Job) -> BatchReader:
    """Return the reader of this replica's batches. Tokenizes text into the cache if it is not there yet.

    Raises ValueError if a source cannot be read or is too short.
    """
    config = job.config
    rows = _open_rows(job, job.sources)
    sampler = Sampler(
        seed=config.data.seed,
        batch=config.data.batch,
        counts=block_counts([weight for _, weight in job.sources]),
        sizes=tuple(split(len(each), config.data.eval_fraction) for each in rows.rows),
    )
    return BatchReader(rows, sampler, job.micro_ids)


def open_held_out(job: Job) -> HeldOut | None:
    """Return this replica's held-out data, None if nothing is held out. Tokenizes like `open_data`."""
    return held_out(
        _open_rows(job, job.sources),
        _open_rows(job, job.eval_sources),
        job.config.data.eval_fraction,
        replicas=job.topology.replicas,
        replica=job.topology.replica,
    )


def _open_rows(job: Job, sources: Sequence[WeightedSource]) -> RowReader:
    """Return the rows of sources. Tokenizes those that are not in the cache yet."""
    corpora = tokenize_all(
        sources,
        job.tokenizer,
        job.cache_dir / "tokens",
        vocab_size=job.model.config.get_text_config().vocab_size,
        make_encoder=lambda tokenizer: _encoder_of(job, tokenizer),
        reports_wait=job.is_first_on_host,
    )
    return RowReader(
        [_rows_of(job, corpus) for corpus in corpora],
        job.config.pp.micro,
        wants_inputs=job.wants_inputs,
        wants_labels=len(job.specs) - 1 in job.stages,
    )


def _encoder_of(job: Job, tokenizer: PreTrainedTokenizerBase) -> Encoder:
    """Return what makes tokens of the examples of a source, as the task needs them."""
    long, sequence = job.config.long, job.config.data.sequence
    if job.model.task.name == "lm":
        return DocumentEncoder(tokenizer)
    assert long != "split"
    encoder = PairEncoder if job.model.task.name == "seq2seq" else SequenceEncoder
    return encoder(tokenizer, sequence, long)


def _rows_of(job: Job, corpus: Corpus) -> Rows:
    """Return the rows of a corpus: as the task needs them, for language modelling as data.rows asks."""
    config, sequence, task = job.config, job.config.data.sequence, job.model.task.name
    padding = padding_id(job.tokenizer, job.model.config)
    if task == "seq2seq":
        return PairRows(corpus, sequence, padding=padding, start=_decoder_start(job))
    if task != "lm":
        is_regression = task == "regression"
        return LabelledRows(corpus, sequence, padding=padding, config=job.model.config, is_regression=is_regression)
    if config.rows == "concat":
        return ConcatRows(corpus, sequence)
    cache = job.cache_dir / "rows"
    layout = open_layout(corpus, sequence, config.rows, config.long, cache, reports_wait=job.is_first_on_host)
    return DocumentRows(corpus, layout, sequence, padding=padding, isolate=config.data.isolate)


def _decoder_start(job: Job) -> int:
    """Return the token that enters the decoder first. Raises ValueError if the model has none."""
    start = getattr(job.model.config, "decoder_start_token_id", None)
    if not isinstance(start, int):
        raise ValueError(
            f'{job.config.model.name} has no first token of a decoder; set "decoder_start_token_id" in config.json'
        )
    return start
