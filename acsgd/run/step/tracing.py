"""log.trace: record what each rank does in some steps, and write it as one trace file on one clock."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from acsgd.comm.spans import Span, SpanRecorder
from acsgd.config.checks import traced_steps
from acsgd.groups import Groups, collective_errors
from acsgd.io.files.atomic import replace_text
from acsgd.run.report import Report, StepField, on_any
from acsgd.run.session import Session
from acsgd.run.step.hooks import LoopState, StepHook
from acsgd.run.step.trace_file import RankTrace, describe_plan, plan_steps, trace_json

TAG = 3
"""Tag of the messages of this file."""
ROUNDS = 5
"""Round trips per rank, of which the shortest gives the difference of the clocks."""
MAX_SPANS = 20_000
"""Number of spans of all ranks in a file. Rank 0 needs about 0.1 ms for each, for which training waits."""
FULL = StepField("trace_full", on_any)
"""Whether a rank has no room for the spans of another step."""


def record_to(session: Session, recorder: SpanRecorder | None) -> None:
    """Record what this rank does from now on; None = nothing."""
    session.pipeline.trace = recorder
    for subject, meter in session.meters():
        meter.trace = recorder and recorder.about(subject)


class StepTrace(StepHook):
    """Records the steps of log.trace, as many as have room, and writes them after the last one.

    A save is not kept waiting: it is being written by then, and at the end of a run it is complete. note: prints a
    sentence for the user.

    A view of an elastic run records its own steps: after a change in the middle, the file begins with the next step.
    """

    fields = (FULL,)

    def __init__(self, session: Session, note: Callable[[str], None]) -> None:
        config = session.job.config.log
        self._session, self._note = session, note
        self._steps = traced_steps(config.trace)
        self._path = Path(config.dir) / f"trace-{str(config.trace).replace(':', '-')}.json"
        self._recorder: SpanRecorder | None = None
        self._limit = max(1, MAX_SPANS // session.job.topology.world_size)
        self._ends: dict[int, int] = {}
        """By recorded step, the number of spans after it."""

    def report(self, state: LoopState) -> Report:
        if self._recorder is None or not self._ends:
            return {}
        recorded = len(self._recorder.spans)  # without those of the step that begins
        return {FULL: recorded + 2 * recorded / len(self._ends) > self._limit}

    def before_step(self, state: LoopState) -> None:
        if state.progress.step + 1 in self._steps:
            self._recorder = self._recorder or SpanRecorder(limit=self._limit)
            record_to(self._session, self._recorder)

    def after_step(self, state: LoopState) -> None:
        if self._recorder is not None:
            assert state.summary is not None
            record_to(self._session, None)
            self._recorder.add("step", f"step {state.progress.step}", state.started_at, time.perf_counter())
            self._ends[state.progress.step] = len(self._recorder.spans)
            if state.summary[FULL]:
                self._steps = range(self._steps[0], state.progress.step + 1)

    def before_next(self, state: LoopState) -> None:
        """Write the file after the last step, unless the run ends. A collective call, then."""
        is_over = state.is_stopped or state.progress.step == self._session.job.config.optim.num_steps
        if self._recorder is not None and state.progress.step >= self._steps[-1] and not is_over:
            self._write()

    def at_end(self, state: LoopState) -> None:
        """Write what a run that ends earlier has recorded. A collective call."""
        if self._recorder is not None:
            self._write()
        elif self._steps and not self._path.exists():
            first, last, step = self._steps[0], self._steps[-1], state.progress.step
            self._note(f"log.trace: steps {first} to {last} were not trained by this start, which ends at step {step}")

    def _write(self) -> None:
        """Gather the spans of all ranks and write the file, on rank 0. A collective call."""
        assert self._recorder is not None
        spans, self._recorder = self._recorder.spans, None
        steps, self._ends = [*self._ends], {}
        job = self._session.job
        topology, stages = job.topology, ", ".join(map(str, job.layout.stages))
        label = f"rank {topology.rank}, stage {stages}, replica {topology.replica} on {socket.gethostname()}"
        gathered = gather_spans(self._session.groups, json.dumps((topology.replica, label, spans)))
        if not gathered:
            return
        traces = [_on_one_clock(rank, *gathered[rank]) for rank in topology.ranks]  # a plan is one of a pipeline
        try:
            plans, of_plan = (found := plan_steps(traces)), describe_plan(found)
        except (KeyError, ValueError) as error:  # a step that is not complete on all ranks
            plans, of_plan = [], f"; without a plan, since a step is not complete: {str(error).partition(chr(10))[0]}"
        error_ms = 1e3 * max(trace.clock_error_s for trace in traces)
        try:
            replace_text(self._path, trace_json(traces, plans))
        except OSError as error:
            self._note(f"{self._path} cannot be written ({error.strerror}); training continues")
            return
        wanted = traced_steps(job.config.log.trace)
        is_cut = self._steps != wanted or any(len(trace.spans) >= self._limit for trace in traces)
        room = f", steps {steps[0]} to {steps[-1]}: {MAX_SPANS:,} spans of all ranks have room" if is_cut else ""
        self._note(
            f"trace: {self._path}{room}, clocks of the ranks agree within {error_ms:.2g} ms; open it with "
            f"ui.perfetto.dev or chrome://tracing{of_plan}"
        )


def _on_one_clock(rank: int, text: str, ahead_s: float, error_s: float) -> RankTrace:
    """Return the trace of a rank on the clock of rank 0. ahead_s: time by which its own clock is ahead."""
    replica, label, spans = json.loads(text)
    moved = [Span(*span)._replace(start=span[2] - ahead_s, end=span[3] - ahead_s) for span in spans]
    return RankTrace(rank, replica, label, error_s, sorted(moved, key=lambda span: (span.start, -span.end)))


def gather_spans(groups: Groups, text: str) -> Sequence[tuple[str, float, float]]:
    """Send a text to rank 0, and measure how far its clock differs. A collective call.

    Returns on rank 0, per rank: the text, the time by which the clock of the rank is ahead, and its largest error, half
    of the shortest round trip, seconds; on other ranks nothing.
    """
    group, me = groups.world, groups.world.rank()
    clock, length = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)

    def receive(buffer: Tensor, rank: int) -> Tensor:
        groups.waits.wait(group.irecv(buffer, rank, TAG))
        return buffer

    def send(tensor: Tensor, rank: int) -> None:
        groups.waits.wait(group.isend(tensor, rank, TAG))

    with collective_errors("gathering a trace", group):
        if me:
            for _ in range(ROUNDS):
                receive(clock, 0)
                send(torch.tensor([time.perf_counter()], dtype=torch.float64), 0)
            message = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
            send(torch.tensor([len(message)]), 0)
            send(message, 0)
            return []
        gathered = [(text, 0.0, 0.0)]
        for rank in range(1, group.size()):
            rounds = []
            for _ in range(ROUNDS):
                before = time.perf_counter()
                send(clock, rank)
                theirs, after = receive(clock, rank).item(), time.perf_counter()
                rounds.append(((after - before) / 2, theirs - (before + after) / 2))
            error_s, ahead_s = min(rounds)
            message = torch.empty(int(receive(length, rank)), dtype=torch.uint8)
            gathered.append((bytes(receive(message, rank).numpy()).decode(), ahead_s, error_s))
    return gathered
