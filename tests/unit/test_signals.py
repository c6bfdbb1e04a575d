"""Laws of stop signals: the first is recorded; a second interrupt, but not an echo of the first, ends the process."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from lib.patience import Patience

from acsgd.errors import ReportedError
from acsgd.failures import signals
from acsgd.failures.signals import REPEAT_S, STOP_SIGNALS, StopSignals, build_until_stopped, reporting_stop
from acsgd.io.files import atomic

ROOT = str(Path(__file__).parents[2])
INT, TERM, USR1, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP


def refuse(code: int) -> None:
    raise AssertionError(f"the process would end with code {code}")


@pytest.fixture(autouse=True)
def _check_restored() -> Iterator[None]:
    """Check that a test leaves no handler, no wakeup fd and no thread. SIGHUP: not ignored, as it is under nohup."""
    former = signal.signal(HUP, signal.SIG_DFL)
    handlers = [signal.getsignal(number) for number in STOP_SIGNALS]
    yield
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == handlers
    assert signal.set_wakeup_fd(-1) == -1
    assert not [thread for thread in threading.enumerate() if thread.name == "signals"]
    signal.signal(HUP, former)


def wait_for_signal(stop: StopSignals) -> str | None:
    patience = Patience(10.0)
    while stop.received is None and not patience.is_over:
        time.sleep(0.001)
    return stop.received


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_recorded(number: signal.Signals) -> None:
    with StopSignals(refuse) as stop:
        assert stop.received is None
        os.kill(os.getpid(), number)
        assert wait_for_signal(stop) == number.name


def test_a_hangup_that_nohup_ignores_stays_ignored() -> None:
    former = signal.signal(HUP, signal.SIG_IGN)
    try:
        with StopSignals(refuse) as stop:
            os.kill(os.getpid(), HUP)
            os.kill(os.getpid(), USR1)
            assert wait_for_signal(stop) == "SIGUSR1"
        assert signal.getsignal(HUP) is signal.SIG_IGN
    finally:
        signal.signal(HUP, former)


def test_a_signal_is_recorded_while_the_main_thread_runs_no_python() -> None:
    """A Python handler would run only once the lock is acquired, or a wait inside gloo has ended."""
    lock, recorded = threading.Lock(), []
    with StopSignals(refuse) as stop, lock:

        def interrupt() -> None:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            recorded.append(wait_for_signal(stop))
            lock.release()

        threading.Thread(target=interrupt).start()
        lock.acquire()
    assert recorded == ["SIGUSR1"]


@pytest.mark.parametrize(
    ("received", "ends"),
    [
        pytest.param([(INT, 0), (INT, REPEAT_S)], True, id="second"),
        pytest.param([(INT, 0), (TERM, REPEAT_S)], True, id="second-through-torchrun"),
        pytest.param([(TERM, 0), (INT, 9), (INT, 10)], True, id="second-after-a-term"),
        pytest.param([(INT, 0), (INT, REPEAT_S - 0.1)], False, id="echo"),
        pytest.param([(INT, 0), (INT, 0.1), (INT, REPEAT_S)], True, id="echo-and-second"),
        pytest.param([(TERM, 0), (TERM, 9)], False, id="two-terms"),
        pytest.param([(TERM, 0), (INT, 9)], False, id="first-after-a-term"),
        pytest.param([(INT, 0), (USR1, 9), (HUP, 9), (signal.SIGCHLD, 10)], False, id="others"),
        pytest.param([(HUP, 0), (HUP, 0.1), (TERM, 9)], False, id="hangups-through-torchrun"),
    ],
)
def test_only_a_second_interrupt_ends_the_process(received: list[tuple[signal.Signals, float]], ends: bool) -> None:
    codes = list[tuple[int, int]]()
    stop = StopSignals(lambda code: codes.append((number, code)))
    for number, now in received:
        stop._record(number, 100.0 + now)
    assert codes == ([(received[-1][0], 130)] if ends else [])
    assert stop.received == received[0][0].name


def test_after_an_exception_signals_stay_caught_for_the_failure_report() -> None:
    former = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    stop = StopSignals(refuse)
    with pytest.raises(ZeroDivisionError), stop:
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGTERM) != former[signal.SIGTERM]
    os.kill(os.getpid(), signal.SIGTERM)
    assert wait_for_signal(stop) == "SIGTERM"
    for number, handler in former.items():
        signal.signal(number, handler)
    os.close(signal.set_wakeup_fd(-1))
    stop._listener.join()


STUCK = """
import os, sys, time
from acsgd.failures import signals
number, clean_up_s = int(sys.argv[1]), float(sys.argv[2])
with signals.reporting_stop(), signals.reporting_stop(lambda: "2 of 3 are written", clean_up_s=clean_up_s):
    while True:
        try:
            os.kill(os.getpid(), number)
            time.sleep(0.02)
        except BaseException:
            pass
