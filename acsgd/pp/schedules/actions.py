"""What each rank of a pipeline does, in order: the words of a program.

A *program* has one row of actions per pipeline rank. Stage s lives on rank s % ranks, so a rank that owns
several stages sees every micro-batch pass by several times. A schedule (schedules.py) writes the computes,
F and B, of which evaluation takes the `forwards`; `lower` adds the messages and the reduce of the replicas;
`validate` (laws.py) proves, without a process, that the ranks can run it; simulate.py puts it on a time axis.

A receive only *posts* a buffer and never blocks: the compute that needs the tensor waits for it.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple


class Op(StrEnum):
    """The kinds of action; the value is what a drawn program shows."""

    F = "F"  # forward of one micro-batch through one stage
    B = "B"  # backward
    SF = "SF"  # send an activation to the next stage; the stage named is the sender
    RF = "RF"  # post the receive of an activation; the stage named is the receiver
    SB = "SB"  # send a gradient to the previous stage; the stage named is the sender
    RB = "RB"  # post the receive of a gradient; the stage named is the receiver
    R = "R"  # reduce the gradients of a stage over its replicas


class Action(NamedTuple):
    """One thing that one rank does. `str` gives "2F0": stage 2, forward, micro-batch 0."""

    op: Op
    stage: int
    micro: int = -1

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{self.micro if self.micro >= 0 else ''}"


Program = list[list[Action]]
Position = tuple[int, int]  # rank, index in its row


def parse_action(text: str) -> Action:
    """Read an action as `str` writes it. Raises ValueError."""
    match = re.fullmatch(r"(\d+)(?:(R)|(F|B|SF|RF|SB|RB)(\d+))", text)
    if not match:
        raise ValueError(f"{text!r} is not an action; write <stage><F|B|SF|RF|SB|RB><micro> or <stage>R: 2F0, 0R")
    stage, reduce, op, micro = match.groups()
    return Action(Op.R, int(stage)) if reduce else Action(Op(op), int(stage), int(micro))


def draw(program: Program, mark: Collection[Position] = ()) -> str:
    """Draw the computes of each rank in their order, a line per rank, and every marked action >like this<."""
    rows = [
        [
            f">{action}<" if (rank, index) in mark else f" {action} "
            for index, action in enumerate(row)
            if action.op in ROUTES or (rank, index) in mark
        ]
        for rank, row in enumerate(program)
    ]
    width = max((len(cell) for row in rows for cell in row), default=0)
    return grid(["".join(cell.ljust(width) for cell in row) for row in rows])


def grid(lines: Sequence[str]) -> str:
    """Put the number of its rank before each line."""
    digits = len(str(len(lines) - 1))
    return "\n".join(f"rank {rank:{digits}} |{line}".rstrip() for rank, line in enumerate(lines))


class Route(NamedTuple):
    """How the result of one kind of compute reaches the stage that needs it next."""

    send: Op
    receive: Op
    step: int  # from the stage that sends to the stage that receives


ROUTES = {Op.F: Route(Op.SF, Op.RF, +1), Op.B: Route(Op.SB, Op.RB, -1)}
SENT_AFTER = {route.send: compute for compute, route in ROUTES.items()}


class Placement(NamedTuple):
    """Where stages live and, from that, which message carries a result and what an action has to wait for."""

    ranks: int
    stages: int

    @classmethod
    def of(cls, program: Program) -> "Placement":
        """Read the number of ranks and of stages from a program, whose stages count from 0."""
        return cls(len(program), 1 + max((action.stage for row in program for action in row), default=-1))

    def rank_of(self, stage: int) -> int:
        """Return the rank on which a stage lives."""
        return stage % self.ranks

    def source(self, compute: Action) -> Action | None:
        """Return the compute that makes the input of this one; None where F or B enters the model."""
        op, stage, micro = compute
        stage -= ROUTES[op].step
        return Action(op, stage, micro) if 0 <= stage < self.stages else None

    def message(self, compute: Action) -> tuple[Action, ...]:
        """Return the send and the receive that carry the result of a compute; () if it stays on its rank."""
        op, stage, micro = compute
        send, receive, step = ROUTES[op]
        if self.ranks == 1 or not 0 <= stage + step < self.stages:
            return ()
        return Action(send, stage, micro), Action(receive, stage + step, micro)

    def inputs(self, compute: Action) -> tuple[Action, ...]:
        """Return the computes that must be done before this one."""
        op, stage, micro = compute
        forward = Action(Op.F, stage, micro) if op is Op.B else None
        return tuple(filter(None, (forward, self.source(compute))))

    def needs(self, action: Action) -> tuple[Action, ...]:
        """Return what must have run before an action can; a send also needs its receive to be posted."""
        op, stage, micro = action
        if op in ROUTES:
            return tuple(need for made in self.inputs(action) for need in self._carried(made, stage))
        if op in SENT_AFTER:
            compute = Action(SENT_AFTER[op], stage, micro)
            return compute, *self.message(compute)[1:]
        return ()

    def _carried(self, made: Action, stage: int) -> tuple[Action, ...]:
        """Return what brings the result of a compute to `stage`: its message, or the compute itself."""
        return (self.message(made) if made.stage != stage else ()) or (made,)


def walk(program: Program, needs: Callable[[Action], Iterable[Action]]) -> Iterator[tuple[int, Action]]:
    """Yield (rank, action) in an order in which the ranks can run a program; an action waits for its needs.

    Raises ValueError, with every stuck rank marked, if the ranks wait for each other for ever.
    """
    done: set[Action] = set()
    index = [0] * len(program)
    waiting: defaultdict[Action, list[int]] = defaultdict(list)
    awake = list(range(len(program)))
    while awake:
        rank = awake.pop()
        while index[rank] < len(program[rank]):
            action = program[rank][index[rank]]
            missing = next((need for need in needs(action) if need not in done), None)
            if missing:
                waiting[missing].append(rank)
                break
            yield rank, action
            done.add(action)
            index[rank] += 1
            awake += waiting.pop(action, ())
    if waiting:
        raise _deadlock(program, index, {rank: need for need, ranks in waiting.items() for rank in ranks})


# From computes to a whole program.


def forwards(program: Program) -> Program:
    """Return the forwards of a program, in their order: what evaluates where the program trains.

    It can run wherever the program can: a forward waits for forwards alone.
    """
    return [[action for action in row if action.op is Op.F] for row in program]


def _deadlock(program: Program, index: list[int], missing: dict[int, Action]) -> ValueError:
    stuck = [(rank, index[rank]) for rank in sorted(missing)]
    waits = [f"rank {rank}, action {program[rank][at]}: waits for {missing[rank]}" for rank, at in stuck]
    return ValueError("\n".join(["the ranks wait for each other:", *waits, draw(program, stuck)]))
