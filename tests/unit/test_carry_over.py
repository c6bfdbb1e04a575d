"""Laws of what a replica restores from its own state, when other replicas have left or joined."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from acsgd.dp.exchange.averaging import split_evenly
from acsgd.dp.exchange.error_feedback import RESIDUAL, SERVER_RESIDUAL
from acsgd.dp.exchange.local_weights import LOCAL_WEIGHTS
from acsgd.dp.modes.cocktail import Cocktail
from acsgd.dp.modes.powersgd import PowerSGD
from acsgd.dp.resize import ReplicaPlace, ReplicaState, carry_over, fold, restore
from acsgd.shards.weights import Weight, WeightState

N = 24
WEIGHT = Weight("w", *[nn.Parameter(torch.zeros(N))] * 2)


def part(place: ReplicaPlace, values: Tensor) -> Tensor:
    """Return values, 0 outside of the part that a replica owns."""
    own = torch.zeros(N)
    split_evenly(own, place.replicas)[place.replica].copy_(split_evenly(values, place.replicas)[place.replica])
    return own


def restored(
    table: tuple[ReplicaState, ...], own: WeightState, was: ReplicaPlace, now: ReplicaPlace
) -> dict[str, Tensor]:
    """Return what a replica restores, by name."""
    saved = carry_over(table, own, was=was, now=now)
    at = {"replica": now.replica, "replicas": now.replicas}
    return {state.name: restore(state, saved, {"w": WEIGHT.master}, **at).get("w", torch.zeros(N)) for state in table}


@pytest.mark.parametrize(("was", "now"), [(2, 3), (3, 2), (4, 4), (4, 2)])
@pytest.mark.parametrize("table", [(RESIDUAL, SERVER_RESIDUAL), Cocktail().states])
def test_a_residual_of_the_mean_is_in_the_next_mean_once(table: tuple[ReplicaState, ...], was: int, now: int) -> None:
    """The next mean has the mean of what replicas add to their messages, and the parts' residuals of the mean."""
    torch.manual_seed(0)
    values, before, after = torch.randn(N), torch.zeros(N), torch.zeros(N)
    sender = LOCAL_WEIGHTS.name if table[0] is LOCAL_WEIGHTS else RESIDUAL.name
    for old, new in zip(range(was), reversed(range(now)), strict=False):  # all change their places
        place = ReplicaPlace(old, was)
        own = {sender: {"w": torch.zeros(N)}, SERVER_RESIDUAL.name: {"w": part(place, values)}}
        before += own[SERVER_RESIDUAL.name]["w"]
        state = restored(table, own, place, ReplicaPlace(new, now))
        assert not state[SERVER_RESIDUAL.name].any(), "of parts that have moved"
        after += state[sender] / now
    torch.testing.assert_close(after, before)
    assert before.any()


def test_a_replica_that_keeps_its_place_keeps_its_state_bit_for_bit() -> None:
    place, values = ReplicaPlace(1, 3), torch.randn(N)
    own = {RESIDUAL.name: {"w": values.clone()}, SERVER_RESIDUAL.name: {"w": part(place, values)}}
    state = restored((RESIDUAL, SERVER_RESIDUAL), own, place, place)
    assert torch.equal(state[RESIDUAL.name], values)
    assert torch.equal(state[SERVER_RESIDUAL.name], part(place, values))


def test_a_replica_alone_folds_its_own_residuals_into_its_weights() -> None:
    weight = Weight("w", *[nn.Parameter(torch.ones(N))] * 2)
    own = {RESIDUAL.name: {"w": torch.full([N], 2.0)}, SERVER_RESIDUAL.name: {"w": torch.full([N], 4.0)}}
    table = (RESIDUAL, SERVER_RESIDUAL)
    fold(table, carry_over(table, own, was=ReplicaPlace(1, 2), now=ReplicaPlace(0, 1)), [weight])
    assert torch.equal(weight.master, torch.full([N], 7.0))


def test_what_is_equal_on_all_replicas_is_found_at_every_place_and_measurements_of_other_replicas_are_dropped() -> None:
    basis = next(state for state in PowerSGD().states if state.merge == "first")
    ratios = next(state for state in Cocktail().states if state.merge == "reset")
    own: WeightState = {basis.name: {"w": torch.ones(1, 4)}, ratios.name: {"w": torch.ones(3, 3)}}
    for was, now in ((ReplicaPlace(0, 2), ReplicaPlace(1, 3)), (ReplicaPlace(0, 3), ReplicaPlace(1, 3))):
        saved = carry_over((basis, ratios), own, was=was, now=now)
        assert saved[0][basis.name] is not None
        assert (ratios.name in saved[1]) == (was.replicas == now.replicas)
        assert not saved[2]
