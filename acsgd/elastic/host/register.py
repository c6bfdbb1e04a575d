"""The register of a run's views, one per epoch, on the disks of its hosts, and the lease on a run directory.

A view is recorded once a majority of the disks of the view before has voted for it in one ballot (Paxos). A ballot has
two rounds: first a majority promises to vote in no earlier ballot, and reports for which view it has voted last; then
it votes for the newest of these, or for the view of the host that records if there is none. So a later ballot never
records another view than an earlier one has. Hosts that share a directory share its vote.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from acsgd.elastic.membership.messages import Ballot, Decided, DiskVote, Host, View, VoteRequest, is_majority
from acsgd.io.files.atomic import fsync_directory, write_once
from acsgd.io.files.fields import from_json
from acsgd.run.lock.lease import LeaseWatch

KEPT = 100
"""Number of epochs whose files are kept."""


class DiskRegister:
    """The votes of one disk, and the recorded views that its hosts know of. All methods but `__init__` block.

    directory: of the hosts that share the disk; `write_once` can write to it. Votes of an epoch are numbered files, of
    which none ever changes: whoever writes the next one has seen all before it. Methods raise OSError, or ValueError
    for files that are no views.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def newest(self) -> View | None:
        """Return the recorded view of the highest epoch that is known here; None if there is none."""
        epochs = [int(path.stem) for path in self._directory.glob("*.json") if path.stem.isdecimal()]
        return from_json(View, json.loads(self._path(max(epochs)).read_text())) if epochs else None

    def keep(self, view: View) -> None:
        """Note that a view is recorded. Views and votes of much earlier epochs are removed."""
        if not self._path(view.epoch).exists():
            write_once(self._path(view.epoch), json.dumps(asdict(view)))
            for path in self._directory.glob("*.*"):
                if (epoch := path.name.partition(".")[0]).isdecimal() and int(epoch) <= view.epoch - KEPT:
                    path.unlink(missing_ok=True)

    def identity(self) -> str:
        """Return a random text, equal on all hosts that see this directory and on no others."""
        path = self._directory / "id"
        write_once(path, secrets.token_hex(8))
        return path.read_text()

    def answer(self, request: VoteRequest) -> DiskVote | Decided | None:
        """Vote, unless the disk has promised a later ballot; return the newest view if the epoch has passed.

        None if the request is of another history than the disk.
        """
        while True:
            newest = self.newest()
            if newest is not None and newest.epoch >= request.epoch:
                return Decided(newest)
            if newest is not None and request.history not in (None, newest.history):
                return None
            numbers = [int(path.name.split(".")[1]) for path in self._directory.glob(f"{request.epoch:08d}.*.vote")]
            last = self._vote(request.epoch, max(numbers)) if numbers else None
            if last is not None and (last.promised > request.ballot or _is_granted(last, request)):
                return replace(last, ballot=request.ballot)
            vote = DiskVote(request.epoch, request.ballot, request.ballot)
            if request.view is not None:
                vote = replace(vote, voted=request.ballot, view=request.view)
            elif last is not None:
                vote = replace(vote, voted=last.voted, view=last.view)
            number = max(numbers, default=-1) + 1
            write_once(self._vote_path(request.epoch, number), json.dumps(asdict(vote)))
            fsync_directory(self._directory)
            if self._vote(request.epoch, number) == vote:  # and not that of another host
                return vote

    def _path(self, epoch: int) -> Path:
        return self._directory / f"{epoch:08d}.json"

    def _vote_path(self, epoch: int, number: int) -> Path:
        return self._directory / f"{epoch:08d}.{number:04d}.vote"

    def _vote(self, epoch: int, number: int) -> DiskVote:
        return from_json(DiskVote, json.loads(self._vote_path(epoch, number).read_text()))


class NoMajorityError(Exception):
    """Too few disks have voted for a view."""


