"""Laws of stop signals: the first is recorded; a second interrupt, but not an echo of the first, ends the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType

import pytest
from lib.patience import Patience

from acsgd.errors import ReportedError
from acsgd.failures.signals import REPEAT_S, STOP_SIGNALS, StopSignals, reporting_stop

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
import os, signal, time
from acsgd.failures import signals
signals.CLEAN_UP_S = 0.1
with signals.reporting_stop(), signals.reporting_stop(lambda: "2 of 3 are written"):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    finally:
        time.sleep(60)
"""


def test_a_stop_signal_ends_a_command_that_cannot_clean_up() -> None:
    ended = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (128 + TERM, "\nerror: stopped by SIGTERM; 2 of 3 are written\n")


def fail() -> None:
    raise ValueError


def press(handler: Callable[[int, FrameType | None], None] | None = None) -> None:
    """Send SIGINT to this process, which a command may handle itself, as a chat does, whose replies it ends."""
    if handler is not None:
        signal.signal(INT, handler)
    signal.raise_signal(INT)


@pytest.mark.parametrize(
    ("command", "error", "printed"),
    [
        (fail, ValueError, ""),
        (press, ReportedError, "\nerror: stopped by SIGINT\n"),
        (partial(press, signal.default_int_handler), KeyboardInterrupt, ""),
    ],
)
def test_a_command_reports_stop_signals_that_it_does_not_handle_itself(
    command: Callable[[], None], error: type[BaseException], printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(error), reporting_stop():
        command()
    assert capsys.readouterr().err == printed
