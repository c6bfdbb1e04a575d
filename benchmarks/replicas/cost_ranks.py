"""One rank of cost.py: steps on random gradients, without a model, and their CPU time and memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from acsgd.comm.process_groups import Group
from acsgd.comm.waits import DIRECT, Meter
from acsgd.config.options import OptimConfig
from acsgd.config.spec import from_spec
from acsgd.dp import MODES
from acsgd.dp.peers import Peers
from acsgd.dp.sync import GradSync, SingleReplicaSync
from acsgd.groups import connect
from acsgd.optim.adamw import AdamWOptimizer
from acsgd.optim.base import LocalStep
from acsgd.shards.weights import Weight
from acsgd.topology import Topology

FIRST = 3000
"""Number of the first step, rounded up to the start of a period."""
POLL_S = 2e-4
"""Interval at which peak memory is sampled, seconds."""
TIMEOUT = timedelta(minutes=5)


class Measured(NamedTuple):
    """A data-parallel mode to measure."""

    spec: str
    period: int = 1
    """Number of steps after which the mode's exchanges repeat; a round is one period."""

    def numbers(self, index: int) -> range:
        """Return the numbers of the steps of a round."""
        first = -(-FIRST // self.period) + index
        return range(first * self.period, (first + 1) * self.period)


class Cost(NamedTuple):
    """Cost of one step on one rank, mean over a round."""

    mode_s: float
    """CPU time of all threads without gradients and AdamW, seconds."""
    adamw_s: float
    """CPU time of AdamW, seconds."""
    sent_bytes: float


class Memory(NamedTuple):
    """Bytes of one rank."""

    between: int
    """Allocated between steps."""
    peak: int
    """Peak during a round."""
    saved: int
    """State of the mode in a checkpoint."""


class Replica:
    """Weights, their gradient sync and their optimizer.

    sync: by default that of the mode `spec`.
    """

    def __init__(self, weights: list[Weight], spec: str, peers: Peers, sync: GradSync | None = None) -> None:
        self.sync = sync or from_spec(spec, MODES, key="--modes").open(weights, peers)
        self._weights = weights
        self._peers = peers
        self._optimizer = AdamWOptimizer(weights, OptimConfig(lr=1e-4, steps=10**9))
        count = sum(weight.master.numel() for weight in weights)
        self._noise = torch.randn(count + count // 8, generator=torch.Generator().manual_seed(peers.replica))

    def round(self, numbers: Sequence[int]) -> Cost:
        """Run steps and return their mean cost, which includes the exchanges that they leave in progress."""
        self.sync.meter.reset()
        started, gradients_s, adamw_s = time.process_time(), 0.0, 0.0
        for number in numbers:
            gradients_s += self._backward(number)
            self.sync.reduce()
            self.sync.wait()
            self.sync.commit()
            before = time.thread_time()
            self._optimizer.step(number, self.sync.local_step(number) or LocalStep())
            adamw_s += time.thread_time() - before
            moments = self._optimizer.second_moments(self._weights)
            self.sync.exchange(number, moments)
            self.sync.after_step(number, moments)
        self._peers.submit(lambda: None).result(Meter())  # it runs in the thread of all exchanges, after them
        mode_s = time.process_time() - started - gradients_s - adamw_s
        return Cost(*(total / len(numbers) for total in (mode_s, adamw_s, self.sync.meter.sent_bytes)))

    def _backward(self, number: int) -> float:
        """Start a step and create its gradients, last layer first; return the CPU seconds of creating them."""
        self.sync.begin_step(number)
        gradients_s, spare = 0.0, len(self._noise) // 9
        start = number * 7919 % spare
        for weight in reversed(self._weights):
            before = time.thread_time()
            end = start + weight.master.numel()
            grad = self._noise[start:end].view(weight.master.shape).clone()
            gradients_s += time.thread_time() - before
            weight.master.grad, start = grad, end
            del grad  # autograd keeps no reference either
            self.sync.grad_ready(weight, is_final=True)
        return gradients_s


def make_weights(width: int, blocks: int) -> list[Weight]:
    """Return random weights of GPT-2 blocks; each block has 12 width^2 + 13 width parameters."""
    shapes: dict[str, tuple[int, ...]] = {
        "ln_1.weight": (width,),
        "ln_1.bias": (width,),
        "attn.c_attn.weight": (width, 3 * width),
        "attn.c_attn.bias": (3 * width,),
        "attn.c_proj.weight": (width, width),
        "attn.c_proj.bias": (width,),
        "ln_2.weight": (width,),
        "ln_2.bias": (width,),
        "mlp.c_fc.weight": (width, 4 * width),
        "mlp.c_fc.bias": (4 * width,),
        "mlp.c_proj.weight": (4 * width, width),
        "mlp.c_proj.bias": (width,),
    }
    generator = torch.Generator().manual_seed(0)
    params = {
        f"h.{block}.{name}": nn.Parameter(torch.randn(shape, generator=generator).mul_(0.02))
        for block in range(blocks)
        for name, shape in shapes.items()
    }
    return [Weight(key, param, param) for key, param in params.items()]


def costs(
    rank: int, replicas: int, store: str, modes: Sequence[Measured], width: int, blocks: int, rounds: int
) -> list[list[Cost]]:
    """Run one rank; all modes run in turn in the same processes. Return the costs by mode and round."""
    with _group(rank, replicas, store) as group:
        running = [Replica(make_weights(width, blocks), mode.spec, Peers(group, DIRECT)) for mode in modes]
        result: list[list[Cost]] = [[] for _ in modes]
        for index in range(rounds + 1):
            for i in range(len(modes))[:: -1 if index % 2 else 1]:
                dist.barrier()
                result[i].append(running[i].round(modes[i].numbers(index)))
        dist.barrier()
    return [rounds_of[1:] for rounds_of in result]  # the first round is the warm-up


def memories(
    rank: int, replicas: int, store: str, modes: Sequence[Measured], width: int, blocks: int
) -> tuple[Memory, list[Memory]]:
    """Run one rank; return the memory of a single replica, and how much more each mode uses."""
    with _group(rank, replicas, store) as group:
        single = _memory(Measured("local"), width, blocks, Peers(group, DIRECT), is_single=True)
        found = [_memory(mode, width, blocks, Peers(group, DIRECT)) for mode in modes]
        dist.barrier()
    return single, [
        each._replace(between=each.between - single.between, peak=each.peak - single.peak) for each in found
    ]


def _memory(mode: Measured, width: int, blocks: int, peers: Peers, *, is_single: bool = False) -> Memory:
    """Return the memory of a replica after two rounds, and its peak in the second."""
    gc.collect()  # the previous replica may be in reference cycles
    before = live_bytes()
    weights = make_weights(width, blocks)
    replica = Replica(weights, mode.spec, peers, SingleReplicaSync(weights) if is_single else None)
    noise = replica._noise.nbytes
    replica.round(mode.numbers(0))
    dist.barrier()
    with peak_bytes() as peak:
        replica.round(mode.numbers(1))
    between = live_bytes()
    saved = sum(x.nbytes for by_key in replica.sync.state_dict().values() for x in by_key.values())
    return Memory(between - before - noise, peak[0] - before - noise, saved)


@contextlib.contextmanager
def peak_bytes() -> Iterator[list[int]]:
    """Sample the allocated bytes every POLL_S seconds; the list has one element, their maximum so far."""
    peak, ended = [live_bytes()], threading.Event()

    def sample() -> None:
        while not ended.wait(POLL_S):
            peak[0] = max(peak[0], live_bytes())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


class _MallInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def live_bytes() -> int:
    """Return the number of bytes that this process has allocated and not freed, in all threads. Needs glibc.

    Unlike the resident size, it includes pages that were never touched, which would take memory on a GPU.
    """
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _MallInfo
    found = mallinfo2()
    return int(found.uordblks + found.hblkhd)


@contextlib.contextmanager
def _group(rank: int, replicas: int, store: str) -> Iterator[Group]:
    torch.set_num_threads(1)
    topology = Topology.of(rank, replicas, stages=1)
    with connect(topology, timeout=TIMEOUT, store=dist.FileStore(store, replicas)) as groups:
        yield groups.dp