class ViewRegister:
    """The register of a run, as one of its hosts uses it.

    me: this host; disk: its disk; send: sends a request to a disk of another host, if one is known that sees it;
    timeout_s: for the votes of a round.
    """

    def __init__(
        self, me: Host, disk: DiskRegister, send: Callable[[str, VoteRequest], None], *, timeout_s: float
    ) -> None:
        self.disk = disk
        self._me = me
        self._send = send
        self._timeout_s = timeout_s
        self._ballot = Ballot(1, me.id)
        self._proposal: View | None = None
        """The view for which votes were requested in the present ballot, which never has another one of its epoch."""
        self._votes: dict[str, DiskVote] = {}
        """Votes of the present round, by disk."""
        self._decided: View | None = None
        """The view that a disk has sent last, since it is recorded."""
        self._has_answered = asyncio.Event()
        self._recording = asyncio.Lock()

    async def record(self, view: View, voters: Sequence[str], history: str | None) -> View:
        """Record a view if its epoch is free; return the one that is recorded, or a later one.

        voters, history: as in RecordView. Without a majority, raises NoMajorityError, or what has failed on the disk of
        this host, as `DiskRegister` does; with one, such a failure is one vote less.
        """
        async with self._recording:
            while (recorded := await self._decide(view, voters, history)) is None:  # another host records, too
                await asyncio.sleep(random.uniform(0, self._timeout_s / 4))
            with contextlib.suppress(OSError):  # it is recorded nevertheless
                await asyncio.to_thread(self.disk.keep, recorded)
            return recorded

    async def _decide(self, view: View, voters: Sequence[str], history: str | None) -> View | None:
        """Return the recorded view; None if a disk has promised a later ballot."""
        if self._proposal is None or self._proposal.epoch != view.epoch:
            promises = await self._ask(VoteRequest(view.epoch, self._ballot, None, history), voters)
            if promises is None or isinstance(promises, View):
                return promises
            earlier = {vote.voted: vote.view for vote in promises if vote.voted is not None}
            self._proposal = (earlier[max(earlier)] if earlier else None) or view
        proposal = self._proposal
        votes = await self._ask(VoteRequest(view.epoch, self._ballot, proposal, history), voters)
        return votes if votes is None or isinstance(votes, View) else proposal

    def take(self, disk: str, answer: DiskVote | Decided) -> None:
        """Take the answer of another disk."""
        match answer:
            case Decided(view):
                self._decided = view
            case vote:
                self._votes[disk] = vote
        self._has_answered.set()

    async def _ask(self, request: VoteRequest, voters: Sequence[str]) -> list[DiskVote] | View | None:
        """Return the votes of a majority; the newest view if the epoch has passed; None if there is a later ballot."""
        self._votes.clear()
        failure: Exception | None = None
        for disk in voters:
            if disk != self._me.disk:
                self._send(disk, request)
        if self._me.disk in voters:
            try:
                match await asyncio.to_thread(self.disk.answer, request):
                    case Decided(newest):
                        return newest
                    case DiskVote() as vote:
                        self.take(self._me.disk, vote)
            except (OSError, ValueError) as error:
                failure = error
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        while True:
            decided = self._decided
            if decided and decided.epoch >= request.epoch and request.history in (None, decided.history):
                return decided
            granted = {disk: vote for disk, vote in self._votes.items() if _is_granted(vote, request)}
            if is_majority(granted, voters):
                return [granted[disk] for disk in voters if disk in granted]
            promised = [vote.promised for vote in self._votes.values() if vote.promised > request.ballot]
            if promised:
                self._ballot, self._proposal = replace(self._ballot, number=max(promised).number + 1), None
                return None
            self._has_answered.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._has_answered.wait()
            except TimeoutError:
                raise failure or NoMajorityError(
                    f"{len(granted)} of {len(voters)} hosts with disks of their own answer, which is no majority; to "
                    "give up what the others may do, end this host and start it again with --elastic.force true"
                ) from None


def _is_granted(vote: DiskVote, request: VoteRequest) -> bool:
    is_vote = request.view is None or vote.voted == request.ballot
    return vote.epoch == request.epoch and vote.promised == request.ballot and is_vote


ABANDONED_S = 5.0
"""Time for which nobody holds the lease on the run directory before its hosts count as ended, seconds."""
VIEWS = "views"
"""Directory of the register in the run directory."""


class RunDirectory:
    """The register in a run directory, and the lease on it."""

    def __init__(self, path: Path) -> None:
        self.register = DiskRegister(path / VIEWS)
        self._lease = LeaseWatch(path)
        self._leased_at = time.monotonic()

    def is_abandoned(self) -> bool:
        """Read the lease; return whether nobody has held it for ABANDONED_S. Blocks while the file system does."""
        now = time.monotonic()
        if not self._lease.has_expired():
            self._leased_at = now
        return now - self._leased_at >= ABANDONED_S
