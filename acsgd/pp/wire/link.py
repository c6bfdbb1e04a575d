"""Links between two ranks of a pipeline, each of two channels."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from acsgd.codecs.base import Codec
from acsgd.codecs.lossless import BytePlanes
from acsgd.codecs.transform import Transform
from acsgd.comm.communicators import Communicator
from acsgd.comm.process_groups import Group
from acsgd.comm.waits import Meter, Waits
from acsgd.layers.composed import State
from acsgd.layers.description import Dim
from acsgd.pp.wire.cache import ActivationCache
from acsgd.pp.wire.cache_plan import CacheKey, CachePlan
from acsgd.pp.wire.cache_sync import CacheSync
from acsgd.pp.wire.channel import Channel, handshake
from acsgd.pp.wire.coder import EXACT, Coder, StatelessCoder, TensorSpec, TransferInfo
from acsgd.pp.wire.delta import Delta, DeltaCoder
from acsgd.pp.wire.device_mailbox import DeviceInbox, DeviceOutbox
from acsgd.pp.wire.frame import MessageKind
from acsgd.pp.wire.mailbox import MAX_SENDS_IN_FLIGHT, Inbox, Outbox, Received
from acsgd.pp.wire.row_coder import RowDifferenceCoder
from acsgd.pp.wire.shared_basis import TransformCoder
from acsgd.streams import Streams, mix_seed

HOST = Streams(torch.device("cpu"))
AnyOutbox = Outbox | DeviceOutbox
AnyInbox = Inbox | DeviceInbox


class Link:
    """One end of a boundary between two stages: activations travel downstream, gradients upstream."""

    def __init__(
        self, outbox: AnyOutbox, inbox: AnyInbox, cache_sync: CacheSync, activations: Channel, *, is_downstream: bool
    ) -> None:
        """is_downstream: whether this is the end that receives activations."""
        self.outbox = outbox
        self.inbox = inbox
        self.activations = activations
        self.is_downstream = is_downstream
        self._cache_sync = cache_sync

    def begin_step(self, samples: Sequence[int], upcoming: Sequence[int]) -> None:
        """Start to compare the activation caches of both ends; see `CacheSync.begin_step`."""
        self._cache_sync.begin_step(samples, upcoming)

    def send(self, info: TransferInfo, state: State) -> None:
        """Send the tensors of a micro-batch without blocking."""
        self._cache_sync.finish()
        self.outbox.send(info, state)

    def receive(self, info: TransferInfo) -> Received:
        """Wait for the tensors of a micro-batch, whose receives have been posted."""
        self._cache_sync.finish()
        received = self.inbox.receive(info)
        if not self.is_downstream:
            for name, gradients in received.state.items():
                if isinstance(coder := self.activations.coders[name], DeltaCoder | TransformCoder):
                    coder.add_gradients(gradients)
        return received

    def close(self) -> None:
        """End the link's threads, and write its activation caches to disk, if they are kept there."""
        self.outbox.close()
        self._cache_sync.close()

    def abort(self) -> None:
        """End the link's threads without sending or waiting for anything; its activation caches stay open."""
        self.outbox.abort()
        self.inbox.abort()
        self._cache_sync.abort()


class DeltasAt(Protocol):
    """Returns the deltas that activations, or their gradients, may have at a boundary; without any it has no caches."""

    def __call__(self, boundary: int, *, of_gradients: bool = False) -> Sequence[Delta]: ...