"""


@pytest.mark.parametrize(("number", "clean_up_s", "code"), [(TERM, 0.1, 128 + TERM), (INT, 60.0, 128 + INT)])
def test_a_command_that_cannot_clean_up_is_ended_after_it_says_so(number: int, clean_up_s: float, code: int) -> None:
    """By the limit or, however often it is pressed before, by a second Ctrl-C."""
    command = [sys.executable, "-c", STUCK, str(number), str(clean_up_s)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    name = signal.Signals(number).name
    note = f"{name}: cleaning up; Ctrl-C ends this at once\n"
    assert (ended.returncode, ended.stderr) == (code, f"{note}\nerror: stopped by {name}; 2 of 3 are written\n")


def fail() -> None:
    raise ValueError


def press(handler: Callable[[int, FrameType | None], None] | None = None) -> None:
    """Send SIGINT to this process, which a command may handle itself, as a chat does, whose replies it ends."""
    if handler is not None:
        signal.signal(INT, handler)
    signal.raise_signal(INT)


def press_and_fail() -> None:
    """Fail as a library does that takes the exception for one of its own."""
    try:
        press()
    finally:
        fail()


def press_and_continue() -> None:
    """Continue as a library does that catches everything, and Python after a callback or a finalizer."""
    with contextlib.suppress(BaseException):
        press()


STOPPED = "\nerror: stopped by SIGINT\n"


@pytest.mark.parametrize(
    ("command", "error", "printed"),
    [
        (fail, ValueError, ""),
        (press, ReportedError, STOPPED),
        (press_and_fail, ReportedError, STOPPED),
        (press_and_continue, ReportedError, STOPPED),
        (partial(press, signal.default_int_handler), KeyboardInterrupt, ""),
    ],
)
def test_a_command_reports_stop_signals_that_it_does_not_handle_itself(
    command: Callable[[], None], error: type[BaseException], printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(error), reporting_stop():
        command()
    assert capsys.readouterr().err == printed


def test_a_stopped_command_reports_what_is_left_once_it_has_cleaned_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, kept = tmp_path / "target", tmp_path / ".acsgd-target.resumable"
    notes, has_noted, rmtree = list[str](), threading.Event(), shutil.rmtree

    def note(text: str) -> None:
        notes.append(text)
        has_noted.set()

    def remove_slowly(*args: Any, **options: Any) -> None:
        has_noted.wait(60.0)
        rmtree(*args, **options)

    def stop(path: Path) -> None:
        path.touch()
        press()

    def outcome_of(build: Callable[[Path], None], *, resumable: bool = False) -> tuple[str, list[str]]:
        with pytest.raises(ReportedError):
            build_until_stopped(target, build, resumable=resumable)
        return capsys.readouterr().err.removeprefix("\nerror: stopped by SIGINT; "), os.listdir(tmp_path)

    monkeypatch.setattr(signals, "print_note", note)
    assert outcome_of(stop) == ("nothing was written\n", [])
    with monkeypatch.context() as patch:
        patch.setattr(signals, "NOTE_S", 0.05)
        patch.setattr(atomic.shutil, "rmtree", remove_slowly)
        assert outcome_of(stop) == ("nothing was written\n", [])
        assert "SIGINT: cleaning up; Ctrl-C ends this at once" in notes
    continued = f"start the same command again to continue, or remove {kept}\n"
    assert outcome_of(stop, resumable=True) == (continued, [kept.name])
    monkeypatch.setattr(atomic, "fsync_directory", lambda _: press())  # after the rename
    assert outcome_of(Path.touch, resumable=True) == (f"{target} is complete\n", ["target"])


def test_a_build_that_is_cut_is_named(tmp_path: Path) -> None:
    target, described = tmp_path / "target", list[tuple[str, Path]]()

    def build(path: Path) -> None:
        path.touch()
        described.append((atomic.describe_stopped_build(target), path.parent))

    assert atomic.build_atomically(target, build)
    assert described == [(f"{described[0][1]} is left; remove it", described[0][1])]


AMONG_IMPORTS = """
import os, sys, time
from acsgd.command import main

class Signal:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), number)
            time.sleep(60)

module, number = sys.argv[1], int(sys.argv[2])
sys.argv[1:] = sys.argv[3:]
sys.meta_path.insert(0, Signal())
main()
print("done")
"""
TRAINING = "--model.name m --data.sources demo --data.sequence 8 --data.batch 2 --optim.lr 1 --optim.steps 3"


@pytest.mark.parametrize(
    ("module", "number", "line", "when"),
    [
        ("tyro", INT, "convert from-hf m b", " before the start"),
        ("acsgd.shards.convert", USR1, "convert from-hf m b", ""),
        ("acsgd.commands.evaluation.command", TERM, "eval m --data demo --sequence 8", " before the start"),
        ("acsgd.main", USR1, f"train {TRAINING}", " before the start"),
    ],
)
def test_a_stop_signal_among_the_imports_is_reported_and_ends_the_command(
    module: str, number: int, line: str, when: str, tmp_path: Path
) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")  # a path that is no model is refused before the imports
    command, environment = [sys.executable, "-c", AMONG_IMPORTS, module, str(number), *line.split()], {**os.environ}
    environment["PYTHONPATH"] = ROOT
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    text = f"\nerror: stopped by {signal.Signals(number).name}{when}; nothing was written\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (128 + number, "", text)
