"""What the workers of an elastic run must have in common, and which options they cannot have."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

from acsgd.elastic.messages import Setup
from acsgd.pp.wire.delta import Delta
from acsgd.run.inputs import Inputs
from acsgd.run.job import Job


def check_elastic(job: Job) -> None:
    """Raise ValueError for options that do not work while hosts join and leave."""
    config = job.config
    if any(state.tied == "equal" for state in job.plugins.mode.states) and (key := _split_tied_weight(job)):
        raise ValueError(
            f"dp.mode={config.dp.mode} keeps state per replica, and {key} is on several stages: elastic runs cannot "
            "keep its copies equal yet; use allreduce, sharded_ps, central_ps or powersgd, or pp.stages=1"
        )
    if isinstance(job.plugins.forward, Delta) and job.plugins.forward.cache == "disk":
        raise ValueError(
            f"pp.forward={config.pp.forward}: the files of caches belong to replicas, whose ranks change in an elastic "
            "run; use cache=ram"
        )


def _split_tied_weight(job: Job) -> str | None:
    """Return a tied weight of which several ranks of a pipeline have copies, None if there is none."""
    tied = job.model.description.tied().items()
    return next((key for key, holders in tied if len({job.rank_of_layer(layer) for layer in holders}) > 1), None)


def setup_of(job: Job, inputs: Inputs) -> Setup:
    """Return what all workers of a run must have in common."""
    parts = _options(job) | {
        "model": job.model.config.to_json_string(),
        "data": inputs.reader.fingerprint(),
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "code": _digest_of_code(),
    }
    digests = {name: hashlib.sha256(text.encode()).hexdigest()[:12] for name, text in parts.items()}
    elastic = job.config.elastic
    return Setup(
        cut=job.cut,
        run_dir=str(Path(job.config.log.dir).resolve()),
        min_replicas=elastic.min_replicas,
        max_replicas=elastic.max_replicas,
        silence_s=elastic.silence,
        hang_s=elastic.hang,
        parts=digests,
    )


def _options(job: Job) -> dict[str, str]:
    """Return the value of each option, by the name that a user types."""
    sections = asdict(job.config)
    return {f"{name}.{key}": repr(value) for name, section in sections.items() for key, value in section.items()}


def _digest_of_code() -> str:
    """Return a digest of the source files of this package."""
    digest, package = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
