"""Text logs: the records of each rank in a file of its own, and nowhere else."""

from __future__ import annotations

import logging
import re
import resource
import shutil
from pathlib import Path

import pytest

from acsgd.io.telemetry.text_log import open_text_log

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} \| (\w+) *\| (rank [^|]*) \| ([\w.]+):(\w+):(\d+) - (.*)")


def text(run_dir: Path, rank: int) -> list[str]:
    return (run_dir / "logs" / f"rank-{rank:05d}.log").read_text().splitlines()


def test_a_line_has_time_level_rank_location_and_message(tmp_path: Path) -> None:
    with open_text_log(tmp_path, rank=3, stages=[1], replica=1):
        logging.getLogger("acsgd.run.session").info("step %d", 7)
        logging.getLogger("acsgd.run.session").warning("slow")
    informed, warned = (LINE.fullmatch(line) for line in text(tmp_path, 3))
    assert informed
    assert warned
    level, who, module, function, line, message = informed.groups()
    assert (level, who, module, message) == ("INFO", "rank 3, stage 1, replica 1", "acsgd.run.session", "step 7")
    assert function == "test_a_line_has_time_level_rank_location_and_message"
    assert 'info("step %d", 7)' in Path(__file__).read_text().splitlines()[int(line) - 1]
    assert warned.group(1) == "WARNING"


def test_a_line_names_all_stages_of_the_rank(tmp_path: Path) -> None:
    with open_text_log(tmp_path, rank=0, stages=[0, 2], replica=0):
        logging.getLogger("acsgd").info("here")
    assert " | rank 0, stages 0, 2, replica 0 | " in text(tmp_path, 0)[0]


def test_a_restart_appends(tmp_path: Path) -> None:
    for start in (1, 2):
        with open_text_log(tmp_path, rank=0, stages=[0], replica=0):
            logging.getLogger("acsgd").info("start %d", start)
    assert [line.rpartition(" - ")[2] for line in text(tmp_path, 0)] == ["start 1", "start 2"]


def test_only_records_of_the_package_are_logged_and_none_is_printed(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """caplog has a handler at the root logger, like a library that logs to the terminal."""
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


def test_a_full_disk_is_reported_once_by_rank_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for rank, reports in ((0, 1), (1, 0)):
        with open_text_log(tmp_path, rank=rank, stages=[0], replica=0):
            try:
                resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
                for step in range(1000):  # more than any buffer
                    logging.getLogger("acsgd").info("step %d", step)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            assert (tmp_path / f"logs/rank-{rank:05d}.log").stat().st_size == 100
            logging.getLogger("acsgd").info("space again")
        assert text(tmp_path, rank)[-1].endswith(" - space again")
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("log cannot be written ([Errno 27] File too large); training continues\n") == reports
        assert len(err.splitlines()) == reports


def test_a_log_that_is_removed_is_created_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    log = logging.getLogger("acsgd")
    with open_text_log(run_dir, rank=0, stages=[0], replica=0):
        for number, removed in enumerate((run_dir, run_dir / "logs")):
            shutil.rmtree(removed)
            log.info("line %d", number)
            assert [line.rpartition(" - ")[2] for line in text(run_dir, 0)] == [f"line {number}"]
        shutil.rmtree(run_dir)
        run_dir.touch()
        log.info("dropped")
        run_dir.unlink()
        log.info("last")
        assert [line.rpartition(" - ")[2] for line in text(run_dir, 0)] == ["last"]
    assert capsys.readouterr().err.count("cannot be written") == 1
