"""Throughput of the codecs on one CPU core, and their error:

    .venv/bin/python -m benchmarks.codecs.speed [--json runs/benchmarks/codec.json]

Speed: in every round each codec encodes and decodes one fp32 tensor; copy_ copies the same tensor before each of the
two. The order of the codecs alternates between rounds. GB/s are bytes of the fp32 tensor per second. Machine speed
drifts and other programs take CPU time, so codecs are compared by their time relative to the copy that precedes them:
median and quartiles over rounds.

numpy             bit packing as in AQ-SGD's code: one bit per byte, then packbits
update            one end of a delta link on a cache hit: encodes the difference to an fp16 cache entry, or decodes it,
                  and adds the decoded difference to the entry
entropy coding    the entropy coder alone, on a message of the codec named beside it

Error: norm(y - x) / norm(x) of 512 x 1024 elements. Bits per element include scales.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from acsgd import codecs
from acsgd.codecs import basis
from acsgd.codecs.base import Codec, Wire, pack, wire_bytes
from acsgd.codecs.cache_update import add_saturated, decode_update, encode_update
from acsgd.codecs.lossless import compress_, decompress
from acsgd.config.spec import from_spec
from acsgd.pp.wire.delta import Delta

FAST = [
    *(f"fixpoint:bits={bits}" for bits in range(1, 9)),
    "fixpoint:bits=4,dims=token",
    "fixpoint:bits=4,dims=group,group=64",
    "fixpoint:bits=4,rounding=stochastic",
    "fixpoint:bits=2,scale=l2",
    "fixpoint:bits=4,scale=l2,clip=12",
    "fixpoint:bits=4,scale=l2,clip=12,centroids=true",
    *(f"lloyd:bits={bits}" for bits in (2, 3, 4, 8)),
    "hadamard",
    "hadamard:low=4",
]
DELTAS = ["delta:bits=4", "delta:bits=2", "delta:step=1.5", "delta:step=2.5"]
SMALL = [
    *(f"{name}:bits={bits}" for bits in (1, 2, 3, 4, 6, 8) for name in ("fixpoint", "lloyd")),
    "fixpoint:bits=2,scale=l2",
    "fixpoint:bits=4,dims=group,group=64",
    "lloyd:bits=4,dims=group,group=64",
    *(f"hadamard:bits={bits},low={bits}" for bits in (2, 3, 4)),
    "hadamard",
    "hadamard:bits=5,low=3,fraction=0.5",
]


class Encoder(Protocol):
    """Anything whose encode and decode are timed."""

    def encode(self, x: Tensor) -> tuple[Tensor, ...]: ...

    def decode(self, fields: tuple[Tensor, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor: ...


class NumpyPacking:
    """fixpoint with numpy's packbits, as in AQ-SGD's code (there with cupy)."""

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        levels = 2 ** (self.bits - 1)
        scales = x.abs().amax(tuple(range(x.dim() - 1))).half()
        codes = (x / scales.float() * levels).round().clamp(-levels, levels - 1).add(levels).to(torch.uint8)
        one_bit_per_byte = np.unpackbits(codes.numpy()[..., None], axis=-1)[..., 8 - self.bits :]
        return torch.from_numpy(np.packbits(one_bit_per_byte)), scales

    def decode(self, fields: tuple[Tensor, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        stream, scales = fields
        count, levels = int(np.prod(shape)), 2 ** (self.bits - 1)
        one_bit_per_byte = np.unpackbits(stream.numpy())[: count * self.bits].reshape(-1, self.bits)
        padded = np.pad(one_bit_per_byte, ((0, 0), (8 - self.bits, 0)))
        codes = torch.from_numpy(np.packbits(padded)).view(shape)
        return ((codes.float() - levels) / levels * scales.float()).to(dtype)


class CacheUpdate:
    """The cache updates at the two ends of a delta link on a cache hit."""

    def __init__(self, codec: Codec, x: Tensor) -> None:
        self.codec = codec
        self.sender, self.receiver = torch.zeros_like(x, dtype=torch.float16), torch.zeros_like(x, dtype=torch.float16)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        return encode_update(self.codec, x, self.sender)

    def decode(self, fields: tuple[Tensor, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return decode_update(self.codec, fields, self.receiver, dtype)


class BasisUpdate:
    """The cache updates at the two ends of a delta link with transform=true, in a basis that both have."""

    def __init__(self, step: float, x: Tensor) -> None:
        self.step, self.moments = step, basis.Moments()
        self.basis = basis.fit_basis(basis.Moments(), basis.Moments(), x)
        self.inverse = basis.invert(self.basis)
        self.sender, self.receiver = torch.zeros_like(x, dtype=torch.float16), torch.zeros_like(x, dtype=torch.float16)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        difference = x - self.sender.float()
        self.moments.add(difference)
        fields = basis.encode(difference, self.inverse, self.step)
        add_saturated(self.sender, basis.decode(fields, self.basis, tuple(x.shape)))
        return fields

    def decode(self, fields: tuple[Tensor, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return add_saturated(self.receiver, basis.decode(fields, self.basis, shape)).to(dtype)


class EntropyCoding:
    """The entropy coder on a message. Works in place, so the times include a copy of it."""

    def __init__(self, fields: tuple[Tensor, ...], wire: Wire) -> None:
        self.wire, self.body = wire, torch.zeros(wire_bytes(wire), dtype=torch.uint8)
        pack(fields, self.body)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        body = self.body.clone()
        return (body[: compress_(body, self.wire)],)

    def decode(self, fields: tuple[Tensor, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        body = torch.empty_like(self.body)
        decompress(fields[0], body, self.wire)
        return body


class Speed(NamedTuple):
    """Speed of one codec in one direction."""

    gb_per_s: float
    """Median throughput, GB of fp32 per second."""
    relative: float
    """Median time relative to a copy."""
    quartiles: tuple[float, float]
    """Quartiles of the time relative to a copy."""


def main() -> None:
    """Measure, print, save."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    console = Console(width=160)
    speeds, copy_gb_per_s = measure_speed(arguments.rows, arguments.width, arguments.rounds)
    console.print(speed_table(speeds, copy_gb_per_s))
    errors = measure_errors()
    console.print(error_table(errors))
    write_json(arguments.json, arguments, speeds, copy_gb_per_s, errors)


