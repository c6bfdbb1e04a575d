"""Policy for checkpoints: when the run is saved, and what is reported about saves."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch

from acsgd.adapters.initial import NewAdapter
from acsgd.config.adapters import ADAPTERS
from acsgd.config.spec import to_spec
from acsgd.errors import NonFiniteError, RunError, SaveError
from acsgd.failures.signals import StopSignals
from acsgd.io.checkpoint.constants import ConstantsFiles
from acsgd.io.checkpoint.progress import Progress, RunState, data_options, origin_of, recorded_options
from acsgd.io.checkpoint.resume import Checkpoint, newest_valid
from acsgd.io.checkpoint.saver import Saver
from acsgd.io.data.rows.base import RowReader
from acsgd.io.telemetry.record import StepRecord
from acsgd.run.lock.lock import RunLock
from acsgd.run.plan.job import Job
from acsgd.run.report import Report, StepField, on_any
from acsgd.run.session import Session
from acsgd.run.setup.inputs import RunInputs
from acsgd.run.setup.resume import Start, complete_files, layer_states
from acsgd.run.step.hooks import LoopState, StepHook
from acsgd.shards.chat_template import write_chat_template
from acsgd.shards.disk import ShardDirectory, copy_model_files, list_model_files
from acsgd.shards.generation import write_ends, write_special_tokens
from acsgd.shards.layer_tensors import describe_tensors
from acsgd.shards.load import WeightSource
from acsgd.shards.manifest import StoredFile

SAVE = StepField("save", on_any)
"""Whether a checkpoint is due by this rank's clock, or was requested."""
FAILED_SAVE = StepField("failed_save", on_any)
"""Whether a save has failed on this rank."""


