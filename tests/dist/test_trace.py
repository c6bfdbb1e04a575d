"""log.trace: what all ranks did in some steps on one clock, as Chrome trace events, beside the plan."""

from __future__ import annotations

import dataclasses
import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lib.ranks import on_ranks
from lib.training import TIMEOUT, batches_of, make_config

from acsgd.comm.spans import Span
from acsgd.config.checks import traced_steps
from acsgd.config.options import Config
from acsgd.groups import connect
from acsgd.io.checkpoint.progress import Progress
from acsgd.io.telemetry.metrics import Metrics
from acsgd.launch import Launch
from acsgd.pp.schedules.actions import Action, Program, parse_action
from acsgd.pp.schedules.dependencies import Dependencies, walk
from acsgd.pp.schedules.lowering import lower
from acsgd.pp.schedules.schedules import OneFOneB, Schedule, ZeroBubble, ZeroBubbleV
from acsgd.pp.schedules.simulate import Cost, simulate
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.plan.job import prepare
from acsgd.run.report import STEP_FIELDS, StepSummary
from acsgd.run.setup.build import build_session
from acsgd.run.step import tracing
from acsgd.run.step.hooks import LoopState, StepHook, StepHooks
from acsgd.run.step.trace_file import RankTrace, plan_steps, trace_json
from acsgd.run.step.tracing import StepTrace
from acsgd.topology import Topology
from acsgd.train import train_step

STEPS, TRACED = 4, "2:3"


def train(rank: int, world_size: int, store: Path, config: Config) -> list[str]:
    torch.set_num_threads(1)
    job, state, notes = prepare(config, Launch(rank, rank, world_size)), LoopState(Progress()), list[str]()
    with connect(job.topology, timeout=TIMEOUT, store=dist.FileStore(str(store), world_size)) as groups:
        session = build_session(job, open_weight_source(job), groups)
        trace, late = StepTrace(session, notes.append), StepTrace(session, notes.append)
        late._steps, late._path = traced_steps("90:91"), Path("absent")
        for batch in batches_of(job):
            state.started_at = time.perf_counter()
            trace.before_step(state)
            train_step(session, batch, state.progress, state=state)
            trace.after_step(state)
            assert session.pipeline.trace is None
            trace.before_next(state)
        trace.at_end(state)
        late.at_end(state)
    return notes


