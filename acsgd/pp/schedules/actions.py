"""Actions, the instructions of a pipeline program, the table of their operations, and the placement of stages."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import Literal, NamedTuple


class Op(StrEnum):
    """Name of an operation, as drawn."""

    F = "F"
    B = "B"
    SF = "SF"
    RF = "RF"
    SB = "SB"
    RB = "RB"
    R = "R"
    SR = "SR"
    SG = "SG"


class Route(NamedTuple):
    """Path of a tensor from the stage that computes it to the neighbouring stage that reads it."""

    send: Op
    receive: Op
    step: int
    """Index of the receiving stage minus that of the sending stage."""


ACTIVATION = Route(Op.SF, Op.RF, +1)
GRADIENT = Route(Op.SB, Op.RB, -1)


class Operation(NamedTuple):
    """Row of the table of operations."""

    kind: Literal["compute", "send", "receive", "reduce", "rows"]
    route: Route | None = None
    """For a computation: route of its output, and of the input it gets from the other neighbour. For a message: its
    route."""
    phase: Literal["forward", "backward"] | None = None
    """Pass that a computation belongs to."""
    after: tuple[Op, ...] = ()
    """Computations of the same stage and micro-batch whose results a computation needs."""
    completes: bool = False
    """Whether a computation is the last of a micro-batch: it adds to the weights' gradients and frees the activations
    that the forward kept."""


OPERATIONS = {
    Op.F: Operation("compute", ACTIVATION, "forward"),
    Op.B: Operation("compute", GRADIENT, "backward", after=(Op.F,), completes=True),
    # the stage of a message is the one that performs it: the sender of a send, the receiver of a receive
    Op.SF: Operation("send", ACTIVATION),
    Op.RF: Operation("receive", ACTIVATION),
    Op.SB: Operation("send", GRADIENT),
    Op.RB: Operation("receive", GRADIENT),
    # all-reduce of the gradients of a stage over its replicas
    Op.R: Operation("reduce"),
    # rows of a tied table, and their gradients. In simulated programs only (rows.py); their stage looks up the rows
    Op.SR: Operation("rows"),
    Op.SG: Operation("rows"),
}

PRODUCERS = {
    route: [op for op, row in OPERATIONS.items() if row.kind == "compute" and row.route == route]
    for route in (ACTIVATION, GRADIENT)
}
"""Computations whose output takes a route."""

TRAINING: tuple[tuple[Op, ...], ...] = ((Op.F, Op.B),)
"""Ways to train a stage on a micro-batch: each lists all computations it takes."""
EVALUATION: tuple[tuple[Op, ...], ...] = ((Op.F,),)
"""Ways to evaluate a stage on a micro-batch."""


class Action(NamedTuple):
    """One operation on one stage, and on one micro-batch unless it is a reduce. Written "2F0": stage 2, F, micro 0."""

    op: Op
    stage: int
    micro: int = -1

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{self.micro if self.micro >= 0 else ''}"

    @property
    def operation(self) -> Operation:
        """Row of this action in OPERATIONS."""
        return OPERATIONS[self.op]

    @property
    def is_compute(self) -> bool:
        """Whether this is a computation."""
        return self.operation.kind == "compute"

    @property
    def peer(self) -> int:
        """Stage at the other end of a message."""
        assert self.operation.route is not None
        step = self.operation.route.step
        return self.stage + (step if self.operation.kind == "send" else -step)

    @property
    def boundary(self) -> int:
        """Boundary that a message crosses, named by the stage before it."""
        return min(self.stage, self.peer)


Program = list[list[Action]]
"""Actions of each rank of a pipeline, in the order in which the rank performs them."""
Position = tuple[int, int]
"""Rank, and index among the actions of the rank."""


def parse_action(text: str) -> Action:
    """Read an action as `str` writes it. Raises ValueError."""
    match = re.fullmatch(r"(\d+)([A-Z]+)(\d*)", text)
    if not match or match[2] not in OPERATIONS or (OPERATIONS[Op(match[2])].kind == "reduce") == bool(match[3]):
        names = "|".join(op for op, operation in OPERATIONS.items() if operation.kind != "reduce")
        raise ValueError(f"{text!r} is not an action; write <stage><{names}><micro-batch> or <stage>R: 2F0, 0R")
    stage, op, micro = match.groups()
    return Action(Op(op), int(stage), int(micro)) if micro else Action(Op(op), int(stage))


def forwards(program: Program) -> Program:
    """Return the forwards of a program, in their order: the computations of an evaluation.

    If the program can run, so can its forwards: they wait for forwards alone.
    """
    return [[action for action in actions if action.operation.phase == "forward"] for actions in program]


def without_backwards(program: Program, below: int) -> Program:
    """Return a program without the backwards of the stages with an index less than `below`, whose weights are frozen.

    If the program can run, so can this one: only backwards of such stages wait for them.
    """
    return [
        [action for action in actions if action.operation.phase != "backward" or action.stage >= below]
        for actions in program
    ]


def draw(program: Program, mark: Collection[Position] = ()) -> str:
    """Draw the computations of each rank in order, one line per rank, and every marked action as >action<."""
    cells = [
        [
            f">{action}<" if (rank, index) in mark else f" {action} "
            for index, action in enumerate(actions)
            if action.is_compute or (rank, index) in mark
        ]
        for rank, actions in enumerate(program)
    ]
    width = max((len(cell) for line in cells for cell in line), default=0)
    return label_ranks(["".join(cell.ljust(width) for cell in line) for line in cells])


def label_ranks(lines: Sequence[str]) -> str:
    """Prefix each line with its rank and join the lines."""
    digits = len(str(len(lines) - 1))
    return "\n".join(f"rank {rank:{digits}} |{line}".rstrip() for rank, line in enumerate(lines))


class Placement(NamedTuple):
    """Stages dealt to the ranks of a pipeline in turn: stage s lies on rank s % ranks."""

    ranks: int
    """Ranks of the pipeline."""
    stages: int
    """Stages of the model; `ranks` or a multiple of it."""

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds a stage."""
        return stage % self.ranks

    def stages_of(self, rank: int) -> range:
        """Return the stages that a rank holds, in ascending order."""
        return range(rank, self.stages, self.ranks)
