"""All types of models of the installed transformers: which of them run in stages, and why others do not:

    .venv/bin/python -m benchmarks.models.sweep [--types llama t5] [--json runs/benchmarks/sweep.json]

For each type, the layers are derived from its default config. A small model of the same kinds of layers, run layer by
layer and at every cut into two stages, is compared with the whole model: outputs and all gradients, plain, padded, and
several documents per sequence. Results are kept in the JSON file after every type, so the command can be interrupted
and repeated. At the end the rows of all types with results are written to the table in docs/models.md.
"""

from __future__ import annotations

import argparse
import json
import re
import time
import warnings
from collections.abc import Collection, Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto import modeling_auto

from acsgd.layers.description import HIDDEN, LayersError, ModelLayers
from acsgd.layers.verify import verify
from acsgd.model_classes import MODEL_CLASSES, ModelClass

PAGE = Path(__file__).parents[2] / "docs/models.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
BOUNDS = (2**21, 2**23, 2**25, 2**27)
"""Bounds for the parameters of the models that are compared; small ones are quick."""
CAUSAL = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
ENCODERS = [
    name
    for name in modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    if name not in CAUSAL or name in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
]
"""Types of classifiers besides decoders, whose layers are those of the task "lm"."""
TYPES: Mapping[str, tuple[ModelClass, Collection[str]]] = {
    "lm": (MODEL_CLASSES["lm"], CAUSAL),
    "classification": (MODEL_CLASSES["classification"], ENCODERS),
    "seq2seq": (MODEL_CLASSES["seq2seq"], modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
}
"""By task, the types that transformers has a class for."""
OPTIONS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6, "moe_intermediate_size": 1408},
    "dots1": {"n_routed_experts": 16, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32, "position_embedding_type": "rotary"},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 2, "num_hidden_layers": 8},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
}
"""Options without which the default config of a type is invalid."""
WITHOUT = {"gemma4": '"hidden_size_per_layer_input": 0', "gemma4_text": '"hidden_size_per_layer_input": 0'}
"""Options of the larger models of types whose default config, that of a small one, is refused."""
REMEDY = re.compile(r'set ("\w+": [^" ]+) in config\.json')
"""Option in the reason of a refusal."""


def config_of(model_type: str, task: str) -> PreTrainedConfig:
    """Return the default config, with the tokens that classifiers of several sequences need."""
    config = CONFIG_MAPPING[model_type](**OPTIONS.get(model_type, {}))
    text = config.get_text_config()
    if task == "classification" and getattr(text, "pad_token_id", None) is None:
        config.pad_token_id = text.pad_token_id = 0
    if task == "classification" and not hasattr(config, "decoder_start_token_id"):
        config.decoder_start_token_id = 0
    return config


def result_of(model_type: str, task_name: str) -> dict[str, Any]:
    """Derive and compare, if need be with the options that the refusal names; return a row of the table."""
    task = TYPES[task_name][0]
    started, result = time.perf_counter(), {"type": model_type, "task": task_name}
    try:
        config = config_of(model_type, task_name)
        task.build(config)
    except Exception as error:  # raised in transformers' code
        return result | {"status": "not built", "reason": one_line(error)}
    options: list[str] = []
    while True:
        try:
            found = compared(task, config) | ({"with": ", ".join(options)} if options else {})
        except LayersError as error:
            found = {"status": "refused", "reason": one_line(error)}
            remedy = REMEDY.search(str(error))
            option = remedy.group(1) if remedy else WITHOUT.get(model_type)
            if option is not None and option not in options:
                options.append(option)
                set_option(config, option)
                continue
        except Exception as error:  # raised in transformers' code
            found = {"status": "not built", "reason": one_line(error)}
        return result | found | {"seconds": round(time.perf_counter() - started, 1)}


def set_option(config: PreTrainedConfig, option: str) -> None:
    """Set an option, written as in config.json, in a config and in that of its text model."""
    for name, value in json.loads(f"{{{option}}}").items():
        for part in (config, config.get_text_config()):
            if hasattr(part, name):
                setattr(part, name, value)


def compared(task: ModelClass, config: PreTrainedConfig) -> dict[str, Any]:
    """Return the result of a type that runs in stages. Raises LayersError for another."""
    started = time.perf_counter()
    layers = task.layers(config)
    derived_s = time.perf_counter() - started
    verified = verify(task.build, config, task.inputs, layers, predicted=task.predicted, bounds=BOUNDS, every_cut=True)
    return {
        "status": "works",
        "derived_s": round(derived_s, 2),
        "batches": verified.batches,
        "difference": verified.difference,
        "sent": sent(layers),
    }


