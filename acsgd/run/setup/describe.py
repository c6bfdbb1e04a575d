"""Padding of micro-batches and traffic of tied weights: how a run handles them, and the sentences on it."""

from __future__ import annotations

import math

import torch
from transformers import PreTrainedModel

from acsgd.codecs.base import wire_bytes
from acsgd.codecs.identity import DTYPES
from acsgd.layers.batch import Lengths
from acsgd.layers.description import BATCH
from acsgd.layers.masks import DOCUMENTS, PREFIXES
from acsgd.layers.padding import depends_on_length
from acsgd.pp.micro_shapes import MicroShapes
from acsgd.pp.tied.plan import TiedRows, TiedWeight
from acsgd.run.plan.job import Job

OF_TOKENS = (BATCH, "sequence")


def micro_shapes(job: Job) -> MicroShapes:
    """Return the shapes of micro-batches. Compares the model with and without padding, if that is not in the cache."""
    inputs, sequence = job.model.inputs, job.config.data.sequence
    has_target = any("target" in sizes for sizes in inputs.values())
    return MicroShapes(
        inputs={**inputs, DOCUMENTS: OF_TOKENS, PREFIXES: OF_TOKENS},
        labels=job.model.task.model_class.labels,
        full=Lengths(sequence, sequence if has_target else 0),
        is_cut=has_padding(job) and reason_for_padding(job) is None,
    )


def has_padding(job: Job) -> bool:
    """Whether rows have padding by design. Packed rows have so little that the longest is as long as the others."""
    return job.rows == "single"


def reason_for_padding(job: Job) -> str | None:
    """Return why micro-batches of padded rows must not be cut, as a clause; None if they may be."""
    model = job.model
    if job.plugins.delta is not None:
        return f"{job.plugins.delta_option(job.config.pp)} caches activations by sample and position"
    if job.config.model.dropout_mask == "sample":
        return "model.dropout_mask=sample draws the masks of a sample for all of its positions"
    verification = job.paths.layers_cache.verify(model.config, model.derived, reports_wait=job.is_first_on_host)
    if not verification.ignores_padding or depends_on_length(model.config, job.config.data.sequence):
        return f"the results of {model.config.model_type} depend on it"
    return None


def describe_padding(job: Job) -> tuple[str, ...]:
    """Return a sentence on padding that is computed, if there is any."""
    reason = reason_for_padding(job) if has_padding(job) else None
    return () if reason is None else (f"padding: micro-batches are not cut to their longest row: {reason}",)


def describe_tied(job: Job, model: PreTrainedModel) -> list[str]:
    """Return a sentence on each weight that layers of several ranks share, with its largest traffic per step."""
    return [_describe(job, tied, tuple(model.get_parameter(tied.key).shape)) for tied in job.tied]


def _describe(job: Job, tied: TiedWeight, shape: tuple[int, ...]) -> str:
    how, ranks = job.plugins.tied, " and ".join(map(str, tied.ranks))
    if not tied.lookups:
        reason = ", since a layer uses it otherwise than to look up rows" if isinstance(how, TiedRows) else ""
        size = _megabytes(4 * math.prod(shape))
        return (
            f"{tied.key}: ranks {ranks} have copies{reason}; each sends its gradient of {size} per step to the others"
        )
    assert isinstance(how, TiedRows)
    users = []
    for rank, inputs in tied.lookups.items():
        most = (min(shape[0], job.shapes.max_lookups(inputs, job.most_micros)), *shape[1:])
        sent = _megabytes(wire_bytes(how.rows.wire(most, DTYPES[job.config.model.dtype])))
        returned = _megabytes(wire_bytes(how.gradients.wire(most, torch.float32)))
        users.append(
            f"rank {rank} gets the rows of its tokens, at most {most[0]:,} of {shape[0]:,}, {sent} per step, and sends "
            f"their gradients, {returned}"
        )
    return f"{tied.key}: rank {tied.owner} of each pipeline holds it; {'; '.join(users)}"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.3g} MB"
