"""Laws of results computed ahead of their use."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from lib.patience import NO_LIMIT_S

from acsgd.io.files import read_ahead as module
from acsgd.io.files.read_ahead import read_ahead

TIMEOUT_S = NO_LIMIT_S


@pytest.mark.parametrize("threads", [1, 3])
def test_results_and_errors_have_the_order_of_the_keys(threads: int) -> None:
    later = threading.Event()

    def read(key: int) -> int:
        if key == 1 and threads > 1:  # another thread is faster
            assert later.wait(TIMEOUT_S)
        if key == 2:
            later.set()
        if key == 4:
            raise ValueError(str(key))
        return key

    results = read_ahead(read, range(9), 3, threads=threads)
    assert [next(results) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="4"):
        next(results)
    assert list(results) == []


def test_closing_early_computes_nothing_that_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, closing = threading.Event(), threading.Event()
    read: list[int] = []

    class ClosedBeforeItsThreadsEnd(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            closing.set()
            super().shutdown(wait=wait)

    def slow(key: int) -> int:
        read.append(key)
        if key == 1:
            begun.set()
            assert closing.wait(TIMEOUT_S)
        return key

    monkeypatch.setattr(module, "ThreadPoolExecutor", ClosedBeforeItsThreadsEnd)
    results = read_ahead(slow, range(9), 3)
    assert next(results) == 0
    assert begun.wait(TIMEOUT_S)
    results.close()
    assert read == [0, 1]
