"""Law: a session that is aborted in the middle of a step keeps its state, with which training continues."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lib import direct
from lib.patience import stretched, wait_until
from lib.ranks import on_ranks
from lib.training import RELATIVE, TIMEOUT, batches_of, make_config, oracle_losses
from torch import nn
from torch.utils._pytree import tree_leaves

from acsgd.comm.waits import InterruptibleWaits
from acsgd.config.options import Config, ReplicaConfig
from acsgd.errors import RunError, WaitInterruptedError
from acsgd.groups import Groups, connect
from acsgd.io.checkpoint.progress import Progress
from acsgd.launch import Launch
from acsgd.layers.batch import Batch
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.plan.job import prepare
from acsgd.run.session import Session
from acsgd.run.setup.build import build_session
from acsgd.run.setup.continued import reconnect
from acsgd.train import train_step

STEPS = 6
VIEWS = 3
OWN_THREADS = ("waits", "replicas", "entropy", "store", "heartbeat")
INTERRUPT_S = 0.3
"""Time after which ranks leave a step that one of them does not take part in."""


def train_in_views(rank: int, world_size: int, store: Path, config: Config) -> tuple[list[float], list[str], float]:
    """Train two steps in each view. Every rank but the last begins another step, which it must leave.

    Returns the losses, the names of threads that the views have left, and the longest time to leave.
    """
    torch.set_num_threads(1)
    job, losses, progress, longest_s = prepare(config, Launch(rank, rank, world_size)), list[float](), Progress(), 0.0
    file_store, source, batches = dist.FileStore(str(store), world_size), open_weight_source(job), list(batches_of(job))
    session: Session | None = None
    before = set(threading.enumerate())
    for view in range(VIEWS):
        prefix, waits = dist.PrefixStore(str(view), file_store), InterruptibleWaits()
        with connect(job.topology, timeout=TIMEOUT, store=prefix, waits=waits) as groups:
            previous, session = session, build_session(job, source, groups)
            if previous is not None:
                copy_state(previous, session)
            for batch in batches[2 * view : 2 * view + 2]:
                result = train_step(session, batch, progress)
                progress = result.progress
                losses.append(result.loss)
            if view < VIEWS - 1:
                left_s = leave(session, groups, batches[2 * view + 2], progress, takes_part=rank < world_size - 1)
                longest_s = max(longest_s, left_s)
    assert session is not None
    session.close()
    session.peers.close()
    left = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith(OWN_THREADS)]
    for thread in left:  # a helper that was left behind in a wait
        thread.join()
    return losses, [thread.name for thread in left if thread.is_alive()], longest_s


def leave(session: Session, groups: Groups, batch: Batch, progress: Progress, *, takes_part: bool) -> float:
    """Begin a step that not all ranks take part in, be interrupted, and abort; return the time from the interrupt."""
    if not takes_part:
        time.sleep(INTERRUPT_S)
    else:
        threading.Timer(INTERRUPT_S, groups.interrupt, ["the view changes"]).start()
        with pytest.raises((WaitInterruptedError, RunError)):  # RunError: the others were earlier
            train_step(session, batch, progress)
    begin = time.monotonic()
    session.abort("the view changes")
    groups.abort("the view changes")
    groups.abort("again")
    return time.monotonic() - begin


def copy_state(old: Session, new: Session) -> None:
    """Copy weights and optimizer state from one session to another of the same stages."""
    with torch.no_grad():
        for source, weight in zip(old.weights, new.weights, strict=True):
            weight.master.copy_(source.master)
            new.optimizer.load_state_of(weight, old.optimizer.state_of([source]))


@pytest.mark.parametrize("mode", ["allreduce", "sharded_ps"])
def test_training_continues_in_new_groups_as_if_nothing_had_happened(
    mode: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    config = dataclasses.replace(
        make_config(tiny_model(n_layer=2), tmp_path, steps=STEPS, stages=2, micro=2), dp=ReplicaConfig(mode)
    )
    for losses, threads, longest_s in on_ranks(4, train_in_views, tmp_path / "store", config):
        assert losses == pytest.approx(oracle_losses(config), rel=RELATIVE)
        assert not threads
        assert longest_s < stretched(5.0)  # milliseconds on a quiet machine


@pytest.mark.parametrize(
    ("offload", "schedule"),
    [("cpu", "1f1b"), pytest.param("disk", "1f1b", marks=pytest.mark.soak), ("disk", "interleaved:chunks=2")],
)
def test_a_step_that_ends_in_the_middle_of_a_backward_is_repeated_with_offloaded_parameters(
    offload: Any, schedule: Any, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Those of the block whose backward runs, and of the one before it, are on the device then.

    With two stages, it is in the second one, whose fetches end before their memory is freed.
    """
    config = direct.make_config(tiny_model(n_layer=5), tmp_path, micro=2, schedule=schedule)
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, offload=offload, freeze="*.h.*"),
        optim=dataclasses.replace(config.optim, offload="cpu"),
    )
    batch = direct.draw_batch(config, 0)
    with direct.session_of(config, 0, 1, str(tmp_path / "store")) as session:
        model = next(iter(session.stages.values())).composed.model
        loss = session.pipeline.run(batch, 0)
        expected = direct.digest(direct.gradients(session))

        def end(*_: object) -> None:
            raise WaitInterruptedError("the view changes")

        def end_backward(block: nn.Module, args: object, output: Any) -> None:
            if (leaf := tree_leaves(output)[0]).requires_grad:
                leaf.register_hook(end)

        middle = model.get_submodule(session.job.model.description.blocks[3])
        hook = middle.register_forward_hook(end_backward)
        with pytest.raises(WaitInterruptedError):
            session.pipeline.run(batch, 0)
        hook.remove()
        again = reconnect(session, session.job, session.groups)
        assert all(model.get_parameter(key).isnan().all() for key in session.job.offloaded), "all are freed"
        fetches = [fetch for stage in session.stages.values() if (fetch := stage._fetch) is not None]
        params = [each for fetch in fetches for group in fetch.groups for each in group]
        wait_until(lambda: not any(each.values.any() for each in params))  # those of files are freed in a thread
        assert again.pipeline.run(batch, 0) == loss
        assert direct.digest(direct.gradients(again)) == expected
        session.close()