def sent(layers: ModelLayers) -> list[str]:
    """Return the tensors sent between stages besides the hidden state."""
    return sorted({name for layer in layers.layers for name in layer.inputs} - {HIDDEN})


def one_line(error: Exception) -> str:
    """Return a message for a cell of a table."""
    line = " ".join(str(error).split()) if isinstance(error, LayersError) else f"{type(error).__name__}: {error}"
    line = " ".join(line.replace("|", "/").split())
    return line if len(line) <= 160 else line[:157] + "..."


def in_process(model_type: str, task: str, limit_s: float) -> dict[str, Any]:
    """Return the result of a type, computed in a process that is ended after `limit_s`."""
    context = get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def body(connection: Connection) -> None:
        warnings.simplefilter("ignore")
        transformers.utils.logging.set_verbosity_error()
        connection.send_bytes(json.dumps(result_of(model_type, task)).encode())

    process = context.Process(target=body, args=(theirs,))
    process.start()
    theirs.close()
    try:
        if ours.poll(limit_s):
            found: dict[str, Any] = json.loads(ours.recv_bytes())
            return found
        reason = f"takes more than {limit_s:g} s"
    except EOFError:
        reason = "ends its process"
    finally:
        process.kill()
        process.join()
    return {"type": model_type, "task": task, "status": "not built", "reason": reason}


def markdown(results: list[dict[str, Any]], table: str) -> str:
    """Return the table of docs/models.md. table: the present one, whose other types stay."""
    by_type: dict[str, dict[str, dict[str, Any]]] = {}
    for row in results:
        by_type.setdefault(row["type"], {})[row["task"]] = row
    lines = [
        "| type | `lm` | `classification` | `seq2seq` | documents kept apart | sent besides the hidden state |",
        "|---|---|---|---|---|---|",
    ]
    rows = {line.split("`")[1]: line for line in table.splitlines()[2:]}
    for name, tasks in by_type.items():
        names = sorted({x for row in tasks.values() for x in row.get("sent", ())})
        packed = ""
        if tasks.get("lm", {}).get("status") == "works":
            packed = "yes" if "packed" in tasks["lm"]["batches"] else "no"
        cells = [cell(tasks.get(task)) for task in TYPES]
        rows[name] = f"| `{name}` | {' | '.join(cells)} | {packed} | {', '.join(f'`{x}`' for x in names)} |"
    return "\n".join([*lines, *(rows[name] for name in sorted(rows))])


def cell(row: dict[str, Any] | None) -> str:
    """Return whether a type works for a task."""
    if row is None:
        return ""
    if row["status"] == "works":
        return f"yes, with `{row['with']}`" if "with" in row else "yes"
    return f"{'refused' if row['status'] == 'refused' else 'not tried'}: {row['reason']}"


def summary(results: list[dict[str, Any]]) -> Table:
    """Return the numbers of types by task and status."""
    table = Table("task", "works", "refused", "not tried", title=f"transformers {transformers.__version__}")
    for task in TYPES:
        statuses = [row["status"] for row in results if row["task"] == task]
        table.add_row(task, *(str(statuses.count(status)) for status in ("works", "refused", "not built")))
    return table


def main() -> None:
    """Run what has no result yet, print, save, write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/sweep.json"), help="path of the results")
    parser.add_argument("--tasks", nargs="+", default=list(TYPES), choices=list(TYPES), help="tasks to try")
    parser.add_argument("--types", nargs="+", help="types to try again; default: all without a result")
    parser.add_argument("--limit", type=float, default=240.0, help="time limit of a type, seconds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    kept = json.loads(options.json.read_text())["results"] if options.json.exists() else []
    results = {(row["task"], row["type"]): row for row in kept}
    for task in options.tasks:
        for name in TYPES[task][1]:
            if name in options.types if options.types else (task, name) not in results:
                row = in_process(name, task, options.limit)
                results[task, name] = row
                print(task, name, row["status"], row.get("reason", ""), flush=True)
                about = {"torch": torch.__version__, "transformers": transformers.__version__}
                options.json.write_text(json.dumps({"about": about, "results": list(results.values())}, indent=1))
    Console().print(summary(list(results.values())))
    before, rest = PAGE.read_text().split(BEGIN)
    table, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{markdown(list(results.values()), table.strip())}\n{END}{after}")


if __name__ == "__main__":
    main()
