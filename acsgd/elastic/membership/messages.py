"""What the daemons of a run send to each other, and how it is signed.

A message is one line: a signature, a space, and a JSON object. The signature is an HMAC-SHA256 of the object under the
secret of the run. The object names the run, the sender's connection and a number that grows with every message of the
connection, so that a recorded message is refused. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

from acsgd.comm.addresses import split_address
from acsgd.elastic.membership.assignment import StoredCut
from acsgd.elastic.membership.plan import Plan, WorkerState
from acsgd.io.files.fields import Natural, from_json

MAX_BYTES = 1 << 20
"""Maximum length of a message, bytes."""
PROTOCOL = 12
"""Version of the protocol between daemons: a new one whenever messages change."""


@dataclass(frozen=True)
class Host:
    """One host of a run: the daemon that speaks for its workers."""

    id: str
    """Random text, a new one whenever the daemon starts, or joins again after it was excluded."""
    address: str
    """host:port on which the daemon listens."""
    disk: str = ""
    """Random text in its run directory: hosts that share the directory have the same one."""


@dataclass(frozen=True)
class View:
    """The hosts of a run during one epoch, and what their workers do. Recorded once per epoch, for ever."""

    epoch: Natural
    hosts: tuple[Host, ...]
    """Most senior first."""
    plan: Plan
    reason: str = ""
    """Why the view before it ended."""
    hung: tuple[str, ...] = ()
    """Addresses of the hosts whose workers were killed in the view before it, since they hung."""
    voters: tuple[str, ...] = ()
    """Disks of its hosts, most senior first; those of the view before if it has no hosts."""
    history: str = ""
    """Random text of the first view of the run, or of a view that a person has forced (elastic.force)."""

    def has(self, host_id: str) -> bool:
        return any(host.id == host_id for host in self.hosts)

    def host_of(self, rank: int) -> str:
        """Return the address of the host of a rank, without the port of its daemon."""
        host_id = self.plan.ranks[rank].partition("/")[0]
        return split_address(next(host.address for host in self.hosts if host.id == host_id))[0]

    def rank_hosts(self) -> set[str]:
        """Return the ids of the hosts whose workers have ranks."""
        return {worker.partition("/")[0] for worker in self.plan.ranks}


def is_majority(disks: Collection[str], voters: Sequence[str]) -> bool:
    """Return whether some disks are a majority of the voters: more than half, or half with the most senior one.

    Any two majorities have a disk in common.
    """
    present = sum(voter in disks for voter in voters)
    return 2 * present > len(voters) or (2 * present == len(voters) and {*voters[:1]} <= {*disks})


@dataclass(frozen=True)
class HostHeartbeat:
    """Sent to all hosts of the view, every `heartbeat_s`."""

    epoch: Natural
    leaving: bool = False
    """Whether the sender wants to leave the run."""
    candidates: tuple[str, ...] = ()
    """Ids of the hosts outside of the view that reach the sender."""
    working_s: float | None = None
    """Longest time for which one of its ranks has worked without a wait; None if all of them wait."""


@dataclass(frozen=True)
class Join:
    """Request of a host that is in no view, whose workers are ready. Repeated until it is in one."""

    setup: dict[str, str]
    """What all hosts must have in common, by name: see `Setup`."""
    newest: View | None = None
    """The newest recorded view that it knows of."""
    ended: tuple[str, ...] = ()
    """Ids of the hosts of that view of which it knows that they have ended."""


@dataclass(frozen=True)
class Refused:
    """Answer to Join: the sender's setup differs from that of the run."""

    parts: tuple[str, ...]
    """Names of what differs."""


@dataclass(frozen=True)
class ViewRequest:
    """Request to form the next view, since the ranks of this one cannot continue or there are workers to add."""

    epoch: Natural
    reason: str
    at_step_end: bool
    """Whether the workers can first complete their step."""


@dataclass(frozen=True)
class Prepare:
    """Request to stop the workers and to report their states, for the view after `base`."""

    base: View | None
    """The sender's view; None before the first."""
    epoch: Natural
    """Of the next view."""
    at_step_end: bool


@dataclass(frozen=True)
class Promise:
    """Answer to Prepare: the workers have stopped, and run again only in a view of this epoch or a later one."""

    epoch: Natural
    workers: dict[str, WorkerState]
    """By name; empty if the host has none at present."""


@dataclass(frozen=True)
class Decided:
    """A view that was recorded."""

    view: View


@dataclass(frozen=True, order=True)
class Ballot:
    """An attempt of a host to record a view."""

    number: Natural
    host: str
    """Its id."""


@dataclass(frozen=True)
class VoteRequest:
    """Request to a disk to vote for a view in a ballot; without a view, to vote in no earlier ballot from now on."""

    epoch: Natural
    ballot: Ballot
    view: View | None = None
    history: str | None = None
    """Of the view before; None if a new one begins. A disk does not vote for another one than its own."""


@dataclass(frozen=True)
class DiskVote:
    """Answer to VoteRequest, kept on the disk: refused if `promised` is a later ballot."""

    epoch: Natural
    ballot: Ballot
    """Of the request."""
    promised: Ballot
    """The disk votes in no earlier ballot."""
    voted: Ballot | None = None
    """Ballot in which it has voted last."""
    view: View | None = None
    """For which it has voted then."""


@dataclass(frozen=True)
class Hung:
    """Request to kill the workers that work for too long, while the ranks of all other hosts wait."""

    epoch: Natural


@dataclass(frozen=True)
class Finished:
    """The run has ended."""

    epoch: Natural


DaemonMessage = (
    HostHeartbeat
    | Join
    | Refused
    | ViewRequest
    | Prepare
    | Promise
    | VoteRequest
    | DiskVote
    | Decided
    | Hung
    | Finished
)
KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(DaemonMessage)}


