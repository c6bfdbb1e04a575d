"""What one host's workers hold while they are stopped, and the hosts to which it promises that."""

from __future__ import annotations

from acsgd.elastic.effects import Outbox, StopWorkers
from acsgd.elastic.messages import Host, Prepare, Promise
from acsgd.elastic.plan import WorkerState


class Promises:
    """Answers requests to stop this host's workers, once they have stopped."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._states: dict[str, WorkerState] | None = None
        self._prepare: Prepare | None = None
        self._waiting: dict[str, tuple[Host, int]] = {}  # by id, hosts that wait for a promise, and its epoch

    @property
    def are_stopped(self) -> bool:
        """Whether the workers are stopped."""
        return self._states is not None

    @property
    def is_requested(self) -> bool:
        """Whether a host has requested to stop them."""
        return self._prepare is not None

    def take_states(self, states: dict[str, WorkerState]) -> None:
        """Take the states of the workers, which have stopped."""
        self._states = states
        for host, epoch in self._waiting.values():
            self._outbox.send(host, Promise(epoch, states))
        self._waiting.clear()

    def take_request(self, sender: Host, prepare: Prepare) -> None:
        """Take a request to stop the workers, at once if it is more urgent than the ones before."""
        is_new = self._prepare is None or (self._prepare.at_step_end and not prepare.at_step_end)
        self._prepare = prepare if is_new else self._prepare
        if self._states is not None:
            self._outbox.send(sender, Promise(prepare.epoch, self._states))
            return
        self._waiting[sender.id] = sender, prepare.epoch
        if is_new:
            self._outbox.add(StopWorkers(prepare.at_step_end))

    def reset(self) -> None:
        """Note that the workers run a new view."""
        self._states = self._prepare = None
        self._waiting.clear()
