"""Both ends of a table of which one rank holds all rows, and others use those that their batch looks up.

V rows of D elements; n = rows that a batch uses, each once. They travel in several messages, so that a step waits for
those of its first micro-batches only, and its gradients do not wait behind the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from acsgd.layers.batch import Lengths
from acsgd.layers.composed import Inputs
from acsgd.layers.stand_ins import LookupTable
from acsgd.pp.schedules.actions import Op
from acsgd.pp.schedules.rows import RowRoute
from acsgd.pp.tied.groups import MicroGroups, RowGroup, RowGroups
from acsgd.pp.wire.channel import Channel
from acsgd.pp.wire.coder import TransferInfo
from acsgd.pp.wire.frame import MessageKind
from acsgd.pp.wire.link import AnyInbox, AnyOutbox, LinkFactory
from acsgd.shards.weights import Weight
from acsgd.streams import load_onto

Channels = Mapping[MessageKind, Channel]
"""Channels of a table between its owner and one other rank, by what they carry."""
GroupsOf = Callable[[int], MicroGroups]
"""Groups of a number of micro-batches."""
RowHandlers = Mapping[Op, Callable[[int], None]]
"""Function that performs the actions of each operation on a table, for a micro-batch."""


class RowTransfer:
    """The rows of one batch between the owner and one rank that uses them. step: that of the batch; codec: index."""

    def __init__(self, rows: RowGroups, micros: MicroGroups, step: int, codec: int) -> None:
        self.rows = rows
        self.started = 0
        """Messages that are sent, or whose receives are posted."""
        self.received = 0
        """Messages whose rows this rank has, as the user of the table."""
        self.waiting: list[Tensor] = []
        """Rows of these messages, as long as another batch is in the table."""
        self._micros = micros
        self._step = step
        self._codec = codec
        self._ids = tuple(rows.ids.tolist())

    def info(self, part: RowGroup) -> TransferInfo:
        """Return the description of a message of rows."""
        return TransferInfo(self._step, 0, self._codec, self._ids[part.rows], Lengths(part.size))

    def gradient_info(self, part: RowGroup) -> TransferInfo:
        """Return the description of a message of gradients."""
        return TransferInfo(self._step, 0, self._codec, lengths=Lengths(part.size))

    def until(self, micro: int) -> int:
        """Return the number of messages with the rows that a micro-batch needs, and those that need theirs before."""
        return sum(part.group <= self._micros.first[micro] for part in self.rows.parts)

    def start_until(self, micro: int | None = None) -> Sequence[RowGroup]:
        """Return the messages that are not started of those `until` a micro-batch, and count them as started.

        Default: of the first group. It is sent before the step begins, and no more: messages with which a step begins,
        such as the versions of activation caches, do not wait behind the others.
        """
        until = self.until(self._micros.first.index(0) if micro is None else micro)
        started, self.started = self.started, max(self.started, until)
        return self.rows.parts[started:until]

    def completed_by(self, micro: int) -> list[RowGroup]:
        """Return the messages of gradients that are complete after the last use of a micro-batch."""
        group = self._micros.completed.get(micro)
        return [part for part in self.rows.end_parts if part.group == group]


class TableOwner:
    """The rank that holds a table, and the channels to one that looks up its rows."""

    def __init__(
        self, weight: Weight, route: RowRoute, groups_of: GroupsOf, factory: LinkFactory, channels: Channels
    ) -> None:
        self.weight = weight
        self.route = route
        self._groups_of = groups_of
        self._ids_in = factory.open_inbox(channels[MessageKind.TABLE_IDS])
        # a step must not wait for rows that the other rank needs later
        self._rows_out = factory.open_outbox(channels[MessageKind.TABLE_ROWS], max_in_flight=math.inf)
        self._gradients_in = factory.open_inbox(channels[MessageKind.TABLE_GRADIENTS])
        self._transfer: RowTransfer
        """That of the present step or evaluation."""
        self.handlers: RowHandlers = {Op.SR: self.send_rows, Op.RG: self.post_gradients}

    @property
    def width(self) -> int:
        """Number of elements of a row."""
        return math.prod(self.weight.param.shape[1:])

    @property
    def outboxes(self) -> list[AnyOutbox]:
        """Sending ends of all channels."""
        return [self._rows_out]

    @property
    def inboxes(self) -> list[AnyInbox]:
        """Receiving ends of all channels."""
        return [self._ids_in, self._gradients_in]

    def request(self, inputs: Inputs | None, step: int) -> None:
        """Post the receive of the indices of the rows that a batch uses."""
        self._ids_in.post()

    def start(self, micros: int, step: int, codec: int) -> RowTransfer:
        """Wait for the earliest request, and send its first rows."""
        rows = RowGroups.unpack(self._ids_in.receive(TransferInfo(step, 0)).state["ids"])
        transfer = RowTransfer(rows, self._groups_of(micros), step, codec)
        self._send(transfer, transfer.start_until())
        self._rows_out.flush(wait=True)
        return transfer

    def begin(self, transfer: RowTransfer) -> None:
        """Send the rows of a batch from now on."""
        self._transfer = transfer

    def send_rows(self, micro: int) -> None:
        """Send the rows that a micro-batch needs, unless they are sent."""
        self._send(self._transfer, self._transfer.start_until(micro))

    def post_gradients(self, micro: int) -> None:
        """Post the receives of the gradients that are complete after a micro-batch."""
        for _ in self._transfer.completed_by(micro):
            self._gradients_in.post()

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Wait for the gradients of the rows of this step, and add them to that of the table."""
        master, rows = self.weight.master, self._transfer.rows
        if master.grad is None:
            master.grad = torch.zeros_like(master, dtype=torch.float32)
        for part in rows.end_parts:
            gradient = self._gradients_in.receive(self._transfer.gradient_info(part)).state["gradient"]
            ids = load_onto(master.device, rows.ids[rows.by_end[part.rows]])  # masters may be in host memory
            master.grad.index_add_(0, ids, gradient.to(master.device))

    def settle(self, transfer: RowTransfer) -> None:
        """Wait until the rows are sent."""
        self._rows_out.drain()

    def _send(self, transfer: RowTransfer, parts: Sequence[RowGroup]) -> None:
        param = self.weight.param.detach()
        for part in parts:
            ids = load_onto(param.device, transfer.rows.ids[part.rows])
            self._rows_out.send(transfer.info(part), {"rows": param[ids]})


