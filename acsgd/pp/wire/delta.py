"""AQ-SGD: of a sequence that has been visited before, only the difference to its last visit travels, quantised.

Source: Wang et al. 2022, arXiv:2206.01299, Algorithm 1. Both ends of a link hold the same m per sequence; the sender
sends Q(a - m), and both add it to m. The error of a quantiser is relative to what it quantises, so as training
converges and activations change less and less between visits, so does the error.
"""

# B sequences of a micro-batch, K of them known from before, the rest new

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from acsgd.codecs.base import Codec, Wire, pack, unpack, wire_bytes
from acsgd.codecs.cache_update import decode_update, encode_update
from acsgd.codecs.fixpoint import FixPoint
from acsgd.codecs.identity import Identity
from acsgd.codecs.layout import Dims, check_dims
from acsgd.pp.wire.cache import ActivationCache
from acsgd.pp.wire.coder import EXACT, TensorSpec, TransferInfo
from acsgd.streams import Streams

CACHE_BITS = (2, 4, 8, 16)
MAX_STEP = 512
"""Root mean squares; with 8 bits, levels then reach as far as `fixpoint` allows."""


@dataclass(frozen=True)
class Delta:
    """Send a sequence as the quantised difference to its last visit, by the levels of `fixpoint`; at first as it is.

    With `step`, the distance of levels is that many root mean squares of the difference, and the codes are
    entropy-coded: most differences are then coded as zero, in less than a bit.

    Needs data that are visited again, and activations that change little between visits: dropout with new masks in each
    step moves them more than the training does (model.dropout_mask).
    """

    RENAMED: ClassVar[dict[str, str]] = {
        "memory": "cache",
        "memory_bits": "cache_bits",
        "memory_gib": "cache_gib",
        "squeeze": "entropy_coding",
    }
    """Former names of options, for the error message of a spec that still uses them."""

    bits: int = 4
    """Per element, 1 to 8; with `step`, what the codes have before they are entropy-coded."""
    step: float = 0.0
    """Distance between levels in root mean squares of the difference; 0 = as wide as the `bits` reach."""
    scale: Literal["max", "l2"] = "max"
    """How wide that is: the largest magnitude, or twice the root mean square."""
    dims: Dims = "channel"
    """Which elements share a scale, as of `fixpoint`."""
    group: int = 0
    """Elements that share a scale, where dims is "group"."""
    entropy_coding: bool = False
    """Whether the codes are entropy-coded without `step`, too."""
    first_bits: int = 0
    """Bits per element of what is not remembered, by `fixpoint`; 0 = it travels as it is."""
    cache: Literal["ram", "disk"] = "ram"
    """Where both ends remember: in memory, or in a file in the run directory, which a later start goes on with."""
    cache_bits: int = 16
    """Bits per element of what is remembered: 16, or 8, 4 or 2, quantised anew at each visit."""
    cache_gib: float = 0.0
    """Largest size of what one end of a link remembers, GiB; 0 = room for all sequences. The rest is always new."""

    def __post_init__(self) -> None:
        check_dims(self.bits, self.dims, self.group)
        if self.step and self.bits == 1:
            raise ValueError("step needs bits=2 or more: the codes of smaller, equal and larger are three")
        if not 0 <= self.step <= MAX_STEP:
            raise ValueError(
                f"step={self.step} must lie between 0 and {MAX_STEP} root mean squares; use 1.0, or 2.5 for fewer bytes"
            )
        if not 0 <= self.first_bits <= 8:
            raise ValueError(f"first_bits={self.first_bits} is outside 0 to 8; 0 sends as it is what is not remembered")
        if self.cache_bits not in CACHE_BITS:
            raise ValueError(f"cache_bits={self.cache_bits} is none of 2, 4, 8 and 16")
        if not 0 <= self.cache_gib < math.inf:
            raise ValueError(f"cache_gib={self.cache_gib} must be 0 (room for all) or more")

    @property
    def codec(self) -> FixPoint:
        """Of differences."""
        if self.step:
            clip = self.step * 2 ** (self.bits - 1)
            return FixPoint(
                self.bits, "l2", clip, dims=self.dims, group=self.group, centroids=True, entropy_coding=True
            )
        return FixPoint(self.bits, self.scale, dims=self.dims, group=self.group, entropy_coding=self.entropy_coding)

    @property
    def first_codec(self) -> Codec:
        """Of sequences that are not remembered."""
        return FixPoint(self.first_bits, entropy_coding=self.entropy_coding) if self.first_bits else EXACT

    @property
    def remembered(self) -> Codec:
        """Of what is remembered."""
        return Identity("fp16") if self.cache_bits == 16 else FixPoint(self.cache_bits)

    def entry_bytes(self, spec: TensorSpec) -> int:
        """Return the bytes of what is remembered of one sequence of a micro-batch."""
        return wire_bytes(self.remembered.wire(spec.shape[1:], self.cache_dtype))

    @property
    def cache_dtype(self) -> torch.dtype:
        """In which a memory is worked on."""
        return torch.float16 if self.cache_bits == 16 else torch.float32


