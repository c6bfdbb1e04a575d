"""Fine-tune a Hugging Face causal language model over pipeline stages x replicas.

    torchrun --nproc-per-node 4 train.py examples/gpt2.toml                    # stages and replicas as the file says
    torchrun --nproc-per-node 4 train.py examples/gpt2.toml --pp.stages 4      # one pipeline of 4 stages
    python train.py examples/gpt2.toml --pp.stages 1                           # one process
    python train.py --help                                                     # every option with its default

Flags override the file. The run directory (log.dir) gets config.toml, metrics.jsonl, logs/ and checkpoints/. Started
again, at any size, a run goes on from its newest checkpoint; SIGINT and SIGTERM end it after the step, saved.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from acsgd.config.run_file import parse, to_toml
from acsgd.errors import RunError
from acsgd.io.checkpoint.progress import Progress
from acsgd.io.sampling.batches import Batch, Dataset
from acsgd.io.telemetry.metrics import Metrics
from acsgd.io.telemetry.text_log import open_text_log
from acsgd.run.checkpointing import Saves
from acsgd.run.failures import report_failure, report_startup_error
from acsgd.run.inputs import Inputs, open_inputs
from acsgd.run.job import Job, prepare
from acsgd.run.session import Session
from acsgd.run.signals import StopSignals, end_with_torchrun
from acsgd.run.state import restore, start
from acsgd.topology import Groups, Launch, connect


def main(argv: list[str]) -> None:
    """Run a job from its command line: decide it, connect, train."""
    launch = Launch.from_env()
    if launch.under_torchrun:
        end_with_torchrun(is_main=launch.local_rank == 0)
    with contextlib.ExitStack() as opened:
        with report_startup_error(launch.rank, launch.local_rank):
            job = prepare(parse(argv, speak=launch.rank == 0), launch)
            inputs = open_inputs(job)
            timeout_s = job.config.run.timeout
            groups = opened.enter_context(connect(job.topology, timeout=timedelta(seconds=timeout_s)))
        with report_failure(groups.store, rank=launch.rank, world_size=launch.world_size, timeout_s=timeout_s):
            train(job, inputs, groups)


def train(job: Job, inputs: Inputs, groups: Groups) -> None:
    """Make every optimizer step of the job that is not done yet, evaluating and saving when due and at the end."""
    run_dir, speaks = Path(job.config.log.dir), job.topology.rank == 0
    run_dir.mkdir(parents=True, exist_ok=True)
    if speaks:
        (run_dir / "config.toml").write_text(to_toml(job.config))
    if not groups.all_equal(job.fingerprint() + inputs.fingerprint()):
        raise RunError("not all ranks run the same: compare run files, flags, model configs and texts of all hosts")
    with contextlib.ExitStack() as opened:
        opened.enter_context(text_log(job, run_dir))
        begun = start(job, inputs, groups)
        opened.callback(begun.worker.close)
        step = begun.progress.step
        metrics = opened.enter_context(Metrics.open(job.config, run_dir, resumed_at=step, speaks=speaks))
        for note in [job.describe(), *inputs.notes, *begun.told]:
            metrics.note(note)
        saves = opened.enter_context(Saves.open(begun, inputs.identity, groups, tell=metrics.note))
        signals = opened.enter_context(StopSignals())
        Training(begun.worker, inputs, metrics, saves, signals, begun.progress).run()


def text_log(job: Job, run_dir: Path) -> contextlib.AbstractContextManager[None]:
    """Open this rank's text log, if log.to asks for one."""
    if "text" not in job.config.log.to.split(","):
        return contextlib.nullcontext()
    topology = job.topology
    return open_text_log(run_dir, rank=topology.rank, stages=job.stages, replica=topology.replica)


@dataclass
class Training:
    """A run under way, as this rank sees it. What decides on what comes next is equal on all ranks."""

    worker: Session
    inputs: Inputs
    metrics: Metrics
    saves: Saves
    signals: StopSignals
    progress: Progress
    passed_over: set[int] = field(default_factory=set)
    """Steps whose loss was a spike: their batches are not learnt from."""

    def run(self) -> None:
        """Train to the last step, or to the one in which a signal asks to end; what was trained is saved."""
        config = self.worker.job.config
        batches, stopped = self.batches(), False
        while self.progress.step < config.optim.steps and not stopped:
            started, step = time.perf_counter(), self.progress.step
            asks = self.saves.asks(stop=self.signals.wished is not None)
            result = self.worker.train_step(next(batches), self.progress, asks, update=step not in self.passed_over)
            step_s = time.perf_counter() - started
            self.saves.hear(wait=result.totals.save_failures > 0)
            if result.updated and self.progress.is_spike(result.loss, config.optim.spike) and self.go_back(result.loss):
                batches = self.batches()
                continue
            self.progress, stopped = result.progress, result.totals.stop_wishes > 0
            eval_loss = self.evaluate() if self.due(config.eval.every) else None
            asked = stopped or result.totals.save_wishes > 0 or self.due(config.checkpoint.every_steps)
            stall_s = self.saves.take(self.progress, asked=asked, evaluated=eval_loss is not None)
            self.metrics.log(result.record(step_s, stall_s, eval_loss))
            self.saves.write()  # now, so that no checkpoint is ahead of metrics.jsonl
        self.saves.hear(wait=True, last=True)
        self.metrics.note(self.last_words(stopped))

    def batches(self) -> Iterator[Batch]:
        """Return the batches of the steps that are left, read ahead."""
        return iter(Dataset(self.inputs.reader, range(self.progress.step, self.worker.job.config.optim.steps)))

    def due(self, every: int | None) -> bool:
        """Whether the step just made is a multiple of `every`, or the last of the run."""
        step = self.progress.step
        return step == self.worker.job.config.optim.steps or (every is not None and step % every == 0)

    def evaluate(self) -> float | None:
        """Return the mean loss on the held-out text, if there is any."""
        held_out, micros = self.inputs.held_out, len(self.worker.job.micros)
        if held_out is None:
            return None
        loss = self.worker.evaluate(held_out.batches(micros), self.progress.step - 1)
        self.progress = self.progress.evaluated(loss)
        told = f"held-out loss {loss:.4f}, perplexity {math.exp(min(loss, 700.0)):.2f}"
        self.metrics.note(f"step {self.progress.step}: {told} ({len(held_out)} sequences{self.worker.job.eval_form})")
        return loss

    def go_back(self, loss: float) -> bool:
        """Return to the newest checkpoint, if any, as if the present step had never been; pass it over next time."""
        checkpoint = self.saves.newest_sound()
        if checkpoint is None:
            return False
        step = self.progress.step
        self.progress = restore(self.worker, checkpoint)
        self.passed_over.add(step)
        self.metrics.note(f"step {step + 1}: loss {loss:.4f} is a spike; back to {checkpoint.path} and past this batch")
        return True

    def last_words(self, stopped: bool) -> str:
        """Say how the run has ended, and how to go on."""
        step, steps = self.progress.step, self.worker.job.config.optim.steps
        if stopped and step < steps:
            return (
                f"stopped after step {step} of {steps} on {self.signals.wished or 'a signal to another rank'}; "
                f"the same command, with any number of processes, goes on from {self.saves.newest}"
            )
        return f"done: step {step} of {steps}, {self.saves.newest}"
