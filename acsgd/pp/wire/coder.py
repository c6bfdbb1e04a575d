"""Coders, between the tensors of a channel and message fields, and the choice of the codec for each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from acsgd.codecs.base import Codec, Wire, wire_bytes
from acsgd.codecs.identity import Identity
from acsgd.layers.batch import Lengths
from acsgd.layers.description import BATCH, Dim

EXACT = Identity()
"""The lossless codec, the first of every link."""


class CodecIndices(NamedTuple):
    """Index of the codec of each transfer, among those of its channel: 0 = lossless, 1 = the first after it."""

    forward: Sequence[int]
    """By boundary, of activations."""
    backward: Sequence[int]
    """By boundary, of activation gradients."""
    tied: int = 1
    """Of rows of tables and of their gradients."""


@dataclass
class CodecChoice:
    """The codecs in use, equal on all ranks of a pipeline; none in exact steps and, if `exact_eval`, in evaluations."""

    in_use: CodecIndices
    """May be replaced between two steps."""
    exact_steps: int = 0
    exact_eval: bool = True

    def of_step(self, step: int) -> CodecIndices:
        """Return the codecs of a training step. Those of rows are asked for at the end of the step before, too."""
        return self._exact() if step < self.exact_steps else self.in_use

    def of_evaluation(self) -> CodecIndices:
        """Return the codecs of an evaluation."""
        return self._exact() if self.exact_eval else self.in_use

    def _exact(self) -> CodecIndices:
        exact = [0] * len(self.in_use.forward)
        return CodecIndices(exact, exact, 0)


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor before encoding and after decoding."""

    shape: tuple[int, ...]
    """Of a micro-batch of the longest rows. The first axis is that of the rows, if there are any."""
    dtype: torch.dtype
    dims: tuple[Dim, ...] | None = None
    """Sizes of the axes for rows of any length; None = the shape is always the same."""

    @property
    def has_variable_channels(self) -> bool:
        """Whether the size of the last axis depends on the lengths of rows, as of a bias of attention."""
        return any(dim.symbol not in (None, BATCH) for dim in (self.dims or ())[-1:])

    def shape_for(self, lengths: Lengths | None) -> tuple[int, ...]:
        """Return the shape for rows of some lengths; None = the longest."""
        if self.dims is None or lengths is None:
            return self.shape
        sizes = {BATCH: self.shape[0], **lengths._asdict()}
        return tuple(dim.resolve(sizes) for dim in self.dims)


class TransferInfo(NamedTuple):
    """What both ends know about the transfer of a micro-batch before it is sent."""

    step: int
    """Number of optimizer steps done."""
    micro: int
    """Index of the micro-batch in the step."""
    codec: int = 1
    """Index of the codec, see `CodecIndices`."""
    samples: tuple[int, ...] = ()
    """Sample ids, the keys of the activation cache; empty = neither read nor update the cache. For rows of a table,
    their indices."""
    lengths: Lengths | None = None
    """Tokens per row; None = the receiver does not know them, or the tensors do not depend on them."""
    hits_as_cached: bool = False
    """Whether no cache hit is sent, since all are as cached."""


class Coder(Protocol):
    """One end's conversion between a named tensor and message fields."""

    @property
    def spec(self) -> TensorSpec:
        """Largest shape, and dtype, of the tensor."""
        ...

    def shape(self, info: TransferInfo) -> tuple[int, ...]:
        """Return the shape of the tensor in a transfer."""
        ...

    @property
    def max_bytes(self) -> int:
        """Length of the longest message body, bytes."""
        ...

    def wire(self, info: TransferInfo) -> Wire:
        """Declare the fields of a message."""
        ...

    def uses_entropy_coding(self, info: TransferInfo) -> bool:
        """Whether the message body is entropy-coded."""
        ...

    def marks_nan(self, info: TransferInfo) -> bool:
        """Whether `encode` marks a tensor with NaN or infinity: see `holds_nan`. Else it encodes them, or raises."""
        ...

    def context(self, info: TransferInfo) -> bytes:
        """Return the state that a message depends on, equal at both ends; the message's checksum covers it."""
        ...

    def encode(self, x: Tensor, info: TransferInfo) -> tuple[Tensor, ...]:
        """Return the fields of a tensor, in the order of `wire`, on its device. Those of cache hits may be left out.

        May raise NotFiniteError.
        """
        ...

    def decode(self, fields: tuple[Tensor, ...], info: TransferInfo) -> Tensor:
        """Return the tensor that the fields encode."""
        ...


class StatelessCoder:
    """Coder that encodes every message independently of all others. codecs: those after the lossless one."""

    def __init__(self, codecs: Sequence[Codec], spec: TensorSpec) -> None:
        self._codecs = (EXACT, *codecs)
        self._spec = spec

    @property
    def spec(self) -> TensorSpec:
        return self._spec

    @property
    def max_bytes(self) -> int:
        shape, dtype = self._spec.shape, self._spec.dtype
        shapes = [shape]
        if self._spec.has_variable_channels:  # of which fewer may have a larger basis
            shapes = [(*shape[:-1], channels) for channels in range(1, shape[-1] + 1)]
        return max(wire_bytes(codec.wire(each, dtype)) for codec in self._codecs for each in shapes)

    def shape(self, info: TransferInfo) -> tuple[int, ...]:
        return self._spec.shape_for(info.lengths)

    def wire(self, info: TransferInfo) -> Wire:
        return self._codecs[info.codec].wire(self.shape(info), self._spec.dtype)

    def uses_entropy_coding(self, info: TransferInfo) -> bool:
        return self._codecs[info.codec].entropy_coding

    def marks_nan(self, info: TransferInfo) -> bool:
        return not self._codecs[info.codec].encodes_nan

    def context(self, info: TransferInfo) -> bytes:
        return b""

    def encode(self, x: Tensor, info: TransferInfo) -> tuple[Tensor, ...]:
        return self._codecs[info.codec].encode(x)

    def decode(self, fields: tuple[Tensor, ...], info: TransferInfo) -> Tensor:
        return self._codecs[info.codec].decode(fields, self.shape(info), self._spec.dtype)
