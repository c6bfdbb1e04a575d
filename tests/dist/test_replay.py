"""Law: the new rank of a lost stage has its state bit for bit, and all others keep theirs and repeat no step."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from lib.corpora import write_records
from lib.ranks import on_ranks
from lib.training import make_config
from lib.views import ScriptedView, Trained, train_in_views

from acsgd.config.options import Config, ElasticConfig

STEPS = 9
CALM = [ScriptedView((0, 1, 2), STEPS)]
LOST = {
    "first": [ScriptedView((0, 1, 2), 5, late=(1,)), ScriptedView((3, 1, 2), STEPS)],
    "middle": [ScriptedView((0, 1, 2), 5), ScriptedView((0, 3, 2), STEPS)],
    "last": [ScriptedView((0, 1, 2), 5), ScriptedView((0, 1, 3), STEPS)],
}
"""A process ends some steps after the snapshot of step 3, and process 3 takes its place."""
LOGGED = 6.5
"""Steps that fit a small log, so that a snapshot is due every 3 steps."""
SKIPPED = 6
"""Step whose update is skipped: that which a rank has reported and not applied when the first process ends."""
TWICE = [*LOST["middle"][:1], ScriptedView((0, 3, 2), 6), ScriptedView((0, 3, 1), STEPS)]
"""The process beside the new one ends, too, before the next snapshot."""


def configs(model: Path, path: Path) -> dict[str, Config]:
    """Return a run with a tied table, dropout and streamed text, and one with codecs and two stages per process."""
    write_records(path / "a.jsonl")
    exact = make_config(model, path, steps=STEPS, stages=3, micro=1)
    sources = f"stream:{path / 'a.jsonl'}:0.5,demo:0.5"
    data, elastic = dataclasses.replace(exact.data, sources=sources), ElasticConfig(snapshot="3")
    exact = dataclasses.replace(exact, data=data, elastic=elastic)
    pp = dataclasses.replace(
        exact.pp, forward="fixpoint:bits=8", backward="fixpoint:bits=8", tied="dense", schedule="interleaved:chunks=2"
    )
    return {"exact": exact, "coded": dataclasses.replace(exact, pp=pp)}


@pytest.fixture(scope="module")
def runs(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Trained]]:
    """What each process has done, by name of the run."""
    path = tmp_path_factory.mktemp("views")
    by_name = configs(tiny_model(), path)
    exact, coded = by_name["exact"], by_name["coded"]
    scripts = {f"{name} calm": (config, CALM) for name, config in by_name.items()}
    scripts |= {f"exact {position}": (exact, script) for position, script in LOST.items()}
    scripts |= {"coded last": (coded, LOST["last"]), "exact twice": (exact, TWICE)}
    skipping = [[view._replace(skipped=SKIPPED) for view in script] for script in (CALM, LOST["first"])]
    scripts |= dict(zip(("skipping calm", "skipping first"), ((exact, script) for script in skipping), strict=True))
    no_log = dataclasses.replace(exact.elastic, replay_log=0)
    hidden = json.loads((tiny_model() / "config.json").read_text())["n_embd"]
    step_bytes = 2 * 4 * exact.data.batch * exact.data.sequence * hidden  # of the rank that sends most, without headers
    seldom = dataclasses.replace(exact.elastic, snapshot="100", replay_log=LOGGED * step_bytes / 2**30)
    scripts["exact filling"] = (dataclasses.replace(exact, elastic=seldom), LOST["middle"])
    small = dataclasses.replace(exact.elastic, replay_log=0.5 * step_bytes / 2**30)
    scripts["exact small log"] = (dataclasses.replace(exact, elastic=small), LOST["middle"])
    scripts["exact without log"] = (dataclasses.replace(exact, elastic=no_log), LOST["middle"])
    return on_ranks(4, train_in_views, path / "store", scripts)


def assert_calm(runs: list[dict[str, Trained]], name: str) -> None:
    """Check loss and state of each step against those of the run that nothing disturbs, bit for bit."""
    calm = [process[f"{name.split()[0]} calm"] for process in runs[:3]]
    expected = {step: {process.digests[step] for process in calm} for step in range(1, STEPS + 1)}
    for process in (each[name] for each in runs):
        assert process.losses == {step: calm[0].losses[step] for step in process.losses}
        assert all(digest in expected[step] for step, digest in process.digests.items())
    assert {step for each in runs for step in each[name].losses} == {*range(1, STEPS + 1)}
    assert {each[name].digests[STEPS] for each in runs if STEPS in each[name].digests} == expected[STEPS]


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("exact first", [3]),
        ("exact middle", [2]),
        ("exact last", [2]),
        ("coded last", [2]),
        ("exact twice", [2, 3]),
        ("skipping first", [3]),
        ("exact filling", [2]),
    ],
)
def test_a_lost_stage_is_replayed_and_no_other_rank_repeats_a_step(
    runs: list[dict[str, Trained]], name: str, steps: list[int]
) -> None:
    origins = ["disk", *(f"replay of {number} steps" for number in steps)]
    assert origins in [process[name].origins for process in runs]
    assert_calm(runs, name)


@pytest.mark.parametrize("name", ["exact without log", "exact small log"])
def test_without_a_log_all_return_to_the_snapshot(runs: list[dict[str, Trained]], name: str) -> None:
    assert runs[0][name].origins == ["disk", "snapshot"]
    assert runs[3][name].origins == ["snapshot"]


def test_a_log_that_is_too_small_is_reported_once(runs: list[dict[str, Trained]]) -> None:
    (note,) = runs[0]["exact small log"].notes
    assert re.match(r"the log of sent messages has room for 0\.[45] steps; ", note)
    assert not any(each[name].notes for each in runs for name in each if name != "exact small log")
