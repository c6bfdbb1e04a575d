"""Metrics and their sinks: metrics.jsonl, the terminal, and the main rank that has them."""

from __future__ import annotations

import errno
import io
import json
import logging
import resource
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock

import pytest
from lib.records import RECORD
from rich.console import Console

from acsgd.commands.top import tables_of
from acsgd.config.options import Config, DataConfig, LogConfig, ModelConfig, OptimConfig
from acsgd.io.telemetry import json_lines
from acsgd.io.telemetry.history import read_run
from acsgd.io.telemetry.json_lines import JsonLinesSink, LoggedStart, StepLines
from acsgd.io.telemetry.metrics import Metrics
from acsgd.io.telemetry.record import RunEvent
from acsgd.io.telemetry.terminal import PLAIN_LINES, TerminalSink
from acsgd.run.report import StepSummary

LINE = {name: value for name, value in RECORD._asdict().items() if name not in ("evaluation", "ranks")}


def configure(to: str, *, steps: int = 1000, dtype: Literal["fp32", "fp16"] = "fp32") -> Config:
    return Config(
        model=ModelConfig(name="m", dtype=dtype),
        data=DataConfig(sources="demo", sequence=8, batch=2),
        optim=OptimConfig(lr=1.0, steps=steps),
        log=LogConfig(to=to),
    )


def log_steps(run_dir: Path, to: str, first: int, last: int, *, resumed_at: int, steps: int = 1000) -> None:
    """Log steps first to last as one start of a run; `tokens` identifies the start."""
    with Metrics.open(configure(to, steps=steps), run_dir, resumed_at=resumed_at, is_main=True) as metrics:
        for step in range(first, last + 1):
            metrics.log(RECORD._replace(step=step, tokens=resumed_at))


