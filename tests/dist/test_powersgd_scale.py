"""What PowerSGD owes is in gradients as they are, whatever scale keeps them from underflow in fp16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_own_weights import on_replicas
from test_powersgd import SHAPES, SPECS, Run

from acsgd.dp.exchange.peers import Peers


def scale_losses(rank: int, peers: Peers, spec: str) -> bool:
    """Whether a loss scale, another power of two in each step, changes no bit of anything but the scale."""
    plain, scaled = Run(spec, peers), Run(spec, peers)
    same = []
    for step, scale in enumerate([1.0, 2.0**12, 2.0**11, 0.5, 2.0**7, 1.0]):
        expected, found = plain.make(step), scaled.make(step, scale=scale)
        same += [torch.equal(found.applied[key], scale * expected.applied[key]) for key in SHAPES]
        same += [torch.equal(found.error(key), expected.error(key)) for key in SHAPES]
    return all(same)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("spec", SPECS)
def test_what_is_owed_does_not_depend_on_the_scale_of_losses(spec: str, replicas: int, tmp_path: Path) -> None:
    assert on_replicas(replicas, scale_losses, tmp_path / "store", spec) == [True] * replicas
