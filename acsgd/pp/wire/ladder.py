"""The codecs among which pp.compress=auto chooses, with what each costs in loss, in bytes and in time."""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

import torch

from acsgd.codecs import CODECS
from acsgd.codecs.base import Codec, pack, unpack, wire_bytes
from acsgd.codecs.lossless import compress_, decompress
from acsgd.codecs.transform import Transform
from acsgd.config.ranges import Range
from acsgd.config.spec import from_spec
from acsgd.pp.schedules.actions import Placement
from acsgd.pp.wire.cache import ActivationCache, HostMemoryStore
from acsgd.pp.wire.coder import EXACT, Coder, StatelessCoder, TensorSpec, TransferInfo
from acsgd.pp.wire.delta import Delta, DeltaCoder
from acsgd.pp.wire.frame import HEADER_BYTES
from acsgd.pp.wire.shared_basis import TransformCoder
from acsgd.streams import Streams

SPECS: Mapping[str, type[Codec | Delta]] = {**CODECS, "delta": Delta}
"""Codecs of both directions."""


class Rung(NamedTuple):
    """A codec of one direction of a link."""

    spec: str
    loss_cost: float
    """Train loss above that of an uncompressed run, where it is the codec of one link."""
    bits: float | None = None
    """Mean bits per element after entropy coding; None = as many as the codec declares."""

    @property
    def codec(self) -> Codec | Delta:
        """The codec itself."""
        return _parse(self.spec)

    @property
    def is_entropy_coded(self) -> bool:
        """Whether the codec takes several times the time of those that are not."""
        return self.bits is not None

    @property
    def is_delta(self) -> bool:
        """Whether the codec has activation caches."""
        return isinstance(self.codec, Delta)

    def message_bytes(self, specs: Sequence[TensorSpec]) -> float:
        """Return the size of a message with these tensors, of cache hits if it is a delta."""
        return sum(HEADER_BYTES + self._body_bytes(spec) for spec in specs)

    def _body_bytes(self, spec: TensorSpec) -> float:
        if not spec.dtype.is_floating_point:
            return wire_bytes(EXACT.wire(spec.shape, spec.dtype))
        if self.bits is not None:
            return self.bits / 8 * math.prod(spec.shape)
        codec = self.codec.codec if isinstance(self.codec, Delta) else self.codec
        return wire_bytes(codec.wire(spec.shape, spec.dtype))


@functools.cache
def _parse(spec: str) -> Codec | Delta:
    codec: Codec | Delta = from_spec(spec, SPECS, key="codec")
    return codec


NONE = Rung("none", 0.0)
FORWARD = (
    NONE,
    Rung("none:dtype=bf16", 0.0002),
    Rung("fixpoint:bits=8", 0.0002),
    Rung("delta:bits=4,first_bits=8", 0.0003),
    Rung("delta:step=0.25,transform=true,first_bits=8", 0.0008, 2.43),
    Rung("delta:step=1.5,first_bits=8", 0.0050, 1.65),
    Rung("delta:step=1.3,transform=true,first_bits=8", 0.0072, 1.07),
)
"""Of activations, by loss cost. The costs are in docs/measurements/stages.md, with what they are measured from."""
NO_CACHE = (Rung("transform:step=0.1", 0.0067, 2.71),)
"""Of activations where delta is no choice. Ends of a link that may change to delta keep no basis for `transform`."""
BACKWARD = (
    NONE,
    Rung("none:dtype=bf16", 0.0003),
    Rung("fixpoint:bits=8", 0.0003),
    Rung("delta:step=0.5,transform=true,rounding=stochastic,first_bits=8", 0.0003, 2.35),
    Rung("fixpoint:bits=4", 0.0027),
)
"""Of activation gradients. The last one has more bytes than the one before, and takes less time."""
NO_CACHE_BACKWARD = (Rung("transform:step=0.36", 0.0014, 3.05),)
"""Of activation gradients where delta is no choice, as for activations."""
CACHED_GRADIENT_EPOCHS = 8
"""Epochs below which delta is no choice for gradients: with first visits in 8 bits it sends more than `transform`."""


@dataclass(frozen=True)
class Auto:
    """Measure each link and choose, for each direction, the codec that costs the least loss among those that are fast.

    A codec is fast if the step takes no longer than with any other, as the simulator of the schedule predicts from
    measured rates, delays and computing times. A change of a rate changes the codecs.
    """

    max_loss_cost: Annotated[float, Range(0, 10, above=True)] = 0.005
    """Largest sum of the loss costs of all links and directions of a pipeline, and of rows of tied tables, in the unit
    of the loss."""
    delta: bool = True
    """Whether `delta` is among the codecs. It keeps the activations of all sequences in host memory."""
    cached_gradients: bool = True
    """Whether it is among the codecs of gradients, too, whose caches take as much memory again."""
    rows: bool = True
    """Whether it also chooses how rows of tied tables travel, where pp.tied is "rows"."""


