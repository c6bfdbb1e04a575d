"""Both ends of a table of which one rank holds all rows, and others use those that their batch looks up.

V rows of D elements; n = rows that a batch uses, each once. They travel in several messages, so that a step waits for
those of its first micro-batches only, and its gradients do not wait behind the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from acsgd.layers.composed import Inputs
from acsgd.layers.lengths import Lengths
from acsgd.layers.stand_ins import LookupTable
from acsgd.pp.schedules.actions import Action
from acsgd.pp.schedules.rows import Pacing
from acsgd.pp.tied.groups import RowGroup, RowGroups, UseOrder
from acsgd.pp.wire.channel import Channel
from acsgd.pp.wire.coder import TransferInfo
from acsgd.pp.wire.frame import MessageKind
from acsgd.pp.wire.mailbox import Inbox, Outbox
from acsgd.shards.weights import Weight

Channels = Mapping[MessageKind, Channel]
"""Channels of a table between its owner and one other rank, by what they carry."""
FIRST = 1
"""Number of groups of rows that are sent before their step begins. Messages with which a step begins, such as the
versions of activation caches, do not wait behind the others."""


class RowTransfer:
    """The rows of one batch between the owner and one rank that uses them. step: that of the batch."""

    def __init__(self, groups: RowGroups, step: int, *, exact: bool) -> None:
        self.groups = groups
        self.step = step
        self.exact = exact
        self.started = 0
        """Messages that are sent, or whose receives are posted."""
        self.received = 0
        """Messages whose rows this rank has, as the user of the table."""
        self._ids = tuple(groups.ids.tolist())
        self.waiting: list[Tensor] = []
        """Rows of these messages, as long as another batch is in the table."""

    def info(self, part: RowGroup) -> TransferInfo:
        """Return the description of a message of rows."""
        return TransferInfo(self.step, 0, self.exact, self._ids[part.rows], Lengths(part.size))

    def gradient_info(self, part: RowGroup) -> TransferInfo:
        """Return the description of a message of gradients."""
        return TransferInfo(self.step, 0, self.exact, lengths=Lengths(part.size))

    def until(self, group: int) -> int:
        """Return the number of messages with the rows of the groups before `group`."""
        return sum(part.group < group for part in self.groups.parts)


class TableOwner:
    """The rank that holds the table, and the channels to all ranks that look up its rows."""

    def __init__(self, weight: Weight, channels: Sequence[Channels], pacing: Pacing) -> None:
        self.weight = weight
        self._pacing = pacing
        self._ids_in = [Inbox(each[MessageKind.TABLE_IDS]) for each in channels]
        # a step must not wait for rows that the others need later
        self._rows_out = [Outbox(each[MessageKind.TABLE_ROWS], max_in_flight=math.inf) for each in channels]
        self._gradients_in = [Inbox(each[MessageKind.TABLE_GRADIENTS]) for each in channels]
        self._transfers: list[RowTransfer] = []
        """Those of the present step or evaluation, by rank."""

    def post_requests(self) -> None:
        """Post the receives of what the other ranks request."""
        for inbox in self._ids_in:
            inbox.post()

    def start(self, step: int, *, exact: bool) -> list[RowTransfer]:
        """Wait for the requests for a batch, and send the first rows; return the transfers, by rank."""
        transfers = []
        for inbox, rows_out in zip(self._ids_in, self._rows_out, strict=True):
            groups = RowGroups.unpack(inbox.receive(TransferInfo(step, 0)).state["ids"])
            transfers.append(RowTransfer(groups, step, exact=exact))
            self._send(transfers[-1], rows_out, FIRST)
        self.flush()
        return transfers

    def begin(self, transfers: list[RowTransfer]) -> None:
        """Send the other rows of a batch from now on."""
        self._transfers = transfers
        self.advance(0)

    def advance(self, forwards: int) -> None:
        """Send the rows that are due once this rank has run some forwards."""
        for transfer, rows_out in zip(self._transfers, self._rows_out, strict=True):
            self._send(transfer, rows_out, self._pacing.due(forwards))

    def post_gradients(self) -> None:
        """Post the receives of the gradients of a step."""
        for transfer, inbox in zip(self._transfers, self._gradients_in, strict=True):
            for _ in transfer.groups.end_parts:
                inbox.post()

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Wait for the gradients of the rows of this step, and add them to that of the table, in the order of ranks."""
        master = self.weight.master
        if master.grad is None:
            master.grad = torch.zeros_like(master)
        for transfer, inbox in zip(self._transfers, self._gradients_in, strict=True):
            groups = transfer.groups
            for part in groups.end_parts:
                gradient = inbox.receive(transfer.gradient_info(part)).state["gradient"]
                master.grad.index_add_(0, groups.ids[groups.by_end[part.rows]], gradient)

    def flush(self) -> None:
        """Pass all rows to the transport that are being encoded."""
        for rows_out in self._rows_out:
            rows_out.flush(wait=True)

    def drain(self) -> None:
        """Block until all rows are sent."""
        for rows_out in self._rows_out:
            rows_out.drain()

    def close(self) -> None:
        """End the threads of the channels."""
        for rows_out in self._rows_out:
            rows_out.close()

    def abort(self) -> None:
        """End the threads of the channels without sending or waiting for anything."""
        for outbox in self._rows_out:
            outbox.abort()
        for inbox in (*self._ids_in, *self._gradients_in):
            inbox.abort()

    def _send(self, transfer: RowTransfer, rows_out: Outbox, group: int) -> None:
        """Send the rows of the groups before `group`."""
        param, until = self.weight.param.detach(), transfer.until(group)
        for part in transfer.groups.parts[transfer.started : until]:
            rows_out.send(transfer.info(part), {"rows": param[transfer.groups.ids[part.rows]]})
        transfer.started = max(transfer.started, until)


