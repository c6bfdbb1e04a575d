"""Laws of failure reports: one message per failure, and it names the rank at fault."""

from __future__ import annotations

import errno
import json
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from lib.sleeps import record_sleeps

from acsgd.comm.store import CallThread, StoreClient, StoreError
from acsgd.errors import ReportedError, RunError, reason
from acsgd.failures import failures as failure
from acsgd.failures.failures import FailureBoard, FailureReport, attribute_failure, report_failure
from acsgd.failures.report import report_startup_error
from acsgd.failures.signals import WATCH_S
from acsgd.launch import Launch
from acsgd.shards.files import blame

HOST = socket.gethostname()


class DictStore(dict[str, bytes]):
    """A store in memory. With the first report, it also gets the reports of `others` and answers of `alive` ranks."""

    def __init__(self, others: dict[int, FailureReport] | None = None, alive: tuple[int, ...] = ()) -> None:
        self.others = others or {}
        self.alive = alive

    def set(self, key: str, value: str, /) -> None:
        self[key] = value.encode()

    def get(self, key: str, /) -> bytes:  # type: ignore[override]
        return self[key]

    def check(self, keys: list[str], /) -> bool:
        return all(key in self for key in keys)

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        return [self[key] for key in keys]

    def add(self, key: str, value: int, /) -> int:
        count = int(self.setdefault(key, b"0")) + value
        if value and count == 1:
            for rank, report in self.others.items():
                self.set(f"acsgd/failure/{rank}", json.dumps(asdict(report)))
            for rank in self.alive:
                self.set(f"acsgd/answer/{rank}", "")
        self.set(key, str(count + len(self.others) if value else count))
        return count

    def compare_set(self, key: str, expected: str, value: str, /) -> bytes:
        return self.setdefault(key, value.encode())

    def delete_key(self, key: str, /) -> bool:
        return self.pop(key, None) is not None


def client_of(store: DictStore) -> StoreClient:
    return StoreClient(store, CallThread("store"), timeout_s=60.0)


class DeadStore(DictStore):
    """A store whose host has ended."""

    def gone(self, *_: object) -> bool:
        raise RuntimeError("Broken pipe")

    set = add = get = check = gone  # type: ignore[assignment]


def refuse(code: int) -> None:
    raise AssertionError(f"the process would end with code {code}")


