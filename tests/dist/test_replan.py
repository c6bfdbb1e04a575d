"""Law: a run whose layers move between memories and whose number of stages changes has the losses of the calm run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from lib.ranks import on_ranks
from lib.training import RELATIVE, make_config
from lib.views import ScriptedView, Trained, train_in_views

from acsgd.config.options import ElasticConfig, ReplicaConfig

STEPS = 9
ALL = (0, 1, 2, 3)
CALM = [ScriptedView(ALL, STEPS)]
FEWER_AND_MORE = [
    ScriptedView(ALL, 3),  # 4 stages; a snapshot after step 2
    ScriptedView((0, 2), 5),  # 2 stages, from that snapshot: 2 has the layers of 1, and 0 those of 3
    ScriptedView((0,), 7),  # 1 stage, from the snapshot after step 4
    ScriptedView((0, 1), 8),  # 2 stages, from the memory of 0
    ScriptedView((1, 0, 3), STEPS),  # 3 stages
]
LOST_STAGE = [ScriptedView(ALL, 5), ScriptedView((0, 2), 6), ScriptedView((1, 0, 3, 2), STEPS)]


@pytest.fixture(scope="module")
def runs(
    tiny_model: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
    selected: Callable[[str], set[str]],
) -> list[dict[str, Trained]]:
    """What each process has done, by name of the run; of modes, those that are selected."""
    path = tmp_path_factory.mktemp("views")
    elastic = ElasticConfig(replan=True, snapshot="2")
    four = dataclasses.replace(
        make_config(tiny_model(n_layer=2), path, steps=STEPS, stages=4, micro=1), elastic=elastic
    )
    four = dataclasses.replace(four, model=dataclasses.replace(four.model, freeze="*.h.*.attn.*"))
    two = dataclasses.replace(four, pp=dataclasses.replace(four.pp, stages=2))
    reading = dataclasses.replace(four, model=dataclasses.replace(four.model, offload="disk"))
    scripts = {
        "calm": (four, CALM),
        "fewer and more stages": (reading, FEWER_AND_MORE),
    }
    for mode in selected("mode"):
        scripts[f"lost stage, {mode}"] = dataclasses.replace(two, dp=ReplicaConfig(mode)), LOST_STAGE
    return on_ranks(4, train_in_views, path / "store", scripts)


def losses_of(runs: list[dict[str, Trained]], name: str) -> dict[int, float]:
    """Return the loss of each step, on which all processes agree: to rounding, since some were repeated."""
    losses: dict[int, float] = {}
    for process in runs:
        for step, loss in process[name].losses.items():
            assert losses.setdefault(step, loss) == pytest.approx(loss, rel=RELATIVE), step
    assert sorted(losses) == list(range(1, STEPS + 1))
    return losses


def test_the_number_of_stages_does_not_change_the_losses(runs: list[dict[str, Trained]]) -> None:
    """Nor do frozen parameters in files, which no process reads any more once other stages replace its own."""
    assert runs[0]["fewer and more stages"].origins == ["disk", "snapshot", "snapshot", "memory", "memory"]
    assert losses_of(runs, "fewer and more stages") == pytest.approx(losses_of(runs, "calm"), rel=RELATIVE)


@pytest.mark.parametrize("mode", [pytest.param("allreduce", marks=pytest.mark.soak)])
def test_a_stage_that_no_replica_holds_any_more_comes_from_the_snapshot(
    mode: str, runs: list[dict[str, Trained]]
) -> None:
    """Processes 1 and 3 held the second stage of two replicas; each had half of the copies of each stage."""
    assert runs[0][f"lost stage, {mode}"].origins == ["disk", "snapshot", "memory"]
    assert losses_of(runs, f"lost stage, {mode}") == pytest.approx(losses_of(runs, "calm"), rel=RELATIVE)


@pytest.mark.parametrize("mode", [pytest.param("diloco:inner=3", marks=pytest.mark.soak)])
def test_replicas_with_local_weights_return_to_the_global_weights_of_the_snapshot(
    mode: str, runs: list[dict[str, Trained]]
) -> None:
    run = [process[f"lost stage, {mode}"] for process in runs]
    assert run[0].origins == ["disk", "snapshot", "memory"]
    assert run[0].losses[STEPS] < run[0].losses[1]
    for step in range(1, STEPS + 1):
        by_stage: dict[int, set[str]] = {}
        for stage, digest in (process.digests[step] for process in run if step in process.digests and step > 6):
            by_stage.setdefault(stage, set()).add(digest)
        assert all(len(digests) == 1 for digests in by_stage.values()), step
