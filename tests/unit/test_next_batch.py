"""Laws of the wait of all ranks for streamed data: an error of one ends it, and a long one is reported."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from acsgd.comm.waits import DIRECT
from acsgd.errors import RunError
from acsgd.io.checkpoint.progress import Progress
from acsgd.io.data.batches import Dataset
from acsgd.io.data.sources.streamed import Streamed
from acsgd.run.step import run
from acsgd.run.step.hooks import LoopState
from acsgd.run.step.run import STOP, NextBatch


class OtherRank:
    """Stands for `Vote`: rank 1 waits for data, until its read fails."""

    def __init__(self, failed: Callable[[], bool]) -> None:
        self._failed = failed
        self._before: list[bool] = []

    def cast(self, *votes: bool) -> list[bool]:
        others = [False, True, self._failed(), False, True]
        before, self._before = self._before, [any(pair) for pair in zip(votes, others, strict=True)]
        return before

    def settle(self) -> None:
        pass


def wait_with(
    other: OtherRank, read: Callable[..., Any], notes: list[str], monkeypatch: pytest.MonkeyPatch, timeout_s: float
) -> Dataset:
    """Wait for the first batch on rank 0 of two; return the batches."""

    def wait_for_all(name: str, *, timeout_s: float) -> None:
        raise RunError(f"{name}: rank 1 has failed")

    monkeypatch.setattr(run, "Vote", lambda _: other)
    monkeypatch.setattr(run, "POLL_S", 0.01)
    world = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    groups = SimpleNamespace(world=world, waits=DIRECT, wait_for_all=wait_for_all)
    config = SimpleNamespace(run=SimpleNamespace(timeout=timeout_s))
    job = SimpleNamespace(sources=[(object.__new__(Streamed), 1.0)], config=config)
    session: Any = SimpleNamespace(job=job, groups=groups)
    reader, signals = SimpleNamespace(batch=read), SimpleNamespace(received=None)
    hook = NextBatch(session, reader, lambda _: range(1), signals, STOP, notes.append)  # type: ignore[arg-type]
    batches = hook.open(range(3))
    hook.before_step(LoopState(Progress(2)))
    return batches


def test_the_error_of_a_read_is_raised_while_another_rank_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        raise RunError("the source has ended")

    batches = wait_with(OtherRank(lambda: False), read, [], monkeypatch, 60.0)
    with batches, pytest.raises(RunError, match="the source has ended"):
        next(batches)


def test_ranks_that_wait_are_named_after_a_timeout_and_end_with_one_whose_read_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notes, end = list[str](), threading.Event()
    try:
        with pytest.raises(RunError, match="reading streamed data: rank 1 has failed"):
            wait_with(OtherRank(lambda: bool(notes)), lambda *_: end.wait(60), notes, monkeypatch, 0.05)
    finally:
        end.set()
    assert notes == ["step 2: after 0.05 s, ranks 0, 1 wait for streamed data"]
