"""Pipelines with different codecs in the same processes, so that they can run in turn.

A form is "forward/backward" or "forward/backward/tied": the codecs of activations and of gradients, and pp.tied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from acsgd.comm.spans import SpanRecorder
from acsgd.config.options import Config
from acsgd.groups import Groups, connect
from acsgd.io.checkpoint.progress import Progress
from acsgd.layers.batch import Batch
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.plan.job import Job
from acsgd.run.session import Session, StepResult
from acsgd.run.setup.build import build_session
from acsgd.run.setup.inputs import plan_activation_caches
from acsgd.run.step.tracing import record_to
from acsgd.train import train_step

UNCOMPRESSED = "none/none"


class DeferredSession(Session):
    """A session that does not send rows of tied tables at the end of the step that has updated them.

    Other forms run in between, which would hide the transfer.
    """

    def send_ahead(self) -> None:
        """Do nothing."""

    def send_deferred(self) -> None:
        """Send the rows of the step that begins."""
        super().send_ahead()


class Training:
    """A session and its progress."""

    def __init__(self, session: Session) -> None:
        self._session = DeferredSession(**vars(session))
        self._progress = Progress()

    def step(self, batch: Batch) -> StepResult:
        """Run the next optimizer step, together with the other ranks of the same form.

        It takes as long as one of many in a row: the transfer of rows is moved from its end to its beginning.
        """
        self._session.send_deferred()
        result = train_step(self._session, batch, self._progress)
        self._progress = result.progress
        return result

    def record_to(self, recorder: SpanRecorder | None) -> None:
        """Trace the next steps; None = no longer."""
        record_to(self._session, recorder)


def with_form(config: Config, form: str) -> Config:
    """Return the configuration with the codecs of a form."""
    options = dict(zip(("forward", "backward", "tied"), form.split("/"), strict=False))
    return replace(config, pp=replace(config.pp, **options))


@contextlib.contextmanager
def open_trainings(jobs: Sequence[Job], store: str, *, sequences: int) -> Iterator[list[Training]]:
    """Connect the ranks of a pipeline; yield one training per job, all over the same process groups.

    jobs: this rank's, in the same order on all ranks; store: path of a FileStore; sequences: size of the data set,
    the capacity of the activation caches.
    """
    topology, timeout = jobs[0].topology, timedelta(seconds=jobs[0].config.run.timeout)
    files = dist.FileStore(store, topology.world_size)
    with connect(topology, timeout=timeout, store=files) as groups:
        yield [Training(_open_session(job, groups, sequences)) for job in jobs]


def _open_session(job: Job, groups: Groups, sequences: int) -> Session:
    """Load this rank's layers and open its links."""
    cache_plan = plan_activation_caches(job, sequences, run_id="", fresh=True)
    return build_session(job, open_weight_source(job), groups, cache_plan)
