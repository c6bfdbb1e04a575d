"""What many tests have in common, made once: layers of models, derived and compared, and the tokens of demo texts."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import PreTrainedConfig

from acsgd.config.options import Config
from acsgd.io.data.row_spec import RowSpec
from acsgd.io.data.sources.base import Source
from acsgd.io.data.sources.sources import Demo
from acsgd.io.data.tokens.corpus import Corpus
from acsgd.layers.description import ModelLayers
from acsgd.model_classes import ModelClass
from acsgd.run.plan import model
from acsgd.run.plan.layers_cache import LayersCache
from acsgd.run.setup import rows
from acsgd.shards import config as configs
from acsgd.tasks import find_task

DIRECTORY = "ACSGD_TEST_SHARED"
"""Environment variable with the directory of the caches, for the server that processes are forked from."""
LAYERS, TOKENS = "layers", "tokens"
"""Caches in the directory."""

_own_cache, _own_tokens = model.layers_cache, rows.open_tokens


def share_caches() -> None:
    """Let runs of this process, and of those forked from it, use the directory instead of a cache beside each run.

    For layers, and for the tokens of the demo texts, which take half a second to make.
    """
    if DIRECTORY in os.environ:
        rows.open_tokens = _shared_tokens
        for module in _modules_with(_own_cache):
            module.layers_cache = _shared_cache  # type: ignore[attr-defined]


def use_own_caches(patch: Callable[[object, str, object], None] = setattr) -> None:
    """Let the runs of this process use the cache beside each run, as outside of tests.

    patch: what sets an attribute; that of monkeypatch, in a process of several tests.
    """
    patch(rows, "open_tokens", _own_tokens)
    for module in _modules_with(_shared_cache):
        patch(module, "layers_cache", _own_cache)


def _modules_with(cache: Callable[[Config], LayersCache]) -> list[ModuleType]:
    """Return the imported modules of acsgd in which `layers_cache` is this function."""
    modules = [module for name, module in sys.modules.items() if name.startswith("acsgd.")]
    return [module for module in modules if vars(module).get("layers_cache") is cache]


class _SharedCache(LayersCache):
    def costs(self, *args: Any, **kwargs: Any) -> tuple[float, ...]:
        """Let one rank estimate and keep the costs: a test without `main` keeps none, and each would estimate them."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with self._costs_path(*args, **kwargs).with_suffix(".estimate").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            costs = super().costs(*args, **kwargs)
            self.keep_costs(*args, costs, **kwargs)
            return costs


def _shared_cache(config: Config) -> LayersCache:
    return _SharedCache(Path(os.environ[DIRECTORY]) / LAYERS, find_task(config.model.task).model_class)


def _shared_tokens(source: Source, spec: RowSpec, tokenizer: Any, cache_dir: Path, *args: Any, **kwargs: Any) -> Corpus:
    if isinstance(source, Demo):
        cache_dir, kwargs["reports_wait"] = Path(os.environ[DIRECTORY]) / TOKENS, False
    return _own_tokens(source, spec, tokenizer, cache_dir, *args, **kwargs)


_derived: dict[tuple[str, str], ModelLayers] = {}
_run: set[tuple[str, str]] = set()


def remember_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands in this process derive the layers of a config once, and run one block of it once, for all tests."""
    derive, run_one_block = ModelClass.layers, configs._run_one_block

    def layers(task: ModelClass, config: PreTrainedConfig) -> ModelLayers:
        key = (task.name, config.to_json_string(use_diff=False))
        if key not in _derived:
            _derived[key] = derive(task, config)
        return _derived[key]

    def run_once(config: PreTrainedConfig, task: ModelClass) -> None:
        key = (task.name, config.to_json_string(use_diff=False))
        if key not in _run:
            run_one_block(config, task)
            _run.add(key)

    monkeypatch.setattr(ModelClass, "layers", layers)
    monkeypatch.setattr(configs, "_run_one_block", run_once)
