"""Waits for other ranks, direct ones and ones that another thread can end, and the meters that time them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from acsgd.comm.spans import SpanRecorder
from acsgd.errors import WaitInterruptedError

SLICE_S = 0.02
"""Time between two checks of an interruptible poll for an interrupt, seconds."""


POLL_S = 0.0002
"""Seconds between two looks at whether an operation of the device has ended."""


class Work(Protocol):
    """Handle of an asynchronous operation, as torch.distributed returns it."""

    def wait(self) -> bool:
        """Block until the operation is done. Raises RuntimeError if a peer fails or times out."""
        ...


class QueryableWork(Work, Protocol):
    """Work as torch.distributed returns it for NCCL."""

    def is_completed(self) -> bool:
        """Whether the operation is done."""
        ...


class DeviceWork:
    """Handle of an operation of a `Communicator`, in the order of the work of its device.

    `wait` lets later work of the calling thread's stream follow the operation: on a GPU, it returns at once.
    """

    def __init__(self, work: QueryableWork) -> None:
        self._work = work

    def wait(self) -> bool:
        return self._work.wait()

    def is_completed(self) -> bool:
        """Whether the operation is done."""
        return self._work.is_completed()


class HostWork:
    """Handle of an operation of the device whose `wait` blocks the host until it has ended.

    is_aborted: whether its communicator was aborted; `wait` then raises RuntimeError.
    """

    def __init__(self, work: DeviceWork, is_aborted: Callable[[], bool]) -> None:
        self._work = work
        self._is_aborted = is_aborted

    def wait(self) -> bool:
        while not self._work.is_completed():
            time.sleep(POLL_S)
        if self._is_aborted():  # what has been received is not what was sent
            raise RuntimeError("the communicator was aborted")
        return self._work.wait()


class Waits(Protocol):
    """All waits of one rank for others, from one connect to its end. May be used by several threads."""

    def wait(self, work: Work) -> None:
        """Wait for an operation. Raises what its `wait` raises, or WaitInterruptedError."""
        ...

    def poll(self, is_done: Callable[[float], bool], timeout_s: float) -> bool:
        """Wait for a condition for at most `timeout_s` seconds; return whether it is true.

        is_done: waits for at most its argument, seconds, and returns whether the condition is true. Raises
        WaitInterruptedError.
        """
        ...

    def mark(self) -> None:
        """Record that the training thread makes progress. Raises WaitInterruptedError."""
        ...

    def interrupt(self, reason: str) -> None:
        """End all present and later waits with WaitInterruptedError, where this is possible; from any thread."""
        ...

    def on_interrupt(self, callback: Callable[[], None]) -> None:
        """Call a function after an interrupt, in the thread that interrupts; now, if there was one."""
        ...


class DirectWaits:
    """Waits in the thread that calls, at no cost. They last until the operation ends; nothing interrupts them."""

    def wait(self, work: Work) -> None:
        work.wait()

    def poll(self, is_done: Callable[[float], bool], timeout_s: float) -> bool:
        return is_done(min(timeout_s, threading.TIMEOUT_MAX))

    def mark(self) -> None:
        pass

    def interrupt(self, reason: str) -> None:
        pass

    def on_interrupt(self, callback: Callable[[], None]) -> None:
        pass


DIRECT = DirectWaits()


class Activity(NamedTuple):
    """What the training thread does, to detect that it hangs."""

    is_waiting: bool
    """Whether it waits for other ranks."""
    since: float
    """Time of its latest wait, end of a wait, or `mark`; a time.monotonic()."""


class InterruptibleWaits:
    """Waits that `interrupt` ends, for good. Create it in the training thread.

    Each thread that waits has a helper, so threads wait beside each other as with direct waits. A helper that is left
    behind ends when its operation does, at the latest after the timeout of its group, and keeps only that operation.
    """

    def __init__(self) -> None:
        self._activity = Activity(False, time.monotonic())
        self._on_device = deque[DeviceWork]()
        """Operations of the training thread's device that may not have ended: the host waits for it without a note."""
        self._training_thread = threading.get_ident()
        self._helpers: dict[int, _Helper] = {}
        """By thread."""
        self._lock = threading.Lock()
        """Guards the reason, the callbacks and the operations of the device."""
        self._reason: str | None = None
        self._callbacks: list[Callable[[], None]] = []

    @property
    def activity(self) -> Activity:
        """Activity of the training thread; may be read by any thread."""
        is_waiting, since = self._activity
        return Activity(is_waiting or self._device_waits(), since)

    def _device_waits(self) -> bool:
        """Return whether the device of the training thread waits for other ranks, or has work before that."""
        with self._lock:
            while self._on_device and self._on_device[0].is_completed():
                self._on_device.popleft()
            return bool(self._on_device)

    @property
    def reason(self) -> str | None:
        """Reason of the interrupt; None before."""
        return self._reason

    def wait(self, work: Work) -> None:
        thread = threading.get_ident()
        if isinstance(work, DeviceWork):
            self._wait_in_thread(thread, work)
            return
        helper = self._helpers.get(thread) or self._helpers.setdefault(thread, _Helper())
        self._check()  # after the helper is in the table, where `interrupt` finds it
        self._note(thread, is_waiting=True)
        try:
            helper.wait(work)
        except BaseException:
            del self._helpers[thread]  # a signal handler's exception leaves it in the middle of a wait
            helper.close()
            self._check()  # the interrupt comes first: it breaks connections, and so makes operations fail
            raise
        finally:
            self._note(thread, is_waiting=False)
        self._check()

    def _wait_in_thread(self, thread: int, work: DeviceWork) -> None:
        """Wait in the thread whose stream is meant. An interrupt aborts the communicators, which ends the wait."""
        self._check()
        self._note(thread, is_waiting=True)
        try:
            work.wait()
        except RuntimeError:
            self._check()
            raise
        finally:
            self._note(thread, is_waiting=False)
        if thread == self._training_thread:
            self._device_waits()  # drops those that have ended
            with self._lock:
                self._on_device.append(work)
        self._check()

    def poll(self, is_done: Callable[[float], bool], timeout_s: float) -> bool:
        thread, deadline = threading.get_ident(), time.monotonic() + timeout_s
        self._note(thread, is_waiting=True)
        try:
            while True:
                self._check()
                left_s = deadline - time.monotonic()
                if is_done(max(0.0, min(left_s, SLICE_S))):
                    return True
                if left_s <= 0:
                    return False
        finally:
            self._note(thread, is_waiting=False)

    def mark(self) -> None:
        self._check()
        self._note(threading.get_ident(), is_waiting=False)

    def interrupt(self, reason: str) -> None:
        """End all present and later waits with WaitInterruptedError; from any thread. Only the first call counts."""
        with self._lock:
            if self._reason is not None:
                return
            self._reason = reason
            callbacks, self._callbacks = self._callbacks, []
        for helper in list(self._helpers.values()):
            helper.close()
        for callback in callbacks:
            callback()

    def on_interrupt(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if self._reason is None:
                self._callbacks.append(callback)
                return
        callback()

    def _check(self) -> None:
        if self._reason is not None:
            raise WaitInterruptedError(self._reason)

    def _note(self, thread: int, *, is_waiting: bool) -> None:
        if thread == self._training_thread:
            self._activity = Activity(is_waiting, time.monotonic())


class _Helper:
    """A thread that waits for one operation after another on behalf of another thread.

    Locks hand over, since they cost least: each is released to start the other side, and acquired by the other side.
    """

    def __init__(self) -> None:
        self._requested, self._ended = threading.Lock(), threading.Lock()
        self._requested.acquire()
        self._ended.acquire()
        self._work: Work | None = None
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="waits", daemon=True).start()

    def wait(self, work: Work) -> None:
        """Wait until the operation has ended, or the helper is closed. Raises the error of the operation."""
        self._work = work
        del work
        _release(self._requested)
        self._ended.acquire()
        self._work = None
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # whose traceback refers to this frame: a cycle, which would keep the operation for long

    def close(self) -> None:
        """Return from `wait` now, and end the thread after its present operation."""
        self._work = None
        _release(self._requested)
        _release(self._ended)

    def _run(self) -> None:
        while True:
            self._requested.acquire()
            work, self._work = self._work, None
            if work is None:
                return
            try:
                work.wait()
            except BaseException as error:
                self._error = error.with_traceback(None)  # whose frames refer to the operation
            del work
            _release(self._ended)