def read_lines(run_dir: Path) -> list[dict[str, float | None]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_record_is_in_the_file_when_log_returns(tmp_path: Path) -> None:
    with Metrics.open(configure("jsonl"), tmp_path, resumed_at=0, is_main=True) as metrics:
        metrics.log(RECORD)
        assert read_lines(tmp_path) == [LINE]
        evaluation = {"eval_loss": 3.0, "matthews": 0.5}
        metrics.log(RECORD._replace(step=2, evaluation=evaluation))
        assert read_lines(tmp_path) == [LINE, LINE | {"step": 2, **evaluation}]


def test_the_fields_of_a_line_keep_their_order() -> None:
    documented = (
        "step loss tokens tokens_per_s step_s lr grad_norm pp_forward_bytes pp_backward_bytes tied_bytes dp_bytes "
        "hidden_share peak_memory_bytes skipped loss_scale save_stall_s data_wait_s targets_per_s schedule_bubble "
        "device_tokens_per_s mfu device_memory_bytes eval_loss"
    )
    assert list(RECORD._replace(evaluation={"eval_loss": 1.0}).numbers()) == documented.split()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_null(value: float, tmp_path: Path) -> None:
    with Metrics.open(configure("jsonl"), tmp_path, resumed_at=0, is_main=True) as metrics:
        metrics.log(RECORD._replace(loss=value, grad_norm=value, skipped=1, evaluation={"pearson": value}))
    [line] = (tmp_path / "metrics.jsonl").read_text().splitlines()
    strict = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (strict["loss"], strict["grad_norm"], strict["skipped"]) == (None, None, 1)
    assert strict["pearson"] is None


@pytest.mark.parametrize(
    "torn",
    [
        b"",
        b'{"step": 6, "lo',
        b'{"step": 6}',  # complete except the newline
        b"\0" * 40,  # a file system that lost power
        b"[]\n",
        b'"event"\n{"step": "6"}\n',
        b"[" * 10**5 + b"\n",
    ],
)
@pytest.mark.parametrize("resumed_at", [1, 3, 4])
def test_after_a_kill_and_a_resume_each_step_appears_once_in_order(
    resumed_at: int, torn: bytes, tmp_path: Path
) -> None:
    log_steps(tmp_path, "jsonl", 1, 5, resumed_at=0)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    assert StepLines(tmp_path / "metrics.jsonl").last_step() in (5, 6)
    log_steps(tmp_path, "jsonl", resumed_at + 1, 8, resumed_at=resumed_at)
    kept = [(step, 0) for step in range(1, resumed_at + 1)]
    made_again = [(step, resumed_at) for step in range(resumed_at + 1, 9)]
    assert [(line["step"], line["tokens"]) for line in read_lines(tmp_path)] == kept + made_again
    assert {path.name for path in tmp_path.iterdir()} == {"config.toml", "metrics.jsonl"}


@pytest.mark.parametrize(("num_ranks", "interval"), [(1, 1), (8, 1), (9, 2), (64, 8)])
def test_numbers_of_many_ranks_are_in_every_kth_line_also_after_a_return(
    num_ranks: int, interval: int, tmp_path: Path
) -> None:
    """So a line grows by no more than the numbers of 8 ranks, however many there are."""
    numbers = [[[1.0, 2e9 / 3, 0.0123456789, 5e9][rank % 4] for rank in range(num_ranks)]]
    names = ("compute_s", "pp_forward_wait_s", "dp_bytes", "peak_memory_bytes")
    summary = StepSummary(dict.fromkeys(names, numbers))
    with Metrics.open(configure("jsonl"), tmp_path, resumed_at=0, is_main=True) as metrics:
        for step in [*range(1, 14), *range(12, 33)]:
            metrics.log(RECORD._replace(step=step, ranks=summary.by_rank()))
    lines = read_lines(tmp_path)
    assert [line["step"] for line in lines] == [*range(1, 33)]
    assert [line["step"] for line in lines if "ranks" in line] == [*range(interval, 33, interval)]
    size = (tmp_path / "metrics.jsonl").stat().st_size / len(lines) - len(json.dumps(LINE))
    assert size < 60 + len(names) * (20 + 13 * min(num_ranks, 8))
    text = (tmp_path / "metrics.jsonl").read_text()
    assert (
        f'"dp_bytes": {json.dumps([[[1, 666667000, 0.0123457, 5000000000][rank % 4] for rank in range(num_ranks)]])}'
        in text
    )
    shown = io.StringIO()
    Console(file=shown, width=200).print(tables_of(read_run(tmp_path)))
    assert "Ranks and their links in step 32" in shown.getvalue()


def test_a_last_line_without_newline_is_kept(tmp_path: Path) -> None:
    log_steps(tmp_path, "jsonl", 1, 2, resumed_at=0)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes().rstrip())
    log_steps(tmp_path, "jsonl", 3, 3, resumed_at=2)
    assert [line["step"] for line in read_lines(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize("size", [1 << 16, 8])
def test_a_host_that_was_away_gets_the_lines_after_its_last_step(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its own events after that step differ, and its last line is incomplete."""
    monkeypatch.setattr(json_lines, "BLOCK_BYTES", size)
    lines = [json.dumps(each) for each in ({"step": 1}, {"step": 2}, {"event": "x", "after_step": 2}, {"step": 3})]
    current, away, empty = (StepLines(tmp_path / name) for name in ("current", "away", "empty"))
    current.path.write_text("".join(f"{line}\n" for line in lines))
    away.path.write_text(f'{lines[0]}\n{lines[1]}\n{{"event": "y", "after_step": 2}}\n{{"ste')
    assert [each.last_step() for each in (current, away, empty)] == [3, 2, 0]
    for behind in (away, empty):
        last = behind.last_step()
        JsonLinesSink(behind.path, resumed_at=last, notify=print).replace_after(last, current.after(last))
        assert behind.path.read_bytes() == current.path.read_bytes()


def test_lines_that_a_full_disk_kept_back_are_not_doubled_by_those_of_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [line_of(step) for step in range(1, 5)]
    current, full = tmp_path / "current", tmp_path / "full"
    current.write_bytes(b"".join(expected[:3]))
    sink, write = JsonLinesSink(full, resumed_at=0, notify=print), JsonLinesSink._write
    sink.log(RECORD._replace(step=1))

    def refuse(_: JsonLinesSink) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(JsonLinesSink, "_write", refuse)
    for step in (2, 3):
        sink.log(RECORD._replace(step=step))
    last = StepLines(full).last_step()
    assert last == 1
    sink.replace_after(last, StepLines(current).after(last))  # while the disk is full, too
    monkeypatch.setattr(JsonLinesSink, "_write", write)
    sink.log(RECORD._replace(step=4))
    assert full.read_bytes() == b"".join(expected)


def test_a_file_is_read_from_its_end_as_far_as_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the newest start is far before the end, and lines are longer than the parts that are read."""
    monkeypatch.setattr(json_lines, "BLOCK_BYTES", 100)
    lines = [b'{"event": "view", "after_step": 0, "view": 3}\n', *map(line_of, range(1, 60))]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(lines))
    found, parsed = StepLines(path), list[bytes]()
    decode = json_lines._fields_of

    def fields_of(line: bytes) -> dict[str, Any]:
        parsed.append(line)
        return decode(line)

    monkeypatch.setattr(json_lines, "_fields_of", fields_of)
    assert found.last_step() == 59
    assert found.starts_after(LoggedStart(2, 1.0)) == [(LoggedStart(3), 0)]
    assert found.starts_after(LoggedStart(3)) == []
    assert [line for line in parsed if b"event" not in line] == lines[-1:], "the other lines of steps are not decoded"
    for step in (0, 1, 30, 59, 60):
        assert found.after(step) == (b"".join(lines[step + 1 :]) if step else b"".join(lines))
    assert JsonLinesSink(path, resumed_at=59, notify=print).start == LoggedStart(3)


@pytest.mark.parametrize("way", ["return", "resume", "removal"])
def test_the_event_of_the_newest_start_is_never_dropped(way: str, tmp_path: Path) -> None:
    """It says which host was away, when its file is compared with those of others."""
    path = tmp_path / "metrics.jsonl"
    sink = JsonLinesSink(path, resumed_at=0, notify=print)
    for step in (1, 2, 3, 4):
        if step == 4:
            sink.event(RunEvent("view", 3, "", {"view": 7}))
        sink.log(RECORD._replace(step=step))
    if way == "removal":
        path.unlink()
    if way == "resume":
        sink = JsonLinesSink(path, resumed_at=2, notify=print)
    step = {"return": 2, "resume": 3, "removal": 5}[way]
    sink.log(RECORD._replace(step=step))
    assert sink.start == JsonLinesSink(path, resumed_at=step, notify=print).start == LoggedStart(7)
    lines = [(line.get("event"), line.get("after_step", line.get("step"))) for line in read_lines(tmp_path)]
    first = {"return": 1, "resume": 2, "removal": 4}[way]
    steps = [(None, each) for each in range(1, first + 1) if way != "removal"]
    assert lines == [*steps, ("view", first), (None, step)]


def line_of(step: int) -> bytes:
    return json.dumps(RECORD._replace(step=step).numbers()).encode() + b"\n"


def test_a_new_run_starts_with_an_empty_file(tmp_path: Path) -> None:
    log_steps(tmp_path, "jsonl", 1, 5, resumed_at=0)
    log_steps(tmp_path, "jsonl", 1, 2, resumed_at=0)
    assert [line["step"] for line in read_lines(tmp_path)] == [1, 2]


def test_a_run_resumed_in_another_directory_starts_a_file(tmp_path: Path) -> None:
    log_steps(tmp_path, "jsonl", 8, 9, resumed_at=7)
    assert [line["step"] for line in read_lines(tmp_path)] == [8, 9]


@pytest.mark.parametrize("back_to", [0, 2, 3, 5])
@pytest.mark.parametrize("resumed_at", [0, 2])
def test_a_return_to_an_earlier_step_drops_later_lines(back_to: int, resumed_at: int, tmp_path: Path) -> None:
    log_steps(tmp_path, "jsonl", 1, 3, resumed_at=0)
    back_to = max(back_to, resumed_at)
    with Metrics.open(configure("jsonl"), tmp_path, resumed_at=resumed_at, is_main=True) as metrics:
        for step in [*range(resumed_at + 1, 7), *range(back_to + 1, 5), *range(back_to + 1, 9)]:
            metrics.log(RECORD._replace(step=step))
            assert [line["step"] for line in read_lines(tmp_path)] == list(range(1, step + 1))
    assert {path.name for path in tmp_path.iterdir()} == {"config.toml", "metrics.jsonl"}


def test_the_event_of_a_view_is_kept_if_the_step_before_it_is_logged_again(tmp_path: Path) -> None:
    """A rank 0 that has logged a step evaluates and logs it again if others had not completed it."""
    with Metrics.open(configure("jsonl"), tmp_path, resumed_at=0, is_main=True) as metrics:
        for step in (1, 2):
            metrics.log(RECORD._replace(step=step))
        metrics.event(RunEvent("view", 2, "", {"view": 2}))
        for step in (2, 3):
            metrics.log(RECORD._replace(step=step))
    assert [line.get("event", line.get("step")) for line in read_lines(tmp_path)] == [1, 2, "view", 3]


@pytest.mark.parametrize("back_to", [0, 2, 4])
def test_the_event_of_a_return_to_an_earlier_step_is_kept_behind_the_dropped_lines(
    back_to: int, tmp_path: Path
) -> None:
    """The event is written before the first repeated step drops the lines."""
    with Metrics.open(configure("jsonl"), tmp_path, resumed_at=0, is_main=True) as metrics:
        for step in range(1, 5):
            metrics.log(RECORD._replace(step=step))
        metrics.event(RunEvent("view", back_to, "", {"view": 2}))
        metrics.log(RECORD._replace(step=back_to + 1))
    steps = [LINE | {"step": step} for step in range(1, back_to + 2)]
    event = {"event": "view", "after_step": back_to, "view": 2}
    assert read_lines(tmp_path) == [*steps[:-1], event, steps[-1]]


def test_a_return_to_an_earlier_step_drops_unwritten_lines(tmp_path: Path) -> None:
    length = len(json.dumps(LINE)) + 1
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Metrics.open(configure("jsonl"), tmp_path, resumed_at=0, is_main=True) as metrics:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5 * length // 2, hard))
        try:
            for step in [1, 2, 3, 4, 5, 4, 3, 4]:
                metrics.log(RECORD._replace(step=step))
            assert (tmp_path / "metrics.jsonl").stat().st_size == 5 * length // 2
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        metrics.log(RECORD._replace(step=5))
    assert [line["step"] for line in read_lines(tmp_path)] == [1, 2, 3, 4, 5]


def test_lines_that_do_not_fit_on_the_disk_are_written_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    length = len(json.dumps(LINE)) + 1
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Metrics.open(configure("print,jsonl", steps=4), tmp_path, resumed_at=0, is_main=True) as metrics:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (length + length // 2, limits[1]))
            for step in (1, 2, 3):
                metrics.log(RECORD._replace(step=step))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert (tmp_path / "metrics.jsonl").stat().st_size == length + length // 2
        metrics.log(RECORD._replace(step=4))
        assert read_lines(tmp_path) == [LINE | {"step": step} for step in (1, 2, 3, 4)]
    assert capsys.readouterr().out.count("metrics.jsonl cannot be written (File too large)") == 1


def test_a_new_file_begins_if_it_is_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    removals = (lambda: shutil.rmtree(tmp_path), (run_dir / "metrics.jsonl").unlink)
    with Metrics.open(configure("print,jsonl", steps=8), run_dir, resumed_at=0, is_main=True) as metrics:
        metrics.log(RECORD._replace(step=1))
        for step, remove in enumerate(removals, start=2):
            remove()
            capsys.readouterr()
            metrics.log(RECORD._replace(step=step))
            (note,) = [line for line in printed_lines(capsys) if " was removed during the run; " in line]
            assert note.startswith(str(run_dir / "metrics.jsonl"))
            assert [line["step"] for line in read_lines(run_dir)] == [step]
        metrics.log(RECORD._replace(step=4))
        assert [line["step"] for line in read_lines(run_dir)] == [3, 4]
    assert not any("removed" in line for line in printed_lines(capsys))


def test_a_run_directory_that_cannot_be_made_again_is_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    with Metrics.open(configure("print,jsonl", steps=4), run_dir, resumed_at=0, is_main=True) as metrics:
        metrics.log(RECORD)
        shutil.rmtree(run_dir)
        run_dir.touch()
        metrics.log(RECORD._replace(step=2))
        metrics.log(RECORD._replace(step=3))
        run_dir.unlink()
        metrics.log(RECORD._replace(step=4))
        assert [line["step"] for line in read_lines(run_dir)] == [2, 3, 4]
    assert capsys.readouterr().out.count("metrics.jsonl cannot be written (") == 1


def test_lines_follow_those_of_a_file_that_replaces_metrics_jsonl(tmp_path: Path) -> None:
    with Metrics.open(configure("jsonl"), tmp_path, resumed_at=0, is_main=True) as metrics:
        metrics.log(RECORD)
        edited = tmp_path / "edited"
        shutil.copy(tmp_path / "metrics.jsonl", edited)
        edited.rename(tmp_path / "metrics.jsonl")
        metrics.log(RECORD._replace(step=2))
        assert [line["step"] for line in read_lines(tmp_path)] == [1, 2]


def test_ranks_other_than_the_main_rank_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Metrics.open(configure("print,jsonl,text,wandb"), tmp_path, resumed_at=0, is_main=False) as metrics:
        metrics.log(RECORD)
        metrics.note("hello")
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr() == ("", "")


def test_notes_reach_the_terminal_and_the_text_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.INFO, "acsgd"),
        Metrics.open(configure("print"), tmp_path, resumed_at=0, is_main=True) as metrics,
    ):
        metrics.note("hello")
    assert capsys.readouterr().out.splitlines().count("hello") == 1
    assert caplog.messages == ["hello"]


def printed_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line]