def measure_speed(rows: int, width: int, rounds: int) -> tuple[dict[str, dict[str, Speed]], float]:
    """Return the speeds by name and direction, and the throughput of the copy, GB/s."""
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
    target, gigabytes = torch.empty_like(x), x.nbytes / 1e9
    sides: dict[str, Encoder] = {spec: codecs.parse(spec) for spec in FAST}
    sides |= {f"numpy, {bits} bits": NumpyPacking(bits) for bits in (2, 3, 4, 8)}
    deltas: dict[str, Codec] = {spec: from_spec(spec, {"delta": Delta}, key="codec").codec for spec in DELTAS}
    sides |= {f"update, {spec}": CacheUpdate(codec, x) for spec, codec in deltas.items()}
    in_basis = {f"delta:step={step:g},transform=true": BasisUpdate(step, x) for step in (0.2, 1.5)}
    sides |= {f"update, {spec}": update for spec, update in in_basis.items()}
    shape = tuple(x.shape)
    sides |= {
        f"entropy coding, {spec}": EntropyCoding(codec.encode(x), codec.wire(shape))
        for spec, codec in deltas.items()
        if codec.entropy_coding
    }
    sides |= {
        f"entropy coding, {spec}": EntropyCoding(update.encode(x), basis.wire(shape))
        for spec, update in in_basis.items()
    }
    times: dict[str, dict[str, list[tuple[float, float]]]] = {name: {"encode": [], "decode": []} for name in sides}
    for number in range(rounds + 1):  # the first round is the warm-up
        for name in list(sides)[:: 1 if number % 2 else -1]:
            copied = seconds(lambda: target.copy_(x))
            encoded = seconds(lambda side=sides[name]: side.encode(x))  # type: ignore[misc]
            fields = sides[name].encode(x)
            copied_again = seconds(lambda: target.copy_(x))
            decoded = seconds(
                lambda side=sides[name], fields=fields: side.decode(fields, tuple(x.shape), x.dtype)  # type: ignore[misc]
            )
            times[name]["encode"].append((encoded, copied))
            times[name]["decode"].append((decoded, copied_again))
    copies = [copied for directions in times.values() for pairs in directions.values() for _, copied in pairs[1:]]
    speeds = {
        name: {direction: summarise(pairs[1:], gigabytes) for direction, pairs in directions.items()}
        for name, directions in times.items()
    }
    return speeds, gigabytes / statistics.median(copies)


