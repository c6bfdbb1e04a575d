"""Stand-ins for modules of which a stage has a part: the table of an embedding, and T5's relative position bias."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from acsgd.layers.capture import BlockCall
from acsgd.layers.description import LayersError, Replicated
from acsgd.streams import load_onto


class LookupTable(Tensor):
    """A parameter [V, D] that has room for n rows, some of which are loaded.

    `torch.nn.functional.embedding` returns loaded rows, with gradients. In place of others it returns NaN, as any other
    operation does: a layer that uses more of the parameter than the rows of its batch thus returns NaN, not a plausible
    number.
    """

    _rows: nn.Parameter
    """[n + 1, D]; the last row is NaN."""
    _positions: Tensor
    """int64 [V]: position of each row of the parameter in `_rows`; n = no room."""
    _ids: Tensor
    """int64 [n], in host memory: index of each row in the parameter."""
    _gradient: Tensor | None

    @staticmethod
    def __new__(cls, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> LookupTable:
        return torch.full((), float("nan"), dtype=dtype, device=device).expand(shape).as_subclass(cls)

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        """Make a table without rows, which takes 8 bytes per row of the parameter."""
        self._is_param = True  # modules accept it as a parameter
        self._positions = torch.empty(shape[0], dtype=torch.int64, device=device)
        self.reset(torch.empty(0, dtype=torch.int64))

    def reset(self, ids: Tensor) -> None:
        """Drop all rows, make room for others, and clear the gradient.

        ids: int64 [n], in host memory: the indices of these in the parameter, different from each other.
        """
        self._ids = ids
        empty = torch.full((), float("nan"), dtype=self.dtype, device=self.device)
        self._rows = nn.Parameter(empty.repeat(len(ids) + 1, *self.shape[1:]))
        self._rows.register_post_accumulate_grad_hook(self._accumulate)
        self._positions.fill_(len(ids))
        self._positions[load_onto(self.device, ids)] = torch.arange(len(ids), device=self.device)
        self._gradient = None

    def load(self, part: slice, rows: Tensor) -> None:
        """Load a copy of some rows. part: their positions among those of `reset`."""
        self._rows.data[part] = rows

    def clear_gradient(self) -> None:
        """Clear the gradient for the next step."""
        self._gradient = None

    @property
    def gradient(self) -> Tensor:
        """Gradient of the rows, summed in fp32 since it was cleared, [n, D]; zeros without a backward."""
        if self._gradient is None:
            return torch.zeros_like(self._rows[:-1], dtype=torch.float32)
        return self._gradient[:-1]

    def _accumulate(self, rows: Tensor) -> None:
        grad = rows.grad
        assert grad is not None
        self._gradient = grad.float() if self._gradient is None else self._gradient.add_(grad)
        rows.grad = None

    def _look_up(self, ids: Tensor, padding: int | None, **options: Any) -> Tensor:
        """Return the rows of `ids`. padding: index of the row that gets no gradient."""
        position = None
        if padding is not None:
            found = (self._ids == padding).nonzero()  # on the host, which need not wait for the device
            position = int(found) if len(found) else len(self._ids)
        return embedding(self._positions[ids], self._rows, position, **options)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is embedding and isinstance(args[1], LookupTable):
            ids, table, *more = args
            options = dict(zip(("padding_idx", "max_norm", "norm_type"), more, strict=False)) | kwargs
            with torch._C.DisableTorchFunctionSubclass():
                return table._look_up(ids, options.pop("padding_idx", None), **options)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def relative_bias(model: PreTrainedModel, block: str, name: str) -> tuple[Replicated, list[str]]:
    """Return how to compute output `name` of a block, and the parameters needed. Raises LayersError if unknown."""
    attentions = [
        (path, module)
        for path, module in model.get_submodule(block).named_modules(prefix=block)
        if hasattr(module, "compute_bias") and hasattr(module, "has_relative_attention_bias")
    ]
    if not attentions:
        raise LayersError(f"{block} returns {name}, which has no batch axis and could not be sent between stages")
    tables = [path for path, module in attentions if module.has_relative_attention_bias]
    if name == "position_bias" and tables:
        return Replicated("relative_bias", tables[0]), [f"{tables[0]}.relative_attention_bias.weight"]
    return Replicated("default"), []  # zeros


def compute_relative_bias(model: nn.Module, how: Replicated, call: BlockCall) -> Tensor | None:
    """Return the argument of a block."""
    if how.kind == "default":
        return None
    length = call.hidden.shape[1]
    attention: Any = model.get_submodule(how.module)
    return cast(Tensor, attention.compute_bias(length, length, device=call.hidden.device))