@dataclass(frozen=True)
class Envelope:
    """A message with what protects it from other runs, from replay and from forgery."""

    run: str
    sender: Host
    connection: str
    """Random text that the receiver chose for this connection."""
    number: Natural
    kind: str
    body: dict[str, Any]

    def message(self) -> DaemonMessage:
        """Return the message. Raises ValueError if it is not of the protocol."""
        if self.kind not in KINDS:
            raise ValueError(f"{self.kind!r:.50} is not a message of this protocol")
        message: DaemonMessage = from_json(KINDS[self.kind], self.body)
        return message


class SignatureError(ValueError):
    """A message was not signed with the secret of the run."""


def seal(secret: bytes, run: str, sender: Host, connection: str, number: int, message: Any) -> bytes:
    """Return the line of a message, a dataclass."""
    envelope = Envelope(run, sender, connection, number, type(message).__name__, asdict(message))
    text = json.dumps(asdict(envelope)).encode()
    return _signature(secret, text) + b" " + text + b"\n"


def unseal(secret: bytes, line: bytes) -> Envelope:
    """Return the envelope of a line. Raises ValueError if its signature or its form is wrong."""
    signature, _, text = line.rstrip(b"\n").partition(b" ")
    if not hmac.compare_digest(signature, _signature(secret, text)):
        raise SignatureError("the signature is wrong: another run, or another secret")
    return from_json(Envelope, json.loads(text))


def _signature(secret: bytes, text: bytes) -> bytes:
    return hmac.new(secret, text, hashlib.sha256).hexdigest().encode()


# Between a daemon and the workers of its host, over a Unix socket that only this user can open.


@dataclass(frozen=True)
class SharedFiles:
    """Where the files of a run are on a host that other members can get. Default: none."""

    checkpoints: str = ""
    """Directory of its checkpoints."""
    model: str = ""
    """Directory of the layer shards that the run starts from, or of config and tokenizer of new weights."""
    data: tuple[str, ...] = ()
    """Files of the sources that the run file names one by one, in its order."""
    rate: float | None = None
    """Maximum number of bytes per second that the host sends; None = no limit."""


@dataclass(frozen=True)
class Hello:
    """First message of a worker: it is ready to train."""

    name: str
    """Its number on this host."""
    local_world_size: Natural
    """Number of workers on this host; the host takes part once all of them are ready."""
    pid: Natural
    setup: Setup
    state: WorkerState


@dataclass(frozen=True)
class Setup:
    """What a run's workers have in common."""

    cuts: tuple[StoredCut, ...]
    """The layers of each position of a pipeline, for each number of stages that it may have, most first."""
    run_dir: str
    min_replicas: Natural
    max_replicas: int | None
    silence_s: float
    hang_s: float
    force: bool
    """elastic.min_replicas, max_replicas (see `most_replicas`), silence, hang and force."""
    parts: dict[str, str]
    """What must be equal on all hosts, as a short text for each: options, model, data, versions."""
    files: SharedFiles = SharedFiles()
    equal_micros: Natural = 0
    """See `possible_domains`."""


@dataclass(frozen=True)
class Stopped:
    """The worker has stopped, and waits for a view."""

    state: WorkerState


@dataclass(frozen=True)
class Broken:
    """The worker cannot continue in a view, since other ranks or the links to them have failed."""

    epoch: Natural
    reason: str


@dataclass(frozen=True)
class Tick:
    """What the worker does, sent every TICK_S."""

    is_waiting: bool
    """Whether it waits for other ranks."""
    idle_s: float
    """Time since it last began or ended to wait, or began an action of the pipeline, seconds."""


@dataclass(frozen=True)
class Leave:
    """The host leaves the run."""


@dataclass(frozen=True)
class Done:
    """The run has ended: this worker has completed the last step, or stopped the run.

    A worker on which what follows the last step has failed sends it, too.
    """


@dataclass(frozen=True)
class Idle:
    """Stop signals to all ranks have ended training, and the run is saved. It resumes if a host without ranks stays."""


FromWorker = Hello | Stopped | Broken | Tick | Leave | Done | Idle


@dataclass(frozen=True)
class Stop:
    """Stop, and report the state. at_step_end: complete the step first."""

    at_step_end: bool


@dataclass(frozen=True)
class Run:
    """Train in a view."""

    view: View
    worker: str
    """Name of this worker in its plan."""
    run: str = ""
    """Name of the run."""
    key: str = ""
    """Secret with which requests to the daemons of the view are signed, in hexadecimal digits."""
    started_at: float | None = None
    """When torchrun of this host was started, if its host joins others and this worker prints that; a
    time.monotonic()."""


@dataclass(frozen=True)
class End:
    """End the process. error: why, if it is the run's or this host's failure.

    is_over: the run is over, and this rank may complete what follows its last step. Its waits for other ranks end after
    `COMPLETE_S` of `acsgd.elastic.control`: one that has failed after the last step sends nothing any more.
    """

    error: str | None = None
    is_over: bool = False


ToWorker = Stop | Run | End


def to_line(message: FromWorker | ToWorker) -> bytes:
    """Return the line of a message between a daemon and a worker."""
    return json.dumps({"kind": type(message).__name__, "body": asdict(message)}).encode() + b"\n"


def from_line(line: bytes, kinds: object) -> Any:
    """Return the message of a line. kinds: FromWorker or ToWorker. Raises ValueError for anything else."""
    value = json.loads(line)
    by_name = {kind.__name__: kind for kind in get_args(kinds)}
    if not isinstance(value, dict) or value.get("kind") not in by_name:
        raise ValueError(f"{line!r:.80} is not a message between a daemon and a worker")
    return from_json(by_name[value["kind"]], value.get("body"))
