"""Models, and one cache of tokens, verified layers and converted models, for the runs of many tests."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from acsgd.config.options import Config
from acsgd.io.files.cache import HostLock
from acsgd.launch import Launch
from acsgd.run.plan.job import prepare
from acsgd.run.setup.inputs import open_inputs
from tests.lib.forks import save_model

_filled: set[str] = set()
"""What was put into caches by this process."""


def shared_model(tmp_path: Path, *, blocks: int = 2) -> Path:
    """Return the directory of a model of `save_model` that is written once for all tests of a worker.

    tmp_path: of any test.
    """
    directory = tmp_path.parent / f"model-{blocks}" / "model"
    return directory if directory.exists() else save_model(directory, blocks=blocks)


def share_cache(model: Path, run_dir: Path) -> None:
    """Let the runs beside `run_dir` use one cache with those of other tests."""
    cache, link = model.parent.parent / "cache", run_dir.parent / "cache"
    cache.mkdir(exist_ok=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        link.symlink_to(cache)


def with_shared_cache(config: Config) -> Config:
    """Let a run use one cache with those of other tests; put into it what each rank would compute or wait for."""
    share_cache(Path(config.model.name), Path(config.log.dir))
    known = repr((config.model.name, config.data, config.pp.micro, config.pp.stages, config.pp.schedule))
    if known not in _filled:
        _filled.add(known)
        log = dataclasses.replace(config.log, dir=str(Path(config.log.dir).with_name("no run")))
        checkpoint = dataclasses.replace(config.checkpoint, dir=None, resume="auto")
        no_run = dataclasses.replace(config, log=log, checkpoint=checkpoint)
        with contextlib.suppress(ValueError):  # the run reports it
            open_inputs(prepare(no_run, Launch(0, 0, config.pp.stages)))
    return config


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock on a path, as another process that builds it does."""
    lock = HostLock(path)
    assert lock.acquire(0.0)
    yield
    lock.release()
