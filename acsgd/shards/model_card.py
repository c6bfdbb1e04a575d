"""The model card of an exported model, README.md: what was trained, on what, and how."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedConfig

from acsgd.shards.manifest import Manifest


def model_card(config: PreTrainedConfig, manifest: Manifest, task: str) -> str:
    """Return the model card of a model, from the manifest of its shards. It names no directories."""
    run: dict[str, Any] = manifest.run or {}
    origin = run.get("origin", {})
    front = {"library_name": "transformers", **({"base_model": origin["model"]} if origin.get("model") else {})}
    lines = [
        "---",
        *(f"{key}: {json.dumps(value)}" for key, value in front.items()),
        "---",
        "",
        f"# {(config.architectures or [config.model_type])[0]}",
        "",
        f"A model of the type `{config.model_type}`, " + ("trained" if run else "converted") + " with acsgd.",
        "",
    ]
    if run:
        lines += [*_table(_training(run, task)), "", "## Options", "", *_table(_options(run))]
    return "\n".join(lines).rstrip() + "\n"


def _training(run: dict[str, Any], task: str) -> Iterable[tuple[str, Any]]:
    progress, origin = run["progress"], run.get("origin", {})
    losses, evaluation = progress.get("recent") or [None], dict(progress.get("evaluation", {}))
    return (
        ("task", task),
        ("started from", origin.get("model")),
        ("sources", origin.get("sources")),
        ("optimizer steps", progress["step"]),
        ("target tokens", f"{progress['tokens']:,}"),
        ("loss of the last step", losses[-1]),
        ("held-out loss", progress.get("eval_loss", evaluation.pop("eval_loss", None))),
        *((f"held-out {name}", value) for name, value in evaluation.items()),
        ("replicas", run.get("replicas")),
    )


def _options(run: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    return sorted({**run["identity"]["data"], **run.get("options", {})}.items())


def _table(rows: Iterable[tuple[str, Any]]) -> list[str]:
    """Return a table in Markdown of the rows that have a value."""
    cells = [f"| {name} | {str(value).replace('|', ' ')} |" for name, value in rows if value is not None]
    return ["| | |", "|---|---|", *cells]
