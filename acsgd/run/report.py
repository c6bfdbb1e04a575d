"""What every rank reports to every other at the end of a step, in one message, and what all ranks make of it."""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from acsgd.comm.waits import Work
from acsgd.errors import RunError, reason
from acsgd.groups import Groups, collective_errors
from acsgd.topology import Topology

TAG = 1
"""Tag of these messages; the group carries no other point-to-point messages."""

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")
Numbers = Sequence[Sequence[float]]
"""One number of each rank, [replicas][ranks per pipeline]."""


@dataclass(frozen=True)
class StepField(Generic[T_co]):
    """A number that each rank reports with a step, sent as fp64, and its reduction over the ranks.

    Whoever needs a number declares its field: see `StepHook`. Sums are in the order of the ranks.
    """

    name: str
    """Fields of one name are reductions of the same number."""
    reduce: Callable[[Numbers], T_co]

    def reduced(self, reduce: Callable[[Numbers], T]) -> StepField[T]:
        """Return a field with another reduction of the same number."""
        return StepField(self.name, reduce)


Report = Mapping[StepField[Any], float]
"""Numbers of one rank. All ranks report the same fields in a step, in the same order."""


def total(numbers: Numbers) -> float:
    """Return the sum over all ranks."""
    return sum(by_rank(numbers))


def highest(numbers: Numbers) -> float:
    """Return the maximum over all ranks."""
    return max(by_rank(numbers))


def on_any(numbers: Numbers) -> bool:
    """Return whether any rank reports another number than 0."""
    return any(by_rank(numbers))


def on_all(numbers: Numbers) -> bool:
    """Return whether all ranks report another number than 0."""
    return all(by_rank(numbers))


def total_if_on_all(numbers: Numbers) -> float:
    """Return the sum over all ranks; 0 if a rank reports 0."""
    return total(numbers) if on_all(numbers) else 0.0


def by_rank(numbers: Numbers) -> list[float]:
    """Return the number of each rank, those of the first replica first."""
    return [number for replica in numbers for number in replica]


def by_replica(numbers: Numbers) -> list[float]:
    """Return the sum over the ranks of each replica."""
    return [sum(replica) for replica in numbers]


def highest_by_replica(numbers: Numbers) -> list[float]:
    """Return the maximum over the ranks of each replica."""
    return [max(replica) for replica in numbers]


def in_grid(numbers: Numbers) -> Numbers:
    """Return the number of each rank, [replicas][ranks per pipeline]."""
    return numbers


LOSS = StepField("loss", total)
"""A rank's part of the loss that backward started from, without the loss scale."""
TARGETS = StepField("targets", total)
"""Target tokens; 0 on ranks without the last stage."""
REPLICA_TARGETS = TARGETS.reduced(by_replica)
TOKENS = StepField("tokens", total)
"""Input tokens, without padding; 0 on ranks without the last stage."""
REPLICA_SQUARED_NORMS = StepField("squared_grad_norm", by_replica)
"""Squared norm of a rank's gradients as backward left them."""
PP_FORWARD_BYTES = StepField("pp_forward_bytes", total)
PP_BACKWARD_BYTES = StepField("pp_backward_bytes", total)
TIED_BYTES = StepField("tied_bytes", total)
DP_BYTES = StepField("dp_bytes", total)
IN_FLIGHT_S = StepField("in_flight_s", total)
"""Time between posting transfers and receiving them, seconds."""
PP_FORWARD_WAIT_S = StepField("pp_forward_wait_s", total)
"""The part of it that a rank waited for activations, bubble included: a peer that still computes is waited for."""
PP_BACKWARD_WAIT_S = StepField("pp_backward_wait_s", total)
TIED_WAIT_S = StepField("tied_wait_s", total)
DP_WAIT_S = StepField("dp_wait_s", total)
WAITS = (PP_FORWARD_WAIT_S, PP_BACKWARD_WAIT_S, TIED_WAIT_S, DP_WAIT_S)
PEAK_MEMORY_BYTES = StepField("peak_memory_bytes", highest_by_replica)
DATA_WAIT_S = StepField("data_wait_s", highest)
CHECKSUM = StepField("checksum", by_rank)
"""Checksum of the batch: an integer, which fp64 represents exactly; 0 = it has none."""
PEAK_FLOPS = StepField("peak_flops", total_if_on_all)
"""Peak rate of matrix products of a rank's device, floating-point operations per second; 0 = unknown."""
MICROS = StepField("micros", in_grid)
"""Number of micro-batches of the rank's replica."""
ALL_MICROS = MICROS.reduced(lambda numbers: sum(highest_by_replica(numbers)))
"""Number of micro-batches of all replicas; those that several of them compute count as often."""
COMPUTE_S = StepField("compute_s", in_grid)
"""Time from the first action to the reduced gradients, without waits for other ranks, seconds."""
STEP_FIELDS: tuple[StepField[Any], ...] = (
    LOSS,
    TARGETS,
    TOKENS,
    REPLICA_SQUARED_NORMS,
    PP_FORWARD_BYTES,
    PP_BACKWARD_BYTES,
    TIED_BYTES,
    DP_BYTES,
    IN_FLIGHT_S,
    *WAITS,
    PEAK_MEMORY_BYTES,
    DATA_WAIT_S,
    CHECKSUM,
    PEAK_FLOPS,
    MICROS,
    COMPUTE_S,
)
"""Fields of the step itself."""
FIELDS_BY_RANK = (
    COMPUTE_S,
    *WAITS,
    PP_FORWARD_BYTES,
    PP_BACKWARD_BYTES,
    DP_BYTES,
    PEAK_MEMORY_BYTES,
)
"""Fields whose number of each rank is in metrics.jsonl."""


