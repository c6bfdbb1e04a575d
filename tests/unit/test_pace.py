"""Laws of dealing by speed and of naming slow ranks, as functions of measured times."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from acsgd.dp.modes.diloco import DiLoCo
from acsgd.io.checkpoint.progress import Progress
from acsgd.io.telemetry.record import RunEvent
from acsgd.pp.schedules.schedules import OneFOneB
from acsgd.run.session import Session
from acsgd.run.step.hooks import LoopState
from acsgd.run.step.pace import MIN_GAIN, NORMAL, PATIENCE, SLOW, WINDOW, Dealer, Pace, SpeedChange, Stragglers
from acsgd.topology import Topology


def counts_over(dealer: Dealer, times: Iterable[Sequence[float]]) -> list[list[int]]:
    """Return the micro-batches of each replica at first and after each change."""
    return [dealer.counts, *(dealer.counts for of_step in times if dealer.record(of_step))]


def test_a_slow_replica_gets_as_many_micro_batches_as_it_computes_in_the_time_of_the_others() -> None:
    assert counts_over(Dealer(14, 3, 0.0), [(1.0, 3.0, 1.0)] * 50) == [[4, 5, 5], [6, 2, 6]]
    assert counts_over(Dealer(8, 2, 0.0), [(1.0, 1.0)] * 20 + [(3.0, 1.0)] * 20 + [(1.0, 1.0)] * 20) == [
        [4, 4],
        [2, 6],
        [4, 4],
    ]


def test_filling_the_pipeline_counts() -> None:
    """That takes the slow replica 9 s: 4 of 16 micro-batches, as without it, are too many."""
    assert counts_over(Dealer(16, 2, 3.0), [(3.0, 1.0)] * 9)[-1] == [2, 14]


def test_measurements_that_vary_by_less_than_the_gain_change_nothing() -> None:
    """A replica computes at most (1 + v) / (1 - v) times as fast as another, so no split saves more than MIN_GAIN."""
    generator, v = random.Random(0), MIN_GAIN / 2
    varying = [[1 + generator.uniform(-v, v) for _ in range(3)] for _ in range(1000)]
    assert counts_over(Dealer(300, 3, 0.0), varying) == [[100] * 3]


def test_single_slow_steps_change_nothing() -> None:
    times = [(9.0, 1.0) if step % WINDOW == 0 else (1.0, 1.0) for step in range(100)]
    assert counts_over(Dealer(8, 2, 0.0), times) == [[4, 4]]


def test_steps_of_a_replica_without_micro_batches_change_nothing() -> None:
    assert counts_over(Dealer(8, 2, 0.0), [(0.0, 1.0)] * 20) == [[4, 4]]


def test_replicas_without_state_get_nothing_and_the_others_an_even_split() -> None:
    dealer = Dealer(8, 3, 0.0)
    dealer.deal_evenly(without=(1,))
    assert dealer.counts == [4, 0, 4]
    assert counts_over(dealer, [(1.0, 0.0, 3.0)] * 20) == [[4, 0, 4]]
    dealer.deal_evenly(without=())
    assert dealer.counts == Dealer(8, 3, 0.0).counts


def session_of(topology: object, *, mode: object = None, groups: object = None, members: Sequence[int] = ()) -> Session:
    """Return a session of two replicas of 8 micro-batches in all, as far as their pace depends on it.

    members: replicas of the domain.
    """
    job = SimpleNamespace(
        topology=topology,
        config=SimpleNamespace(data=SimpleNamespace(deal="even")),
        plugins=SimpleNamespace(schedule=OneFOneB(), mode=mode),
        shapes=SimpleNamespace(num_micros=8),
        micros_per_replica=4,
    )
    return cast(Session, SimpleNamespace(job=job, groups=groups, peers=SimpleNamespace(members=members)))


@pytest.mark.parametrize(
    ("members", "idle", "micros"), [((1,), (), range(8)), ((0, 1), (), range(4, 8)), ((0, 1), (0,), range(8))]
)
def test_in_redundant_steps_a_domain_gets_all_micro_batches(
    members: Sequence[int], idle: Sequence[int], micros: range
) -> None:
    """After them, an even share of all replicas."""
    topology = SimpleNamespace(replica=1, replicas=2, stages=1)
    session = session_of(topology, mode=DiLoCo(redundant_steps=3), members=members)
    pace = Pace(session, lambda _: None, idle=idle)
    assert [pace.micros(step) for step in range(4)] == [micros] * 3 + [range(0 if idle else 4, 8)]
    others = Pace(session, lambda _: None, idle=(1,))
    assert not any(others.micros(step) for step in range(4))


def test_replicas_that_are_ready_when_the_run_returns_to_a_step_get_micro_batches_in_it() -> None:
    """They take part in its exchanges."""
    events = list[RunEvent]()
    pace = Pace(session_of(SimpleNamespace(replica=1, replicas=2, stages=1)), events.append, idle=(1,))
    pace.at_return(LoopState(Progress(), idle=[1]))
    assert not pace.micros(0)
    assert not events
    pace.at_return(LoopState(Progress(), idle=[]))
    assert pace.micros(0) == range(4, 8)
    assert [event.fields for event in events] == [{"ready": [1], "micros": [4, 4]}]


def test_a_slow_rank_has_its_own_number_where_hosts_have_another_order() -> None:
    """The second one of the first pipeline is rank 3, on the last host."""
    groups = SimpleNamespace(all_gather_text=lambda *_, **__: ["a", "b", "c", "d"], timeout_s=1.0)
    events = list[RunEvent]()
    pace = Pace(session_of(Topology.of(0, 4, 2, (2, 3, 0, 1)), groups=groups), events.append)
    pace._name([SpeedChange(1, True, 3.0)], 5)
    assert [event.fields for event in events] == [{"rank": 3, "host": "d", "factor": 3.0}]


def changes_over(times: Iterable[list[list[float]]]) -> list[tuple[int, SpeedChange]]:
    """Return each change with its step, counted from 1."""
    stragglers = Stragglers()
    return [(step, change) for step, of_step in enumerate(times, 1) for change in stragglers.record(of_step)]


def test_a_slow_rank_is_named_once_and_when_it_is_normal_again() -> None:
    """Of 3 replicas x 2 stages, whose second stage takes longer everywhere: that is not slow."""
    normal, slow = [[1.0, 5.0]] * 3, [[1.0, 5.0], [1.0, 15.0], [1.0, 5.0]]
    assert changes_over([normal] * 5 + [slow] * 100 + [normal] * 100) == [
        (5 + PATIENCE, SpeedChange(3, True, 3.0)),
        (105 + PATIENCE, SpeedChange(3, False, 1.0)),
    ]


def test_two_replicas_are_compared_with_each_other() -> None:
    assert changes_over([[[1.0], [SLOW + 1]]] * 30) == [(PATIENCE, SpeedChange(1, True, SLOW + 1))]


@pytest.mark.parametrize("pause", [[[1.0], [1.0]], [[1.0], [SLOW]]])
def test_a_rank_is_named_only_if_all_its_last_steps_were_slow(pause: list[list[float]]) -> None:
    steps = ([[[1.0], [3.0]]] * (PATIENCE - 1) + [pause]) * 3
    assert changes_over(steps) == []


def test_a_slow_rank_that_is_a_little_faster_is_still_slow() -> None:
    steps = [[[1.0], [3.0]]] * PATIENCE + [[[1.0], [(NORMAL + SLOW) / 2]]] * 100
    assert [step for step, _ in changes_over(steps)] == [PATIENCE]


def test_nothing_is_compared_with_ranks_that_had_no_micro_batches_or_do_not_exist() -> None:
    assert changes_over([[[1.0], [0.0]]] * 100) == []
    assert changes_over([[[1.0, 9.0]]] * 100) == []
