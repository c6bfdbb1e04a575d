"""Start runs of a small model as torchrun would, but in milliseconds: as forks of a process that has imported all.

A start is otherwise the whole of `train.train`. Its rank 0 writes down what it says, and with which step it begins.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from acsgd import train
from acsgd.config.options import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    PipelineConfig,
    RunConfig,
)
from acsgd.io.checkpoint.directory import CheckpointDirectory
from acsgd.io.checkpoint.progress import Progress
from acsgd.io.telemetry.metrics import Metrics
from acsgd.run.failures import report_failure, report_startup_error
from acsgd.run.inputs import open_inputs
from acsgd.run.job import prepare
from acsgd.run.lock import run_lock
from acsgd.run.session import Session
from acsgd.shards.disk import Manifest, StoredFile
from acsgd.topology import Launch, connect

PRELOAD = ["acsgd.run.state", "acsgd.run.signals", "transformers.models.gpt2.modeling_gpt2", "rich.progress"]
TIMEOUT = timedelta(seconds=60)
POLL_S = 0.002

Before = Callable[[int], None]
"""Called with the rank in its process, before anything else: for what a test wants to be different there."""


class Result(NamedTuple):
    """What finished runs are compared by."""

    layers: dict[str, StoredFile]
    """Weights, moments and step counts, by their sha256."""
    run: dict[str, Any] | None
    losses: list[tuple[int, float, float | None]]
    """Step, loss and evaluation loss of every line of metrics.jsonl."""
    best: str | None
    """Name of the checkpoint that "best" leads to."""


@dataclass
class Started:
    """One start of a run: its processes, and what rank 0 has said."""

    processes: list[BaseProcess]
    told: Path
    """A directory with rank 0's `notes`, one JSON string per line, and each rank's `began-at`, a step."""

    def send(self, number: int, ranks: list[int]) -> None:
        """Send a signal to those of some ranks that have not ended."""
        for rank in ranks:
            pid = self.processes[rank].pid
            if self.processes[rank].is_alive() and pid is not None:
                os.kill(pid, number)

    def join(self, timeout: timedelta = TIMEOUT) -> list[int | None]:
        """Wait until all ranks have ended, so long for each; return their exit codes, None of one that does not end."""
        for process in self.processes:
            process.join(timeout.total_seconds())
        return [process.exitcode for process in self.processes]

    def wait_for_training(self) -> None:
        """Return when each rank has begun to train, or has ended."""
        for rank, process in enumerate(self.processes):
            while self.began_at(rank) is None and process.is_alive():
                time.sleep(POLL_S)

    def began_at(self, rank: int = 0) -> int | None:
        """Return the step training went on from, None before it has."""
        path = self.told / f"began-at-{rank}"
        return int(path.read_text()) if path.exists() else None

    @property
    def stderr(self) -> str:
        """What the ranks have printed to stderr."""
        path = self.told / "stderr"
        return path.read_text() if path.exists() else ""

    @property
    def errors(self) -> list[str]:
        """The error messages among it."""
        return [line for line in self.stderr.splitlines() if line.startswith("error: ")]

    def notes(self) -> list[str]:
        """Return what rank 0 has said; its errors as well."""
        path = self.told / "notes"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@contextlib.contextmanager
def started(config: Config, processes: int, *, fsync_s: float = 0.0, before: Before | None = None) -> Iterator[Started]:
    """Start a run in processes of its own, none of which outlives the context; fsync_s: what each fsync takes more."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    Path(config.log.dir).parent.mkdir(parents=True, exist_ok=True)
    told = Path(tempfile.mkdtemp(dir=Path(config.log.dir).parent, prefix="told-"))
    ranks = [
        context.Process(target=run_rank, args=(rank, processes, config, told, fsync_s, before), daemon=True)
        for rank in range(processes)
    ]
    try:
        for rank in ranks:
            rank.start()
        yield Started(list(ranks), told)
    finally:
        for rank in ranks:
            if rank.pid is not None:  # else the end came before its start
                rank.kill()
                rank.join()


