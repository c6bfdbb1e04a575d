"""Laws of failure reports: one message per failure, and it names the rank at fault."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import asdict

import pytest

from acsgd.errors import RunError, reason
from acsgd.launch import Launch
from acsgd.run import failures as failure
from acsgd.run.failures import Report, attribute_failure, report_failure, report_startup_error
from acsgd.run.signals import WATCH_S
from acsgd.topology import publish_host

HOST = socket.gethostname()


class DictStore(dict[str, bytes]):
    """A store in memory. With the first report, it also gets the reports of `others` and answers of `alive` ranks."""

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
    """A store whose host has ended."""

    def gone(self, *_: object) -> bool:
        raise RuntimeError("Broken pipe")

    set = add = get = check = gone  # type: ignore[assignment]


class ProcessExit(BaseException):
    """Raised in place of os._exit."""


@pytest.fixture(autouse=True)
def _replace_exit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Raise ProcessExit instead of ending the process, and restore the handler of SIGTERM."""

    def end(code: int) -> None:
        raise ProcessExit(code)

    monkeypatch.setattr(failure.os, "_exit", end)
    former = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, former)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the arguments of time.sleep instead of sleeping."""
    waits: list[float] = []
    monkeypatch.setattr(failure.time, "sleep", waits.append)
    return waits


def test_rank_0_prints_a_startup_error_at_once(slept: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, report_startup_error(Launch()):
        raise ValueError("a=1 must be 2")
    assert ended.value.code == 2
    assert capsys.readouterr().err == "\nerror: a=1 must be 2\n"
    assert slept == []


@pytest.mark.parametrize(("rank", "local_rank"), [(4, 0), (5, 1)])
def test_other_ranks_wait_before_they_print_a_startup_error(rank: int, local_rank: int, slept: list[float]) -> None:
    with pytest.raises(SystemExit), report_startup_error(Launch(rank, local_rank)):
        raise RunError("a file that only this host lacks")
    assert slept == [10.0 * (1 + local_rank)]


def test_help_is_not_a_failure(slept: list[float]) -> None:
    with pytest.raises(SystemExit) as ended, report_startup_error(Launch(3, 1)):
        raise SystemExit(0)
    assert ended.value.code == 0
    assert slept == []


def fail(error: Exception, store: DictStore, *, rank: int = 0, world_size: int = 2) -> None:
    with (
        pytest.raises(ProcessExit) as ended,
        report_failure(store, Launch(rank, rank, world_size, world_size), timeout_s=0.4),
    ):
        raise error
    assert ended.value.args == (1,)


def test_only_the_first_rank_prints_and_torchruns_sigterm_does_not_stop_it(capsys: pytest.CaptureFixture[str]) -> None:
    store = DictStore()
    fail(RunError("a corrupt file"), store)
    assert capsys.readouterr().err == "\nerror: a corrupt file\n"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    fail(RunError("rank 0 is gone", awaited=[0]), store, rank=1)
    assert capsys.readouterr().err == ""


def test_another_rank_prints_if_the_first_has_died(capsys: pytest.CaptureFixture[str]) -> None:
    store = DictStore()
    store.add("acsgd/failures", 1)
    fail(RunError("waited for rank 0", awaited=[0]), store, rank=1)
    assert capsys.readouterr().err == "\nerror: waited for rank 0\n"


def test_an_unexpected_error_is_printed_with_rank_host_and_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    fail(KeyError("no such thing"), DictStore(), rank=1)
    lines = capsys.readouterr().err.splitlines()
    assert lines[1] == f"error: rank 1 on {HOST}: KeyError: 'no such thing'"
    assert lines[2] == "Traceback (most recent call last):"
    assert lines[-1] == "KeyError: 'no such thing'"


def test_the_error_of_the_rank_at_fault_is_printed_even_if_another_reported_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fail(RunError("waited for rank 1", awaited=[1]), DictStore({1: Report("rank 1: its own fault", ())}))
    assert capsys.readouterr().err == "\nerror: rank 1: its own fault\n"


def test_the_silent_rank_is_named_with_its_host(capsys: pytest.CaptureFixture[str]) -> None:
    store = DictStore({2: Report("2 waited for rank 1", (1,))}, alive=(0,))
    publish_host(store, 1)
    fail(RunError("3 waited for rank 2", awaited=[2]), store, rank=3, world_size=4)
    assert capsys.readouterr().err == (
        f"\nerror: 2 waited for rank 1; rank 1 on {HOST} is silent: ended or hanging; see its log\n"
    )


@pytest.mark.parametrize("finished", [True, False])
def test_a_rank_answers_when_another_fails_and_when_it_has_finished(finished: bool) -> None:
    store = DictStore()
    with report_failure(store, Launch(1, 1, 2, 2), timeout_s=0.4):
        if not finished:
            store.add("acsgd/failures", 1)
    assert store.check(["acsgd/answer/1"])


def test_without_a_store_each_rank_prints_its_own_error(slept: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    fail(RunError("waited for rank 1", awaited=[1]), DeadStore())
    assert capsys.readouterr().err == "\nerror: waited for rank 1\n"
    assert max(slept) > WATCH_S  # long enough for the watch thread to print that torchrun has ended


def test_a_store_that_never_answers_does_not_keep_a_rank_from_printing(capsys: pytest.CaptureFixture[str]) -> None:
    store, answer = DictStore(), threading.Event()
    store.add = lambda *_: answer.wait()  # type: ignore[method-assign,assignment]
    fail(RunError("waited for rank 1", awaited=[1]), store)
    answer.set()
    assert capsys.readouterr().err == "\nerror: waited for rank 1\n"


def message_of(reports: dict[int, tuple[int, ...]], silent: tuple[int, ...], first: int) -> str:
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
def test_the_message_names_the_rank_at_fault_and_is_that_of_a_rank_that_waited_for_it(
    reports: dict[int, tuple[int, ...]], silent: tuple[int, ...], first: int, expected: str
) -> None:
    assert message_of(reports, silent, first).startswith(expected)


def test_gloos_reason_is_printed_without_source_line_and_advice() -> None:
    error = RuntimeError(
        "[/__w/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:56463. This is typically caused "
        "by a remote worker crashing. Check the logs."
    )
    assert reason(error) == "Connection closed by peer [127.0.0.1]:56463"
    assert reason(RuntimeError("plain")) == "plain"
