"""Speed of the codecs of data-parallel modes, and the length of their messages. A part of cost.py."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from acsgd.codecs.message import MessageCodec, PackedCodec
from acsgd.codecs.topk import TopK
from acsgd.config.spec import from_spec
from acsgd.dp import MODES

HEADER_BYTES = 16
"""Header of every message between replicas (acsgd/dp/peers.py)."""


class Spread(NamedTuple):
    """Median and quartiles over rounds."""

    median: float
    low: float
    """Lower quartile."""
    high: float
    """Upper quartile."""

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Spread:
        low, median, high = statistics.quantiles(numbers, n=4, method="inclusive")
        return cls(median, low, high)


class Encoded(NamedTuple):
    """Results of a mode's codec on one kind of data."""

    spec: str
    data: str
    elements: int
    """Number of encoded elements."""
    message_bytes: int
    """Bytes of the message, with its header."""
    ratio: float
    """Compression ratio: fp32 bytes of the encoded elements / bytes of the message."""
    parameters_ratio: float
    """fp32 bytes of all parameters / bytes of the message."""
    encode_ns: Spread
    """Nanoseconds per encoded element, including the wait for the GPU."""
    decode_ns: Spread
    encode_share: Spread
    """Bytes of elements and message per second, relative to those that a copy reads and writes."""
    decode_share: Spread


class ModeCodec(NamedTuple):
    """The codec of a mode's messages."""

    spec: str
    codec: MessageCodec
    fraction: float
    """Fraction of the parameters that are encoded."""


def codecs_of(specs: Sequence[str]) -> list[ModeCodec]:
    """Return the codecs of the modes that compress messages, without duplicates."""
    found: dict[MessageCodec, ModeCodec] = {}
    for spec in specs:
        mode = from_spec(spec, MODES, key="--modes")
        codec = mode.codec() if hasattr(mode, "codec") else None
        if isinstance(codec, TopK | PackedCodec):
            found.setdefault(codec, ModeCodec(spec, codec, getattr(mode, "random", 1.0)))
    return list(found.values())


def random_vectors(n: int, device: torch.device) -> dict[str, Tensor]:
    """Return vectors [n] of distributions with different tails, by name."""
    generator = torch.Generator(device).manual_seed(0)
    normal = partial(torch.randn, n, generator=generator, device=device)
    uniform = torch.rand(n, generator=generator, device=device) - 0.5
    squares = sum((normal().square() for _ in range(3)), torch.zeros(n, device=device))
    return {
        "normal": normal(),
        "Laplace": uniform.sign() * -torch.log1p(-2 * uniform.abs()),
        "Student t, 3": normal() / squares.div_(3).sqrt_(),
    }


def measure(specs: Sequence[str], parameters: int, rounds: int, device: torch.device) -> list[Encoded]:
    """Return the results by codec and kind of data; on a CPU, of one thread."""
    torch.set_num_threads(1)
    return [
        _measure(mode, kind, x, rounds)
        for mode in codecs_of(specs)
        for kind, x in random_vectors(round(parameters * mode.fraction), device).items()
    ]


def _measure(mode: ModeCodec, kind: str, x: Tensor, rounds: int) -> Encoded:
    n, codec, target = len(x), mode.codec, torch.empty_like(x)
    message = codec.encode(x)
    works: list[Callable[[], object]] = [
        lambda: target.copy_(x),
        lambda: codec.encode(x),
        lambda: codec.decode(message, n),
    ]
    times = [[_seconds(work, x.device) for work in works] for _ in range(rounds + 1)][1:]  # the first is the warm-up
    relative_bytes = (x.nbytes + len(message)) / (2 * x.nbytes)
    nanoseconds = [Spread.of([seconds[i] / n * 1e9 for seconds in times]) for i in (1, 2)]
    shares = [Spread.of([relative_bytes * seconds[0] / seconds[i] for seconds in times]) for i in (1, 2)]
    nbytes = HEADER_BYTES + len(message)
    ratio = x.nbytes / nbytes
    return Encoded(mode.spec, kind, n, nbytes, ratio, ratio / mode.fraction, *nanoseconds, *shares)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds until the device has completed a call."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start
