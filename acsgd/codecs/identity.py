"""No compression; optionally a narrower dtype on the wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from acsgd.codecs.base import Field, Wire, rounding_bound, saturate_

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Identity:
    """Send the tensor unchanged, or rounded to nearest in another dtype."""

    entropy_coding: ClassVar[bool] = False
    encodes_nan: ClassVar[bool] = True

    dtype: Literal["same", "fp32", "bf16", "fp16"] = "same"
    """Dtype on the wire; "same" = that of the tensor, lossless. fp16 overflows beyond 65504."""

    def wire(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Wire:
        return (Field(self._wire_dtype(dtype), shape),)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x.to(self._wire_dtype(x.dtype)),)

    def decode(self, fields: tuple[Tensor, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        (values,) = fields
        y = values.to(dtype)
        if dtype == torch.float16 and values.dtype == torch.bfloat16 and y.isinf().any():
            # bf16 rounds the largest fp16 numbers up, beyond the range of fp16
            y = torch.where(values.isfinite(), saturate_(values.float(), dtype).to(dtype), y)
        return y.view(shape)

    def error_bound(self, x: Tensor) -> Tensor:
        on_wire, magnitude = self._wire_dtype(x.dtype), x.double().abs()
        if on_wire in (x.dtype, torch.float32):
            return torch.zeros_like(magnitude)
        info = torch.finfo(on_wire)
        return rounding_bound(x, magnitude * info.eps / 2 + info.tiny * info.eps / 2)

    def _wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if self.dtype == "same" else DTYPES[self.dtype]
