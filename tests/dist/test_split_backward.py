"""Law of a backward in two parts, gradients of inputs and of weights: training is bit for bit that of whole ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from lib.direct import descend, digest, draw_batch, gradients, make_config, session_of
from lib.models import DROPOUT
from lib.ranks import on_ranks
from torch import Tensor

from acsgd.config.options import AdapterConfig, Config
from acsgd.optim.fetch import LayerFetch
from acsgd.pp.passes import backward_inputs

TinyModel = Callable[..., Path]
QUANTIZED = {"forward": "fixpoint:bits=4", "backward": "fixpoint:bits=8"}


def train_on_rank(rank: int, world_size: int, store: Path, configs: Sequence[Config]) -> list[tuple[list[float], str]]:
    """Return the losses of two steps and a hash of the weights and gradients after them, for each config."""
    trained = []
    for number, config in enumerate(configs):
        with session_of(config, rank, world_size, f"{store}-{number}") as session:
            losses = []
            for step in range(2):
                losses.append(session.pipeline.run(draw_batch(config, step, session.job.micro_ids), step).item())
                descend(session.weights)
                session.send_ahead()
            trained.append((losses, digest([w.param for w in session.weights] + gradients(session))))
    return trained


NAMES = ("rows in 4 bits", "adapter in 16 bits", "copies", "16 bits")


@pytest.mark.parametrize(
    ("stages", "names"),
    [(2, NAMES[:2]), *(pytest.param(*each, marks=pytest.mark.soak) for each in ((2, NAMES[2:]), (4, NAMES)))],
)
def test_training_in_two_parts_is_that_of_whole_backwards(
    tiny_model: TinyModel, tmp_path: Path, stages: int, names: Sequence[str]
) -> None:
    """With dropout, masks per sample, copies and rows of a tied head, codecs, 16 bits, and adapters."""
    tied, untied = tiny_model(**DROPOUT, n_layer=2 * stages), tiny_model("llama", num_hidden_layers=2 * stages)
    in_16_bits = make_config(untied, tmp_path, stages=stages, dtype="bf16")
    configs = {
        "rows in 4 bits": make_config(tied, tmp_path, stages=stages, **QUANTIZED),
        "adapter in 16 bits": replace(in_16_bits, adapter=AdapterConfig(spec="lora")),
        "copies": make_config(tied, tmp_path, stages=stages, tied="dense", dropout_mask="sample"),
        "16 bits": in_16_bits,
    }
    whole = [configs[name] for name in names]
    split, split_last, folded = (
        [with_schedule(config, spec) for config in whole] for spec in ("zb", "1f1b:split_last=true", "zbv")
    )
    by_rank = on_ranks(stages, train_on_rank, tmp_path / "store", [*whole, *split, *split_last, *folded])
    for trained in by_rank:
        assert trained[: 3 * len(whole)] == 3 * trained[: len(whole)]
    # of zbv, ranks have other layers, and codecs are at other boundaries
    by_config = [[losses for losses, _ in ranks] for ranks in zip(*by_rank, strict=True)]
    totals = [[sum(step) for step in zip(*ranks, strict=True)] for ranks in by_config]
    for name, ours, others in zip(names, totals[: len(whole)], totals[-len(whole) :], strict=True):
        if configs[name].pp.forward == "none":
            assert ours == pytest.approx(others, rel=1e-5), name
        if name == "16 bits":
            assert ours == others


def with_schedule(config: Config, schedule: str) -> Config:
    """Return a run with another schedule."""
    return replace(config, pp=replace(config.pp, schedule=schedule))


@pytest.mark.parametrize(
    ("family", "schedules"),
    [
        ("llama", ["zb", "1f1b:split_last=true"]),
        *(pytest.param("gpt2", [each], marks=pytest.mark.soak) for each in ("zb", "1f1b:split_last=true")),
    ],
)
def test_both_parts_fetch_offloaded_parameters(
    family: str, schedules: Sequence[str], tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer after the other, or all of them if a table is embedding and head of the same stage.

    split_last splits the backward of the last micro-batch; the others are whole. Each layer is fetched while the one
    behind it runs.
    """
    enters, enter = list[tuple[int, int]](), LayerFetch.enter

    def recorded(self: LayerFetch, group: int, ahead: int) -> None:
        enters.append((group, ahead))
        enter(self, group, ahead)

    monkeypatch.setattr(LayerFetch, "enter", recorded)
    blocks = {"llama": {"num_hidden_layers": 2}, "gpt2": {"n_layer": 2}}
    config = make_config(tiny_model(family, **blocks[family]), tmp_path, schedule=schedules[0])
    model, optim = replace(config.model, offload="cpu"), replace(config.optim, offload="cpu")
    offloaded = replace(config, model=model, optim=optim)
    found = []
    for number, each in enumerate((config, *(with_schedule(offloaded, schedule) for schedule in schedules))):
        with session_of(each, 0, 1, str(tmp_path / f"store-{number}")) as session:
            [stage] = session.stages.values()
            assert stage.graph_per_layer == (family == "llama")
            loss = session.pipeline.run(draw_batch(each, 0), 0).item()
            found.append((loss, digest(gradients(session))))
            parameters = map(stage.composed.model.get_parameter, session.job.offloaded)
            assert all(each.isnan().all() for each in parameters), "they are freed"
    assert found == [found[0]] * len(found)
    assert all(ahead == behind for (group, ahead), (behind, _) in pairwise(enters) if behind == group - 1)


class Shared(torch.nn.Module):
    """Uses a weight once, twice, and beside the way from the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.once, self.twice, self.free = (torch.nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.twice(self.once(self.twice(x)).tanh()), self.free.weight.square()


def test_each_gradient_is_accumulated_once_also_of_weights_with_several_uses() -> None:
    """Codecs and optimizers count on one call of a parameter's hooks per backward."""
    torch.manual_seed(0)
    model, x = Shared(), torch.randn(4, 8, requires_grad=True)
    grads = [torch.randn_like(output) for output in model(x)]
    accumulated: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: accumulated.append(name))
    backward_weights = backward_inputs([x], model(x), grads)
    assert x.grad is not None
    assert not accumulated
    backward_weights()
    assert sorted(accumulated) == ["free.weight", "once.weight", "twice.weight"]
    found = [x.grad, *(parameter.grad for parameter in model.parameters())]
    expected = torch.autograd.grad(model(x), [x, *model.parameters()], grads)
    for mine, whole in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, whole)
