"""Whole runs on 2 stages x 2 replicas, and their continuation on other ranks."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

from acsgd.config.options import Config, ReplicaConfig
from lib.cache import share_cache, with_shared_cache
from lib.resume import HALF, checkpoint_of, make_config


def make_replica_config(
    model: Path, run_dir: Path, mode: str, dtype: Any = "fp32", *, stages: int = 2, tied: str = "rows"
) -> Config:
    """Return a run of lib.resume whose batch of 8 sequences is divisible by 2 replicas."""
    config = make_config(model, run_dir, dtype, "none")
    return with_shared_cache(
        dataclasses.replace(
            config,
            data=dataclasses.replace(config.data, batch=8),
            dp=ReplicaConfig(mode),
            pp=dataclasses.replace(config.pp, stages=stages, tied=tied),
        )
    )


def resumed_at_half(config: Config, run_dir: Path, *, stages: int = 2, tied: str | None = None) -> Config:
    """Return a run in a new directory that resumes from a copy of the checkpoint of `config` after HALF steps.

    tied: pp.tied; None = that of `config`.
    """
    resumed = dataclasses.replace(
        config,
        log=dataclasses.replace(config.log, dir=str(run_dir)),
        pp=dataclasses.replace(config.pp, stages=stages, tied=tied or config.pp.tied),
    )
    share_cache(Path(config.model.name), run_dir)
    shutil.copytree(checkpoint_of(config, HALF), checkpoint_of(resumed, HALF))
    return resumed
