"""What one replica does for benchmarks/replicas/cost.py: steps on drawn gradients, without a model, as a worker makes
them, and the CPU time and the memory that they take.
"""

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

from acsgd.config.options import OptimConfig
from acsgd.config.spec import from_spec
from acsgd.dp import MODES
from acsgd.dp.exchange.peers import Peers
from acsgd.dp.exchange.single_replica import SingleReplicaSync
from acsgd.dp.sync import GradSync
from acsgd.meter import Meter
from acsgd.optim.adamw import AdamWOptimizer
from acsgd.optim.base import LocalStep
from acsgd.shards.weights import Weight
from acsgd.topology import Topology, connect

FIRST = 3000
"""Number of the first step that is made, or a few more, so that a period begins."""
POLL_S = 2e-4
TIMEOUT = timedelta(minutes=5)


class Way(NamedTuple):
    """Steps to measure."""

    spec: str
    period: int = 1
    """Of these steps, one exchanges; they make a round."""

    def numbers(self, index: int) -> range:
        """Return the steps of a round."""
        first = -(-FIRST // self.period) + index
        return range(first * self.period, (first + 1) * self.period)


class Cost(NamedTuple):
    """Of one rank and step, mean over a round."""

    mode_s: float
    """CPU time, all threads: of everything but gradients and AdamW."""
    adamw_s: float
    sent_bytes: float


class Memory(NamedTuple):
    """Bytes of one rank; those between steps and at the peak are what it takes more than the only replica of a run."""

    between: int
    peak: int
    saved: int
    """What a mode asks a checkpoint to hold."""


class Replica:
    """Weights, how replicas agree on them, and their optimizer.

    sync: without it, of the mode `spec`.
    """

    def __init__(self, weights: list[Weight], spec: str, peers: Peers, sync: GradSync | None = None) -> None:
        self.sync = sync or from_spec(spec, MODES, key="--modes").open(weights, peers)
        self._weights = weights
        self._peers = peers
        self._optimizer = AdamWOptimizer(weights, OptimConfig(lr=1e-4, steps=10**9))
        count = sum(weight.master.numel() for weight in weights)
        self._noise = torch.randn(count + count // 8, generator=torch.Generator().manual_seed(peers.replica))

    def round(self, numbers: Sequence[int]) -> Cost:
        """Make steps; what they have left under way is done when this returns, and counted."""
        self.sync.meter.reset()
        began, drawing_s, adamw_s = time.process_time(), 0.0, 0.0
        for number in numbers:
            drawing_s += self._backward(number)
            self.sync.reduce()
            self.sync.wait()
            before = time.thread_time()
            self._optimizer.step(number, self.sync.local_step(number) or LocalStep())
            adamw_s += time.thread_time() - before
            self.sync.after_step(number, self._optimizer.second_moments(self._weights))
        self._peers.submit(lambda: None).result(Meter())  # one thread does all: what is before it is done
        mode_s = time.process_time() - began - drawing_s - adamw_s
        return Cost(*(total / len(numbers) for total in (mode_s, adamw_s, self.sync.meter.sent_bytes)))

    def _backward(self, number: int) -> float:
        """Begin a step and make its gradients, last layer first; return the CPU seconds that making them took."""
        self.sync.begin_step(number)
        drawing_s, spare = 0.0, len(self._noise) // 9
        start = number * 7919 % spare
        for weight in reversed(self._weights):
            before = time.thread_time()
            end = start + weight.master.numel()
            grad = self._noise[start:end].view(weight.master.shape).clone()
            drawing_s += time.thread_time() - before
            weight.master.grad, start = grad, end
            del grad  # as autograd, which hands it over
            self.sync.grad_ready(weight, is_final=True)
        return drawing_s


def make_weights(width: int, blocks: int) -> list[Weight]:
    """Return the weights of blocks of a GPT-2 of this width, drawn: 12 width^2 + 13 width parameters each."""
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
    draw = torch.Generator().manual_seed(0)
    params = {
        f"h.{block}.{name}": nn.Parameter(torch.randn(shape, generator=draw).mul_(0.02))
        for block in range(blocks)
        for name, shape in shapes.items()
    }
    return [Weight(key, param, param) for key, param in params.items()]


def costs(
    rank: int, replicas: int, store: str, ways: Sequence[Way], width: int, blocks: int, rounds: int
) -> list[list[Cost]]:
    """Be one rank: all ways live in the same processes and take turns; return what each round of each took."""
    with _group(rank, replicas, store) as group:
        running = [Replica(make_weights(width, blocks), way.spec, Peers(group)) for way in ways]
        taken: list[list[Cost]] = [[] for _ in ways]
        for index in range(rounds + 1):
            for place in range(len(ways))[:: -1 if index % 2 else 1]:
                dist.barrier()
                taken[place].append(running[place].round(ways[place].numbers(index)))
        dist.barrier()
    return [each[1:] for each in taken]  # the first warms up


def memories(
    rank: int, replicas: int, store: str, ways: Sequence[Way], width: int, blocks: int
) -> tuple[Memory, list[Memory]]:
    """Be one rank: return all that the only replica takes, and what ways take more, one after the other."""
    with _group(rank, replicas, store) as group:
        alone = _memory(Way("local"), width, blocks, Peers(group), is_alone=True)
        found = [_memory(way, width, blocks, Peers(group)) for way in ways]
        dist.barrier()
    return alone, [each._replace(between=each.between - alone.between, peak=each.peak - alone.peak) for each in found]


def _memory(way: Way, width: int, blocks: int, peers: Peers, *, is_alone: bool = False) -> Memory:
    """Return what all that belongs to a replica takes after two rounds, and at most in the second."""
    gc.collect()  # what was measured before may hang in cycles
    before = live_bytes()
    weights = make_weights(width, blocks)
    replica = Replica(weights, way.spec, peers, SingleReplicaSync(weights) if is_alone else None)
    noise = replica._noise.nbytes
    replica.round(way.numbers(0))
    dist.barrier()
    with watched() as peak:
        replica.round(way.numbers(1))
    between = live_bytes()
    saved = sum(x.nbytes for by_key in replica.sync.state_dict().values() for x in by_key.values())
    return Memory(between - before - noise, peak[0] - before - noise, saved)


@contextlib.contextmanager
def watched() -> Iterator[list[int]]:
    """Look how many bytes are live, some thousand times per second; the list has the most that were seen."""
    peak, ended = [live_bytes()], threading.Event()

    def watch() -> None:
        while not ended.wait(POLL_S):
            peak[0] = max(peak[0], live_bytes())

    thread = threading.Thread(target=watch)
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
    """Return how many bytes this process has allocated and not freed, all threads: tensors and all else. Needs glibc.

    Also those never touched, which a GPU would hold and the resident size leaves out.
    """
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _MallInfo
    found = mallinfo2()
    return int(found.uordblks + found.hblkhd)


@contextlib.contextmanager
def _group(rank: int, replicas: int, store: str) -> Iterator[dist.ProcessGroup]:
    torch.set_num_threads(1)
    topology = Topology(rank, replicas, stages=1)
    with connect(topology, timeout=TIMEOUT, store=dist.FileStore(store, replicas)) as groups:
        yield groups.dp
