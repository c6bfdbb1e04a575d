"""The daemon of a host: carries out what its membership decides, in a thread of torchrun's agent."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from acsgd.elastic.host.joining import DaemonOptions, open_membership, refusal
from acsgd.elastic.host.local_workers import LocalWorkers
from acsgd.elastic.host.processes import started_at
from acsgd.elastic.host.register import NoMajorityError, RunDirectory, ViewRegister
from acsgd.elastic.host.transport import Connections, Rejection
from acsgd.elastic.membership.effects import (
    Contact,
    Effect,
    Excluded,
    Finish,
    Install,
    KillHung,
    RecordView,
    Send,
    StopWorkers,
)
from acsgd.elastic.membership.messages import (
    DaemonMessage,
    Decided,
    DiskVote,
    Host,
    Refused,
    SharedFiles,
    View,
    ViewRequest,
    VoteRequest,
)
from acsgd.elastic.membership.views import Membership
from acsgd.errors import explain
from acsgd.notes import print_note

log = logging.getLogger(__name__)

REJOIN_S = 0.5
"""Time between the exclusion of a host and its next request to join, seconds."""
WAIT_S = 10.0
"""Time in no view after which a host prints for what it waits, seconds."""
FAILED_ROUNDS = 3
"""Number of rounds without a majority in a row after which a host prints it: one may fail while others record."""
END_S = 8.0
"""Time for the daemon to start or to end, seconds."""


class Daemon:
    """Speaks for the workers of a host. Start it once; its thread ends with the process, or by `stop`.

    socket_path: where the workers connect; has_ended: as in `Connections`.
    """

    def __init__(
        self, options: DaemonOptions, socket_path: Path, has_ended: Callable[[str], bool] = lambda address: True
    ) -> None:
        self._options = options
        self._has_ended = has_ended
        self._timing = options.timing
        self._socket_path = socket_path
        self._me = Host(secrets.token_hex(4), options.address)
        self._workers = LocalWorkers(self, options.run, options.secret)
        self._membership: Membership | None = None
        self._directory: RunDirectory | None = None
        self._register: ViewRegister
        self._hosts: dict[str, Host] = {}
        """By disk, the host whose message arrived last."""
        self._started_at = started_at()
        self._joined_at = 0.0
        self._had_view = False
        """Whether this host has been in a view: then elastic.force has done what it was given for."""
        self._failed_rounds = 0
        """Number of attempts to record a view that have failed, since the last one that has not."""
        self._notes: set[str] = set()
        """What has been printed once."""
        self._refused: set[str] = set()
        """Ids of hosts of a view that have refused a connection."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop
        self._ended: asyncio.Event
        self._connections: Connections
        self._has_finished = False
        self._is_listening = threading.Event()
        self._failure: OSError | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="acsgd daemon", daemon=True)

    def start(self) -> None:
        """Start the thread; return once the daemon listens. Raises OSError if it cannot."""
        self._thread.start()
        self._is_listening.wait(END_S)
        if self._failure is not None:
            raise self._failure

    def reject(self, rejection: Rejection) -> None:
        """Handle a rejection that the mesh reports, from its thread."""
        self._loop.call_soon_threadsafe(self._on_rejected, rejection)

    def stop(self) -> None:
        """End the daemon, as when torchrun ends. Can be called again."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join(END_S)

    async def _run(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        self._connections = Connections(
            self._options.run,
            self._options.secret,
            sender=lambda: self._me,
            is_in_view=lambda: self._membership is not None and self._membership.view is not None,
            on_message=self._on_message,
            files=self._shared_files,
            on_refused=self._on_refused,
            on_rejected=self._on_rejected,
            connect_timeout_s=self._timing.silence_s / 2,
            has_ended=self._has_ended,
        )
        try:
            await self._workers.listen(self._socket_path, self._options.address)
            await self._connections.listen(self._options.address)
        except OSError as error:
            self._failure = error
            return
        finally:
            self._is_listening.set()
        self._start(self._tick())
        await self._ended.wait()
        self._membership = None  # handlers that are cancelled below have no effects: these would start new tasks
        self._workers.close()
        self._connections.close()

    async def _tick(self) -> None:
        while True:
            if (membership := self._membership) is not None:
                membership.working_s = self._workers.working_s(self._timing.silence_s)
                await self._check_lease(membership)
                self._on_timer()
                self._note_wait(membership)
            await asyncio.sleep(self._timing.heartbeat_s)

    def _expedite_change(self) -> None:
        """Let the membership form the next view once it has settled, instead of at a later heartbeat."""
        self._on_timer()
        self._loop.call_later(self._timing.settle_s, self._on_timer)

    def _on_timer(self) -> None:
        self._input(lambda membership: membership.on_timer(time.monotonic()))

    async def _check_lease(self, membership: Membership) -> None:
        """Report to a membership without a view that the lease on the run directory has expired, if it has."""
        is_unknown = membership.view is None and membership.newest is not None
        if is_unknown and self._directory and await asyncio.to_thread(self._directory.is_abandoned):
            self._input(lambda membership: membership.abandoned(time.monotonic()))

    def _note_wait(self, membership: Membership) -> None:
        now = time.monotonic()
        if membership.view is None and now - self._joined_at >= WAIT_S:
            self._note(f"run {self._options.run}: this host waits: {membership.describe_wait(now)}")

    def _note_progress(self, text: str) -> None:
        """Print how far this host has joined."""
        self._note(f"run {self._options.run}: {text} after {time.monotonic() - self._started_at:.1f} s")

    def _note(self, text: str) -> None:
        """Print a sentence, once."""
        if text not in self._notes:
            self._notes.add(text)
            print_note(text)

    # The membership, and what it decides.

    def _join(self) -> None:
        """Open a membership for the workers of this host, which are ready."""
        setup = self._workers.setup
        if not self._joined_at and {*self._options.endpoints} - {self._me.address}:
            self._note_progress("model and data are ready")
        self._timing, self._joined_at, self._failed_rounds = self._options.timing_of(setup), time.monotonic(), 0
        self._directory = RunDirectory(Path(setup.run_dir))
        disk = self._directory.register
        try:
            self._me = replace(self._me, id=secrets.token_hex(4), disk=disk.identity())  # ballots begin anew, too
            self._register = ViewRegister(self._me, disk, self._request_vote, timeout_s=self._timing.silence_s)
            self._membership = open_membership(
                self._me, self._options, replace(setup, force=setup.force and not self._had_view), disk
            )
        except (OSError, ValueError) as error:
            self._workers.end(f"the views in {setup.run_dir} cannot be used: {explain(error) or error}")
            return
        if setup.force:
            self._note(
                f"run {self._options.run}: elastic.force is set; remove it once the run trains, since each start with "
                "it may give up what hosts have done that are not there"
            )
        self.on_stopped()

    def _input(self, call: Callable[[Membership], None]) -> None:
        """Let the membership handle an input, and carry out its effects."""
        if (membership := self._membership) is not None:
            call(membership)
            for effect in membership.take_effects():
                self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Send(to, message) if to.id == self._me.id:
                self._loop.call_soon(self._on_message, to, message)
            case Send(to, message):
                self._start(self._connections.send(to.address, message, to.id))
            case Contact(address, message):
                self._start(self._connections.send(address, message, None))
            case StopWorkers(at_step_end):
                self._workers.stop(at_step_end=at_step_end)
            case RecordView(view, voters, history):
                self._start(self._record(view, voters, history))
            case Install(view):
                self._install(view)
            case Excluded(left):
                self._exclude(left=left)
            case Refused(parts):
                self._refuse(refusal(self._options.run, parts))
            case KillHung():
                self._workers.kill_hung(self._timing.hang_s, self._timing.silence_s)
            case Finish():
                self._has_finished = True
                self._workers.end(None, is_over=True)

    async def _record(self, view: View, voters: tuple[str, ...], history: str | None) -> None:
        membership = self._membership
        try:
            recorded = await self._register.record(view, voters, history)
        except (NoMajorityError, OSError, ValueError) as error:
            if membership is not self._membership:
                return
            self._failed_rounds += 1
            if self._failed_rounds >= FAILED_ROUNDS or not isinstance(error, NoMajorityError):
                self._note(f"view {view.epoch} cannot be recorded: {explain(error) or error}")
            self._input(lambda membership: membership.recording_failed())
            return
        self._failed_rounds = 0
        if history is None and recorded == view and membership and membership.newest:
            absent = ", ".join(host.address for host in membership.newest.hosts if host.disk not in view.voters)
            self._note(
                f"run {self._options.run} continues by elastic.force, without {absent or 'others'}: what they have "
                "done since is given up, and they are refused until their log.dir is moved away"
            )
        if membership is self._membership:
            self._input(lambda membership: membership.recorded(recorded, time.monotonic()))

    def _request_vote(self, disk: str, request: VoteRequest) -> None:
        """Send a request to a host that sees a disk."""
        known = self._membership.newest.hosts if self._membership and self._membership.newest else ()
        host = self._hosts.get(disk) or next((host for host in known if host.disk == disk), None)
        if host is not None:
            self._start(self._connections.send(host.address, request, host.id))

    async def _vote(self, sender: Host, request: VoteRequest) -> None:
        """Answer a request to the disk of this host."""
        assert self._directory is not None
        try:
            answer = await asyncio.to_thread(self._directory.register.answer, request)
        except (OSError, ValueError) as error:
            self._note(f"this host cannot vote: {explain(error) or error}")
        else:
            if answer is not None:
                await self._connections.send(sender.address, answer, sender.id)

    async def _keep(self, view: View) -> None:
        """Note on the disk of this host that a view is recorded."""
        try:
            await asyncio.to_thread(self._register.disk.keep, view)
        except OSError as error:
            self._note(f"view {view.epoch} cannot be written: {explain(error) or error}")

    def _install(self, view: View) -> None:
        log.info("view %d: %s", view.epoch, [host.address for host in view.hosts])
        is_joining, self._had_view = not self._had_view and len(view.hosts) > 1, True
        if is_joining:
            self._note_progress(f"connected (view {view.epoch}, {len(view.hosts)} hosts)")
        self._start(self._keep(view))
        if self._workers.run(view, self._me.id, self._started_at if is_joining else None):
            return
        self._input(lambda membership: membership.stopped(self._workers.states or {}))
        if self._workers.states is not None:  # they became ready while the view was formed
            self.on_ready()

    def _exclude(self, *, left: bool) -> None:
        """Take this host out of the run, or let it join again as a new host without state."""
        self._membership = None
        if left:
            self._workers.end(None)
            return
        print_note(
            f"run {self._options.run} continues without this host, whose messages did not arrive; it joins again"
        )
        self._workers.stop(at_step_end=False)
        self._loop.call_later(REJOIN_S, self._rejoin)

    def _rejoin(self) -> None:
        if self._membership is None and self._workers.are_complete:
            self._join()

    # Other hosts.

    def _shared_files(self) -> tuple[SharedFiles, set[str]]:
        """Return the files of the run on this host, and the addresses of the daemons that it knows."""
        known = self._membership.view.hosts if self._membership and self._membership.view else self._hosts.values()
        return self._workers.files, {host.address for host in known} | {self._me.address}

    def _on_message(self, sender: Host, message: DaemonMessage) -> None:
        self._hosts[sender.disk] = sender
        self._input(lambda membership: membership.receive(sender, message, time.monotonic()))
        match message:
            case ViewRequest():
                self._expedite_change()
            case VoteRequest() if self._directory is not None:
                self._start(self._vote(sender, message))
            case DiskVote() | Decided() if self._directory is not None:
                self._register.take(sender.disk, message)

    def _on_refused(self, address: str, host_id: str | None) -> None:
        self._input(lambda membership: membership.ended(address, host_id))
        if host_id is not None and host_id not in self._refused:  # the next heartbeats to it are refused, too
            self._refused.add(host_id)
            self._expedite_change()

    def _on_rejected(self, rejection: Rejection) -> None:
        """End the workers if this host cannot take part; if it waits for others, print it."""
        if self._membership is None or self._membership.view is not None:
            return
        text = f"run {self._options.run}: {rejection.address} {rejection.problem}"
        is_first = self._membership.candidate.precedes(rejection.address)
        if rejection.is_in_view or not is_first:  # of two hosts in no view, the first waits for others
            self._refuse(text)
        else:
            self._note(text)

    def _refuse(self, text: str) -> None:
        """End the workers of this host, which cannot take part."""
        self._membership = None
        self._workers.end(text)

    # Workers of this host, as `WorkerEvents` describes.

    def on_ready(self) -> None:
        if self._has_finished:
            self._workers.end(None)
        elif self._membership is None:
            self._join()
        elif self._membership.view is not None:
            reason = f"workers of {self._me.address} have started again"
            self.on_stopped()
            self._input(lambda membership: membership.request_change(reason, at_step_end=True))
        else:
            self.on_stopped()

    def on_stopped(self) -> None:
        if self._membership is not None and self._membership.view is None:
            self._workers.forget_states()
        if (states := self._workers.states) is not None:
            self._input(lambda membership: membership.stopped(states))

    def on_lost(self, name: str) -> None:
        self._workers.end(None)  # torchrun then starts all workers of this host again, or ends
        reason = f"worker {name} of {self._me.address} ended"
        self._input(lambda membership: membership.stopped({}))
        self._input(lambda membership: membership.request_change(reason, at_step_end=False))
        self._expedite_change()

    def on_broken(self, epoch: int, reason: str) -> None:
        if self._membership and self._membership.view and self._membership.view.epoch == epoch:
            self._input(lambda membership: membership.request_change(reason, at_step_end=False))
            self._expedite_change()

    def on_leave(self) -> None:
        if self._membership is None:  # it was excluded, and would join again
            self._workers.end(None)
        self._input(lambda membership: membership.leave())

    def on_done(self) -> None:
        self._input(lambda membership: membership.finish())

    def on_idle(self) -> None:
        self._input(lambda membership: membership.finish_if_all_leave())

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
