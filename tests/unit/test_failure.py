"""One message for one failure."""

from __future__ import annotations

import pytest

from acsgd import failure
from acsgd.failure import RunError, told_by_first, told_once


@pytest.fixture(autouse=True)
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Collect waits instead of waiting."""
    waits: list[float] = []
    monkeypatch.setattr(failure.time, "sleep", waits.append)
    return waits


def test_rank_0_tells_a_mistake_at_once(slept: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, told_once(0, 0):
        raise ValueError("a=1 must be 2")
    assert ended.value.code == 2
    assert capsys.readouterr().err == "\nerror: a=1 must be 2\n"
    assert slept == []


@pytest.mark.parametrize(("rank", "local_rank"), [(4, 0), (5, 1)])
def test_others_wait_to_be_ended_before_they_tell(rank: int, local_rank: int, slept: list[float]) -> None:
    with pytest.raises(SystemExit), told_once(rank, local_rank):
        raise RunError("a file that only this host lacks")
    assert slept == [10.0 * (1 + local_rank)]


def test_help_is_no_failure(slept: list[float]) -> None:
    with pytest.raises(SystemExit) as ended, told_once(3, 1):
        raise SystemExit(0)
    assert ended.value.code == 0
    assert slept == []


def test_only_the_first_to_claim_it_tells_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    for first in (True, False):
        with pytest.raises(SystemExit) as ended, told_by_first(lambda first=first: first):
            raise RunError("rank 3 is gone")
        assert ended.value.code == 1
        assert capsys.readouterr().err == ("\nerror: rank 3 is gone\n" if first else "")


def test_a_fault_of_ours_is_told_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), told_by_first(lambda: True):
        raise KeyError("no such thing")
    told = capsys.readouterr().err
    assert "Traceback" in told
    assert "KeyError: 'no such thing'" in told
