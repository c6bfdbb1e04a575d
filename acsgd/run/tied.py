"""Sentences on what travels of tied weights."""

from __future__ import annotations

import math

import torch
from transformers import PreTrainedModel

from acsgd.codecs.base import wire_bytes
from acsgd.codecs.identity import DTYPES
from acsgd.pp.tied.plan import Rows, TiedWeight
from acsgd.run.job import Job


def describe_tied(job: Job, model: PreTrainedModel) -> list[str]:
    """Return a sentence on each weight that layers of several ranks share, with its largest traffic per step."""
    return [_describe(job, tied, tuple(model.get_parameter(tied.key).shape)) for tied in job.tied]


def _describe(job: Job, tied: TiedWeight, shape: tuple[int, ...]) -> str:
    how, ranks = job.plugins.tied, " and ".join(map(str, tied.ranks))
    if not tied.lookups:
        reason = ", since a layer uses it otherwise than to look up rows" if isinstance(how, Rows) else ""
        size = _megabytes(4 * math.prod(shape))
        return (
            f"{tied.key}: ranks {ranks} have copies{reason}; each sends its gradient of {size} per step to the others"
        )
    assert isinstance(how, Rows)
    users = []
    for rank, inputs in tied.lookups.items():
        most = (min(shape[0], job.max_lookups(inputs, len(job.micro_ids))), *shape[1:])
        sent = _megabytes(wire_bytes(how.rows.wire(most, DTYPES[job.config.model.dtype])))
        returned = _megabytes(wire_bytes(how.gradients.wire(most, torch.float32)))
        users.append(
            f"rank {rank} gets the rows of its tokens, at most {most[0]:,} of {shape[0]:,}, {sent} per step, and sends "
            f"their gradients, {returned}"
        )
    return f"{tied.key}: rank {tied.owner} of each pipeline holds it; {'; '.join(users)}"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.3g} MB"