def _release(lock: threading.Lock) -> None:
    """Release a lock that another thread may release as well."""
    with contextlib.suppress(RuntimeError):
        lock.release()


@dataclass
class Meter:
    """Counts of one step, until `reset`."""

    sent_bytes: int = 0
    in_flight_s: float = 0.0
    """Time from posting a receive or a collective to its end, summed over all, seconds; of sends only the wait."""
    waited_s: float = 0.0
    """The part of `in_flight_s` in which this process was blocked, seconds."""
    trace: SpanRecorder | None = None
    """Records waits and messages while steps are traced."""

    def wait(self, waits: Waits, work: Work, posted_at: float) -> None:
        """Wait for an operation and count its time; posted_at: its start, a time.perf_counter().

        Operations of the device have no known time: this thread does not wait for them.
        """
        if isinstance(work, DeviceWork):
            waits.wait(work)
            return
        before = time.perf_counter()
        waits.wait(work)
        now = time.perf_counter()
        self.waited_s += now - before
        self.in_flight_s += now - posted_at
        if self.trace is not None:
            self.trace.add("wait", f"wait for {self.trace.subject}", before, now)

    def reset(self) -> None:
        """Start the counts of the next step."""
        self.sent_bytes, self.in_flight_s, self.waited_s = 0, 0.0, 0.0
