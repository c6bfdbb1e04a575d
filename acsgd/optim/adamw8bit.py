from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from acsgd.config.options import OptimConfig
from acsgd.optim.base import Capability
from acsgd.optim.torch_optimizer import TorchOptimizer
from acsgd.shards.weights import StateTensor, Weight, WeightState

BLOCK = 256
"""Elements that have a scale in common, in bitsandbytes."""
QUANTIZED = 4096
"""Elements from which on the moments of a weight are quantized."""
MOMENTS = {"exp_avg": "1", "exp_avg_sq": "2"}
"""Number of each moment in the names of bitsandbytes."""


def _scale_shape(weight: Tensor) -> tuple[int, ...] | None:
    return (-(-weight.numel() // BLOCK),) if weight.numel() >= QUANTIZED else None


def _moment_itemsize(weight: Tensor) -> int:
    return 1 if weight.numel() >= QUANTIZED else 4


@dataclass(frozen=True)
class AdamW8bit:
    """AdamW of bitsandbytes, with moments in 8 bits, a scale per 256 elements (Dettmers et al. 2022, arXiv:2110.02861).

    A quarter of the state of AdamW. Weights of fewer than 4096 elements keep moments in fp32. Checkpoints hold all of
    them in fp32, with their scales. Runs on CPUs and GPUs. Needs acsgd[8bit].
    """

    capabilities: ClassVar[frozenset[Capability]] = frozenset()
    averages: ClassVar[bool] = False
    states: ClassVar[tuple[StateTensor, ...]] = (
        StateTensor("step", shape=lambda weight: (), non_negative=True),
        StateTensor("exp_avg", itemsize=_moment_itemsize),
        StateTensor("exp_avg_sq", non_negative=True, itemsize=_moment_itemsize),
        StateTensor("exp_avg_scale", _scale_shape, non_negative=True),
        StateTensor("exp_avg_sq_scale", _scale_shape, non_negative=True),
    )

    def __post_init__(self) -> None:
        if importlib.util.find_spec("bitsandbytes") is None:
            raise ValueError('needs bitsandbytes, which is not installed; pip install "acsgd[8bit]"')

    def open(self, weights: Sequence[Weight], config: OptimConfig) -> AdamW8bitOptimizer:
        """Return the optimizer of these weights."""
        return AdamW8bitOptimizer(weights, config)


class AdamW8bitOptimizer(TorchOptimizer):
    """AdamW of bitsandbytes over one rank's weights. Its state is fp32 outside, and quantized again without change."""

    def __init__(self, weights: Sequence[Weight], config: OptimConfig) -> None:
        def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
            from bitsandbytes.optim import AdamW8bit

            options: dict[str, Any] = {"betas": config.betas, "eps": config.eps, "min_8bit_size": QUANTIZED}
            optimizer: torch.optim.Optimizer = AdamW8bit(groups, **options)
            return optimizer

        super().__init__(weights, config, make)

    def state_of(self, weights: Sequence[Weight]) -> WeightState:
        """Return copies of the state of some weights, dequantized; empty before the first step."""
        held = {weight.key: self._optimizer.state[weight.master] for weight in weights}
        held = {key: state for key, state in held.items() if state}
        if not held:
            return {}
        found: WeightState = {"step": {key: torch.tensor(float(state["step"])) for key, state in held.items()}}
        for name, number in MOMENTS.items():
            found[name] = {key: _dequantized(state, number) for key, state in held.items()}
            scales = {key: state[f"absmax{number}"] for key, state in held.items() if f"absmax{number}" in state}
            found |= {f"{name}_scale": scales} if scales else {}
        return found

    def load_state_of(self, weight: Weight, state: WeightState) -> None:
        """Load a copy, quantized, of what `state_of` returned for a weight of the same key."""
        if (key := weight.key) not in state.get("step", {}):
            return
        optimizer: Any = self._optimizer
        places = ((g, group, p) for g, group in enumerate(optimizer.param_groups) for p in range(len(group["params"])))
        g, group, p = next(place for place in places if place[1]["params"][place[2]] is weight.master)
        optimizer.init_state(group, weight.master, g, p)
        made = optimizer.state[weight.master]
        made["step"] = int(state["step"][key])
        for name, number in MOMENTS.items():
            _load(made, number, state[name][key].to(weight.master.device), state.get(f"{name}_scale", {}).get(key))


def _dequantized(state: dict[str, Any], number: str) -> Tensor:
    """Return a moment in fp32. state: of a weight in bitsandbytes."""
    from bitsandbytes.functional import dequantize_blockwise

    moment: Tensor = state[f"state{number}"]
    if moment.dtype == torch.float32:
        return moment
    scales, code = state[f"absmax{number}"], state[f"qmap{number}"]
    values: Tensor = dequantize_blockwise(moment, absmax=scales, code=code, blocksize=BLOCK)
    return values


def _load(state: dict[str, Any], number: str, moment: Tensor, scales: Tensor | None) -> None:
    """Put a moment in fp32 into the state of a weight in bitsandbytes, in place. scales: None if not quantized."""
    held: Tensor = state[f"state{number}"]
    if scales is None:
        held.copy_(moment)
        return
    code: Tensor = state[f"qmap{number}"]
    state[f"absmax{number}"].copy_(scales)
    of_each = scales.to(code).repeat_interleave(BLOCK)[: moment.numel()]
    quotients = (moment.reshape(-1) / of_each).nan_to_num(0.0)  # a block of zeros has the scale 0
    held.copy_(torch.bucketize(quotients, (code[1:] + code[:-1]) / 2).view_as(held))