def run_rank(rank: int, world_size: int, config: Config, told: Path, fsync_s: float, before: Before | None) -> None:
    """Run one rank as `train.main` does; what it prints goes to the file `stderr`."""
    torch.set_num_threads(1)
    with (told / "stderr").open("a") as file:
        os.dup2(file.fileno(), 2)
    transformers_logging.disable_progress_bar()
    if before is not None:
        before(rank)
    _take_notes(told, rank)
    _slow_down(fsync_s)
    launch = Launch(rank, rank, world_size, world_size)
    store = dist.FileStore(str(told / "store"), world_size)
    timeout_s = config.run.timeout
    with contextlib.ExitStack() as stack:
        with report_startup_error(launch):
            job = prepare(config, launch)
            groups = stack.enter_context(connect(job.topology, timeout=timedelta(seconds=timeout_s), store=store))
            lock = stack.enter_context(run_lock(job, groups))
            inputs = open_inputs(job)
        with report_failure(store, launch, timeout_s=timeout_s, cleanup=lock.release):
            train.train(job, inputs, groups, lock)


def finish(config: Config, processes: int) -> Result:
    """Start a run and let it come to its end. Raises AssertionError if it does not."""
    with started(config, processes) as run:
        codes = run.join()
    assert codes == [0] * processes, (codes, run.notes())
    return result_of(config)


def result_of(config: Config) -> Result:
    """Return what a finished run is compared by. Raises AssertionError if a step is not there, or twice."""
    directory = checkpoints_of(config)
    manifest = Manifest.read(directory.of(config.optim.steps))
    lines = [json.loads(line) for line in (Path(config.log.dir) / "metrics.jsonl").read_text().splitlines()]
    losses = [(line["step"], line["loss"], line.get("eval_loss")) for line in lines]
    steps = [step for step, _, _ in losses]
    assert steps == list(range(1, config.optim.steps + 1)), f"metrics.jsonl does not have each step once: {steps}"
    best = directory.best()
    return Result(manifest.layers, manifest.run, losses, best.name if best else None)


def checkpoints_of(config: Config) -> CheckpointDirectory:
    """Return the directory of a run's checkpoints."""
    return CheckpointDirectory(Path(config.checkpoint.dir or Path(config.log.dir) / "checkpoints"))


def make_config(model: Path, run_dir: Path, *, processes: int, steps: int, checkpoint: CheckpointConfig) -> Config:
    """Return a run with dropout, evaluations and, of four processes, two replicas of two stages."""
    return Config(
        run=RunConfig(timeout=TIMEOUT.total_seconds()),
        model=ModelConfig(str(model)),
        data=DataConfig(sources="demo", sequence=16, batch=4, seed=3, eval_fraction=0.0001),
        optim=OptimConfig(lr=1e-3, steps=steps, warmup=3, clip=0.5, weight_decay=0.1),
        pp=PipelineConfig(stages=min(2, processes), micro=2, layers=(2,) if processes == 1 else (1, 1)),
        eval=EvalConfig(every=3),
        checkpoint=checkpoint,
        log=LogConfig(dir=str(run_dir), to="jsonl"),
    )


def save_model(directory: Path) -> Path:
    """Write a GPT-2 of 10 thousand parameters with new weights, whose tokens are bytes."""
    config = GPT2Config(vocab_size=257, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(directory)
    alphabet = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(directory)
    return directory


def _take_notes(told: Path, rank: int) -> None:
    """Let this process write down what it says, the step it begins with, and the error it ends with."""
    note, run = Metrics.note, train.run_steps

    def write(text: str) -> None:
        if rank == 0:
            with (told / "notes").open("a") as file:
                file.write(json.dumps(text) + "\n")

    def noted(metrics: Metrics, text: str) -> None:
        write(text)
        note(metrics, text)

    def begun(session: Session, progress: Progress, *args: Any) -> None:
        unfinished = told / f".began-at-{rank}"
        unfinished.write_text(str(progress.step))
        unfinished.rename(told / f"began-at-{rank}")
        try:
            run(session, progress, *args)
        except Exception as error:
            write(f"{type(error).__name__}: {error}")
            raise

    Metrics.note = noted  # type: ignore[method-assign]
    train.run_steps = begun


def _slow_down(fsync_s: float) -> None:
    """Let each fsync of this process take longer, as on a busy disk."""
    fsync = os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(fsync_s)
        fsync(descriptor)

    os.fsync = slow
