"""Results computed ahead of their use by background threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

K = TypeVar("K")
T = TypeVar("T")


def read_ahead(read: Callable[[K], T], keys: Iterable[K], ahead: int, *, threads: int = 1) -> Generator[T, None, None]:
    """Yield read(key) for each key, in order, computing up to `ahead` results in advance in background threads.

    The keys are read by the thread that takes the results. Errors are raised in the order of the keys. To stop the
    threads early, close the generator.
    """
    pending: deque[Future[T]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="read-ahead")
    try:
        for key in keys:
            pending.append(pool.submit(read, key))
            if len(pending) > ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
