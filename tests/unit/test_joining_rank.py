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
from acsgd.dp.modes.local import Local
from acsgd.dp.sync import Mode
from acsgd.elastic import hooks
from acsgd.elastic.hooks import JoinProgress
from acsgd.elastic.membership.assignment import Transfer
from acsgd.elastic.membership.plan import Plan
from acsgd.elastic.state import joins
from acsgd.elastic.state.channel import StateReceiver, StateSender
from acsgd.elastic.state.joins import JoiningRank, ReceivedState, StateSource
from acsgd.errors import CorruptFileError
from acsgd.groups import Groups
from acsgd.host_memory import HostMemory
from acsgd.io.checkpoint.progress import Progress
from acsgd.optim.base import Optimizer
from acsgd.optim.ownership import OwnedWeights, Ownership
from acsgd.optim.replay import ReplayOptimizer
from acsgd.run.plan.job import Job
from acsgd.run.report import MICROS, StepSummary
from acsgd.run.session import Session
from acsgd.run.setup.build import DeferredConstants
from acsgd.run.step.hooks import LoopState
from acsgd.shards.load import LoadedLayer

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
    rank = JoiningRank(session, 1, cast(StateReceiver, receiver), constants, limit_bytes=0, members=[0])

    other = JoiningRank(session, 1, cast(StateReceiver, receiver), constants, limit_bytes=0, members=[1, 0])
    assert other.is_pending
    assert other.wanted is None, "rank 1 of its host requests what both get"

    def step() -> None:
        rank.after_step([rank.wanted])

    for _ in range(LAYERS):
        step()
    assert rank.is_pending
    assert rank.wanted is None, "all layers are requested"
    rank.restart([1])
    assert rank.wanted is None, "another host lacks state"
    rank.restart([0])
    assert rank.wanted == 0
    receiver.messages = [b"of the step before the return"] * LAYERS  # which cannot be loaded
    for _ in range(LAYERS):
        step()
    assert rank.is_pending
    assert not receiver.messages


@pytest.mark.parametrize(
    ("ranks", "holders", "members"),
    [
        ("a/0 a/1 b/0 b/1", {2: 0, 3: 0}, {2: [2, 3], 3: [2, 3]}),
        ("a/0 b/0 c/0 d/0", {2: 0, 3: 1}, {2: [2], 3: [3]}),
    ],
    ids=["one host", "two hosts"],
)
def test_state_reaches_a_host_once(ranks: str, holders: dict[int, int], members: dict[int, list[int]]) -> None:
    """And with several hosts, each from another replica."""
    transfers = tuple(Transfer((0,), 0, target) for target in (2, 3))
    plan = Plan(1, tuple(ranks.split()), holders=(ranks.split()[0], ranks.split()[1]), transfers=transfers)
    assert joins._possible_sources(plan) == holders
    assert joins._members(plan, holders) == members


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
    return JoiningRank(session, 1, receiver, cast(DeferredConstants, constants), limit_bytes=0, members=[0])


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


@pytest.mark.parametrize(("mode", "copied"), [(AllReduce(), [1]), (Local(), [0, 1])])
def test_a_source_copies_layers_once_for_all_ranks_that_join(
    mode: Mode, copied: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies, sent = list[int](), {1: list[bytes](), 2: list[bytes]()}

    def message(_: Session, layer: LoadedLayer, *, rounds_moments: bool) -> bytes:
        copies.append(layer.spec.index)
        return bytes([layer.spec.index])

    monkeypatch.setattr(joins, "layer_message", message)
    layers = [SimpleNamespace(spec=SimpleNamespace(index=index)) for index in range(LAYERS)]
    config = SimpleNamespace(elastic=SimpleNamespace(join_rate=1.0, join_moments="exact"))
    job = SimpleNamespace(config=config, plugins=SimpleNamespace(mode=mode))
    senders = {rank: SimpleNamespace(error=None, limit=print, compresses=True, send=sent[rank].append) for rank in sent}
    source = StateSource(
        cast(Session, SimpleNamespace(layers=layers, job=job)), cast(dict[int, StateSender], senders), {}
    )
    source.after_step([None, 1, 1])
    assert copies == copied
    assert sent[1] == sent[2] == [bytes([layer]) for layer in copied]


@pytest.mark.parametrize(
    ("mode", "available", "fits"), [(AllReduce(), 0, True), (Local(), 99, False), (Local(), 200, True)]
)
def test_a_source_without_memory_for_copies_of_all_layers_sends_them_before_training_continues(
    mode: Mode, available: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"state_bytes": 100, "measure_link": 7.0}.items():
        monkeypatch.setattr(joins, name, lambda *_, value=value: value)
    monkeypatch.setattr(joins, "host_memory", lambda: HostMemory(2**40, available, 0, False))
    layers = [SimpleNamespace(spec=SimpleNamespace(index=index)) for index in range(LAYERS)]
    plugins = SimpleNamespace(mode=mode)
    job = SimpleNamespace(
        topology=SimpleNamespace(rank=0), plugins=plugins, layout=SimpleNamespace(layers=[0, 1]), local_world_size=1
    )
    session = cast(Session, SimpleNamespace(layers=layers, job=job))
    groups = SimpleNamespace(world=None, timeout_s=1.0, all_gather_text=lambda _, text, **__: [text, "0.0 1.0 1.0"])
    seconds, _ = joins._measure(session, cast(Job, job), cast(Groups, groups), {1: 0}, cast(joins.Constants, None))
    assert seconds == (8.0 if fits else 0.0)


def test_a_host_prints_its_state_as_it_arrives_and_its_first_step_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [10.0]
    monkeypatch.setattr(hooks, "time", SimpleNamespace(monotonic=lambda: now[0]))
    constants = Constants()
    joining = joining_rank(constants)
    joining.received = lambda: ReceivedState(1, 3, 2_500_000)  # type: ignore[method-assign]
    progress, state = JoinProgress("r", started_at=4.0), LoopState(Progress())
    progress.wait_as_spare()
    progress.wait_as_spare()
    progress.enter_view(1, 0, joining)

    def step(number: int, micros: float) -> None:
        now[0] += 6
        state.progress = Progress(step=number)
        state.summary = cast(StepSummary, {MICROS: [[2.0, 2.0], [micros, micros]]})
        progress.before_next(state)

    step(7, 0)
    step(8, 0)
    constants.may_end.set()
    step_until(joining, lambda: not joining.is_pending)
    step(9, 0)
    progress.enter_view(1, 0, None)
    step(10, 1)
    step(11, 1)
    assert capsys.readouterr().err.splitlines() == [
        "run r: waiting as a spare after 6.0 s",
        "run r: 1 of 3 layers (2.5 MB) are here after 18.0 s",
        "run r: all state (2.5 MB) is here after 24.0 s",
        "run r: first step (10) after 30.0 s",
    ]
