"""Insert sends, receives and the gradient reduction into a program of computations."""

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import accumulate

from acsgd.pp.schedules.actions import Action, Op, Program, without_backwards
from acsgd.pp.schedules.dependencies import Dependencies, walk
from acsgd.pp.schedules.rows import Pacing, RowRoute, add_rows

AHEAD = 8
"""Number of computations by which a receive is posted before the one that needs its message. A message starts when the
sender knows that its receive is posted, so on a slow link more receives must be posted than messages are in flight."""


def lower(
    program: Program,
    ahead: int = AHEAD,
    *,
    first_backward: int = 0,
    routes: Sequence[RowRoute] = (),
    pacing: Pacing | None = None,
) -> Program:
    """Add sends, receives and one reduce per stage to a program of computations, and the messages of tied tables.

    A send follows the computation that makes its tensor. Let u be the index of the computation that needs a message,
    among those of its rank, and s the number of those that run before its peer makes the message, if each takes one
    step. The receive is posted before computation min(u - ahead, 2 s - u): so the notice that it is posted has u - s
    steps, as the message has, and ranks cannot deadlock, even where a send blocks until its receive is posted. Messages
    of one boundary and direction are received in the order in which they are sent. A reduce follows the last
    computation that completes a micro-batch of its stage, if there is one. Stages below `first_backward`, whose weights
    are frozen, run no backward, and no gradient travels to them. routes, pacing: see `add_rows`; default: the pacing of
    this program with one micro-batch per group. Raises ValueError if the computations alone cannot run.
    """
    program = without_backwards(program, first_backward)
    dependencies = Dependencies.of(program, first_backward)
    steps = _steps(program, dependencies)
    lowered = [
        _lower_rank(computes, _receives(computes, steps, dependencies, ahead), dependencies) for computes in program
    ]
    return add_rows(lowered, routes, pacing or Pacing.of(1, program))


def _steps(program: Program, dependencies: Dependencies) -> dict[Action, int]:
    """Return the step in which each computation runs if each takes one step and messages take none."""
    steps: dict[Action, int] = {}
    last = [0] * len(program)
    for rank, compute in walk(program, dependencies.inputs):
        last[rank] = 1 + max(last[rank], *(steps[earlier] for earlier in dependencies.inputs(compute)), 0)
        steps[compute] = last[rank]
    return steps


def _lower_rank(computes: list[Action], receives: list[tuple[int, Action]], dependencies: Dependencies) -> list[Action]:
    last = {compute.stage: index for index, compute in enumerate(computes) if compute.operation.completes}
    unposted = deque(receives)
    lowered: list[Action] = []
    for index, compute in enumerate(computes):
        while unposted and unposted[0][0] <= index:
            lowered.append(unposted.popleft()[1])
        lowered += [compute, *dependencies.messages(compute)[:1]]
        if last.get(compute.stage) == index:
            lowered.append(Action(Op.R, compute.stage))
    return lowered


def _receives(
    computes: list[Action], steps: dict[Action, int], dependencies: Dependencies, ahead: int
) -> list[tuple[int, Action]]:
    """Return the receives of a rank in posting order, each with the index of the computation it precedes."""
    own_steps = [steps[compute] for compute in computes]
    channels: defaultdict[tuple[Op, int], list[tuple[int, int, Action]]] = defaultdict(list)
    for index, compute in enumerate(computes):
        source = dependencies.source(compute)
        if source is None or not (messages := dependencies.messages(source)):
            continue
        receive, sent = messages[1], steps[source]
        at_send = bisect_left(own_steps, sent)
        due = min(index - ahead, 2 * at_send - index)
        channels[receive.op, receive.stage].append((sent, due, receive))
    receives = [receive for channel in channels.values() for receive in _in_sending_order(channel)]
    return sorted(receives, key=lambda receive: receive[0])  # stable: a channel keeps its order


def _in_sending_order(channel: list[tuple[int, int, Action]]) -> list[tuple[int, Action]]:
    """Order (sent, due, receive) by `sent`; a receive is due no later than any that is sent after it."""
    channel = sorted(channel, reverse=True)
    dues = accumulate((due for _, due, _ in channel), min)
    return [(due, receive) for due, (_, _, receive) in zip(dues, channel, strict=True)][::-1]
