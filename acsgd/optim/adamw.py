"""AdamW on the fp32 masters, and the learning rate as a function of the step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from acsgd.config.options import OptimConfig
from acsgd.optim.base import SecondMoments
from acsgd.optim.schedule import learning_rate
from acsgd.shards.weights import Weight, WeightState


class Optimizer:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) over one rank's weights."""

    def __init__(self, weights: Sequence[Weight], config: OptimConfig) -> None:
        self._config = config
        self._keys = {weight.master: weight.key for weight in weights}
        self._rounded = [weight for weight in weights if weight.master is not weight.param]
        matrices = [weight.master for weight in weights if weight.master.dim() > 1]
        vectors = [weight.master for weight in weights if weight.master.dim() <= 1]  # norms and biases
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )

    def step(
        self,
        step: int,
        *,
        momentum: bool = True,
        frozen: bool = False,
        shares: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> float:
        """Update masters and parameters with the gradients there are; return the learning rate used.

        momentum: whether the first moment is used, else the gradient; frozen: whether the second moments stay what they
        are, and with them AdamW's count of the steps that they are made of; shares: by key, [rows], how much of the
        squares of gradients is added to second moments; empty = all.
        """
        rate = learning_rate(step, self._config)
        for group in self._adamw.param_groups:
            group["lr"] = rate
            group["betas"] = (self._config.betas[0] if momentum else 0.0, self._config.betas[1])
        if frozen and self._adamw.state:  # not if every step so far was left out
            self._step_frozen(step, rate)
        elif shares:
            self._step_sharing(rate, shares)
        else:
            self._adamw.step()
        if self._rounded:
            with torch.no_grad():
                torch._foreach_copy_([w.param for w in self._rounded], [w.master for w in self._rounded])
        return rate

    @torch.no_grad()
    def _step_frozen(self, step: int, rate: float) -> None:
        """Update the masters; the first moments alone go on."""
        for group in self._adamw.param_groups:
            first, _ = group["betas"]
            for master in group["params"]:
                if master.grad is None or not (state := self._adamw.state.get(master)):
                    continue
                state["exp_avg"].lerp_(master.grad, 1 - first)
                self._move(master, state, step + 1, rate, group)

    @torch.no_grad()
    def _step_sharing(self, rate: float, shares: Mapping[str, torch.Tensor]) -> None:
        """Update the masters; to second moments a share of the squares is added, by rows."""
        for group in self._adamw.param_groups:
            first, second = group["betas"]
            for master in group["params"]:
                if master.grad is None:
                    continue
                state = self._adamw.state[master]
                if not state:
                    state["step"] = torch.zeros((), device=master.device)
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
                state["step"] += 1
                share = shares[self._keys[master]]
                by_rows = master.grad.view(len(share), -1)
                squares = (by_rows * share.unsqueeze(1)).mul_(by_rows).view_as(master)
                state["exp_avg"].lerp_(master.grad, 1 - first)
                state["exp_avg_sq"].lerp_(squares, 1 - second)
                self._move(master, state, state["step"].double(), rate, group)

    def _move(
        self,
        master: torch.Tensor,
        state: Mapping[str, torch.Tensor],
        made_of: int | torch.Tensor,
        rate: float,
        group: Mapping[str, Any],
    ) -> None:
        """Make the step that moments ask for; made_of: so many steps is the first of them made of."""
        first, second = group["betas"]
        # counts stay where they are, so that nothing waits for a device; 1 - .999 needs more than fp32
        root = (state["exp_avg_sq"] / (1 - second ** state["step"].double())).sqrt_().add_(self._config.eps)
        master.mul_(1 - rate * group["weight_decay"])
        master.addcdiv_(state["exp_avg"], root.mul_(1 - first**made_of), value=-rate)

    def second_moments(self, weights: Sequence[Weight]) -> SecondMoments:
        """Return AdamW's second moments of some weights, not copied."""
        states = {weight.key: self._adamw.state.get(weight.master) for weight in weights}
        by_key = {key: state["exp_avg_sq"] for key, state in states.items() if state}
        return SecondMoments(by_key, self._config.betas[1])

    def state_of(self, weights: Sequence[Weight]) -> WeightState:
        """Return what AdamW remembers of some weights, not copied; empty before the first step."""
        state: WeightState = defaultdict(dict)
        for weight in weights:
            for name, tensor in self._adamw.state[weight.master].items():
                state[name][weight.key] = tensor
        return dict(state)

    def load_state_of(self, weight: Weight, state: WeightState, key: str) -> None:
        """Take over, as a copy, what `state_of` has given of `key` for a weight."""
        self._adamw.state[weight.master] = {
            # AdamW keeps its step count where the weights are
            name: by_key[key].to(weight.master.device, copy=True)
            for name, by_key in state.items()
            if key in by_key
        }
