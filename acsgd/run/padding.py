"""Whether the micro-batches of a run are cut to their longest row."""

from __future__ import annotations

from acsgd.layers.description import BATCH
from acsgd.layers.lengths import Lengths
from acsgd.layers.masks import DOCUMENTS, PREFIXES
from acsgd.layers.padding import depends_on_length
from acsgd.pp.micro_shapes import MicroShapes
from acsgd.pp.wire.delta import Delta
from acsgd.run.job import Job

OF_TOKENS = (BATCH, "sequence")


def micro_shapes(job: Job) -> MicroShapes:
    """Return the shapes of micro-batches. Compares the model with and without padding, if that is not in the cache."""
    inputs, sequence = job.model.inputs, job.config.data.sequence
    has_target = any("target" in sizes for sizes in inputs.values())
    return MicroShapes(
        inputs={**inputs, DOCUMENTS: OF_TOKENS, PREFIXES: OF_TOKENS},
        labels=job.model.task.labels,
        full=Lengths(sequence, sequence if has_target else 0),
        is_cut=has_padding(job) and reason_for_padding(job) is None,
    )


def has_padding(job: Job) -> bool:
    """Whether rows have padding by design. Packed rows have so little that the longest is as long as the others."""
    return job.config.rows == "single"


def reason_for_padding(job: Job) -> str | None:
    """Return why micro-batches of padded rows must not be cut, as a clause; None if they may be."""
    model = job.model
    if isinstance(job.plugins.forward, Delta):
        return "pp.forward=delta caches activations by sample and position"
    if job.config.model.dropout_mask == "sample":
        return "model.dropout_mask=sample draws the masks of a sample for all of its positions"
    verification = job.layers_cache.verify(model.config, model.derived, reports_wait=job.is_first_on_host)
    if not verification.ignores_padding or depends_on_length(model.config, job.config.data.sequence):
        return f"the results of {model.config.model_type} depend on it"
    return None


def describe_padding(job: Job) -> tuple[str, ...]:
    """Return a sentence on padding that is computed, if there is any."""
    reason = reason_for_padding(job) if has_padding(job) else None
    return () if reason is None else (f"padding: micro-batches are not cut to their longest row: {reason}",)
