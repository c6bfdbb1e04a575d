"""Laws of the ownership of optimizer state: parts add up to the whole, each once."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from acsgd.config.options import OptimConfig
from acsgd.elastic.state.transfer import LayersInMemory
from acsgd.errors import RunError
from acsgd.optim import OPTIMIZERS
from acsgd.optim.base import Optimizer
from acsgd.optim.gradient_scale import squared_norm
from acsgd.optim.ownership import OwnedWeights, Ownership, Part, divide, join_parts, parts_of
from acsgd.shards.weights import MIN_ROW, Weight, WeightState

CONFIG = OptimConfig(lr=0.01, steps=3)
SPLIT = (Part("table", 0, 3, 0), Part("table", 3, 5, 1), Part("matrix", 0, None, 1), Part("bias", 0, None, 0))
SHAPES = {"table": (5, 4), "matrix": (3, 4), "bias": (4,)}


def new_weights(dtype: torch.dtype = torch.float32) -> list[Weight]:
    generator = torch.Generator().manual_seed(0)
    weights = []
    for key, shape in SHAPES.items():
        master = nn.Parameter(torch.randn(shape, generator=generator))
        param = master if dtype == torch.float32 else nn.Parameter(master.detach().to(dtype))
        weights.append(Weight(key, param, master))
    return weights


class Rank:
    """One of two replicas with the same weights and the same gradients."""

    def __init__(self, ownership: Ownership, dtype: torch.dtype = torch.float32) -> None:
        self.weights = new_weights(dtype)
        self.owned = OwnedWeights(self.weights, ownership)
        self.optimizer: Optimizer = OPTIMIZERS["adamw"]().open(self.owned.of(self.weights), CONFIG)

    def set_gradients(self, gradients: dict[str, Tensor]) -> None:
        """Set the gradients of what this rank owns, as a reduce-scatter does."""
        for owned in self.owned.of(self.weights):
            key, _, rows = owned.key.removesuffix("]").partition("[")
            start, stop = map(int, rows.split(":")) if rows else (0, None)
            owned.master.grad = gradients[key][start:stop].clone()

    def state(self) -> WeightState:
        return self.owned.state_of(self.optimizer, self.weights)


def gradients(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step + 1)
    return {key: torch.randn(shape, generator=generator) for key, shape in SHAPES.items()}


def two_ranks(parts: Sequence[Part] | None, dtype: torch.dtype = torch.float32) -> list[Rank]:
    divided = None if parts is None else tuple(parts)
    return [Rank(Ownership(replica, 2, divided), dtype) for replica in range(2)]


def test_whole_weights_are_owned_by_all_replicas_as_they_are() -> None:
    for rank in two_ranks(None):
        owned = rank.owned.of(rank.weights)
        assert all(each is weight for each, weight in zip(owned, rank.weights, strict=True))
        assert rank.owned.ownership.squared_norms([2.0, 3.0]) == [2.0, 3.0]
    without_weights = Ownership(0, 2, ())  # all of its layers are frozen; other ranks count the same norm
    assert without_weights.squared_norms([2.0, 3.0]) == [5.0, 5.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_is_a_view_of_the_parameter_and_owns_its_master(dtype: torch.dtype) -> None:
    weights = new_weights(dtype)
    expected = weights[0].master.detach().clone()
    owned = OwnedWeights(weights, Ownership(0, 2, SPLIT))
    (part,) = owned.of(weights[:1])
    assert part.key == "table[0:3]"
    assert torch.equal(part.master, expected[:3])
    owned.load(weights[0], expected + 1)
    assert torch.equal(part.master, expected[:3] + 1)
    assert torch.equal(weights[0].param, (expected + 1).to(dtype))
    with torch.no_grad():
        part.param.fill_(7)
    assert (weights[0].param[:3] == 7).all()
    if dtype == torch.bfloat16:  # the master keeps its shape for the gradient, and no values
        assert weights[0].master.untyped_storage().nbytes() == 4
        weights[0].master.grad = torch.zeros(5, 4)


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("by_rows", [True, False])
def test_weights_are_divided_evenly_and_each_element_has_one_owner(replicas: int, by_rows: bool) -> None:
    sizes = {
        "table": (64, 8),
        "head": (64, 8),
        **{f"matrix{i}": (24, 8) for i in range(12)},
        "bias": (24,),
        "gate": (),
        "B": (24, 4),
    }
    weights = [
        Weight(key, (param := nn.Parameter(torch.zeros(size))), param, is_tied=key == "table")
        for key, size in sizes.items()
    ]
    parts = divide(weights, replicas, by_rows=by_rows)
    owned = [0] * replicas
    for weight in weights:
        of_weight = [part for part in parts if part.weight == weight.key]
        assert sum(part.rows(weight.master).numel() for part in of_weight) == weight.master.numel()
        has_rows = weight.master.dim() > 1 and weight.master[0].numel() >= MIN_ROW
        assert len(of_weight) == (replicas if by_rows and has_rows else 1), "others have no statistics by row"
        for part in of_weight:
            owned[part.owner] += part.rows(weight.master).numel()
    mean = sum(owned) / replicas
    assert all(abs(each - mean) <= 0.1 * mean for each in owned)
    alone = divide(weights[:1], replicas, by_rows=by_rows)
    assert alone == [part for part in parts if part.weight == "table"], "copies of a tied weight are divided alike"


def test_the_gradient_norm_counts_each_part_once() -> None:
    ranks = two_ranks(SPLIT)
    for rank in ranks:
        rank.set_gradients(gradients(0))
    expected = sum(float(grad.double().square().sum()) for grad in gradients(0).values())
    squares = [float(squared_norm(rank.owned.of(rank.weights))) for rank in ranks]
    for rank in ranks:
        assert rank.owned.ownership.squared_norms(squares) == pytest.approx([expected] * 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_owners_of_parts_together_step_as_the_owner_of_the_whole(dtype: torch.dtype) -> None:
    whole, ranks = Rank(Ownership(0, 1), dtype), two_ranks(SPLIT, dtype)
    for step in range(3):
        for rank in (whole, *ranks):
            rank.set_gradients(gradients(step))
            rank.optimizer.step(step)
    for index, expected in enumerate(whole.weights):
        owned = [each for rank in ranks for each in rank.owned.of([rank.weights[index]])]
        for kind in ("param", "master"):
            assert torch.equal(torch.cat([getattr(each, kind) for each in owned]), getattr(expected, kind))


@pytest.mark.parametrize("parts", [None, SPLIT])
def test_the_states_of_all_parts_make_that_of_the_whole(parts: tuple[Part, ...] | None) -> None:
    whole, ranks = Rank(Ownership(0, 1)), two_ranks(parts)
    for rank in (whole, *ranks):
        rank.set_gradients(gradients(0))
        rank.optimizer.step(0)
    state = merged([rank.state() for rank in ranks])
    assert_equal(join_parts(state), whole.state())
    restored = two_ranks(SPLIT)  # which may own other parts than those that were saved
    for rank in restored:
        rank.owned.load_state(rank.optimizer, rank.weights, state)
    assert_equal(join_parts(merged([rank.state() for rank in restored])), whole.state())


def test_parts_divided_in_another_way_are_joined_and_missing_ones_are_named() -> None:
    """Also if the rows that are needed are not among those that are missing."""
    rows = torch.arange(24.0).view(6, 4)
    thirds = {f"w[{start}:{start + 2}]": rows[start : start + 2] for start in (0, 2, 4)}
    for owned in (Part("w", 0, 3, 0), Part("w", 3, 6, 1), Part("w", 2, 4, 0), Part("w", 0, None, 0)):
        weight = owned.of(Weight("w", nn.Parameter(rows), nn.Parameter(rows)))
        found = parts_of([weight], {"m": thirds, "n": {"other": rows}})
        assert torch.equal(found["m"][owned.key], owned.rows(rows))
        assert "n" not in found
    second = Part("w", 2, 4, 0).of(Weight("w", nn.Parameter(rows), nn.Parameter(rows)))
    del thirds["w[0:2]"]
    assert torch.equal(parts_of([second], {"m": thirds})["m"][second.key], rows[2:4]), "the part is there itself"
    half = Part("w", 3, 6, 1).of(Weight("w", nn.Parameter(rows), nn.Parameter(rows)))
    for incomplete in (thirds, {"w[0:2]": rows[:2], "w[2:4]": rows[2:4]}):
        with pytest.raises(RunError, match="the state of w is incomplete"):
            parts_of([half], {"m": incomplete})


def test_parts_of_weights_that_nobody_has_sent_are_named() -> None:
    """They would be NaN: no error where weights are joined."""
    rows = torch.arange(24.0).view(6, 4)
    whole, half, other = (
        part.of(Weight(part.weight, nn.Parameter(rows), nn.Parameter(rows)))
        for part in (Part("w", 0, None, 0), Part("w", 3, 6, 1), Part("v", 0, 3, 0))
    )
    received = LayersInMemory()
    received.add({"weight\nw[3:6]": rows[3:], "optimizer\nm\nv[0:3]": rows[:3]})
    received.check_has([half])
    for missing in (whole, other):
        with pytest.raises(RunError, match=re.escape(f"the state of {missing.key} is incomplete")):
            received.check_has([half, missing])
    received.add({"weight\nw[0:3]": rows[:3], "weight\nv": rows})
    received.check_has([whole, half, other])


def merged(states: Sequence[WeightState]) -> WeightState:
    names = {name for state in states for name in state}
    return {name: {key: x for state in states for key, x in state.get(name, {}).items()} for name in names}


def assert_equal(one: WeightState, other: WeightState) -> None:
    assert one.keys() == other.keys()
    for name, by_key in one.items():
        assert by_key.keys() == other[name].keys()
        assert all(torch.equal(tensor, other[name][key]) for key, tensor in by_key.items())


def test_replicas_without_state_write_nothing() -> None:
    ownership = [Ownership(replica, 3) for replica in range(3)]
    for turn in range(6):
        assert [each.is_writer(turn) for each in ownership].count(True) == 1
        writers = [each.is_writer(turn, idle=(1,)) for each in ownership]
        assert writers == [turn % 2 == 0, False, turn % 2 == 1]
