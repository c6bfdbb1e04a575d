"""Measure messages between two processes of this machine as runs send them: delay and rate, and the CPU time they take
with what a dp.mode computes.

Both processes measure at once, as the ranks of a host run at once.
"""

from __future__ import annotations

import itertools
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from acsgd.codecs.identity import Identity
from acsgd.comm.waits import Meter
from acsgd.config.options import in_steps
from acsgd.config.spec import from_spec
from acsgd.dp.exchange.buckets import BUCKET_MB
from acsgd.dp.exchange.second_moments import INTERVAL
from acsgd.dp.modes import MODES, initial_steps
from acsgd.dp.modes.allreduce import AllReduce, open_sync
from acsgd.dp.peers import Peers
from acsgd.dp.sync import GradSync, Mode
from acsgd.errors import reason
from acsgd.groups import Groups, connect
from acsgd.host_memory import usable_processors
from acsgd.optim.base import SecondMoments
from acsgd.optim.ownership import OwnedWeights, Ownership, divide
from acsgd.pp.wire.coder import TensorSpec, TransferInfo
from acsgd.pp.wire.link import Link, LinkFactory
from acsgd.run.plan.rates import HOST_BYTES_PER_S, LinkRate, MessageTimes
from acsgd.shards.weights import Weight
from acsgd.streams import Streams
from acsgd.topology import Topology

TIMEOUT = timedelta(seconds=60)
SHORT, LONG = 2**12, 2**20
"""Elements of the messages between stages that are measured, fp32."""
NBYTES = 4 * (LONG - SHORT)
"""Their difference in bytes."""
MIN_ROUNDS = 4
MODE_ELEMENTS = 2**24
"""Elements of the weight with which a dp.mode is measured: so many that each copy of them takes new memory."""
DECAY = 0.999
"""Decay rate of the second moments, as optim.betas has it by default."""


class MeasuredMessages(NamedTuple):
    """What was measured between two processes."""

    link: LinkRate
    times: MessageTimes


def measure_messages(seconds: float, mode: str) -> MeasuredMessages:
    """Measure two processes, with as many threads each as this one.

    seconds: of each measurement, four and one of `mode`, a dp.mode. Raises ValueError if a process fails.
    """
    context, threads = multiprocessing.get_context("spawn"), torch.get_num_threads()
    pipes, processes = list[Connection](), list[BaseProcess]()
    with tempfile.TemporaryDirectory() as directory:
        try:
            for rank in range(2):
                ours, theirs = context.Pipe(duplex=False)
                arguments = (rank, str(Path(directory) / "store"), seconds, mode, threads, theirs)
                process = context.Process(target=_be_rank, args=arguments, daemon=True)
                process.start()
                theirs.close()  # so that the pipe ends with the process
                pipes.append(ours)
                processes.append(process)
            limit_s = 5 * seconds + 2 * TIMEOUT.total_seconds()
            found = [_receive(pipe, rank, limit_s) for rank, pipe in enumerate(pipes)]
        finally:
            for each in processes:
                each.kill()
                each.join()
    return found[0]


def _receive(pipe: Connection, rank: int, limit_s: float) -> MeasuredMessages:
    """Return what a process has measured. Raises ValueError if it fails or takes longer."""
    try:
        found: MeasuredMessages | str = pipe.recv() if pipe.poll(limit_s) else f"no result after {limit_s:g} s"
    except EOFError:
        found = "it ended without a message, as for want of memory"
    if isinstance(found, str):
        raise ValueError(
            f"messages between two processes of this host cannot be measured: process {rank}: {found}; acsgd doctor "
            "checks this host, and --device NAME plans for a known GPU without measuring"
        )
    return found


def _be_rank(rank: int, store: str, seconds: float, mode: str, threads: int, pipe: Connection) -> None:
    """Measure as one of the two processes, and send the result, or why there is none."""
    torch.set_num_threads(threads)
    try:
        pipe.send(_measure(rank, store, seconds, mode, threads))
    except Exception as error:
        first_line = reason(error).partition("\n")[0]
        pipe.send(f"{type(error).__name__}: {first_line}")


def _measure(rank: int, store: str, seconds: float, mode: str, threads: int) -> MeasuredMessages:
    with connect(Topology.of(rank, 2, 1), timeout=TIMEOUT, store=dist.FileStore(store, 2)) as groups:
        short, long = (_time_message(groups, number, size, seconds) for number, size in enumerate((SHORT, LONG)))
        end_byte_s = max(0.0, long.cpu_s - short.cpu_s) / 2 / NBYTES
        summed, divided = (_cpu_per_byte(groups, seconds, is_divided=each) for each in (False, True))
        times = MessageTimes(short.cpu_s / 2, end_byte_s, summed, divided, usable_processors() / threads)
        parsed = from_spec(in_steps(mode, lambda _: 1), MODES, key="dp.mode")  # exact steps are not measured
        if not isinstance(parsed, AllReduce):
            times = replace(times, mode=mode, mode_param_s=_cpu_per_parameter(groups, seconds, parsed))
        groups.wait_for_all("measuring messages", timeout_s=TIMEOUT.total_seconds())
    return MeasuredMessages(LinkRate(_bytes_per_s(short, long), short.wait_s), times)


