"""Watch every tensor that the modules of a rank's stages make, to find the first that is not finite."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from acsgd.pp.nonfinite import NonFiniteTensor, Phase, first_non_finite
from acsgd.pp.schedules.actions import Action, Op
from acsgd.pp.stage import Stage

PHASE_OF: dict[Op, Phase] = {Op.F: "forward", Op.B: "backward"}


class NaNProbe:
    """Hooks on all modules and weights of some stages, for as long as it is a context.

    Looks at weights on entry, at what goes into and comes out of each module in each forward, and at the gradients
    of outputs and weights in each backward. Each look waits for the device.
    """

    def __init__(self, stages: Mapping[int, Stage], micro_ids: Sequence[int]) -> None:
        self._stages = stages
        self._micro_ids = micro_ids
        self._hooks: list[RemovableHandle] = []
        self._at: tuple[Phase, int, int | None] | None = None
        self._found: dict[tuple[Phase, int, int | None], NonFiniteTensor] = {}

    def __enter__(self) -> NaNProbe:
        for index, stage in self._stages.items():
            self._at = ("weight", index, None)
            for weight in stage.weights:
                self.look(f"weight {weight.key}", weight.master)
                self.look(f"weight {weight.key}", weight.param)
            self._watch(stage)
        self._at = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def first(self) -> NonFiniteTensor | None:
        """What was found, if anything: the origin among all of this rank."""
        return first_non_finite(list(self._found.values())) if self._found else None

    @contextlib.contextmanager
    def during(self, action: Action) -> Iterator[None]:
        """Say which compute is at work."""
        self._at = (PHASE_OF[action.op], action.stage, self._micro_ids[action.micro])
        yield
        self._at = None

    def look(self, name: str, tensor: Tensor) -> None:
        """Take note of a tensor that is not finite, if it is the first one here."""
        if self._at is None or self._at in self._found or not tensor.is_floating_point():
            return
        values = tensor.detach()  # or autograd would take part, and a layer computed again keeps less than at first
        if not torch.isfinite(values).all():
            value: Literal["nan", "inf"] = "nan" if torch.isnan(values).any() else "inf"
            self._found[self._at] = NonFiniteTensor(*self._at, name, value)

    def look_at_sums(self) -> None:
        """Look at the gradients after the replicas have agreed."""
        for index, stage in self._stages.items():
            self._at = ("reduce", index, None)
            for weight in stage.weights:
                if weight.master.grad is not None:
                    self.look(f"gradient summed over replicas of {weight.key}", weight.master.grad)
        self._at = None

    def _watch(self, stage: Stage) -> None:
        for shard in stage.shards:
            for path in shard.modules:
                for name, module in stage.model.get_submodule(path).named_modules(prefix=path):
                    self._hooks.append(module.register_forward_pre_hook(self._entered(name)))
                    self._hooks.append(module.register_forward_hook(self._left(name)))
        for weight in stage.weights:
            # before it is added up and sent: what is found is of this micro-batch and of this replica
            self._hooks.append(weight.param.register_hook(self._gradient(f"gradient of {weight.key}")))

    def _entered(self, name: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            if self._is_forward():
                for tensor in _tensors(inputs):
                    self.look(f"input of {name}", tensor)

        return hook

    def _left(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if self._is_forward():
                for tensor in _tensors(output):
                    self.look(f"output of {name}", tensor)
                    if tensor.requires_grad:
                        tensor.register_hook(self._gradient(f"gradient of the output of {name}"))

        return hook

    def _is_forward(self) -> bool:
        """Whether modules run for the first time, and not again in a backward that recomputes them."""
        return self._at is not None and self._at[0] == "forward"

    def _gradient(self, name: str) -> Callable[[Tensor], None]:
        return lambda grad: self.look(name, grad)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors among a module's arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
