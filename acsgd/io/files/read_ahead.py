"""Results computed ahead of their use by background threads."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from acsgd.comm.waits import DIRECT, Waits

K = TypeVar("K")
T = TypeVar("T")


def read_ahead(
    read: Callable[[K], T], keys: Iterable[K], ahead: int, *, threads: int = 1, waits: Waits = DIRECT
) -> Generator[T, None, None]:
    """Yield read(key) for each key, in order, computing up to `ahead` results in advance in background threads.

    The keys are read by the thread that takes the results. Errors are raised in the order of the keys. To stop the
    threads early, close the generator, which waits for the results in the making. waits: for a result.
    """

    def take() -> T:
        future = pending.popleft()
        waits.poll(lambda seconds: bool(wait([future], seconds).done), math.inf)
        return future.result()

    pending: deque[Future[T]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="read-ahead")
    try:
        for key in keys:
            pending.append(pool.submit(read, key))
            if len(pending) > ahead:
                yield take()
        while pending:
            yield take()
    finally:
        pool.shutdown(cancel_futures=True)
