"""`acsgd eval`: prepare a job as a run does, load its model, and evaluate it once, or run lm-eval on it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from acsgd.commands.evaluation.answers import evaluate_answers
from acsgd.commands.evaluation.job import config_of, data_of, describe_trained, find_evaluated
from acsgd.commands.evaluation.options import DTYPES, EvalOptions
from acsgd.commands.evaluation.report import EvaluationReport
from acsgd.commands.generation.model import check_offload
from acsgd.commands.recorded import RecordedModel
from acsgd.commands.typed import as_typed, typed
from acsgd.config.options import DataConfig
from acsgd.config.run_file import parse_flags
from acsgd.failures.failures import RunContext, report_failure
from acsgd.failures.report import report_startup_error
from acsgd.failures.signals import StopSignals, reporting_stop, starting
from acsgd.groups import clone_store, connect, open_store
from acsgd.io.data.formats.formats import describe_unused
from acsgd.io.data.held_out import HeldOut
from acsgd.io.files.cache import TIMEOUT_S
from acsgd.launch import Launch
from acsgd.layers.batch import Batch
from acsgd.notes import print_note, report_if_slow
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.plan.job import prepare
from acsgd.run.plan.model import RunModel
from acsgd.run.setup.build import build_session
from acsgd.run.setup.data import held_out_records, open_held_out
from acsgd.run.setup.inputs import verify_layers
from acsgd.shards.check import first_names
from acsgd.shards.export import to_hf
from acsgd.shards.hub import find_model
from acsgd.shards.locate import open_hf
from acsgd.shards.manifest import MANIFEST


def run_lm_eval(options: EvalOptions, model: RecordedModel) -> int:
    """Export the model if need be, and run lm-eval on it. Returns its exit code. Raises ValueError."""
    assert options.lm_eval is not None
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError('--lm-eval needs lm-eval: pip install "acsgd[lm-eval]"')
    directory = find_model(model.name, option="model")
    with _exported(directory) as exported:
        dtype = DTYPES[options.dtype] if options.dtype else "auto"
        arguments = ["--model", "hf", "--tasks", options.lm_eval]
        arguments += ["--model_args", f"pretrained={exported},dtype={dtype}"]
        arguments += [] if options.device == "auto" else ["--device", options.device]
        command = [sys.executable, "-m", "lm_eval", *arguments, *shlex.split(options.lm_eval_args)]
        print_note(shlex.join(command))
        return subprocess.run(command, check=False).returncode


@contextlib.contextmanager
def _exported(directory: Path) -> Iterator[Path]:
    """Yield a Hugging Face directory of a model: its own, or one that exists while the context is open."""
    if not os.path.lexists(directory / MANIFEST):
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="acsgd-lm-eval-") as name:
        exported = Path(name) / directory.name
        exported.mkdir()
        to_hf(directory, exported)
        yield exported


def main(argv: list[str], launch: Launch, *, prog: str, end: Callable[[int], None]) -> None:
    """Evaluate as a command line asks: connect the ranks, evaluate, print on rank 0.

    prog: name of the command; end: see `report_failure`. Raises ReportedError after a failure.
    """
    options = parse_flags(EvalOptions, argv, prog=prog, is_main=launch.rank == 0)
    options.check(launch.world_size)
    if launch.rank == 0:
        for note in options.describe_unread():
            print_note(note)
    if options.generate or options.lm_eval is not None:
        with report_startup_error(launch), reporting_stop():
            _run_alone(options, launch)
        return
    with report_startup_error(launch), starting(launch, end):
        store = open_store(launch)
        store_of_failures = clone_store(store, launch)
    with contextlib.ExitStack() as stack, report_failure(store_of_failures, launch, end) as context:
        context.signals = stack.enter_context(StopSignals(end))
        report = evaluate(options, launch, store, context, stack)
        if launch.rank == 0:
            report.show(as_json=options.json)


@as_typed(EvalOptions)
def _run_alone(options: EvalOptions, launch: Launch) -> None:
    """Evaluate what one process generates."""
    model = find_evaluated(options)
    if options.lm_eval is not None:
        if code := run_lm_eval(options, model):
            sys.exit(code)
        return
    data = _described_data(options, model)
    places = None
    if "eval_fraction" in data:  # of the rows, as the run made them, whatever the options say on prompts
        as_recorded = EvalOptions(options.model, dtype=options.dtype, device=options.device, cache=options.cache)
        job = prepare(config_of(as_recorded, model, launch.world_size), launch, trains=False)
        if job.model.task.model_class.has_new_head:
            raise ValueError(f"--generate: {model.name} is trained for {job.model.task.name}, which generates no text")
        places = held_out_records(job)
    config_of_data = DataConfig(**{"sequence": 1, **data}, batch=1)
    evaluate_answers(options, model, config_of_data, places).show(as_json=options.json)


def _described_data(options: EvalOptions, model: RecordedModel) -> dict[str, Any]:
    """Return the options of the data as `data_of` does; print which the run determines, and what it has trained on."""
    data = data_of(options, model)
    for note in (*filter(None, [data.note]), *describe_trained(model, data.values)):
        print_note(note)
    return data.values


@as_typed(EvalOptions)
def evaluate(
    options: EvalOptions, launch: Launch, store: dist.Store, context: RunContext, stack: contextlib.ExitStack
) -> EvaluationReport:
    """Return the metrics of a model on the data, equal on all ranks. Arguments: see `acsgd.main.run`."""
    model, is_main = find_evaluated(options), launch.rank == 0
    config = config_of(options, model, launch.world_size)
    if is_main:
        _described_data(options, model)
    job = prepare(config, launch, trains=False)
    _check_head(job.model)
    check_offload(options.offload, job.streams.device)
    config = job.config
    context.timeout_s = options.timeout
    timeout, several = timedelta(seconds=options.timeout), not launch.is_one_host
    groups = stack.enter_context(connect(job.topology, timeout=timeout, store=store, several_hosts=several))
    verify_layers(job)
    held_out = open_held_out(job, groups)
    source = open_weight_source(job)
    groups.wait_for_all("opening the inputs", timeout_s=TIMEOUT_S)
    if is_main:
        unused = describe_unused(config.data, held_out.rows.formats)
        for note in (*_warnings(model), *held_out.rows.notes, *(typed(text, EvalOptions) for text in unused)):
            print_note(note)
    with report_if_slow(print_note, lambda: f"loading {job.model.describe_size()}", enabled=is_main):
        session = build_session(job, source, groups)
    stack.callback(session.close)
    groups.wait_for_all("setting up", timeout_s=job.disk_timeout_s)
    context.start_training()
    batches = _Batches(held_out, len(job.micro_ids))
    with report_if_slow(print_note, batches.describe, enabled=is_main):
        scores = session.evaluate(batches, 0)
    fraction = f", the last {config.data.eval_fraction:.4g} of it" if config.data.eval_fraction else ""
    evaluated = f"{config.data.sources}{fraction}"
    return EvaluationReport(model.name, evaluated, config.model.task, len(held_out), "sequences", scores)


def _warnings(model: RecordedModel) -> list[str]:
    """Return a warning if the head was initialised when the model was converted, as that of a pretrained base is."""
    if not model.new:
        return []
    return [f"warning: the head of {model.name}, {first_names(model.new)}, has random weights: nothing has trained it"]


def _check_head(model: RunModel) -> None:
    """Raise ValueError if the files of a Hugging Face model lack its head: a new one has learned nothing."""
    if os.path.lexists(model.directory / MANIFEST) or not model.task.model_class.has_new_head:
        return
    if new := open_hf(model.directory, model.task.model_class.name).new:
        raise ValueError(
            f"{model.directory} has no head for {model.task.name}, {first_names(sorted(new))}; give a trained model, "
            "or the --task that it has a head for"
        )


class _Batches:
    """Batches of held-out data, counted while they are read. micros: see `HeldOut.batches`."""

    def __init__(self, held_out: HeldOut, micros: int) -> None:
        self._held_out = held_out
        self._micros = micros
        self._done = 0

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._held_out.batches(self._micros):
            yield batch
            self._done += batch.sample_ids.numel() * self._held_out.replicas

    def describe(self) -> str:
        """Return a sentence on how much is evaluated."""
        return f"evaluated {min(self._done, len(self._held_out)):,} of {len(self._held_out):,} sequences"
