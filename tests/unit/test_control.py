"""Control plane: a rank's report counts what it trained and sent, and summaries aggregate the reports of all ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from acsgd.comm.waits import DIRECT, Meter
from acsgd.errors import RunError
from acsgd.run.setup.report import NO_VOTES, StepReport, StepSummary, Votes
from acsgd.run.setup.session import Session
from acsgd.topology import Topology

REPORT = StepReport(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class Instant:
    def wait(self) -> bool:
        return True


def summarize(reports: list[StepReport], *, rank: int = 0, stages: int = 1) -> StepSummary:
    rows = torch.tensor(reports, dtype=torch.float64)
    return StepSummary.of(rows, Topology(rank, len(reports), stages))


def test_a_report_counts_targets_and_bytes_and_resets_the_meters() -> None:
    batch: Any = SimpleNamespace(
        labels=torch.tensor([[[3, -100], [5, 1]]]), num_tokens=4, wait_s=0.5, checksum=2**33 + 1, micro_ids=range(3, 5)
    )
    stages: Any = {n: SimpleNamespace(sync=SimpleNamespace(meter=Meter(sent_bytes=n))) for n in (30, 40)}
    job: Any = SimpleNamespace(streams=SimpleNamespace(peak_memory_bytes=lambda: 5))
    unused: Any = None
    forward, backward, tied = (Meter(sent_bytes=n) for n in (10, 20, 25))
    forward.wait(DIRECT, Instant(), posted_at=0.0)
    session = Session(job, unused, unused, stages, [], unused, unused, forward, backward, tied, {})
    report = session.report(torch.tensor(1.5), batch, Votes(stop=True), compute_s=3.5)
    assert (report.loss, report.targets, report.squared_grad_norm, report.peak_memory_bytes) == (1.5, 3.0, 0.0, 5)
    assert (report.tokens, report.data_wait_s, report.checksum) == (4, 0.5, 2**33 + 1)
    assert (report.pp_forward_bytes, report.pp_backward_bytes, report.tied_bytes, report.dp_bytes) == (10, 20, 25, 70)
    assert report.in_flight_s > report.waited_s >= 0
    assert (report.micros, report.compute_s) == (2, 3.5)
    assert (report.stop_votes, report.save_votes, report.failed_saves) == (1, 0, 0)
    batch.labels = None
    again = session.report(torch.tensor(0.0), batch, NO_VOTES, compute_s=0.0)
    assert again == REPORT._replace(peak_memory_bytes=5, data_wait_s=0.5, checksum=2**33 + 1, micros=2)


def test_the_hidden_share_is_the_fraction_of_transfer_time_not_spent_waiting() -> None:
    reports = [REPORT._replace(in_flight_s=3.0, waited_s=1.0), REPORT._replace(in_flight_s=1.0)]
    assert summarize(reports).hidden_share == 0.75
    assert summarize([REPORT]).hidden_share == 1.0


def test_one_vote_is_enough() -> None:
    for field, votes in (
        ("stop", {"stop_votes": 1.0}),
        ("save", {"save_votes": 1.0}),
        ("failed_save", {"failed_saves": 1.0}),
        ("skip", {"skip_votes": 1.0}),
    ):
        summary = summarize([REPORT, REPORT._replace(**votes), REPORT])
        assert [name for name in ("stop", "save", "failed_save", "skip") if getattr(summary, name)] == [field]


def test_ranks_that_read_other_texts_are_named() -> None:
    """Those that read none report 0."""
    reports = [REPORT._replace(checksum=checksum) for checksum in (0.0, 7.0, 0.0, 7.0)]
    summarize(reports)
    with pytest.raises(RunError, match=r"ranks \[2, 4\] read other texts from a streamed source than rank 1"):
        summarize([*reports[:2], REPORT._replace(checksum=8.0), reports[3], REPORT._replace(checksum=9.0)])


@pytest.mark.parametrize("replica", [0, 1])
def test_totals_are_of_all_ranks_and_norms_of_each_replica(replica: int) -> None:
    reports = [
        StepReport(n, 10.0 * n, 20.0 * n, 100.0 * n, 1.0, 2.0, 5.0, 3.0, 0.0, 0.0, memory, data_wait_s=memory / 4)
        for n, memory in ((1, 7), (2, 9), (3, 8), (4, 6))
    ]
    summary = summarize(reports, rank=2 * replica + 1, stages=2)
    assert (summary.loss, summary.targets, summary.tokens) == (10.0, 100.0, 200)
    assert summary.replica_targets == [30.0, 70.0]
    assert summary.replica_squared_norms == [300.0, 700.0]
    assert (summary.pp_forward_bytes, summary.pp_backward_bytes, summary.tied_bytes, summary.dp_bytes) == (4, 8, 20, 12)
    assert summary.peak_memory_bytes == (9, 8)[replica], "the maximum of this pipeline"
    assert summary.data_wait_s == 9 / 4, "the maximum of all ranks"
