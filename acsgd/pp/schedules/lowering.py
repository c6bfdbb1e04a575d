"""Insert sends, receives and the data-parallel reduce into a program of computes."""

from bisect import bisect_left
from collections import defaultdict, deque
from itertools import accumulate

from acsgd.pp.schedules.actions import Action, Op, Placement, Program, walk

AHEAD = 8
"""Computes by which a receive is posted before the one that needs its message. A message starts when its receive is
known at the other end, so over a slow link there should be one waiting for all that is under way and more."""


def lower(program: Program, ahead: int = AHEAD) -> Program:
    """Add to a program of F and B its sends, its receives and one R per stage.

    A send follows the compute that makes its tensor. A receive is posted `ahead` computes before the one
    that needs it, and no later than its peer sends it in a run where all computes take one step: so the
    ranks cannot deadlock, even where a send blocks until its receive is posted. Messages of one boundary
    and direction are received in the order in which they are sent. R follows the last B of its stage,
    if it has one. Raises ValueError if the computes alone cannot run.
    """
    placement = Placement.of(program)
    steps = _steps(program, placement)
    return [_lower_row(row, _receives(row, steps, placement, ahead), placement) for row in program]


def _steps(program: Program, placement: Placement) -> dict[Action, int]:
    """Return in which step each compute runs, if each takes one step and messages none."""
    steps: dict[Action, int] = {}
    last = [0] * len(program)
    for rank, compute in walk(program, placement.inputs):
        last[rank] = 1 + max(last[rank], *(steps[made] for made in placement.inputs(compute)), 0)
        steps[compute] = last[rank]
    return steps


def _lower_row(row: list[Action], receives: list[tuple[int, Action]], placement: Placement) -> list[Action]:
    last_backward = {action.stage: index for index, action in enumerate(row) if action.op is Op.B}
    unposted = deque(receives)
    lowered: list[Action] = []
    for index, compute in enumerate(row):
        while unposted and unposted[0][0] <= index:
            lowered.append(unposted.popleft()[1])
        lowered += [compute, *placement.message(compute)[:1]]
        if last_backward.get(compute.stage) == index:
            lowered.append(Action(Op.R, compute.stage))
    return lowered


def _receives(
    row: list[Action], steps: dict[Action, int], placement: Placement, ahead: int
) -> list[tuple[int, Action]]:
    """Return the receives of a row in posting order, each with the index of the compute it precedes."""
    row_steps = [steps[compute] for compute in row]
    channels: defaultdict[tuple[Op, int], list[tuple[int, int, Action]]] = defaultdict(list)
    for index, compute in enumerate(row):
        source = placement.source(compute)
        if source is None or not (message := placement.message(source)):
            continue
        receive, sent = message[1], steps[source]
        due = min(index - ahead, bisect_left(row_steps, sent))
        channels[receive.op, receive.stage].append((sent, due, receive))
    receives = [receive for channel in channels.values() for receive in _in_sending_order(channel)]
    return sorted(receives, key=lambda receive: receive[0])  # stable: a channel keeps its order


def _in_sending_order(channel: list[tuple[int, int, Action]]) -> list[tuple[int, Action]]:
    """Order (sent, due, receive) by `sent`; whatever is due pulls along all that were sent before it."""
    channel = sorted(channel, reverse=True)
    dues = accumulate((due for _, due, _ in channel), min)
    return [(due, receive) for due, (_, _, receive) in zip(dues, channel, strict=True)][::-1]
