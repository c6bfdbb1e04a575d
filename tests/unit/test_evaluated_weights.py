"""Law of an evaluation that cannot load its weights: training goes on with its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from acsgd.errors import RunError
from acsgd.run.session import _evaluated_weights
from acsgd.shards.weights import Weight


def test_parameters_are_restored_if_the_evaluated_weights_cannot_be_loaded() -> None:
    """Of the second of two stages, whose other replicas fail."""
    params = [nn.Parameter(torch.full((2,), float(number))) for number in range(2)]
    stages = {}
    for number, param in enumerate(params):

        def share_parts(number: int = number) -> None:
            if number:
                raise RunError("a replica failed")

        weights = {"w": torch.full((2,), 9.0)}
        sync = SimpleNamespace(global_weights=lambda weights=weights: weights, share_parts=share_parts)
        stages[number] = SimpleNamespace(sync=sync, weights=[Weight("w", param, param)])
    session: Any = SimpleNamespace(stages=stages, owned=SimpleNamespace(of=lambda weights: weights))
    with pytest.raises(RunError, match="a replica failed"), _evaluated_weights(session):
        pass
    for number, param in enumerate(params):
        assert (param == number).all()
