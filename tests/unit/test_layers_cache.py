"""Laws of the cache of verified layers: it returns what was verified, for the same config alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from lib.model_types import small_config

from acsgd.layers.description import LayersError
from acsgd.run.layers_cache import LayersCache
from acsgd.tasks import TASKS

LM = TASKS["lm"]


def test_verified_layers_are_found_for_the_same_config_and_task_alone(tmp_path: Path) -> None:
    cache, config = LayersCache(tmp_path, LM), small_config("gpt2")
    layers = LM.layers(config)
    assert cache.find(config) is None
    cache.verify(config, layers, reports_wait=False)
    assert cache.find(config) == layers
    assert cache.find(small_config("gpt2", n_layer=2)) is None
    assert LayersCache(tmp_path, TASKS["classification"]).find(config) is None


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


def test_layers_that_differ_from_the_model_are_not_kept(tmp_path: Path) -> None:
    """The kinds of layers of the small model that is compared are those of the model."""
    cache, config = LayersCache(tmp_path, LM), small_config("gpt2")
    layers = LM.layers(config)
    changed = dataclasses.replace(layers, layers=(*layers.layers[:-2], layers.layers[-1]))
    odd = dataclasses.replace(changed.layers[1], outputs=("tensor", "tensor"), returns="tuple")
    changed = dataclasses.replace(changed, layers=(changed.layers[0], odd, *changed.layers[2:]))
    with pytest.raises(LayersError):
        cache.verify(config, changed, reports_wait=False)
    assert cache.find(config) is None
    assert not list(tmp_path.glob("*.json"))
