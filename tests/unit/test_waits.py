"""Laws of waits: they pass on what operations do, and an interrupt ends them."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from lib.patience import NO_LIMIT_S, Patience, stretched

from acsgd.comm.waits import DIRECT, DeviceWork, InterruptibleWaits, Waits
from acsgd.errors import WaitInterruptedError

WAIT_S = NO_LIMIT_S
SOON_S = 5.0
"""Time limit for what takes milliseconds, on a busy machine."""


class Operation:
    """An operation that ends when its event is set, with an error if one is given."""

    def __init__(self, error: BaseException | None = None, *, done: bool = True) -> None:
        self.error = error
        self.begun, self.end = threading.Event(), threading.Event()
        self.threads: list[str] = []
        if done:
            self.end.set()

    def wait(self) -> bool:
        self.threads.append(threading.current_thread().name)
        self.begun.set()
        assert self.end.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        return True


@pytest.fixture
def waits() -> Iterator[InterruptibleWaits]:
    interruptible = InterruptibleWaits()
    yield interruptible
    interruptible.interrupt("the test is over")


@pytest.fixture
def stuck() -> Iterator[Operation]:
    """An operation that does not end before the test does."""
    operation = Operation(done=False)
    yield operation
    operation.end.set()


def helpers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "waits"}


def eventually(condition: Callable[[], bool]) -> bool:
    patience = Patience(SOON_S)
    while not condition() and not patience.is_over:
        time.sleep(0.001)
    return condition()


def interrupt_in(waits: InterruptibleWaits, operation: Operation) -> None:
    """Interrupt the wait for an operation that has not ended."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: operation.begun.wait(WAIT_S) and waits.interrupt("over"))
        with pytest.raises(WaitInterruptedError):
            waits.wait(operation)


def test_operations_are_waited_for_in_order_and_their_errors_are_raised(waits: InterruptibleWaits) -> None:
    order = []
    for number in range(20):
        operation = Operation(RuntimeError(f"peer {number}") if number % 5 == 4 else None, done=False)
        threading.Timer(0.002, operation.end.set).start()
        try:
            waits.wait(operation)
        except RuntimeError as error:
            order.append(str(error))
        else:
            order.append(str(number))
        assert operation.end.is_set()
        assert operation.threads == ["waits"]
    assert order == [f"peer {number}" if number % 5 == 4 else str(number) for number in range(20)]


def test_direct_waits_need_no_thread() -> None:
    operation, before = Operation(), {*threading.enumerate()}
    DIRECT.wait(operation)
    assert operation.threads == [threading.current_thread().name]
    assert before.issuperset(threading.enumerate())
    with pytest.raises(RuntimeError, match="peer"):
        DIRECT.wait(Operation(RuntimeError("peer")))


def test_an_interrupt_ends_the_wait_in_progress_and_all_later_ones(waits: InterruptibleWaits, stuck: Operation) -> None:
    waits.wait(Operation())
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: stuck.begun.wait(WAIT_S) and waits.interrupt("rank 3 has ended"))
        with pytest.raises(WaitInterruptedError, match="rank 3 has ended"):
            waits.wait(stuck)
    assert not stuck.end.is_set()
    waits.interrupt("another reason")
    later: list[Callable[[], object]] = [
        lambda: waits.wait(Operation()),
        lambda: waits.poll(lambda _: True, WAIT_S),
        waits.mark,
    ]
    for wait in later:
        with pytest.raises(WaitInterruptedError, match="rank 3 has ended"):
            wait()


def test_an_interrupt_ends_the_waits_of_all_threads(waits: InterruptibleWaits) -> None:
    """Also one in a poll. Threads wait beside each other: the first does not keep the second from its wait."""
    operations = [Operation(done=False) for _ in range(2)]
    polling = threading.Event()
    with ThreadPoolExecutor(3) as pool:
        ends = [pool.submit(waits.wait, operation) for operation in operations]
        ends.append(pool.submit(waits.poll, lambda seconds: polling.set() or time.sleep(seconds) or False, WAIT_S))
        for begun in (*(operation.begun for operation in operations), polling):
            assert begun.wait(WAIT_S)
        waits.interrupt("over")
        assert all(isinstance(end.exception(WAIT_S), WaitInterruptedError) for end in ends)
        for operation in operations:
            operation.end.set()


