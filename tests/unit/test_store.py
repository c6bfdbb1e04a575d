"""Laws of the store's connection: every call ends in time, with an error that says what to do."""

from __future__ import annotations

import contextlib
import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lib.patience import NO_LIMIT_S, Patience, stretched, wait_until
from lib.proxy import proxied_store

from acsgd import groups
from acsgd.comm import liveness, process_groups
from acsgd.comm.liveness import FAILURES, Heartbeat, PeerWatch
from acsgd.comm.process_groups import ProcessGroups, _GroupStore
from acsgd.comm.store import MAX_VALUE_BYTES, CallThread, StoreClient, StoreError, TextExchange
from acsgd.comm.waits import DIRECT, InterruptibleWaits
from acsgd.errors import RunError, WaitInterruptedError
from acsgd.launch import set_variables

TIMEOUT_S = 0.2
NAME = r"torchrun's store at 127.0.0.1:\d+"
MARGIN_S = 5.0
"""Time limit for what takes no time, seconds on a quiet machine."""


def client_of(store: dist.Store, timeout_s: float) -> StoreClient:
    return StoreClient(store, CallThread("store"), timeout_s=timeout_s)


def elapsed(call: Callable[[], object]) -> float:
    started = time.monotonic()
    call()
    return time.monotonic() - started


def test_the_values_of_many_keys_take_one_request_where_the_store_has_one_for_them(tmp_path: Path) -> None:
    for store, requests in ((dist.HashStore(), 1), (dist.FileStore(str(tmp_path / "store"), 1), 3)):
        client = client_of(store, NO_LIMIT_S)
        for key in "abc":
            client.set(key, f"of {key}")
        with mock.patch.object(StoreClient, "_call", autospec=True, side_effect=StoreClient._call) as called:
            assert client.get_all("abc") == [b"of a", b"of b", b"of c"]
        assert called.call_count == requests


def test_a_key_that_was_found_is_not_looked_for_again() -> None:
    store = dist.HashStore()
    of_groups = _GroupStore(client_of(store, NO_LIMIT_S), NO_LIMIT_S)
    of_groups.set("a", b"1")
    of_groups.wait(["a"])
    with mock.patch.object(StoreClient, "has", side_effect=AssertionError):
        assert of_groups.get("a") == b"1"
    with pytest.raises(RuntimeError, match="a process has not started, or has ended: a b is not in the store"):
        of_groups.wait(["a", "b"], timedelta(seconds=0))


def connect_groups(world_size: int, members: list[list[int]], timeout_s: float) -> list[tuple[str, list[Any]]]:
    """Connect the groups of ranks in threads of this process; return the id of the run and the groups of each.

    Ranks beyond the first two do not start.
    """
    store, timeout = dist.HashStore(), timedelta(seconds=timeout_s)
    ranks = [ProcessGroups(store, DIRECT, rank, world_size, timeout) for rank in range(2)]
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        for rank in ranks:
            stack.callback(rank.close)
        return [*pool.map(lambda rank: rank._connect(members), ranks)]


def test_groups_connect_at_the_same_time_and_exchange_their_addresses_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    connect, all_are_there = process_groups._connect_gloo, threading.Barrier(6, timeout=stretched(MARGIN_S))

    def connect_together(*args: Any) -> dist.ProcessGroupGloo:
        all_are_there.wait()
        return connect(*args)

    monkeypatch.setattr(process_groups, "_connect_gloo", connect_together)
    monkeypatch.setattr(process_groups, "_GroupStore", lambda *_: None)  # which would take requests of its own
    gather = mock.Mock(side_effect=ProcessGroups.gather_before)
    monkeypatch.setattr(ProcessGroups, "gather_before", lambda *args: gather(*args))
    set_variables()
    (run_id, of_first), (same_id, of_second) = connect_groups(2, [[0, 1], [1, 0], [0], [1]], NO_LIMIT_S)
    assert run_id == same_id
    assert gather.call_count == 2, "one exchange of each rank"
    for number, pair in enumerate(zip(of_first, of_second, strict=True)):
        sums = [torch.tensor([number + 1.0]) for _ in pair]
        for work in [group.allreduce([each]) for group, each in zip(pair, sums, strict=True)]:
            work.wait()
        assert sums == [(number + 1.0) * pair[0].size()] * 2


