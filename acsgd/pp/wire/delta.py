"""AQ-SGD: after the first transfer of a sample, send only the quantized difference to its previous activations.

Source: Wang et al. 2022, arXiv:2206.01299, Algorithm 1. Both ends of a link cache the same m per sample; the sender
sends Q(a - m), and both ends add it to m. The error of a quantizer is relative to its input, so it shrinks with the
differences as training converges. The same is done for gradients of activations, which AQ-SGD quantizes as they are.
"""

# B samples of a micro-batch, K of them cache hits

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from acsgd.codecs import basis
from acsgd.codecs.base import Codec, Wire, check_finite, pack, saturate_, unpack, wire_bytes
from acsgd.codecs.cache_update import add_saturated, decode_update, encode_update
from acsgd.codecs.fixpoint import FixPoint
from acsgd.codecs.identity import Identity
from acsgd.codecs.layout import Dims, check_dims
from acsgd.codecs.transform import MAX_STEP
from acsgd.pp.wire.cache import ActivationCache
from acsgd.pp.wire.coder import EXACT, TensorSpec, TransferInfo
from acsgd.pp.wire.shared_basis import SharedBasis
from acsgd.streams import Streams, mix_seed

CACHE_BITS = (2, 4, 8, 16)


@dataclass(frozen=True)
class Delta:
    """Send samples with a cache entry as the difference to it, quantized as by `fixpoint`; others uncompressed.

    In both directions: activations of a sample change little between visits, and so do their gradients.

    With `step`, the quantization step is a multiple of the difference's root mean square, and the codes are
    entropy-coded: most are zero and take less than a bit. With `transform`, that is done in a basis of the channels
    (codecs/basis.py) which the sender fits to differences and received gradients, and sends from time to time.

    Requires data that are visited more than once, and activations that change little between visits. Dropout with new
    masks in each step changes them more than training does (see model.dropout_mask).
    """

    RENAMED: ClassVar[dict[str, str]] = {
        "memory": "cache",
        "memory_bits": "cache_bits",
        "memory_gib": "cache_gib",
        "squeeze": "entropy_coding",
    }

    bits: int = 4
    """Bits per element of a difference, 1 to 8; with `step`, before entropy coding."""
    step: float = 0.0
    """Quantization step, root mean squares of the difference, up to 512; 0 = such that the levels span its range."""
    transform: bool = False
    """Whether differences are quantized in a basis of the channels in which the loss is equally sensitive to all
    components, and few are large: fewer bytes for the same loss. Needs `step`."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """Rounding to levels. "stochastic" rounds up or down at random, so that the expectation is the difference: for
    gradients, whose small differences would never arrive otherwise."""
    balance: float = 0.0
    """Share, 0 to 1, of the first-order change of the loss by rounding errors that is cancelled, with `transform`: the
    sender of activations rounds some down or up against their gradients of the visit before, if both are cached."""
    scale: Literal["max", "l2"] = "max"
    """Range of the levels without `step`: the largest magnitude, or twice the root mean square."""
    dims: Dims = "channel"
    """Elements that share a scale, as in `fixpoint`."""
    group: int = 0
    """Group size, elements, for dims=group."""
    entropy_coding: bool = False
    """Whether to entropy-code without `step`, too."""
    first_bits: int = 0
    """Bits per element of cache misses, quantized by `fixpoint`, 1 to 8; 0 = uncompressed."""
    cache: Literal["ram", "disk"] = "ram"
    """Where cache entries are kept: host memory, or a file in the run directory, which a resumed run reuses."""
    cache_bits: int = 16
    """Bits per element of cache entries: 16 (fp16, of gradients bf16), or 8, 4 or 2, quantized anew at each update."""
    cache_gib: float = 0.0
    """Largest size of the cache at one end of a link, GiB; 0 = as large as all samples need."""

    def __post_init__(self) -> None:
        check_dims(self.bits, self.dims, self.group)
        if self.step and self.bits == 1:
            raise ValueError("step needs bits=2 or more: its codes have at least three values")
        if self.transform:
            self._check_transform()
        elif self.rounding == "stochastic" and (self.step or self.scale == "l2"):
            raise ValueError("rounding=stochastic with step or scale=l2, which clip, is biased; add transform=true")
        if self.balance:
            self._check_balance()
        if not 0 <= self.step <= MAX_STEP:
            raise ValueError(
                f"step={self.step} must lie between 0 and {MAX_STEP} root mean squares; use 1.0, or 2.5 for fewer bytes"
            )
        if not 0 <= self.first_bits <= 8:
            raise ValueError(f"first_bits={self.first_bits} is outside 0 to 8; 0 sends cache misses uncompressed")
        if self.cache_bits not in CACHE_BITS:
            raise ValueError(f"cache_bits={self.cache_bits} is none of 2, 4, 8 and 16")
        if not 0 <= self.cache_gib < math.inf:
            raise ValueError(f"cache_gib={self.cache_gib} must be 0 (no limit) or more")

    def _check_transform(self) -> None:
        """Raise ValueError for options that have no effect in the basis."""
        if not self.step:
            raise ValueError("transform=true needs step; use step=1")
        if (self.bits, self.scale, self.dims) != (4, "max", "channel"):
            raise ValueError("transform=true has codes of 8 bits and one step per tensor; remove bits, scale and dims")

    def _check_balance(self) -> None:
        """Raise ValueError if the balance is no share, or has no effect."""
        if not 0 <= self.balance <= 1:
            raise ValueError(f"balance={self.balance} must lie between 0 and 1; use 0.5")
        if not self.transform:
            raise ValueError("balance needs step and transform=true; add step=1.5,transform=true, or remove balance")
        if self.rounding == "stochastic":
            raise ValueError("balance has no effect with rounding=stochastic; remove one of them")

    @property
    def codec(self) -> FixPoint:
        """Codec of differences without `transform`."""
        if self.step:
            clip = self.step * 2 ** (self.bits - 1)
            return FixPoint(
                self.bits, "l2", clip, dims=self.dims, group=self.group, centroids=True, entropy_coding=True
            )
        return FixPoint(
            self.bits,
            self.scale,
            dims=self.dims,
            group=self.group,
            rounding=self.rounding,
            entropy_coding=self.entropy_coding,
        )

    @property
    def first_codec(self) -> Codec:
        """Codec of cache misses."""
        return FixPoint(self.first_bits, entropy_coding=self.entropy_coding) if self.first_bits else EXACT

    @property
    def cache_codec(self) -> Codec:
        """Codec of cache entries."""
        return Identity("fp16") if self.cache_bits == 16 else FixPoint(self.cache_bits)

    @property
    def cache_dtype(self) -> torch.dtype:
        """Dtype of decoded cache entries."""
        return torch.float16 if self.cache_bits == 16 else torch.float32

    def entry_bytes(self, spec: TensorSpec) -> int:
        """Return the size of a cache entry, bytes; spec: of a micro-batch, [B, ...]."""
        return wire_bytes(self.cache_codec.wire(spec.shape[1:], self.cache_dtype))


class DeltaCoder:
    """One end's coder of a tensor whose samples are cached. spec: of a micro-batch, [B, ...], of the longest rows.

    codecs: those after the lossless one, at least one of them a Delta; all of these cache in the same way. A link may
    change its codec in any step. caches_all: whether what another codec sends is cached, too. Otherwise entries stay as
    the last Delta has left them, equal at both ends, and other codecs take no time for the cache.

    is_frozen: whether no layer before the boundary is trained. Then cache hits that equal their entries, but for the
    rounding of fp16, are not sent: the receiver takes the entries. are_gradients: whether the tensors are gradients,
    whose entries of 16 bits are bf16: most are smaller than the numbers that fp16 represents well. seed: of the random
    numbers of the sender's stochastic rounding, another one for each tensor.

    All rows have the same length, since an entry must fit every visit of its sample.

    Encoding and decoding update the cache, equally at both ends if micro-batches are processed in the same order. It
    holds finite numbers only: the sender raises NotFiniteError for a difference that is not finite, neither end caches
    a miss that is not finite, and updates saturate (codecs/cache_update.py).
    """

    def __init__(
        self,
        codecs: Sequence[Codec | Delta],
        spec: TensorSpec,
        cache: ActivationCache,
        streams: Streams,
        *,
        is_frozen: bool = False,
        are_gradients: bool = False,
        caches_all: bool = True,
        seed: int = 0,
    ) -> None:
        deltas = [codec for codec in codecs if isinstance(codec, Delta)]
        self._codecs = (EXACT, *codecs)
        self._delta = deltas[0]
        assert all(each.cache_codec == self._delta.cache_codec for each in deltas), "one cache for all of them"
        self._entry_codec, self._entry_dtype = self._delta.cache_codec, self._delta.cache_dtype
        if are_gradients and self._entry_dtype == torch.float16:
            self._entry_codec, self._entry_dtype = Identity("bf16"), torch.bfloat16
        self._is_frozen = is_frozen and self._entry_dtype == torch.float16
        self._caches_all = caches_all
        self._seed = seed
        self._spec = spec
        self._cache = cache
        self._streams = streams
        self._shared = SharedBasis()
        self.gradients: DeltaCoder | None = None
        """Coder of the gradients of the tensor that its sender receives, if it caches them."""

    @property
    def cache(self) -> ActivationCache:
        """This end's cache of the tensor."""
        return self._cache

    @property
    def spec(self) -> TensorSpec:
        return self._spec

    @property
    def max_bytes(self) -> int:
        batch = self._spec.shape[0]
        wires = []
        for index, codec in enumerate(self._codecs):
            most = batch if isinstance(codec, Delta) else 0
            info = TransferInfo(0, 0, index)
            wires += [self._wire_of(info, hits, batch - hits, has_basis=True) for hits in range(most + 1)]
        return max(map(wire_bytes, wires))

    def shape(self, info: TransferInfo) -> tuple[int, ...]:
        return self._spec.shape

    def wire(self, info: TransferInfo) -> Wire:
        hits, misses = self._hits_and_misses(info)
        sent = [] if self._is_frozen and info.hits_as_cached else hits
        return self._wire_of(info, len(sent), len(misses))

    def uses_entropy_coding(self, info: TransferInfo) -> bool:
        hits, _ = self._hits_and_misses(info)
        return self._hit_delta(info).codec.entropy_coding if hits else self._miss_codec(info).entropy_coding

    def marks_nan(self, info: TransferInfo) -> bool:
        return False

    def context(self, info: TransferInfo) -> bytes:
        """Return the versions of the samples' entries; taken before `encode` or `decode`, which update them."""
        return self._cache.pack_versions(info.samples) + self._shared.sent.to_bytes(8, "little")

    def add_gradients(self, gradients: Tensor) -> None:
        """Note the gradients of a micro-batch, [B, ..., C], that the sender has received, if it uses a basis."""
        if self._shared.in_use:
            with self._streams.side_stream(gradients):
                self._shared.gradients.add(gradients)

    def encode(self, x: Tensor, info: TransferInfo) -> tuple[Tensor, ...]:
        """Return the fields of misses, then of hits. Raises NotFiniteError, and then leaves the cache unchanged."""
        used = self._codecs[info.codec]
        self._shared.in_use = isinstance(used, Delta) and used.transform
        hits, misses = self._hits_and_misses(info)
        codec = self._miss_codec(info)
        miss_fields = codec.encode(_rows(x, misses)) if misses else ()
        if misses and not codec.encodes_nan:
            check_finite(miss_fields, _rows(x, misses))
        m = self._read_entries(info, hits)
        is_cached = self._is_frozen and bool(hits) and torch.equal(_as_entry(_rows(x, hits), m.dtype), m)
        hit_fields = self._encode_hits(info, _rows(x, hits), m) if hits and not is_cached else ()
        if misses and self._caches_misses(info):
            self._cache_misses(info, misses, codec.decode(miss_fields, self._shape(len(misses)), x.dtype))
        if hit_fields:
            self._write_entries(info, hits, m)
        return *miss_fields, *hit_fields

    def decode(self, fields: tuple[Tensor, ...], info: TransferInfo) -> Tensor:
        hits, misses = self._hits_and_misses(info)
        codec, dtype = self._miss_codec(info), self._spec.dtype
        count = len(self._wire_of(info, 0, len(misses)))
        m = self._read_entries(info, hits)  # first: caching the misses may evict the hits
        parts = []
        if misses:
            parts.append(codec.decode(fields[:count], self._shape(len(misses)), dtype))
            if self._caches_misses(info):
                self._cache_misses(info, misses, parts[0])
        if hits and len(fields) == count:  # as in `hits_as_cached`
            parts.append(m.to(dtype))
        elif hits:
            parts.append(self._decode_hits(self._hit_delta(info), fields[count:], m))
            self._write_entries(info, hits, m)
        return parts[0] if len(parts) == 1 else torch.cat(parts)[_inverse(misses + hits)]

    def _hits_and_misses(self, info: TransferInfo) -> tuple[list[int], list[int]]:
        """Return the rows of the micro-batch that are sent as differences, and all others, both ascending."""
        rows, caches = range(self._spec.shape[0]), isinstance(self._codecs[info.codec], Delta)
        hits = [i for i in rows if caches and info.samples and info.samples[i] in self._cache]
        return hits, [i for i in rows if i not in hits]

    def _miss_codec(self, info: TransferInfo) -> Codec:
        codec = self._codecs[info.codec]
        return codec.first_codec if isinstance(codec, Delta) else codec

    def _hit_delta(self, info: TransferInfo) -> Delta:
        codec = self._codecs[info.codec]
        assert isinstance(codec, Delta), "only a Delta has cache hits"
        return codec

    def _encode_hits(self, info: TransferInfo, x: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        """Return the fields of cache hits, and update their entries m, in place. Raises NotFiniteError."""
        delta = self._hit_delta(info)
        if not delta.transform:
            return encode_update(delta.codec, x, m)
        is_random = delta.rounding == "stochastic"
        seed = mix_seed(self._seed, info.step, info.micro, *info.samples) if is_random else None
        gradients = self._cached_gradients(info) if delta.balance else None
        difference = x.detach().float() - m.float()
        fields = self._shared.encode(difference, delta.step, seed, balance=delta.balance, gradients=gradients)
        self._add_hits(fields, m)
        return fields

    def _cached_gradients(self, info: TransferInfo) -> Tensor | None:
        """Return the gradients of cache hits from the visits before, [K, ...]; None unless those of all are cached."""
        hits, _ = self._hits_and_misses(info)
        if self.gradients is None or any(info.samples[i] not in self.gradients.cache for i in hits):
            return None
        return self.gradients._read_entries(info, hits)

    def _decode_hits(self, delta: Delta, fields: tuple[Tensor, ...], m: Tensor) -> Tensor:
        """Return the cache hits that fields encode, and update their entries m, in place."""
        if not delta.transform:
            return decode_update(delta.codec, fields, m, self._spec.dtype)
        return saturate_(self._add_hits(fields, m), self._spec.dtype).to(self._spec.dtype)

    def _add_hits(self, fields: tuple[Tensor, ...], m: Tensor) -> Tensor:
        """Add differences that were encoded in a basis to entries m, in place. Return the sum."""
        return add_saturated(m, basis.decode(*self._shared.take(fields), tuple(m.shape)))

    def _shape(self, rows: int) -> tuple[int, ...]:
        return rows, *self._spec.shape[1:]

    def _wire_of(self, info: TransferInfo, hits: int, misses: int, *, has_basis: bool = False) -> Wire:
        """Declare the fields of a message.

        hits, misses: numbers of rows. has_basis: whether there is a new basis even if none is due.
        """
        miss_wire = self._miss_codec(info).wire(self._shape(misses), self._spec.dtype) if misses else ()
        if not hits:
            return miss_wire
        if not self._hit_delta(info).transform:
            return miss_wire + self._hit_delta(info).codec.wire(self._shape(hits))
        return miss_wire + self._shared.wire(self._shape(hits), has_basis=has_basis)

    def _read_entries(self, info: TransferInfo, rows: Sequence[int]) -> Tensor:
        """Return the decoded cache entries of some rows, [K, ...], as a copy."""
        codec, dtype, shape = self._entry_codec, self._entry_dtype, self._spec.shape[1:]
        m = torch.empty(self._shape(len(rows)), dtype=dtype, device=self._streams.device)
        for row, i in zip(m, rows, strict=True):
            entry = self._cache.read(info.samples[i]).to(self._streams.device, non_blocking=True)
            row.copy_(codec.decode(unpack(entry, codec.wire(shape, dtype)), shape, dtype))
        return m

    def _caches_misses(self, info: TransferInfo) -> bool:
        """Return whether a sample that has no cache entry gets one from its message."""
        return bool(info.samples) and (self._caches_all or isinstance(self._codecs[info.codec], Delta))

    def _cache_misses(self, info: TransferInfo, rows: Sequence[int], values: Tensor) -> None:
        """Write the decoded values of cache misses to the cache, unless one of them is not finite."""
        if values.isfinite().all():
            self._write_entries(info, rows, _as_entry(values, self._entry_dtype))

    def _write_entries(self, info: TransferInfo, rows: Sequence[int], m: Tensor) -> None:
        """Write the entries of some rows, m [K, ...], as far as the cache has room."""
        for row, i in zip(m, rows, strict=True):
            buffer = self._cache.reserve(info.samples[i])
            if buffer is not None:
                pack(self._entry_codec.encode(row), buffer)
                self._cache.write(info.samples[i], buffer, info.step, info.micro, self._streams.record_event())


def _as_entry(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round values as cache entries of a dtype, saturating."""
    largest = torch.finfo(dtype).max
    # clamped in fp32: bf16 cannot represent the largest fp16 number
    return values.float().clamp(-largest, largest).to(dtype)


def _rows(x: Tensor, rows: list[int]) -> Tensor:
    """Select rows, given in ascending order; no copy if all are selected."""
    return x if len(rows) == len(x) else x[rows]


def _inverse(permutation: list[int]) -> list[int]:
    return sorted(range(len(permutation)), key=permutation.__getitem__)
