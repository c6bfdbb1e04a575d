"""Traces as Chrome trace events: what all ranks did on one clock, beside what the simulator plans for the same actions.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Perfetto reads it, too.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median
from typing import Any, NamedTuple

from acsgd.comm.spans import Span
from acsgd.pp.schedules.actions import Action, Op, parse_action
from acsgd.pp.schedules.dependencies import Dependencies
from acsgd.pp.schedules.simulate import Cost, Timeline, simulate
from acsgd.pp.wire.frame import MessageKind

DIFFERS = 0.05
"""Share of the planned time of a pipeline by which an action that differs from the plan makes it later."""

THREADS = 10_000
"""Distance of the thread ids of two processes: Perfetto merges threads of one id, also of different processes."""

Event = dict[str, Any]


@dataclass(frozen=True)
class RankTrace:
    """The spans of one rank, on the clock of rank 0."""

    rank: int
    replica: int
    label: str
    """For the user."""
    clock_error_s: float
    """Largest possible difference between this clock and that of rank 0."""
    spans: Sequence[Span]
    """In order of their starts."""

    @property
    def pid(self) -> int:
        """Id of its process in the file, at least 1: process 0 is the idle one of a kernel."""
        return self.rank + 1

    def tid(self, span: Span) -> int:
        """Return the id in the file of the thread of a span."""
        return THREADS * self.pid + self.threads[span.thread]

    @cached_property
    def threads(self) -> dict[int, int]:
        """Number of each thread; 0 is the one of the steps."""
        steps = (span.thread for span in self.of("step"))
        return {
            thread: number for number, thread in enumerate(dict.fromkeys([*steps, *(s.thread for s in self.spans)]))
        }

    def of(self, category: str) -> Iterator[Span]:
        """Yield the spans of a category."""
        return (span for span in self.spans if span.category == category)


class Difference(NamedTuple):
    """How a computation differs from the plan."""

    rank: int
    action: Action
    planned_start: float
    planned_end: float
    late_s: float
    """Time by which it ends later than planned."""
    added_s: float
    """The part of it that those before it, on its rank and on the rank that sends its input, are not late by."""
    is_marked: bool

    def arguments(self) -> Event:
        """Return the arguments of its event."""
        times = {"late_ms": self.late_s, "added_ms": self.added_s, "planned_ms": self.planned_end - self.planned_start}
        marked = {"differs": f"{1e3 * self.added_s:.3g} ms later than planned"} if self.is_marked else {}
        return {name: round(1e3 * seconds, 3) for name, seconds in times.items()} | marked


@dataclass(frozen=True)
class PipelinePlan:
    """The plan of one pipeline in one step."""

    replica: int
    step: str
    """Name of its span."""
    timeline: Timeline
    differences: Mapping[tuple[int, Action], Difference]
    """By rank and action."""
    measured_s: float
    """From the first action to the end of the last computation."""


def plan_steps(traces: Sequence[RankTrace]) -> list[PipelinePlan]:
    """Simulate what each pipeline did in each step, with the costs that were measured.

    A computation costs the median of its times without waits, a message the shortest time from its send to its receipt.
    """
    steps = []
    for replica in sorted({trace.replica for trace in traces}):
        pipeline = [trace for trace in traces if trace.replica == replica]
        cost = _measured_cost(pipeline)
        spans = [[*trace.of("action")] for trace in pipeline]
        starts = [[span.start for span in of_rank] for of_rank in spans]
        for boundaries in zip(*(trace.of("step") for trace in pipeline), strict=True):
            within = [
                of_rank[bisect_left(times, step.start) : bisect_right(times, step.end)]
                for of_rank, times, step in zip(spans, starts, boundaries, strict=True)
            ]
            actions = [{parse_action(span.name): span for span in of_rank} for of_rank in within]
            if any(action.is_compute for of_rank in actions for action in of_rank):
                ranks = [trace.rank for trace in pipeline]
                steps.append(_plan_step(replica, boundaries[0].name, ranks, actions, cost))
    return steps


def _plan_step(
    replica: int, step: str, ranks: Sequence[int], actions: Sequence[Mapping[Action, Span]], cost: Cost
) -> PipelinePlan:
    program = [list(of_rank) for of_rank in actions]
    timeline = simulate(program, cost)
    dependencies = Dependencies.of(program)
    start = min(span.start for of_rank in actions for action, span in of_rank.items() if action.is_compute)
    late, least = dict[Action, float](), DIFFERS * float(timeline.makespan)
    differences = {}
    for of_rank in actions:
        for action, span in of_rank.items():
            if action.is_compute:
                late[action] = span.end - start - float(timeline.spans[action].end)
    for rank, of_rank in zip(ranks, actions, strict=True):
        before = 0.0
        for action in (action for action in of_rank if action.is_compute):
            causes = [before, *(late[need] for need in dependencies.inputs(action)), 0.0]
            added, planned = late[action] - max(causes), timeline.spans[action]
            is_marked = added > least
            times = (start + float(planned.start), start + float(planned.end))
            differences[rank, action] = Difference(rank, action, *times, late[action], added, is_marked)
            before = late[action]
    end = max(span.end for of_rank in actions for action, span in of_rank.items() if action.is_compute)
    return PipelinePlan(replica, step, timeline, differences, end - start)


def _measured_cost(pipeline: Sequence[RankTrace]) -> Cost:
    times: defaultdict[tuple[Op, int], list[float]] = defaultdict(list)
    messages: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for trace in pipeline:
        waits = sorted((wait.start, wait.end) for wait in trace.of("wait") if not trace.threads[wait.thread])
        for span in trace.of("action"):
            action = parse_action(span.name)
            if action.is_compute:
                within = waits[bisect_left(waits, (span.start,)) : bisect_left(waits, (span.end,))]
                waited = sum(end - start for start, end in within)
                times[action.op, action.stage].append(span.end - span.start - waited)
    for message in _messages(pipeline):
        kind, boundary, *_ = message.received.details["key"]
        messages[kind, boundary].append(max(0.0, message.received.end - message.sent.start))
    stages = range(1 + max((stage for _, stage in times), default=0))

    def usual(op: Op, stage: int) -> float:
        return median(times[op, stage]) if (op, stage) in times else 0.0

    def shortest(kind: int) -> list[float]:
        return [min(messages.get((kind, boundary), [0.0])) for boundary in stages]

    return Cost(
        forward=[usual(Op.F, stage) for stage in stages],
        backward=[usual(Op.B, stage) for stage in stages],
        weight=[usual(Op.W, stage) for stage in stages],
        inputs=[usual(Op.I, stage) for stage in stages],
        message=shortest(MessageKind.ACTIVATION),
        gradient_message=shortest(MessageKind.GRADIENT),
    )


def trace_events(traces: Sequence[RankTrace], plans: Sequence[PipelinePlan]) -> Iterator[Event]:
    """Yield the events of a trace file: a process per rank, then one per pipeline with its plan."""
    zero = min((span.start for trace in traces for span in trace.spans), default=0.0)

    def micros(
        seconds: float,
    ) -> int:  # whole ones: Perfetto drops a span that ends after its parent by a rounding error
        return round(1e6 * (seconds - zero))

    def complete(pid: int, tid: int, category: str, name: str, start: float, end: float, **details: Any) -> Event:
        event = {"ph": "X", "pid": pid, "tid": tid, "cat": category, "name": name, "args": details}
        return event | {"ts": micros(start), "dur": max(0, micros(end) - micros(start))}

    planned = {(each.rank, str(each.action), plan.step): each for plan in plans for each in plan.differences.values()}
    for trace in traces:
        yield from _named(trace.label, trace.pid, [f"thread {n}" if n else "training" for n in trace.threads.values()])
        step = ""
        for span in trace.spans:
            step = span.name if span.category == "step" else step
            if span.category not in ("send", "receive"):
                difference = planned.get((trace.rank, span.name, step)) if span.category == "action" else None
                details = span.details | (difference.arguments() if difference else {})
                yield complete(trace.pid, trace.tid(span), span.category, span.name, span.start, span.end, **details)
    yield from _message_events(traces, micros)
    for replica in sorted({plan.replica for plan in plans}):
        ranks = [trace.rank for trace in traces if trace.replica == replica]
        pid = 1 + len(traces) + replica
        yield from _named(f"plan of replica {replica}", pid, [f"rank {rank}" for rank in ranks])
        for each in (each for plan in plans if plan.replica == replica for each in plan.differences.values()):
            tid, times = THREADS * pid + ranks.index(each.rank), (each.planned_start, each.planned_end)
            yield complete(pid, tid, "plan", str(each.action), *times, **each.arguments())


def _named(name: str, pid: int, threads: Sequence[str]) -> Iterator[Event]:
    """Yield the events that name a process and its threads, and give it its place among the others."""
    process = {"ph": "M", "pid": pid, "tid": THREADS * pid}
    yield process | {"name": "process_name", "args": {"name": name}}
    yield process | {"name": "process_sort_index", "args": {"sort_index": pid}}
    for number, thread in enumerate(threads):
        yield process | {"tid": THREADS * pid + number, "name": "thread_name", "args": {"name": thread}}


def _message_events(traces: Sequence[RankTrace], micros: Callable[[float], int]) -> Iterator[Event]:
    """Yield the messages between stages, from the send until the receiver has read it, with an arrow between both."""
    for number, (sender, sent, receiver, received) in enumerate(_messages(traces)):
        common = {"cat": "message", "name": sent.name}
        there = {"pid": sender.pid, "tid": sender.tid(sent), "ts": micros(sent.start)}
        end = micros(max(sent.start, received.end))
        here = {"pid": receiver.pid, "tid": receiver.tid(received), "ts": end}
        details = {"bytes": sent.details["bytes"], "from rank": sender.rank}
        of_receiver, arrow = {"id2": {"local": str(number)}}, {"id": str(number)}
        yield common | of_receiver | here | {"ph": "b", "ts": there["ts"], "args": details}
        yield common | of_receiver | here | {"ph": "e"}
        yield common | arrow | there | {"ph": "s"}
        yield common | arrow | here | {"ph": "f", "bp": "e"}


class _Message(NamedTuple):
    sender: RankTrace
    sent: Span
    receiver: RankTrace
    received: Span


def _messages(traces: Sequence[RankTrace]) -> Iterator[_Message]:
    """Yield the messages of which both ends are recorded. Those of one key are received in the order of their sends."""
    sends: defaultdict[tuple[int, ...], list[tuple[RankTrace, Span]]] = defaultdict(list)
    receives: defaultdict[tuple[int, ...], list[tuple[RankTrace, Span]]] = defaultdict(list)
    for trace in traces:
        for span in trace.of("send"):
            sends[trace.rank, span.details["peer"], *span.details["key"]].append((trace, span))
        for span in trace.of("receive"):
            receives[span.details["peer"], trace.rank, *span.details["key"]].append((trace, span))
    for key, sent in sends.items():
        if len(sent) == len(receives[key]):  # else one was sent before the first traced step
            yield from (_Message(*one, *other) for one, other in zip(sent, receives[key], strict=True))


def trace_json(traces: Sequence[RankTrace], plans: Sequence[PipelinePlan]) -> str:
    """Return the text of a trace file."""
    errors = {trace.label: round(1e3 * trace.clock_error_s, 4) for trace in traces}
    other = {"clock errors at most, ms": errors}
    events = [*trace_events(traces, plans)]
    return json.dumps({"displayTimeUnit": "ms", "otherData": other, "traceEvents": events}, separators=(",", ":"))


def describe_plan(plans: Sequence[PipelinePlan]) -> str:
    """Return a sentence on how a pipeline's steps compare with the plan; empty without one."""
    if not plans:
        return ""
    measured, planned = (
        fmean(times) for times in ([p.measured_s for p in plans], [float(p.timeline.makespan) for p in plans])
    )
    worst = max((each for plan in plans for each in plan.differences.values()), key=lambda each: each.added_s)
    return (
        f"; forward and backward of a pipeline take {1e3 * measured:.3g} ms, by plan {1e3 * planned:.3g} ms; most was "
        f"added before the end of {worst.action} on rank {worst.rank}: {1e3 * worst.added_s:.3g} ms"
    )