COMPRESS: Mapping[str, type[Auto]] = {"auto": Auto}


@dataclass(frozen=True)
class Ladder:
    """The codecs of each direction of all links of a run: index 0 is the lossless one."""

    max_loss_cost: float
    forward: tuple[Rung, ...]
    backward: tuple[Rung, ...]
    fixed_forward: Mapping[int, int]
    """By boundary, index of a codec that is not chosen but given."""
    fixed_backward: Mapping[int, int]
    chooses_rows: bool
    """See `Auto.rows`."""

    @classmethod
    def of(cls, auto: Auto, forward: str, backward: str, *, placement: Placement, has_delta: bool) -> Ladder:
        """Return the ladder of pp.compress, with the codecs that pp.forward and pp.backward give for single links.

        Codecs that cost more than all links together may are left out. placement: of the stages; has_delta: whether
        deltas are possible. Raises ValueError if a link or codec does not exist, or no codec costs so little.
        """
        cheapest = min((*FORWARD[1:], *BACKWARD[1:]), key=lambda rung: rung.loss_cost)
        if auto.max_loss_cost < cheapest.loss_cost:
            raise ValueError(
                f"pp.compress: max_loss_cost={auto.max_loss_cost:g} allows no codec: the one that costs least, "
                f'"{cheapest.spec}", costs {cheapest.loss_cost:g}; give max_loss_cost={cheapest.loss_cost:g} or more, '
                "or remove pp.compress"
            )
        ups, downs = ([rung for rung in rungs if rung.loss_cost <= auto.max_loss_cost] for rungs in (FORWARD, BACKWARD))
        up, fixed_up = _with_fixed(ups, _given("pp.forward", forward, placement))
        down, fixed_down = _with_fixed(downs, _given("pp.backward", backward, placement))
        ladder, links = cls(auto.max_loss_cost, up, down, fixed_up, fixed_down, auto.rows), len(_links(placement))
        has_choice, has_gradient_choice = (has_delta and len(fixed) < links for fixed in (fixed_up, fixed_down))
        return ladder.without_delta(
            forward=not has_choice, backward=not (has_gradient_choice and auto.cached_gradients)
        )

    def without_delta(self, *, forward: bool = True, backward: bool = True) -> Ladder:
        """Return the ladder without a choice of deltas: only links for which one is given have it.

        The codecs of NO_CACHE, and of NO_CACHE_BACKWARD, are choices instead, as far as max_loss_cost allows.
        forward, backward: of which directions.
        """
        ups, fixed_ups = self.forward, self.fixed_forward
        if forward:
            ups, fixed_ups = self._without_delta(ups, fixed_ups, NO_CACHE)
        downs, fixed_downs = self.backward, self.fixed_backward
        if backward:
            downs, fixed_downs = self._without_delta(downs, fixed_downs, NO_CACHE_BACKWARD)
        return replace(self, forward=ups, backward=downs, fixed_forward=fixed_ups, fixed_backward=fixed_downs)

    def _without_delta(
        self, rungs: Sequence[Rung], fixed: Mapping[int, int], others: Sequence[Rung]
    ) -> tuple[tuple[Rung, ...], dict[int, int]]:
        """Return the rungs of a direction without a choice of deltas but with others, and the given codecs."""
        given = set(fixed.values())
        kept = [index for index, rung in enumerate(rungs) if index in given or not rung.is_delta]
        choices = {rung.codec: rung for rung in others if rung.loss_cost <= self.max_loss_cost}
        found = [choices.pop(rungs[index].codec, rungs[index]) for index in kept]
        found += choices.values()
        chosen = [rung._replace(loss_cost=math.inf) if rung.is_delta else rung for rung in found]
        order = sorted(range(len(chosen)), key=lambda index: chosen[index].loss_cost)  # stable
        return tuple(chosen[index] for index in order), {
            link: order.index(kept.index(index)) for link, index in fixed.items()
        }

    def codecs_at(self, boundary: int, *, of_gradients: bool = False) -> list[Codec | Delta]:
        """Return the codecs with which activations, or their gradients, may cross a boundary."""
        rungs, fixed = (self.backward, self.fixed_backward) if of_gradients else (self.forward, self.fixed_forward)
        if boundary in fixed:
            return [rungs[fixed[boundary]].codec]
        return [rung.codec for rung in rungs if rung.loss_cost <= self.max_loss_cost]


def _links(placement: Placement) -> list[int]:
    """Return the boundaries between stages of different ranks."""
    rank_of = placement.rank_of
    return [each for each in range(placement.stages - 1) if rank_of(each) != rank_of(each + 1)]


def codecs_of_links(text: str) -> dict[int, str] | None:
    """Parse "0=none 2=fixpoint:bits=8", codecs by boundary; None for the codec of all links."""
    if not re.match(r"\d+=", text):
        return None
    return {int(number): spec for number, _, spec in (each.partition("=") for each in text.split())}


