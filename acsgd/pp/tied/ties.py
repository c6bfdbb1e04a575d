"""The tied weights of one rank that other ranks use, too, through a training step and an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from acsgd.layers.composed import Inputs
from acsgd.pp.schedules.actions import Action
from acsgd.pp.tied.dense import TiedGroup, sum_tied_gradients
from acsgd.pp.tied.rows import RowTransfer, TableOwner, TableUser


class Batch(Protocol):
    """Data of one step, as ranks need them that use rows of tables."""

    @property
    def inputs(self) -> Inputs | None:
        """Inputs of the model by name, [M, B, ...], on ranks that need their values."""
        ...

    @property
    def sample_ids(self) -> Tensor:
        """int64 [M, B], on the host: one id per sequence of the data."""
        ...

    @property
    def upcoming(self) -> Batch | None:
        """The batch of the next step; None if it is not known yet, or if there is none."""
        ...


class _Request(NamedTuple):
    """Identity of the batch whose rows are requested, which all ranks know."""

    step: int
    samples: tuple[int, ...]

    @classmethod
    def of(cls, batch: Batch, step: int) -> _Request:
        return cls(step, tuple(batch.sample_ids.flatten().tolist()))


class _Transfers(NamedTuple):
    """The rows of a batch on their way."""

    request: _Request
    users: list[RowTransfer]
    """By table of which this rank receives rows."""
    owners: list[list[RowTransfer]]
    """By table of which this rank sends rows."""


class Ties:
    """Tied weights of one rank.

    Rows of a step are requested in the step before, and the first of them are sent as soon as that has updated them. If
    the batch was not known in the step before, they are requested when the step begins.

    Args:
        copies: weights of which this rank has a copy
        owners: tables of which this rank sends rows
        users: tables of which this rank receives rows
        exact_steps: number of initial steps that send without codecs
        exact_eval: whether evaluations send without codecs
    """

    def __init__(
        self,
        copies: Sequence[TiedGroup] = (),
        owners: Sequence[TableOwner] = (),
        users: Sequence[TableUser] = (),
        *,
        exact_steps: int = 0,
        exact_eval: bool = True,
    ) -> None:
        self._copies = copies
        self._owners = owners
        self._users = users
        self._all: list[TiedGroup | TableOwner | TableUser] = [*copies, *owners, *users]
        self._exact_steps = exact_steps
        self._exact_eval = exact_eval
        self._loaded: _Request | None = None
        """Batch of a step whose rows are in the tables."""
        self._requested: _Request | None = None
        """Batch whose rows will be sent after this step."""
        self._ahead: _Transfers | None = None
        """Batch whose first rows were sent after the last step."""
        self._forwards = 0
        """Number of forwards of this rank in the present step or evaluation."""

    def begin_step(self, batch: Batch, step: int) -> None:
        """Begin to use the rows of a batch, and request those of the next one."""
        present, ahead, micros = _Request.of(batch, step), self._ahead, len(batch.sample_ids)
        if ahead is not None and ahead.request != present:
            self.settle()
        if ahead is not None and ahead.request == present:
            self._begin(ahead, micros)
        elif self._loaded != present:
            self._begin(self._fetch(batch, step, exact=step < self._exact_steps), micros)
        self._loaded, self._ahead, self._forwards = present, None, 0
        if micros:
            for user in self._users:
                user.clear_gradient()
            for owner in self._owners:
                owner.post_gradients()
        upcoming = batch.upcoming
        if upcoming is not None and len(upcoming.sample_ids) and self._requested is None:
            self._request(upcoming, step + 1)
            self._requested = _Request.of(upcoming, step + 1)

    def begin_evaluation(self, batch: Batch, step: int) -> None:
        """Begin to use the rows of a batch of an evaluation. The next step uses its own again."""
        self.settle()
        self._begin(self._fetch(batch, step, exact=self._exact_eval), len(batch.sample_ids))
        self._loaded, self._forwards = None, 0

    def send_rows(self) -> None:
        """Send the rows that are due after the forwards so far.

        To be called before the next forward of this rank, so that they do not travel ahead of the last one's messages.
        """
        for owner in self._owners:
            owner.advance(self._forwards)

    def awaits_rows(self, stage: int, micro: int) -> bool:
        """Return whether a forward needs rows that were not received yet."""
        return any(user.awaits_rows(stage, micro) for user in self._users)

    def receive_rows(self, stage: int, micro: int) -> None:
        """Wait for the rows that a forward needs."""
        for user in self._users:
            user.receive_rows(stage, micro)

    def after_forward(self) -> None:
        """Count a forward of the last stage of this rank, by which rows are paced."""
        self._forwards += 1

    def after_backward(self, action: Action) -> None:
        """Send the gradients of rows that are complete after a backward."""
        for user in self._users:
            user.after_backward(action)

    def add_gradients(self, batch: Batch) -> None:
        """Add the gradients of the ranks that look up rows to those of the tables of this rank."""
        if not len(batch.sample_ids):
            return
        for owner in self._owners:
            owner.add_gradients()
            owner.drain()
        for user in self._users:
            user.drain()

    def sum_copies(self, step: int) -> None:
        """Sum the gradients of the copies of each weight, after the reduction over replicas."""
        sum_tied_gradients(self._copies, step)

    def send_ahead(self) -> None:
        """Send the first rows of the next step, which this step has updated, if they were requested."""
        if self._requested is not None:
            step = self._requested.step
            self._ahead = self._start(self._requested, step, exact=step < self._exact_steps)
            self._requested = None

    def settle(self) -> None:
        """Wait for the rows that `send_ahead` sends. All ranks of a pipeline do so together."""
        if self._ahead is None:
            return
        for user, transfer in zip(self._users, self._ahead.users, strict=True):
            user.receive_started(transfer)
        for owner in self._owners:
            owner.drain()

    def flush(self) -> None:
        """Pass all messages to the transport that are being encoded."""
        for owner in self._owners:
            owner.flush()
        for user in self._users:
            user.flush()

    def close(self) -> None:
        """End all threads."""
        for each in self._all:
            each.close()

    def abort(self) -> None:
        """End all threads without sending or waiting for anything."""
        for each in self._all:
            each.abort()

    def _fetch(self, batch: Batch, step: int, *, exact: bool) -> _Transfers:
        """Request the rows of a batch when they are needed."""
        request = _Request.of(batch, step)
        if not len(batch.sample_ids):
            return _Transfers(request, [], [])
        self._request(batch, step)
        return self._start(request, step, exact=exact)

    def _request(self, batch: Batch, step: int) -> None:
        for owner in self._owners:
            owner.post_requests()
        for user in self._users:
            assert batch.inputs is not None, "this rank reads no inputs"
            user.request(batch.inputs, step)

    def _start(self, request: _Request, step: int, *, exact: bool) -> _Transfers:
        users = [user.start(step, exact=exact) for user in self._users]
        return _Transfers(request, users, [owner.start(step, exact=exact) for owner in self._owners])

    def _begin(self, transfers: _Transfers, micros: int) -> None:
        if micros:
            for user, transfer in zip(self._users, transfers.users, strict=True):
                user.begin(transfer, micros)
            for owner, of_owner in zip(self._owners, transfers.owners, strict=True):
                owner.begin(of_owner)
