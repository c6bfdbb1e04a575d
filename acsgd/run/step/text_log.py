"""The text log of a rank, if the run has one."""

from __future__ import annotations

import contextlib
from pathlib import Path

from acsgd.io.telemetry.text_log import open_text_log
from acsgd.run.plan.job import Job


def text_log_of(job: Job) -> contextlib.AbstractContextManager[None]:
    """Return the text log of this rank, open while the context is; without effect unless log.to has "text"."""
    config, topology = job.config.log, job.topology
    if "text" not in config.to.split(","):
        return contextlib.nullcontext()
    return open_text_log(Path(config.dir), rank=topology.rank, stages=job.stages, replica=topology.replica)
