"""Laws of which snapshots a worker keeps, and to whom it sends them."""

from __future__ import annotations

import pytest
import torch

from acsgd.elastic.packed import PackedLayers, fields_of, header_of
from acsgd.elastic.snapshot_store import Snapshot, SnapshotStore
from acsgd.elastic.snapshots import BUDGET, REPLICATED_BUDGET, budget_of, next_hosts
from acsgd.elastic.transfer import OUTER
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


def test_packed_layers_arrive_as_they_were() -> None:
    weight = torch.randn(5, 3).t()  # not contiguous
    own = {
        0: {"weight": weight, "half": torch.randn(7).bfloat16()},
        1: {},  # of a layer whose only table is on another rank
        OUTER: {"step": torch.tensor(3), "none": torch.empty(0, 4)},
    }
    share = PackedLayers.copy_of(own, Streams(torch.device("cpu")))
    received = PackedLayers.empty(fields_of(header_of(share.fields)))
    received.buffer.copy_(share.buffer)
    own[0]["weight"] = weight.clone()
    weight.zero_()
    assert list(received.layers()) == list(own)
    torch.testing.assert_close(received.layers(), own, rtol=0, atol=0)


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