class Checkpointing(StepHook):
    """Saves of one run, which are written while training continues. A context manager, as `Saver` is.

    newest: checkpoint the run resumed from; note: prints a sentence for the user.
    """

    fields = (SAVE, FAILED_SAVE)

    def __init__(
        self,
        session: Session,
        saver: Saver,
        inputs: RunInputs,
        newest: Path | None,
        lock: RunLock,
        signals: StopSignals,
        note: Callable[[str], None],
    ) -> None:
        self.newest = newest
        """Newest complete checkpoint that this rank knows of."""
        self._resumed_from = newest
        self._session = session
        self._saver = saver
        self._inputs = inputs
        self._lock = lock
        self._signals = signals
        self._note = note
        self._config = session.job.config.checkpoint
        self._saved_at = time.monotonic()
        self._has_copy = False
        self._is_requested = False

    @classmethod
    def open(
        cls, start: Start, inputs: RunInputs, lock: RunLock, signals: StopSignals, *, note: Callable[[str], None]
    ) -> Checkpointing:
        """Return the checkpointing of a run that has just started."""
        job = start.session.job
        stored = job.model._replace(quantization=None).build(torch.float32)
        saver = Saver(
            directory=job.paths.checkpoints,
            config=job.config.checkpoint,
            write_model_files=partial(_write_model_files, job, inputs.reader.rows),
            task=job.model.task.model_class.name,
            model=job.model.description,
            adapter=to_spec(job.model.adapter, ADAPTERS) if job.model.adapter else None,
            describe_tensors=partial(describe_tensors, stored, job.model.description),
            topology=job.topology,
            groups=start.session.groups,
            streams=job.streams,
            timeout_s=job.disk_timeout_s,
            constants=ConstantsFiles(_directories(start.source)),
            verify=lock.verify,
            exchange=inputs.disks.exchange(job, start.session.groups),
        )
        return cls(start.session, saver, inputs, start.newest, lock, signals, note)

    def __enter__(self) -> Checkpointing:
        self._saver.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._saver.__exit__(*exception)
        if isinstance(exception[1], NonFiniteError):
            with contextlib.suppress(RunError):  # that of the save; the cause is the one that is raised
                self.finish_save(wait=False)

    @property
    def newest_step(self) -> int:
        """Step of the newest checkpoint of this run; 0 = there is none."""
        number = self.newest.name.rpartition("-")[2] if self.newest is not None else ""
        return int(number) if number.isdecimal() else 0

    @property
    def is_saving(self) -> bool:
        """Whether a save is in progress on this rank."""
        return self._has_copy or self._saver.is_writing

    def keep(self, is_used: Callable[[Path], bool]) -> None:
        """Remove no checkpoint that is in use. is_used: called from a thread with the path of one."""
        self._saver.is_used = is_used

    def request_save(self) -> None:
        """Let the run be saved after the next step."""
        self._is_requested = True

    def report(self, state: LoopState) -> Report:
        every_s, result = self._config.every_s, self._saver.result
        is_due = every_s is not None and time.monotonic() - self._saved_at >= every_s
        # by the clock of rank 0 alone, or two ranks would vote at different steps for the same save
        save = (is_due and self._session.job.topology.rank == 0) or self._is_requested
        self._is_requested = False
        return {SAVE: save, FAILED_SAVE: result is not None and result.error is not None}

    def after_step(self, state: LoopState) -> None:
        """Report the save in progress if it has ended, and copy the state to save if one is due."""
        assert state.summary is not None
        self.finish_save(wait=state.summary[FAILED_SAVE])
        is_due = state.is_due(self._config.every_steps, self._session.job.config.optim.num_steps)
        is_due |= state.save_is_due or state.is_stopped or state.summary[SAVE]
        progress = state.evaluated or state.progress
        best = progress.improves(state.progress, self._config.best)
        stall_s = self.copy_state(progress, due=is_due, best=best, idle=state.idle, unevaluated=state.unevaluated)
        if state.record is not None:
            state.record = state.record._replace(save_stall_s=stall_s)

    def after_log(self, state: LoopState) -> None:
        """Start to write the copied state in the background; after the log, so that it is not ahead of the metrics."""
        if self._has_copy:
            self._saver.write()
        self._has_copy = False

    def at_end(self, state: LoopState) -> None:
        """Wait for the last save, after one of a run that has stopped later than after its last step.

        Until it is written the step counts as open, so that it can be saved again.
        """
        state.is_open = True
        self.finish_save(wait=True, last=True)
        if state.is_stopped and self.newest_step < state.progress.step:
            self.copy_state(state.progress, due=True, best=False, idle=state.idle)
            self.after_log(state)
            self.finish_save(wait=True, last=True)
        state.is_open = False
        self._note(self._describe_end(state.progress.step, state.ended_because))

    def copy_state(
        self,
        progress: Progress,
        *,
        due: bool,
        best: bool,
        idle: Collection[int] = (),
        unevaluated: StepRecord | None = None,
    ) -> float:
        """Copy the state to host memory if a save is due, or if this step is the best so far by checkpoint.best.

        idle: replicas that write no weights; unevaluated: see `LoopState`. Returns the seconds for which training stood
        still. Raises RunError if the previous save failed, or another run has taken over the run directory.
        """
        self._lock.check()
        if not (due or best):
            return 0.0
        started = time.perf_counter()
        self.finish_save(wait=True)
        if self.newest is not None and not self.newest.is_dir():
            self._note(f"{self.newest} was removed during the run; step {progress.step} is saved now")
        job = self._session.job
        run = RunState(
            progress,
            self._inputs.identity,
            recorded_options(job.config),
            self._session.peers.size,
            best,
            origin_of(job.config),
            self._inputs.reader.stream_states(progress.step),
            unevaluated.line() if unevaluated else None,
            self._inputs.held_out_key,
            data_options(job.config, self._inputs.reader.rows.formats),
        )
        states, replica = layer_states(self._session, idle), self._session.peers.replica
        self._saver.snapshot(progress.step, states, run.to_dict(), replica=replica, best=best)
        self._saved_at, self._has_copy = time.monotonic(), True
        return time.perf_counter() - started

    def finish_save(self, *, wait: bool, last: bool = False) -> None:
        """Report the result of the save in progress if it has ended.

        wait: wait for its end, which all ranks do together; last: no other save follows. Raises SaveError if the save
        failed, unless checkpoint.on_error="continue" and another save follows.
        """
        result, stops = self._saver.result, last or self._config.on_error == "stop"
        if not wait and (result is None or (result.error is not None and stops)):
            return  # a failure ends the run on all ranks together: after the next step, when all know of it
        result = self._saver.wait()
        if result is None:
            return
        if result.error is None:
            self.newest = result.path
            self._note(f"saved {result.path}, on disk after {result.seconds:.1f} s")
            return
        newest = "there is no checkpoint yet" if self.newest is None else f"the newest checkpoint is {self.newest}"
        failure = f"step {result.step} could not be saved: {result.error}; {newest}"
        if stops:
            raise SaveError(failure, result.failed_ranks)
        self._note(f"{failure}; training continues (checkpoint.on_error)")

    def _describe_end(self, step: int, because: str | None) -> str:
        """Return a sentence on the end of the run after a step. because: as in LoopState."""
        optim = self._session.job.config.optim
        steps = optim.num_steps
        if step >= steps and self.newest == self._resumed_from:
            length = "optim.steps" if optim.epochs is None else "optim.epochs"
            last = (
                f"step {step} of {steps} is done" if step == steps else f"step {step} is done, the last is step {steps}"
            )
            return f"nothing left to train: {last}; raise {length}, or give another log.dir ({self.newest})"
        if step == steps:
            return f"done: step {step} of {steps}, {self.newest}\n{_next_commands(self._session.job)}"
        if because is not None:
            return f"ended after step {step} of {steps}: {because}; {self.newest}\n{_next_commands(self._session.job)}"
        if self.newest is None:
            return f"stopped before the first step on {self._signals.received or 'a signal to another rank'}"
        return (
            f"stopped after step {step} of {steps} on {self._signals.received or 'a signal to another rank'}; "
            f"the same command, with any number of processes, resumes from {self.newest}"
        )

    def newest_checkpoint(self, step: int) -> Checkpoint | None:
        """Return the newest valid checkpoint up to a step, after waiting for the save in progress. A collective call.

        Reports those that are not valid. None if there is no other.
        """
        self.finish_save(wait=True)
        job, directory = self._session.job, self._session.job.paths.checkpoints
        paths = [directory.of(each) for each in reversed(directory.steps()) if each <= step]
        if self._resumed_from is not None and self._resumed_from.resolve().parent != directory.path.resolve():
            paths.append(self._resumed_from)
        groups = self._session.groups
        check = partial(complete_files, job, self._inputs.disks.exchange(job, groups), gives_up=True)
        checkpoint, reasons = newest_valid(paths, groups, check, timeout_s=job.disk_timeout_s)
        for reason in reasons:
            self._note(f"passed over a checkpoint: {reason}")
        self.newest = checkpoint.path if checkpoint else None
        if checkpoint is not None:
            self._inputs.reader.restore(checkpoint.run.streams)
        return checkpoint


