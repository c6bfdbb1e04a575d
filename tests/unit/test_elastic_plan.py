"""Laws of the plan of a view, over all small runs and losses."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from acsgd.elastic.membership.assignment import ReplicaLayer, Transfer, transfers_of
from acsgd.elastic.membership.plan import CopiedLayers, Plan, WorkerState, make_plan

Cut = tuple[tuple[int, ...], ...]


def cut_of(stages: int, chunks: int = 1) -> Cut:
    """Return layers 0, 1, ... dealt to some positions in turn, as by an interleaved schedule."""
    return tuple(tuple(stages * chunk + position for chunk in range(chunks)) for position in range(stages))


def states(cut: Cut, replicas: int, ahead: int = 0, step: int = 7) -> dict[str, WorkerState]:
    """States of a full run; worker i has applied one step more than the others if bit i of `ahead` is set."""
    return {
        f"h{rank}/0": WorkerState(
            step + (ahead >> rank & 1), layers, ready=True, progress={"step": step}, summary={"loss": rank}
        )
        for rank, layers in enumerate(cut * replicas)
    }


def cases() -> Iterator[tuple[Cut, dict[str, WorkerState], list[str]]]:
    """Runs of up to 3 stages x 3 replicas of which any workers are left, some of them one step ahead."""
    for stages, replicas in itertools.product((1, 2, 3), (1, 2, 3)):
        cut = cut_of(stages, chunks=2)
        names = list(states(cut, replicas))
        for size in range(1, len(names) + 1):
            for left in itertools.combinations(names, size):
                for ahead in {0, 1, 2, 5, 2 ** len(names) - 1}:
                    all_states = states(cut, replicas, ahead)
                    yield cut, {name: all_states[name] for name in left}, list(left)


def layers_after(plan: Plan, workers: dict[str, WorkerState], cut: Cut) -> list[set[int]]:
    """Return the layers of each rank after all transfers: those it keeps, and those it receives.

    Checks that each is received once, from a rank that has held it at the step from which the run continues, or from
    one of the same host that has received all of its layers before.
    """
    wanted = cut * plan.replicas
    kept = [
        {*workers[name].layers} & {*layers} if name in plan.holders else set()
        for name, layers in zip(plan.ranks, wanted, strict=True)
    ]
    received = Counter((each.target, layer) for each in plan.transfers for layer in each.layers)
    assert all(number == 1 for number in received.values())
    for number, each in enumerate(plan.transfers):
        if plan.ranks[each.source] not in plan.holders:
            hosts = {plan.ranks[rank].partition("/")[0] for rank in (each.source, each.target)}
            before = {layer for got in plan.transfers[:number] if got.target == each.source for layer in got.layers}
            assert (len(hosts), before) == (1, {*each.layers})
            continue
        source = workers[plan.ranks[each.source]]
        assert {*each.layers} <= {*source.layers}
        assert source.step == plan.step or plan.ranks[each.source] in plan.behind
    return [layers | {layer for target, layer in received if target == rank} for rank, layers in enumerate(kept)]


def test_each_worker_that_stays_has_one_place_and_full_replicas_train() -> None:
    for cut, workers, left in cases():
        plan = make_plan(workers, staying=left, cuts=[cut])
        assert plan.replicas == len(left) // len(cut)
        assert sorted([*plan.ranks, *plan.spares]) == sorted(left)


def test_the_run_continues_from_the_last_step_of_any_worker_unless_a_stage_is_lost() -> None:
    for cut, workers, left in cases():
        plan = make_plan(workers, staying=left, cuts=[cut])
        is_lost = len({state.layers for state in workers.values()}) < len(cut)
        assert plan.from_disk == (is_lost or not plan.ranks)
        if not plan.from_disk:
            assert plan.step == max(state.step for state in workers.values())
            assert set(plan.behind) == {name for name in plan.holders if workers[name].step < plan.step}


def test_each_rank_gets_its_layers_from_ranks_that_keep_them_and_no_more_move_than_must() -> None:
    for cut, workers, left in cases():
        plan = make_plan(workers, staying=left, cuts=[cut])
        if plan.from_disk:
            continue
        wanted = cut * plan.replicas
        assert layers_after(plan, workers, cut) == [set(layers) for layers in wanted]
        assert all({*each.layers} <= {*wanted[each.source]} for each in plan.transfers)
        held = Counter(state.layers for state in workers.values())
        lacking = sum(max(0, plan.replicas - held[layers]) * len(layers) for layers in cut)
        assert sum(len(each.layers) for each in plan.transfers) == lacking


def test_any_holders_of_any_layers_give_each_rank_its_layers_or_the_run_returns_to_disk() -> None:
    choose = random.Random(0)
    for _ in range(3000):
        cut = cut_of(choose.randint(1, 4), choose.randint(1, 2))
        layers = [layer for position in cut for layer in position]
        workers = {
            f"h{number // 2}/{number}": WorkerState(
                choose.choice((6, 7, 7, 7)),
                tuple(sorted(choose.sample(layers, choose.randint(0, len(layers))))),
                ready=choose.random() < 0.8,
                progress={},
                summary={} if choose.random() < 0.8 else None,
                is_synced=choose.random() < 0.8,
            )
            for number in range(choose.randint(1, 8))
        }
        plan = make_plan(workers, staying=list(workers), cuts=[cut])
        if not plan.from_disk:
            assert layers_after(plan, workers, cut) == [set(layers) for layers in cut * plan.replicas]
        elif plan.ranks:
            assert plan.step == 0
            assert not plan.transfers + plan.holders + plan.behind


def test_replicas_that_exchange_nothing_never_form_one_model_of_two() -> None:
    """Each rank has the weights of one replica, as all others of its replica; if none is complete, the run returns."""
    for cut, workers, left in cases():
        stages = len(cut)
        ids = {f"h{rank}/0": 3 + rank // stages for rank in range(9)}
        workers = {name: dataclasses.replace(state, replica_id=ids[name]) for name, state in workers.items()}
        workers["new/0"] = WorkerState()
        plan = make_plan(workers, staying=[*left, "new/0"], cuts=[cut])
        full = [each for each, number in Counter(ids[name] for name in left).items() if number == stages]
        if not plan.ranks:
            continue
        assert plan.from_disk == (not full)
        assert len({*plan.replica_ids}) == plan.replicas
        kept = [] if plan.from_disk else full[: plan.replicas]
        assert [*plan.replica_ids[: len(kept)]] == kept
        assert not {0, *(ids[name] for name in left)}.intersection(plan.replica_ids[len(kept) :])
        if plan.from_disk:
            continue
        layers_after(plan, workers, cut)
        sources = [{ids[name]} if name in plan.holders else set[int]() for name in plan.ranks]
        for each in plan.transfers:
            sources[each.target].add(ids[plan.ranks[each.source]])
        for replica in range(plan.replicas):
            assert len(set[int]().union(*sources[replica * stages : (replica + 1) * stages])) == 1


def test_newcomers_get_state_and_the_sending_is_spread() -> None:
    cut = ((0, 1, 2, 3),)
    workers = {**states(cut, 2), "new0/0": WorkerState(), "new1/0": WorkerState()}
    plan = make_plan(workers, staying=list(workers), cuts=[cut])
    assert plan.ranks == ("h0/0", "h1/0", "new0/0", "new1/0")
    sent = Counter[int]()
    for transfer in plan.transfers:
        sent[transfer.source] += len(transfer.layers)
    assert sent == {0: 4, 1: 4}


def test_a_rank_that_keeps_a_layer_sends_it_rather_than_one_that_gives_it_up() -> None:
    """That one has others to receive, and frees it."""
    layer, other = ReplicaLayer(0, 1), ReplicaLayer(0, 2)
    held, wanted = [{layer}, {layer}, {other}], [frozenset({other}), frozenset({layer}), frozenset({layer, other})]
    transfers = transfers_of(["a/0", "b/0", "c/0"], held, wanted)
    assert {*transfers} == {Transfer((2,), 2, 0), Transfer((1,), 1, 2)}


def test_state_reaches_a_host_that_joins_once_and_is_handed_on_there() -> None:
    cut = cut_of(2, chunks=2)
    workers = {**states(cut, 1), **{f"new/{number}": WorkerState() for number in range(6)}}
    plan = make_plan(workers, staying=list(workers), cuts=[cut])
    assert layers_after(plan, workers, cut) == [set(layers) for layers in cut * 4]
    assert plan.holders == ("h0/0", "h1/0")
    between = [each for each in plan.transfers if each.source < 2]
    assert between == [Transfer((0, 2), 0, 2), Transfer((1, 3), 1, 3)]
    assert {(each.source, each.target) for each in plan.transfers} - {(0, 2), (1, 3)} == {
        (2, 4),
        (3, 5),
        (2, 6),
        (3, 7),
    }


def test_a_host_that_leaves_still_decides_the_step() -> None:
    workers = states(cut_of(1), 2, ahead=1)
    plan = make_plan(workers, staying=["h1/0"], cuts=[cut_of(1)])
    assert plan.step == 8
    assert plan.behind == ("h1/0",)
    assert plan.summary == {"loss": 0}


@pytest.mark.parametrize(
    "stale",
    [
        WorkerState(3, (0,), ready=True, progress={}, summary={}),  # an old state, of a host that was cut off
        WorkerState(6, (0,), ready=False, progress={}, summary={}),  # its gradients are not complete
    ],
)
def test_state_that_cannot_reach_the_last_step_is_replaced(stale: WorkerState) -> None:
    workers = {"old/0": stale, **states(cut_of(1), 1)}
    plan = make_plan(workers, staying=list(workers), cuts=[cut_of(1)])
    assert plan.step == 7
    assert plan.behind == ()
    assert [(plan.ranks[each.source], plan.ranks[each.target]) for each in plan.transfers] == [("h0/0", "old/0")]


def test_a_run_that_has_not_started_starts_from_disk() -> None:
    workers = {"a/0": WorkerState(store_port=5), "a/1": WorkerState(), "b/0": WorkerState()}
    plan = make_plan(workers, staying=list(workers), cuts=[cut_of(2)])
    assert plan == Plan(2, ranks=("a/0", "a/1"), spares=("b/0",), store_port=5, replica_ids=(1,))


def test_hosts_whose_workers_have_all_ended_get_a_view_without_ranks() -> None:
    assert make_plan({}, staying=[], cuts=[cut_of(2)]) == Plan(2)


def test_a_step_whose_log_or_save_is_incomplete_stays_open() -> None:
    workers = states(cut_of(1), 3)
    workers["h2/0"] = WorkerState(7, (0,), ready=False, progress={"open": True}, summary={}, is_open=True)
    plan = make_plan(workers, staying=list(workers), cuts=[cut_of(1)])
    assert plan.is_open
    assert plan.progress == {"open": True}


def exchanging(*ranks: tuple[int, bool]) -> dict[str, WorkerState]:
    """States of replicas of one stage that exchange weights after step 8: number of steps applied, and is_synced."""
    return {
        f"h{rank}/0": WorkerState(
            step, (0,), ready=step == 7, is_synced=is_synced, exchanges=step == 7, progress={}, summary={}
        )
        for rank, (step, is_synced) in enumerate(ranks)
    }


def test_replicas_that_lack_an_exchange_get_the_state_of_one_that_has_it() -> None:
    plan = make_plan(exchanging((7, True), (8, False), (8, True)), staying=["h0/0", "h1/0", "h2/0"], cuts=[cut_of(1)])
    assert (plan.step, plan.behind, plan.unsynced) == (8, (), ())
    assert {(plan.ranks[each.source], plan.ranks[each.target]) for each in plan.transfers} == {
        ("h2/0", "h0/0"),
        ("h2/0", "h1/0"),
    }
    fewer = make_plan(
        exchanging((7, True), (8, False), (8, True)), staying=["h0/0", "h2/0"], cuts=[cut_of(1)], max_replicas=1
    )
    assert (fewer.ranks, fewer.transfers) == (("h2/0",), ())


def test_an_exchange_that_no_replica_that_stays_has_completed_is_run_again() -> None:
    for states in (exchanging((8, False), (8, False)), exchanging((7, True), (8, False))):
        plan = make_plan(states, staying=list(states), cuts=[cut_of(1)])
        assert (plan.step, plan.transfers, plan.unsynced) == (8, (), (0, 1))
        assert plan.behind == tuple(name for name, state in states.items() if state.step == 7)
    ended = exchanging((8, False), (8, True))
    assert make_plan(ended, staying=["h0/0"], cuts=[cut_of(1)]).unsynced == (0,)


def test_each_stage_has_its_own_exchange() -> None:
    states = exchanging((8, True), (8, False), (8, False), (8, False))
    states = {name: dataclasses.replace(state, layers=(rank % 2,)) for rank, (name, state) in enumerate(states.items())}
    plan = make_plan(states, staying=list(states), cuts=[cut_of(2)])
    assert plan.unsynced == (1, 3)
    assert [(each.source, each.target) for each in plan.transfers] == [(0, 2)]


def test_streamed_sources_are_read_on_from_the_latest_place_that_a_worker_knows() -> None:
    def place(step: int, *streams: dict[str, int] | None) -> WorkerState:
        return WorkerState(step, (0,), ready=True, progress={}, summary={}, streams=streams)

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
            plan = make_plan({name: states[name] for name in order}, staying=list(order), cuts=[cut_of(1)])
            assert plan.streams == latest


def test_the_number_of_stages_follows_the_number_of_workers() -> None:
    cuts = [((0,), (1,), (2,), (3,)), ((0,), (1,), (2, 3)), ((0, 1), (2, 3)), ((0, 1, 2, 3),)]
    for number, stages in ((9, 4), (4, 4), (3, 3), (2, 2), (1, 1)):
        workers = {f"h{each}/0": WorkerState() for each in range(number)}
        plan = make_plan(workers, staying=list(workers), cuts=cuts)
        assert (plan.stages, plan.replicas) == (stages, number // stages)
    workers = {f"h{each}/0": WorkerState() for each in range(5)}
    plan = make_plan(workers, staying=list(workers), cuts=cuts, min_replicas=2)
    assert (plan.stages, plan.replicas, len(plan.spares)) == (2, 2, 1)


def test_layers_move_between_any_numbers_of_stages() -> None:
    """A single worker of a pipeline that holds all layers, then two, then three."""
    cuts = [((0,), (1, 2), (3,)), ((0, 1), (2, 3)), ((0, 1, 2, 3),)]
    workers = {"a/0": WorkerState(7, (0, 1, 2, 3), progress={}), "b/0": WorkerState()}
    plan = make_plan(workers, staying=["b/0", "a/0"], cuts=cuts)
    assert plan.ranks == ("a/0", "b/0")
    assert plan.transfers == (Transfer((2, 3), 0, 1),)
    workers = {
        "a/0": WorkerState(8, (0, 1), progress={}),
        "b/0": WorkerState(8, (2, 3), progress={}),
        "c/0": WorkerState(),
    }
    plan = make_plan(workers, staying=list(workers), cuts=cuts)
    assert layers_after(plan, workers, cuts[0]) == [{0}, {1, 2}, {3}]
    assert sum(len(each.layers) for each in plan.transfers) == 2


def test_a_lost_layer_comes_from_the_newest_snapshot_that_has_all_layers() -> None:
    """Random copies of random layers in two views, of which one was left by a return to an earlier step."""
    choose = random.Random(1)
    kinds = Counter[str]()
    for _ in range(2000):
        cut = cut_of(choose.randint(1, 3))
        layers = range(len(cut))
        taken = [(1, 4), (1, 8), (2, 6)]  # (view, step)
        copies = {
            f"h{number}/0": {each: {x for x in layers if choose.random() < 0.5} for each in taken}
            for number in range(choose.randint(1, 5))
        }
        saved = choose.choice((0, 5, 7))
        workers = {
            name: WorkerState(
                9,
                (0,) if len(cut) > 1 else (),
                progress={},
                snapshots=tuple(CopiedLayers(*each, tuple(own), {"step": each[1]}) for each, own in by_taken.items()),
                saved_step=saved,
            )
            for name, by_taken in copies.items()
        }
        plan = make_plan(workers, staying=list(workers), cuts=[cut])
        covered = [each for each in taken if {x for own in copies.values() for x in own[each]} == {*layers}]
        usable = [(epoch, step) for epoch, step in covered if step >= saved]
        if not plan.ranks:
            assert not plan.from_snapshot
            continue
        kinds["disk" if plan.from_disk else "snapshot"] += 1
        if plan.from_disk:
            assert not usable or len(plan.ranks) < len(workers), "spares cannot send theirs"
            continue
        assert plan.from_snapshot
        assert (plan.behind, plan.unsynced, plan.summary) == ((), (), None)
        assert plan.progress == {"step": plan.step}
        (used,) = [each for each in taken if each[1] == plan.step]
        held = {name: WorkerState(plan.step, tuple(own[used])) for name, own in copies.items()}
        assert used in usable
        assert used == max(usable) or len(plan.ranks) < len(workers)
        assert layers_after(plan, held, cut) == [{*each} for each in cut * plan.replicas]
    assert min(kinds["disk"], kinds["snapshot"]) > 100


def divided(cut: Cut, sizes: Sequence[int], parts: int, **options: Any) -> dict[str, WorkerState]:
    """States of domains whose replicas divide the state of their layers; workers beyond these hold none."""
    states = {}
    for domain, size in enumerate(sizes):
        for place in range(size):
            part, position = divmod(place, len(cut))
            state = WorkerState(7, cut[position], part=part, parts=parts, progress={}, summary={}, **options)
            state = state if part < parts else WorkerState()
            states[f"h{domain}/{place}"] = dataclasses.replace(state, domain=f"d{domain}")
    return states


def without_state(states: dict[str, WorkerState], domain: str) -> dict[str, WorkerState]:
    return {name: WorkerState(domain=domain) if state.domain == domain else state for name, state in states.items()}


def assert_has_parts(plan: Plan, workers: dict[str, WorkerState], cut: Cut, parts: int) -> None:
    """Check that domains have equal numbers of replicas, and that each rank has its part after all transfers, or all
    that there were."""
    stages, domains = plan.stages, [workers[name].domain for name in plan.ranks]
    sizes = Counter(domains)
    of_domain = next(iter(sizes.values())) // stages
    assert {*sizes.values()} == {of_domain * stages}
    assert of_domain >= 2
    assert [domain for domain, _ in itertools.groupby(domains)] == [*dict.fromkeys(domains)]
    if plan.from_disk:
        return
    received = [set[tuple[int, int, int]]() for _ in plan.ranks]
    for transfer in plan.transfers:
        source, name = workers[plan.ranks[transfer.source]], plan.ranks[transfer.source]
        passed = {(layer, source.part, source.parts) for layer in transfer.layers}
        if name in plan.holders:
            assert {*transfer.layers} <= {*source.layers}
            assert source.step == plan.step or name in plan.behind
        else:
            passed = {each for each in received[transfer.source] if each[0] in transfer.layers}
            assert {layer for layer, _, _ in passed} == {*transfer.layers}
        assert not passed & received[transfer.target], "nothing travels twice"
        received[transfer.target] |= passed
    for rank, name in enumerate(plan.ranks):
        kept = {(layer, workers[name].part, workers[name].parts) for layer in workers[name].layers}
        has = received[rank] | (kept if name in plan.holders else set())
        part, layers = rank % (of_domain * stages) // stages, cut[rank % stages]
        needed = {(layer, part, of_domain) for layer in layers}
        assert needed <= has or {(layer, each, parts) for layer in layers for each in range(parts)} <= has


def test_domains_have_all_parts_of_the_state_or_the_run_returns_to_disk() -> None:
    choose, origins = random.Random(2), Counter[str]()
    for _ in range(3000):
        cut, parts = cut_of(choose.randint(1, 2), choose.randint(1, 2)), choose.choice((2, 2, 3))
        sizes = [choose.choice((2, 2, 3, 4)) * len(cut) + choose.choice((0, 0, 1)) for _ in range(choose.randint(1, 4))]
        workers = divided(cut, sizes, parts)
        for domain in range(len(sizes)):
            workers = without_state(workers, f"d{domain}") if choose.random() < 0.4 else workers
        workers = {
            name: dataclasses.replace(
                state,
                step=choose.choice((6, 7, 7, 7)) if state.layers else 0,
                ready=choose.random() < 0.9,
                is_synced=choose.random() < 0.8,
            )
            for name, state in workers.items()
        }
        micros, most = choose.choice((0, 0, 4, 12)), choose.choice((None, None, 4))
        plan = make_plan(workers, staying=list(workers), cuts=[cut], max_replicas=most, equal_micros=micros)
        if not plan.ranks:
            continue
        assert plan.replicas <= (most or plan.replicas)
        assert not micros or micros % plan.replicas == 0
        assert_has_parts(plan, workers, cut, parts)
        origins[plan.origin] += 1
    assert min(origins["memory"], origins["disk"]) > 500


@pytest.mark.parametrize("stages", [1, 2])
def test_a_domain_that_is_lost_takes_nothing_that_another_does_not_have(stages: int) -> None:
    cut = cut_of(stages)
    workers = divided(cut, [2 * stages] * 3, 2)
    left = {name: state for name, state in workers.items() if state.domain != "d0"}
    plan = make_plan(workers, staying=list(left), cuts=[cut])
    assert (plan.origin, plan.ranks, plan.transfers) == ("memory", tuple(left), ())
    again = without_state(workers, "d0")
    plan = make_plan(again, staying=list(again), cuts=[cut])
    assert plan.ranks == (*left, *(name for name in again if name not in left))
    assert Counter(each.source for each in plan.transfers).most_common(1)[0][1] == 1, "the sending is spread"
    assert_has_parts(plan, again, cut, 2)
    one = {name: state for name, state in workers.items() if state.domain == "d1"}
    alone = make_plan(one, staying=list(one), cuts=[cut])
    assert (alone.origin, alone.transfers, alone.replicas) == ("memory", (), 2)


def test_parts_that_nobody_has_come_from_the_checkpoint() -> None:
    workers = divided(cut_of(1), [3, 3], 3)
    left = {name: state for name, state in workers.items() if name in ("h0/0", "h0/1", "h1/0", "h1/1")}
    plan = make_plan(workers, staying=list(left), cuts=[cut_of(1)])
    assert (plan.origin, plan.replicas) == ("disk", 4)


def test_a_domain_of_fewer_replicas_waits_if_its_part_is_in_another() -> None:
    workers = divided(cut_of(1), [3, 2], 3)
    plan = make_plan(workers, staying=list(workers), cuts=[cut_of(1)])
    assert (plan.origin, plan.ranks) == ("memory", ("h0/0", "h0/1", "h0/2"))
    fresh = {name: WorkerState(domain=state.domain) for name, state in workers.items()}
    assert make_plan(fresh, staying=list(fresh), cuts=[cut_of(1)]).replicas == 4


def test_each_part_has_its_own_exchange() -> None:
    """That of part 0 is complete on h1 alone, that of part 1 nowhere."""
    workers = divided(cut_of(1), [2, 2], 2, is_synced=False)
    workers["h1/0"] = dataclasses.replace(workers["h1/0"], is_synced=True)
    plan = make_plan(workers, staying=list(workers), cuts=[cut_of(1)])
    assert [(plan.ranks[each.source], plan.ranks[each.target]) for each in plan.transfers] == [("h1/0", "h0/0")]
    assert [plan.ranks[rank] for rank in plan.unsynced] == ["h0/1", "h1/1"]
