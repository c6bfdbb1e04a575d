"""Laws of every codec in the table: declared bytes are the bytes sent, and decoding is within the derived bound."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from acsgd import codecs
from acsgd.codecs.base import ALIGNMENT, Codec, pack, unpack, wire_bytes

SPECS = [*codecs.CODECS, "none:dtype=fp32", "none:dtype=bf16", "none:dtype=fp16"]
UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SMALLEST_HALF = 2.0**-25
"""Half the smallest subnormal of fp16: the most that rounding towards zero loses near zero."""


def inputs() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        "gaussian": torch.randn(2, 7, 16, generator=draw),
        "one element": torch.tensor([0.3]),
        "zeros": torch.zeros(3, 5),
        "odd sizes": torch.randn(3, 5, 7, generator=draw),
        "outlier": torch.cat([torch.randn(63, generator=draw), torch.tensor([6e4])]),
        "heavy tails": torch.randn(1000, generator=draw) / torch.rand(1000, generator=draw),
        "not contiguous": torch.randn(8, 6, generator=draw).T,
    }


def over_the_wire(codec: Codec, x: Tensor) -> tuple[Tensor, int]:
    wire = codec.wire(tuple(x.shape), x.dtype)
    fields = codec.encode(x)
    assert [(f.dtype, tuple(f.shape)) for f in fields] == [(f.dtype, f.shape) for f in wire]
    buffer = torch.empty(wire_bytes(wire), dtype=torch.uint8)
    pack(fields, buffer)
    return codec.decode(unpack(buffer, wire), tuple(x.shape), x.dtype), sum(f.nbytes for f in fields)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", inputs())
@pytest.mark.parametrize("spec", SPECS)
def test_what_is_declared_travels_and_returns_within_the_bound(spec: str, name: str, dtype: torch.dtype) -> None:
    codec, x = codecs.parse(spec), inputs()[name].to(dtype)
    y, sent = over_the_wire(codec, x)
    declared = codec.wire(tuple(x.shape), dtype)
    assert sent == sum(field.nbytes for field in declared) <= wire_bytes(declared) < sent + ALIGNMENT * len(declared)
    assert (y.dtype, y.shape) == (x.dtype, x.shape)
    on_wire = declared[0].dtype
    bound = max(UNIT_ROUNDOFF[on_wire], UNIT_ROUNDOFF[dtype]) * x.double().abs() + SMALLEST_HALF
    assert ((y.double() - x.double()).abs() <= (0 if on_wire == dtype else bound)).all()


@pytest.mark.parametrize("spec", SPECS)
def test_decoding_twice_gives_the_same(spec: str) -> None:
    codec, x = codecs.parse(spec), inputs()["gaussian"]
    fields = codec.encode(x)
    first, second = (codec.decode(fields, tuple(x.shape), x.dtype) for _ in range(2))
    assert torch.equal(first, second)


def test_fields_of_several_dtypes_share_one_message() -> None:
    fields = (torch.arange(5, dtype=torch.uint8), torch.randn(3), torch.randn(2, 2, dtype=torch.float16))
    wire = tuple(codecs.base.Field(f.dtype, tuple(f.shape)) for f in fields)
    buffer = torch.empty(wire_bytes(wire), dtype=torch.uint8)
    pack(fields, buffer)
    assert all(torch.equal(a, b) for a, b in zip(fields, unpack(buffer, wire), strict=True))


def test_the_codec_of_the_readme_is_one() -> None:
    (source,) = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[2] / "README.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {"dataclass": dataclass, "torch": torch, "Field": codecs.base.Field}
    exec(source, names)
    y, sent = over_the_wire(names["Sign"](), torch.tensor([[3.0, -1.0, 0.0], [2.0, -2.0, 4.0]]))
    assert torch.equal(y, torch.tensor([[2.0, -2.0, 0.0], [2.0, -2.0, 2.0]]))
    assert sent == 6 + 4