def _next_commands(job: Job) -> str:
    """Return what to type after a run, one command per line."""
    data, run_dir = job.config.data, job.config.log.dir
    form = "hf" if job.model.adapter is None else "peft"
    commands = [
        *(["generate {} --prompt '...'"] if not job.model.task.has_labels else []),
        *(["eval {}"] if data.eval_sources is not None or data.eval_fraction else []),
        f"convert to-{form} {{}} {shlex.quote(f'{run_dir}-{form}')}",
        "report {}",
    ]
    return "next: " + "\n      ".join(f"acsgd {command.format(shlex.quote(run_dir))}" for command in commands)


def _write_model_files(job: Job, rows: RowReader, target: Path) -> list[StoredFile]:
    """Copy the config and tokenizer files of the model, with the chat template of the run.

    Generation also stops where the learned texts end.
    """
    copied, known = copy_model_files(job.model.directory, target, tokenizer=job.model.tokenizer), job.ends
    if is_other := job.model.has_other_tokenizer:
        write_special_tokens(target, job.tokenizer)
    is_changed = write_chat_template(target, job.tokenizer, job.config.data) or is_other
    if new := [id_ for id_ in rows.ends.ids if id_ not in known and not job.model.task.has_labels]:
        write_ends(target, [*known, *new])
    return list_model_files(target) if new or is_changed else copied


def _directories(source: WeightSource | None) -> list[ShardDirectory]:
    """Return the directory that holds the weights of a source, if it is in files."""
    source = source.base if isinstance(source, NewAdapter) else source
    return [source] if isinstance(source, ShardDirectory) else []
