"""The laws of a program: every micro-batch passes every stage once, and its ranks never wait for ever.

A program trains, with forwards, backwards and a reduce per stage, or evaluates, with forwards alone.
"""

from collections import defaultdict
from collections.abc import Iterator

from acsgd.pp.schedules.actions import ROUTES, Action, Op, Placement, Position, Program, draw, walk


def validate(program: Program, *, forward_only: bool = False) -> None:
    """Check that a lowered program trains every micro-batch once and that its ranks never wait for ever.

    forward_only: whether it is to evaluate every micro-batch once instead, without any backward or reduce.
    Waits are those of the strictest network: a send blocks its rank until the peer has posted the receive.
    Raises ValueError that names the action and draws the program with the culprit marked.
    """
    placement = Placement.of(program)
    _check_places(program, placement)
    _check_complete(program, placement, forward_only)
    _check_messages_in_order(program, placement)
    _check_reduced_last(program)
    for _ in walk(program, placement.needs):
        pass


def _check_places(program: Program, placement: Placement) -> None:
    ranks, stages = placement
    if not stages or stages % ranks:
        raise ValueError(f"{stages} stages on {ranks} ranks; give every rank equally many, and at least one")
    for (rank, index), action in _positions(program):
        home = placement.rank_of(action.stage)
        if home != rank:
            raise _fault(program, rank, action, f"stage {action.stage} lives on rank {home}", (rank, index))


def _check_complete(program: Program, placement: Placement, forward_only: bool) -> None:
    expected = _complete(program, placement, forward_only)
    found: dict[Action, Position] = {}
    for position, action in _positions(program):
        if action in found:
            raise _fault(program, position[0], action, "appears twice", found[action], position)
        if action not in expected:
            purpose = "an evaluation" if forward_only else "a step"
            text = f"has no place in {purpose} of {placement.stages} stages on {placement.ranks} ranks"
            raise _fault(program, position[0], action, text, position)
        found[action] = position
    for missing in sorted(expected - found.keys(), key=lambda action: (action.micro, action.stage)):
        partners = [action for action in found if missing in placement.needs(action)]
        text = "is missing" + (f"; needed by {', '.join(map(str, partners))}" if partners else "")
        rank = placement.rank_of(missing.stage)
        raise _fault(program, rank, missing, text, *(found[action] for action in partners))


def _complete(program: Program, placement: Placement, forward_only: bool) -> set[Action]:
    """Return every action that a program of so many stages and micro-batches has, exactly once each."""
    stages = range(placement.stages)
    micros = range(1 + max(action.micro for row in program for action in row))
    ops = [Op.F] if forward_only else [Op.F, Op.B]
    computes = [Action(op, stage, micro) for op in ops for stage in stages for micro in micros]
    messages = [action for compute in computes for action in placement.message(compute)]
    reduces = [] if forward_only else [Action(Op.R, stage) for stage in stages]
    return {*computes, *messages, *reduces}


def _check_messages_in_order(program: Program, placement: Placement) -> None:
    channels: defaultdict[tuple[Op, int], list[tuple[Position, Action]]] = defaultdict(list)
    for position, action in _positions(program):
        channels[action.op, action.stage].append((position, action))
    for route in ROUTES.values():
        for stage in range(placement.stages):
            sends = channels[route.send, stage]
            receives = channels[route.receive, stage + route.step] if sends else []
            for (sent_at, send), (posted_at, receive) in zip(sends, receives, strict=True):
                if send.micro != receive.micro:
                    text = f"posted in the turn of {send}; messages of one boundary match in order"
                    raise _fault(program, posted_at[0], receive, text, posted_at, sent_at)


def _check_reduced_last(program: Program) -> None:
    reduced: dict[int, Position] = {}
    for position, action in _positions(program):
        if action.op is Op.R:
            reduced[action.stage] = position
        elif action.op is Op.B and action.stage in reduced:
            reduce = Action(Op.R, action.stage)
            text = f"comes before {action}; reduce a stage after its last B"
            raise _fault(program, position[0], reduce, text, reduced[action.stage], position)


def _positions(program: Program) -> Iterator[tuple[Position, Action]]:
    for rank, row in enumerate(program):
        for index, action in enumerate(row):
            yield (rank, index), action


def _fault(program: Program, rank: int, action: Action, text: str, *mark: Position) -> ValueError:
    return ValueError(f"rank {rank}, action {action}: {text}\n{draw(program, mark)}")
