"""Schedules: in which order each rank of a pipeline runs the forwards (F) and backwards (B) of its stages.

A schedule is a frozen dataclass with one pure function, `rows`, and a formula, `bubble`, that the tests
hold against the simulated program. The bubble is the idle share of all ranks' time if every F takes as long
as every other, every B as long as every other, and messages no time at all; the ratio of B to F does not
enter.

To add a schedule, write such a class and name it in SCHEDULES: this is what gets it tested.
"""

from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import ClassVar, Protocol

from acsgd.pp.schedules.actions import Action, Op, Program


class Schedule(Protocol):
    """What a schedule offers."""

    @property
    def chunks(self) -> int:
        """Stages per rank."""

    def program(self, ranks: int, micros: int) -> Program:
        """Return the computes of each rank, in order."""

    def bubble(self, ranks: int, micros: int) -> Fraction:
        """Return the idle share of all ranks' time: 0 = no rank ever waits."""


@dataclass(frozen=True)
class GPipe:
    """All forwards, then all backwards. GPipe, Huang et al. 2019, arXiv:1811.06965.

    Every rank keeps the activations of all micro-batches.
    """

    chunks: ClassVar[int] = 1

    def program(self, ranks: int, micros: int) -> Program:
        """Return the computes of each rank, in order."""
        return [_row(Op.F, rank, range(micros)) + _row(Op.B, rank, range(micros)) for rank in range(ranks)]

    def bubble(self, ranks: int, micros: int) -> Fraction:
        """Return the idle share of all ranks' time."""
        return Fraction(ranks - 1, micros + ranks - 1)


@dataclass(frozen=True)
class OneFOneB:
    """Backward as soon as possible: as idle as GPipe, but keeps fewer activations.

    PipeDream-Flush, Narayanan et al. 2020, arXiv:2006.09503, is lead=1: rank r keeps ranks - r
    micro-batches, and every message stalls its receiver. In general it keeps lead * (ranks - r - 1) + 1,
    and messages that take up to (lead - 1) * (F + B) / 2 are hidden behind computes once the pipeline is
    full.
    """

    chunks: ClassVar[int] = 1

    lead: int = 1
    """Forwards by which a rank leads the next; higher = hides slower messages, keeps more activations."""

    def __post_init__(self) -> None:
        _check(lead=self.lead)

    def program(self, ranks: int, micros: int) -> Program:
        """Return the computes of each rank, in order."""
        program = []
        for rank in range(ranks):
            forwards, backwards = _row(Op.F, rank, range(micros)), _row(Op.B, rank, range(micros))
            program.append(_alternate(forwards, backwards, warmup=self.lead * (ranks - rank - 1)))
        return program

    def bubble(self, ranks: int, micros: int) -> Fraction:
        """Return the idle share of all ranks' time."""
        return Fraction(ranks - 1, micros + ranks - 1)


@dataclass(frozen=True)
class Interleaved:
    """1F1B over `chunks` stages per rank: about that much less bubble, for that many more messages.

    Narayanan et al. 2021, arXiv:2104.04473, section 2.2.2. Micro-batches pass in rounds: a rank takes a
    whole round through one of its stages, then through its next one. Where `ranks` does not divide
    `micros`, which Megatron-LM refuses, our rounds differ in length. The bubble is still the least that any
    order has: the last rank waits ranks - 1 forwards for its first input, and ranks - 1 backwards follow
    its last one. With fewer micro-batches than ranks it is again the least: the last stage waits for the
    first micro-batch to pass all others, and its last gradient has all others to pass.
    """

    chunks: int = 2
    """Stages per rank; higher = less idle, but more messages and more activations."""
    lead: int = 2
    """Forwards by which a rank leads the next; higher = hides slower messages, keeps more activations."""

    def __post_init__(self) -> None:
        _check(chunks=self.chunks, lead=self.lead)

    def program(self, ranks: int, micros: int) -> Program:
        """Return the computes of each rank, in order."""
        rounds = _rounds(ranks, micros)
        program = []
        for rank in range(ranks):
            mine = range(rank, ranks * self.chunks, ranks)
            forwards = [action for turn in rounds for stage in mine for action in _row(Op.F, stage, turn)]
            backwards = [action for turn in rounds for stage in mine[::-1] for action in _row(Op.B, stage, turn)]
            warmup = (self.chunks - 1) * len(rounds[0]) + self.lead * (ranks - rank - 1)
            program.append(_alternate(forwards, backwards, warmup))
        return program

    def bubble(self, ranks: int, micros: int) -> Fraction:
        """Return the idle share of all ranks' time."""
        idle = self.chunks * max(ranks - micros, 0) + min(ranks, micros) - 1
        return Fraction(idle, self.chunks * micros + idle)


SCHEDULES: dict[str, type[Schedule]] = {"gpipe": GPipe, "1f1b": OneFOneB, "interleaved": Interleaved}


def _row(op: Op, stage: int, micros: range) -> list[Action]:
    return [Action(op, stage, micro) for micro in micros]


def _alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    """Return `warmup` forwards, then a forward and a backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    turns = [action for turn in zip(forwards[warmup:], backwards, strict=False) for action in turn]
    return forwards[:warmup] + turns + backwards[len(backwards) - warmup :]


def _rounds(ranks: int, micros: int) -> list[range]:
    """Cut micro-batches into rounds that differ by one at most, none shorter than `ranks` if possible.

    A round shorter than `ranks` leaves ranks idle each time it passes from one chunk to the next.
    """
    count = max(1, micros // ranks)
    shorter, longer = divmod(micros, count)
    # the longer rounds first, because the first one sets the warm-up: a longer one after it would deadlock
    lengths = [shorter + (index < longer) for index in range(count)]
    return [range(start, end) for start, end in pairwise(accumulate(lengths, initial=0))]


def _check(**options: int) -> None:
    for name, value in options.items():
        if value < 1:
            raise ValueError(f"{name}={value}: must be at least 1; type {name}=1")
