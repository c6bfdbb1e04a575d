"""The key-value store of a run, with a time limit on every call.

torch's TCPStore has a timeout for connecting and for waiting for a key, but not for the answer to a request: while
torchrun, which hosts the store, is stopped or cut off, a call never returns. Such a call cannot be interrupted either.
So a thread makes the calls, and its callers stop waiting.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from queue import SimpleQueue
from typing import Protocol, TypeVar

from torch.distributed import PrefixStore, TCPStore

from acsgd.comm.waits import DIRECT, Waits
from acsgd.errors import RunError, reason

T = TypeVar("T")


MIN_POLL_S, MAX_POLL_S = 0.002, 0.05
"""Seconds between two reads of the store by a rank that waits for a key; one read takes about 0.2 ms."""
MANY_RANKS = 100
"""Number of ranks from which on each that waits reads the store less often, so that all together do not overload it."""


def poll_pause_s(waited_s: float, ranks: int = 1) -> float:
    """Return the time until a rank that waits for a key reads the store again, seconds.

    It grows with the time that the rank has waited: while ranks start seconds apart, or one of them writes a long file,
    the others would load the store. ranks: number that may wait.
    """
    return min(MAX_POLL_S * max(1.0, ranks / MANY_RANKS), MIN_POLL_S + waited_s / 20)


MAX_VALUE_BYTES = 8 << 20
"""Largest value that TCPStore takes, bytes: its host closes the connection of a client that sends a larger one."""


class StoreError(RunError):
    """The store does not answer, or its host has ended. Usually all ranks have the same error."""


class Store(Protocol):
    """The methods of torch.distributed.Store used here. Each raises RuntimeError once the store's host is gone."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, value: int, /) -> int: ...
    def compare_set(self, key: str, expected: str, value: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def delete_key(self, key: str, /) -> bool: ...


class CallThread:
    """A daemon thread that runs calls, one after another, that may block for ever.

    waits: how callers wait for them.
    """

    def __init__(self, name: str, waits: Waits = DIRECT) -> None:
        self._waits = waits
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._is_blocked = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], T], *, timeout_s: float) -> T:
        """Return what `function` returns, and raise what it raises. May be called by any thread.

        Raises TimeoutError after `timeout_s` seconds, and at once if an earlier call did; WaitInterruptedError.
        """
        if self._is_blocked:
            raise TimeoutError
        future: Future[T] = Future()
        self._calls.put(lambda: _complete(future, function))
        try:
            if not self._waits.poll(lambda seconds: bool(wait([future], seconds).done), timeout_s):
                self._is_blocked = True
                raise TimeoutError
        except BaseException:
            future.cancel()
            raise
        return future.result()

    def close(self, *, within_s: float = 0.0) -> None:
        """End the thread after the calls so far. within_s: maximum time to wait for that, seconds."""
        self._calls.put(None)
        self._thread.join(within_s)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def _complete(future: Future[T], function: Callable[[], T]) -> None:
    """Call a function and store its result or its exception, unless nobody waits for it any more."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


def start_in_thread(function: Callable[[], T]) -> Future[T]:
    """Start to call a function in a daemon thread of its own."""
    future = Future[T]()
    threading.Thread(target=_complete, args=(future, function), name="connect", daemon=True).start()
    return future


def call_in_thread(function: Callable[[], T], *, timeout_s: float, waits: Waits = DIRECT) -> T:
    """Return what `function` returns, called in a thread of its own, which is left behind if the call does not end.

    Raises what it raises, TimeoutError after `timeout_s` seconds, and WaitInterruptedError if `waits` is interrupted.
    """
    thread = CallThread("connect", waits)
    try:
        return thread.call(function, timeout_s=timeout_s)
    finally:
        thread.close()


NONE = "none of these"
"""Value that no key has."""


class StoreClient:
    """A connection to the store of a run. Each call raises StoreError if the store does not answer in time.

    Each raises WaitInterruptedError if the waits of the thread are interrupted.

    thread: makes the calls; timeout_s: limit of one call, seconds.
    """

    def __init__(self, store: Store, thread: CallThread, *, timeout_s: float) -> None:
        self._store = store
        self._thread = thread
        self._timeout_s = timeout_s

    def with_timeout(self, timeout_s: float) -> StoreClient:
        """Return this connection with another limit."""
        return StoreClient(self._store, self._thread, timeout_s=timeout_s)

    def set(self, key: str, value: str) -> None:
        """Store a value. Raises RunError if it is larger than `MAX_VALUE_BYTES`."""
        _check_size(key, value.encode())
        self._call(lambda: self._store.set(key, value))

    def set_once(self, key: str, value: str) -> str:
        """Store a value unless the key exists, and return the value that it has."""
        return self._call(lambda: self._store.compare_set(key, "", value)).decode()

    def set_bytes(self, key: str, value: bytes) -> None:
        """Store a value that need not be text. Raises RunError if it is larger than `MAX_VALUE_BYTES`."""
        _check_size(key, value)
        self._call(lambda: self._store.set(key, value))  # type: ignore[arg-type]  # torch's stub is narrower than torch

    def get(self, key: str) -> str:
        """Return the value of a key that exists."""
        return self.get_bytes(key).decode()

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys that exist, in one request, or, where the store is a file, in one for each."""
        if self._is_extended:
            return self._call(lambda: self._store.multi_get([*keys]))
        return [self.get_bytes(key) for key in keys]

    def get_bytes(self, key: str) -> bytes:
        """Return the value of a key that exists, which need not be text."""
        return self._call(lambda: self._store.get(key))

    def find(self, key: str) -> bytes | None:
        """Return the value of a key, None if there is none. Takes one request, where `get` takes two."""
        value = self._call(lambda: self._store.compare_set(key, NONE, NONE))
        return None if value == NONE.encode() else value

    def add(self, key: str, amount: int) -> int:
        """Add to the integer value of a key, 0 at first, and return the sum."""
        return self._call(lambda: self._store.add(key, amount))

    def append(self, key: str, text: str) -> None:
        """Append to the text of a key, "" at first, a text that no other process appends.

        Where the store is a file, one of two equal texts that are appended at the same time may be lost.
        """
        if self._is_extended:
            self._call(lambda: self._store.append(key, text))  # type: ignore[attr-defined]  # not in torch's stubs
            return
        before, after = "", text
        while (found := self._call(partial(self._store.compare_set, key, before, after)).decode()) != after:
            before, after = found, found + text

    def has(self, *keys: str) -> bool:
        """Return whether all keys exist."""
        return self._call(lambda: self._store.check(list(keys)))

    def delete(self, key: str) -> None:
        """Delete a key."""
        self._call(lambda: self._store.delete_key(key))

    @property
    def _is_extended(self) -> bool:
        """Whether the store appends, and gets the values of several keys at once: all do but a file."""
        return bool(self._store.has_extended_api())  # type: ignore[attr-defined]

    def _call(self, call: Callable[[], T]) -> T:
        try:
            return self._thread.call(call, timeout_s=self._timeout_s)
        except TimeoutError:
            raise StoreError(
                f"{_name(self._store)} does not answer (limit {self._timeout_s:g} s); check the network, and whether "
                "torchrun is stopped there"
            ) from None
        except RuntimeError as error:
            raise StoreError(f"{_name(self._store)} has ended or cannot be reached ({reason(error)})") from error


