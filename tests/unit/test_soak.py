"""The soak tests: a campaign attributes every illegal end to its case, and repeats it; a few cases of each area."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import ClassVar

import pytest

from tests.soak.area import ACCEPTED, Area, Case, Outcome, UnavailableError
from tests.soak.areas import AREAS
from tests.soak.campaign import Campaign
from tests.soak.leases import check_tenures
from tests.soak.oracle import in_child, refusal

CASES = {"wire": 40, "checkpoints": 4, "caches": 12, "configs": 12, "data": 40, "leases": 1, "views": 5}
"""Number of cases of each area; together they take about fifteen seconds."""


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


def test_two_holders_at_once_are_found() -> None:
    check_tenures(
        ["a begins", "a holds", "a begins", "b begins", "b holds", "a holds", "b begins", "b holds", "a begins"]
    )
    with pytest.raises(AssertionError, match="a and b held the lease at the same time"):
        check_tenures(["a begins", "a holds", "b begins", "b holds", "a begins", "a holds"])


@pytest.mark.parametrize("area", CASES)
def test_a_few_cases(area: str) -> None:
    campaign = Campaign({area: AREAS[area]}, seed=1)
    campaign.run(seconds=120, cases=CASES[area])
    tally = campaign.tallies[area]
    assert tally.cases == CASES[area]
    assert not tally.failures, tally.failures