def test_after_an_interrupt_an_operation_that_fails_for_it_is_no_failure_of_a_peer(waits: InterruptibleWaits) -> None:
    operation = Operation(RuntimeError("Connection closed by peer"), done=False)
    waits.on_interrupt(operation.end.set)
    interrupt_in(waits, operation)


def test_callbacks_run_once_at_the_interrupt_or_at_once_after_it(waits: InterruptibleWaits) -> None:
    called = []
    waits.on_interrupt(lambda: called.append("before"))
    assert not called
    waits.interrupt("over")
    waits.interrupt("over")
    waits.on_interrupt(lambda: called.append("after"))
    assert called == ["before", "after"]


def test_a_helper_that_is_left_behind_keeps_only_its_operation_and_ends_with_it() -> None:
    waits, stuck, before = InterruptibleWaits(), Operation(done=False), helpers()
    first = Operation(RuntimeError("failed"))
    with pytest.raises(RuntimeError, match="failed"):
        waits.wait(first)
    waited, owner = weakref.ref(first), weakref.ref(waits)
    interrupt_in(waits, stuck)
    assert eventually(lambda: len(helpers() - before) == 1)
    del first, waits
    gc.collect()
    assert waited() is None
    assert owner() is None
    stuck.end.set()
    assert eventually(lambda: not helpers() - before)


@pytest.mark.parametrize("interruptible", [False, True])
def test_a_poll_ends_with_its_condition_or_its_limit(interruptible: bool) -> None:
    waits: Waits = InterruptibleWaits() if interruptible else DIRECT
    event = threading.Event()
    started = time.monotonic()
    assert not waits.poll(event.wait, 0.1)
    assert 0.1 <= time.monotonic() - started < stretched(SOON_S)
    threading.Timer(0.05, event.set).start()
    assert waits.poll(event.wait, float("inf"))


class OnDevice(Operation):
    """An operation of a GPU: `wait` lets the device wait for it, not the host."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return self.end.is_set()


def test_a_training_thread_whose_device_waits_for_others_is_waiting(waits: InterruptibleWaits) -> None:
    """Whatever it does itself, as it reads a number of the device without a note."""
    operations = [OnDevice(done=False) for _ in range(2)]
    for operation in operations:
        waits.wait(DeviceWork(operation))
    waits.mark()
    for operation in operations:
        assert waits.activity.is_waiting
        operation.end.set()
    assert not waits.activity.is_waiting


def test_the_activity_is_that_of_the_training_thread(waits: InterruptibleWaits, stuck: Operation) -> None:
    begin = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(waits.wait, stuck)
        assert stuck.begun.wait(WAIT_S)
        assert waits.activity.since <= begin  # of another thread
        operation = Operation(done=False)
        seen = []
        threading.Timer(0.02, lambda: (seen.append(waits.activity), operation.end.set())).start()
        waits.wait(operation)
        assert seen[0].is_waiting
        assert begin <= seen[0].since <= waits.activity.since
        assert not waits.activity.is_waiting
        since = waits.activity.since
        waits.mark()
        assert waits.activity.since >= since
        stuck.end.set()


def wait_again_and_again(waits: InterruptibleWaits) -> None:
    patience = Patience(SOON_S)
    while not patience.is_over:
        waits.wait(Operation())


def test_many_waits_and_an_interrupt_at_a_random_time_never_hang() -> None:
    for delay in range(60):
        waits = InterruptibleWaits()
        threading.Timer(delay / 60e3, waits.interrupt, ["over"]).start()
        with pytest.raises(WaitInterruptedError):
            wait_again_and_again(waits)
