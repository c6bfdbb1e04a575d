"""Schedules: the order in which each rank of a pipeline runs the forwards (F) and backwards (B) of its stages.

A backward may be split into two parts, the gradients of the inputs (I), for which other stages wait, and those of the
weights (W). A schedule is a frozen dataclass with a pure function, `program`, and a formula, `bubble`, against which
the tests check the simulated program. The bubble is the idle share of the time of all ranks if all F take equally
long, all B take equally long, and messages take no time; it does not depend on the ratio of B to F, unless backwards
are split: then it is that of F, I and W that take equally long.

To add a schedule, write such a class and add it to SCHEDULES; the tests run over this table.
"""

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, count, pairwise
from typing import ClassVar, Protocol

from acsgd.pp.schedules.actions import Action, Op, Placement, Program


class Schedule(Protocol):
    """Interface of a schedule."""

    @property
    def chunks(self) -> int:
        """Stages per rank."""

    def program(self, ranks: int, micros: int) -> Program:
        """Return the computations of each rank, in order."""

    def bubble(self, ranks: int, micros: int) -> Fraction:
        """Return the idle share of the time of all ranks, in [0, 1)."""


@dataclass(frozen=True)
class GPipe:
    """All forwards, then all backwards. GPipe, Huang et al. 2019, arXiv:1811.06965.

    Every rank keeps the activations of all micro-batches.
    """

    chunks: ClassVar[int] = 1

    def program(self, ranks: int, micros: int) -> Program:
        """Return the computations of each rank, in order."""
        return [_computes(Op.F, rank, range(micros)) + _computes(Op.B, rank, range(micros)) for rank in range(ranks)]

    def bubble(self, ranks: int, micros: int) -> Fraction:
        """Return the idle share of the time of all ranks."""
        return Fraction(ranks - 1, micros + ranks - 1)


@dataclass(frozen=True)
class OneFOneB:
    """1F1B: each backward as early as possible. The bubble of GPipe with fewer micro-batches in flight.

    lead=1 is PipeDream-Flush, Narayanan et al. 2020, arXiv:2006.09503: rank r keeps the activations of ranks - r
    micro-batches, and every message stalls its receiver. In general rank r keeps lead * (ranks - r - 1) + 1, and once
    the pipeline is full, messages of up to (lead - 1) * (F + B) / 2 overlap with computations.

    split_last: every rank keeps up to as many as the first one. With lead=2 or more, and F, I and W that are equal,
    each rank waits for its first input alone, as in ZeroBubble, also if messages take up to (lead - 2) * W, unless
    there are few micro-batches.
    """

    chunks: ClassVar[int] = 1

    lead: int = 1
    """Number of forwards by which a rank is ahead of the next; higher = slower messages overlap, more activations."""
    split_last: bool = False
    """Whether the last lead * (ranks - 1) + 1 backwards are split, so that their gradients of weights fill the waits
    while the pipeline drains: almost the bubble of "zb", and only these backwards take the longer time of two parts."""

    def __post_init__(self) -> None:
        _check_positive(lead=self.lead)

    def program(self, ranks: int, micros: int) -> Program:
        """Return the computations of each rank, in order."""
        # split are those that the first rank runs after its last forward
        whole = max(0, micros - self.lead * (ranks - 1) - 1) if self.split_last else micros
        return _one_f_one_b(ranks, micros, self.lead, whole)

    def bubble(self, ranks: int, micros: int) -> Fraction:
        """Return the idle share of the time of all ranks. split_last: a lower bound where that of ZeroBubble is one."""
        if not self.split_last:
            return Fraction(ranks - 1, micros + ranks - 1)
        if self.lead == 1 and micros > ranks:
            return Fraction(2 * (ranks - 1), 3 * micros + 2 * (ranks - 1))
        return ZeroBubble().bubble(ranks, micros)