@pytest.fixture(autouse=True)
def _restore_sigterm() -> Iterator[None]:
    """Restore the handler of SIGTERM."""
    former = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, former)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the arguments of time.sleep instead of sleeping."""
    return record_sleeps(failure, monkeypatch)


def test_a_startup_error_is_one_sentence_and_code_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    launch = Launch(error_file=str(tmp_path / "error.json"))
    with pytest.raises(SystemExit) as ended, report_startup_error(launch):
        raise ValueError("a=1 must be 2")
    assert ended.value.code == 2
    assert capsys.readouterr().err == "\nerror: a=1 must be 2\n"
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "a=1 must be 2"


def test_a_message_that_quotes_control_characters_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), report_startup_error(Launch()):
        raise ValueError('a="x\ny\x1b\udcff" must be ä')
    assert capsys.readouterr().err == '\nerror: a="x\\ny\\x1b\\udcff" must be ä\n'


def test_each_error_is_printed_once_in_all_attempts_of_torchrun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = []
    for attempt, text in enumerate(["no such file", "no such file", "no such key", "no such key"]):
        error_file = tmp_path / f"attempt_{attempt}" / "0" / "error.json"
        error_file.parent.mkdir(parents=True)
        with pytest.raises(SystemExit), report_startup_error(Launch(error_file=str(error_file))):
            raise ValueError(text)
        assert text in error_file.read_text()
        printed.append(capsys.readouterr().err)
    assert printed == ["\nerror: no such file\n", "", "\nerror: no such key\n", ""]


@pytest.mark.parametrize("report", [report_startup_error, lambda launch: report_failure(DictStore(), launch, refuse)])
def test_help_is_not_a_failure(report: Callable[[Launch], AbstractContextManager[Any]]) -> None:
    with pytest.raises(SystemExit) as ended, report(Launch(3, 1)):
        raise SystemExit(0)
    assert ended.value.code == 0


class PanicException(BaseException):
    """As a Rust extension that panics raises it."""


def fail(
    error: BaseException,
    store: DictStore,
    *,
    rank: int = 0,
    world_size: int = 2,
    is_training: bool = True,
    run_dir: Path | None = None,
    launch: Launch | None = None,
) -> None:
    """Fail in training, or before it, and check the exit code."""

    def run() -> None:
        with report_failure(store, launch or Launch(rank, rank, world_size, world_size), refuse) as context:
            context.timeout_s, context.run_dir, context.is_training = 0.4, run_dir, is_training
            raise error

    with pytest.raises(ReportedError) as ended:
        run()
    assert ended.value.code == (1 if is_training else 2)


OUTSIDE = [
    (OSError(errno.ENOSPC, "", "/d/x.bin"), "/d/x.bin: No space left on device; free space on its disk"),
    (
        OSError(errno.ENOSPC, "", "/x"),
        "/x: No space left on device; free space on its disk, or give a path on another one (",
    ),
    (PermissionError(errno.EACCES, "", b"/d/\xff"), "/d/\\udcff: Permission denied; give this user access"),
    (OSError(errno.EROFS, "", "a", None, "b"), "a -> b: Read-only file system; give a path on a file system that can"),
    (IsADirectoryError(errno.EISDIR, "", "metrics.jsonl"), "metrics.jsonl: Is a directory; remove the directory"),
    (OSError(errno.ENAMETOOLONG, "", "xxx"), "xxx: File name too long; give a path with shorter names"),
    (OSError(errno.ENOENT, "No such file"), "the current directory does not exist any more (No such file); change to"),
    (RunError("x=" + "9" * 5000 + " is too long"), "x=" + "9" * 148 + "..." + "9" * 50 + " is too long"),
    (UnicodeEncodeError("utf-8", "a\udcff", 1, 2, "surrogates not allowed"), "a\\udcff is not valid UTF-8; rename it"),
    (MemoryError(), "out of memory; use a smaller pp.micro"),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "out of memory; use a"),
    (RunError("x is corrupt"), "x is corrupt"),
]
"""Error with a cause outside the program, and the beginning of its sentence."""


@pytest.mark.parametrize("is_training", [False, True])
def test_an_error_from_outside_is_one_sentence(
    is_training: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = [*OUTSIDE, *([] if is_training else [(ValueError("a=1 must be 2"), "a=1 must be 2")])]
    for error, message in errors:
        fail(error, DictStore(), is_training=is_training, run_dir=tmp_path)
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert line.startswith(f"error: {message}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("CUDA out of memory")])
def test_short_memory_is_not_blamed_on_a_file(error: Exception) -> None:
    with pytest.raises(type(error)), blame(Path("x"), "is wrong", "correct it"):
        raise error


def test_an_unexpected_error_is_called_a_bug_and_its_traceback_is_in_the_log_of_the_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unexpected = [
        KeyError("no\nsuch"),
        PanicException("index out of bounds"),
        UnicodeDecodeError("utf-8", b"", 0, 1, "x"),
    ]
    for number, error in enumerate([*unexpected, ValueError("in training")]):
        fail(error, DictStore(), rank=1, is_training=number == 3, run_dir=tmp_path)
        (line,) = capsys.readouterr().err.strip().splitlines()
        name, log = type(error).__qualname__, tmp_path / "logs" / "rank-00001.log"
        assert line.startswith(f"error: rank 1 on {HOST}: ")
        assert f"{name}: " in line
        assert line.endswith(f": this is a bug in acsgd; please report it with the traceback in {log}")
        assert log.read_text().count("Traceback (most recent call last)") == number + 1
        assert "in run\n" in log.read_text()


def test_a_traceback_without_a_run_directory_is_in_a_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for run_dir in (None, tmp_path / "not there"):
        fail(KeyError("x"), DictStore(), is_training=False, run_dir=run_dir)
        name = capsys.readouterr().err.strip().rpartition(" ")[2]
        assert Path(name).parent == tmp_path
        assert "KeyError: 'x'" in Path(name).read_text()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "not there"))
    fail(KeyError("x"), DictStore(), is_training=False)
    printed = capsys.readouterr().err
    assert "this is a bug in acsgd\nTraceback (most recent call last):\n" in printed
    assert printed.endswith("KeyError: 'x'\n")


def test_before_training_an_error_of_another_rank_ends_this_one_with_code_2(capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 1 waits for rank 0, which fails: it ends within a second, without a message, and cleans up."""
    ended = threading.Event()
    store, exits, cleaned = DictStore(), list[int](), list[bool]()

    def end(code: int) -> None:
        exits.append(code)
        ended.set()

    with report_failure(store, Launch(1, 1, 2, 2), end) as context:
        context.cleanup = lambda: cleaned.append(True)
        board = FailureBoard(client_of(store), 0, 2)
        board.report(FailureReport("rank 0 lacks a file", ()))
        board.publish("rank 0 lacks a file")
        assert ended.wait(10)
    assert (exits, cleaned) == ([2], [True])
    assert capfd.readouterr().err == ""


