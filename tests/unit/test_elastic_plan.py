"""Laws of the plan of a view, over all small runs and losses."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator

import pytest

from acsgd.elastic.plan import Plan, WorkerState, make_plan


def states(stages: int, replicas: int, ahead: int = 0, step: int = 7) -> dict[str, WorkerState]:
    """States of a full run; worker i has applied one step more than the others if bit i of `ahead` is set."""
    return {
        f"h{rank}/0": WorkerState(
            step + (ahead >> rank & 1), rank % stages, ready=True, progress={"step": step}, summary={"loss": rank}
        )
        for rank in range(stages * replicas)
    }


def cases() -> Iterator[tuple[int, dict[str, WorkerState], list[str]]]:
    """Runs of up to 3 stages x 3 replicas of which any workers are left, some of them one step ahead."""
    for stages, replicas in itertools.product((1, 2, 3), (1, 2, 3)):
        names = list(states(stages, replicas))
        for size in range(1, len(names) + 1):
            for left in itertools.combinations(names, size):
                for ahead in {0, 1, 2, 5, 2 ** len(names) - 1}:
                    all_states = states(stages, replicas, ahead)
                    yield stages, {name: all_states[name] for name in left}, list(left)


def test_each_worker_that_stays_has_one_place_and_full_replicas_train() -> None:
    for stages, workers, left in cases():
        plan = make_plan(workers, staying=left, stages=stages)
        assert plan.replicas == len(left) // stages
        assert sorted([*plan.ranks, *plan.spares]) == sorted(left)


def test_the_run_continues_from_the_last_step_of_any_worker_unless_a_stage_is_lost() -> None:
    for stages, workers, left in cases():
        plan = make_plan(workers, staying=left, stages=stages)
        is_lost = len({state.stage_rank for state in workers.values()}) < stages
        assert plan.from_disk == (is_lost or not plan.ranks)
        if not plan.from_disk:
            assert plan.step == max(state.step for state in workers.values())
            kept = {name for rank, name in enumerate(plan.ranks) if workers[name].stage_rank == rank % stages}
            assert set(plan.behind) == {name for name in kept if workers[name].step < plan.step}


def test_each_rank_without_its_stage_gets_it_from_one_that_keeps_it_and_no_more_move_than_must() -> None:
    for stages, workers, left in cases():
        plan = make_plan(workers, staying=left, stages=stages)
        if plan.from_disk:
            continue
        targets = [copy.target for copy in plan.copies]
        keeps = [workers[name].stage_rank == rank % stages for rank, name in enumerate(plan.ranks)]
        assert targets == [rank for rank, kept in enumerate(keeps) if not kept]
        assert all(keeps[copy.source] and copy.source % stages == copy.target % stages for copy in plan.copies)
        held = Counter(state.stage_rank for state in workers.values())
        assert len(targets) == sum(max(0, plan.replicas - held[stage]) for stage in range(stages))


def test_newcomers_get_state_and_the_sending_is_spread() -> None:
    workers = {**states(1, 2), "new0/0": WorkerState(), "new1/0": WorkerState()}
    plan = make_plan(workers, staying=list(workers), stages=1)
    assert plan.ranks == ("h0/0", "h1/0", "new0/0", "new1/0")
    assert sorted(copy.source for copy in plan.copies) == [0, 1]


def test_a_host_that_leaves_still_decides_the_step() -> None:
    workers = states(1, 2, ahead=1)
    plan = make_plan(workers, staying=["h1/0"], stages=1)
    assert plan.step == 8
    assert plan.behind == ("h1/0",)
    assert plan.summary == {"loss": 0}


@pytest.mark.parametrize(
    "stale",
    [
        WorkerState(3, 0, ready=True, progress={}, summary={}),  # an old state, of a host that was cut off
        WorkerState(6, 0, ready=False, progress={}, summary={}),  # its gradients are not complete
    ],
)
def test_state_that_cannot_reach_the_last_step_is_replaced(stale: WorkerState) -> None:
    workers = {"old/0": stale, **states(1, 1)}
    plan = make_plan(workers, staying=list(workers), stages=1)
    assert plan.step == 7
    assert plan.behind == ()
    assert [(plan.ranks[copy.source], plan.ranks[copy.target]) for copy in plan.copies] == [("h0/0", "old/0")]


def test_a_run_that_has_not_started_starts_from_disk() -> None:
    workers = {"a/0": WorkerState(store_port=5), "a/1": WorkerState(), "b/0": WorkerState()}
    plan = make_plan(workers, staying=list(workers), stages=2)
    assert plan == Plan(2, ranks=("a/0", "a/1"), spares=("b/0",), store_port=5)


def test_a_step_whose_log_or_save_is_incomplete_stays_open() -> None:
    workers = states(1, 3)
    workers["h2/0"] = WorkerState(7, 0, ready=False, progress={"open": True}, summary={}, is_open=True)
    plan = make_plan(workers, staying=list(workers), stages=1)
    assert plan.is_open
    assert plan.progress == {"open": True}


def exchanging(*ranks: tuple[int, bool]) -> dict[str, WorkerState]:
    """States of replicas of one stage that exchange weights after step 8: number of steps applied, and is_synced."""
    return {
        f"h{rank}/0": WorkerState(
            step, 0, ready=step == 7, is_synced=is_synced, exchanges=step == 7, progress={}, summary={}
        )
        for rank, (step, is_synced) in enumerate(ranks)
    }


def test_replicas_that_lack_an_exchange_get_the_state_of_one_that_has_it() -> None:
    plan = make_plan(exchanging((7, True), (8, False), (8, True)), staying=["h0/0", "h1/0", "h2/0"], stages=1)
    assert (plan.step, plan.behind, plan.unsynced) == (8, (), ())
    assert {(plan.ranks[copy.source], plan.ranks[copy.target]) for copy in plan.copies} == {
        ("h2/0", "h0/0"),
        ("h2/0", "h1/0"),
    }
    fewer = make_plan(exchanging((7, True), (8, False), (8, True)), staying=["h0/0", "h2/0"], stages=1, max_replicas=1)
    assert (fewer.ranks, fewer.copies) == (("h2/0",), ())


def test_an_exchange_that_no_replica_that_stays_has_completed_is_run_again() -> None:
    for states in (exchanging((8, False), (8, False)), exchanging((7, True), (8, False))):
        plan = make_plan(states, staying=list(states), stages=1)
        assert (plan.step, plan.copies, plan.unsynced) == (8, (), (0,))
        assert plan.behind == tuple(name for name, state in states.items() if state.step == 7)
    ended = exchanging((8, False), (8, True))
    assert make_plan(ended, staying=["h0/0"], stages=1).unsynced == (0,)


def test_each_stage_has_its_own_exchange() -> None:
    states = exchanging((8, True), (8, False), (8, False), (8, False))
    states = {
        name: dataclasses.replace(state, stage_rank=rank % 2) for rank, (name, state) in enumerate(states.items())
    }
    plan = make_plan(states, staying=list(states), stages=2)
    assert plan.unsynced == (1,)
    assert [(copy.source, copy.target) for copy in plan.copies] == [(0, 2)]


def test_streamed_sources_are_read_on_from_the_latest_place_that_a_worker_knows() -> None:
    def place(step: int, *streams: dict[str, int] | None) -> WorkerState:
        return WorkerState(step, 0, ready=True, progress={}, summary={}, streams=streams)

    known, later = (None, {"segment": 4}), (None, {"segment": 5})
    first = (None, {"segment": 0})  # of the next epoch
    cases = [
        (later, [place(7, *known), place(7, *later), place(8)]),
        (first, [place(7, *later), place(8, *first)]),
        ((), [place(7), place(8)]),
    ]
    for latest, workers in cases:
        states = {f"h{number}/0": worker for number, worker in enumerate(workers)}
        for order in itertools.permutations(states):
            plan = make_plan({name: states[name] for name in order}, staying=list(order), stages=1)
            assert plan.streams == latest
