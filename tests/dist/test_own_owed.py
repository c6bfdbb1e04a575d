"""Law: what replicas have not told each other yet stays owed, in training and when their number changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from test_own_weights import LR, SPECS, STEPS, Run, copied, gradients, on_replicas
from torch import Tensor

from acsgd.dp.exchange.peers import Peers
from acsgd.shards.weights import WeightState

OWED = {"local_weights", "residual", "server_residual", "outer_momentum", "sent_update"}
"""Names of what is remembered that makes weights change later."""


def train_and_keep(rank: int, peers: Peers, spec: str) -> tuple[dict[str, Tensor], WeightState]:
    run = Run(spec, peers)
    run.go(rank, range(STEPS))
    return run.model(), copied(run.sync.state_dict())


def take_over(rank: int, peers: Peers, spec: str, model: dict[str, Tensor], saved: list[WeightState]) -> WeightState:
    run = Run(spec, peers)
    run.restore(model, saved)
    return copied(run.sync.state_dict())


def owed(model: dict[str, Tensor], states: Sequence[WeightState], name: str, *, mean: bool) -> dict[str, Tensor]:
    """Return the sum or mean over the replicas of something remembered; of "own", what it is ahead of the model."""
    ahead = model if name == "local_weights" else dict.fromkeys(model, torch.zeros(()))
    sums = {k: sum((s[name][k].double() - ahead[k].double() for s in states), torch.zeros(())) for k in model}
    return {key: total / len(states) if mean else total for key, total in sums.items()}


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec != "local"])
@pytest.mark.parametrize("replicas", [2, 3])
def test_what_is_owed_outlives_a_change_of_the_number_of_replicas(spec: str, replicas: int, tmp_path: Path) -> None:
    kept = on_replicas(3 if replicas == 2 else 2, train_and_keep, tmp_path / "before", spec)
    model, states = kept[0][0], [state for _, state in kept]
    after = on_replicas(replicas, take_over, tmp_path / "after", spec, model, states)
    for name in OWED & states[0].keys():
        before, now = (owed(model, each, name, mean=name != "server_residual") for each in (states, after))
        may_be_zero = "topk=1" in spec or name in ("local_weights", "sent_update")
        assert any(tensor.any() for tensor in before.values()) or may_be_zero
        for key, total in before.items():
            magnitude = max(float(state[name][key].abs().max()) for state in states)
            assert (now[key] - total).abs().max() <= 4 * 2.0**-24 * magnitude, (name, key)


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize(
    "spec",
    [
        "cocktail",
        "cocktail:random=0.4,topk=0.3,bits=2,group=16,sampling=shuffled",
        "sparseloco:inner=2,chunk=16,topk=0.25,decay=1",
        "cocktail_grad:topk=0.1",
        "quantized:bits=2,group=16,exact_steps=2",
    ],
)
def test_nothing_of_a_change_is_lost(spec: str, replicas: int, tmp_path: Path) -> None:
    """The replicas' weights, in the mean, and what is owed, are all changes that were made; no gain, no decay.

    A step adds to each of these at most 8 times something no larger than the largest of them, rounding each time.
    """
    kept = on_replicas(replicas, train_and_keep, tmp_path / "store", spec)
    states = [state for _, state in kept]
    for index, key in enumerate(kept[0][0]):
        own = torch.stack([state.get("local_weights", model)[key].double() for model, state in kept]).mean(0)
        served = sum((state.get("server_residual", {}).get(key, torch.zeros(())).double() for state in states), own * 0)
        unsaid = sum((state.get("residual", {}).get(key, torch.zeros(())).double() for state in states), own * 0)
        made = [gradients(rank, step)[index].double() for rank in range(replicas) for step in range(STEPS)]
        expected = -LR * torch.stack(made).sum(0) / replicas
        largest = LR * float(torch.stack(made).abs().sum(0).max())
        missing = own + served + unsaid / replicas - expected
        assert missing.abs().max() <= 8 * STEPS * 2.0**-24 * largest
        assert (served + unsaid).any() or own.numel() < 8
