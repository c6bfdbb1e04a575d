"""Pipelines that differ in the form in which messages travel, alive in the same processes, so that they can take turns.

A form is "forward/backward": the codecs of activations and of gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from acsgd.config.options import Config
from acsgd.io.checkpoint.progress import Progress
from acsgd.io.sampling.batches import Batch
from acsgd.run.build import build_session
from acsgd.run.inputs import open_source, plan_caches
from acsgd.run.job import Job
from acsgd.run.session import Session, StepResult
from acsgd.topology import Groups, connect
from acsgd.train import train_step

UNCOMPRESSED = "none/none"


class Training:
    """A worker, and how far it has come."""

    def __init__(self, worker: Session) -> None:
        self._worker = worker
        self._progress = Progress()

    def step(self, batch: Batch) -> StepResult:
        """Make the next optimizer step, together with the other ranks of the same form."""
        result = train_step(self._worker, batch, self._progress)
        self._progress = result.progress
        return result


def with_form(config: Config, form: str) -> Config:
    """Return the run whose messages travel in this form."""
    forward, _, backward = form.partition("/")
    return replace(config, pp=replace(config.pp, forward=forward, backward=backward))


@contextlib.contextmanager
def open_trainings(jobs: Sequence[Job], store: str, *, sequences: int) -> Iterator[list[Training]]:
    """Connect the ranks of a pipeline; give a training per job, all over the same connections.

    jobs: of one rank, in the same order on all of them; store: a file that all ranks can write, not there yet;
    sequences: how many the data set has, so many can links remember.
    """
    topology, timeout = jobs[0].topology, timedelta(seconds=jobs[0].config.run.timeout)
    files = dist.FileStore(store, topology.world_size)
    with connect(topology, timeout=timeout, store=files) as groups:
        yield [Training(_open_worker(job, groups, sequences)) for job in jobs]


def _open_worker(job: Job, groups: Groups, sequences: int) -> Session:
    """Load a rank's layers once more."""
    cache_plan = plan_caches(job, sequences, kept={}, fresh=True)
    return build_session(job, open_source(job), groups, cache_plan)
