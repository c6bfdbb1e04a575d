"""Law: compiled blocks compute what the others do, with the same dropout masks.

A compiler may sum in another order, so each number is off by some units in the last place; 2e-5 of the largest one is a
hundred of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lib.direct import (
    SEQUENCE,
    VOCABULARY,
    build_stages,
    descend,
    digest,
    draw_batch,
    gradients,
    make_config,
    session_of,
)
from lib.models import blocks_of, dropout_of, tiny_config
from torch import Tensor

from acsgd.layers import composed
from acsgd.optim.ownership import OwnedWeights, Ownership
from acsgd.pp import Action, Op
from acsgd.pp.nan_probe import NaNProbe
from acsgd.pp.saved_activations import ActivationOffload
from acsgd.pp.stage import MicroBatch
from acsgd.streams import Streams

INDUCTOR = composed.COMPILE


def step(family: str, *, compiles: bool, offloads: bool = False) -> list[Tensor]:
    """Return the losses of two micro-batches, and the gradients. offloads: whether activations are."""
    config = tiny_config(family, vocab_size=VOCABULARY, **blocks_of(family, 2), **dropout_of(family))
    activations = ActivationOffload(Streams(torch.device("cpu"))) if offloads else None
    (stage,) = build_stages(config, [range(4)], compiles=compiles, activations=activations)
    ids = torch.randint(VOCABULARY, (2, 2, SEQUENCE), generator=torch.Generator().manual_seed(0))
    losses = []
    for index, tokens in enumerate(ids):
        micro = MicroBatch(0, index, index, (2 * index, 2 * index + 1))
        losses.append(stage.forward(micro, {"input_ids": tokens}, {}, tokens)["loss"])
        stage.backward(index, None, last=index == 1)
    grads = [weight.master.grad for weight in stage.weights]
    return losses + [grad for grad in grads if grad is not None]


@pytest.mark.parametrize(
    ("family", "arguments", "tolerance"),
    [
        pytest.param("gpt2", {"backend": "eager"}, 0.0, id="gpt2, captured"),  # has dropout
        *(
            pytest.param(family, arguments, tolerance, id=f"{family}, {name}", marks=pytest.mark.soak)
            for family in ("gpt2", "llama")
            for name, arguments, tolerance in (("traced", {"backend": "aot_eager"}, 0.0), ("inductor", INDUCTOR, 2e-5))
        ),
    ],
)
def test_compiled_blocks_equal_the_others(
    family: str, arguments: dict[str, Any], tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(composed, "COMPILE", arguments)
    torch._dynamo.reset()
    compiled = step(family, compiles=True)
    for ours, expected in zip(compiled, step(family, compiles=False), strict=True):
        assert (ours - expected).abs().max() <= tolerance * expected.abs().max()
    assert all(map(torch.equal, step(family, compiles=True, offloads=True), compiled))


def test_compiled_blocks_use_parameters_that_are_fetched(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(composed, "COMPILE", {"backend": "eager"})
    torch._dynamo.reset()
    config = make_config(tiny_model("llama", num_hidden_layers=1), tmp_path, micro=2)
    kept = replace(config, model=replace(config.model, compile=True), optim=replace(config.optim, offload="cpu"))
    found = []
    for run in (kept, replace(kept, model=replace(kept.model, offload="cpu"))):
        with session_of(run, 0, 1, str(tmp_path / run.model.offload)) as session:
            losses = []
            for number in range(2):
                losses.append(session.pipeline.run(draw_batch(run, number), number).item())
                descend(session.weights)
            found.append((losses, digest(gradients(session))))
    assert found[0] == found[1]


def test_a_search_for_a_nan_names_a_module_inside_a_compiled_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composed, "COMPILE", {"backend": "eager"})
    torch._dynamo.reset()
    (stage,) = build_stages(
        tiny_config("llama", vocab_size=VOCABULARY, **blocks_of("llama", 2)), [range(4)], compiles=True
    )
    tokens = torch.zeros(2, SEQUENCE, dtype=torch.long)
    module = "model.layers.1.mlp.act_fn"

    def forward() -> None:
        stage.forward(MicroBatch(0, 0, 0, (0, 1)), {"input_ids": tokens}, {}, tokens)
        stage.backward(0, None, last=True)

    forward()  # compiles the blocks without hooks
    activation = stage.composed.model.get_submodule(module)
    monkeypatch.setattr(activation, "forward", lambda x: x * torch.nan)
    with (
        NaNProbe({0: stage}, OwnedWeights(stage.weights, Ownership(0, 1)), [0]) as probe,
        probe.during(Action(Op.F, 0, 0)),
    ):
        forward()
    assert probe.first is not None
    assert probe.first.tensor == f"output of {module}"
