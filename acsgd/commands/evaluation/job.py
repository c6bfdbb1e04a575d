"""The model that an evaluation loads, and its configuration: that of a run which takes no step."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from acsgd.commands.evaluation.options import EvalOptions
from acsgd.commands.generation.adapter import PEFTAdapter, is_adapter
from acsgd.commands.merge import merge_peft
from acsgd.commands.recorded import READING, RecordedModel
from acsgd.config.options import (
    AdapterConfig,
    Config,
    DataConfig,
    EvalConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    PipelineConfig,
    RunConfig,
)
from acsgd.errors import missing
from acsgd.io.checkpoint.directory import newest_checkpoint
from acsgd.io.data.row_spec import RowStage, data_options
from acsgd.io.data.sources.sources import LocalFile, describe_shared, local_files, parse_sources
from acsgd.io.data.sources.text import excerpt
from acsgd.io.files.cache import open_cached
from acsgd.run.initial_weights import CachedModel
from acsgd.shards.hub import check_adapter, find_model
from acsgd.shards.manifest import VERSION

OF_ROWS = data_options(RowStage.LAYOUT, RowStage.ROWS)
"""Options of [data] that say how rows are made of tokens."""
PLACING = ("long", "isolate")
"""Options of [data] that say how data.rows puts documents into rows."""
MICRO = 8
"""Micro-batch size of models that no run has saved, sequences."""


def find_evaluated(options: EvalOptions) -> RecordedModel:
    """Return the model that options name: of a run directory, its newest checkpoint; with an adapter, both merged.

    Raises ValueError if they do not fit, CorruptFileError if a file is corrupt.
    """
    path, adapter = Path(options.model), options.adapter
    if adapter is None and is_adapter(path):
        base = PEFTAdapter.open(path).find_base(f"MODEL --adapter {path}")
        return RecordedModel.of(str(_merge(path, Path(base), options.cache)))
    found = newest_checkpoint(path) if path.exists() else path
    if adapter is not None:
        found = _merge(adapter, find_model(str(found), option="model"), options.cache)
    return RecordedModel.of(str(found))


def _merge(adapter: Path, base: Path, cache: Path) -> Path:
    """Return the layer shards of a model with an adapter, in fp32, from the cache."""
    check_adapter(adapter)
    files = [path.resolve() for directory in (adapter, base) for path in sorted(directory.iterdir()) if path.is_file()]
    state = repr([(path, path.stat().st_size, path.stat().st_mtime_ns) for path in files])

    def build(target: Path) -> None:
        target.mkdir()
        merge_peft(adapter, str(base), target, dtype=torch.float32)

    name = f"{adapter.resolve().name}-{VERSION}-{hashlib.sha256(state.encode()).hexdigest()[:16]}"
    return open_cached(cache / "models" / name, build, CachedModel).path


class EvaluationOptions(NamedTuple):
    """How the data of an evaluation is read and put into rows, by names of options of [data]."""

    values: dict[str, Any]
    note: str | None
    """Sentence on those that the run determines."""


def data_of(options: EvalOptions, model: RecordedModel) -> EvaluationOptions:
    """Return what is evaluated, and how it is read: as options say, else as the run did that saved the model.

    Raises ValueError if there is nothing to evaluate on.
    """
    names: tuple[str, ...] = (*READING, *OF_ROWS)
    given = {name: getattr(options, name, None) for name in names}
    if options.rows not in (None, model.options.get("data.rows")):  # what is recorded belongs to other rows
        names = tuple(name for name in names if name not in PLACING)
    if options.generate:  # prompts are no targets, whatever the run has learned
        names = tuple(name for name in names if name != "targets")
    if options.data is not None:
        given["sources"] = given["eval_sources"] = options.data
    elif (sources := model.options.get("data.eval_sources")) is not None:
        names = (*names, "eval_sources")
        given["sources"] = sources
    elif model.options.get("data.eval_fraction"):
        names = (*names, "sources", "eval_fraction")
    else:
        options.check_model()
        raise ValueError(
            f"there is nothing to evaluate on: {model.name} is of no run that evaluates; give --data SOURCES, or "
            "--lm-eval TASKS"
        )
    values = model.data_options(given, names)
    limits = None
    if options.data is not None:
        values, limits = model.for_sources(given, values, options.data.count(",") + 1, "--data")
    notes = [note for note in (model.describe(given, values), limits) if note]
    return EvaluationOptions(values, "; ".join(notes) or None)


def describe_trained(model: RecordedModel, data: Mapping[str, Any]) -> list[str]:
    """Return a sentence on each evaluated source with files that the run that saved the model has trained on.

    And one on the number of sources of the run that could not be compared. data: `EvaluationOptions.values`.
    """
    trained = model.options.get("data.sources")
    if trained is None or "eval_fraction" in data:
        return []
    known = _files_in(trained)
    files = [each for of_source in known.values() for each in of_source or ()]
    shared = {name: describe_shared(each or (), files) for name, each in _files_in(data["sources"]).items()}
    found = [f"warning: {name} {text} of the run: it has trained on this text" for name, text in shared.items() if text]
    if moved := [name for name, each in known.items() if each is None]:
        found.append(
            f"{len(moved)} of {len(known)} sources that the run has trained on are no longer there, and could not be "
            f"compared with what is evaluated: {excerpt(', '.join(moved))}"
        )
    return found


def _files_in(spec: str) -> dict[str, Sequence[LocalFile] | None]:
    """Return the local files of each source that a string lists, by its name; None if they were moved since."""
    found = dict[str, Sequence[LocalFile] | None]()
    for part in spec.split(","):
        try:
            [(source, _)] = parse_sources(part)
            found[source.name] = local_files(source)
        except (ValueError, OSError):
            found[part.strip()] = None
    return found


def _changed_rows(options: EvalOptions, model: RecordedModel, data: Mapping[str, Any]) -> list[str]:
    """Return the flags by which the rows are not those of the run that saved the model. data: `data_of` of them."""
    recorded = data_of(EvalOptions(options.model), model).values | {"task": model.task}
    given = {**data, "task": options.task or model.task}
    names = [name for name in given.keys() | recorded.keys() if given.get(name) != recorded.get(name)]
    # which tokens of a row count changes no row; options that only follow from another one have no value
    return [
        f"--{name.replace('_', '-')}"
        for name in sorted(names)
        if name != "targets" and getattr(options, name, None) is not None
    ]


def config_of(options: EvalOptions, model: RecordedModel, world_size: int) -> Config:
    """Return the configuration of an evaluation.

    Raises as `data_of`, if the sequence length is not known, and if options change what data.eval_fraction holds out.
    """
    data = data_of(options, model).values
    if "eval_fraction" in data and (changed := _changed_rows(options, model, data)):
        raise ValueError(
            f"{', '.join(changed)} would put records that the run has trained on into what data.eval_fraction holds "
            f"out, the last rows; remove {'it' if len(changed) == 1 else 'them'}, or give --data SOURCES"
        )
    if world_size % options.stages:
        raise ValueError(f"--stages {options.stages} does not divide the number of processes, {world_size}")
    if "sequence" not in data:
        path = Path(model.name)
        reason = "does not record a sequence length" if path.exists() else missing(path)
        raise ValueError(
            f"{model.name} {reason}; give a run or a checkpoint or, for others, --sequence, such as --sequence 512"
        )
    adapter = model.options.get("adapter.spec")
    micro = options.micro or int(model.options.get("pp.micro") or MICRO)
    # micro-batches of a pipeline at a time: more hide the time until its last stage has work, and pad the last batch
    micros = 2 * options.stages if options.stages > 1 else 1
    metrics = options.metrics
    if metrics is None and options.task in (None, model.task):
        metrics = model.options.get("eval.metrics")
    return Config(
        model=ModelConfig(
            model.name,
            task=options.task or model.task or "lm",
            dtype=options.dtype or model.options.get("model.dtype") or "fp32",
            quantize=model.options.get("model.quantize") or "none",
            offload=options.offload,
            freeze="*" if options.offload != "none" and adapter is None else None,
        ),
        adapter=AdapterConfig(adapter),
        data=DataConfig(**data, batch=micro * micros * (world_size // options.stages)),
        optim=OptimConfig(lr=1.0, steps=1),
        pp=PipelineConfig(stages=options.stages, micro=micro, schedule="gpipe"),
        eval=EvalConfig(metrics=metrics),
        log=LogConfig(dir=str(options.cache.parent / "eval"), to=""),
        run=RunConfig(timeout=options.timeout, device=options.device),
    )
