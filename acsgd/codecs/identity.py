"""No compression; the dtype of the wire may be narrower than the tensor's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from acsgd.codecs.base import Field, Wire

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Identity:
    """Send the tensor as it is, or rounded to nearest in another dtype."""

    entropy_coding: ClassVar[bool] = False

    dtype: Literal["same", "fp32", "bf16", "fp16"] = "same"
    """Type on the wire; "same" = the tensor's own, without loss. fp16 overflows beyond 65504."""

    def wire(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Wire:
        return (Field(self._on_wire(dtype), shape),)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x.to(self._on_wire(x.dtype)),)

    def decode(self, fields: tuple[Tensor, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return fields[0].to(dtype).view(shape)

    def _on_wire(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if self.dtype == "same" else DTYPES[self.dtype]
