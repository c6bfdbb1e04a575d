"""Forecast of a run over measured links: how long a step takes, and which codecs it wants, by docs/choose.md."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from acsgd.commands.doctor.host import Diagnosis

if TYPE_CHECKING:
    from acsgd.config.options import Config

RATIOS = {"cocktail_grad": 67.0, "cocktail": 94.0, "diloco": 94.0}
"""By how much fewer bytes than gradients in fp16 modes send: docs/measurements/replicas.md; diloco, as much as none."""
LIMITS = (
    (0.5, "allreduce", ""),
    (2.0, "allreduce:dtype=bf16", "--pp.forward fixpoint:bits=8 --pp.backward fixpoint:bits=8"),
    (8.0, "cocktail_grad", "--pp.forward delta:bits=4 --pp.backward fixpoint:bits=8"),
    (float("inf"), "cocktail", "--pp.forward delta:step=1.5 --pp.backward fixpoint:bits=8"),
)
"""Up to which time of the uncompressed link, relative to that of computation, a mode and codecs fit."""
BITS = {"fixpoint:bits=8": 8.03, "delta:bits=4": 4.03, "delta:step=1.5": 2.0}
MATRIX, MEASURED_S = 1024, 0.3
"""Size of the matrices whose product is timed, and for how long, seconds."""


@dataclass(frozen=True)
class RunSize:
    """What the time of a step depends on, besides the hosts."""

    parameters: int
    """Of the whole model."""
    trained: int
    tokens: int
    """Of a step."""
    hidden: int
    stages: int

    @classmethod
    def of(cls, config: Config) -> RunSize:
        """Read config.json of the model. Raises ValueError if there is none."""
        from acsgd.run.plan.model import describe_run_model

        model = describe_run_model(config)
        hidden = int(getattr(model.config.get_text_config(), "hidden_size", 0))
        tokens = config.data.batch * config.data.sequence
        count = model.parameters
        return cls(count.all, count.trained, tokens, hidden, config.pp.stages)

    @property
    def operations(self) -> float:
        """Floating-point operations of a step: two per weight and token forward, as many for each gradient."""
        return self.tokens * (4.0 * self.parameters + 2.0 * self.trained)


def forecast(size: RunSize, hosts: int, bits_per_s: float, operations_per_s: float, mode: str) -> Iterator[Diagnosis]:
    """Yield how long a step takes, and what to compress.

    hosts: of one process each, like this one; bits_per_s: of the slowest link; mode: dp.mode of the run.
    """
    replicas = max(1, hosts // size.stages)
    compute_s = size.operations / operations_per_s / min(hosts, size.stages * replicas)
    text = (
        f"{size.parameters:,} parameters, {size.tokens:,} tokens a step: computation {compute_s:.2g} s on {hosts} hosts"
    )
    times = {
        "gradients": 8 * 2 * (replicas - 1) / replicas * 4 * size.trained / size.stages / bits_per_s,
        "activations": 8 * size.tokens / replicas * size.hidden * 4 / bits_per_s if size.stages > 1 else 0.0,
    }
    step_s, wanted = compute_s, list[str]()
    for what, link_s in times.items():
        if not link_s:
            continue
        _, best, codecs = next(row for row in LIMITS if link_s <= row[0] * compute_s)
        text += f", {what} {link_s:.2g} s at {bits_per_s / 1e6:.3g} Mbit/s"
        if what == "gradients":
            step_s += link_s / _ratio(best)
            wanted += [] if best == mode else [f"--dp.mode {best}"]
        else:
            step_s += link_s * (BITS[codecs.split()[1]] / 32 if codecs else 1.0)
            wanted += [codecs] if codecs else []
    text += f"; about {step_s:.2g} s a step" + (f" with {' '.join(wanted)}" if wanted else ", as the run file is")
    yield Diagnosis("ok", "forecast", text)


def _ratio(mode: str) -> float:
    """Return by how much fewer bytes than allreduce in fp32 a mode sends."""
    return 2 * RATIOS[mode] if mode in RATIOS else 2.0 if mode.endswith("bf16") else 1.0


def measure_speed(device: str) -> float:
    """Return how many floating-point operations per second this host does in products of matrices.

    device: run.device. Raises ValueError if it is not here.
    """
    import torch

    from acsgd.streams import open_streams

    streams = open_streams(device, local_rank=0)
    x = torch.ones(MATRIX, MATRIX, device=streams.device)
    number, began = 0, time.perf_counter()
    while time.perf_counter() - began < MEASURED_S or not number:
        x @ x
        streams.record_event().synchronize()
        if number == 0:  # a warm-up
            began = time.perf_counter()
        number += 1
    return 2.0 * MATRIX**3 * max(1, number - 1) / (time.perf_counter() - began)
