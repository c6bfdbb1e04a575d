"""Laws of the cache of layers: it returns what was verified or estimated, for the same model alone."""

from __future__ import annotations

import dataclasses
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from lib.model_types import small_config
from lib.saved import SMALL, small_run
from lib.shared import DIRECTORY, LAYERS, use_own_layers_cache
from lib.training import plain_config

from acsgd.config.options import PipelineConfig
from acsgd.launch import Launch
from acsgd.layers import verify
from acsgd.layers.description import LayersError
from acsgd.layers.small_config import small_configs
from acsgd.model_classes import MODEL_CLASSES
from acsgd.run.plan import layers_cache, layout, model
from acsgd.run.plan.job import prepare
from acsgd.run.plan.layers_cache import LayersCache
from acsgd.run.setup.inputs import open_inputs

LM = MODEL_CLASSES["lm"]
SIZES = {"batch": 2, "sequence": 16}


@pytest.mark.parametrize("module", [model, layout], ids=lambda module: module.__name__)
def test_the_runs_of_tests_share_a_cache(module: ModuleType, tmp_path: Path) -> None:
    """Else each rank of each run would estimate the costs of layers again."""
    config = plain_config(tmp_path / "model", tmp_path)
    assert module.layers_cache(config).directory == Path(os.environ[DIRECTORY]) / LAYERS


def test_verified_layers_are_found_for_the_same_config_and_task_alone(tmp_path: Path) -> None:
    cache, config = LayersCache(tmp_path, LM), small_config("gpt2")
    layers = LM.layers(config)
    assert cache.find(config) is None
    cache.verify(config, layers, reports_wait=False)
    assert cache.find(config) == layers
    assert cache.find(small_config("gpt2", n_layer=2)) is None
    assert LayersCache(tmp_path, MODEL_CLASSES["classification"]).find(config) is None


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff", b'{"layers": {}, "verification": {}}'])
def test_a_damaged_entry_is_made_again(content: bytes, tmp_path: Path) -> None:
    cache, config = LayersCache(tmp_path, LM), small_config("gpt2")
    layers = LM.layers(config)
    cache.verify(config, layers, reports_wait=False)
    (entry,) = tmp_path.glob("*.json")
    entry.write_bytes(content)
    assert cache.find(config) is None
    cache.verify(config, layers, reports_wait=False)
    assert cache.find(config) == layers


def test_layers_that_differ_from_the_model_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kinds of layers of the small model that is compared are those of the model."""
    monkeypatch.setattr(verify, "small_configs", lambda config, model: [*small_configs(config, model)][-1:])
    cache, config = LayersCache(tmp_path, LM), small_config("gpt2")
    layers = LM.layers(config)
    changed = dataclasses.replace(layers, layers=(*layers.layers[:-2], layers.layers[-1]))
    odd = dataclasses.replace(changed.layers[1], outputs=("tensor", "tensor"), returns="tuple")
    changed = dataclasses.replace(changed, layers=(changed.layers[0], odd, *changed.layers[2:]))
    with pytest.raises(LayersError, match="it has other kinds of layers"):
        cache.verify(config, changed, reports_wait=False)
    assert cache.find(config) is None
    assert not list(tmp_path.glob("*.json"))


def estimated(*args: Any, device: str) -> list[float]:
    """Return other costs for other arguments, in place of an estimate, which takes half a second."""
    draw = random.Random(repr((args, device)))
    return [draw.random() for _ in args[2].layers]


def test_costs_are_found_for_the_same_model_batch_and_device_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kept costs are no estimate, so that they are told from one."""
    monkeypatch.setattr(layers_cache, "layer_costs", estimated)
    cache, config = LayersCache(tmp_path, LM), small_config("gpt2")
    layers = LM.layers(config)
    kept = tuple(range(1, len(layers.layers) + 1))
    assert cache.costs(config, layers, SIZES, device="cpu") == (*estimated(LM, config, layers, SIZES, device="cpu"),)
    assert not list(tmp_path.iterdir())
    cache.keep_costs(config, layers, SIZES, kept, device="cpu")
    assert cache.costs(config, layers, dict(reversed(SIZES.items())), device="cpu") == kept
    wide, longer = small_config("gpt2", n_embd=64), SIZES | {"sequence": 32}
    frozen = dataclasses.replace(layers, frozen=layers.layers[0].parameters)
    others = [(wide, LM.layers(wide), SIZES, "cpu"), (config, frozen, SIZES, "cpu")]
    others += [(config, layers, longer, "cpu"), (config, layers, SIZES, "cuda")]
    for other, its_layers, sizes, device in others:
        expected = tuple(estimated(LM, other, its_layers, sizes, device=device))
        assert cache.costs(other, its_layers, sizes, device=device) == expected


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"costs": [1.0]}', b'{"costs": [1, 1, 1, 1, NaN]}'])
def test_damaged_costs_are_estimated_again(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers_cache, "layer_costs", estimated)
    cache, config = LayersCache(tmp_path, LM), small_config("gpt2")
    layers = LM.layers(config)
    costs = cache.costs(config, layers, SIZES, device="cpu")
    cache.keep_costs(config, layers, SIZES, costs, device="cpu")
    (entry,) = tmp_path.iterdir()
    kept = entry.read_bytes()
    entry.write_bytes(content)
    assert cache.costs(config, layers, SIZES, device="cpu") == costs
    cache.keep_costs(config, layers, SIZES, costs, device="cpu")
    assert entry.read_bytes() == kept


def test_a_run_keeps_the_costs_of_its_layers_and_balances_stages_by_them(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps them when it opens its inputs: a run that is refused before writes nothing."""
    use_own_layers_cache(monkeypatch.setattr)
    config = small_run(tiny_model("gpt2", **SMALL), tmp_path / "runs" / "a")
    config = dataclasses.replace(config, pp=PipelineConfig(stages=2, micro=2))
    launch = Launch(world_size=2, local_world_size=2)
    job = prepare(config, launch)
    assert not list(tmp_path.iterdir())
    open_inputs(job)
    (entry,) = (path for path in job.paths.layers_cache.directory.iterdir() if b"costs" in path.read_bytes())
    assert prepare(config, launch).layout.costs == job.layout.costs
    for costs, specs in ([9, 1, 1], ((0, 1), (1, 3))), ([1, 1, 9], ((0, 2), (2, 3))):
        entry.write_text(json.dumps({"costs": costs}))
        assert prepare(config, launch).layout.specs == specs
