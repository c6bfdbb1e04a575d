"""The tied weights that one rank shares with others: their messages in a training step and in an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from acsgd.layers.batch import Batch
from acsgd.pp.schedules.actions import Action
from acsgd.pp.tied.dense import TiedGroup, sum_tied_gradients
from acsgd.pp.tied.rows import RowTransfer, TableOwner, TableUser
from acsgd.pp.wire.coder import CodecChoice, CodecIndices
from acsgd.pp.wire.link import AnyInbox, AnyOutbox


class _Request(NamedTuple):
    """Identity of the batch whose rows are requested, which all ranks know."""

    step: int
    micros: int
    samples: tuple[int, ...]

    @classmethod
    def of(cls, batch: Batch, step: int) -> _Request:
        return cls(step, len(batch.sample_ids), tuple(batch.sample_ids.flatten().tolist()))


class Ties:
    """Tied weights of one rank.

    Rows of a step are requested in the step before, and the first of them are sent as soon as that has updated them. If
    the batch was not known in the step before, they are requested when the step begins. All others are sent and
    received by the actions of the step; which ones, depends on the batch.

    Args:
        copies: weights of which this rank has a copy
        owners: tables of which this rank sends rows, once for each rank that gets them
        users: tables of which this rank receives rows
        codecs: chooses the codecs of rows and of their gradients
    """

    def __init__(
        self,
        copies: Sequence[TiedGroup],
        owners: Sequence[TableOwner],
        users: Sequence[TableUser],
        codecs: CodecChoice,
    ) -> None:
        self._copies = copies
        self._owners = owners
        self._users = users
        self._tables: list[TableOwner | TableUser] = [*users, *owners]
        self._codecs = codecs
        self.elements = 0, 0
        """Number of elements of the rows that this rank gets in a step: of the first group, and of all."""
        self._loaded: _Request | None = None
        """Batch of a step whose rows are in the tables."""
        self._requested: _Request | None = None
        """Batch whose rows will be sent after this step."""
        self._ahead: tuple[_Request, list[RowTransfer]] | None = None
        """Batch whose first rows were sent after the last step, and its transfers by table."""

    @property
    def width(self) -> int:
        """Number of elements of the longest row of a table that this rank sends or receives; 0 = there is none."""
        return max((table.width for table in self._tables), default=0)

    @property
    def outboxes(self) -> list[AnyOutbox]:
        """Sending ends of all channels."""
        return [outbox for each in (*self._copies, *self._tables) for outbox in each.outboxes]

    @property
    def inboxes(self) -> list[AnyInbox]:
        """Receiving ends of all channels."""
        return [inbox for each in (*self._copies, *self._tables) for inbox in each.inboxes]

    def begin_step(self, batch: Batch, step: int) -> None:
        """Begin to use the rows of a batch, and request those of the next one."""
        present, ahead = _Request.of(batch, step), self._ahead
        if ahead is not None and ahead[0] != present:
            self.settle()
        if ahead is not None and ahead[0] == present:
            self._begin(ahead[1])
        elif self._loaded != present:
            self._begin(self._fetch(batch, step, self._codecs.of_step(step)))
        self._loaded, self._ahead = present, None
        if present.micros:
            for user in self._users:
                user.clear_gradient()
            first, all_rows = (sum(each) for each in zip((0, 0), *(user.elements for user in self._users), strict=True))
            self.elements = first, all_rows
        upcoming = batch.upcoming
        if upcoming is not None and len(upcoming.sample_ids) and self._requested is None:
            self._request(upcoming, step + 1)
            self._requested = _Request.of(upcoming, step + 1)

    def begin_evaluation(self, batch: Batch, step: int) -> None:
        """Begin to use the rows of a batch of an evaluation. The next step uses its own again."""
        self.settle()
        self._begin(self._fetch(batch, step, self._codecs.of_evaluation()))
        self._loaded = None

    def perform(self, action: Action) -> None:
        """Send rows or gradients of rows, or post their receives, as an action says."""
        for table in self._tables:
            if {*table.route} == {action.stage, action.other} and action.op in table.handlers:
                table.handlers[action.op](action.micro)

    def receive_rows(self, forward: Action, before_wait: Callable[[], None]) -> None:
        """Wait for the rows that a forward needs. before_wait: called if they were not received yet."""
        for user in self._users:
            if user.route.user == forward.stage:
                user.receive_rows(forward.micro, before_wait)

    def add_gradients(self, stage: int) -> None:
        """Add the gradients of rows that other ranks looked up to the gradients of the tables of a stage."""
        for owner in self._owners:
            if owner.route.owner == stage:
                owner.add_gradients()

    def sum_copies(self, step: int) -> None:
        """Sum the gradients of the copies of each weight, after the reduction over replicas."""
        sum_tied_gradients(self._copies, step)

    def send_ahead(self) -> None:
        """Send the first rows of the next step, which this step has updated, if they were requested."""
        if self._requested is not None:
            codecs = self._codecs.of_step(self._requested.step)
            self._ahead = self._requested, self._start(self._requested, codecs)
            self._requested = None

    def settle(self) -> None:
        """Wait for the rows that `send_ahead` sends. Collective: all ranks of a pipeline call it together."""
        if self._ahead is not None:
            for table, transfer in zip(self._tables, self._ahead[1], strict=True):
                table.settle(transfer)

    def discard_ahead(self) -> None:
        """Wait for the rows that `send_ahead` sends, and forget them: the weights have changed. Collective."""
        self.settle()
        self._ahead = None

    def close(self) -> None:
        """End all threads."""
        for outbox in self.outboxes:
            outbox.close()

    def abort(self) -> None:
        """End all threads without sending or waiting for anything."""
        for outbox in self.outboxes:
            outbox.abort()
        for inbox in self.inboxes:
            inbox.abort()

    def _fetch(self, batch: Batch, step: int, codecs: CodecIndices) -> list[RowTransfer]:
        """Request the rows of a batch when they are needed."""
        if not len(batch.sample_ids):
            return []
        self._request(batch, step)
        return self._start(_Request.of(batch, step), codecs)

    def _request(self, batch: Batch, step: int) -> None:
        for table in reversed(self._tables):  # the owners post their receives first
            table.request(batch.inputs, step)

    def _start(self, request: _Request, codecs: CodecIndices) -> list[RowTransfer]:
        return [table.start(request.micros, request.step, codecs.tied) for table in self._tables]

    def _begin(self, transfers: list[RowTransfer]) -> None:
        for table, transfer in zip(self._tables, transfers, strict=False):  # none without micro-batches
            table.begin(transfer)
