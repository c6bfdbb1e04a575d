"""Uploads of a run's checkpoints, as a participant of the step boundary: what is sent when, what the end waits for."""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from acsgd.errors import AfterLastStepError, RunError, WaitInterruptedError
from acsgd.failures.signals import StopSignals
from acsgd.io.checkpoint.upload import Uploader, UploadingRun
from acsgd.notes import print_note
from acsgd.run.session import Session
from acsgd.run.setup.directories import RunDisks
from acsgd.run.step.checkpointing import Checkpointing
from acsgd.run.step.hooks import LoopState, StepHook

ID = "upload-id"
"""Name of the file in a run directory with the id by which the address of uploads knows the run."""
STALL_S = 300.0
"""Time without a byte sent after which the end of a run no longer waits for the last upload, seconds."""
POLL_S = 1.0
"""Seconds between two looks at whether it still sends."""


class Upload(StepHook):
    """Sends each checkpoint that is complete to checkpoint.upload. uploader: None on ranks that send nothing."""

    def __init__(
        self,
        session: Session,
        uploader: Uploader | None,
        checkpointing: Checkpointing,
        signals: StopSignals,
        note: Callable[[str], None],
    ) -> None:
        self._session = session
        self._uploader = uploader
        self._checkpointing = checkpointing
        self._signals = signals
        self._note = note
        self._submitted: Path | None = None

    def before_step(self, state: LoopState) -> None:
        """Submit the newest checkpoint, at the start also that of an earlier run, which may not have sent all of it."""
        self._submit()

    def _submit(self) -> None:
        newest = self._checkpointing.newest
        if self._uploader is not None and newest is not None and newest != self._submitted:
            self._submitted = newest
            if newest.resolve().parent == self._session.job.paths.checkpoints.path.resolve():
                self._uploader.submit(newest)  # not another run's, from which this one continues

    def at_end(self, state: LoopState) -> None:
        """Wait for the last upload, unless a signal has ended the run: then the next start continues it.

        Raises AfterLastStepError, on all ranks, if the run was not stopped and its last checkpoint is not uploaded.
        """
        self._submit()
        is_stopped = state.is_stopped and state.ended_because is None
        missing = self._missing(self._uploader, waits=not is_stopped) if self._uploader is not None else ""
        groups = self._session.groups
        found = groups.all_gather_text("uploading the last checkpoint", missing, timeout_s=math.inf)
        if is_stopped:
            if missing:
                self._note(f"{missing}; the next start continues it")
        elif missing := next(filter(None, found), ""):
            with contextlib.suppress(RunError, WaitInterruptedError):  # as soon as a rank ends, all others are ended
                groups.wait_for_all("ending with an error", timeout_s=groups.timeout_s)  # which all know of by then
            message = f"{missing}; the run is complete here, and the same command continues the upload"
            raise AfterLastStepError(message)

    def _missing(self, uploader: Uploader, *, waits: bool) -> str:
        """Return a clause on why the last checkpoint is not uploaded, empty if it is. waits: for its upload."""
        reason = "" if uploader.wait(0.0) else "the run was stopped"
        if reason and waits:
            self._note("waiting for the last upload; Ctrl-C ends this, and the next start continues it")
            reason = self._wait(uploader)
        if not reason and self._submitted is not None and uploader.failed == self._submitted:
            reason = "its upload failed"
        return f"the last checkpoint is not uploaded: {reason}" if reason else ""

    def _wait(self, uploader: Uploader) -> str:
        """Wait for the end of an upload; return a clause on why it has not ended, empty if it has."""
        sent, changed_at = -1, time.monotonic()
        while not self._session.groups.waits.poll(uploader.wait, POLL_S):
            if self._signals.received is not None:
                return f"ended by {self._signals.received}"
            if uploader.sent_bytes != sent:
                sent, changed_at = uploader.sent_bytes, time.monotonic()
            elif time.monotonic() - changed_at > STALL_S:
                return f"nothing was sent for {STALL_S:g} s"
        return ""


@contextlib.contextmanager
def open_upload(
    session: Session, disks: RunDisks, checkpointing: Checkpointing, signals: StopSignals, note: Callable[[str], None]
) -> Iterator[list[StepHook]]:
    """Open the uploads of a run; none without checkpoint.upload. note: prints a sentence for the user, on rank 0."""
    config, rank = session.job.config.checkpoint, session.job.topology.rank
    if config.upload is None:
        yield []
        return
    run = _uploading_run(session, checkpointing.newest)
    if not disks.checkpoints.is_leader(rank):
        yield [Upload(session, None, checkpointing, signals, note)]
        return
    if rank != 0:
        host = socket.gethostname()
        note = lambda text: print_note(f"{host}: {text}")  # noqa: E731
    limit = None if config.upload_rate is None else config.upload_rate * 1e6
    with Uploader(
        config.upload, disks.checkpoints, disks.checkpoints.of(rank), run=run, bytes_per_s=limit, note=note
    ) as uploader:
        checkpointing.keep(uploader.is_reading)
        yield [Upload(session, uploader, checkpointing, signals, note)]


def _uploading_run(session: Session, resumed: Path | None) -> UploadingRun:
    """Return the run as the address knows it: by the id on any disk, or a new one of a run that resumes nothing.

    A collective call.
    """
    path = session.job.paths.run / ID
    mine = path.read_text() if resumed is not None and path.exists() else ""
    known = session.groups.all_gather_text("looking for the id of uploads", mine, timeout_s=session.job.disk_timeout_s)
    run_id = next(filter(None, known), session.groups.run_id)
    return UploadingRun(session.job.config.log.dir, run_id, path, resumed)
