"""What a worker opens for each view or keeps from one view to the next: store, lock, metrics and events."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from acsgd.comm.addresses import listen, resolve
from acsgd.comm.process_groups import VirtualHost
from acsgd.comm.store import call_in_thread
from acsgd.comm.waits import Waits
from acsgd.config.options import Config
from acsgd.elastic.membership.messages import Host, View
from acsgd.errors import RefusedError, RunError, reason
from acsgd.groups import Groups
from acsgd.io.checkpoint.copies import Disks
from acsgd.io.telemetry.metrics import Metrics
from acsgd.io.telemetry.record import RunEvent
from acsgd.run.lock.lock import RunLock, leases_of
from acsgd.run.plan.job import Job
from acsgd.run.setup.directories import SHARED_DISKS, RunDisks, find_disks, find_run_disks
from acsgd.run.step.hooks import LoopState


class ViewLock:
    """The run lock of one worker, which keeps its leases from view to view: those of a leader of its disk."""

    def __init__(self) -> None:
        self._lock: RunLock | None = None
        self._directories: list[Path] = []
        """Of its leases."""
        self._epoch = 0
        """Number of the last view in which this worker had a rank, and its part of the lock."""

    def of(self, job: Job, groups: Groups, view: View, timeout_s: float, disks: RunDisks = SHARED_DISKS) -> RunLock:
        """Return the lock for a view: with the leases on the leader of each disk, without any on other ranks.

        All ranks call it together. After a view that this worker has missed, a leader takes the leases again, since
        another one may have had them. timeout_s: of a communication. Raises RunError on a leader of the first view if
        another run holds one of the directories.
        """
        leases, is_next = leases_of(job, disks.log, disks.checkpoints), view.epoch == self._epoch + 1
        directories = [lease.directory for lease in leases]
        if self._lock is None or self._directories != directories or not is_next:
            self.close()
            self._lock, self._directories = RunLock(leases), directories
            if not view.plan.is_first:
                self._lock.take_over()
        if view.plan.is_first:
            self._lock.acquire(groups, timeout_s)
        self._epoch = view.epoch
        return self._lock

    def close(self) -> None:
        """Release the leases."""
        if self._lock is not None:
            self._lock.release()


def address_of(view: View, rank: int) -> str:
    """Return the address of the host of a rank, with the port of its daemon."""
    host_id = view.plan.ranks[rank].partition("/")[0]
    return next(host.address for host in view.hosts if host.id == host_id)


def disks_of(view: View) -> Disks:
    """Return which ranks of a view see the same run directory, as the ids in it say."""
    disks = {host.id: host.disk for host in view.hosts}
    members: dict[str, list[int]] = {}
    for rank, worker in enumerate(view.plan.ranks):
        members.setdefault(disks[worker.partition("/")[0]], []).append(rank)
    names = {host.disk: host.address for host in reversed(view.hosts)}
    return Disks(tuple(map(tuple, members.values())), tuple(names[disk] for disk in members))


def find_view_disks(job: Job, groups: Groups, view: View) -> RunDisks:
    """Find out which ranks of a view see the same directories. A collective call. Raises as `check_disks`.

    A view that trains on goes by the ids in it: a host with a full disk stays in it. Only what these do not say is
    looked up: whether hosts of the same id share the run directory, and who shares checkpoint.dir.
    """
    rank, known = job.topology.rank, disks_of(view)
    host, timeout_s = address_of(view, rank), job.config.run.timeout
    if view.plan.from_disk:
        disks = find_run_disks(job, groups, host=host)
    else:
        log = known
        if len(known.members) < len(view.rank_hosts()):
            log = find_disks(job.paths.run, groups, host=host, timeout_s=timeout_s, known=known)
        disks = RunDisks(log, log)
        if job.config.checkpoint.dir is not None:
            directory = job.paths.checkpoints.path
            disks = RunDisks(log, find_disks(directory, groups, host=host, timeout_s=timeout_s, known=log))
    check_disks(view, disks.log, rank)
    return disks


def check_disks(view: View, disks: Disks, rank: int) -> None:
    """Raise an error if hosts with disks of their own have the same id in their run directories, since one is a copy.

    Their votes would count as one. RefusedError on the ranks of the later host, RunError on all others.
    """
    first: dict[str, str] = {}
    for ranks, name in zip(disks.members, disks.names, strict=True):
        host_id = view.plan.ranks[ranks[0]].partition("/")[0]
        disk = next(host.disk for host in view.hosts if host.id == host_id)
        if first.setdefault(disk, name) != name:
            text = (
                f"the directory views in log.dir of {name} is a copy of that of {first[disk]}; remove it on {name}, "
                "and start that host again"
            )
            raise RefusedError(text) if rank in ranks else RunError(text, awaited=ranks)


class ViewMetrics:
    """The metrics of one worker, which keeps the sinks from view to view as long as it has the same ones."""

    def __init__(self) -> None:
        self._metrics: Metrics | None = None
        self._is_main = False

    def of(self, job: Job, state: LoopState, disks: Disks) -> Metrics:
        """Return the metrics for a view: with all sinks on rank 0, with that of the file on other leaders of a disk."""
        is_main, keeps_files = job.topology.rank == 0, disks.is_leader(job.topology.rank)
        if not keeps_files or is_main != self._is_main:
            self.close()
        if keeps_files and self._metrics is None:
            self._metrics, self._is_main = open_metrics(job.config, state, is_main=is_main), is_main
        return self._metrics or Metrics([])

    def close(self) -> None:
        """Close the sinks."""
        if self._metrics is not None:
            self._metrics.__exit__(None, None, None)
            self._metrics = None


def open_metrics(config: Config, state: LoopState, *, is_main: bool = True) -> Metrics:
    """Open the sinks on a new rank 0 or leader of a disk, and log the last step again if this rank has its metrics.

    The one before may have ended after that step and before it had logged it. is_main: as in `Metrics.open`.
    """
    record = state.record if state.record and state.record.step == state.progress.step else None
    logged = state.progress.step - (record is not None or state.is_open)
    metrics = Metrics.open(config, Path(config.log.dir), resumed_at=logged, is_main=is_main, keeps_files=True)
    if record is not None and not state.is_open:
        metrics.log(record)
    return metrics


STORE_TIMEOUT_S = 8.0
"""Time to connect to the store of a view, seconds."""
OPEN_TIMEOUT_S = 60.0
"""Time to open one, seconds. torch looks up the name of the first address to which a process connects, for 10 s if the
name server does not answer, 30 s if three do not; then no more."""


def open_store(host: VirtualHost | None = None) -> dist.TCPStore:
    """Open a store on a free port of this host. host: in a run with a mesh, where it listens; None = everywhere."""
    timeout = timedelta(seconds=OPEN_TIMEOUT_S)
    if host is None:
        return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timeout)

    def create() -> dist.TCPStore:
        with listen(host.address) as listener:
            port = listener.getsockname()[1]
            descriptor = listener.detach()
        return dist.TCPStore(
            host.address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=descriptor
        )

    return host.open(create)


def connect_store(host: str, port: int, waits: Waits) -> dist.TCPStore:
    """Connect to the store of a view. Raises RunError if its host does not answer, WaitInterruptedError."""
    try:
        _check_that_it_listens(host, port, waits)
        timeout = timedelta(seconds=STORE_TIMEOUT_S)
        return call_in_thread(
            lambda: dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout),
            timeout_s=STORE_TIMEOUT_S,
            waits=waits,
        )
    except (OSError, RuntimeError) as error:
        cause = reason(error) or f"no answer in {STORE_TIMEOUT_S:g} s"
        raise RunError(f"the store of rank 0 at {host}:{port} cannot be reached ({cause})", awaited=[0]) from error


def _check_that_it_listens(host: str, port: int, waits: Waits) -> None:
    """Raise OSError if no process listens at an address, WaitInterruptedError.

    A store was opened before its port was announced. But the client of torch tries again for the whole timeout if
    its port is closed.
    """
    errors = [_connect_error(family, address, waits) for family, address in resolve(host, port)]
    if all(errors):
        raise errors[0] or OSError


def _connect_error(family: socket.AddressFamily, address: tuple[str, int], waits: Waits) -> OSError | None:
    """Return why an address cannot be connected, None if it can. Raises WaitInterruptedError."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        probe.connect_ex(address)
        if not waits.poll(lambda slice_s: bool(select.select([], [probe], [], slice_s)[1]), STORE_TIMEOUT_S):
            return TimeoutError(f"no answer in {STORE_TIMEOUT_S:g} s")
        error = probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        return OSError(error, os.strerror(error)) if error else None


