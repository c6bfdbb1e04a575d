"""Verified layers of models, one cache for all tests: to derive and compare the layers of a model takes a second."""

from __future__ import annotations

import os
from pathlib import Path

from acsgd.config.options import Config
from acsgd.run import job, model
from acsgd.run.layers_cache import LayersCache
from acsgd.tasks import TASKS

DIRECTORY = "ACSGD_TEST_LAYERS"
"""Environment variable with the directory of the cache, for the server that processes are forked from."""


def share_layers() -> None:
    """Let runs of this process, and of those forked from it, use the directory instead of one beside each run."""
    if DIRECTORY in os.environ:
        model.layers_cache = job.layers_cache = _shared_cache


def _shared_cache(config: Config) -> LayersCache:
    return LayersCache(Path(os.environ[DIRECTORY]), TASKS[config.model.task])