@dataclass(frozen=True)
class StepSummary:
    """The reports of all ranks for one step; equal on all ranks."""

    numbers: Mapping[str, Numbers]
    """By the name of the field; JSON values."""

    @classmethod
    def of(cls, reports: Sequence[Report], topology: Topology) -> StepSummary:
        """Return the summary of the reports of all ranks, which have the same fields in the same order."""
        return cls.of_columns(reports[0], zip(*(report.values() for report in reports), strict=True), topology)

    @classmethod
    def of_columns(
        cls, fields: Iterable[StepField[Any]], columns: Iterable[Sequence[float]], topology: Topology
    ) -> StepSummary:
        """Return the summary of fields. columns: of each field, the number of each rank."""
        pipelines = topology.lines("pipeline")
        numbers = zip(fields, columns, strict=True)
        return cls({f.name: [[column[rank] for rank in ranks] for ranks in pipelines] for f, column in numbers})

    @classmethod
    def zeros(cls, topology: Topology) -> StepSummary:
        """Return the summary of a step for which nothing was reported."""
        return cls.of([dict.fromkeys(STEP_FIELDS, 0.0)] * topology.world_size, topology)

    @property
    def num_ranks(self) -> int:
        """Number of ranks that have reported."""
        return sum(map(len, self.numbers[LOSS.name]))

    def by_rank(self) -> dict[str, Numbers]:
        """Return FIELDS_BY_RANK by name, to 6 significant digits; without those that are 0 on all ranks."""
        grids = {field.name: self.numbers.get(field.name, ()) for field in FIELDS_BY_RANK}
        return {
            name: [[_shortened(number) for number in replica] for replica in grid]
            for name, grid in grids.items()
            if any(map(any, grid))
        }

    def __getitem__(self, field: StepField[T]) -> T:
        """Return a reduction. Of a field that was not reported, it is that of zeros."""
        zeros = [[0.0] * len(replica) for replica in self.numbers[LOSS.name]]
        return field.reduce(self.numbers.get(field.name, zeros))


def _shortened(number: float) -> float:
    """Return a number as metrics.jsonl has it: integers without ".0", others with 6 significant digits."""
    short = number if number.is_integer() else float(f"{number:.6g}")
    return int(short) if short.is_integer() else short


class StepExchange:
    """Exchange of one step's reports between all ranks. Create it at the start of the step.

    fields: what all ranks report, in the same order; CHECKSUM is among them.
    """

    def __init__(self, groups: Groups, topology: Topology, fields: Iterable[StepField[Any]]) -> None:
        self._fields = [*fields]
        self._gather = Gather([len(self._fields)] * topology.world_size, groups)
        self._topology = topology

    def exchange(self, report: Report) -> StepSummary:
        """Send this rank's report to all ranks and return those of all.

        Raises RunError if a rank does not answer, and, the same on all ranks, if they read different texts.
        """
        mine = torch.tensor([report[field] for field in self._fields], dtype=torch.float64)
        columns = torch.stack(self._gather.rows(mine)).T.tolist()
        check_texts(columns[self._fields.index(CHECKSUM)])
        return StepSummary.of_columns(self._fields, columns, self._topology)


def check_texts(checksums: Sequence[float]) -> None:
    """Raise RunError unless all ranks that read segments of streamed sources read the same ones. checksums: by rank."""
    first = next((rank for rank, checksum in enumerate(checksums) if checksum), 0)
    others = [rank for rank, checksum in enumerate(checksums) if checksum not in (0.0, checksums[first])]
    if others:
        raise RunError(
            f"ranks {others} read other texts from a streamed source than rank {first}: compare the files, and the "
            "versions of datasets and tokenizers, of all hosts"
        )


class Message(NamedTuple):
    """A message of an exchange of numbers, as one of its ends sees it. Ranks are positions in the group."""

    peer: int
    ranks: range
    """Whose numbers it carries."""


class Round(NamedTuple):
    """What a rank sends, and then waits for, in an exchange of numbers."""

    sent: list[Message]
    received: list[Message]