class _MessageTime(NamedTuple):
    """Time of a message from one training thread to the other."""

    wall_s: float
    cpu_s: float
    """CPU time of both threads."""

    @property
    def wait_s(self) -> float:
        """Time in which neither thread computes."""
        return max(0.0, self.wall_s - self.cpu_s)


def _bytes_per_s(short: _MessageTime, long: _MessageTime) -> float:
    """Return the rate of the link; no more than that of copies in memory.

    On a busy machine long messages may seem to wait no longer than short ones; then all of their time counts.
    """
    waited = long.wait_s - short.wait_s
    return min(HOST_BYTES_PER_S, NBYTES / (waited if waited > 0 else long.wall_s))


def _time_message(groups: Groups, boundary: int, size: int, seconds: float) -> _MessageTime:
    """Send a message of `size` elements to and fro over the link of a boundary."""
    spec, streams, rank = TensorSpec((1, size), torch.float32), Streams(torch.device("cpu")), groups.world.rank()
    codecs, boundaries = [Identity()], [{"hidden": spec}] * (boundary + 1)
    factory = LinkFactory(groups.world, groups.waits, streams, boundaries, codecs, codecs, Meter(), Meter())
    link, state = factory.open(boundary, peer=1 - rank, downstream=rank == 0), {"hidden": torch.ones(1, size)}
    wall, cpu = list[float](), list[float]()
    for micro in _rounds(groups, seconds):
        began, worked = time.perf_counter(), time.thread_time()
        _send_and_receive(link, TransferInfo(0, micro), state, is_first=rank == 0)
        wall.append((time.perf_counter() - began) / 2)
        cpu.append(time.thread_time() - worked)  # of two ends, as of both threads for one message
    link.outbox.drain()
    link.close()
    return _MessageTime(median(wall), median(cpu))


def _send_and_receive(link: Link, info: TransferInfo, state: dict[str, torch.Tensor], *, is_first: bool) -> None:
    link.inbox.post()
    for sends in (is_first, not is_first):
        if sends:
            link.send(info, state)
            link.outbox.flush(wait=True)
        else:
            link.receive(info)


def _cpu_per_byte(groups: Groups, seconds: float, *, is_divided: bool) -> float:
    """Return the CPU time of this process for each byte of gradients and weights that it sends.

    is_divided: whether replicas own parts of the weights, as with dp.shard.
    """
    weight, peers = _new_weight(int(BUCKET_MB * 1e6) // 4), Peers(groups.world, groups.waits)
    parts = tuple(divide([weight], 2, by_rows=True)) if is_divided else None
    owned = OwnedWeights([weight], Ownership(groups.world.rank(), 2, parts))
    sync = open_sync(AllReduce(), [weight], owned, peers, shard="optimizer" if is_divided else "none")
    times = list[float]()
    for step in _rounds(groups, seconds):
        gradient, began, sent = torch.ones_like(weight.master), time.process_time(), sync.meter.sent_bytes
        _run_step(sync, weight, gradient, step, SecondMoments({}, 0.0))
        times.append((time.process_time() - began) / (sync.meter.sent_bytes - sent))
    peers.close()
    return median(times)


def _cpu_per_parameter(groups: Groups, seconds: float, mode: Mode) -> float:
    """Return the CPU time of this process for each parameter in a step of a mode, without the optimizer's.

    Of several threads at once, no more than the time that passes.
    Mean over the steps from one exchange to the next, behind the initial exact ones. Second moments are corrected, but
    rarely measured.
    """
    weight, peers, inner = _new_weight(MODE_ELEMENTS), Peers(groups.world, groups.waits), getattr(mode, "inner", 1)
    sync, noise, times = mode.open([weight], peers), torch.randn_like(weight.master), list[float]()
    moments = SecondMoments({weight.key: noise.square()}, DECAY)
    first = initial_steps(mode) + INTERVAL + 1
    for number in _rounds(groups, seconds):
        weight.master.data.add_(noise)
        began, worked = time.perf_counter(), time.process_time()
        for step in range(first + inner * number, first + inner * (number + 1)):
            _run_step(sync, weight, noise, step, moments)
        peers.submit(lambda: None).result(Meter())  # behind what the thread of exchanges has to do still
        taken_s = min(time.perf_counter() - began, time.process_time() - worked)
        times.append(taken_s / inner / noise.numel())
        noise.normal_()  # a sum has replaced it
    peers.close()
    return median(times)


def _new_weight(elements: int) -> Weight:
    """Return a matrix of about some elements."""
    param = nn.Parameter(torch.zeros(elements // 2**10, 2**10))
    return Weight("weight", param, param)


def _run_step(sync: GradSync, weight: Weight, gradient: torch.Tensor, step: int, moments: SecondMoments) -> None:
    """Run a step of a sync, but for the optimizer."""
    sync.begin_step(step)
    weight.master.grad = gradient
    sync.grad_ready(weight, is_final=True)
    sync.reduce()
    sync.wait()
    sync.commit()
    sync.exchange(step, moments)
    sync.after_step(step, moments)
    sync.share_parts()


def _rounds(groups: Groups, seconds: float) -> Iterator[int]:
    """Yield numbers of rounds, as many on both ranks, for about some seconds."""
    began = time.perf_counter()
    for number in itertools.count():
        late = torch.tensor(float(time.perf_counter() - began > seconds and number >= MIN_ROUNDS))
        groups.waits.wait(groups.world.all_reduce(late))
        if late:
            return
        yield number
