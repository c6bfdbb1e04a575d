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
    I = "I"  # noqa: E741
    W = "W"
    SF = "SF"
    RF = "RF"
    SB = "SB"
    RB = "RB"
    R = "R"
    SR = "SR"
    RR = "RR"
    SG = "SG"
    RG = "RG"
    RT = "RT"


class Route(NamedTuple):
    """Path of a tensor from the stage that has it to the stage that reads it."""

    send: Op
    receive: Op
    step: int
    """Index of the receiving stage minus that of the sending stage; 0 = each action names the other stage."""


ACTIVATION = Route(Op.SF, Op.RF, +1)
GRADIENT = Route(Op.SB, Op.RB, -1)
ROWS = Route(Op.SR, Op.RR, 0)
ROW_GRADIENTS = Route(Op.SG, Op.RG, 0)


class Operation(NamedTuple):
    """Row of the table of operations."""

    kind: Literal["compute", "send", "receive", "reduce"]
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
    # the two parts of B: gradients of the inputs, for which other stages wait, and of the weights
    Op.I: Operation("compute", GRADIENT, "backward", after=(Op.F,)),
    Op.W: Operation("compute", None, "backward", after=(Op.I,), completes=True),
    # the stage of a message is the one that performs it: the sender of a send, the receiver of a receive
    Op.SF: Operation("send", ACTIVATION),
    Op.RF: Operation("receive", ACTIVATION),
    Op.SB: Operation("send", GRADIENT),
    Op.RB: Operation("receive", GRADIENT),
    # all-reduce of the gradients of a stage over its replicas
    Op.R: Operation("reduce"),
    # rows of a tied table that a micro-batch is the first to use, and gradients of those that it is the last to use
    Op.SR: Operation("send", ROWS),
    Op.RR: Operation("receive", ROWS),
    Op.SG: Operation("send", ROW_GRADIENTS),
    Op.RG: Operation("receive", ROW_GRADIENTS),
    # all-reduce of the gradients of the tables of a stage, once those of their rows have arrived
    Op.RT: Operation("reduce"),
}

PRODUCERS = {
    ACTIVATION: [op for op, row in OPERATIONS.items() if row.kind == "compute" and row.route == ACTIVATION],
    GRADIENT: [op for op, row in OPERATIONS.items() if row.kind == "compute" and row.route == GRADIENT],
    ROWS: [],
    ROW_GRADIENTS: [op for op, row in OPERATIONS.items() if row.completes],
}
"""Computations after which a route can be taken; of rows, which are there before the step, none."""

TRAINING: tuple[tuple[Op, ...], ...] = ((Op.F, Op.B), (Op.F, Op.I, Op.W))
"""Ways to train a stage on a micro-batch: each lists all computations it takes."""
EVALUATION: tuple[tuple[Op, ...], ...] = ((Op.F,),)
"""Ways to evaluate a stage on a micro-batch."""


class Action(NamedTuple):
    """One operation on one stage, and on one micro-batch unless it is a reduce. Written "2F0": stage 2, F, micro 0.

    A message about a table is written with the stage at its other end: "3SR0:1" sends rows from stage 3 to stage 1.
    """

    op: Op
    stage: int
    micro: int = -1
    other: int = -1
    """Stage at the other end of a message whose route does not imply it."""

    def __str__(self) -> str:
        other = f":{self.other}" if self.other >= 0 else ""
        return f"{self.stage}{self.op.value}{self.micro if self.micro >= 0 else ''}{other}"

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
        step = self.operation.route.step if self.operation.kind == "send" else -self.operation.route.step
        return self.stage + step if step else self.other

    @property
    def receive(self) -> Action:
        """Receive of the message that this action sends."""
        assert self.operation.route is not None
        return Action(self.operation.route.receive, self.peer, self.micro, self.stage if self.other >= 0 else -1)

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
    match = re.fullmatch(r"(\d+)([A-Z]+)(\d*)(?::(\d+))?", text)
    if match and match[2] in OPERATIONS:
        operation = OPERATIONS[Op(match[2])]
        names_other = operation.route is not None and not operation.route.step
        if (operation.kind == "reduce") != bool(match[3]) and names_other == bool(match[4]):
            return Action(Op(match[2]), int(match[1]), int(match[3] or -1), int(match[4] or -1))
    names = "|".join(op for op, operation in OPERATIONS.items() if operation.kind != "reduce")
    raise ValueError(f"{text!r} is not an action; write <stage><{names}><micro-batch> or <stage>R: 2F0, 0R, 3SR0:1")


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
    """Stages dealt to the ranks of a pipeline in turn: stage s lies on rank s % ranks, or, if folded, every second turn
    goes backwards, so that the first and the last of 2 * ranks stages share a rank."""

    ranks: int
    """Ranks of the pipeline."""
    stages: int
    """Stages of the model; `ranks` or a multiple of it."""
    is_folded: bool = False

    @classmethod
    def of(cls, program: Program) -> Placement:
        """Return the placement of a program, whose stages count from 0: folded if its last rank has two in a row."""
        ranks = len(program)
        stages = 1 + max((action.stage for actions in program for action in actions), default=-1)
        return cls(ranks, stages, ranks > 1 and any(action.stage == ranks for action in program[-1]))

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds a stage."""
        turn, index = divmod(stage, self.ranks)
        return self.ranks - 1 - index if self.is_folded and turn % 2 else index

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages that a rank holds, in ascending order."""
        return [stage for stage in range(self.stages) if self.rank_of(stage) == rank]
