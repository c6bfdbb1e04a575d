"""What many tests have in common, made once: layers of models, derived and compared, and the tokens of demo texts."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from transformers import PreTrainedConfig

from acsgd.config.options import Config
from acsgd.io.data.row_spec import RowSpec
from acsgd.io.data.sources.base import Source
from acsgd.io.data.sources.sources import Demo
from acsgd.io.data.tokens.corpus import Corpus
from acsgd.io.files.fields import from_json
from acsgd.layers.description import ModelLayers, Verification
from acsgd.model_classes import ModelClass
from acsgd.run.plan import model
from acsgd.run.plan.layers_cache import LayersCache
from acsgd.run.setup import rows
from acsgd.shards import config as configs
from acsgd.tasks import find_task
from tests.lib.processes import DIRECTORY

LAYERS, TOKENS, EXAMINED = "layers", "tokens", "examined"
"""Caches in the directory."""

_own_cache, _own_tokens = model.layers_cache, rows.open_tokens
_own_examinations = (ModelClass.layers, ModelClass.verify, configs._run_one_block)


def share_caches() -> None:
    """Let runs of this process, and of those forked from it, use the directory instead of a cache beside each run.

    For layers, and for the tokens of the demo texts, which take half a second to make. Commands, too, examine a config
    only if no process has done so before: derive the layers, compare them with the model, and run one block.
    """
    if DIRECTORY in os.environ:
        rows.open_tokens = _shared_tokens
        for module in _modules_with(_own_cache):
            module.layers_cache = _shared_cache  # type: ignore[attr-defined]
        layers, verify, run_one_block = _own_examinations
        _examine(_once(layers, ModelLayers), _once(verify, Verification), _once(run_one_block, None))


def _examine(layers: Any, verify: Any, run_one_block: Any, patch: Callable[[Any, str, Any], None] = setattr) -> None:
    patch(ModelClass, "layers", layers)
    patch(ModelClass, "verify", verify)
    patch(configs, "_run_one_block", run_one_block)


def _once(function: Callable[..., Any], result_type: Any) -> Callable[..., Any]:
    """Return a function that examines a config once for all processes. What raises an error is run again."""
    known: dict[str, Any] = {}

    def once(*args: Any) -> Any:
        name = hashlib.sha256(repr((function.__qualname__, *map(_identity, args))).encode()).hexdigest()[:32]
        if name not in known:
            path = Path(os.environ[DIRECTORY]) / EXAMINED / f"{name}.json"
            with contextlib.ExitStack() as stack:
                with contextlib.suppress(OSError):  # a test has limited descriptors
                    path.parent.mkdir(parents=True, exist_ok=True)
                    lock = stack.enter_context(path.with_suffix(".lock").open("w"))
                    fcntl.flock(lock, fcntl.LOCK_EX)  # or the ranks of a run would all examine it at the same time
                known[name] = _kept(path, result_type, functools.partial(function, *args))
        return known[name]

    return once


def _kept(path: Path, result_type: Any, examine: Callable[[], Any]) -> Any:
    """Return what is in a file, or else what `examine` returns, and keep that there. result_type: None = nothing."""
    if path.exists():
        return from_json(result_type, json.loads(path.read_text())) if result_type else None
    result = examine()
    with contextlib.suppress(OSError):  # a test has limited the size of files
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(asdict(result) if result_type else None))
        unfinished.rename(path)
    return result


def _identity(argument: Any) -> object:
    """Return what an examination depends on, with the same text in all processes."""
    if isinstance(argument, PreTrainedConfig):
        return argument.to_json_string(use_diff=False)
    if isinstance(argument, ModelClass):
        return type(argument).__qualname__, argument.name, argument.auto_name, argument.inputs
    return argument


def use_own_caches(patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """Let the runs of this process use the cache beside each run, and examine each config, as outside of tests.

    patch: what sets an attribute; that of monkeypatch, in a process of several tests.
    """
    _examine(*_own_examinations, patch)
    patch(rows, "open_tokens", _own_tokens)
    use_own_layers_cache(patch)


def use_own_layers_cache(patch: Callable[[Any, str, Any], None]) -> None:
    """Let the runs of this process use the cache of layers beside each run, but examine no config again."""
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
