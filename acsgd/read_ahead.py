"""Results computed ahead of their use by a background thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

K = TypeVar("K")
T = TypeVar("T")


def read_ahead(read: Callable[[K], T], keys: Iterable[K], ahead: int) -> Generator[T, None, None]:
    """Yield read(key) for each key, in order, computing up to `ahead` results in advance in one thread.

    Errors are raised in the order of the keys. To stop the thread early, close the generator.
    """
    pending: deque[Future[T]] = deque()
    pool = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
    try:
        for key in keys:
            pending.append(pool.submit(read, key))
            if len(pending) > ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
