"""Laws of connecting and of text exchanges: a group per axis, each wait has a limit, and the store does not grow."""

from __future__ import annotations

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from lib.patience import NO_LIMIT_S, stretched
from lib.proxy import proxied_store
from lib.ranks import on_ranks

from acsgd.comm.process_groups import MARGIN_S as TORCH_MARGIN_S
from acsgd.errors import RunError
from acsgd.groups import connect, open_store
from acsgd.launch import Launch
from acsgd.topology import Axis, Topology

TIMEOUT_S = float(round(stretched(2.0)))
MARGIN_S = 15.0
"""Time limit for what takes no time, seconds on a quiet machine."""


def connect_and_exchange(rank: int, world_size: int, port: int) -> tuple[str, float]:
    """Return the error with which connecting or the exchange failed, and after how long."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    timeout, started = timedelta(seconds=TIMEOUT_S), time.monotonic()
    try:
        store = open_store(Launch(rank, rank, world_size, world_size), timeout_s=TIMEOUT_S)
        with connect(Topology.of(rank, world_size, 2), timeout=timeout, store=store) as groups:
            for _ in range(1000):
                groups.all_gather_text("writing a checkpoint", "", timeout_s=NO_LIMIT_S)
    except RunError as error:
        return str(error), time.monotonic() - started
    return "", time.monotonic() - started


def test_wherever_the_store_freezes_all_ranks_end_in_time() -> None:
    """The limits lie in the handshake of the store, in gloo's connecting, in new_group and in an exchange."""
    limits = [100, 400, 700, 1000, 10_000]  # the last one: also after many polls, if a rank starts seconds later

    def errors(limit: int) -> list[tuple[str, float]]:
        with proxied_store(limit) as proxy:
            return on_ranks(2, connect_and_exchange, proxy.port)

    with ThreadPoolExecutor(len(limits)) as pool:
        found = dict(zip(limits, pool.map(errors, limits), strict=True))
    for limit, ends in found.items():
        for rank, (error, seconds) in enumerate(ends):
            assert error.startswith(f"rank {rank} on "), (limit, error)
            assert seconds < TIMEOUT_S + stretched(TORCH_MARGIN_S + MARGIN_S), (limit, seconds)
    texts = [error for ends in found.values() for error, _ in ends]
    assert any(re.search(r"could not connect to the other 1 processes within \d+ s: ", text) for text in texts)
    assert any(": writing a checkpoint: torchrun's store at 127.0.0.1:" in text for text in texts)


def sums_along_axes(rank: int, world_size: int, sizes: dict[Axis, int], store: Path) -> dict[str, float]:
    """Return the sum of the ranks in the group of each axis, and of all ranks in a group apart.

    Once a rank is connected, all have a heartbeat.
    """
    topology, file_store = Topology(rank, sizes), dist.FileStore(str(store), world_size)
    with connect(topology, timeout=timedelta(seconds=60), store=file_store, several_hosts=True) as groups:
        assert [groups.by_axis[axis].ranks for axis in sizes] == [topology.ranks_along(axis) for axis in sizes]
        assert groups.store.has(*(f"acsgd/heartbeat/{other}" for other in range(world_size)))
        assert groups.has_several_hosts
        devices = {device.type for device in groups.world.process_group._device_types}
        assert devices == {*dist.Backend.backend_capability["gloo"]}, "gloo also takes tensors of a GPU"
        sums = {}
        for name, group in {**groups.by_axis, "background": groups.background}.items():
            total = torch.tensor(float(rank), device=group.device)
            groups.waits.wait(group.all_reduce(total))
            sums[name] = total.item()
        return sums


def test_each_axis_has_a_group(tmp_path: Path) -> None:
    sizes: dict[Axis, int] = {"replica": 1, "shard": 2, "pipeline": 2}
    sums = on_ranks(4, sums_along_axes, sizes, tmp_path / "store")
    assert [each["replica"] for each in sums] == [0, 1, 2, 3]
    assert [each["shard"] for each in sums] == [0 + 2, 1 + 3, 0 + 2, 1 + 3]
    assert [each["pipeline"] for each in sums] == [0 + 1, 0 + 1, 2 + 3, 2 + 3]
    assert [each["background"] for each in sums] == [6] * 4


def exchange(rank: int, world_size: int, port: int, rounds: int) -> str:
    """Exchange texts and return the identity of the run."""
    store = dist.TCPStore("127.0.0.1", port)
    with connect(Topology.of(rank, world_size, 1), timeout=timedelta(seconds=NO_LIMIT_S), store=store) as groups:
        for number in range(rounds):
            for name in ("writing", "completing"):
                texts = groups.all_gather_text(name, f"{number} {rank}", timeout_s=NO_LIMIT_S)
                assert texts == [f"{number} {other}" for other in range(world_size)]
        return groups.run_id


def test_the_number_of_keys_does_not_grow_with_the_number_of_exchanges() -> None:
    """Ranks agree on an identity of the run, which differs for each start."""
    keys, identities = [], []
    for rounds in (2, 50):
        with proxied_store() as proxy:
            identities.append(on_ranks(2, exchange, proxy.port, rounds))
            keys.append(proxy.num_keys())
    assert keys[0] == keys[1]
    assert [len(set(each)) for each in identities] == [1, 1]
    assert identities[0] != identities[1]
