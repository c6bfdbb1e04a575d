"""Text logs: each rank's own words in a file of its own, and nowhere else."""

from __future__ import annotations

import logging
import re
import resource
from pathlib import Path

import pytest

from acsgd.io.telemetry.text_log import open_text_log

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} \| (\w+) *\| (rank [^|]*) \| ([\w.]+):(\w+):(\d+) - (.*)")


def text(run_dir: Path, rank: int) -> list[str]:
    return (run_dir / "logs" / f"rank-{rank:05d}.log").read_text().splitlines()


def test_a_line_says_when_how_urgent_who_where_and_what(tmp_path: Path) -> None:
    with open_text_log(tmp_path, rank=3, stages=[1], replica=1):
        logging.getLogger("acsgd.run.session").info("step %d", 7)
        logging.getLogger("acsgd.run.session").warning("slow")
    informed, warned = (LINE.fullmatch(line) for line in text(tmp_path, 3))
    assert informed
    assert warned
    level, who, module, function, line, message = informed.groups()
    assert (level, who, module, message) == ("INFO", "rank 3, stage 1, replica 1", "acsgd.run.session", "step 7")
    assert function == "test_a_line_says_when_how_urgent_who_where_and_what"
    assert 'info("step %d", 7)' in Path(__file__).read_text().splitlines()[int(line) - 1]
    assert warned.group(1) == "WARNING"


def test_a_rank_with_several_stages_names_them(tmp_path: Path) -> None:
    with open_text_log(tmp_path, rank=0, stages=[0, 2], replica=0):
        logging.getLogger("acsgd").info("here")
    assert " | rank 0, stages 0, 2, replica 0 | " in text(tmp_path, 0)[0]


def test_a_restart_appends(tmp_path: Path) -> None:
    for start in (1, 2):
        with open_text_log(tmp_path, rank=0, stages=[0], replica=0):
            logging.getLogger("acsgd").info("start %d", start)
    assert [line.rpartition(" - ")[2] for line in text(tmp_path, 0)] == ["start 1", "start 2"]


def test_an_error_goes_on_and_leaves_its_traceback_with_one_prefix(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), open_text_log(tmp_path, rank=0, stages=[0], replica=0):
        _ = 1 / 0
    first, *others = text(tmp_path, 0)
    assert LINE.fullmatch(first)
    assert " | ERROR    | " in first
    assert others[0] == "Traceback (most recent call last):"
    assert others[-1] == "ZeroDivisionError: division by zero"
    assert not [line for line in others if "| rank 0" in line]


def test_a_text_log_takes_the_lines_of_the_package_alone_and_prints_nothing(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """caplog listens at the root logger, as the handler would that some library opens on the terminal."""
    package = logging.getLogger("acsgd")
    caplog.set_level(logging.ERROR, "acsgd")
    monkeypatch.setattr(package, "propagate", True)
    before = list(package.handlers), package.level, package.propagate, list(logging.getLogger().handlers)
    with open_text_log(tmp_path, rank=0, stages=[0], replica=0):
        logging.getLogger("acsgd.run.session").info("ours")
        logging.getLogger("acsgd.run.session").error("ours, urgent")
        logging.getLogger("transformers").error("theirs")
    assert (package.handlers, package.level, package.propagate, logging.getLogger().handlers) == before
    logging.getLogger("acsgd.run.session").info("too little")
    logging.getLogger("acsgd.run.session").error("later")
    assert [line.rpartition(" - ")[2] for line in text(tmp_path, 0)] == ["ours", "ours, urgent"]
    assert caplog.messages == ["theirs", "later"]
    assert "ours" not in "".join(capsys.readouterr())


def test_a_full_disk_ends_no_run_for_its_text_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        with open_text_log(tmp_path, rank=0, stages=[0], replica=0):
            for step in range(20_000):  # more than any buffer
                logging.getLogger("acsgd").info("step %d", step)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "logs" / "rank-00000.log").stat().st_size == 100
    assert capsys.readouterr() == ("", "")
