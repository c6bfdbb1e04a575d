"""How long compressors of data-parallel modes take alone, and how short messages are: a part of
benchmarks/replicas/cost.py.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from acsgd.codecs.message import MessageCodec
from acsgd.config.spec import from_spec
from acsgd.dp import MODES

FRAME_BYTES = 16
"""Of every message between replicas, before its body (acsgd.dp.exchange.peers)."""


class Spread(NamedTuple):
    """Of a number, over rounds."""

    median: float
    low: float
    """Lower quartile."""
    high: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Spread:
        low, median, high = statistics.quantiles(numbers, n=4, method="inclusive")
        return cls(median, low, high)


class Encoded(NamedTuple):
    """A mode's compressor at work on one kind of data."""

    spec: str
    data: str
    elements: int
    message_bytes: int
    """With its frame."""
    ratio: float
    """Of fp32 of what is encoded, over the message."""
    parameters_ratio: float
    """Of fp32 of all parameters, most of which are not looked at."""
    encode_ns: Spread
    """Per element that is encoded; waiting for a GPU included."""
    decode_ns: Spread
    encode_share: Spread
    """Bytes that must move, elements and message once each, per second, relative to those of a copy."""
    decode_share: Spread


class Chosen(NamedTuple):
    """A compressor, of a mode."""

    spec: str
    compressor: MessageCodec
    looked_at: float
    """Share of the parameters that are encoded."""


def chosen_of(specs: Sequence[str]) -> list[Chosen]:
    """Return the compressors of modes that have one, each once."""
    found: dict[MessageCodec, Chosen] = {}
    for spec in specs:
        mode = from_spec(spec, MODES, key="--modes")
        if hasattr(mode, "compressor"):
            compressor = mode.compressor()
            found.setdefault(compressor, Chosen(spec, compressor, getattr(mode, "random", 1.0)))
    return list(found.values())


def drawn(n: int, device: torch.device) -> dict[str, Tensor]:
    """Return vectors [n] with tails of different weight, none of them sorted or repeated."""
    draw = torch.Generator(device).manual_seed(0)
    normal = partial(torch.randn, n, generator=draw, device=device)
    uniform = torch.rand(n, generator=draw, device=device) - 0.5
    squares = sum((normal().square() for _ in range(3)), torch.zeros(n, device=device))
    return {
        "normal": normal(),
        "Laplace": uniform.sign() * -torch.log1p(-2 * uniform.abs()),
        "Student t, 3": normal() / squares.div_(3).sqrt_(),
    }


def measure(specs: Sequence[str], parameters: int, rounds: int, device: torch.device) -> list[Encoded]:
    """Return a row for each compressor and kind of data; a CPU works in one thread."""
    torch.set_num_threads(1)
    return [
        _encoded(chosen, kind, x, rounds)
        for chosen in chosen_of(specs)
        for kind, x in drawn(round(parameters * chosen.looked_at), device).items()
    ]


def _encoded(chosen: Chosen, kind: str, x: Tensor, rounds: int) -> Encoded:
    n, compressor, target = len(x), chosen.compressor, torch.empty_like(x)
    message = compressor.encode(x)
    works: list[Callable[[], object]] = [
        lambda: target.copy_(x),
        lambda: compressor.encode(x),
        lambda: compressor.decode(message, n),
    ]
    taken = [[_seconds(work, x.device) for work in works] for _ in range(rounds + 1)][1:]  # the first warms up
    must_move = (x.nbytes + len(message)) / (2 * x.nbytes)
    ways = {"encode": 1, "decode": 2}
    nanoseconds = [Spread.of([seconds[way] / n * 1e9 for seconds in taken]) for way in ways.values()]
    shares = [Spread.of([must_move * seconds[0] / seconds[way] for seconds in taken]) for way in ways.values()]
    nbytes = FRAME_BYTES + len(message)
    ratio = x.nbytes / nbytes
    return Encoded(chosen.spec, kind, n, nbytes, ratio, ratio / chosen.looked_at, *nanoseconds, *shares)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return how long a piece of work takes, until the device has done it."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start
