"""Models without memory for weights: built on the meta device, and with stand-ins that show a wrong dependence."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LARGE = 2**24
"""Number of elements from which zeros and ones made by constructors take no memory."""


@contextlib.contextmanager
def weights_on_meta() -> Iterator[None]:
    """Context in which modules are built with parameters on the meta device but real buffers.

    Buffers hold what constructors compute, such as rotary frequencies, and are in no file; computing them again after
    construction is wrong for some models (falcon_h1, apertus), whose constructors change them.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[assignment]
    try:
        with _WithoutMemory():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class _WithoutMemory(TorchFunctionMode):
    """Allocates no memory for weights: constructors make them with torch.empty, some with torch.zeros or torch.ones.

    No buffer is made with torch.empty. Large zeros and ones are expanded from one number; writing them is an error.
    Skips random initialization on the meta device, which takes milliseconds per tensor.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _initializers():
            tensor: torch.Tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        if func not in (torch.empty, torch.zeros, torch.ones):
            return func(*args, **kwargs)
        on_meta = func(*args, **kwargs | {"device": "meta"})
        if func is torch.empty:
            return on_meta
        if on_meta.numel() < LARGE:
            return func(*args, **kwargs)
        return func((), **kwargs).expand(on_meta.shape)


_NAMES = ("normal_", "uniform_", "trunc_normal_", "kaiming_normal_", "kaiming_uniform_")
_INITIALIZERS = {torch.Tensor.normal_, torch.Tensor.uniform_, *(getattr(nn.init, name) for name in _NAMES)}


@functools.cache
def _initializers() -> Collection[Any]:
    """Return the functions of torch and transformers that draw initial values."""
    from transformers import initialization  # takes seconds; it replaces those of nn by its own while it initialises

    return _INITIALIZERS | {getattr(initialization, name) for name in _NAMES}


def parameter_names(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of each parameter, several of a tied one, by the first of them.

    That is the name in the model without adapters: PEFT puts an adapted module into one of its own, as `base_layer`.
    """
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return {each[0].replace(".base_layer.", "."): each for each in names.values()}


def set_parameter(model: nn.Module, name: str, param: torch.Tensor) -> None:
    """Replace one parameter of a model in place, under one of its names."""
    path, _, leaf = name.rpartition(".")
    model.get_submodule(path)._parameters[leaf] = param  # type: ignore[assignment]  # such as a LookupTable


def set_tied_parameter(model: nn.Module, names: Iterable[str], param: torch.Tensor) -> None:
    """Replace one parameter of a model in place, under all its names."""
    for name in names:
        set_parameter(model, name, param)


def set_buffer(model: nn.Module, name: str, buffer: torch.Tensor) -> None:
    """Replace one buffer of a model in place."""
    path, _, leaf = name.rpartition(".")
    model.get_submodule(path)._buffers[leaf] = buffer


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move all buffers of a model to a device, in place."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)


def fill_with_stand_ins(
    model: PreTrainedModel, blocks: Collection[str], device: torch.device, dtype: torch.dtype
) -> None:
    """Replace each parameter on the meta device outside `blocks` by NaN of its shape, without memory, in place.

    A layer that needs a parameter of another rank thus returns NaN, not a plausible number. blocks: module paths.
    """
    inside = tuple(f"{path}." for path in blocks)
    for name, names in parameter_names(model).items():
        param = model.get_parameter(name)
        if param.device.type == "meta" and not name.startswith(inside):
            nan = torch.full((), float("nan"), dtype=dtype, device=device).expand(param.shape)
            set_tied_parameter(model, names, nn.Parameter(nan, requires_grad=False))


@contextlib.contextmanager
def experts_without_values(model: PreTrainedModel) -> Iterator[None]:
    """Context in which experts run on tensors without values: other implementations read them, or demand bf16."""
    config = model.config
    before = getattr(config, "_experts_implementation", None)
    if before is None:
        yield
        return
    config._experts_implementation = "batched_mm"
    try:
        yield
    finally:
        config._experts_implementation = before
