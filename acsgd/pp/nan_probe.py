"""Find the first tensor of a training step that holds a NaN or inf, on this rank and over all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from acsgd.optim.ownership import OwnedWeights
from acsgd.pp.schedules.actions import Action
from acsgd.pp.stage import Stage

Phase = Literal["weight", "forward", "backward", "reduce"]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""In causal order: a NaN in one phase spreads to the next."""


@dataclass(frozen=True)
class NonFiniteTensor:
    """A tensor that holds a NaN or inf."""

    phase: Phase
    """Where it appeared: a weight before the step, a forward, a backward, or a gradient reduced over replicas."""
    stage: int
    micro: int | None
    """Index of the micro-batch in the global batch; None for weights and reduced gradients."""
    tensor: str
    """By Hugging Face names: "output of transformer.h.3.mlp.c_fc", "gradient of transformer.h.3.ln_1.weight"."""
    value: Literal["nan", "inf"]
    """The value found; "nan" if there are both."""

    def __str__(self) -> str:
        micro = "" if self.micro is None else f", micro-batch {self.micro}"
        return f"{self.tensor} ({self.value}; {self.phase}, stage {self.stage}{micro})"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> NonFiniteTensor:
        """Restore from `to_dict`."""
        return cls(**fields)


def first_non_finite(found: Sequence[NonFiniteTensor]) -> NonFiniteTensor:
    """Return the origin of the non-finite tensors of one step, of which there must be at least one.

    A weight affects everything computed from it. Otherwise a NaN stays within its micro-batch until gradients are
    summed, and spreads to later stages in the forward and to earlier stages in the backward. Ties: the first listed.
    """
    return min(found, key=_causal_order)


def _causal_order(tensor: NonFiniteTensor) -> tuple[int, int, int]:
    along_pipeline = -tensor.stage if tensor.phase == "backward" else tensor.stage
    return PHASES.index(tensor.phase), -1 if tensor.micro is None else tensor.micro, along_pipeline


class NaNProbe:
    """Hooks on all modules and weights of some stages, registered while this is entered as a context; then no block is
    compiled.

    Checks the weights on entry, the inputs and outputs of each module in each forward, and the gradients of outputs and
    weights in each backward. Every check synchronises with the device.
    """

    def __init__(self, stages: Mapping[int, Stage], owned: OwnedWeights, micro_ids: Sequence[int]) -> None:
        self._stages = stages
        self._owned = owned
        self._micro_ids = micro_ids
        self._hooks: list[RemovableHandle] = []
        self._uncompiled = contextlib.ExitStack()
        self._current: tuple[Phase, int, int | None] | None = None
        self._found: dict[tuple[Phase, int, int | None], NonFiniteTensor] = {}

    def __enter__(self) -> NaNProbe:
        for index, stage in self._stages.items():
            self._current = ("weight", index, None)
            for weight in self._owned.of(stage.weights):
                self.check(f"weight {weight.key}", weight.master)
                self.check(f"weight {weight.key}", weight.param)
            self._register_hooks(stage)
            self._uncompiled.enter_context(stage.composed.uncompiled())
        self._current = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._uncompiled.close()
        for hook in self._hooks:
            hook.remove()

    @property
    def first(self) -> NonFiniteTensor | None:
        """The origin among all non-finite tensors of this rank; None if there is none."""
        return first_non_finite(list(self._found.values())) if self._found else None

    @contextlib.contextmanager
    def during(self, action: Action) -> Iterator[None]:
        """Attribute the tensors checked within to a computation."""
        assert action.operation.phase is not None
        self._current = (action.operation.phase, action.stage, self._micro_ids[action.micro])
        yield
        self._current = None

    def check(self, name: str, tensor: Tensor, phase: Phase | None = None) -> None:
        """Record a tensor that is not finite, if it is the first of the computation. phase: if not the current one."""
        if self._current is None or not tensor.is_floating_point():
            return
        current = (phase or self._current[0], *self._current[1:])
        if current in self._found:
            return
        values = tensor.detach()  # else autograd records the check, and a recomputed layer saves other tensors
        if not torch.isfinite(values).all():
            value: Literal["nan", "inf"] = "nan" if torch.isnan(values).any() else "inf"
            self._found[current] = NonFiniteTensor(*current, name, value)

    def check_reduced_gradients(self) -> None:
        """Check the gradients after the reduction over replicas, of what this rank owns of the weights."""
        for index, stage in self._stages.items():
            self._current = ("reduce", index, None)
            for weight in self._owned.of(stage.weights):
                if weight.master.grad is not None:
                    self.check(f"gradient summed over replicas of {weight.key}", weight.master.grad)
        self._current = None

    def _register_hooks(self, stage: Stage) -> None:
        for name, module in stage.modules().items():
            self._hooks.append(module.register_forward_pre_hook(self._input_hook(name)))
            self._hooks.append(module.register_forward_hook(self._output_hook(name)))
        for weight in stage.weights:
            # before accumulation and reduction, so that it belongs to one micro-batch of one replica
            self._hooks.append(weight.param.register_hook(self._gradient_hook(f"gradient of {weight.key}")))

    def _input_hook(self, name: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            if self._is_forward():
                for tensor in _tensors(inputs):
                    self.check(f"input of {name}", tensor)

        return hook

    def _output_hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if self._is_forward():
                for tensor in _tensors(output):
                    self.check(f"output of {name}", tensor)
                    if tensor.requires_grad:
                        tensor.register_hook(self._gradient_hook(f"gradient of the output of {name}"))

        return hook

    def _is_forward(self) -> bool:
        """Whether a layer runs forward, rather than a backward that recomputes it or forward's code on stand-ins."""
        return self._current is not None and self._current[0] == "forward" and torch.is_grad_enabled()

    def _gradient_hook(self, name: str) -> Callable[[Tensor], None]:
        # a loss in chunks computes gradients of the head in the forward
        return lambda grad: self.check(name, grad, "backward")


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in the arguments or results of a module."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