def view_events(
    view: View, before: Sequence[Host] | None, step: int, seconds: float, moved_bytes: int
) -> list[RunEvent]:
    """Return the events of a new view: one for each host that hung, left or joined since, then that of the view.

    before: hosts of the view before; None if this is the first one. seconds: since its ranks have stopped; moved_bytes:
    size of the state that ranks have received.
    """
    known = view.hosts if before is None else before
    changes = [("hung", address) for address in view.hung]
    changes += [("left", host.address) for host in known if host not in view.hosts]
    changes += [("joined", host.address) for host in view.hosts if host not in known]
    events = [RunEvent(name, step, f"{address} {name}", {"host": address}) for name, address in changes]
    return [*events, _view_event(view, before, step, seconds, moved_bytes)]


def _view_event(view: View, before: Sequence[Host] | None, step: int, seconds: float, moved_bytes: int) -> RunEvent:
    plan = view.plan
    fields = {
        "view": view.epoch,
        "reason": view.reason,
        "hosts": len(view.hosts),
        "replicas": plan.replicas,
        "stages": plan.stages,
        "spares": len(plan.spares),
        "moved_layers": sum(len(transfer.layers) for transfer in plan.transfers),
        "moved_bytes": moved_bytes,
        "from": plan.origin,
        "recovery_s": round(seconds, 3),
    }
    text = f"view {view.epoch}: {plan.replicas} x {plan.stages} on {len(view.hosts)} hosts"
    if plan.spares:
        text += f" and {len(plan.spares)} spares"
    if before is not None:
        text += f", after {seconds:.2f} s: {view.reason}"
    return RunEvent("view", step, text, fields)
