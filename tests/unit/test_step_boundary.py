"""The step boundary: a rank's report counts what it trained and sent, summaries reduce the reports of all ranks, and
participants report and act without any other file that knows them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from lib.saved import SMALL, small_run, train_alone

from acsgd.comm.waits import DIRECT, Meter
from acsgd.elastic import hooks
from acsgd.errors import RunError
from acsgd.io.checkpoint.progress import Progress
from acsgd.io.telemetry.metrics import Metrics
from acsgd.run import report
from acsgd.run.plan.job import Job
from acsgd.run.report import CHECKSUM, LOSS, STEP_FIELDS, Report, StepExchange, StepField, StepSummary, check_texts
from acsgd.run.session import Computed, Session, StepResult
from acsgd.run.setup.inputs import describe_difference
from acsgd.run.step.checkpointing import FAILED_SAVE, SAVE
from acsgd.run.step.hooks import LoopState, StepHook, StepHooks
from acsgd.run.step.run import STOP
from acsgd.run.step.spikes import SKIP, SpikeGuard
from acsgd.streams import load_onto, peak_of_gpu
from acsgd.tasks import find_task
from acsgd.topology import Topology

NOTHING: Report = dict.fromkeys(STEP_FIELDS, 0.0)


class Instant:
    def wait(self) -> bool:
        return True


def summarize(reports: list[Mapping[StepField[Any], float]], *, stages: int = 1) -> StepSummary:
    return StepSummary.of([{**NOTHING, **each} for each in reports], Topology.of(0, len(reports), stages))


def test_a_report_counts_targets_and_bytes_and_resets_the_meters() -> None:
    batch: Any = SimpleNamespace(
        labels=torch.tensor([[[3, -100], [5, 1]]]), num_tokens=4, wait_s=0.5, checksum=2**33 + 1, micro_ids=range(3, 5)
    )
    stages: Any = {n: SimpleNamespace(sync=SimpleNamespace(meter=Meter(sent_bytes=n))) for n in (30, 40)}
    job: Any = SimpleNamespace(
        streams=SimpleNamespace(peak_memory_bytes=lambda: 5, peak_flops=lambda dtype: 7e12),
        shapes=SimpleNamespace(dtype=torch.float32),
        model=SimpleNamespace(task=find_task("lm")),
    )
    unused: Any = None
    forward, backward, tied = (Meter(sent_bytes=n) for n in (10, 20, 25))
    forward.wait(DIRECT, Instant(), posted_at=0.0)
    session = Session(job, unused, unused, stages, unused, unused, unused, forward, backward, tied, {})
    first = session.report(Computed(1.5, 0.25, 3.5), batch)
    assert [*first] == [*STEP_FIELDS], "the order of the fields is that of the message"
    expected = {
        report.LOSS: 1.5,
        report.TARGETS: 3.0,
        report.TOKENS: 4,
        report.REPLICA_SQUARED_NORMS: 0.25,
        report.PEAK_MEMORY_BYTES: 5,
        report.DATA_WAIT_S: 0.5,
        report.CHECKSUM: 2**33 + 1,
        report.PP_FORWARD_BYTES: 10,
        report.PP_BACKWARD_BYTES: 20,
        report.TIED_BYTES: 25,
        report.DP_BYTES: 70,
        report.PEAK_FLOPS: 7e12,
        report.MICROS: 2,
        report.COMPUTE_S: 3.5,
    }
    assert {field: first[field] for field in expected} == expected
    assert first[report.IN_FLIGHT_S] > sum(first[field] for field in report.WAITS) >= 0
    batch.labels = None
    again = session.report(Computed(0.0, 0.0, 0.0), batch)
    left = {report.PEAK_MEMORY_BYTES: 5, report.DATA_WAIT_S: 0.5, report.CHECKSUM: 2**33 + 1, report.MICROS: 2}
    assert again == {**NOTHING, **left, report.PEAK_FLOPS: 7e12}


def test_the_utilization_is_that_of_all_devices_or_unknown() -> None:
    """Two devices, of which one is twice as fast, train 1200 tokens of 5 MFLOP in 2 s."""
    of_ranks = [{report.TOKENS: 0.0, report.PEAK_FLOPS: 1e10}, {report.TOKENS: 1200.0, report.PEAK_FLOPS: 2e10}]
    result = StepResult(1.0, 1.0, 1.0, True, Progress(), summarize(of_ranks, stages=2), token_flops=5e6)
    record = result.record(2.0)
    assert (record.tokens_per_s, record.device_tokens_per_s) == (600, 300)
    assert record.mfu == pytest.approx(600 * 5e6 / 3e10)
    assert result._replace(token_flops=0.0).record(2.0).mfu is None, "the work is unknown"
    unknown = summarize([{**of_ranks[0], report.PEAK_FLOPS: 0.0}, of_ranks[1]], stages=2)
    assert result._replace(summary=unknown).record(2.0).mfu is None, "the peak of one device is unknown"


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12, 67e12),
        ("NVIDIA H100 PCIe", 756e12, 51e12),
        ("NVIDIA H200", 989e12, 67e12),
        ("NVIDIA A100-SXM4-40GB", 312e12, 19.5e12),
        ("NVIDIA L4", 121e12, 30.3e12),
        ("NVIDIA L40S", 362e12, 91.6e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12, 82.6e12),
        *((other, 0.0, 0.0) for other in ("NVIDIA L40", "NVIDIA GeForce RTX 4090 D", "NVIDIA H100", "Quadro T1000")),
    ],
)
def test_the_peak_of_a_gpu_that_is_not_in_the_table_is_unknown(name: str, bf16: float, fp32: float) -> None:
    assert peak_of_gpu(name, torch.bfloat16) == pytest.approx(bf16)
    assert peak_of_gpu(name, torch.float32) == pytest.approx(fp32)


def test_a_tensor_without_data_needs_no_pinned_memory() -> None:
    assert load_onto(torch.device("meta"), torch.zeros(2)).is_meta


def test_the_hidden_share_is_the_fraction_of_transfer_time_not_spent_waiting() -> None:
    reports = [{report.IN_FLIGHT_S: 3.0, report.DP_WAIT_S: 1.0}, {report.IN_FLIGHT_S: 1.0}]
    assert hidden_share(summarize(reports)) == 0.75
    assert hidden_share(summarize([{}])) == 1.0


def hidden_share(summary: StepSummary) -> float:
    return StepResult(1.0, 1.0, 1.0, True, Progress(), summary).record(1.0).hidden_share


def test_one_vote_is_enough() -> None:
    votes = (STOP, SAVE, FAILED_SAVE, SKIP)
    for field in votes:
        summary = summarize([dict.fromkeys(votes, 0.0) | vote for vote in ({}, {field: 1.0}, {})])
        assert [each for each in votes if summary[each]] == [field]


def test_ranks_that_read_other_texts_are_named() -> None:
    """Those that read none report 0."""
    check_texts([0.0, 7.0, 0.0, 7.0])
    with pytest.raises(RunError, match=r"ranks \[2, 4\] read other texts from a streamed source than rank 1"):
        check_texts([0.0, 7.0, 8.0, 7.0, 9.0])


def test_ranks_that_read_other_texts_are_named_where_hosts_are_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, fields = (7.0, 7.0, 8.0), [LOSS, CHECKSUM]
    rows = torch.tensor([[0.0, text] for text in texts], dtype=torch.float64)
    monkeypatch.setattr("acsgd.run.report.Gather", lambda *_: SimpleNamespace(rows=lambda _: [*rows]))
    groups: Any = None
    exchange = StepExchange(groups, Topology.of(0, 3, 3, (1, 2, 0)), fields)
    with pytest.raises(RunError, match=r"ranks \[2\] read other texts from a streamed source than rank 0"):
        exchange.exchange(dict.fromkeys(fields, 0.0))


def test_each_reduction() -> None:
    """Two replicas of two stages."""
    summary = summarize([{report.LOSS: number} for number in (1.0, 0.0, 3.0, 4.0)], stages=2)
    reductions = {
        report.total: 8.0,
        report.highest: 4.0,
        report.on_any: True,
        report.on_all: False,
        report.by_rank: [1.0, 0.0, 3.0, 4.0],
        report.by_replica: [1.0, 7.0],
        report.highest_by_replica: [1.0, 4.0],
        report.in_grid: [[1.0, 0.0], [3.0, 4.0]],
    }
    for reduce, expected in reductions.items():
        assert summary[report.LOSS.reduced(reduce)] == expected  # type: ignore[arg-type]
    assert summary[StepField("nobody reports it", report.by_rank)] == [0.0] * 4


class Jury(StepHook):
    """A participant that no other file knows: it stops a run when all ranks have voted for it in one step."""

    GUILTY = StepField("guilty", report.on_all)
    AGE = StepField("age", report.highest)
    fields = (GUILTY, AGE)

    def __init__(self, verdict: bool) -> None:
        self.verdict = verdict
        self.calls: list[str] = []
        self.ages: list[float] = []

    def report(self, state: LoopState) -> Report:
        return {self.GUILTY: self.verdict}

    def after_step(self, state: LoopState) -> None:
        assert state.summary is not None
        self.ages.append(state.summary[self.AGE])
        if state.summary[self.GUILTY]:
            state.end("guilty")

    def after_log(self, state: LoopState) -> None:
        self.calls.append("after log")

    def before_next(self, state: LoopState) -> None:
        self.calls.append("before next")

    def at_return(self, state: LoopState) -> None:
        self.calls.append(f"return to {state.progress.step}")

    def at_end(self, state: LoopState) -> None:
        self.calls.append("end")


class Returning(StepHook):
    """Returns to an earlier step, once."""

    def __init__(self) -> None:
        self.earlier: list[Progress] = []

    def after_step(self, state: LoopState) -> Progress | None:
        return self.earlier.pop() if self.earlier else None


def test_a_participant_reports_its_fields_and_acts_by_those_of_all_ranks() -> None:
    jury, returning = Jury(verdict=True), Returning()
    hooks, state = StepHooks([returning, jury], Metrics([])), LoopState(Progress(4), is_open=True)
    mine = hooks.report(state)
    assert mine == {Jury.GUILTY: True, Jury.AGE: 0.0}, "a field that is left out is 0"

    state.summary = summarize([mine, {**mine, Jury.GUILTY: 0.0, Jury.AGE: 7.0}])
    assert hooks.after_step(state)
    assert (state.is_stopped, state.is_open, jury.ages) == (False, False, [7.0])

    returning.earlier, state.is_open = [Progress(2)], True
    assert not hooks.after_step(state)
    assert (state.progress.step, state.is_open, jury.ages) == (2, False, [7.0]), "who follows is not called"

    state.summary = summarize([mine, mine])
    assert hooks.after_step(state)
    assert (state.is_stopped, state.ended_because) == (True, "guilty")
    hooks.before_next(state)
    hooks.at_end(state)
    assert jury.calls == ["after log", "return to 2", "after log", "before next", "end"]


def test_a_run_that_a_participant_has_ended_says_why(
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(SpikeGuard, "after_step", lambda _, state: state.end("all are guilty"))
    config = small_run(tiny_model("gpt2", **SMALL), tmp_path / "run", steps=3, every="100")
    checkpoints = train_alone(dataclasses.replace(config, log=dataclasses.replace(config.log, to="print,jsonl")))
    assert f"\nended after step 1 of 3: all are guilty; {checkpoints / 'step-00000001'}\n" in capsys.readouterr().out


def test_a_field_has_one_owner_that_declares_it() -> None:
    """Else one number would take the place of another, or ranks would send messages of different lengths."""
    with pytest.raises(ValueError, match="declared more than once: guilty, age"):
        StepHooks([Jury(verdict=True), Jury(verdict=False)], Metrics([]))
    jury = Jury(verdict=True)
    jury.fields = (Jury.AGE,)
    with pytest.raises(ValueError, match=r"Jury reports fields that it does not declare: \['guilty'\]"):
        StepHooks([jury], Metrics([])).report(LoopState(Progress()))


def test_totals_are_of_all_ranks_and_norms_of_each_replica() -> None:
    reports: list[Mapping[StepField[Any], float]] = [
        {
            report.LOSS: n,
            report.TARGETS: 10.0 * n,
            report.TOKENS: 20.0 * n,
            report.REPLICA_SQUARED_NORMS: 100.0 * n,
            report.PEAK_MEMORY_BYTES: memory,
            report.DATA_WAIT_S: memory / 4,
        }
        for n, memory in ((1, 7), (2, 9), (3, 8), (4, 6))
    ]
    summary = summarize(reports, stages=2)
    assert (summary[report.LOSS], summary[report.TARGETS], summary[report.TOKENS]) == (10.0, 100.0, 200)
    assert summary[report.REPLICA_TARGETS] == [30.0, 70.0]
    assert summary[report.REPLICA_SQUARED_NORMS] == [300.0, 700.0]
    assert summary[report.PEAK_MEMORY_BYTES] == [9, 8]
    assert summary[report.DATA_WAIT_S] == 9 / 4, "the maximum of all ranks"


def test_an_observer_takes_part_in_exchanges_with_the_first_step_that_was_dealt_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Batches are dealt two steps before they are trained: without micro-batches, it has no update to send."""
    admitted: list[int] = []
    monkeypatch.setattr(hooks, "admit_observers", lambda session: admitted.append(state.progress.step))
    monkeypatch.setattr(hooks, "align_domain", lambda session, key: None)
    peers: Any = SimpleNamespace(observers=(2,), state_key="")
    join = hooks.BackgroundJoin(cast(Session, SimpleNamespace(peers=peers)), None, begun_at=5, ahead=2)
    state = LoopState(Progress(step=5))
    for step in range(5, 12):
        state.progress = Progress(step=step)
        state.summary = summarize([{hooks.JOINS: rank == 2 and step < 8} for rank in range(3)])
        join.after_step(state)
        assert list(state.idle) == ([2] if 5 < step < 8 else []), step
        if admitted:
            break
    assert admitted == [10], "its first step is the 11th: after the 8th, when it had all, two had been dealt"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"log": {"dir": "b"}}, "rank 0 and rank 1 have log.dir=a and b; give all"),
        ({"elastic": {"force": True}}, "compare run files"),  # an option in which hosts may differ
    ],
)
def test_ranks_with_different_options_are_told_which(change: dict[str, dict[str, Any]], named: str) -> None:
    config = small_run(Path("model"), Path("a"))
    sections = {name: dataclasses.replace(getattr(config, name), **options) for name, options in change.items()}
    texts: list[str] = []

    def gather(name: str, text: str, *, timeout_s: float) -> list[str]:
        texts.append(text)
        return texts

    groups: Any = SimpleNamespace(all_gather_text=gather)
    for each in (config, dataclasses.replace(config, **sections)):
        described = describe_difference(cast(Job, SimpleNamespace(config=each, disk_timeout_s=1.0)), groups)
    assert named in described