@dataclass(frozen=True)
class Interleaved:
    """1F1B with `chunks` stages per rank: about 1/chunks of the bubble for `chunks` times the messages.

    Narayanan et al. 2021, arXiv:2104.04473, section 2.2.2. Micro-batches pass in rounds: a rank takes a
    whole round through one of its stages, then through its next one. Where `ranks` does not divide
    `micros`, which Megatron-LM refuses, rounds differ in length. The bubble is still the smallest that any
    order has: the last rank waits ranks - 1 forwards for its first input, and ranks - 1 backwards follow
    its last one. With fewer micro-batches than ranks it is again the smallest: the last stage waits until the
    first micro-batch has passed all others, and its last gradient has to pass all others.
    """

    chunks: int = 2
    """Stages per rank; higher = smaller bubble, more messages, more activations."""
    lead: int = 2
    """Number of forwards by which a rank is ahead of the next; higher = slower messages overlap, more activations."""

    def __post_init__(self) -> None:
        _check_positive(chunks=self.chunks, lead=self.lead)

    def program(self, ranks: int, micros: int) -> Program:
        """Return the computations of each rank, in order."""
        rounds = _rounds(ranks, micros)
        program = []
        for rank in range(ranks):
            stages = Placement(ranks, ranks * self.chunks).stages_of(rank)
            forwards = [action for turn in rounds for stage in stages for action in _computes(Op.F, stage, turn)]
            backwards = [action for turn in rounds for stage in stages[::-1] for action in _computes(Op.B, stage, turn)]
            warmup = (self.chunks - 1) * len(rounds[0]) + self.lead * (ranks - rank - 1)
            program.append(_alternate(forwards, backwards, warmup))
        return program

    def bubble(self, ranks: int, micros: int) -> Fraction:
        """Return the idle share of the time of all ranks."""
        idle = self.chunks * max(ranks - micros, 0) + min(ranks, micros) - 1
        return Fraction(idle, self.chunks * micros + idle)


@dataclass(frozen=True)
class ZeroBubble:
    """1F1B with split backwards: gradients of weights fill the waits for other stages.

    lead=1 is ZB-H1, Qi et al. 2023, arXiv:2401.10241: with as many micro-batches as ranks, or more, each rank idles for
    (ranks - 1) * (F + I - W), for W no longer than F and I, where 1F1B idles for (ranks - 1) * (F + I + W). Every rank
    keeps the activations of lead * (ranks - 1) + 1 micro-batches at most, as the first one of 1F1B does. In general
    messages of up to (lead - 1) * W overlap with computations, if F, I and W are equal: each rank waits for its first
    input alone, unless there are few micro-batches.
    """

    chunks: ClassVar[int] = 1

    lead: int = 1
    """Number of forwards by which a rank is ahead of the next; higher = slower messages overlap, more activations."""

    def __post_init__(self) -> None:
        _check_positive(lead=self.lead)

    def program(self, ranks: int, micros: int) -> Program:
        """Return the computations of each rank, in order."""
        return _one_f_one_b(ranks, micros, self.lead, whole=0)

    def bubble(self, ranks: int, micros: int) -> Fraction:
        """Return the idle share of the time of all ranks.

        A lower bound with lead=3 or more and fewer than lead * (ranks - 1) + 1 micro-batches.
        """
        idle = 2 * (ranks - 1) - min(ranks, micros) + 1
        return Fraction(idle, 3 * micros + idle)


@dataclass(frozen=True)
class ZeroBubbleV:
    """ZB-V: split backwards, and two stages per rank, of which the first rank has the first and the last.

    Qi et al. 2024, arXiv:2405.15362. With 2 * ranks - 1 micro-batches or more, and F, I and W that take equally long,
    each rank waits for its first input alone. It keeps the activations of at most as many micro-batches as there are
    ranks. Tables that the first and the last layer share do not travel.
    """

    chunks: ClassVar[int] = 2

    def program(self, ranks: int, micros: int) -> Program:
        """Return the computations of each rank, in order."""
        # of a step with as many micro-batches as fill the pipeline, without those that are too many
        full = max(micros, 2 * ranks - 1)
        return [[each for each in _of_v(rank, ranks, full) if each.micro < micros] for rank in range(ranks)]

    def bubble(self, ranks: int, micros: int) -> Fraction:
        """Return the idle share of the time of all ranks."""
        idle = max(ranks - 1, 4 * (ranks - 1) - 2 * (micros - 1))
        return Fraction(idle, 6 * micros + idle)


SCHEDULES: dict[str, type[Schedule]] = {
    "gpipe": GPipe,
    "1f1b": OneFOneB,
    "interleaved": Interleaved,
    "zb": ZeroBubble,
    "zbv": ZeroBubbleV,
}