@pytest.mark.parametrize("fault", ["no network interface", "ranks [2] have not started, or have ended"])
def test_a_group_that_cannot_connect_ends_all_with_its_error(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    connect, before = process_groups._connect_gloo, {*threading.enumerate()}

    def connect_or_fail(store: dist.Store, rank: int, size: int, *args: Any) -> dist.ProcessGroupGloo:
        if size == 1 and "interface" in fault:
            raise RuntimeError(fault)
        return connect(store, rank, size, *args)

    monkeypatch.setattr(process_groups, "_connect_gloo", connect_or_fail)
    with pytest.raises(RuntimeError, match=f"^{re.escape(fault)}$"):
        connect_groups(3, [[0, 1, 2], [0], [1]], TIMEOUT_S if "ranks" in fault else NO_LIMIT_S)
    wait_until(lambda: all(thread.name != "connect" for thread in {*threading.enumerate()} - before))


def test_a_call_returns_raises_or_times_out_and_then_all_calls_fail_at_once() -> None:
    thread, release = CallThread("test"), threading.Event()
    assert thread.call(lambda: 3, timeout_s=NO_LIMIT_S) == 3
    with pytest.raises(KeyError):
        thread.call(lambda: {}["absent"], timeout_s=NO_LIMIT_S)
    done = []
    with pytest.raises(TimeoutError):
        thread.call(release.wait, timeout_s=TIMEOUT_S)
    with pytest.raises(TimeoutError):
        thread.call(lambda: done.append(1), timeout_s=3600)
    release.set()
    thread.close()
    assert not done


def test_a_call_that_was_queued_behind_a_blocked_one_is_not_made_later() -> None:
    thread, made = CallThread("test"), list[int]()
    blocked, release, ended = threading.Event(), threading.Event(), threading.Event()

    def block() -> None:
        blocked.set()
        release.wait()

    first = threading.Thread(target=lambda: thread.call(block, timeout_s=NO_LIMIT_S))
    first.start()
    assert blocked.wait(NO_LIMIT_S)
    with pytest.raises(TimeoutError):
        thread.call(lambda: made.append(1), timeout_s=TIMEOUT_S)
    release.set()
    first.join()
    thread._calls.put(ended.set)
    assert ended.wait(NO_LIMIT_S)
    assert not made


def test_a_client_reads_what_another_wrote() -> None:
    with proxied_store() as proxy:
        one, other = (client_of(dist.TCPStore("127.0.0.1", proxy.port), NO_LIMIT_S) for _ in range(2))
        one.set("text", "é")
        assert one.has("text")  # answered after the set, which itself has no answer: another connection may be faster
        assert other.has("text")
        assert other.get("text") == "é"
        assert not other.has("text", "absent")
        assert [one.add("count", 2), other.add("count", 1)] == [2, 3]
        other.delete("text")
        assert not one.has("text")


@pytest.mark.parametrize("name", ["get", "has", "add", "delete"])
def test_a_store_that_stops_answering_raises_in_time_and_then_at_once(name: str) -> None:
    with proxied_store() as proxy:
        store = dist.PrefixStore("hosts", dist.PrefixStore("attempt-0", dist.TCPStore("127.0.0.1", proxy.port)))
        client = client_of(store, NO_LIMIT_S)
        client.set("key", "1")
        assert client.get("key") == "1"
        proxy.freeze()

        def call(limit_s: float) -> None:
            arguments = ("key", 1) if name == "add" else ("key",)
            with pytest.raises(StoreError, match=rf"{NAME} does not answer \(limit {limit_s:g} s\); check the"):
                getattr(client.with_timeout(limit_s), name)(*arguments)

        assert TIMEOUT_S <= elapsed(lambda: call(TIMEOUT_S)) < stretched(MARGIN_S)
        assert elapsed(lambda: call(3600)) < stretched(MARGIN_S)


def test_a_store_whose_host_has_ended_is_one_sentence() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = client_of(dist.TCPStore("127.0.0.1", store.port), NO_LIMIT_S)
    client.set("key", "")
    del store
    for _ in range(2):
        with pytest.raises(StoreError, match=rf"{NAME} has ended or cannot be reached") as error:
            client.has("key")
        assert "Error" not in str(error.value)


def test_heartbeats_advance_until_the_rank_has_ended() -> None:
    client = client_of(dist.HashStore(), NO_LIMIT_S)
    key = "acsgd/heartbeat/3"
    beating = Heartbeat(client, 3, interval_s=0.001)
    seen, patience = set(), Patience(MARGIN_S)
    while len(seen) < 5 and not patience.is_over:
        seen.add(client.get(key))
    beating.close()
    assert len(seen) == 5
    last = client.get(key)
    time.sleep(0.01)
    assert client.get(key) == last


def check_until_it_raises(watch: PeerWatch, ranks: list[int]) -> None:
    patience = Patience(MARGIN_S)
    while not patience.is_over:
        watch.check(ranks)
        time.sleep(0.001)


def wait_for(watch: PeerWatch, ranks: list[int]) -> RunError:
    with pytest.raises(RunError) as error:
        check_until_it_raises(watch, ranks)
    return error.value


def test_a_rank_without_heartbeats_is_found_by_those_that_wait_for_it() -> None:
    client = client_of(dist.HashStore(), NO_LIMIT_S)
    beating = Heartbeat(client, 1, interval_s=0.005)
    Heartbeat(client, 2, interval_s=0.005).close()
    started = time.monotonic()
    error = wait_for(PeerWatch(client, TIMEOUT_S), [1, 2])
    assert TIMEOUT_S <= time.monotonic() - started < stretched(MARGIN_S)
    assert str(error) == "no heartbeat of ranks [2] for 0.2 s (run.timeout)"
    assert error.awaited == (2,)
    beating.close()
    assert wait_for(PeerWatch(client, TIMEOUT_S), [1]).awaited == (1,)


def test_after_a_stop_signal_a_dead_rank_is_found_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exchange waits for a rank that has ended in silence; the signal arrives in the middle of it."""
    client, now = client_of(dist.HashStore(), NO_LIMIT_S), [0.0]
    world: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 3)
    stopped = groups.Groups(
        {}, world, world, client, 600.0, "", DIRECT, None, cast(Any, SimpleNamespace(is_stopping=threading.Event()))
    )

    client.set("acsgd/heartbeat/2", "0")

    def sleep(seconds: float) -> None:
        now[0] += seconds
        client.set("acsgd/heartbeat/1", str(now[0]))  # rank 1 lives
        if now[0] > 100.0:
            stopped.expect_stop()

    monkeypatch.setattr(liveness, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    with pytest.raises(RunError, match=r"no heartbeat of ranks \[2\] for 10 s \(after a stop signal\)") as error:
        stopped.all_gather_text("last", "0", timeout_s=NO_LIMIT_S)
    assert error.value.awaited == (2,)
    assert 100.0 < now[0] < 102.0


def wait_for_late_ranks(monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int, late: range, *, joins: bool) -> int:
    """Let a rank exchange texts with others, of which some are 20 s late, and the last joins the texts, or ends.

    Returns the number of its requests to the store.
    """
    store, now = dist.HashStore(), [0.0]
    client, waiting = client_of(store, NO_LIMIT_S), client_of(store, NO_LIMIT_S)
    exchange = TextExchange(client, "late/0", ranks)
    for other in {*range(ranks)} - {*late, rank}:
        exchange.send(other, str(other))

    def sleep(seconds: float) -> None:
        now[0] += seconds
        for other in late:
            store.set(f"acsgd/heartbeat/{other}", str(now[0]))
        if now[0] - seconds < 20.0 <= now[0]:
            for other in late:
                exchange.send(other, str(other))
            if joins:
                exchange.join()

    requests = mock.Mock(side_effect=waiting._call)
    monkeypatch.setattr(waiting, "_call", requests)
    monkeypatch.setattr(liveness, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    world: Any = SimpleNamespace(rank=lambda: rank, size=lambda: ranks)
    opened = cast(Any, SimpleNamespace(is_stopping=threading.Event()))
    own = groups.Groups({}, world, world, waiting, NO_LIMIT_S, "", DIRECT, None, opened)
    assert own.all_gather_text("late", str(rank), timeout_s=100.0) == [*map(str, range(ranks))]
    return requests.call_count


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("joins", [True, False])
def test_waiting_for_others_takes_the_same_requests_however_many_there_are(
    rank: int, joins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For one of them or for half; also if the last one, which joins the texts, ends before it has."""
    one, one_of_many = (wait_for_late_ranks(monkeypatch, rank, n, range(1, 2), joins=joins) for n in (4, 100))
    half, half_of_many = (wait_for_late_ranks(monkeypatch, rank, n, range(1, n // 2), joins=joins) for n in (6, 100))
    assert one == one_of_many == half == half_of_many < 20 * 20 + 4 * 20 / 0.5 + 100, "fewer pauses at first"
    thousand = wait_for_late_ranks(monkeypatch, rank, 1000, range(1, 2), joins=joins)
    assert thousand < one / 3, "it pauses for longer: 1000 ranks together read 2000 times per second"


def gather_before(monkeypatch: pytest.MonkeyPatch, store: dist.Store, rank: int, *, is_late: bool) -> list[str]:
    """Gather the texts of two ranks, of which the other one sends while this one waits, if ever, and ends then."""
    now = [0.0]
    own = ProcessGroups(store, DIRECT, rank, 2, timedelta(seconds=60))
    other = TextExchange(own.client, "domain", 2)

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if is_late and now[0] - seconds < 5.0 <= now[0]:
            other.send(1 - rank, f"of {1 - rank}")

    monkeypatch.setattr(liveness, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    with contextlib.closing(own._thread):
        texts = own.gather_before("domain", f"of {rank}")
        assert 5.0 <= now[0] < 7.0
        return texts


@pytest.mark.parametrize("rank", [0, 1])
def test_texts_before_the_groups_are_open_arrive_also_if_the_last_sender_ends(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gather_before(monkeypatch, dist.HashStore(), rank, is_late=True) == ["of 0", "of 1"]
    with pytest.raises(RuntimeError, match=rf"^ranks \[{1 - rank}\] have not started, or have ended$"):
        gather_before(monkeypatch, dist.HashStore(), rank, is_late=False)


class EndedStore(dist.HashStore):
    """A store whose host ends once the ranks have sent their texts."""

    def get(self, key: str) -> bytes:
        raise RuntimeError("Broken pipe")

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return self.get(key)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_ends_before_the_groups_are_open_is_named(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError, match=r"^the store of the run has ended or cannot be reached \(Broken pipe\)$"):
        gather_before(monkeypatch, EndedStore(), rank, is_late=True)


def test_equal_texts_are_joined_once_and_too_long_ones_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    text = random.Random(0).randbytes(40_000).hex()  # two of them do not fit into a window of zlib
    client = client_of(dist.HashStore(), NO_LIMIT_S)
    sizes = []
    for ranks in (1, 50):
        exchange = TextExchange(client, f"long/{ranks}", ranks)
        for rank in range(ranks):
            exchange.send(rank, text if rank % 2 == 0 else "")
        texts, joined = exchange.join(), client.get_bytes(exchange.joined)
        assert texts == exchange.split(joined) == [text if rank % 2 == 0 else "" for rank in range(ranks)]
        sizes.append(len(joined))
    assert sizes[1] < sizes[0] + 100
    monkeypatch.setattr("acsgd.comm.store.MAX_VALUE_BYTES", 100_000)
    client.set("key", "x" * 100_000)
    with pytest.raises(RunError, match=r"^key has 100002 bytes, and the store takes at most 100000 per value$"):
        client.set("key", "é" * 50_001)


def test_the_limit_of_a_value_is_that_of_torch() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.set("key", "x" * MAX_VALUE_BYTES)
    assert len(server.get("key")) == MAX_VALUE_BYTES
    with pytest.raises(RuntimeError):
        server.compare_set("key", "", "x" * (MAX_VALUE_BYTES + 1))


@pytest.mark.parametrize("kind", [dist.HashStore, dist.FileStore])
def test_texts_that_are_appended_at_once_are_all_there(kind: type[Any], tmp_path: Path) -> None:
    store = kind() if kind is dist.HashStore else kind(str(tmp_path / "store"), 4)
    ranks = [partial(client_of(store, NO_LIMIT_S).append, "key") for _ in range(4)]
    with ThreadPoolExecutor(len(ranks)) as pool:
        for number in range(10):
            for added in [pool.submit(append, f"{number}/{rank} ") for rank, append in enumerate(ranks)]:
                added.result()
    client = client_of(store, NO_LIMIT_S)
    assert client.find("key") == store.get("key")
    assert client.find("no key") is None
    assert not store.check(["no key"])
    found = store.get("key").decode().split()
    assert sorted(found) == sorted(f"{number}/{rank}" for number in range(10) for rank in range(4))


def test_a_reported_failure_ends_the_wait_for_ranks_that_live() -> None:
    client = client_of(dist.HashStore(), NO_LIMIT_S)
    beating = Heartbeat(client, 1, interval_s=0.005)
    watch = PeerWatch(client, TIMEOUT_S)
    client.add(FAILURES, 1)
    error = wait_for(watch, [1])
    beating.close()
    assert str(error) == "a rank failed, and ranks [1] did not answer"
    assert error.awaited == (1,)


def test_an_interrupt_ends_a_call_that_blocks() -> None:
    waits, release = InterruptibleWaits(), threading.Event()
    thread = CallThread("test", waits)
    threading.Timer(0.05, waits.interrupt, ["rank 1 has ended"]).start()
    for blocked in (True, False):
        with pytest.raises(WaitInterruptedError, match="rank 1 has ended"):
            thread.call(lambda: release.wait(60.0 if blocked else 0.0), timeout_s=NO_LIMIT_S)  # noqa: B023
    release.set()
    thread.close()
