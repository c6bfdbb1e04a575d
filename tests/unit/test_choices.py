"""Choices without effect, or that defeat their purpose, are reported at the start; plain runs report none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lib.saved import small_run

from acsgd.config.options import Config
from acsgd.launch import Launch
from acsgd.run.plan.job import prepare
from acsgd.run.setup.choices import CHOICES, describe_choices

TinyModel = Callable[..., Path]
QUIET = {"resid_pdrop": 0.0}
DROPOUT = {"resid_pdrop": 0.1}


def config_of(model: Path, directory: Path, sections: dict[str, dict[str, Any]]) -> Config:
    """Return a run of 100 steps with further options."""
    config = small_run(model, directory / "run", steps=100)
    changed = {name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
    return dataclasses.replace(config, **changed)


NO_EVALUATION = {"eval_fraction": 0.0}
WRONG: list[tuple[dict[str, dict[str, Any]], float, str]] = [
    ({"pp": {"forward": "fixpoint:bits=8"}}, 2, "pp.forward=fixpoint:bits=8 and pp.backward=none have no effect"),
    ({"pp": {"stages": 2, "forward": "hadamard", "exact_steps": 100}}, 2, "pp.exact_steps=100 sends everything"),
    ({"pp": {"stages": 2, "forward": "delta"}, "model": {"dropout_mask": "sample"}}, 0.5, "trained on twice in 0.50"),
    ({"pp": {"stages": 2, "forward": "delta"}}, 2, "draws new dropout masks in every step; give --model.dropout_mask"),
    ({"model": {"dropout_mask": "sample", "name": QUIET}}, 2, "but the model has no dropout"),
    ({"dp": {"mode": "cocktail"}}, 2, "dp.mode=cocktail has no effect: there is one replica"),
    ({"optim": {"loss_scale": 1024.0}}, 2, "optim.loss_scale=1024 has no effect: model.dtype=fp32"),
    ({"data": {"modes": "[A],[B],[C]"}}, 2, "data.sentinels and data.modes have no effect: data.objective=causal"),
    ({"data": {"window": 8}}, 2, "data.window=8 has no effect"),
    ({"data": NO_EVALUATION, "eval": {"metrics": "perplexity"}}, 2, "eval.metrics=perplexity has no effect"),
    ({"checkpoint": {"every": None, "keep_every": 10}}, 2, "give --checkpoint.every 10, or remove it"),
]
"""Options of a run, its number of epochs, and a part of the sentence: a row for each of CHOICES, in their order."""
GOOD: list[tuple[dict[str, dict[str, Any]], float]] = [
    ({}, 0.5),
    ({}, 3),
    ({"pp": {"stages": 2, "forward": "fixpoint:bits=8", "backward": "fixpoint:bits=8", "exact_steps": 10}}, 0.5),
    ({"pp": {"stages": 2, "forward": "delta:bits=4"}, "model": {"dropout_mask": "sample"}}, 3),
    ({"pp": {"stages": 2, "forward": "delta:bits=4"}, "model": {"name": QUIET}}, 3),
    ({"data": {"eval_fraction": 0.1}, "eval": {"metrics": "perplexity"}}, 3),
    ({"checkpoint": {"every": "5", "keep_every": 10}}, 3),
]


def sentences(sections: dict[str, dict[str, Any]], epochs: float, tiny_model: TinyModel, directory: Path) -> list[str]:
    """Return the sentences on a run of one replica. model.name: options of the model."""
    sections = {name: dict(values) for name, values in sections.items()}
    model = tiny_model("gpt2", n_layer=2, **sections.get("model", {}).pop("name", DROPOUT))
    config = config_of(model, directory, sections)
    return describe_choices(prepare(config, Launch(0, 0, config.pp.stages, config.pp.stages)), [epochs])


@pytest.mark.parametrize("row", range(len(CHOICES)))
def test_a_choice_without_effect_is_one_sentence(row: int, tiny_model: TinyModel, tmp_path: Path) -> None:
    sections, epochs, part = WRONG[row]
    (sentence,) = sentences(sections, epochs, tiny_model, tmp_path)
    assert part in sentence


@pytest.mark.parametrize(("sections", "epochs"), GOOD)
def test_a_good_run_has_none(
    sections: dict[str, dict[str, Any]], epochs: float, tiny_model: TinyModel, tmp_path: Path
) -> None:
    assert sentences(sections, epochs, tiny_model, tmp_path) == []
