"""Tensors of layers in one buffer, which is sent and received as it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from acsgd.codecs.base import Field, Wire, pack, unpack, wire_bytes
from acsgd.streams import Streams

Fields = dict[int, dict[str, Field]]
"""Dtypes and shapes of tensors, by layer and name."""


@dataclass(frozen=True)
class PackedLayers:
    """Named tensors of layers in host memory, all of them views of one buffer, uint8[n]."""

    fields: Fields
    buffer: Tensor

    @classmethod
    def copy_of(cls, layers: Mapping[int, Mapping[str, Tensor]], streams: Streams) -> PackedLayers:
        """Return a copy of the tensors of layers, which may be on any device."""
        packed = cls.empty(
            {
                layer: {name: Field(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
                for layer, tensors in layers.items()
            }
        )
        pack(tuple(tensor.detach() for tensors in layers.values() for tensor in tensors.values()), packed.buffer)
        streams.record_event().synchronize()
        return packed

    @classmethod
    def empty(cls, fields: Fields) -> PackedLayers:
        """Return tensors whose values are not set."""
        return cls(fields, torch.empty(wire_bytes(_wire(fields)), dtype=torch.uint8))

    def layers(self) -> dict[int, dict[str, Tensor]]:
        """Return the tensors by layer and name. They share memory with the buffer."""
        tensors = iter(unpack(self.buffer, _wire(self.fields)))
        return {layer: {name: next(tensors) for name in names} for layer, names in self.fields.items()}


def header_of(fields: Fields) -> bytes:
    """Return a message from which `fields_of` makes the same fields."""
    described = {
        layer: {name: [str(field.dtype).removeprefix("torch."), *field.shape] for name, field in by_name.items()}
        for layer, by_name in fields.items()
    }
    return json.dumps(described).encode()


def fields_of(header: bytes) -> Fields:
    """Return what `header_of` has put into a message."""
    return {
        int(layer): {name: Field(getattr(torch, dtype), tuple(shape)) for name, (dtype, *shape) in by_name.items()}
        for layer, by_name in json.loads(header).items()
    }


def _wire(fields: Fields) -> Wire:
    return tuple(field for by_name in fields.values() for field in by_name.values())
