"""Laws of the buffers in which weights are exchanged."""

from __future__ import annotations

import torch
from torch import nn

from acsgd.dp.exchange.local_weights import make_buffers
from acsgd.shards.weights import Weight


def weight(key: str, n: int) -> Weight:
    param = nn.Parameter(torch.arange(float(n)))
    return Weight(key, param, param)


def test_every_weight_is_in_one_buffer_in_order_and_none_is_too_large() -> None:
    weights = [weight(str(index), n) for index, n in enumerate([3, 4, 4, 9, 1, 2, 8])]
    buffers = make_buffers(weights, max_elements=8)
    views = [buffer.layout.views(buffer.local) for buffer in buffers]
    assert [list(by_key) for by_key in views] == [["0", "1"], ["2"], ["3"], ["4", "5"], ["6"]]
    by_key = {key: view for each in views for key, view in each.items()}
    for each in weights:
        assert each.master.data_ptr() == by_key[each.key].data_ptr()
        assert torch.equal(each.master, torch.arange(float(len(each.master))))


def test_a_tied_weight_has_a_buffer_of_its_own() -> None:
    weights = [weight("a", 2), weight("head", 3)._replace(is_tied=True), weight("b", 2)]
    assert [list(buffer.layout.views(buffer.local)) for buffer in make_buffers(weights)] == [["head"], ["a", "b"]]
