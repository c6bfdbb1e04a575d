"""Conversion to layer shards and back of all types of models of the installed transformers, compared bit for bit:

    .venv/bin/python -m benchmarks.models.roundtrip [--types mixtral t5] [--json runs/benchmarks/roundtrip.json]

For each type, a small model of its default config is saved by transformers, with random values in all tensors. It is
converted to shards and back; names, dtypes and values must be those that transformers saved, and transformers must
load them with no missing and no unexpected key. Results are kept in the JSON file after every type, so the command can
be interrupted and repeated. Types that cannot be divided into layers are listed with the reason.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from acsgd.layers.derive import check_config
from acsgd.layers.description import LayersError
from acsgd.layers.small_config import small_configs
from acsgd.layers.verify import make_batches
from acsgd.model_classes import MODEL_CLASSES, ModelClass
from acsgd.shards.convert import from_hf
from acsgd.shards.export import to_hf
from benchmarks.models.sweep import BOUNDS, REMEDY, TYPES, WITHOUT, config_of, set_option
from tests.lib.model_types import tensors_in

LIMIT_S = 600.0


def save_small_model(model_type: str, task_name: str, directory: Path) -> PreTrainedModel:
    """Save a small model of a type, all of its tensors with random values: the first that transformers runs and loads.

    Raises what transformers raises if there is none.
    """
    task, config = MODEL_CLASSES[task_name], config_of(model_type, task_name)
    if task_name == "lm" and hasattr(config, "is_decoder"):
        config.is_decoder = True
    set_remedies(config, model_type)
    error: Exception = ValueError(f"each small model has more than {max(BOUNDS):,} parameters")
    small_ones = list(small_configs(config, task.build(config)))
    for bound, small in itertools.product(BOUNDS, small_ones):
        try:
            if task.build(small).num_parameters() <= bound:
                return _save_random(small, task, directory)
        except Exception as raised:  # in transformers' code, by sizes that do not go together
            error = raised
    raise error


def set_remedies(config: PreTrainedConfig, model_type: str) -> None:
    """Set the options with which a type runs whose default config is refused, as in the table of docs/models.md."""
    if model_type in WITHOUT:
        set_option(config, WITHOUT[model_type])
    while True:
        try:
            return check_config(config)
        except LayersError as error:
            remedy = REMEDY.search(str(error))
            if remedy is None:
                raise
            set_option(config, remedy.group(1))


def _save_random(config: PreTrainedConfig, task: ModelClass, directory: Path) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = task.auto_class.from_config(config)
    with torch.no_grad():
        model(**make_batches(model, task.inputs)["plain"], use_cache=False)
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape))
    model.save_pretrained(directory)
    config.save_pretrained(directory)  # transformers does not find the class of every text model by its own config
    task.auto_class.from_pretrained(directory)
    return model


def round_trip(model_type: str, task: str) -> dict[str, Any]:
    """Convert a model of a type and compare; return what becomes a row of the table."""
    with tempfile.TemporaryDirectory() as directory:
        source, shards, back = (Path(directory) / name for name in ("source", "shards", "back"))
        try:
            model = save_small_model(model_type, task, source)
        except Exception as error:  # raised in transformers' code
            return {"status": "not built", "reason": one_line(error)}
        shards.mkdir()
        back.mkdir()
        try:
            from_hf(source, shards, task=task)
            to_hf(shards, back)
        except LayersError as error:
            return {"status": "refused", "reason": one_line(error).partition("into layers: ")[2]}
        except Exception as error:  # whatever is wrong becomes a row
            return {"status": "failed", "reason": one_line(error)}
        return compare(model, tensors_in(source), tensors_in(back), back)


def compare(model: PreTrainedModel, first: dict[str, Tensor], again: dict[str, Tensor], back: Path) -> dict[str, Any]:
    """Compare the tensors before and after, and let transformers load the latter."""
    differing = sorted(first.keys() ^ again.keys()) or [
        name for name, tensor in first.items() if not same(tensor, again[name])
    ]
    renamed = len(first.keys() - model.state_dict().keys())
    if differing:
        return {"status": "differs", "reason": f"{len(differing)} tensors: {', '.join(differing[:3])}"}
    _, info = type(model).from_pretrained(back, output_loading_info=True)
    if wrong := {key: sorted(map(str, value))[:3] for key, value in info.items() if value}:
        return {"status": "differs", "reason": f"loading: {wrong}"}
    return {"status": "equal", "tensors": len(first), "renamed": renamed}


def same(first: Tensor, second: Tensor) -> bool:
    return first.dtype == second.dtype and torch.equal(first, second)


def one_line(error: Exception) -> str:
    line = " ".join(f"{type(error).__name__}: {error}".split())
    return line if len(line) <= 300 else line[:297] + "..."


def in_process(model_type: str, task: str) -> dict[str, Any]:
    """Return the result of a type, computed in a process that is ended after LIMIT_S."""
    context = get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def body(connection: Connection) -> None:
        os.nice(10)
        warnings.simplefilter("ignore")
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  until the process ends
        connection.send(round_trip(model_type, task))

    process = context.Process(target=body, args=(theirs,))
    process.start()
    theirs.close()
    try:
        result = ours.recv() if ours.poll(LIMIT_S) else {"status": "not built", "reason": f"takes over {LIMIT_S:.0f} s"}
    except EOFError:
        result = {"status": "not built", "reason": f"the process ended with {process.exitcode}"}
    process.kill()
    process.join()
    return dict(result)


def show(results: list[dict[str, Any]]) -> None:
    console = Console(soft_wrap=True)
    table = Table("type", "task", "tensors", "renamed or converted", "not equal because")
    for result in results:
        if result["status"] != "equal":
            table.add_row(result["type"], result["task"], "", "", f"{result['status']}: {result['reason']}")
        elif result["renamed"]:
            table.add_row(result["type"], result["task"], str(result["tensors"]), str(result["renamed"]), "")
    console.print(table)
    for task in MODEL_CLASSES:
        counts = Counter(result["status"] for result in results if result["task"] == task)
        console.print(f"{task}: " + ", ".join(f"{count} {status}" for status, count in sorted(counts.items())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", help="types to try again; default: all without a result")
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/roundtrip.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    kept = json.loads(arguments.json.read_text()) if arguments.json.exists() else []
    results = {(result["task"], result["type"]): result for result in kept}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    for task, (_, types) in TYPES.items():
        for model_type in types:
            if model_type in arguments.types if arguments.types else (task, model_type) not in results:
                started = time.perf_counter()
                result = {"type": model_type, "task": task, **in_process(model_type, task)}
                results[task, model_type] = result | {"seconds": round(time.perf_counter() - started, 1)}
                arguments.json.write_text(json.dumps([*results.values()], indent=1))
    show([*results.values()])
    if any(result["status"] in ("differs", "failed") for result in results.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