@dataclass(frozen=True)
class LinkFactory:
    """Opens the links of one rank, all with the same codecs and meters."""

    group: Group
    waits: Waits
    streams: Streams
    boundaries: Sequence[Mapping[str, TensorSpec]]
    """By boundary, the named tensors that cross it, of one micro-batch. The first axis is that of the rows."""
    forward: Sequence[Codec | Delta]
    """Codecs of activations after the lossless one; each transfer uses one of them, see `TransferInfo.codec`."""
    backward: Sequence[Codec | Delta]
    """Codecs of gradients."""
    forward_meter: Meter
    backward_meter: Meter
    cache_plan: CachePlan | None = None
    """Size and place of the activation caches; required if a direction has a Delta."""
    tied_meter: Meter = field(default_factory=Meter)
    caches_all: bool = True
    """See `DeltaCoder`."""
    deltas_at: DeltasAt | None = None
    """None = all of `forward` and `backward`."""
    frozen: int = 0
    """Number of the first boundaries before which no layer is trained."""
    caches: dict[CacheKey, ActivationCache] = field(default_factory=dict)
    """Those of the links that were opened."""

    def open(self, boundary: int, *, peer: int, downstream: bool) -> Link:
        """Open this rank's end of a boundary, together with the peer.

        downstream: whether the peer holds the stage after the boundary. Raises RunError if the two ends differ.
        """
        activation_coders, gradient_coders = self._coders(boundary, downstream=downstream)
        activations = self._open_channel(
            MessageKind.ACTIVATION, boundary, peer, self.forward, activation_coders, self.forward_meter
        )
        gradients = self._open_channel(
            MessageKind.GRADIENT, boundary, peer, self.backward, gradient_coders, self.backward_meter
        )
        coders = *activation_coders.values(), *gradient_coders.values()
        caches = [coder.cache for coder in coders if isinstance(coder, DeltaCoder)]
        cache_sync = CacheSync(activations, caches)
        if downstream:
            outbox, inbox = self.open_outbox(activations), self.open_inbox(gradients)
        else:
            inbox, outbox = self.open_inbox(activations), self.open_outbox(gradients)
        return Link(outbox, inbox, cache_sync, activations, is_downstream=not downstream)

    def open_tie(self, number: int, spec: TensorSpec, *, peer: int) -> tuple[AnyOutbox, AnyInbox]:
        """Open both directions of a lossless exchange of a tied weight's gradients, together with the peer.

        number: of the weight among all tied ones; spec: of the only tensor, named "gradient". Raises RunError if the
        two ends differ.
        """
        coders = {"gradient": StatelessCoder([EXACT], spec)}
        channel = self._open_channel(MessageKind.TIED_GRADIENT, number, peer, [EXACT], coders, self.tied_meter)
        if self._rank < peer:
            outbox, inbox = self.open_outbox(channel), self.open_inbox(channel)
        else:
            inbox, outbox = self.open_inbox(channel), self.open_outbox(channel)
        return outbox, inbox

    def open_table(
        self,
        number: int,
        table: TensorSpec,
        *,
        peer: int,
        max_ids: int,
        max_rows: int,
        rows: Sequence[Codec],
        gradients: Sequence[Codec],
    ) -> dict[MessageKind, Channel]:
        """Open the channels of a table between its owner and a rank that looks up its rows, together with the peer.

        Indices travel over gloo, since only the sender knows their number before, and stay in host memory. Both ends
        then know the size of each message of rows and of gradients, unless it is entropy-coded.

        number: of the weight among all tied ones. max_ids, max_rows: largest number of rows per request, and per
        message. rows, gradients: codecs after the lossless one. Raises RunError if the two ends differ.
        """
        count, *of_row = Dim("sequence", 0), *(Dim(None, size) for size in table.shape[1:])  # headers have the number
        ids = TensorSpec((max_ids,), torch.int64, (count,))
        values = TensorSpec((max_rows, *table.shape[1:]), table.dtype, (count, *of_row))
        coders: dict[MessageKind, tuple[Sequence[Codec], dict[str, Coder]]] = {
            MessageKind.TABLE_IDS: ([EXACT], {"ids": StatelessCoder([EXACT], ids)}),
            MessageKind.TABLE_ROWS: (rows, {"rows": _row_coder(rows, values)}),
            MessageKind.TABLE_GRADIENTS: (
                gradients,
                {"gradient": StatelessCoder(gradients, values._replace(dtype=torch.float32))},
            ),
        }
        return {
            kind: self._open_channel(
                kind,
                number,
                peer,
                codecs,
                of_kind,
                self.tied_meter,
                has_known_sizes=kind != MessageKind.TABLE_IDS and not any(codec.entropy_coding for codec in codecs),
                streams=HOST if kind == MessageKind.TABLE_IDS else None,
            )
            for kind, (codecs, of_kind) in coders.items()
        }

    def _coders(self, boundary: int, *, downstream: bool) -> tuple[Mapping[str, Coder], Mapping[str, Coder]]:
        """Return this end's coders of activations and of gradients; downstream: see `open`."""
        side, other = ("sender", "receiver") if downstream else ("receiver", "sender")
        activations = self._activation_coders(boundary, side)
        gradients = {
            name: self._gradient_coder(boundary, name, other)
            for name, spec in self.boundaries[boundary].items()
            if spec.dtype.is_floating_point
        }
        for name, coder in gradients.items():
            of = activations[name]
            if downstream and isinstance(of, DeltaCoder) and isinstance(coder, DeltaCoder):
                of.gradients = coder
        return activations, gradients

    def _activation_coders(self, boundary: int, side: str) -> Mapping[str, Coder]:
        """Return this end's coders of activations; side: "sender" or "receiver"."""
        return {name: self._activation_coder(boundary, name, side) for name in self.boundaries[boundary]}

    def _activation_coder(self, boundary: int, name: str, side: str) -> Coder:
        spec = self.boundaries[boundary][name]
        if not spec.dtype.is_floating_point:
            return StatelessCoder([EXACT] * len(self.forward), spec)
        codecs = self._codecs_at(boundary, self.forward)
        delta = next((codec for codec in codecs if isinstance(codec, Delta)), None)
        if delta is None:
            return self._coder([codec for codec in codecs if not isinstance(codec, Delta)], spec)
        return DeltaCoder(
            codecs,
            spec,
            self._open_cache(boundary, f"{side}.{name}", delta, spec),
            self.streams,
            is_frozen=boundary < self.frozen,
            caches_all=self.caches_all,
            seed=mix_seed(boundary, *name.encode()),
        )

    def _codecs_at(
        self, boundary: int, codecs: Sequence[Codec | Delta], *, of_gradients: bool = False
    ) -> list[Codec | Delta]:
        """Return codecs with a lossless one in place of each Delta that may not be used at a boundary."""
        if self.deltas_at is None:
            return [*codecs]
        deltas = self.deltas_at(boundary, of_gradients=of_gradients)
        return [EXACT if isinstance(codec, Delta) and codec not in deltas else codec for codec in codecs]

    def _gradient_coder(self, boundary: int, name: str, side: str) -> Coder:
        """Return this end's coder of the gradients of a tensor; a lossless one, without a cache, if none are sent."""
        spec = self.boundaries[boundary][name]
        if boundary < self.frozen:
            return StatelessCoder([EXACT] * len(self.backward), spec)
        codecs = self._codecs_at(boundary, self.backward, of_gradients=True)
        delta = next((codec for codec in codecs if isinstance(codec, Delta)), None)
        if delta is None:
            return self._coder([codec for codec in codecs if not isinstance(codec, Delta)], spec)
        key = f"{name}.gradient"
        return DeltaCoder(
            codecs,
            spec,
            self._open_cache(boundary, f"{side}.{key}", delta, spec),
            self.streams,
            are_gradients=True,
            caches_all=self.caches_all,
            seed=mix_seed(boundary, *key.encode()),
        )

    def _open_cache(self, boundary: int, name: str, delta: Delta, spec: TensorSpec) -> ActivationCache:
        assert self.cache_plan is not None, "delta needs a cache plan"
        cache = self.caches[boundary, name] = self.cache_plan.open(boundary, name, delta, spec, self.streams)
        return cache

    def _coder(self, codecs: Sequence[Codec], spec: TensorSpec) -> Coder:
        """Return a coder of tensors that have no cache; its ends keep a basis if all messages have as many channels."""
        if any(isinstance(codec, Transform) for codec in codecs) and not spec.has_variable_channels:
            return TransformCoder(codecs, spec, self.streams)
        return StatelessCoder(codecs, spec)

    def open_outbox(self, channel: Channel, *, max_in_flight: float = MAX_SENDS_IN_FLIGHT) -> AnyOutbox:
        """Open the sending end of a channel, as the peer opens the receiving end. max_in_flight: see `Outbox`."""
        communicator = self._open_communicator(channel, sender=self._rank)
        if communicator is None:
            return Outbox(channel, max_in_flight=max_in_flight)
        return DeviceOutbox(channel, communicator)

    def open_inbox(self, channel: Channel) -> AnyInbox:
        """Open the receiving end of a channel, as the peer opens the sending end."""
        communicator = self._open_communicator(channel, sender=channel.peer)
        return Inbox(channel) if communicator is None else DeviceInbox(channel, communicator)

    def _open_communicator(self, channel: Channel, *, sender: int) -> Communicator | None:
        """Open a communicator for one direction of a channel, if its messages stay on the device, and connect it.

        NCCL connects with the first message, and blocks its ranks for it.
        """
        if self.group.open_communicator is None or not channel.has_known_sizes:
            return None
        with channel.report_failure("opening a channel with", time.perf_counter()):
            of = "tied weight" if channel.kind.is_of_weight else "boundary"
            name = f"the first message of {channel.kind.plural} of {of} {channel.boundary} from rank {sender}"
            communicator = self.group.open_communicator(name, sorted((self._rank, channel.peer)))
            if communicator is None:
                return None
            message = torch.zeros(1, device=self.streams.device)
            exchange = communicator.isend if sender == self._rank else communicator.irecv
            self.waits.wait(exchange(message, channel.peer))
        return communicator

    @property
    def _rank(self) -> int:
        """Global rank of this end."""
        return self.group.ranks[self.group.rank()]

    def _open_channel(
        self,
        kind: MessageKind,
        boundary: int,
        peer: int,
        codecs: Sequence[Codec | Delta],
        coders: Mapping[str, Coder],
        meter: Meter,
        *,
        has_known_sizes: bool = True,
        streams: Streams | None = None,
    ) -> Channel:
        """Open a channel. streams: of the device of its tensors; None = those of this rank."""
        channel = Channel(
            kind=kind,
            boundary=boundary,
            peer=peer,
            group=self.group,
            waits=self.waits,
            codec=", ".join(map(repr, codecs)),
            coders=coders,
            streams=streams or self.streams,
            meter=meter,
            has_known_sizes=has_known_sizes,
        )
        handshake(channel)
        return channel


def _row_coder(codecs: Sequence[Codec], spec: TensorSpec) -> Coder:
    """Return the coder of the rows of a table."""
    has_differences = any(isinstance(codec, BytePlanes) for codec in codecs)
    return RowDifferenceCoder(codecs, spec) if has_differences else StatelessCoder(codecs, spec)
