"""Sentences on a completed conversion: what was written where, and what to type next."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from acsgd.shards.manifest import Manifest
from acsgd.tasks import TASKS


def describe_shards(target: Path) -> str:
    """Return a sentence on new layer shards."""
    manifest = Manifest.read(target)
    task = "" if manifest.task == "lm" else f" --model.task {manifest.task}"
    return _describe(manifest, target, f"train it with --model.name {quote(str(target))}{task}")


def describe_hf(source: Path, target: Path) -> str:
    """Return a sentence on a new Hugging Face directory that layer shards were converted to."""
    manifest = Manifest.read(source)
    load = f"{TASKS[manifest.task].auto_class.__name__}.from_pretrained({str(target)!r})"
    return _describe(manifest, target, f"load it with {load}")


def describe_legacy(source: Path, target: Path) -> str:
    """Return a sentence on a new model of a replaced system that layer shards were converted to."""
    back = f"acsgd convert from-legacy {quote(str(target))} SHARDS"
    return _describe(Manifest.read(source), target, f"convert it back with {back}")


def _describe(manifest: Manifest, target: Path, following: str) -> str:
    size = sum(path.stat().st_size for path in target.iterdir())
    layers = f"{len(manifest.model.layers)} layers, {size / 1e6:,.1f} MB, task {manifest.task}"
    return f"wrote {target}: {layers}; {following}"