def test_the_outcome_of_the_set_up_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank looks for it four times per second, to the end of the run."""
    board = FailureBoard(client_of(DictStore()), 0, 2)
    assert board.stop_signal() is None
    assert board.decide("steps") == "steps"
    assert board.stop_signal() is None
    monkeypatch.setattr(StoreClient, "_call", refuse)
    assert board.stop_signal() is None


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


def test_the_error_of_the_rank_at_fault_is_printed_even_if_another_reported_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fail(RunError("waited for rank 1", awaited=[1]), DictStore({1: FailureReport("rank 1: its own fault", ())}))
    assert capsys.readouterr().err == "\nerror: rank 1: its own fault\n"


def test_the_silent_rank_is_named_with_its_host(capsys: pytest.CaptureFixture[str]) -> None:
    store = DictStore({2: FailureReport("2 waited for rank 1", (1,))}, alive=(0,))
    FailureBoard(client_of(store), 1, 4).publish_host()
    fail(RunError("3 waited for rank 2", awaited=[2]), store, rank=3, world_size=4)
    assert capsys.readouterr().err == (
        f"\nerror: 2 waited for rank 1; rank 1 on {HOST} is silent: ended or hanging; see its log\n"
    )


@pytest.mark.parametrize("finished", [True, False])
def test_a_rank_answers_when_another_fails_and_when_it_has_finished(finished: bool) -> None:
    store = DictStore()
    with report_failure(store, Launch(1, 1, 2, 2), refuse) as context:
        context.start_training()
        if not finished:
            store.add("acsgd/failures", 1)
    assert store.check(["acsgd/answer/1"])
    assert store.get("acsgd/host/1") == HOST.encode(), "from the start, whatever groups are open"


def test_without_a_store_the_first_rank_of_each_host_prints_its_error(
    slept: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = RunError("waited for rank 1", awaited=[1]), StoreError("no store")
    for number, error in enumerate(errors):
        for host in (0, 1):
            for local_rank in (1, 0):
                error_file = tmp_path / f"{number}-{host}" / str(local_rank) / "error.json"
                error_file.parent.mkdir(parents=True)
                launch = Launch(2 * host + local_rank, local_rank, 4, 2, error_file=str(error_file))
                fail(error, DeadStore(), launch=launch)
        assert capsys.readouterr().err == 2 * f"\nerror: {error}\n"
    assert max(slept) > WATCH_S  # long enough for the watch thread to print that torchrun has ended


def test_a_store_that_never_answers_does_not_keep_a_rank_from_printing(capsys: pytest.CaptureFixture[str]) -> None:
    store, answer = DictStore(), threading.Event()
    store.add = lambda *_: answer.wait()  # type: ignore[method-assign,assignment]
    fail(RunError("waited for rank 1", awaited=[1]), store)
    answer.set()
    assert capsys.readouterr().err == "\nerror: waited for rank 1\n"


def message_of(reports: dict[int, tuple[int, ...]], silent: tuple[int, ...], first: int) -> str:
    texts = {rank: FailureReport(f"{rank} waited", awaited) for rank, awaited in reports.items()}
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
        pytest.param(
            {0: (1, 2), 1: (0, 2), 2: (0, 1)}, (), 1, "1 waited; all ranks are alive: the network failed", id="network"
        ),
        pytest.param(
            {0: (1,), 1: (0,), 2: (0,), 3: (2,)},
            (),
            3,
            "0 waited; all ranks are alive: the network between host-0 and rank 1 on host-1 failed",
            id="blocked-relay",
        ),
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
