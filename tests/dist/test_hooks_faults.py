"""Failures and invalid arguments of the communication hooks."""

from __future__ import annotations

import gc
import logging
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lib.hooked import TIMEOUT, Run, batch, net, on_plain_ranks
from lib.ordered import ordered_transport, register_ordered_transport
from lib.patience import stretched
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from acsgd.comm import host_links
from acsgd.comm.process_groups import Group
from acsgd.dp.hooks import hooks
from acsgd.dp.hooks.hooks import CocktailState, MeanState, choose_backend


def fail(rank: int, how: str) -> str:
    """Train until replica 1 ends, hangs or has a gradient that is not finite; return the error of backward."""
    timeout = TIMEOUT if how == "ends" else timedelta(seconds=stretched(2.0))
    run = Run("few", timeout=timeout, transport=register_ordered_transport(rank) if how == "nan" else "gloo")
    dist.barrier()
    for step in range(2):
        run.step(rank, step)
    dist.barrier()
    message = ""
    if how == "nan" or not rank:
        times = float("nan") if rank else 1.0
        with pytest.raises(RuntimeError) as failed:
            (times * run.model(batch(rank, 2))).backward()
        message = str(failed.value)
    if how != "ends":
        dist.barrier()
    del run
    gc.collect()
    dist.destroy_process_group()  # the connections close
    return message


@pytest.mark.parametrize("how", ["ends", "hangs", "nan"])
def test_a_failure_reaches_backward_and_names_the_replica(how: str, tmp_path: Path) -> None:
    first, second = on_plain_ranks(2, fail, tmp_path / "store", how)
    if how == "nan":
        assert "replica 1 (rank 1) has failed; see its own error" in first
    else:
        assert "exchanging updates with replica 1, rank 1, failed after" in first
    assert ("Timed out" in first) == (how == "hangs"), "only a hang is noticed by the timeout"
    assert ("replica 1: gradients are not finite, of " in second) == (how == "nan")


def report_of_torch(rank: int, form: str | None) -> str:
    """Leave a branch out without find_unused_parameters; return what DDP says."""
    model = Run(form).model if form else DistributedDataParallel(net())
    model(batch(rank, 0), [0]).backward()
    with pytest.raises(RuntimeError) as failed:
        model(batch(rank, 1), [0])
    return str(failed.value)


def join(rank: int, form: str | None) -> list[torch.Tensor]:
    """Train on more batches on rank 1 than on rank 0; return the gradients of the last."""
    model = Run(form).model if form else DistributedDataParallel(net())
    with model.join():
        for step in range(2 + rank):
            model.zero_grad()
            model(batch(rank, step)).backward()
    return [param.grad.clone() for param in model.parameters()]


def torchs_own(rank: int) -> bool:
    """Return whether what torch reports, and its join, are those without a hook."""
    gradients = [join(rank, form) for form in (None, "all")]
    return report_of_torch(rank, None) == report_of_torch(rank, "all") and all(map(torch.allclose, *gradients))


def test_what_torch_says_of_unused_parameters_and_its_join_are_those_without_a_hook(tmp_path: Path) -> None:
    assert on_plain_ranks(2, torchs_own, tmp_path / "store") == [True, True]


