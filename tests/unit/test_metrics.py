"""What a run says of itself: every record on disk at once, one rank that speaks, shares that add up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from acsgd.io.metrics import PLAIN_LINES, Metrics, Record, Totals, totals
from acsgd.meter import Meter

RECORD = Record(
    step=1,
    loss=2.5,
    tokens=64,
    tokens_per_s=32.0,
    step_s=2.0,
    lr=0.1,
    grad_norm=1.0,
    pp_forward_bytes=1,
    pp_backward_bytes=2,
    dp_bytes=3,
    hidden_share=0.5,
    peak_memory_bytes=4,
)


class Instant:
    def wait(self) -> bool:
        return True


def test_each_record_is_on_disk_when_it_is_logged(tmp_path: Path) -> None:
    with Metrics.open("jsonl", tmp_path, steps=2, speaks=True) as metrics:
        metrics.log(RECORD)
        assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()] == [RECORD._asdict()]


def test_other_ranks_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Metrics.open("print,jsonl", tmp_path, steps=2, speaks=False) as metrics:
        metrics.log(RECORD)
        metrics.note("hello")
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr() == ("", "")


def test_without_a_terminal_a_run_prints_a_few_plain_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = 1000
    with Metrics.open("print", tmp_path, steps=steps, speaks=True) as metrics:
        for step in range(1, steps + 1):
            metrics.log(RECORD._replace(step=step))
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert len(lines) == PLAIN_LINES + 1
    assert lines[0] == "step 1/1000  loss 2.5000  32 tokens/s"
    assert lines[-1].startswith("step 1000/1000")


def test_a_rank_counts_its_targets_and_bytes_and_starts_anew() -> None:
    labels = torch.tensor([[[3, -100], [5, 1]]])
    forward, backward, dp = Meter(sent_bytes=10), Meter(sent_bytes=20), [Meter(sent_bytes=30), Meter(sent_bytes=40)]
    forward.wait(Instant(), posted_at=0.0)
    share = totals(torch.tensor(1.5), labels, forward=forward, backward=backward, dp=dp)
    assert (share.loss, share.targets) == (1.5, 3.0)
    assert (share.pp_forward_bytes, share.pp_backward_bytes, share.dp_bytes) == (10, 20, 70)
    assert share.in_flight_s > share.waited_s >= 0
    again = totals(torch.tensor(0.0), None, forward=forward, backward=backward, dp=dp)
    assert again == Totals(*[0.0] * len(Totals._fields))


def test_the_hidden_share_is_what_was_not_waited_for() -> None:
    share = Totals(0, 1, 0, 0, 0, in_flight_s=4.0, waited_s=1.0)
    assert share.hidden_share == 0.75
    assert share._replace(in_flight_s=0.0, waited_s=0.0).hidden_share == 1.0
