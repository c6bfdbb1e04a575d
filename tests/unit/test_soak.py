"""The soak tests: a campaign attributes every illegal end to its case, and repeats it; a few cases of each area."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import ClassVar

import pytest

from tests.lib.injection import AGENT_POINTS, WORKER_POINTS
from tests.lib.scenes import TracedStep, check_losses, check_trace
from tests.soak.area import ACCEPTED, Area, Case, Outcome, UnavailableError
from tests.soak.areas import AREAS
from tests.soak.campaign import Campaign
from tests.soak.leases import check_tenures
from tests.soak.oracle import in_child, refusal

CASES = {"wire": 20, "checkpoints": 1, "caches": 3, "configs": 4, "data": 10, "leases": 1, "views": 3}
"""Number of cases of each area; together they take a few seconds."""


class Faulty:
    """Cases that end in every way."""

    deadline_s: ClassVar[float] = 2.0
    memory_bytes: ClassVar[int] = 2**27

    @classmethod
    def prepare(cls, directory: Path) -> None:
        (directory / "prepared").touch()

    def __init__(self, directory: Path) -> None:
        assert (directory / "prepared").exists()

    def run(self, case: Case) -> Outcome:
        case.describe(f"number {case.draw.random()}")
        assert os.listdir(case.directory) == []
        Path("left-over").touch()
        end = (case.directory.parent / "count").exists()
        number = int((case.directory.parent / "count").read_text()) if end else 0
        (case.directory.parent / "count").write_text(str(number + 1))
        if number == 1:
            raise ValueError('a file "x" of 3 bytes')
        if number == 3:
            os.kill(os.getpid(), signal.SIGSEGV)
        if number == 4:
            os._exit(0)
        if number == 6:
            time.sleep(600)
        if number == 7:
            bytearray(2**28)
        return ACCEPTED if number % 2 else refusal("x is wrong", ["x"])


class Rows(Faulty):
    """Cases that report a row."""

    def run(self, case: Case) -> Outcome:
        return Outcome("accepted", row=(str(case.number), "x"))


class Absent(Faulty):
    """An area that this machine cannot run."""

    @classmethod
    def prepare(cls, directory: Path) -> None:
        raise UnavailableError("needs a frobnicator")


def test_each_illegal_end_is_the_failure_of_its_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    areas: dict[str, type[Area]] = {"faulty": Faulty, "absent": Absent}
    state = tmp_path / "state.json"
    campaign = Campaign(areas, seed=1, state=state)
    campaign.run(seconds=60, cases=10)
    tally = campaign.tallies["faulty"]
    assert (tally.cases, tally.accepted, tally.refused, tally.failed) == (10, 2, 3, 5)
    assert [(failure.case, failure.reason) for failure in tally.failures] == [
        (1, 'ValueError: a file "x" of 3 bytes'),
        (3, "the process ended by SIGSEGV"),
        (4, "the process ended with exit code 0"),
        (6, "hangs: more than 2 s"),
        (7, "MemoryError:"),
    ]
    assert "in run" in tally.failures[1].detail, "the stack of a crash"
    assert "in run" in tally.failures[3].detail, "the stack of a hang"
    assert campaign.tallies["absent"].unavailable == "needs a frobnicator"
    assert len(capsys.readouterr().out.splitlines()) == 5
    changes = {failure.change for failure in tally.failures}
    assert len(changes) == 5, "cases draw different numbers"
    # a campaign that continues has the counts of the first, and repeats nothing
    resumed = Campaign(areas, seed=1, state=state)
    assert resumed.tallies == campaign.tallies
    resumed.run(seconds=60, cases=11)
    assert resumed.tallies["faulty"].cases == 11
    assert json.loads(state.read_text())["areas"]["faulty"]["cases"] == 11
    with pytest.raises(ValueError):
        Campaign(areas, seed=2, state=state)
    # a case repeated alone draws the same numbers
    text = Campaign(areas, seed=1).run_case("faulty", 3)
    assert isinstance(text, str)
    assert text.partition(":")[0] in tally.failures[1].change


def test_what_is_one_sentence() -> None:
    assert refusal("config.json has no key\n", ["config.json"]).verdict == "refused"
    for text in ("", "config.json\nis wrong", "is wrong", "config.json: this is a bug", "config.json " + "x" * 5000):
        with pytest.raises(AssertionError):
            refusal(text, ["config.json"])


def test_a_program_ends_as_the_interpreter_ends_it(tmp_path: Path) -> None:
    def exit_with(code: object) -> None:
        raise SystemExit(code)

    assert in_child(lambda: None, tmp_path, 10).outcome([]) == ACCEPTED
    assert in_child(lambda: exit_with("error: x is wrong"), tmp_path, 10).outcome(["x"]).verdict == "refused"
    assert in_child(lambda: exit_with(2), tmp_path, 10).code == 2
    for call in (lambda: exit_with(2), lambda: exit_with("x\nerror: y"), lambda: 1 / 0, os.abort):
        with pytest.raises(AssertionError):
            in_child(call, tmp_path, 10).outcome(["x"])
    with pytest.raises(AssertionError, match="still running"):
        in_child(lambda: time.sleep(60), tmp_path, 0.1)


@pytest.mark.parametrize("name", [*WORKER_POINTS, *AGENT_POINTS])
def test_a_fault_can_be_injected_at_each_point(name: str, tmp_path: Path) -> None:
    point = (WORKER_POINTS | AGENT_POINTS)[name]
    assert in_child(lambda: point(lambda: None), tmp_path, 10).outcome([]) == ACCEPTED


def test_two_holders_at_once_are_found() -> None:
    check_tenures(
        ["a begins", "a holds", "a begins", "b begins", "b holds", "a holds", "b begins", "b holds", "a begins"]
    )
    with pytest.raises(AssertionError, match="a and b held the lease at the same time"):
        check_tenures(["a begins", "a holds", "b begins", "b holds", "a begins", "a holds"])


def test_two_views_that_train_at_once_and_a_worker_that_leaks_are_found() -> None:
    steps = [TracedStep(view, 100 + view, step, 40, 10, 0) for view, step in ((1, 1), (1, 2), (2, 2), (2, 3), (3, 4))]
    check_trace(steps)
    check_trace([*steps[:3], TracedStep(1, 104, 2, 40, 10, 0), *steps[3:]])
    with pytest.raises(AssertionError, match="views 1 and 2 have both trained"):
        check_trace([*steps, TracedStep(1, 101, 3, 40, 10, 0)])
    early = TracedStep(4, 104, 1, 40, 10, 0)
    with pytest.raises(AssertionError, match="views 3 and 4"):
        check_trace([*steps, early])
    check_trace([*steps, early], returning=[4])
    check_trace([*steps, early._replace(view=5)], returning=[4])
    with pytest.raises(AssertionError, match="views 3 and 4"):
        check_trace([*steps, early, *(TracedStep(3, 103, step, 40, 10, 0) for step in (5, 6))], returning=[4])
    for leaking in (TracedStep(2, 102, 3, 41, 10, 0), TracedStep(2, 102, 3, 40, 15, 0)):
        with pytest.raises(AssertionError, match="worker 102"):
            check_trace([*steps, leaking])


def test_losses_that_differ_from_the_calm_run_are_found() -> None:
    assert check_losses([2.0, 1.0 + 1e-6], [2.0, 1.0, 0.5], 1e-5) == pytest.approx(1e-6)
    for losses in ([2.0, 1.0001], [2.0, float("nan")]):
        with pytest.raises(AssertionError):
            check_losses(losses, [2.0, 1.0], 1e-5)


def test_an_area_that_prints_rows_runs_each_case_once(capsys: pytest.CaptureFixture[str]) -> None:
    campaign = Campaign({"rows": Rows}, seed=1)
    campaign.run(seconds=60, limits={"rows": 3})
    assert campaign.tallies["rows"].rows == [["0", "x"], ["1", "x"], ["2", "x"]]
    assert capsys.readouterr().out.splitlines() == ["rows 0: 0 | x", "rows 1: 1 | x", "rows 2: 2 | x"]


def test_the_lists_of_slow_tests_name_tests_that_exist(unknown_tests: list[str]) -> None:
    assert not unknown_tests, "in tests/slow.txt or tests/soak.txt"


@pytest.mark.parametrize("area", CASES)
def test_a_few_cases(area: str) -> None:
    campaign = Campaign({area: AREAS[area]}, seed=1)
    campaign.run(seconds=120, cases=CASES[area])
    tally = campaign.tallies[area]
    assert tally.cases == CASES[area]
    assert not tally.failures, tally.failures
