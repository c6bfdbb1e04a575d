"""Runs of a small model whose ranks are forked from a server that has imported everything: they start in milliseconds.

Each rank runs the whole of `train.train`, and writes what a test needs to a directory: see `StartedRun`.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from acsgd import main, train
from acsgd.__main__ import end_process
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
from acsgd.errors import ReportedError
from acsgd.failures.failures import report_failure
from acsgd.groups import clone_store
from acsgd.io.checkpoint.directory import CheckpointDirectory
from acsgd.io.telemetry.metrics import Metrics
from acsgd.launch import Launch
from acsgd.run.step.run import TrainingRun
from acsgd.shards.manifest import Manifest, StoredFile
from tests.lib.patience import NO_LIMIT_S, Patience, wait_until
from tests.lib.processes import CONTEXT

LIMIT_S = 60.0
"""Time for the end of all ranks, seconds on a quiet machine."""
POLL_S = 0.002

Setup = Callable[[int], None]
"""Function that a test runs first in the process of each rank, e.g. to inject a fault. Its argument is the rank."""


class Result(NamedTuple):
    """Files of a finished run, in a form that two runs can be compared by."""

    layers: dict[str, StoredFile]
    """Files of weights, moments and step counts, with their checksums."""
    run: dict[str, Any] | None
    losses: list[tuple[int, float, float | None]]
    """Step, loss and evaluation loss of every line of metrics.jsonl."""
    best: str | None
    """Name of the checkpoint that the link "best" points to."""


@dataclass
class StartedRun:
    """The processes of one start of a run, and what they have written so far."""

    processes: list[BaseProcess]
    directory: Path
    """Directory of the files `stderr`, `notes` (of rank 0: one JSON string per line) and `resumed-at-RANK` (a step)."""

    def send(self, number: int, ranks: list[int]) -> None:
        """Send a signal to ranks; ranks that have ended are skipped."""
        for rank in ranks:
            pid = self.processes[rank].pid
            if self.processes[rank].is_alive() and pid is not None:
                os.kill(pid, number)

    def join(self, limit_s: float = LIMIT_S, *, ranks: Sequence[int] | None = None) -> list[int | None]:
        """Wait for the end of ranks, by default of all; return their exit codes, None for one still running.

        limit_s: seconds of a quiet machine.
        """
        patience = Patience(limit_s)
        joined = self.processes if ranks is None else [self.processes[rank] for rank in ranks]
        for process in joined:
            while process.exitcode is None and not patience.is_over:
                process.join(1.0)
        return [process.exitcode for process in joined]

    def wait_for_training(self) -> None:
        """Wait until each rank trains or has ended."""
        self.wait_until(
            lambda: all(
                self.resumed_at(rank) is not None or not process.is_alive()
                for rank, process in enumerate(self.processes)
            )
        )

    def wait_until(self, condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
        """Wait until a condition is true. Raises AssertionError after `limit_s` seconds of a quiet machine."""
        wait_until(condition, limit_s, poll_s=POLL_S, describe=lambda: self.stderr)

    def resumed_at(self, rank: int = 0) -> int | None:
        """Return the step from which training resumed, 0 for a new run; None before training starts."""
        path = self.directory / f"resumed-at-{rank}"
        return int(path.read_text()) if path.exists() else None

    @property
    def stderr(self) -> str:
        """Output of all ranks to stderr."""
        path = self.directory / "stderr"
        return path.read_text() if path.exists() else ""

    @property
    def errors(self) -> list[str]:
        """Lines of stderr that begin with "error: "."""
        return [line for line in self.stderr.splitlines() if line.startswith("error: ")]

    def notes(self) -> list[str]:
        """Return the notes that rank 0 has printed, and the error that ended its training."""
        path = self.directory / "notes"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@contextlib.contextmanager
def started(
    config: Config, processes: int, *, fsync_s: float = 0.0, setup: Setup | None = None, store_port: int | None = None
) -> Iterator[StartedRun]:
    """Start a run; kill its processes on exit.

    fsync_s: delay added to each fsync, seconds; store_port: of a TCPStore on this host, by default a new one.
    """
    parent = Path(config.log.dir).absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(dir=parent, prefix="start-"))
    # as under torchrun, no rank hosts the store, so it survives a rank that is killed
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    barrier = CONTEXT.Barrier(processes, timeout=NO_LIMIT_S)
    args = (processes, config, directory, store_port or store.port, fsync_s, setup, barrier)
    ranks = [CONTEXT.Process(target=run_rank, args=(rank, *args), daemon=True) for rank in range(processes)]
    try:
        for rank in ranks:
            rank.start()
        yield StartedRun(list(ranks), directory)
    finally:
        for rank in ranks:
            if rank.pid is not None:  # None: an earlier rank failed to start
                rank.kill()
                rank.join()


def run_rank(
    rank: int,
    world_size: int,
    config: Config,
    directory: Path,
    port: int,
    fsync_s: float,
    setup: Setup | None,
    barrier: Barrier,
) -> None:
    """Run one rank as `acsgd.main` does, with stderr redirected to a file.

    port: of the store; barrier: of all ranks, which on a busy machine start seconds apart, longer than some timeouts.
    """
    torch.set_num_threads(1)
    with (directory / "stderr").open("a") as file:
        os.dup2(file.fileno(), 2)
    transformers_logging.disable_progress_bar()
    if setup is not None:
        setup(rank)
    _record_notes(directory, rank)
    _delay_fsync(fsync_s)
    error_file = directory / "errors" / str(rank) / "error.json"  # as torchrun names it
    error_file.parent.mkdir(parents=True)
    launch = Launch(rank, rank, world_size, world_size, error_file=str(error_file))
    store = dist.TCPStore("127.0.0.1", port)
    barrier.wait()
    try:
        with (
            contextlib.ExitStack() as stack,
            report_failure(clone_store(store, launch), launch, end_process) as context,
        ):
            main.run(config, launch, store, context, stack, end_process)
    except ReportedError as error:
        end_process(error.exit_code)


def finish(config: Config, processes: int) -> Result:
    """Run to the last step and return the result. Raises AssertionError if a rank fails."""
    with started(config, processes) as run:
        codes = run.join()
    assert codes == [0] * processes, (codes, run.notes())
    return result_of(config)


def result_of(config: Config) -> Result:
    """Read the result of a finished run. Raises AssertionError unless metrics.jsonl has each step once."""
    directory = checkpoints_of(config)
    manifest = Manifest.read(directory.of(config.optim.steps))
    lines = [json.loads(line) for line in (Path(config.log.dir) / "metrics.jsonl").read_text().splitlines()]
    losses = [(line["step"], line["loss"], line.get("eval_loss")) for line in lines if "event" not in line]
    steps = [step for step, _, _ in losses]
    assert steps == list(range(1, config.optim.steps + 1)), f"metrics.jsonl does not have each step once: {steps}"
    best = directory.best()
    return Result(manifest.layers | manifest.tables, manifest.run, losses, best.name if best else None)


def checkpoints_of(config: Config) -> CheckpointDirectory:
    """Return the directory of a run's checkpoints."""
    return CheckpointDirectory(Path(config.checkpoint.dir or Path(config.log.dir) / "checkpoints"))