class DeltaCoder:
    """One end of a wire that remembers. spec: of a whole micro-batch, [B, ...]; memory: this end's, of this tensor.

    Encoding and decoding change the memory, in the same way at both ends: micro-batches must come in the same order.
    """

    def __init__(self, delta: Delta, spec: TensorSpec, memory: ActivationCache, streams: Streams) -> None:
        self._delta = delta
        self._spec = spec
        self._memory = memory
        self._streams = streams

    @property
    def memory(self) -> ActivationCache:
        """What this end remembers."""
        return self._memory

    @property
    def capacity(self) -> int:
        batch = self._spec.shape[0]
        mixed = (self._mixed_wire(known, batch - known) for known in range(batch + 1))
        return max(map(wire_bytes, (EXACT.wire(*self._spec), *mixed)))

    def wire(self, visit: TransferInfo) -> Wire:
        known, new = self._split(visit)
        return self._mixed_wire(len(known), len(new), exact=visit.exact)

    def is_squeezed(self, visit: TransferInfo) -> bool:
        _, new = self._split(visit)
        return self._delta.codec.entropy_coding and (not new or self._first(visit).entropy_coding)

    def encode(self, x: Tensor, visit: TransferInfo) -> tuple[Tensor, ...]:
        """Return the fields of what is new, then those of what is known. Raises NotFiniteError, and learns nothing."""
        known, new = self._split(visit)
        codec, whole = self._first(visit), _rows(x, new)
        first = codec.encode(whole) if new else ()
        m = self._recall(visit, known)
        rest = encode_update(self._delta.codec, _rows(x, known), m) if known else ()
        if new:
            self._learn(visit, new, codec.decode(first, self._shape(len(new)), x.dtype))
        self._remember(visit, known, m)
        return *first, *rest

    def decode(self, fields: tuple[Tensor, ...], visit: TransferInfo) -> Tensor:
        known, new = self._split(visit)
        codec, dtype = self._first(visit), self._spec.dtype
        count = len(fields) - len(self._mixed_wire(len(known), 0))
        m = self._recall(visit, known)  # first of all, as what is new may need the room of what is known
        parts = []
        if new:
            parts.append(codec.decode(fields[:count], self._shape(len(new)), dtype))
            self._learn(visit, new, parts[0])
        if known:
            parts.append(decode_update(self._delta.codec, fields[count:], m, dtype))
            self._remember(visit, known, m)
        return parts[0] if len(parts) == 1 else torch.cat(parts)[_inverse(new + known)]

    def _split(self, visit: TransferInfo) -> tuple[list[int], list[int]]:
        """Return the places in the micro-batch of what is known, and of what is sent as if it were new."""
        places = range(self._spec.shape[0])
        known = [i for i in places if visit.samples and not visit.exact and self._memory.knows(visit.samples[i])]
        return known, [i for i in places if i not in known]

    def _first(self, visit: TransferInfo) -> Codec:
        return EXACT if visit.exact else self._delta.first_codec

    def _shape(self, rows: int) -> tuple[int, ...]:
        return rows, *self._spec.shape[1:]

    def _mixed_wire(self, known: int, new: int, *, exact: bool = False) -> Wire:
        """Declare the fields of a message with so many rows of both kinds."""
        first = (EXACT if exact else self._delta.first_codec).wire(self._shape(new), self._spec.dtype) if new else ()
        return first + (self._delta.codec.wire(self._shape(known)) if known else ())

    def _recall(self, visit: TransferInfo, rows: Sequence[int]) -> Tensor:
        """Return what is remembered of some rows, [K, ...], as a copy."""
        codec, dtype, shape = self._delta.remembered, self._delta.cache_dtype, self._spec.shape[1:]
        m = torch.empty(self._shape(len(rows)), dtype=dtype, device=self._streams.device)
        for row, i in zip(m, rows, strict=True):
            entry = self._memory.read(visit.samples[i]).to(self._streams.device, non_blocking=True)
            row.copy_(codec.decode(unpack(entry, codec.wire(shape, dtype)), shape, dtype))
        return m

    def _learn(self, visit: TransferInfo, rows: Sequence[int], values: Tensor) -> None:
        """Remember what came whole, [K, ...], in training; of what is not finite both ends keep what they had."""
        if visit.samples and values.isfinite().all():
            dtype = self._delta.cache_dtype
            largest = torch.finfo(dtype).max
            self._remember(visit, rows, values.float().clamp(-largest, largest).to(dtype))  # bf16 has no 65504

    def _remember(self, visit: TransferInfo, rows: Sequence[int], m: Tensor) -> None:
        """Remember some rows, m [K, ...], if the memory has room."""
        for row, i in zip(m, rows, strict=True):
            room = self._memory.buffer(visit.samples[i])
            if room is not None:
                pack(self._delta.remembered.encode(row), room)
                self._memory.put(visit.samples[i], room, visit.step, visit.micro, self._streams.mark())


def _rows(x: Tensor, rows: list[int]) -> Tensor:
    """Return some rows, in ascending order; without a copy if they are all."""
    return x if len(rows) == len(x) else x[rows]


def _inverse(order: list[int]) -> list[int]:
    """Return where each of range(len(order)) is in it."""
    return sorted(range(len(order)), key=order.__getitem__)