MAX_DIRECT_RANKS = 32
"""Number of ranks up to which each sends its numbers to every other. A second round takes the delay of a link more."""
MAX_DIRECT_ON_HOST = 8
"""The same unless `Groups.has_several_hosts`: messages within a host have no delay."""


def gather_rounds(rank: int, size: int, most_direct: int = MAX_DIRECT_RANKS) -> list[Round]:
    """Return the rounds in which a rank gets the numbers of all ranks.

    Up to `most_direct` ranks exchange directly, in one round. More are divided into about sqrt(size) rows: a rank
    first exchanges with those of its row, and then sends the numbers of its row to about one rank of each other row.
    That is 2 * sqrt(size) messages per rank in place of `size`, and the delay of one more message.
    """
    count = 1 if size <= most_direct else math.isqrt(size)
    cuts = [size * row // count for row in range(count + 1)]
    rows = [range(*cut) for cut in pairwise(cuts)]
    own = next(row for row in rows if rank in row)
    direct = [Message(peer, range(peer, peer + 1)) for peer in own if peer != rank]
    rounds = [Round([Message(each.peer, range(rank, rank + 1)) for each in direct], direct)]
    others, column = [row for row in rows if row != own], own.index(rank)
    if others:
        sent = [Message(peer, own) for row in others for peer in row[column :: len(own)]]
        rounds.append(Round(sent, [Message(row[column % len(row)], row) for row in others]))
    return rounds


class Gather:
    """All-gather of a few numbers of each rank, in one or two rounds of messages; see `gather_rounds`.

    A ring of n ranks would take n - 1. Receives are posted on construction, so numbers that are sent later arrive
    without waiting for a handshake. lengths: how many numbers each rank sends, the same on all ranks; 0 = none.
    """

    def __init__(self, lengths: Sequence[int], groups: Groups) -> None:
        group = groups.world
        self._group, self._ranks, self._waits = group, group.ranks, groups.waits
        self._ends = [0, *accumulate(lengths)]
        self._numbers = torch.zeros(self._ends[-1], dtype=torch.float64)
        most_direct = MAX_DIRECT_RANKS if groups.has_several_hosts else MAX_DIRECT_ON_HOST
        self._rounds = gather_rounds(group.rank(), group.size(), most_direct)
        self._receiving = [self._post(each.received) for each in self._rounds]

    def rows(self, mine: Tensor) -> list[Tensor]:
        """Send `mine`, fp64 [length of this rank], to all ranks; return the numbers of all ranks.

        Call it once. Raises RunError that names the ranks from which numbers did not arrive.
        """
        me = self._group.rank()
        self._of(range(me, me + 1)).copy_(mine)
        sending = dict[int, Work]()
        for each, receiving in zip(self._rounds, self._receiving, strict=True):
            for message in each.sent:
                sending |= self._send(message)
            self._wait(receiving)
        self._wait(sending)
        return [self._numbers[begin:end] for begin, end in pairwise(self._ends)]

    def _of(self, ranks: range) -> Tensor:
        """Return the numbers of some ranks, in one piece."""
        return self._numbers[self._ends[ranks.start] : self._ends[ranks.stop]]

    def _post(self, messages: Sequence[Message]) -> dict[int, Work]:
        """Post the receives of messages; return them by rank."""
        receiving = {}
        for peer, ranks in ((self._ranks[peer], ranks) for peer, ranks in messages):
            if len(numbers := self._of(ranks)):
                with _naming([peer]):
                    receiving[peer] = self._group.irecv(numbers, peer, TAG)
        return receiving

    def _send(self, message: Message) -> dict[int, Work]:
        """Start to send a message; return it by rank, nothing if it is empty."""
        peer, numbers = self._ranks[message.peer], self._of(message.ranks)
        with _naming([peer]):
            return {peer: self._group.isend(numbers, peer, TAG)} if len(numbers) else {}

    def _wait(self, works: Mapping[int, Work]) -> None:
        """Wait for messages from or to some ranks."""
        missing = [*works]
        with _naming(missing):
            for work in works.values():
                self._waits.wait(work)
                missing.pop(0)


class Vote:
    """Repeated vote of all ranks on whether to leave what they do together, such as an evaluation.

    A round ends in the next one, so that no rank waits for the round trip of a message.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._round: tuple[Tensor, Work] | None = None

    def cast(self, *votes: bool) -> list[bool]:
        """Begin a round; return for each vote whether any rank has cast it in the round before. A collective.

        Returns an empty list in the first round.
        """
        before, group = self.settle(), self._groups.world
        numbers = torch.tensor(votes, dtype=torch.int64)
        with collective_errors("voting", group):
            self._round = numbers, group.all_reduce(numbers, dist.ReduceOp.MAX)
        return before

    def settle(self) -> list[bool]:
        """End the last round; return its result, empty if there was none. A collective."""
        if self._round is None:
            return []
        (numbers, work), self._round = self._round, None
        with collective_errors("voting", self._groups.world):
            self._groups.waits.wait(work)
        return numbers.bool().tolist()


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