def _check_size(key: str, value: bytes) -> None:
    if len(value) > MAX_VALUE_BYTES:
        raise RunError(f"{key} has {len(value)} bytes, and the store takes at most {MAX_VALUE_BYTES} per value")


class TextExchange:
    """All-gather of one text per rank, of `size` ranks, through the store.

    The number of requests per rank does not grow with the number of ranks. A rank waits for one key, and gets it with
    the request that finds it: a rank that finds that no other is missing joins the texts there, once each, since most
    are equal. name: of this exchange alone.
    """

    def __init__(self, store: StoreClient, name: str, size: int) -> None:
        self._store = store
        self._name = name
        self._size = size
        self.joined = self._key("joined")
        """Key that exists once the texts are joined."""

    def send(self, rank: int, text: str) -> None:
        """Store the text of a rank."""
        self._store.set(self._key(rank), text)
        self._store.append(self._key("ranks"), f"{rank} ")

    def missing(self) -> list[int]:
        """Return the ranks that have not sent a text. Some rank has."""
        ranks = {*map(int, self._store.get(self._key("ranks")).split())}
        return [rank for rank in range(self._size) if rank not in ranks]

    def join(self) -> list[str]:
        """Join the texts of all ranks, of which none is missing; return them. Several ranks may do so.

        Raises RunError if the distinct texts, compressed, are larger than `MAX_VALUE_BYTES`.
        """
        texts = [text.decode() for text in self._store.get_all([*map(self._key, range(self._size))])]
        numbers: dict[str, int] = {}
        of_ranks = [numbers.setdefault(text, len(numbers)) for text in texts]
        self._store.set_bytes(self.joined, zlib.compress(json.dumps([[*numbers], of_ranks]).encode()))
        return texts

    @staticmethod
    def split(joined: bytes) -> list[str]:
        """Return the texts by rank of the value that `join` has stored."""
        distinct, of_ranks = json.loads(zlib.decompress(joined))
        return [distinct[number] for number in of_ranks]

    def delete(self, rank: int) -> None:
        """Delete what a rank has stored, once all ranks have read the texts."""
        self._store.delete(self._key(rank))
        if rank == 0:
            self._store.delete(self._key("ranks"))
            self._store.delete(self.joined)

    def _key(self, part: object) -> str:
        return f"acsgd/{self._name}/{part}"


def _name(store: Store) -> str:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return f"torchrun's store at {store.host}:{store.port}" if isinstance(store, TCPStore) else "the store of the run"
