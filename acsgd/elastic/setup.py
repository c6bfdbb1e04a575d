"""What the workers of an elastic run must have in common, and which options they cannot have."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path

import torch

from acsgd import __version__
from acsgd.elastic.messages import Setup
from acsgd.io.sources.streamed import Streamed
from acsgd.run.inputs import Inputs
from acsgd.run.job import Job


def check_elastic(job: Job) -> None:
    """Raise ValueError for options that do not work while hosts join and leave."""
    config = job.config
    if config.dp.mode.partition(":")[0] != "allreduce":
        raise ValueError(f"dp.mode={config.dp.mode} keeps state per replica, which elastic runs cannot; use allreduce")
    if config.pp.forward.startswith("delta"):
        raise ValueError(f"pp.forward={config.pp.forward} keeps activations of samples, which elastic runs cannot yet")
    if any(isinstance(source, Streamed) for source, _ in job.sources):
        raise ValueError("streamed sources are read on from one place, which elastic runs cannot yet; remove stream:")


def setup_of(job: Job, inputs: Inputs) -> Setup:
    """Return what all workers of a run must have in common."""
    parts = {
        "options": repr(asdict(job.config)),
        "model": job.model.config.to_json_string(),
        "data": inputs.reader.fingerprint(),
        "versions": f"acsgd {__version__}, torch {torch.__version__}",
    }
    digests = {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in parts.items()}
    elastic = job.config.elastic
    return Setup(
        stages=job.topology.stages,
        run_dir=str(Path(job.config.log.dir).resolve()),
        min_replicas=elastic.min_replicas,
        max_replicas=elastic.max_replicas,
        silence_s=elastic.silence,
        hang_s=elastic.hang,
        parts=digests,
    )
