"""Control plane: what every rank reports to every other at the end of a step, in one message."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from acsgd.comm.waits import Work
from acsgd.errors import RunError, reason
from acsgd.topology import Groups, Topology

TAG = 1
"""Tag of these messages; the group carries no other point-to-point messages."""


class Votes(NamedTuple):
    """Requests of one rank that all ranks act on together after the step."""

    stop: bool = False
    """This rank received a stop signal."""
    save: bool = False
    """A checkpoint is due by this rank's clock."""
    failed_save: bool = False
    """A save failed on this rank."""
    pause: bool = False
    """This rank was asked to stop at the end of the step, for the next view of an elastic run."""
    skip: bool = False
    """The update of this step is to be skipped: its loss was a spike."""
    snapshot_pending: bool = False
    """A snapshot is incomplete on this rank."""
    snapshot_interval: int = 0
    """Number of steps between two snapshots that this rank wants."""
    joins: bool = False
    """This rank has not got the state of all of its layers yet."""
    wanted: int | None = None
    """Layer whose state after the step this rank requests, by its index in the model; None = no one."""


NO_VOTES = Votes()


class StepReport(NamedTuple):
    """One rank's numbers for one step, sent as fp64 in this order."""

    loss: float
    """This rank's part of the loss that backward started from, without the loss scale."""
    targets: float
    """Target tokens; 0 on ranks without the last stage."""
    tokens: float
    """Input tokens, without padding; 0 on ranks without the last stage."""
    squared_grad_norm: float
    """Squared norm of this rank's gradients as backward left them."""
    pp_forward_bytes: float
    pp_backward_bytes: float
    tied_bytes: float
    dp_bytes: float
    in_flight_s: float
    waited_s: float
    peak_memory_bytes: float
    data_wait_s: float
    checksum: float = 0.0
    """Of the batch: an integer, which fp64 represents exactly."""
    micros: float = 0.0
    """Number of micro-batches of the rank's replica."""
    compute_s: float = 0.0
    """Time from the first action to the reduced gradients, without waits for other ranks, seconds."""
    stop_votes: float = 0.0
    save_votes: float = 0.0
    failed_saves: float = 0.0
    pause_votes: float = 0.0
    skip_votes: float = 0.0
    snapshots_pending: float = 0.0
    snapshot_interval: float = 0.0
    joins: float = 0.0
    wanted: float = -1.0
    """-1 = no layer."""


@dataclass(frozen=True)
class StepSummary:
    """The reports of all ranks for one step, aggregated; equal on all ranks except `peak_memory_bytes`."""

    loss: float
    """Sum over all ranks."""
    targets: float
    """Sum over all ranks."""
    tokens: int
    """Sum over all ranks."""
    replica_targets: list[float]
    """Target tokens of each replica."""
    replica_squared_norms: list[float]
    """Squared gradient norm of each replica."""
    pp_forward_bytes: int
    pp_backward_bytes: int
    tied_bytes: int
    dp_bytes: int
    hidden_share: float
    """Fraction of the time between posting transfers and receiving them that was spent computing; 1 without transfers.
    Waiting for a peer that still computes (the pipeline bubble) counts as waiting."""
    peak_memory_bytes: int
    """Maximum over the ranks of this pipeline."""
    data_wait_s: float
    """Maximum over all ranks."""
    micro_s: list[list[float]]
    """Computing time per micro-batch of each rank, [replicas][ranks per pipeline], seconds; 0 = it had none."""
    stop: bool
    """Whether any rank votes to stop."""
    all_stop: bool
    """Whether all ranks vote to stop."""
    save: bool
    """Whether any rank votes to save."""
    failed_save: bool
    """Whether any rank reports a failed save."""
    pause: bool
    """Whether any rank votes to pause."""
    skip: bool
    """Whether any rank votes to skip the update of this step."""
    loses_stage: bool
    """Whether all ranks that hold the state of some stages vote to stop."""
    snapshot_pending: bool
    """Whether a snapshot is incomplete on any rank."""
    snapshot_interval: int
    """Maximum over all ranks."""
    joining: list[int]
    """Replicas with ranks that have not got the state of all of their layers yet."""
    wanted: list[int | None]
    """By rank, the layer whose state it requests, by its index in the model."""

    @classmethod
    def of(cls, rows: Tensor, topology: Topology) -> StepSummary:
        """Aggregate the reports of all ranks: fp64 [ranks, fields of StepReport].

        Raises RunError, the same on all ranks, if they read different texts.
        """
        _check_texts([StepReport(*row).checksum for row in rows.tolist()])
        by_replica = rows.view(topology.replicas, topology.stages, -1)
        by_stage = by_replica.transpose(0, 1)
        total, highest = StepReport(*rows.sum(0).tolist()), StepReport(*rows.amax(0).tolist())
        replicas = [StepReport(*row) for row in by_replica.sum(1).tolist()]
        largest = StepReport(*by_replica[topology.replica].amax(0).tolist())
        return cls(
            loss=total.loss,
            targets=total.targets,
            tokens=int(total.tokens),
            replica_targets=[replica.targets for replica in replicas],
            replica_squared_norms=[replica.squared_grad_norm for replica in replicas],
            pp_forward_bytes=int(total.pp_forward_bytes),
            pp_backward_bytes=int(total.pp_backward_bytes),
            tied_bytes=int(total.tied_bytes),
            dp_bytes=int(total.dp_bytes),
            hidden_share=1.0 - total.waited_s / total.in_flight_s if total.in_flight_s else 1.0,
            peak_memory_bytes=int(largest.peak_memory_bytes),
            data_wait_s=highest.data_wait_s,
            micro_s=[[_micro_s(StepReport(*row)) for row in pipeline] for pipeline in by_replica.tolist()],
            stop=total.stop_votes > 0,
            all_stop=total.stop_votes == len(rows),
            save=total.save_votes > 0,
            failed_save=total.failed_saves > 0,
            pause=total.pause_votes > 0,
            skip=total.skip_votes > 0,
            loses_stage=any(all(_leaves(StepReport(*row)) for row in peers) for peers in by_stage.tolist()),
            snapshot_pending=total.snapshots_pending > 0,
            snapshot_interval=int(highest.snapshot_interval),
            joining=[number for number, replica in enumerate(replicas) if replica.joins],
            wanted=[None if (layer := StepReport(*row).wanted) < 0 else int(layer) for row in rows.tolist()],
        )