@dataclass(frozen=True)
class AutoSchedule:
    """Measure the layers on each rank and the links between ranks at the start, and take the schedule whose step is
    the shortest, as the simulator predicts it."""


CHOICE: dict[str, type[AutoSchedule]] = {"auto": AutoSchedule}
CANDIDATES = (
    *("1f1b", "zb", "1f1b:lead=2", "1f1b:lead=2,split_last=true", "zbv", "interleaved:chunks=2"),
    *("1f1b:lead=4", "1f1b:lead=4,split_last=true", "1f1b:lead=8", "1f1b:lead=8,split_last=true"),
)
"""Schedules among which "auto" chooses, about in the order of the activations that they keep."""


def is_chosen(spec: str) -> bool:
    """Return whether pp.schedule leaves the choice of the schedule to the start of the run."""
    return spec.partition(":")[0].strip() in CHOICE


def _computes(op: Op, stage: int, micros: range) -> list[Action]:
    return [Action(op, stage, micro) for micro in micros]


def _one_f_one_b(ranks: int, micros: int, lead: int, whole: int) -> Program:
    """Return 1F1B, of which the backwards of the micro-batches from `whole` on are split."""
    # a rank has fewer forwards ahead of their backwards than the first one: as many W may be behind them
    behind = max(1, min(lead, micros // max(1, ranks - 1)))
    program = []
    for rank in range(ranks):
        backwards = _computes(Op.B, rank, range(whole)) + _computes(Op.I, rank, range(whole, micros))
        computes = _alternate(_computes(Op.F, rank, range(micros)), backwards, warmup=lead * (ranks - rank - 1))
        program.append(_add_weights(computes, behind * rank))
    return program


def _alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    """Return `warmup` forwards, then forwards and backwards in turn, then the remaining backwards."""
    warmup = min(warmup, len(forwards))
    turns = [action for turn in zip(forwards[warmup:], backwards, strict=False) for action in turn]
    return forwards[:warmup] + turns + backwards[len(backwards) - warmup :]


def _of_v(rank: int, ranks: int, micros: int) -> Iterator[Action]:
    """Yield the computations of a rank of ZB-V, as in torch.distributed.pipelining. micros: 2 * ranks - 1 or more."""
    counts: defaultdict[tuple[int, str], Iterator[int]] = defaultdict(count)
    first, last = rank, 2 * ranks - 1 - rank

    def run(stage: int, ops: str, times: int = 1) -> Iterator[Action]:
        for op in ops * times:
            yield Action(Op(op), stage, next(counts[stage, op]))

    yield from run(first, "F", 2 * (ranks - rank) - 1)
    for _ in range(rank):
        yield from run(last, "F")
        yield from run(first, "F")
    yield from run(last, "FIW", ranks - rank)
    for turn in range(micros - ranks):
        yield from run(first, "FIW" if turn < micros - 2 * ranks + 1 + rank else "IW")
        yield from run(last, "FIW")
    for _ in range(rank):
        yield from run(first, "I")
        yield from run(last, "I")
    yield from run(first, "IW", ranks - rank)
    yield from run(last, "W", rank)
    yield from run(first, "W", rank)


def _add_weights(computes: list[Action], behind: int) -> list[Action]:
    """Return computations with the gradients of weights, each after some more gradients of inputs than its own."""
    result: list[Action] = []
    waiting: deque[Action] = deque()
    for action in computes:
        result.append(action)
        if action.op is Op.I:
            waiting.append(action._replace(op=Op.W))
            if len(waiting) > behind:
                result.append(waiting.popleft())
    return [*result, *waiting]


def _rounds(ranks: int, micros: int) -> list[range]:
    """Split micro-batches into rounds whose lengths differ by at most one, none shorter than `ranks` if possible.

    A round shorter than `ranks` leaves ranks idle each time it passes from one chunk to the next.
    """
    count = max(1, micros // ranks)
    shorter, longer = divmod(micros, count)
    # the longer rounds first, because the first one sets the warm-up: a longer one after it would deadlock
    lengths = [shorter + (index < longer) for index in range(count)]
    return [range(start, end) for start, end in pairwise(accumulate(lengths, initial=0))]


def _check_positive(**options: int) -> None:
    for name, value in options.items():
        if value < 1:
            raise ValueError(f"{name}={value}: must be at least 1; type {name}=1")
