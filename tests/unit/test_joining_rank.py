"""What a rank that joins in the background requests, and when it has all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from lib.patience import NO_LIMIT_S, Patience

from acsgd.dp.modes.allreduce import AllReduce
from acsgd.elastic.state.channel import StateReceiver
from acsgd.elastic.state.joins import JoiningRank
from acsgd.errors import CorruptFileError
from acsgd.optim.base import Optimizer
from acsgd.optim.ownership import OwnedWeights, Ownership
from acsgd.optim.replay import ReplayOptimizer
from acsgd.run.session import Session
from acsgd.run.setup.build import DeferredConstants

LAYERS = 2
LIMIT_S = 30.0


class Receiver:
    """Stands for the connection to the source. messages: that have arrived."""

    error = None

    def __init__(self) -> None:
        self.messages: list[bytes] = []

    def take(self) -> bytes | None:
        return self.messages.pop(0) if self.messages else None

    def close(self) -> None:
        raise AssertionError("it is closed before all layers have arrived")


def test_a_return_while_the_last_layers_are_on_their_way_requests_all_again_and_skips_what_arrives() -> None:
    optimizer = ReplayOptimizer(cast(Optimizer, None), lambda weights: cast(Optimizer, None))
    layers = [SimpleNamespace(spec=SimpleNamespace(index=index), weights=[]) for index in range(LAYERS)]
    plugins, receiver = SimpleNamespace(mode=AllReduce()), Receiver()
    job = SimpleNamespace(topology=SimpleNamespace(rank=0), plugins=plugins)
    owned = OwnedWeights([], Ownership(0, 1))
    session = cast(Session, SimpleNamespace(optimizer=optimizer, owned=owned, layers=layers, job=job))
    constants = cast(DeferredConstants, SimpleNamespace(load=lambda: None, is_complete=True))
    rank = JoiningRank(session, 1, cast(StateReceiver, receiver), constants, limit_bytes=0)

    def step() -> None:
        rank.after_step([rank.wanted])

    for _ in range(LAYERS):
        step()
    assert rank.is_pending
    assert rank.wanted is None, "all layers are requested"
    rank.restart()
    assert rank.wanted == 0
    receiver.messages = [b"of the step before the return"] * LAYERS  # which cannot be loaded
    for _ in range(LAYERS):
        step()
    assert rank.is_pending
    assert not receiver.messages


class Constants:
    """Constants that are read when the test says so."""

    def __init__(self, error: Exception | None = None) -> None:
        self.is_complete = False
        self.may_end = threading.Event()
        self._error = error

    def load(self) -> None:
        self.may_end.wait(NO_LIMIT_S)
        if self._error is not None:
            raise self._error
        self.is_complete = True


def joining_rank(constants: Constants) -> JoiningRank:
    """Return a rank of a session without layers, which misses nothing but its constants."""
    optimizer = ReplayOptimizer(cast(Optimizer, None), lambda weights: cast(Optimizer, None))
    job = SimpleNamespace(topology=SimpleNamespace(rank=0))
    session = cast(Session, SimpleNamespace(optimizer=optimizer, layers=[], job=job))
    receiver = cast(StateReceiver, SimpleNamespace(take=lambda: None, close=lambda: None))
    return JoiningRank(session, 1, receiver, cast(DeferredConstants, constants), limit_bytes=0)


def step_until(rank: JoiningRank, is_done: Callable[[], bool]) -> None:
    patience = Patience(LIMIT_S)
    while not is_done():
        assert not patience.is_over
        rank.after_step([None])
        time.sleep(0.01)


def test_it_joins_when_its_constants_are_read() -> None:
    constants = Constants()
    rank, steps = joining_rank(constants), iter(range(3))
    step_until(rank, lambda: next(steps) == 2)
    assert rank.is_pending
    constants.may_end.set()
    step_until(rank, lambda: not rank.is_pending)


def test_a_corrupt_file_of_constants_ends_it() -> None:
    constants = Constants(CorruptFileError(Path("embed.safetensors"), "is corrupt"))
    constants.may_end.set()
    with pytest.raises(CorruptFileError, match=r"embed\.safetensors is corrupt"):
        step_until(joining_rank(constants), lambda: False)
