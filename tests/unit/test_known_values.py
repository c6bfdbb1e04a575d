"""Values on fake tensors: a function of the inputs alone branches as on real ones, and nothing else has values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from acsgd.layers.recorders import LARGEST, KnownValues

IDS = torch.tensor([[5, 2, 7, 0], [2, 9, 0, 0], [4, 8, 3, 2]])

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "arithmetic": lambda ids: (ids * 2 + torch.tensor(3)).sum(dim=1),
    "masks": lambda ids: ids.eq(2).float().masked_fill(ids == 0, float("-inf")),
    "views written in place": lambda ids: _shifted(ids),
    "shapes that depend on values": lambda ids: ids[ids > 0].unique(),
    "positions": lambda ids: torch.arange(ids.shape[1]).expand_as(ids)[ids == 2],
    "overwritten": lambda ids: torch.zeros_like(ids).scatter_(1, ids % 4, 1).cumsum(dim=1),
}


def _shifted(ids: Tensor) -> Tensor:
    shifted = ids.new_zeros(ids.shape)
    shifted[:, 1:] = ids[:, :-1].clone()
    shifted[:, 0] = 1
    return shifted


def on_fake_ids(function: Callable[[Tensor], object]) -> tuple[object, set[str]]:
    """Run a function of IDS on fake tensors; return its result and the inputs whose values it read."""
    value = IDS.clone()
    with FakeTensorMode(allow_non_fake_inputs=True), KnownValues() as known:
        result = function(known.add("input_ids", value))
        return result, known.take_read()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_are_those_of_real_tensors(name: str) -> None:
    function = FUNCTIONS[name]
    found, read = on_fake_ids(lambda ids: function(ids).tolist())
    assert found == function(IDS).tolist()
    assert read == {"input_ids"}


def test_rows_that_a_mask_selects_have_shape_and_gradients() -> None:
    """Of a tensor without values, such as the hidden state that a classifier of T5 or BART takes at each end."""

    def gradient(ids: Tensor) -> torch.Size:
        hidden = torch.empty(3, 4, 6, requires_grad=True)
        ends = hidden[ids.eq(2), :]
        assert ends.shape == (3, 6)
        (found,) = torch.autograd.grad(ends.sum(), [hidden])
        return found.shape

    assert on_fake_ids(gradient) == (torch.Size([3, 4, 6]), {"input_ids"})


def test_shapes_alone_read_no_values() -> None:
    assert on_fake_ids(lambda ids: ids.new_ones(ids.shape[1]).sum().item()) == (4, set())


UNKNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "parameters": lambda ids: torch.empty(16, 2)[ids],
    "random numbers": lambda ids: torch.rand(ids.shape),
    "random numbers like an input": lambda ids: torch.randint_like(ids, 9),
    "values written over known ones": lambda ids: ids.copy_(torch.empty(3, 4, dtype=torch.long)),
    "a view of values written over": lambda ids: _written(ids),
    "large tensors": lambda ids: ids[0, 0].expand(LARGEST + 1) + 1,
}


def _written(ids: Tensor) -> Tensor:
    view = ids[1]
    ids.copy_(torch.empty(3, 4, dtype=torch.long))
    return view


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_depends_on_anything_else_has_no_values(name: str) -> None:
    with pytest.raises(DataDependentOutputException):
        on_fake_ids(lambda ids: UNKNOWN[name](ids).sum().item())