def make_config(model: Path, run_dir: Path, *, processes: int, steps: int, checkpoint: CheckpointConfig) -> Config:
    """Return the config of a run with dropout and evaluations; with four processes, of two replicas of two stages."""
    return Config(
        run=RunConfig(timeout=NO_LIMIT_S),
        model=ModelConfig(str(model)),
        data=DataConfig(sources="demo", sequence=16, batch=4, seed=3, eval_fraction=0.0001),
        optim=OptimConfig(lr=1e-3, steps=steps, warmup=3, clip=0.5, weight_decay=0.1),
        pp=PipelineConfig(stages=min(2, processes), micro=2, layers=(2,) if processes == 1 else (1, 1)),
        eval=EvalConfig(every=3),
        checkpoint=checkpoint,
        log=LogConfig(dir=str(run_dir), to="jsonl"),
    )


def save_model(directory: Path, *, blocks: int = 2, tied: bool = True) -> Path:
    """Write a GPT-2 of about 10 thousand parameters with random weights and a tokenizer whose tokens are bytes."""
    config = GPT2Config(
        vocab_size=257,
        n_positions=16,
        n_embd=16,
        n_layer=blocks,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(directory)
    alphabet = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(directory)
    return directory


def _record_notes(directory: Path, rank: int) -> None:
    """Patch this process to write the step at which training starts and, on rank 0, its notes and its error."""
    note, run_steps = Metrics.note, train.run_steps

    def write(text: str) -> None:
        if rank == 0:
            with (directory / "notes").open("a") as file:
                file.write(json.dumps(text) + "\n")

    def recorded_note(metrics: Metrics, text: str) -> None:
        write(text)
        note(metrics, text)

    def recorded_run_steps(run: TrainingRun) -> None:
        unfinished = directory / f".resumed-at-{rank}"
        unfinished.write_text(str(run.state.progress.step))
        unfinished.rename(directory / f"resumed-at-{rank}")
        try:
            run_steps(run)
        except Exception as error:
            write(f"{type(error).__name__}: {error}")
            raise

    Metrics.note = recorded_note  # type: ignore[method-assign]
    train.run_steps = recorded_run_steps


def _delay_fsync(seconds: float) -> None:
    """Patch this process to take longer for each fsync, as on a busy disk."""
    fsync = os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(seconds)
        fsync(descriptor)

    os.fsync = slow
