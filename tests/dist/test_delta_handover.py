"""Laws of activation caches when a view follows another one: 2 replicas of 2 stages, in four processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from lib.ranks import on_ranks
from lib.training import RELATIVE, make_config
from lib.views import ScriptedView, Trained, train_in_views

STEPS = 8
TEXT = "the quick brown fox jumps over the lazy dog, again and again and " * 23
"""15 sequences, of which a step uses 6."""
QUANTIZED = 0.02
"""Relative difference of losses of runs whose activations were quantized to 4 bits differently."""
ALL, ONE_REPLICA, CROSSED = (0, 1, 2, 3), (0, 1), (0, 3)
SCRIPTS = {
    "calm": [ScriptedView(ALL, STEPS)],
    "same processes": [ScriptedView(ALL, 5), ScriptedView(ALL, STEPS)],
    "in a step": [ScriptedView(ALL, 5, late=ALL), ScriptedView(ALL, STEPS)],
    "one replica": [ScriptedView(ALL, 5), ScriptedView(ONE_REPLICA, STEPS)],
    "other pairs": [ScriptedView(ALL, 5), ScriptedView(CROSSED, STEPS)],
    "joined": [ScriptedView(ONE_REPLICA, 5), ScriptedView(ALL, STEPS)],
}


@pytest.fixture(scope="module")
def runs(
    tiny_model: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
    selected: Callable[[str], set[str]],
) -> dict[str, Trained]:
    """What rank 0 has done, by script: in all of them if some are selected, or in those without a parameter."""
    path = tmp_path_factory.mktemp("views")
    (path / "little.txt").write_text(TEXT)
    config = make_config(tiny_model(n_layer=2), path, steps=STEPS, stages=2, micro=1, forward="delta:bits=4")
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, sources=str(path / "little.txt")))
    names = SCRIPTS if selected("script") else ("calm", "same processes")
    scripts = {name: (config, SCRIPTS[name]) for name in names}
    return on_ranks(4, train_in_views, path / "store", scripts)[0]


def test_caches_of_links_that_are_connected_again_are_used_on(runs: dict[str, Trained]) -> None:
    assert runs["same processes"].forward_bytes == runs["calm"].forward_bytes
    assert runs["same processes"].losses == pytest.approx(runs["calm"].losses, rel=RELATIVE)


@pytest.mark.soak
@pytest.mark.parametrize("script", ["in a step"])
def test_a_repeated_step_sends_differences_to_what_its_first_attempt_has_sent(
    script: str, runs: dict[str, Trained]
) -> None:
    calm, repeated = runs["calm"], runs[script]
    assert [repeated.losses[step] for step in range(1, 6)] == [calm.losses[step] for step in range(1, 6)]
    assert repeated.forward_bytes[6] <= calm.forward_bytes[6]  # as many hits, or more
    assert repeated.losses[STEPS] == pytest.approx(calm.losses[STEPS], rel=QUANTIZED)


@pytest.mark.soak
@pytest.mark.parametrize("script", ["one replica", "other pairs", "joined"])
def test_caches_of_links_between_other_processes_agree_before_they_are_used(
    script: str, runs: dict[str, Trained]
) -> None:
    calm, changed = runs["calm"], runs[script]
    assert sorted(changed.losses) == list(range(1, STEPS + 1))
    assert changed.losses[STEPS] == pytest.approx(calm.losses[STEPS], rel=QUANTIZED)


@pytest.mark.soak
@pytest.mark.parametrize("script", ["other pairs"])
def test_only_links_between_other_processes_begin_with_cache_misses(script: str, runs: dict[str, Trained]) -> None:
    hits, misses = runs["one replica"].forward_bytes, runs[script].forward_bytes
    assert sum(hits[step] for step in (6, 7, 8)) < sum(misses[step] for step in (6, 7, 8))
