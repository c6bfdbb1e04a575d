"""`acsgd report RUN_DIR ...`: one HTML page of one or more runs, which needs no network and no server."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import tyro


@dataclass(frozen=True)
class ReportCommand:
    """Write what runs have logged as one HTML page: losses, time, links, memory, events and options, side by side.

    A run may still be training. Damaged and missing files are named on the page.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR [RUN_DIR ...]")]
    """Run directories (log.dir)."""
    output: Path | None = None
    """File to write; replaced if it exists. Default: report.html in the first run directory."""

    def run(self) -> None:
        """Write the page and print where it is."""
        from acsgd.io.files.atomic import replace_text
        from acsgd.io.telemetry.history import read_run
        from acsgd.io.telemetry.json_lines import METRICS

        if not self.runs:
            raise ValueError("no run directory is given; type: acsgd report RUN_DIR [RUN_DIR ...]")
        for directory in self.runs:
            if directory.is_dir() and not any((directory / name).exists() for name in ("config.toml", METRICS)):
                raise ValueError(
                    f"{directory} is not a run directory: it has neither config.toml nor {METRICS}; give log.dir of one"
                )
        histories = [read_run(directory) for directory in self.runs]
        output = self.output or self.runs[0] / "report.html"
        if output.is_dir() or not output.parent.is_dir():
            raise ValueError(f"--output {output}: give a file, in a directory that exists")
        page = page_of(histories)
        replace_text(output, page)
        for problem in (problem for history in histories for problem in history.problems):
            print(problem)
        print(f"wrote {output}, {len(page) / 1e6:.2f} MB; open it in a browser")


def page_of(runs: Sequence[Any]) -> str:
    """Return the page of some `RunHistory`s. What runs have written enters it as JSON, never as HTML or script."""
    from acsgd.commands.report.charts import axes_of, charts_of

    names = _distinct([run.directory.resolve() for run in runs])
    data = {
        "runs": [
            {
                "name": name,
                "directory": str(run.directory),
                "axes": axes_of(run),
                "last": run.last_step,
                "steps": run.num_steps,
                "events": [event._asdict() for event in run.events],
                "config": run.config,
                "problems": run.problems,
            }
            for name, run in zip(names, runs, strict=True)
        ],
        "charts": list(charts_of(runs)),
    }
    # "<" is the only character that may end the element
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    scripts = [_read("uPlot.iife.min.js"), _read("page.js")]
    parts = {
        "POLICY": " ".join(_policy_source(script) for script in scripts),
        "STYLES": _read("uPlot.min.css") + _read("page.css"),
        "LICENSE": _read("uPlot-LICENSE"),
        "DATA": text,
        "UPLOT": scripts[0],
        "SCRIPT": scripts[1],
    }
    first, *rest = _read("page.html").split("{{")  # each part is inserted once: a part may hold any text
    return first + "".join(parts[name] + after for name, _, after in (piece.partition("}}") for piece in rest))


def _distinct(paths: Sequence[Path]) -> list[str]:
    """Return the last component of each path, with as many of those before it as it takes to tell them apart."""
    names = [path.name for path in paths]
    for depth in range(2, max(len(path.parts) for path in paths) + 1):
        if len({*names}) == len(names):
            break
        names = ["/".join(path.parts[-depth:]) for path in paths]
    return names


def _policy_source(script: str) -> str:
    """Return the source expression of a Content-Security-Policy that allows a script, and no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _read(name: str) -> str:
    return (files("acsgd.commands.report") / name).read_text(encoding="utf-8")
