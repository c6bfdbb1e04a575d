"""What a rank that joins in the background requests, when its run returns to an earlier step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from acsgd.elastic.joins import JoiningRank
from acsgd.elastic.state_channel import StateReceiver
from acsgd.optim.base import Optimizer
from acsgd.optim.replay import ReplayOptimizer
from acsgd.run.control import StepSummary
from acsgd.run.session import Session

LAYERS = 2


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
    job, receiver = SimpleNamespace(topology=SimpleNamespace(rank=0)), Receiver()
    session = cast(Session, SimpleNamespace(optimizer=optimizer, layers=layers, job=job))
    rank = JoiningRank(session, 1, cast(StateReceiver, receiver), limit_bytes=0)

    def step() -> None:
        rank.after_step(cast(StepSummary, SimpleNamespace(wanted=[rank.wanted])))

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