def train_alone(rank: int) -> tuple[bool, list[str]]:
    """Return whether gradients are as they were, and what was logged."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("acsgd.dp.hooks").addHandler(handler)
    run, alone = Run("few"), net()
    for step in range(3):
        run.model.zero_grad()
        alone.zero_grad()
        for model in (run.model, alone):
            model(batch(rank, step)).backward()
    pairs = zip(run.model.parameters(), alone.parameters(), strict=True)
    return all(torch.equal(a.grad, b.grad) for a, b in pairs), messages


def test_a_single_process_keeps_its_gradients(tmp_path: Path) -> None:
    alone = on_plain_ranks(1, train_alone, tmp_path / "store")[0]
    assert alone == (True, ["one process: no gradients are exchanged"])


def choose(rank: int) -> list[str]:
    model = DistributedDataParallel(net())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda group: "cpu:nccl,cuda:gloo")
        return [choose_backend(model, transport) for transport in ("auto", "gloo")]


def test_auto_is_nccl_where_the_process_group_has_it_for_the_device(tmp_path: Path) -> None:
    assert on_plain_ranks(1, choose, tmp_path / "store") == [["nccl", "gloo"]]


def choose_between_hosts(rank: int) -> dict[str, bool]:
    """Return whether `auto` takes the ordered transport, which DDP's group has, in place of gloo."""
    model, name, isend = DistributedDataParallel(net()), register_ordered_transport(rank), Group.isend
    taken = {}
    for case in ("one host", "slow gloo", "slow transport"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "get_backend_config", lambda group: f"cpu:{name}")
            patch.setattr(hooks, "NCCL", ordered_transport())
            patch.setattr(hooks, "machine_name", lambda host=f"host {rank if 'slow' in case else 0}": host)
            patch.setattr(host_links, "BYTES", (2**8, 2**12))
            if case == "slow gloo":
                patch.setattr(Group, "isend", lambda *args: time.sleep(0.1) or isend(*args))
            if case == "slow transport":
                patch.setattr("lib.ordered.MAX_DELAY_S", 0.5)
            taken[case] = MeanState(model)._peers.group.updates is not None
    return taken


def test_auto_is_what_is_measured_to_be_faster_between_hosts(tmp_path: Path) -> None:
    expected = {"one host": True, "slow gloo": True, "slow transport": False}
    assert on_plain_ranks(2, choose_between_hosts, tmp_path / "store") == [expected] * 2


def refuse(rank: int) -> list[str]:
    model, messages = DistributedDataParallel(net()), []
    optimizer, of_other = (torch.optim.SGD(module.parameters()) for module in (model, net()))
    state = MeanState(model)
    good = {**state.state_dict()}
    for attempt in (
        *(partial(CocktailState, model, **{key: value}) for key, value in (("topk", 0), ("topk", 1.5), ("bits", 9))),
        *(partial(CocktailState, model, precondition=value) for value in (0.0, 1.0)),
        partial(MeanState, model, bits=12),
        partial(MeanState, model, transport="nccl"),
        partial(MeanState, DistributedDataParallel(nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2)))),
        partial(state.load_state_dict, {**good, "replica": torch.tensor([0, 2])}),
        partial(state.load_state_dict, {**good, "residual/other": torch.zeros(1)}),
        partial(CocktailState(model, precondition=0.9).load_state_dict, good),
        partial(CocktailState(model, optimizer=optimizer).load_state_dict, good),
        partial(CocktailState, model, optimizer=of_other),
        partial(CocktailState, model, clip=0.0),
    ):
        with pytest.raises(ValueError) as failed:
            attempt()
        messages.append(str(failed.value))
    return messages


def test_bad_input_is_named(tmp_path: Path) -> None:
    messages = on_plain_ranks(1, refuse, tmp_path / "store")[0]
    expected = ["must lie in (0, 1]"] * 2 + ["bits=9 ", "precondition=0.0 ", "precondition=1.0 ", "bits=12 "]
    expected += ["transport='nccl' cannot carry gradients on cpu: 'nccl' takes a model on one GPU per process; leave"]
    expected += [
        "0.weight has sparse gradients, which the hook does not exchange; build it with sparse=False",
        "the state of replica 0 of 2 cannot be loaded by replica 0 of 1",
        "the saved state is of another model, or",
        "precondition=0.9 differs from that of the saved state",
        "another moment_correction= or optimizer=: it differs in ['residuals_of_updates']",
        "the optimizer does not have scale; give the one that updates the wrapped model",
        "clip=0.0 must be positive",
    ]
    assert all(part in text for text, part in zip(messages, expected, strict=True)), messages
