"""Laws of which snapshots a worker keeps, and to whom it sends them."""

from __future__ import annotations

import pytest
import torch

from acsgd.elastic.state.snapshot_store import (
    FIRST,
    PackedLayers,
    Snapshot,
    SnapshotCost,
    SnapshotStore,
    fields_of,
    header_of,
)
from acsgd.elastic.state.snapshots import BUDGET, REPLICATED_BUDGET, budget_of, describe_snapshots, next_hosts
from acsgd.streams import Streams


@pytest.mark.parametrize(
    "ranks",
    [("a/0", "b/0"), ("a/0", "a/1", "b/0", "b/1"), ("a/0", "b/0", "c/0", "a/1"), ("a/0", "a/1", "a/2", "b/0")],
)
def test_each_rank_sends_to_another_host(ranks: tuple[str, ...]) -> None:
    partners = next_hosts(ranks)
    assert sorted(partners) == list(range(len(ranks)))
    for rank, partner in partners.items():
        assert ranks[rank].partition("/")[0] != ranks[partner].partition("/")[0]


def test_ranks_of_one_host_have_nobody_to_send_to() -> None:
    assert next_hosts(("a/0", "a/1")) == {}


def test_snapshots_may_cost_less_if_no_single_host_has_a_layer_alone() -> None:
    assert budget_of(("a/0", "b/0"), stages=1) == REPLICATED_BUDGET
    assert budget_of(("a/0", "b/0"), stages=2) == BUDGET
    assert budget_of(("a/0", "b/0", "b/1", "a/1"), stages=2) == REPLICATED_BUDGET
    assert budget_of(("a/0", "b/0", "a/1", "b/1"), stages=2) == BUDGET  # both replicas of stage 0 are on host a


def test_snapshots_for_which_there_is_no_room_are_announced_as_such() -> None:
    text = describe_snapshots("auto", BUDGET, 3 << 20, have_room=False)
    assert text.startswith("no snapshots are taken: a host lacks the 3.0 MiB of memory per process")
    assert "take up to 3.0 MiB" in describe_snapshots("auto", BUDGET, 3 << 20, have_room=True)


def test_packed_layers_arrive_as_they_were() -> None:
    weight = torch.randn(5, 3).t()  # not contiguous
    own = {
        0: {"weight": weight, "half": torch.randn(7).bfloat16()},
        1: {},  # of a layer whose only table is on another rank
        2: {"step": torch.tensor(3), "none": torch.empty(0, 4)},
    }
    share = PackedLayers.copy_of(own, Streams(torch.device("cpu")))
    received = PackedLayers.empty(fields_of(header_of(share.fields)))
    received.buffer.copy_(share.buffer)
    own[0]["weight"] = weight.clone()
    weight.zero_()
    assert list(received.layers()) == list(own)
    torch.testing.assert_close(received.layers(), own, rtol=0, atol=0)


def record_snapshot(cost: SnapshotCost, step_s: float, *, copy_s: float, busy_s: float) -> None:
    """Record a snapshot during which 3 steps take longer by `busy_s` together, after 5 steps without one."""
    for _ in range(5):
        cost.record(step_s, is_pending=False, completes=False)
    cost.begin(copy_s)
    for _ in range(3):
        cost.record(step_s + busy_s / 3, is_pending=True, completes=False)
    cost.record(step_s, is_pending=False, completes=True)


@pytest.mark.parametrize("budget", [REPLICATED_BUDGET, BUDGET])
@pytest.mark.parametrize(("copy_s", "busy_s"), [(0.25, 0.75), (0.5, -0.75), (1e-4, 0.0)])
def test_the_interval_is_the_smallest_within_the_budget(budget: float, copy_s: float, busy_s: float) -> None:
    """Steps that are faster during a snapshot, by chance, make up for nothing."""
    cost, step_s = SnapshotCost(budget), 2.0
    assert cost.interval == FIRST
    record_snapshot(cost, step_s, copy_s=copy_s, busy_s=busy_s)
    share = (copy_s + max(0.0, busy_s)) / step_s
    assert share / cost.interval <= budget * (1 + 1e-9)
    assert cost.interval == 1 or share / (cost.interval - 1) > budget


def test_the_interval_follows_the_cost_and_forgets_old_snapshots() -> None:
    cost, intervals = SnapshotCost(BUDGET), list[int]()
    for copy_s in (0.6, *[0.06] * 5):
        record_snapshot(cost, 1.0, copy_s=copy_s, busy_s=0.0)
        intervals.append(cost.interval)
    assert intervals[0] == 20
    assert intervals == sorted(intervals, reverse=True)
    assert intervals[-1] == 2


def test_a_snapshot_that_is_dropped_does_not_count() -> None:
    """The run has returned to an earlier step before it was complete."""
    cost = SnapshotCost(BUDGET)
    record_snapshot(cost, 1.0, copy_s=0.06, busy_s=0.0)
    cost.begin(100.0)
    cost.record(100.0, is_pending=True, completes=False)
    cost.record(1.0, is_pending=False, completes=False)
    assert cost.interval == 2


def store_with(*steps: int) -> SnapshotStore:
    store = SnapshotStore()
    for step in steps:
        store.begin(Snapshot(1, step, {}))
    return store


def test_a_snapshot_is_kept_until_a_newer_one_is_complete_everywhere_and_never_more_than_two() -> None:
    store = store_with(5)
    store.complete(5)
    store.begin(Snapshot(1, 10, {}))
    assert list(store.by_step) == [5, 10]
    store.begin(Snapshot(2, 12, {}))  # of the next view: that of step 10 was never complete
    assert list(store.by_step) == [5, 12]
    store.complete(12)
    assert list(store.by_step) == [12]


def test_a_return_drops_what_came_later_and_keeps_what_it_returned_to() -> None:
    store = store_with(5)
    store.complete(5)
    store.begin(Snapshot(1, 10, {}))
    store.return_to(5)
    store.begin(Snapshot(2, 9, {}))
    assert list(store.by_step) == [5, 9]
    store.return_to(0)  # as from disk
    assert not store.by_step


def test_a_snapshot_that_was_returned_to_is_kept_though_it_was_not_known_to_be_complete() -> None:
    store = store_with(5)
    store.return_to(5)
    store.complete(5)
    store.begin(Snapshot(2, 9, {}))
    assert list(store.by_step) == [5, 9]
