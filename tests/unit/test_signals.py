"""A signal asks for an end after the step; only a second interrupt, not an echo of the first, ends at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from acsgd.run import signals
from acsgd.run.signals import REPEAT_S, STOP_SIGNALS, StopSignals

INT, TERM, USR1 = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1


class Ended(BaseException):
    """Stands for the end of the process."""


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Every test leaves the process as it was."""
    handlers = [signal.getsignal(number) for number in STOP_SIGNALS]
    yield
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == handlers
    assert signal.set_wakeup_fd(-1) == -1
    assert not [thread for thread in threading.enumerate() if thread.name == "signals"]


def wait_for_wish(stop: StopSignals) -> str | None:
    deadline = time.monotonic() + 10
    while stop.received is None and time.monotonic() < deadline:
        time.sleep(0.001)
    return stop.received


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_becomes_a_wish(number: signal.Signals) -> None:
    with StopSignals() as stop:
        assert stop.received is None
        os.kill(os.getpid(), number)
        assert wait_for_wish(stop) == number.name


def test_a_wish_is_heard_while_the_main_thread_runs_no_python() -> None:
    """A handler would run only after the lock is there, as after a wait inside gloo."""
    lock, heard = threading.Lock(), []
    with StopSignals() as stop, lock:

        def interrupt() -> None:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            heard.append(wait_for_wish(stop))
            lock.release()

        threading.Thread(target=interrupt).start()
        lock.acquire()
    assert heard == ["SIGUSR1"]


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
        pytest.param([(INT, 0), (USR1, 9), (signal.SIGCHLD, 10)], False, id="others"),
    ],
)
def test_only_a_second_interrupt_ends(
    received: list[tuple[signal.Signals, float]], ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(signals.os, "_exit", end)
    stop, codes = StopSignals(), []
    for number, now in received:
        try:
            stop._record(number, 100.0 + now)
        except Ended as ended:
            codes.append((number, ended.args[0]))
    assert codes == ([(received[-1][0], 130)] if ends else [])
    assert stop.received == received[0][0].name


def test_a_failure_leaves_the_signals_caught_until_it_is_told() -> None:
    former = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    stop = StopSignals()
    with pytest.raises(ZeroDivisionError), stop:
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGTERM) != former[signal.SIGTERM]
    os.kill(os.getpid(), signal.SIGTERM)
    assert wait_for_wish(stop) == "SIGTERM"
    for number, handler in former.items():
        signal.signal(number, handler)
    os.close(signal.set_wakeup_fd(-1))
    stop._listener.join()
