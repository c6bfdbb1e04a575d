"""One message for one failure, and the right one."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import asdict

import pytest

from acsgd.errors import RunError, reason
from acsgd.run import failures as failure
from acsgd.run.failures import Report, attribute_failure, report_failure, report_startup_error
from acsgd.run.signals import WATCH_S
from acsgd.topology import Launch, publish_host

HOST = socket.gethostname()


class DictStore(dict[str, bytes]):
    """A store of one process. Once a rank reports, `others` do, and `alive` ranks answer."""

    def __init__(self, others: dict[int, Report] | None = None, alive: tuple[int, ...] = ()) -> None:
        self.others = others or {}
        self.alive = alive

    def set(self, key: str, value: str, /) -> None:
        self[key] = value.encode()

    def get(self, key: str, /) -> bytes:  # type: ignore[override]
        return self[key]

    def check(self, keys: list[str], /) -> bool:
        return all(key in self for key in keys)

    def add(self, key: str, value: int, /) -> int:
        count = int(self.setdefault(key, b"0")) + value
        if value and count == 1:
            for rank, report in self.others.items():
                self.set(f"acsgd/failure/{rank}", json.dumps(asdict(report)))
            for rank in self.alive:
                self.set(f"acsgd/answer/{rank}", "")
        self.set(key, str(count + len(self.others) if value else count))
        return count


class DeadStore(DictStore):
    """A store whose host is gone."""

    def gone(self, *_: object) -> bool:
        raise RuntimeError("Broken pipe")

    set = add = get = check = gone  # type: ignore[assignment]


class Ended(BaseException):
    """Stands for the end of the process."""


@pytest.fixture(autouse=True)
def alive(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Survive the end of a failing rank, and undo what it does to SIGTERM."""

    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(failure.os, "_exit", end)
    former = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, former)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Collect waits instead of waiting."""
    waits: list[float] = []
    monkeypatch.setattr(failure.time, "sleep", waits.append)
    return waits


def test_rank_0_tells_a_mistake_at_once(slept: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, report_startup_error(Launch()):
        raise ValueError("a=1 must be 2")
    assert ended.value.code == 2
    assert capsys.readouterr().err == "\nerror: a=1 must be 2\n"
    assert slept == []


@pytest.mark.parametrize(("rank", "local_rank"), [(4, 0), (5, 1)])
def test_others_wait_to_be_ended_before_they_tell(rank: int, local_rank: int, slept: list[float]) -> None:
    with pytest.raises(SystemExit), report_startup_error(Launch(rank, local_rank)):
        raise RunError("a file that only this host lacks")
    assert slept == [10.0 * (1 + local_rank)]


def test_help_is_no_failure(slept: list[float]) -> None:
    with pytest.raises(SystemExit) as ended, report_startup_error(Launch(3, 1)):
        raise SystemExit(0)
    assert ended.value.code == 0
    assert slept == []


def fail(error: Exception, store: DictStore, *, rank: int = 0, world_size: int = 2) -> None:
    with (
        pytest.raises(Ended) as ended,
        report_failure(store, Launch(rank, rank, world_size, world_size), timeout_s=0.4),
    ):
        raise error
    assert ended.value.args == (1,)


def test_only_the_first_tells_and_torchruns_sigterm_does_not_stop_it(capsys: pytest.CaptureFixture[str]) -> None:
    store = DictStore()
    fail(RunError("a torn file"), store)
    assert capsys.readouterr().err == "\nerror: a torn file\n"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    fail(RunError("rank 0 is gone", awaited=[0]), store, rank=1)
    assert capsys.readouterr().err == ""


def test_the_others_tell_if_the_first_does_not_live_to(capsys: pytest.CaptureFixture[str]) -> None:
    store = DictStore()
    store.add("acsgd/failures", 1)
    fail(RunError("waited for rank 0", awaited=[0]), store, rank=1)
    assert capsys.readouterr().err == "\nerror: waited for rank 0\n"


def test_a_fault_of_ours_is_told_with_rank_host_and_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    fail(KeyError("no such thing"), DictStore(), rank=1)
    lines = capsys.readouterr().err.splitlines()
    assert lines[1] == f"error: rank 1 on {HOST}: KeyError: 'no such thing'"
    assert lines[2] == "Traceback (most recent call last):"
    assert lines[-1] == "KeyError: 'no such thing'"


def test_the_rank_at_fault_is_told_even_if_another_was_first(capsys: pytest.CaptureFixture[str]) -> None:
    fail(RunError("waited for rank 1", awaited=[1]), DictStore({1: Report("rank 1: its own fault", ())}))
    assert capsys.readouterr().err == "\nerror: rank 1: its own fault\n"


def test_the_silent_rank_is_told_with_its_host(capsys: pytest.CaptureFixture[str]) -> None:
    store = DictStore({2: Report("2 waited for rank 1", (1,))}, alive=(0,))
    publish_host(store, 1)
    fail(RunError("3 waited for rank 2", awaited=[2]), store, rank=3, world_size=4)
    assert capsys.readouterr().err == (
        f"\nerror: 2 waited for rank 1; rank 1 on {HOST} is silent: ended or hanging; see its log\n"
    )


@pytest.mark.parametrize("left_well", [True, False])
def test_a_rank_answers_when_another_fails_and_when_it_has_ended(left_well: bool) -> None:
    store = DictStore()
    with report_failure(store, Launch(1, 1, 2, 2), timeout_s=0.4):
        if not left_well:
            store.add("acsgd/failures", 1)
    assert store.check(["acsgd/answer/1"])


def test_without_a_store_each_rank_tells_what_it_knows(slept: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    fail(RunError("waited for rank 1", awaited=[1]), DeadStore())
    assert capsys.readouterr().err == "\nerror: waited for rank 1\n"
    assert max(slept) > WATCH_S  # time to tell instead that torchrun is gone


def test_a_store_that_never_answers_keeps_no_rank_from_telling(capsys: pytest.CaptureFixture[str]) -> None:
    store, answer = DictStore(), threading.Event()
    store.add = lambda *_: answer.wait()  # type: ignore[method-assign,assignment]
    fail(RunError("waited for rank 1", awaited=[1]), store)
    answer.set()
    assert capsys.readouterr().err == "\nerror: waited for rank 1\n"


def told(reports: dict[int, tuple[int, ...]], silent: tuple[int, ...], first: int) -> str:
    texts = {rank: Report(f"{rank} waited", awaited) for rank, awaited in reports.items()}
    return attribute_failure(texts, silent, first, lambda rank: f"host-{rank}")


@pytest.mark.parametrize(
    ("reports", "silent", "first", "expected"),
    [
        pytest.param({0: (1,), 2: (1,), 3: (2,)}, (1,), 3, "0 waited; rank 1 on host-1 is silent", id="pipeline"),
        pytest.param({0: (1,), 1: (2,)}, (3,), 0, "0 waited; rank 3 on host-3 is silent", id="witness-still-waits"),
        pytest.param({0: (2,), 1: (3,), 2: (3,)}, (3,), 0, "1 waited; rank 3 on host-3 is silent", id="2x2"),
        pytest.param({0: (1, 2, 3), 2: (1,)}, (1,), 0, "2 waited; rank 1 on host-1 is silent", id="not-the-collective"),
        pytest.param({0: (1, 2, 3), 2: (0, 1, 3)}, (1,), 2, "0 waited; rank 1 on host-1 is silent", id="collective"),
        pytest.param({0: (1,), 3: (2,)}, (1, 2), 3, "0 waited; rank 1 on host-1 and rank 2 on host-2 are", id="two"),
        pytest.param({0: (1,)}, (1, 3), 0, "0 waited; rank 1 on host-1 is silent", id="ended-by-torchrun"),
        pytest.param({0: (1,)}, (), 0, "0 waited; rank 1 on host-1 is alive, but stuck", id="stuck"),
        pytest.param({0: (1,), 1: (0,)}, (), 1, "1 waited; all ranks are alive", id="network"),
        pytest.param({0: (1,), 1: (), 2: ()}, (), 2, "2 waited", id="own-fault-that-was-first"),
        pytest.param({0: (1,), 1: (), 2: ()}, (3,), 0, "1 waited", id="own-fault"),
    ],
)
def test_the_message_names_the_culprit_and_comes_from_who_waited_for_it(
    reports: dict[int, tuple[int, ...]], silent: tuple[int, ...], first: int, expected: str
) -> None:
    assert told(reports, silent, first).startswith(expected)


def test_gloos_reason_is_told_without_its_source_line_and_advice() -> None:
    error = RuntimeError(
        "[/__w/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:56463. This is typically caused "
        "by a remote worker crashing. Check the logs."
    )
    assert reason(error) == "Connection closed by peer [127.0.0.1]:56463"
    assert reason(RuntimeError("plain")) == "plain"
