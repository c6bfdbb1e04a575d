"""Comparison of the layers of a run's model with the whole model, once per config and version of the libraries."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

from acsgd.errors import CorruptFileError
from acsgd.fields import from_json
from acsgd.io.cache import open_cached
from acsgd.layers.verify import Verification
from acsgd.notes import print_note, report_if_slow
from acsgd.run.job import Job
from acsgd.shards.disk import MANIFEST, Manifest


def verify_layers(job: Job) -> None:
    """Verify the layers of the model unless it was done before: when it was converted, or by an earlier run.

    Called by every process of a host; one of them verifies and keeps the result in the cache. Raises LayersError if
    the layers differ from the whole model.
    """
    if not _is_verified(job.model.directory):
        path = job.cache_dir / "verified" / f"{_digest(job)}.json"
        open_cached(path, lambda target: _verify(job, target), _read, reports_wait=job.is_first_on_host)


def _is_verified(directory: Path) -> bool:
    """Whether a directory of layer shards was verified with this version of transformers when it was converted."""
    if not (directory / MANIFEST).is_file():
        return False
    verification = Manifest.read(directory).verification
    return verification is not None and verification.version == transformers.__version__


def _digest(job: Job) -> str:
    """Return a hash of everything that the result depends on."""
    model = job.model
    parts = [
        model.task.name,
        model.config.to_json_string(use_diff=False),
        json.dumps(model.description.to_dict()),
        torch.__version__,
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _verify(job: Job, target: Path) -> None:
    with report_if_slow(print_note, lambda: f"comparing the layers of {job.model.config.model_type} with the model"):
        verification = job.model.task.verify(job.model.config, job.model.description)
    target.write_text(json.dumps(asdict(verification)))


def _read(path: Path) -> Verification:
    """Read the result of a verification. Raises CorruptFileError."""
    try:
        return from_json(Verification, json.loads(path.read_bytes()))
    except ValueError as error:
        raise CorruptFileError(path, f"is not the result of a verification: {error}") from None