def seconds(work: Callable[[], object]) -> float:
    """Return the duration of a call, seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def summarise(pairs: list[tuple[float, float]], gigabytes: float) -> Speed:
    """Aggregate the rounds. pairs: seconds of the codec and of the copy."""
    ratios = [ours / copied for ours, copied in pairs]
    low, _, high = statistics.quantiles(ratios, n=4)
    return Speed(gigabytes / statistics.median(ours for ours, _ in pairs), statistics.median(ratios), (low, high))


def data() -> dict[str, Tensor]:
    """Return tensors [tokens, channels] with different tails and scales."""
    generator = torch.Generator().manual_seed(0)

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    plain, uniform = gaussian(512, 1024), torch.rand(512, 1024, generator=generator) - 0.5
    outliers = plain.clone()
    outliers[:, :: 1024 // 16] *= 100
    return {
        "gaussian": plain,
        "laplace": uniform.sign() * -torch.log1p(-2 * uniform.abs()),
        "student t, 3": plain / (gaussian(3, 512, 1024).square().mean(0)).sqrt(),
        "student t, 2": plain / (gaussian(2, 512, 1024).square().mean(0)).sqrt(),
        "outlier channels": outliers,
        "channels of different scale": plain * gaussian(1024).exp() + 2 * gaussian(1024),
        "tokens of different scale": plain * gaussian(512, 1).exp(),
        "rectified": plain.relu(),
    }


def measure_errors() -> dict[str, dict[str, float]]:
    """Return the bits per element and the relative error on each kind of data, by codec."""
    kinds, result = data(), {}
    for spec in SMALL:
        codec = codecs.parse(spec)
        shape = (512, 1024)
        row = {"bits per element": 8 * wire_bytes(codec.wire(shape)) / (512 * 1024)}
        for kind, x in kinds.items():
            y = codec.decode(codec.encode(x), shape, x.dtype)
            row[kind] = float((y - x).norm() / x.norm())
        result[spec] = row
    return result


def speed_table(speeds: dict[str, dict[str, Speed]], copy_gb_per_s: float) -> Table:
    """Return a table of throughput and time relative to a copy, one codec per row."""
    table = Table(title=f"One core; copy_ of the same tensor: {copy_gb_per_s:.1f} GB/s")
    for column in ("codec", "encode, GB/s", "times a copy", "decode, GB/s", "times a copy"):
        table.add_column(column, justify="left" if column == "codec" else "right", no_wrap=True)
    for name, directions in speeds.items():
        cells = []
        for speed in directions.values():
            low, high = speed.quartiles
            cells += [f"{speed.gb_per_s:.2f}", f"{speed.relative:.1f} ({low:.1f} - {high:.1f})"]
        table.add_row(name, *cells)
    return table


def error_table(errors: dict[str, dict[str, float]]) -> Table:
    """Return a table of bits per element and relative errors, one codec per row."""
    columns = list(next(iter(errors.values())))
    table = Table(title="Relative error")
    table.add_column("codec", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    for spec, row in errors.items():
        table.add_row(spec, *(f"{row[column]:.{3 if column == columns[0] else 4}f}" for column in columns))
    return table


def write_json(path: Path, arguments: argparse.Namespace, speeds: Any, copy_gb_per_s: float, errors: Any) -> None:
    """Write all results."""
    result = {
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "tensor": [arguments.rows, arguments.width],
        "rounds": arguments.rounds,
        "copy_gb_per_s": copy_gb_per_s,
        "speed": {name: {key: speed._asdict() for key, speed in each.items()} for name, each in speeds.items()},
        "error": errors,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds; in each, every codec runs once")
    parser.add_argument("--rows", type=int, default=2048, help="number of tokens of the timed tensor")
    parser.add_argument("--width", type=int, default=2048, help="number of channels of the timed tensor")
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/codec.json"), help="path of the results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