def test_a_trace_holds_all_ranks_on_one_clock(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Also where the order of hosts is not that of the ranks."""
    hosts = (1, 0)
    config = make_config(tiny_model(n_layer=2), tmp_path, steps=STEPS, stages=2, micro=1, hosts=hosts)
    log = dataclasses.replace(config.log, dir=str(tmp_path), trace=TRACED)
    config = dataclasses.replace(config, log=log)
    (wrote, never), *others = on_ranks(2, train, tmp_path / "store", config)
    assert never == "log.trace: steps 90 to 91 were not trained by this start, which ends at step 4"
    assert wrote.startswith(f"trace: {tmp_path / 'trace-2-3.json'}, clocks of the ranks agree within ")
    assert others == [[never]]
    trace = json.loads((tmp_path / "trace-2-3.json").read_text())
    events = trace["traceEvents"]
    check_events(events)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    ranks = [f"rank {rank}, stage {stage}, replica 0" for stage, rank in enumerate(hosts)]
    assert [name.partition(" on ")[0] for name in names.values()] == [*ranks, "plan of replica 0"]
    for rank in range(2):
        of_rank = [event for event in events if event["pid"] == rank + 1 and event["ph"] == "X"]
        assert [event["name"] for event in of_rank if event["cat"] == "step"] == ["step 2", "step 3"]
        assert {"phase", "action", "codec", "wait"} <= {event["cat"] for event in of_rank}
    actions = [event for event in events if event.get("cat") == "action" and parse_action(event["name"]).is_compute]
    plan = [event for event in events if event.get("cat") == "plan"]
    assert sorted(event["name"] for event in actions) == sorted(event["name"] for event in plan)
    assert all({"late_ms", "added_ms", "planned_ms"} <= event["args"].keys() for event in actions + plan)
    messages = [event for event in events if event["ph"] == "b" and event["name"].startswith(("activ", "gradients"))]
    assert len(messages) == len(actions) / 2  # each computation but the last stage's forward, the first's backward


class _Save(StepHook):
    """Notes when a save begins and is complete."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note

    def after_log(self, state: LoopState) -> None:
        self._note("save")

    def at_end(self, state: LoopState) -> None:
        self._note("saved")


@pytest.mark.parametrize(
    ("per_step", "num_steps", "last", "order"),
    [
        (9, 50, 20, [*["save"] * 20, "trace", *["save"] * 30, "saved"]),
        (3, 40, 40, [*["save"] * 40, "saved", "trace"]),
        (3, 41, 40, [*["save"] * 40, "trace", "save", "saved"]),
        (500, 3, 2, ["save", "save", "trace", "save", "saved"]),
    ],
)
def test_a_trace_has_as_many_steps_as_are_written_in_seconds_and_no_save_waits_for_it(
    per_step: int, num_steps: int, last: int, order: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "MAX_SPANS", 200)
    config = make_config(tmp_path, tmp_path, steps=num_steps)
    config = dataclasses.replace(config, log=dataclasses.replace(config.log, dir=str(tmp_path), trace="1:40"))
    topology = Topology.of(0, 1, 1)
    pipeline, job = (
        SimpleNamespace(trace=None),
        SimpleNamespace(config=config, topology=topology, layout=SimpleNamespace(stages=[0])),
    )
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    session: Any = SimpleNamespace(job=job, pipeline=pipeline, meters=lambda: [], groups=SimpleNamespace(world=group))
    notes = list[str]()
    hooks = StepHooks([StepTrace(session, notes.append), _Save(notes.append)], Metrics([]))
    state = LoopState(Progress())
    for step in range(1, num_steps + 1):
        state.started_at = time.perf_counter()
        assert hooks.before_step(state)
        numbers = hooks.report(state)
        for micro in range(per_step if pipeline.trace else 0):
            pipeline.trace.add("action", f"0F{micro}", time.perf_counter(), time.perf_counter())
        state.progress = Progress(step)
        state.summary = StepSummary.of([dict.fromkeys(STEP_FIELDS, 0.0) | dict(numbers)], topology)
        hooks.after_step(state)
        hooks.before_next(state)
    hooks.at_end(state)
    assert [note.partition(":")[0] for note in notes] == order
    (wrote,) = (note for note in notes if note.startswith("trace"))
    assert (f", steps 1 to {last}: 200 spans of all ranks have room, clocks" in wrote) == (last != 40)
    events = json.loads((tmp_path / "trace-1-40.json").read_text())["traceEvents"]
    assert sum(event.get("cat") == "step" for event in events) == last
    assert sum(event.get("cat") == "action" for event in events) <= 200


def check_events(events: list[dict[str, Any]]) -> None:
    """Check events against the trace event format, and what Perfetto reads of it.

    It drops spans of a thread that are neither disjoint nor nested, by a rounding error as well; takes threads of one
    id for one, of different processes as well; and process 0 for the idle one of a kernel.
    """
    threads = defaultdict(list)
    processes, named = dict[int, int](), set[int]()
    arrows: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        assert isinstance(event["name"], str)
        assert {type(event["pid"]), type(event["tid"])} == {int}
        assert event["pid"] > 0
        assert processes.setdefault(event["tid"], event["pid"]) == event["pid"]
        assert isinstance(event.get("args", {}), dict)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name")
            named |= {event["tid"]} if event["name"] == "thread_name" else set()
            continue
        assert event["ts"] >= 0
        assert event["tid"] in named
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert type(event["ts"]) is type(event["dur"]) is int
            threads[event["pid"], event["tid"]].append((event["ts"], -event["dur"]))
        else:
            assert event["ph"] in "besf"
            arrows[event["id"] if event["ph"] in "sf" else event["id2"]["local"]].append(event)
    for spans in threads.values():
        ends: list[int] = []
        for start, negative in sorted(spans):
            while ends and ends[-1] <= start:
                ends.pop()
            assert not ends or start - negative <= ends[-1]
            ends.append(start - negative)
    for of_message in arrows.values():
        assert sorted(event["ph"] for event in of_message) == ["b", "e", "f", "s"]
        begin, end = ([event["ts"] for event in of_message if event["ph"] in kinds] for kinds in ("bs", "ef"))
        assert max(begin) <= min(end)


def times_of(program: Program, slow: str = "") -> dict[Action, tuple[float, float]]:
    """Return start and end of actions that take what they cost by default, one of them longer; messages take 0."""
    needs, free, times = Dependencies.of(program).needs, defaultdict[int, float](float), dict[Action, Any]()
    for rank, action in walk(program, needs):
        start = max([free[rank], *(times[need][1] for need in needs(action))])
        times[action] = start, start + float(Cost().of(action)) + 6 * (str(action) == slow)
        if action.is_compute:
            free[rank] = times[action][1]
    return times


@pytest.mark.parametrize("schedule", [OneFOneB(), OneFOneB(split_last=True), ZeroBubble(), ZeroBubbleV()], ids=str)
def test_what_differs_from_the_plan_is_marked_where_it_arises(schedule: Schedule) -> None:
    program = lower(schedule.program(3, 6))

    def traces(slow: str = "") -> list[RankTrace]:
        times = times_of(program, slow)
        spans = [[Span("action", str(each), *times[each], 7, {}) for each in of] for of in program]
        step = Span("step", "step 1", 0.0, 100.0, 7, {})
        return [RankTrace(rank, 0, f"rank {rank}", 0.0, [step, *of_rank]) for rank, of_rank in enumerate(spans)]

    (plan,) = plan_steps(traces())
    assert plan.measured_s == plan.timeline.makespan == simulate(program, Cost()).makespan
    assert not any(each.is_marked for each in plan.differences.values())
    (plan,) = plan_steps(slow := traces("1F3"))
    assert [str(each.action) for each in plan.differences.values() if each.is_marked] == ["1F3"]
    marked = [
        event for event in json.loads(trace_json(slow, [plan]))["traceEvents"] if "differs" in event.get("args", {})
    ]
    assert [(event["cat"], event["pid"], event["name"]) for event in marked] == [
        ("action", 2, "1F3"),
        ("plan", 4, "1F3"),  # after the processes of the ranks
    ]


@pytest.mark.parametrize("trace", ["", "5", "5:4", "0:3", "a:b", "1:2:3", "-1:2", "1:1001"])
def test_a_malformed_range_is_refused(trace: str) -> None:
    with pytest.raises(ValueError, match=r"is not a range of steps; give the first and the last, as \"100:105\""):
        traced_steps(trace)
