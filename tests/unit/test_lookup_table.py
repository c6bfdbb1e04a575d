"""Laws of the stand-in for a table of which a rank has the rows of its batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from acsgd.layers.skeleton import set_parameter
from acsgd.layers.stand_ins import LookupTable

VOCABULARY, WIDTH = 10, 4


def embeddings(dtype: torch.dtype, padding: int | None) -> tuple[nn.Embedding, nn.Embedding, LookupTable]:
    """Return a whole embedding, and one with the same values whose table is a stand-in without rows."""
    torch.manual_seed(0)
    whole, other = (nn.Embedding(VOCABULARY, WIDTH, padding_idx=padding, dtype=dtype) for _ in range(2))
    table = LookupTable(whole.weight.shape, dtype, torch.device("cpu"))
    set_parameter(other, "weight", table)
    return whole, other, table


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding", [None, 3, -1])
def test_rows_and_their_gradients_are_those_of_the_whole_table(dtype: torch.dtype, padding: int | None) -> None:
    """Bit for bit; gradients of several backward passes are summed in fp32. A padding row has none."""
    whole, other, table = embeddings(dtype, padding)
    ids = torch.tensor([[1, 3, 5], [5, 5, 9]])
    used = ids.unique()
    for _ in range(2):  # the second time with other rows, and without the gradient of the first
        table.reset(used)
        table.load(slice(0, 2), whole.weight.detach()[used[:2]])
        table.load(slice(2, len(used)), whole.weight.detach()[used[2:]])
        summed = torch.zeros(VOCABULARY, WIDTH)
        for _ in range(3):
            outputs = whole(ids), other(ids)
            assert torch.equal(*outputs)
            grad = torch.randn(ids.shape + (WIDTH,)).to(dtype)
            for output in outputs:
                output.backward(grad)
            assert whole.weight.grad is not None
            summed += whole.weight.grad
            whole.weight.grad = None
        assert torch.equal(table.gradient, summed[used])
        used = torch.arange(VOCABULARY)
    table.clear_gradient()
    assert not table.gradient.any()


def test_what_is_not_loaded_is_nan() -> None:
    whole, other, table = embeddings(torch.float32, None)
    assert other(torch.tensor([4])).isnan().all()
    table.reset(torch.tensor([4, 6]))
    table.load(slice(0, 1), whole.weight.detach()[4:5])
    assert other(torch.tensor([4])).isfinite().all()
    assert other(torch.tensor([5])).isnan().all(), "no room for it"
    assert other(torch.tensor([6])).isnan().all(), "not yet"
    assert (torch.ones(1, WIDTH) @ table.T).isnan().all(), "use as a head"


def test_it_looks_like_the_parameter_and_takes_no_memory_for_its_values() -> None:
    _, other, table = embeddings(torch.bfloat16, None)
    assert isinstance(other.weight, nn.Parameter)
    assert (table.shape, table.dtype, table.requires_grad) == ((VOCABULARY, WIDTH), torch.bfloat16, False)
    assert table.untyped_storage().nbytes() == 2
    assert [name for name, _ in other.named_parameters()] == ["weight"]
