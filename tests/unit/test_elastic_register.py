"""Laws of the register of views: an epoch has one view, whichever hosts record at once and whatever gets lost."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from acsgd.elastic.host.register import KEPT, DiskRegister, NoMajorityError, ViewRegister
from acsgd.elastic.membership.messages import Ballot, Decided, DiskVote, Host, View, VoteRequest
from acsgd.elastic.membership.plan import Plan


def view(epoch: int, reason: str, voters: tuple[str, ...] = ()) -> View:
    return View(epoch, (Host("a", "h:1", "a"),), Plan(1), reason, voters=voters)


async def record_at_once(directory: Path, seed: int, *, disks: int, hosts: int) -> list[View]:
    """Let several hosts record views of one epoch, while messages are lost; return what each gets.

    Host n sees disk n modulo the number of disks.
    """
    choose, names = random.Random(seed), [str(disk) for disk in range(disks)]
    loss = choose.choice((0.0, 0.1, 0.4))
    registers: list[ViewRegister] = []
    delivered: set[asyncio.Task[None]] = set()

    async def deliver(sender: int, disk: str, request: VoteRequest) -> None:
        for _ in range(choose.randrange(6)):
            await asyncio.sleep(0)
        if choose.random() < loss:
            return
        answer = DiskRegister(directory / disk).answer(request)
        if choose.random() < loss:
            return
        if answer is not None:
            registers[sender].take(disk, answer)

    def send(sender: int, disk: str, request: VoteRequest) -> None:
        delivered.add(task := asyncio.ensure_future(deliver(sender, disk, request)))
        task.add_done_callback(delivered.discard)

    async def record(number: int) -> View:
        while True:
            try:
                return await registers[number].record(view(1, f"of host {number}"), names, None)
            except NoMajorityError:
                await asyncio.sleep(choose.uniform(0, 0.01))

    for number in range(hosts):
        disk = names[number % disks]
        register = ViewRegister(
            Host(f"id{number}", "h:1", disk),
            DiskRegister(directory / disk),
            lambda disk, request, sender=number: send(sender, disk, request),  # type: ignore[misc]
            timeout_s=0.01,
        )
        registers.append(register)
    return await asyncio.gather(*(record(number) for number in range(hosts)))


@pytest.mark.parametrize(("disks", "hosts"), [(1, 3), (2, 2), (3, 5)])
def test_hosts_that_record_at_once_get_the_same_view(disks: int, hosts: int, tmp_path: Path) -> None:
    for seed in range(3):
        recorded = asyncio.run(record_at_once(tmp_path / str(seed), seed, disks=disks, hosts=hosts))
        assert len({each.reason for each in recorded}) == 1, f"seed {seed}: {recorded}"


def test_a_minority_records_nothing_and_a_later_ballot_keeps_the_view_of_an_earlier_one(tmp_path: Path) -> None:
    voters = ("a", "b", "c")

    def register(disk: str) -> ViewRegister:
        return ViewRegister(Host(disk, "h:1", disk), DiskRegister(tmp_path / disk), lambda *_: None, timeout_s=0.01)

    with pytest.raises(NoMajorityError, match="1 of 3 hosts"):
        asyncio.run(register("b").record(view(8, "of b"), voters, ""))
    assert DiskRegister(tmp_path / "b").newest() is None
    assert asyncio.run(register("a").record(view(8, "of a"), ("a",), "")) == view(8, "of a")
    late = DiskRegister(tmp_path / "a").answer(VoteRequest(8, Ballot(9, "b"), view(8, "of b")))
    assert late == Decided(view(8, "of a")), "a view that is recorded does not change"


def test_a_host_that_tries_again_writes_no_further_votes_and_keeps_to_its_view(tmp_path: Path) -> None:
    directory, voting = tmp_path / "a", set[str]()

    def send(disk: str, request: VoteRequest) -> None:
        if request.view is None or disk in voting:
            vote = DiskRegister(tmp_path / disk).answer(request)
            assert isinstance(vote, DiskVote)
            register.take(disk, vote)

    register = ViewRegister(Host("a", "h:1", "a"), DiskRegister(directory), send, timeout_s=0.01)

    async def record() -> View:
        for _ in range(3):
            with pytest.raises(NoMajorityError):
                await register.record(view(8, "first"), ("b", "a", "c"), "")
        voting.add("b")
        return await register.record(view(8, "another"), ("b", "a", "c"), "")

    assert asyncio.run(record()) == view(8, "first"), "a ballot has one view"
    assert len([*directory.glob("*.vote")]) == 2, "a promise and a vote"


def test_the_number_of_votes_on_a_disk_does_not_slow_down_the_next(tmp_path: Path) -> None:
    disk = DiskRegister(tmp_path)
    disk.answer(VoteRequest(1, Ballot(1, "a")))
    path = next(tmp_path.glob("*.vote"))
    for number in range(1, 200):
        path.with_name(f"00000001.{number:04d}.vote").write_text("not read")
    path.with_name("00000001.0200.vote").write_text(path.read_text())
    assert disk.answer(VoteRequest(1, Ballot(2, "a"))) == DiskVote(1, Ballot(2, "a"), Ballot(2, "a"))
    assert path.with_name("00000001.0201.vote").exists()


def test_a_promise_is_no_vote(tmp_path: Path) -> None:
    """An answer to the first round that arrives in the second one, late or twice, does not record the view."""

    def send(disk: str, request: VoteRequest) -> None:
        register.take(disk, DiskVote(request.epoch, request.ballot, request.ballot))

    register = ViewRegister(Host("a", "h:1", "a"), DiskRegister(tmp_path), send, timeout_s=0.01)
    with pytest.raises(NoMajorityError, match="1 of 3 hosts"):
        asyncio.run(register.record(view(1, "of a"), ("a", "b", "c"), ""))


def test_a_disk_that_fails_is_one_vote_less(tmp_path: Path) -> None:
    failing = tmp_path / "a"
    failing.write_text("no directory")

    def send(disk: str, request: VoteRequest) -> None:
        if disk in answering:
            vote = DiskRegister(tmp_path / disk).answer(request)
            assert isinstance(vote, DiskVote)
            register.take(disk, vote)

    register, answering = ViewRegister(Host("a", "h:1", "a"), DiskRegister(failing), send, timeout_s=0.01), {"b"}

    async def record() -> View:
        with pytest.raises(OSError, match="a"):
            await register.record(view(1, "of a"), ("a", "b", "c"), "")
        answering.add("c")
        return await register.record(view(1, "of a"), ("a", "b", "c"), "")

    assert asyncio.run(record()) == view(1, "of a")


def test_a_disk_takes_no_part_in_another_history(tmp_path: Path) -> None:
    disk, sent = DiskRegister(tmp_path / "b"), list[VoteRequest]()
    disk.keep(replace(view(7, "of b"), history="other"))
    register = ViewRegister(
        Host("a", "h:1", "a"), DiskRegister(tmp_path / "a"), lambda _, request: sent.append(request), timeout_s=0.01
    )
    register.take("b", Decided(replace(view(8, "of b"), history="other")))
    with pytest.raises(NoMajorityError):
        asyncio.run(register.record(view(8, "of a"), ("c", "a", "b"), "first"))
    assert [disk.answer(request) for request in sent] == [None, None]
    assert isinstance(disk.answer(replace(sent[0], history="other")), DiskVote)


def test_a_disk_that_has_promised_a_later_ballot_refuses_an_earlier_one(tmp_path: Path) -> None:
    disk, first, later = DiskRegister(tmp_path), Ballot(1, "a"), Ballot(1, "b")
    voted = disk.answer(VoteRequest(3, first, view(3, "of a")))
    assert disk.answer(VoteRequest(3, later)) == DiskVote(3, later, later, first, view(3, "of a"))
    assert disk.answer(VoteRequest(3, first, view(3, "of a"))) == DiskVote(3, first, later, first, view(3, "of a"))
    assert voted == DiskVote(3, first, first, first, view(3, "of a"))


def test_hosts_that_share_a_disk_share_its_vote(tmp_path: Path) -> None:
    def vote(number: int) -> DiskVote | Decided | None:
        return DiskRegister(tmp_path).answer(VoteRequest(1, Ballot(number, "a"), view(1, str(number))))

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(vote, range(8)))
    granted = [answer for answer in answers if isinstance(answer, DiskVote) and answer.promised == answer.ballot]
    assert granted, "the last ballot is granted"
    assert len([*tmp_path.glob("*.vote")]) == len(granted)


def test_votes_and_views_of_much_earlier_epochs_are_removed(tmp_path: Path) -> None:
    disk = DiskRegister(tmp_path)
    identity = disk.identity()
    for epoch in (1, 2, KEPT + 1):
        disk.answer(VoteRequest(epoch, Ballot(1, "a"), view(epoch, "")))
        disk.keep(view(epoch, ""))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "00000002.0000.vote",
        "00000002.json",
        "00000101.0000.vote",
        "00000101.json",
        "id",
    ]
    assert disk.identity() == identity