def _given(key: str, text: str, placement: Placement) -> dict[str, tuple[int, str]]:
    """Return the codecs that an option gives for single links, as boundary and spec by the name of their option."""
    boundaries, links = range(placement.stages - 1) if placement.ranks > 1 else range(0), _links(placement)
    if text == "none":
        return {}
    given = codecs_of_links(text)
    if given is None:
        raise ValueError(
            f'{key}="{text}": pp.compress=auto chooses the codecs; give that of one link, {key}.0="{text}", or remove '
            "one of both"
        )
    if absent := [number for number in given if number not in boundaries]:
        if not boundaries:
            raise ValueError(f"{key}.{absent[0]}: one stage has no links; give --pp.stages 2, or remove it")
        has = "link 0 is the only one" if len(boundaries) == 1 else f"the links are 0 to {len(boundaries) - 1}"
        raise ValueError(f"{key}.{absent[0]}: there is no link {absent[0]}: {has}; link 0 is behind the first stage")
    if inside := [number for number in given if number not in links]:
        rank = placement.rank_of(inside[0])
        raise ValueError(
            f"{key}.{inside[0]}: stages {inside[0]} and {inside[0] + 1} are both on rank {rank} of a pipeline, so "
            f"nothing is sent between them; remove {key}.{inside[0]}"
        )
    return {f"{key}.{number}": (number, spec) for number, spec in given.items()}


def _with_fixed(rungs: Sequence[Rung], given: Mapping[str, tuple[int, str]]) -> tuple[tuple[Rung, ...], dict[int, int]]:
    """Return rungs with those of given codecs, and the index of the codec of each link that has a given one."""
    found, fixed = [*rungs], dict[int, int]()
    for key, (number, spec) in given.items():
        codec = from_spec(spec, SPECS, key=key)
        if isinstance(codec, Delta) and (codec.cache, codec.cache_bits, codec.cache_gib) != ("ram", 16, 0.0):
            raise ValueError(f'{key}="{spec}": with pp.compress=auto all caches are alike; remove cache options')
        same = next((index for index, rung in enumerate(found) if rung.codec == codec), None)
        if same is None:
            found.append(Rung(spec, math.inf))  # never chosen
        fixed[number] = len(found) - 1 if same is None else same
    return tuple(found), fixed


class CodecTime(NamedTuple):
    """Time of a codec on this device for one message, seconds."""

    encode_s: float
    decode_s: float


_measured: dict[tuple[Codec | Delta, TensorSpec, torch.device], CodecTime] = {}
"""Times so far: the views of an elastic run are on the same device."""
VISITS = 3
"""Number of times that a message is encoded and decoded to measure its time, after a first one that is not counted."""


def measure_codec(codec: Codec | Delta, specs: Sequence[TensorSpec], streams: Streams) -> CodecTime:
    """Measure the time of a codec for the floating-point tensors of a message; that of a delta for cache hits.

    A process measures each tensor once.
    """
    times = []
    for spec in specs:
        if spec.dtype.is_floating_point:
            key = codec, spec, streams.device
            if key not in _measured:
                _measured[key] = _measure(codec, spec, streams)
            times.append(_measured[key])
    return CodecTime(sum(each.encode_s for each in times), sum(each.decode_s for each in times))


def _measure(codec: Codec | Delta, spec: TensorSpec, streams: Streams) -> CodecTime:
    ends = [_coder(codec, spec, streams) for _ in range(2)]
    x, times = torch.randn(spec.shape).to(spec.dtype).to(streams.device), []
    for visit in range(1 + VISITS):
        info = TransferInfo(visit, 0, samples=tuple(range(spec.shape[0])))
        x = x + 0.05 * x.flip(0)
        wire, entropy_coding = ends[0].wire(info), ends[0].uses_entropy_coding(info)
        buffer = streams.host_buffer(wire_bytes(wire))
        streams.record_event().synchronize()
        begun = time.perf_counter()
        pack(ends[0].encode(x, info), buffer)
        streams.record_event().synchronize()
        coded = buffer.clone() if entropy_coding else buffer
        length = compress_(coded, wire) if entropy_coding else len(buffer)
        encoded = time.perf_counter()
        if length < len(buffer):
            decompress(coded[:length], buffer, wire)
        ends[1].decode(tuple(field.to(streams.device) for field in unpack(buffer, wire)), info)
        streams.record_event().synchronize()
        times.append(CodecTime(encoded - begun, time.perf_counter() - encoded))
    return CodecTime(*(min(each) for each in zip(*times[1:], strict=True)))


def _coder(codec: Codec | Delta, spec: TensorSpec, streams: Streams) -> Coder:
    if not isinstance(codec, Delta):
        is_transform = isinstance(codec, Transform)
        return TransformCoder([codec], spec, streams) if is_transform else StatelessCoder([codec], spec)
    store = HostMemoryStore(codec.entry_bytes(spec), streams)
    return DeltaCoder([codec], spec, ActivationCache(spec.shape[0], store), streams)
