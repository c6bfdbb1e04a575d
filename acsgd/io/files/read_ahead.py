"""Results computed ahead of their use by background threads."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import Generic, TypeVar

from acsgd.comm.waits import DIRECT, Waits

K = TypeVar("K")
T = TypeVar("T")


class ReadAhead(Iterator[T], Generic[K, T]):
    """Iterator over read(key) for each key, in order, with up to `ahead` results computed in advance in threads.

    The keys are read by the thread that takes the results. Errors are raised in the order of the keys, and end the
    iteration. `close` stops the threads early, and waits for the results in the making. waits: for a result.
    """

    def __init__(
        self, read: Callable[[K], T], keys: Iterable[K], ahead: int, *, threads: int = 1, waits: Waits = DIRECT
    ) -> None:
        self._read = read
        self._keys = iter(keys)
        self._ahead = ahead
        self._waits = waits
        self._pending: deque[Future[T]] = deque()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="read-ahead")

    def __next__(self) -> T:
        self._fill()
        if not self._pending:
            self.close()
            raise StopIteration
        future = self._pending.popleft()
        try:
            self._waits.poll(lambda seconds: bool(wait([future], seconds).done), math.inf)
            return future.result()
        except BaseException:
            self.close()
            raise

    def has(self, count: int, timeout_s: float = 0.0) -> bool:
        """Return whether the next `count` results are there, after at most some seconds.

        If the seconds are more than 0, starts to compute them, and all that are left suffice.
        """
        if timeout_s:
            self._fill()
        needed = [*islice(self._pending, count)]
        if len(needed) < count and not timeout_s:
            return False
        return self._waits.poll(lambda seconds: not wait(needed, seconds).not_done, timeout_s)

    @property
    def has_failed(self) -> bool:
        """Whether the next result is there and is an error."""
        return bool(self._pending) and self._pending[0].done() and self._pending[0].exception() is not None

    def close(self) -> None:
        """End the iteration."""
        self._keys, self._pending = iter(()), deque()
        self._pool.shutdown(cancel_futures=True)

    def _fill(self) -> None:
        for key in islice(self._keys, self._ahead + 1 - len(self._pending)):
            self._pending.append(self._pool.submit(self._read, key))


def read_ahead(
    read: Callable[[K], T], keys: Iterable[K], ahead: int, *, threads: int = 1, waits: Waits = DIRECT
) -> Generator[T, None, None]:
    """Yield the results of a ReadAhead, which is closed with this generator."""
    with contextlib.closing(ReadAhead(read, keys, ahead, threads=threads, waits=waits)) as results:
        yield from results