def _leaves(report: StepReport) -> bool:
    return bool(report.stop_votes or report.joins)


def _micro_s(report: StepReport) -> float:
    return report.compute_s / report.micros if report.micros else 0.0


def _check_texts(checksums: Sequence[float]) -> None:
    """Raise RunError unless all ranks that read segments of streamed sources read the same ones."""
    first = next((rank for rank, checksum in enumerate(checksums) if checksum), 0)
    others = [rank for rank, checksum in enumerate(checksums) if checksum not in (0.0, checksums[first])]
    if others:
        raise RunError(
            f"ranks {others} read other texts from a streamed source than rank {first}: compare the files, and the "
            "versions of datasets and tokenizers, of all hosts"
        )


class StepExchange:
    """Exchange of one step's reports between all ranks. Create it at the start of the step."""

    def __init__(self, groups: Groups, topology: Topology) -> None:
        self._gather = Gather([len(StepReport._fields)] * topology.world_size, groups)
        self._topology = topology

    def exchange(self, report: StepReport) -> StepSummary:
        """Send this rank's report to all ranks and aggregate theirs. Raises RunError if a rank does not answer."""
        rows = self._gather.rows(torch.tensor(report, dtype=torch.float64))
        return StepSummary.of(torch.stack(rows), self._topology)


class Gather:
    """All-gather of a few numbers of each rank.

    Every rank sends to every other rank directly; a ring of n ranks would take n - 1 round trips. Receives are posted
    on construction, so numbers that are sent later arrive without waiting for a handshake.
    lengths: how many numbers each rank sends, the same on all ranks; 0 = it sends none.
    """

    def __init__(self, lengths: Sequence[int], groups: Groups) -> None:
        group = groups.world
        self._group = group
        self._waits = groups.waits
        self._rows = [torch.zeros(length, dtype=torch.float64) for length in lengths]
        self._others = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
        self._receiving: dict[int, Work | None] = {}
        for row, rank in zip(self._rows, dist.get_process_group_ranks(group), strict=True):
            if rank != dist.get_rank() and len(row):
                with _naming([rank]):
                    self._receiving[rank] = dist.irecv(row, rank, group, TAG)

    def rows(self, mine: Tensor) -> list[Tensor]:
        """Send `mine`, fp64 [length of this rank], to all ranks; return the numbers of all ranks.

        Call it once. Raises RunError that names the ranks whose numbers did not arrive.
        """
        self._rows[self._group.rank()].copy_(mine)
        missing = list(self._receiving)
        with _naming(self._others):
            sending = [dist.isend(mine, rank, self._group, TAG) for rank in self._others if len(mine)]
        with _naming(missing):
            for work in self._receiving.values():
                self._wait(work)
                missing.pop(0)
        with _naming(self._others):
            for work in sending:
                self._wait(work)
        return self._rows

    def _wait(self, work: Work | None) -> None:
        assert work is not None
        self._waits.wait(work)


@contextlib.contextmanager
def _naming(ranks: Collection[int]) -> Iterator[None]:
    """Turn a failure inside into a RunError that names `ranks`, as they are at that time."""
    try:
        yield
    except RuntimeError as error:
        raise RunError(
            f"rank {dist.get_rank()} on {socket.gethostname()}: exchanging loss and gradient norm with ranks "
            f"{list(ranks)} failed ({reason(error)})",
            awaited=ranks,
        ) from error