def printed_steps(capsys: pytest.CaptureFixture[str]) -> list[int]:
    return [int(line.removeprefix("step ").partition("/")[0]) for line in printed_lines(capsys)]


def test_without_a_terminal_a_few_plain_lines_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log_steps(tmp_path, "print", 1, 1000, resumed_at=0)
    lines = printed_lines(capsys)
    assert len(lines) == PLAIN_LINES + 1
    assert lines[0] == "step 1/1000 0%  loss 2.5000  lr 0.1  32 tokens/s  2 s/step  0:33:18 left"
    assert lines[-1].startswith("step 1000/1000")


def test_log_every_thins_out_all_but_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = configure("print,jsonl", steps=25)
    config = replace(config, log=replace(config.log, every=10))
    with Metrics.open(config, tmp_path, resumed_at=2, is_main=True) as metrics:
        tracked = Mock(spec=TerminalSink)
        metrics._sinks.append(tracked)
        for step in range(3, 26):
            metrics.log(RECORD._replace(step=step, evaluation={"eval_loss": 1.0} if step == 13 else {}))
    assert printed_steps(capsys) == [3, 10, 20, 25]
    assert [call.args[0].step for call in tracked.log.call_args_list] == [3, 10, 13, 20, 25]
    assert [line["step"] for line in read_lines(tmp_path)] == [*range(3, 26)]


