"""Laws of runs whose peers or whose store end during the last save: all ranks end in time, with one message."""

from __future__ import annotations

import dataclasses
import re
import signal
import socket
import time
from functools import partial
from pathlib import Path
from typing import Any

from acsgd.config.options import CheckpointConfig, Config, RunConfig
from acsgd.io.checkpoint.saver import Saver
from tests.lib.cache import shared_model, with_shared_cache
from tests.lib.forks import checkpoints_of, make_config, started
from tests.lib.launched import MARGIN_S
from tests.lib.patience import stretched
from tests.lib.proxy import proxied_store

HOST = socket.gethostname()
TIMEOUT_S = float(round(stretched(4.0)))
STEPS = 3


def config_of(directory: Path) -> Config:
    config = make_config(
        shared_model(directory), directory / "run", processes=2, steps=STEPS, checkpoint=CheckpointConfig()
    )
    return with_shared_cache(dataclasses.replace(config, run=RunConfig(timeout=TIMEOUT_S)))


def report_when_released(rank: int, *, at_rank: int, directory: Path) -> None:
    """Patch this process: once `at_rank` has written its files of a save, it creates `written` and waits for `go`."""
    all_gather = Saver._all_gather

    def late(self: Saver, *args: Any) -> list[dict[str, Any]]:
        if rank == at_rank:
            (directory / "written").touch()
            while not (directory / "go").exists():
                time.sleep(0.01)
        return all_gather(self, *args)

    Saver._all_gather = late  # type: ignore[method-assign]


def test_a_store_that_freezes_during_the_last_save_ends_the_run_in_time(tmp_path: Path) -> None:
    config, setup = config_of(tmp_path), partial(report_when_released, at_rank=1, directory=tmp_path)
    with proxied_store() as proxy, started(config, 2, setup=setup, store_port=proxy.port) as run:
        run.wait_until((tmp_path / "written").exists)
        proxy.freeze()
        (tmp_path / "go").touch()
        assert run.join(TIMEOUT_S + MARGIN_S) == [1, 1]
        (error,) = run.errors
        store = f"torchrun's store at 127.0.0.1:{proxy.port}"
        assert re.match(rf"error: rank [01] on {HOST}: writing a checkpoint: {store} does not answer", error)
        assert "Traceback" not in run.stderr
    assert not checkpoints_of(config).steps()
    assert not checkpoints_of(config).leftovers()


def test_a_rank_that_is_killed_during_the_last_save_is_named_in_time(tmp_path: Path) -> None:
    config, setup = config_of(tmp_path), partial(report_when_released, at_rank=1, directory=tmp_path)
    with started(config, 2, setup=setup) as run:
        run.wait_until((tmp_path / "written").exists)
        run.send(signal.SIGKILL, [1])
        assert run.join(TIMEOUT_S + MARGIN_S, ranks=[0]) == [1]
        (error,) = run.errors
        assert error == (
            f"error: rank 0 on {HOST}: writing a checkpoint: no heartbeat of ranks [1] for {TIMEOUT_S:g} s "
            f"(run.timeout); rank 1 on {HOST} is silent: ended or hanging; see its log"
        )
    assert not checkpoints_of(config).leftovers()
