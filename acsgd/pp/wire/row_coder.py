"""Lossless coder of the rows of a table that a step changes little."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from acsgd.codecs.base import Codec
from acsgd.codecs.lossless import BytePlanes, bits_of, from_planes, to_planes
from acsgd.pp.wire.coder import StatelessCoder, TensorSpec, TransferInfo
from acsgd.streams import load_onto


class _Rows(NamedTuple):
    """Rows of one step, which both ends have."""

    step: int
    ids: Tensor
    """int64 [n], ascending."""
    bits: Tensor
    """Integers [n, ...]."""

    def bits_at(self, ids: Tensor) -> Tensor:
        """Return the bits of rows, 0 for those that are not there."""
        if not len(self.ids):
            return ids.new_zeros((len(ids), *self.bits.shape[1:]), dtype=self.bits.dtype)
        positions = torch.searchsorted(self.ids, ids).clamp_(max=len(self.ids) - 1)
        found = (self.ids[positions] == ids).view(-1, *[1] * (self.bits.dim() - 1))
        return self.bits[positions].where(found, 0)


class RowDifferenceCoder(StatelessCoder):
    """Coder that sends rows as bitwise differences from the rows that were sent so in an earlier step, entropy-coded.

    `TransferInfo.samples` are the indices of the rows. Both ends keep the rows of the present step and of the last one
    before it with BytePlanes; rows that the latter did not have are sent as they are. Messages with another codec
    neither read nor update these.
    """

    def __init__(self, codecs: Sequence[Codec], spec: TensorSpec) -> None:
        super().__init__(codecs, spec)
        self._before = self._join(-1, [])
        self._step = -1
        self._present: list[tuple[Tensor, Tensor]] = []
        """Indices and bits of the messages of this step."""

    def context(self, info: TransferInfo) -> bytes:
        if not self._are_differences(info):
            return b""
        before = self._rows_before(info)
        return struct.pack("<qq", before.step, len(before.ids))

    def encode(self, x: Tensor, info: TransferInfo) -> tuple[Tensor, ...]:
        if not self._are_differences(info):
            return super().encode(x, info)
        bits, ids = bits_of(x).clone(), self._ids(info, x.device)
        difference = bits - self._rows_before(info).bits_at(ids)
        self._present.append((ids, bits))
        return (to_planes(difference),)

    def decode(self, fields: tuple[Tensor, ...], info: TransferInfo) -> Tensor:
        if not self._are_differences(info):
            return super().decode(fields, info)
        (planes,), shape = fields, self.shape(info)
        ids = self._ids(info, planes.device)
        bits = from_planes(planes).view(shape) + self._rows_before(info).bits_at(ids)
        self._present.append((ids, bits))
        return bits.view(self.spec.dtype)

    def _are_differences(self, info: TransferInfo) -> bool:
        return isinstance(self._codecs[info.codec], BytePlanes)

    def _rows_before(self, info: TransferInfo) -> _Rows:
        """Return the rows of the step before a transfer's step."""
        if info.step != self._step:
            self._before, self._step, self._present = self._join(self._step, self._present), info.step, []
        return self._before

    def _join(self, step: int, messages: list[tuple[Tensor, Tensor]]) -> _Rows:
        if not messages:
            empty = torch.empty((0, *self.spec.shape[1:]), dtype=self.spec.dtype)
            return _Rows(step, torch.empty(0, dtype=torch.int64), bits_of(empty))
        ids, bits = (torch.cat(each) for each in zip(*messages, strict=True))
        order = ids.argsort(stable=True)
        return _Rows(step, ids[order], bits[order])

    @staticmethod
    def _ids(info: TransferInfo, device: torch.device) -> Tensor:
        return load_onto(device, torch.tensor(info.samples, dtype=torch.int64))