@pytest.mark.parametrize("resumed_at", [1, 49, 50, 733, 999])
def test_a_resumed_run_prints_its_first_step_and_the_same_later_ones(
    resumed_at: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log_steps(tmp_path, "print", 1, 1000, resumed_at=0)
    uninterrupted = printed_steps(capsys)
    log_steps(tmp_path, "print", resumed_at + 1, 1000, resumed_at=resumed_at)
    later = {step for step in uninterrupted if step > resumed_at}
    assert printed_steps(capsys) == sorted(later | {resumed_at + 1})


@pytest.mark.parametrize(
    ("dtype", "changed", "line"),
    [
        (
            "fp32",
            {"loss": None},
            "step 1/4 25%  loss none, no target tokens  lr 0.1  32 tokens/s  2 s/step  0:00:06 left",
        ),
        (
            "fp32",
            {"loss": None, "targets_per_s": 8.0},
            "step 1/4 25%  loss nan  lr 0.1  32 tokens/s  2 s/step  0:00:06 left",
        ),
        ("fp32", {"skipped": 2}, "step 1/4 25%  loss 2.5000  lr 0.1  32 tokens/s  2 s/step  skipped 2  0:00:06 left"),
        (
            "fp16",
            {"loss_scale": 2.0**24},
            "step 1/4 25%  loss 2.5000  lr 0.1  32 tokens/s  2 s/step  scale 16777216  0:00:06 left",
        ),
        (
            "fp32",
            {"ranks": {"compute_s": [[0.5, 1.0]]}, "data_wait_s": 0.25},
            "step 1/4 25%  loss 2.5000  lr 0.1  32 tokens/s  2 s/step  limit: compute  slowest: rank 1 (1.3x)  "
            "0:00:06 left",
        ),
        (
            "fp32",
            {"device_tokens_per_s": 16.0, "mfu": 0.4567, "peak_memory_bytes": 6e10, "device_memory_bytes": 141 * 10**9},
            "step 1/4 25%  loss 2.5000  lr 0.1  32 tokens/s  16 per GPU  2 s/step  MFU 45.7%  "
            "peak 60.0 GB (rank 0 has 141 GB)  0:00:06 left",
        ),
        (
            "fp16",
            {"loss_scale": 1.0},
            "step 1/4 25%  loss 2.5000  lr 0.1  32 tokens/s  2 s/step  scale 1  0:00:06 left",
        ),
    ],
)
def test_a_printed_line_shows_what_a_step_is_and_what_limits_it(
    dtype: Literal["fp32", "fp16"],
    changed: dict[str, Any],
    line: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = configure("print", steps=4, dtype=dtype)
    with Metrics.open(config, tmp_path, resumed_at=0, is_main=True) as metrics:
        metrics.log(RECORD._replace(**changed))
    assert printed_lines(capsys) == [line]


def test_the_progress_bar_of_a_resumed_run_starts_at_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with Metrics.open(configure("print"), tmp_path, resumed_at=733, is_main=True):
        pass
    assert "733/1000" in capsys.readouterr().out
