"""What a rank keeps of the newest steps, from which the new rank of a lost position repeats them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from acsgd.elastic.replay_plan import LoggedSteps
from acsgd.pp.wire.frame import Header
from acsgd.run.control import StepSummary


class Position(NamedTuple):
    """The place of a rank in a pipeline."""

    number: int
    stages: int
    """Ranks per pipeline."""


@dataclass
class _Step:
    """What a rank keeps of one step."""

    messages: list[tuple[int, Tensor]] = field(default_factory=list)
    """Those that it has sent, with the rank to which, in the order in which they were sent."""
    summary: StepSummary | None = None
    """Of the reports of all ranks; None until the step is complete."""


class ReplayLog:
    """The messages that a rank has sent in the newest steps, and the summary of all reports of each.

    A `MessageLog` and a `StepLog`. It keeps no more than `limit_bytes` of messages, those of the newest steps.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        """Size of the messages, bytes."""
        self._steps: dict[int, _Step] = {}
        self._position: Position | None = None
        """That of this rank in these steps; None = it logs nothing."""
        self._epoch = self._first = 0
        """As of LoggedSteps."""
        self._end = 0
        """Number of steps up to the last complete one."""
        self.limit_bytes = 0
        """Maximum size of the messages, bytes."""
        self._sent_bytes = Counter[int]()
        """Size of the messages of each step that is not complete."""
        self._step_bytes = 0
        """Size of the messages of the largest complete step, whether it is in the log or not."""

    @property
    def capacity(self) -> float | None:
        return self.limit_bytes / self._step_bytes if self._step_bytes else None

    @property
    def num_steps(self) -> int:
        return self._end - self._first

    def open(self, epoch: int, step: int, position: Position, limit_bytes: int, *, is_continued: bool = False) -> None:
        """Log the steps of a view with one replica, from step `step` on.

        is_continued: whether the run has not returned to an earlier step. Then the steps before are kept, too, if they
        are logged up to this one.
        """
        if not is_continued or self._position != position or self._end != step:
            self.close()
            self._epoch, self._position, self._first, self._end = epoch, position, step, step
        self.limit_bytes = limit_bytes
        self.return_to(step)  # drops what was sent ahead

    def close(self) -> None:
        """Drop all steps, and log no more."""
        self._steps.clear()
        self._sent_bytes.clear()
        self.nbytes, self._step_bytes, self._position = 0, 0, None

    def add(self, peer: int, header: Header, message: Tensor) -> None:
        if self._position is None:
            return
        self._sent_bytes[header.step] += len(message)
        if header.step >= self._first:
            self._steps.setdefault(header.step, _Step()).messages.append((peer, message.clone()))
            self.nbytes += len(message)
            while self.nbytes > self.limit_bytes:
                self.drop_before(min(self._steps) + 1)

    def complete(self, step: int, summary: StepSummary) -> None:
        if self._position is None:
            return
        self._step_bytes = max(self._step_bytes, self._sent_bytes.pop(step, 0))
        if step >= self._first:
            self._steps.setdefault(step, _Step()).summary = summary
            self._end = step + 1

    def report(self, *, ready: bool) -> LoggedSteps | None:
        """Return what the worker reports of the log. ready: whether it has sent all messages of the next step."""
        if self._position is None:
            return None
        return LoggedSteps(self._epoch, self._position.stages, self._first, self._end + ready)

    def messages_to(self, peer: int, step: int) -> list[Tensor]:
        """Return the messages of a step to a rank, in the order in which they were sent."""
        return [message for to, message in self._steps[step].messages if to == peer]

    def summary(self, step: int) -> StepSummary:
        """Return the summary of all reports of a complete step."""
        summary = self._steps[step].summary
        assert summary is not None
        return summary

    def drop_before(self, step: int) -> None:
        """Drop the steps before one."""
        self._first, self._end = max(self._first, step), max(self._end, step)
        self._drop([each for each in self._steps if each < step])

    def return_to(self, step: int) -> None:
        """Drop the steps after the first `step` ones."""
        self._first, self._end = min(self._first, step), min(self._end, step)
        self._sent_bytes.clear()
        self._drop([each for each in self._steps if each >= step])

    def _drop(self, steps: list[int]) -> None:
        for step in steps:
            self.nbytes -= sum(len(message) for _, message in self._steps.pop(step).messages)