class TableUser:
    """A rank that looks up rows of a table, and the channels to the owner of the table.

    stages: those of this rank that look up rows. inputs: names of the inputs of the model whose values are the indices.
    order_of: returns the order in which these stages run a number of micro-batches.
    """

    def __init__(
        self,
        table: LookupTable,
        stages: Collection[int],
        inputs: Sequence[str],
        order_of: Callable[[int], UseOrder],
        channels: Channels,
        pacing: Pacing,
    ) -> None:
        self._table = table
        self._stages = stages
        self._inputs = inputs
        self._order_of = order_of
        self._pacing = pacing
        self._ids_out = Outbox(channels[MessageKind.TABLE_IDS])
        self._rows_in = Inbox(channels[MessageKind.TABLE_ROWS])
        self._gradients_out = Outbox(channels[MessageKind.TABLE_GRADIENTS])
        self._requested: list[RowGroups] = []
        self._transfer: RowTransfer
        """That of the present step or evaluation."""
        self._order: UseOrder

    def request(self, inputs: Inputs, step: int) -> None:
        """Send the indices of the rows that a batch uses. inputs: of the model, [M, B, ...], on any device."""
        tokens = torch.cat([inputs[name].flatten(1) for name in self._inputs], dim=1)
        request = RowGroups.pack(tokens, self._order_of(len(tokens)), self._pacing.width)
        self._ids_out.send(TransferInfo(step, 0, lengths=Lengths(len(request))), {"ids": request})
        self._ids_out.flush(wait=True)
        self._requested.append(RowGroups.unpack(request.to(self._table.device)))

    def start(self, step: int, *, exact: bool) -> RowTransfer:
        """Post the receives of the first rows of the earliest request."""
        transfer = RowTransfer(self._requested.pop(0), step, exact=exact)
        self._post(transfer, FIRST)
        return transfer

    def begin(self, transfer: RowTransfer, micros: int) -> None:
        """Use the rows of a batch of `micros` micro-batches from now on."""
        self._ids_out.drain()
        self._order, self._transfer = self._order_of(micros), transfer
        self._table.reset(transfer.groups.ids)
        for part, rows in zip(transfer.groups.parts, transfer.waiting, strict=False):
            self._table.load(part.rows, rows)
        transfer.waiting.clear()
        self._post(transfer, self._pacing.ahead)

    def clear_gradient(self) -> None:
        """Clear the gradient of the rows."""
        self._table.clear_gradient()

    def awaits_rows(self, stage: int, micro: int) -> bool:
        """Return whether a forward needs rows that were not received yet."""
        return stage in self._stages and self._transfer.received < self._transfer.until(self._group(micro) + 1)

    def receive_rows(self, stage: int, micro: int) -> None:
        """Wait for the rows that a forward needs."""
        if stage not in self._stages:
            return
        transfer, group = self._transfer, self._group(micro)
        parts = transfer.groups.parts
        self._post(transfer, group + 1)
        for part in parts[transfer.received : transfer.until(group + 1)]:
            self._table.load(part.rows, self._receive(transfer))
        self._post(transfer, group + 1 + self._pacing.ahead)

    def after_backward(self, action: Action) -> None:
        """Send the gradients of the rows that no later micro-batch uses."""
        position = self._order.last_actions.get(action)
        if position is None:
            return
        is_last, (group, rest) = position == len(self._order.ends) - 1, divmod(position + 1, self._pacing.width)
        if rest and not is_last:
            return
        groups, complete = self._transfer.groups, group + bool(rest)
        for part in groups.end_parts:
            if part.group == complete - 1:
                gradient = self._table.gradient[groups.by_end[part.rows]]
                self._gradients_out.send(self._transfer.gradient_info(part), {"gradient": gradient})

    def receive_started(self, transfer: RowTransfer) -> None:
        """Wait for the rows whose receives are posted, so that those of another batch can follow."""
        while transfer.received < transfer.started:
            transfer.waiting.append(self._receive(transfer))

    def flush(self) -> None:
        """Pass all gradients to the transport that are being encoded."""
        self._gradients_out.flush(wait=True)

    def drain(self) -> None:
        """Block until all gradients are sent."""
        self._gradients_out.drain()

    def close(self) -> None:
        """End the threads of the channels."""
        for outbox in (self._ids_out, self._gradients_out):
            outbox.close()

    def abort(self) -> None:
        """End the threads of the channels without sending or waiting for anything."""
        for outbox in (self._ids_out, self._gradients_out):
            outbox.abort()
        self._rows_in.abort()

    def _group(self, micro: int) -> int:
        """Return the group of a micro-batch."""
        return self._order.starts[micro] // self._pacing.width

    def _post(self, transfer: RowTransfer, group: int) -> None:
        """Post the receives of the rows of the groups before `group`."""
        for _ in range(transfer.started, transfer.until(group)):
            self._rows_in.post()
            transfer.started += 1

    def _receive(self, transfer: RowTransfer) -> Tensor:
        part = transfer.groups.parts[transfer.received]
        transfer.received += 1
        return self._rows_in.receive(transfer.info(part)).state["rows"]