class TableUser:
    """A rank that looks up rows of a table, and the channels to its owner.

    inputs: names of the inputs of the model whose values are the indices.
    """

    def __init__(
        self,
        table: LookupTable,
        inputs: Sequence[str],
        route: RowRoute,
        groups_of: GroupsOf,
        factory: LinkFactory,
        channels: Channels,
    ) -> None:
        self.route = route
        self._table = table
        self._inputs = inputs
        self._groups_of = groups_of
        self._ids_out = factory.open_outbox(channels[MessageKind.TABLE_IDS])
        self._rows_in = factory.open_inbox(channels[MessageKind.TABLE_ROWS])
        self._gradients_out = factory.open_outbox(channels[MessageKind.TABLE_GRADIENTS])
        self._requested: list[RowGroups] = []
        self._transfer: RowTransfer
        """That of the present step or evaluation."""
        self.handlers: RowHandlers = {Op.RR: self.post_rows, Op.SG: self.send_gradients}

    @property
    def outboxes(self) -> list[AnyOutbox]:
        """Sending ends of all channels."""
        return [self._ids_out, self._gradients_out]

    @property
    def inboxes(self) -> list[AnyInbox]:
        """Receiving ends of all channels."""
        return [self._rows_in]

    @property
    def width(self) -> int:
        """Number of elements of a row."""
        return math.prod(self._table.shape[1:])

    @property
    def elements(self) -> tuple[int, int]:
        """Number of elements of the rows of the first group, and of all, of the present step or evaluation."""
        rows = self._transfer.rows
        return rows.parts[0].size * self.width, len(rows.ids) * self.width

    def request(self, inputs: Inputs | None, step: int) -> None:
        """Send the indices of the rows that a batch uses. inputs: of the model, [M, B, ...], in host memory."""
        assert inputs is not None, "this rank reads no inputs"
        tokens = torch.cat([inputs[name].flatten(1) for name in self._inputs], dim=1)
        request = RowGroups.pack(tokens, self._groups_of(len(tokens)))
        self._ids_out.send(TransferInfo(step, 0, lengths=Lengths(len(request))), {"ids": request})
        self._ids_out.flush(wait=True)
        self._requested.append(RowGroups.unpack(request))

    def start(self, micros: int, step: int, codec: int) -> RowTransfer:
        """Post the receives of the first rows of the earliest request."""
        transfer = RowTransfer(self._requested.pop(0), self._groups_of(micros), step, codec)
        self._post(transfer.start_until())
        return transfer

    def begin(self, transfer: RowTransfer) -> None:
        """Use the rows of a batch from now on."""
        self._transfer = transfer
        self._table.reset(transfer.rows.ids)
        for part, rows in zip(transfer.rows.parts, transfer.waiting, strict=False):
            self._table.load(part.rows, rows)
        transfer.waiting.clear()

    def clear_gradient(self) -> None:
        """Clear the gradient of the rows."""
        self._table.clear_gradient()

    def post_rows(self, micro: int) -> None:
        """Post the receives of the rows that a micro-batch needs, unless they are posted."""
        self._post(self._transfer.start_until(micro))

    def receive_rows(self, micro: int, before_wait: Callable[[], None]) -> None:
        """Wait for the rows that a micro-batch needs. before_wait: called if they were not received yet."""
        until = self._transfer.until(micro)
        if self._transfer.received < until:
            before_wait()
        for part in self._transfer.rows.parts[self._transfer.received : until]:
            self._table.load(part.rows, self._receive(self._transfer))

    def send_gradients(self, micro: int) -> None:
        """Send the gradients that are complete after a micro-batch."""
        rows = self._transfer.rows
        for part in self._transfer.completed_by(micro):
            gradient = self._table.gradient
            ordered = gradient[load_onto(gradient.device, rows.by_end[part.rows])]
            self._gradients_out.send(self._transfer.gradient_info(part), {"gradient": ordered})

    def settle(self, transfer: RowTransfer) -> None:
        """Wait for the rows whose receives are posted, so that those of another batch can follow."""
        while transfer.received < transfer.started:
            transfer.waiting.append(self._receive(transfer))

    def _post(self, parts: Sequence[RowGroup]) -> None:
        for _ in parts:
            self._rows_in.post()

    def _receive(self, transfer: RowTransfer) -> Tensor:
        part = transfer.rows.parts[transfer.received]
        transfer.received += 1
        return self._rows_in.receive(transfer.info(part)).state["rows"]
