"""Laws of the ownership of optimizer state: parts add up to the whole, each once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from acsgd.config.options import OptimConfig
from acsgd.optim import OPTIMIZERS
from acsgd.optim.base import Optimizer
from acsgd.optim.gradient_scale import squared_norm
from acsgd.optim.ownership import OwnedWeights, Ownership, Part, join_parts
from acsgd.shards.weights import Weight, WeightState

CONFIG = OptimConfig(lr=0.01, steps=3)
SPLIT = (Part("table", 0, 3, (0,)), Part("table", 3, 5, (1,)))
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


def two_ranks(parts: Sequence[Part], dtype: torch.dtype = torch.float32) -> list[Rank]:
    return [Rank(Ownership(replica, 2, tuple(parts)), dtype) for replica in range(2)]


def test_whole_weights_are_owned_by_all_replicas_as_they_are() -> None:
    for rank in two_ranks(()):
        owned = rank.owned.of(rank.weights)
        assert all(each is weight for each, weight in zip(owned, rank.weights, strict=True))
        assert rank.owned.counted == owned
        assert rank.owned.ownership.squared_norms([2.0, 3.0]) == [2.0, 3.0]


def test_a_part_shares_the_memory_of_its_weight() -> None:
    weights = new_weights(torch.bfloat16)
    for replica, (start, stop) in enumerate([(0, 3), (3, 5)]):
        (part,) = OwnedWeights(weights, Ownership(replica, 2, SPLIT)).of(weights[:1])
        assert part.key == f"table[{start}:{stop}]"
        with torch.no_grad():
            part.master.fill_(replica)
            part.param.fill_(-replica)
        assert (weights[0].master[start:stop] == replica).all()
        assert (weights[0].param[start:stop] == -replica).all()


def test_the_gradient_norm_counts_each_part_once() -> None:
    ranks = two_ranks(SPLIT)
    for rank in ranks:
        rank.set_gradients(gradients(0))
    expected = sum(float(grad.double().square().sum()) for grad in gradients(0).values())
    squares = [float(squared_norm(rank.owned.counted)) for rank in ranks]
    for rank in ranks:
        assert rank.owned.ownership.squared_norms(squares) == pytest.approx([expected] * 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_owners_of_parts_together_step_as_the_owner_of_the_whole(dtype: torch.dtype) -> None:
    whole, ranks = Rank(Ownership(0, 1), dtype), two_ranks(SPLIT, dtype)
    for step in range(3):
        for rank in (whole, *ranks):
            rank.set_gradients(gradients(step))
            rank.optimizer.step(step)
    table, *others = whole.weights
    for kind in ("param", "master"):
        parts = [getattr(ranks[0].weights[0], kind)[:3], getattr(ranks[1].weights[0], kind)[3:]]
        assert torch.equal(torch.cat(parts), getattr(table, kind))
        for rank in ranks:
            for weight, expected in zip(rank.weights[1:], others, strict=True):
                assert torch.equal(getattr(weight, kind), getattr(expected, kind))


@pytest.mark.parametrize("turn", range(4))
@pytest.mark.parametrize("parts", [(), SPLIT, (*SPLIT[:1], Part("table", 3, 5, (0, 1)))])
def test_each_part_is_written_once_and_the_written_ones_make_the_whole(parts: tuple[Part, ...], turn: int) -> None:
    whole, ranks = Rank(Ownership(0, 1)), two_ranks(parts)
    for rank in (whole, *ranks):
        rank.set_gradients(gradients(0))
        rank.optimizer.step(0)
    written = [rank.owned.ownership.written(rank.state(), turn) for rank in ranks]
    names = [{(name, key) for name, by_key in state.items() for key in by_key} for state in written]
    assert not names[0] & names[1]
    state: WeightState = {}
    for each in written:
        for name, by_key in each.items():
            state.setdefault(name, {}).update(by_key)
    assert_equal(join_parts(state), whole.state())
    restored = two_ranks(SPLIT)  # which may own other parts than those that were saved
    for rank in restored:
        rank.owned.load_state(rank.optimizer, rank.weights, state)
    first, second = (rank.state() for rank in restored)
    assert_equal(join_parts({name: first[name] | second[name] for name in first}), whole.state())


def assert_equal(one: WeightState, other: WeightState) -> None:
    assert one.keys() == other.keys()
    for name, by_key in one.items():
        assert by_key.keys() == other[name].keys()
        assert all(torch.equal(tensor, other[name][key]) for key, tensor in by_key.items())


def test_replicas_without_state_write_nothing() -> None:
    ownership = [Ownership(replica, 3) for replica in range(3)]
    for turn in range(6):
        assert [each.is_writer("layer", turn) for each in ownership].count(True) == 1
        writers = [each.is_writer("layer", turn, idle=(1,)) for each in ownership]
        assert writers == [turn % 2 == 0, False, turn % 2 == 1]
