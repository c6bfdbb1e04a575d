"""Forecast of a run over measured links: how long a step takes, and which codecs it wants, by docs/choose.md."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from acsgd.codecs import CODECS
from acsgd.codecs.base import wire_bytes
from acsgd.codecs.identity import DTYPES
from acsgd.commands.doctor.host import Diagnosis
from acsgd.config.spec import from_spec
from acsgd.dp.modes import compression
from acsgd.pp.wire.delta import Delta
from acsgd.pp.wire.frame import HEADER_BYTES
from acsgd.streams import open_streams

if TYPE_CHECKING:
    from acsgd.config.options import Config

LIMITS = (
    (0.5, "allreduce", "none", "none"),
    (2.0, "allreduce:dtype=bf16", "fixpoint:bits=8", "fixpoint:bits=8"),
    (8.0, "cocktail_grad", "delta:bits=4", "fixpoint:bits=8"),
    (math.inf, "cocktail", "delta:step=1.5", "fixpoint:bits=8"),
)
"""Up to which time of the uncompressed link, relative to that of computation, a mode and codecs forward and backward
are enough."""
STEP_BITS = 2.0
"""Bits per element of delta with a step, after entropy coding."""
CPU_MATRIX, GPU_MATRIX, GPU_PRODUCTS = 1024, 4096, 8
"""Sizes of the matrices whose product is timed, and the number of products on a GPU for each wait."""
MEASURED_S = 0.3


@dataclass(frozen=True)
class Workload:
    """What the time of a step depends on, besides the hosts."""

    parameters: int
    """Of the whole model."""
    trained: int
    stages: int
    micros: int
    """Micro-batches of a step, of all replicas."""
    boundary: tuple[int, int, int]
    """Shape of the activations of a micro-batch: sequences, tokens, hidden size."""
    dtype: torch.dtype
    """Of activations and of products of matrices."""
    mode: str = "allreduce"
    forward: str = "none"
    backward: str = "none"

    @classmethod
    def of(cls, config: Config) -> Workload:
        """Read config.json of the model. Raises ValueError if there is none."""
        from acsgd.run.plan.model import describe_run_model

        model = describe_run_model(config)
        hidden = int(getattr(model.config.get_text_config(), "hidden_size", 0))
        return cls(
            model.parameters.all,
            model.parameters.trained,
            config.pp.stages,
            config.data.batch // config.pp.micro,
            (config.pp.micro, config.data.sequence, hidden),
            DTYPES[config.model.dtype],
            config.dp.mode,
            "none" if config.pp.compress else config.pp.forward,
            "none" if config.pp.compress else config.pp.backward,
        )

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        sequences, tokens, _ = self.boundary
        return self.micros * sequences * tokens

    @property
    def operations(self) -> float:
        """Floating-point operations of a step: two per weight and token forward, as many for each gradient."""
        return self.tokens * (4.0 * self.parameters + 2.0 * self.trained)

    def message_bytes(self, codec: str) -> float:
        """Return the size of a message between stages with a codec."""
        parsed = from_spec(codec, {**CODECS, "delta": Delta}, key="codec")
        if isinstance(parsed, Delta):
            if parsed.step:
                return HEADER_BYTES + STEP_BITS / 8 * math.prod(self.boundary)
            parsed = parsed.codec
        return HEADER_BYTES + float(wire_bytes(parsed.wire(self.boundary, self.dtype)))


def forecast(work: Workload, hosts: int, bits_per_s: float, operations_per_s: float) -> Iterator[Diagnosis]:
    """Yield how long a step takes, and what to compress more than the run file does.

    hosts: of one process each, like this one; bits_per_s: of the slowest link.
    """
    replicas = max(1, hosts // work.stages)
    micros = work.micros / replicas
    idle = (work.stages - 1) / (micros + work.stages - 1)
    step_s = compute_s = work.operations / operations_per_s / min(hosts, work.stages * replicas) / (1 - idle)
    text = (
        f"{work.parameters:,} parameters, {work.tokens:,} tokens a step: computation {compute_s:.2g} s on {hosts} hosts"
    )
    text += f", {idle:.0%} of it idle" if idle else ""
    wanted = list[str]()
    if replicas > 1:
        link_s = 8 * 2 * (replicas - 1) / replicas * 4 * work.trained / work.stages / bits_per_s
        text += f", gradients {link_s:.2g} s at {bits_per_s / 1e6:.3g} Mbit/s"
        _, best, _, _ = next(row for row in LIMITS if link_s <= row[0] * compute_s)
        ratio = compression(work.mode)
        if compression(best) > ratio:
            ratio = compression(best)
            wanted.append(f"--dp.mode {best}")
        step_s += link_s / ratio
    if work.stages > 1:
        message_s = 8 * micros / bits_per_s
        link_s = message_s * work.message_bytes("none")
        text += f", activations {link_s:.2g} s at {bits_per_s / 1e6:.3g} Mbit/s"
        _, _, *codecs = next(row for row in LIMITS if link_s <= row[0] * compute_s)
        sizes = list[float]()
        for direction, own, best in zip(("forward", "backward"), (work.forward, work.backward), codecs, strict=True):
            sizes.append(min(map(work.message_bytes, (own, best))))
            wanted += [f"--pp.{direction} {best}"] if sizes[-1] < work.message_bytes(own) else []
        step_s += message_s * max(sizes)
    text += f"; about {step_s:.2g} s a step" + (f" with {' '.join(wanted)}" if wanted else ", as the run file is")
    yield Diagnosis("ok", "forecast", text)


def measure_speed(device: str, dtype: torch.dtype) -> float:
    """Return how many floating-point operations per second this host does in products of matrices.

    device: run.device. Raises ValueError if it is not here.
    """
    streams = open_streams(device, local_rank=0)
    is_gpu = streams.device.type != "cpu"
    size, products = (GPU_MATRIX, GPU_PRODUCTS) if is_gpu else (CPU_MATRIX, 1)
    x = torch.ones(size, size, device=streams.device, dtype=dtype)
    waits, began = -1, time.perf_counter()  # the first is a warm-up
    while waits < 1 or time.perf_counter() - began < MEASURED_S:
        for _ in range(products):
            x @ x
        streams.record_event().synchronize()
        waits += 1
        if waits == 0:
            began = time.perf_counter()
    return 2.0 * size**3 * products * waits / (time.perf_counter() - began)
