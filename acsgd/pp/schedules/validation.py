"""Check that a lowered program computes every micro-batch once and that its ranks never deadlock."""

from collections import defaultdict
from collections.abc import Collection, Iterator

from acsgd.pp.schedules.actions import (
    EVALUATION,
    OPERATIONS,
    ROW_GRADIENTS,
    ROWS,
    TRAINING,
    Action,
    Op,
    Placement,
    Position,
    Program,
    draw,
)
from acsgd.pp.schedules.dependencies import Dependencies, walk
from acsgd.pp.schedules.rows import RowRoute


def validate(
    program: Program, *, forward_only: bool = False, first_backward: int = 0, routes: Collection[RowRoute] = ()
) -> None:
    """Check that a lowered program trains on every micro-batch once and that its ranks never deadlock.

    forward_only: check instead that it evaluates every micro-batch once, without backwards and reduces. first_backward:
    first stage that runs backward; those below have forwards alone. routes: of the rows of tied tables.
    A send counts as blocking its rank until the peer has posted the receive, ahead of its use: the strictest network
    of those that receive ahead, as gloo does. Over NCCL a message is received when it is needed, so the program that is
    checked is not the one that runs: that one cannot deadlock since a send blocks only what follows it on its
    communicator, of which each direction of a boundary or of a table has one, and neither computation nor the host
    waits for it. This is true only while nothing synchronizes the whole device between a send and a receive of a step,
    as cudaFree does when memory is almost full: then two ranks that send to each other may wait for each other, until
    run.timeout.
    Raises ValueError that names the action and draws the program with it marked.
    """
    dependencies = Dependencies.of(program, first_backward)
    if forward_only:
        first_backward = dependencies.placement.stages
    _check_placement(program, dependencies.placement)
    _check_complete(program, dependencies, first_backward, routes)
    _check_message_order(program)
    _check_reduced_last(program)
    for _ in walk(program, dependencies.needs):
        pass


def _check_placement(program: Program, placement: Placement) -> None:
    ranks, stages, _ = placement
    if not stages or stages % ranks:
        raise ValueError(f"{stages} stages on {ranks} ranks; the number of stages must be a multiple of the ranks")
    for (rank, index), action in _positions(program):
        holder = placement.rank_of(action.stage)
        if holder != rank:
            raise _error(program, rank, action, f"stage {action.stage} is on rank {holder}", (rank, index))


def _check_complete(
    program: Program, dependencies: Dependencies, first_backward: int, routes: Collection[RowRoute]
) -> None:
    placement = dependencies.placement
    expected = _expected_actions(program, dependencies, first_backward)
    micros = range(1 + max(action.micro for action in expected))
    for route in routes:
        expected |= _row_actions(route, micros, is_trained=route.user >= first_backward)
    found: dict[Action, Position] = {}
    for position, action in _positions(program):
        if action in found:
            raise _error(program, position[0], action, "appears twice", found[action], position)
        if action not in expected:
            purpose = "an evaluation" if first_backward == placement.stages else "a training step"
            text = f"is not part of {purpose} of {placement.stages} stages on {placement.ranks} ranks"
            if 0 < first_backward < placement.stages:
                text += f", of which the first {first_backward} run no backward"
            raise _error(program, position[0], action, text, position)
        found[action] = position
    for missing in sorted(expected - found.keys(), key=lambda action: (action.micro, action.stage)):
        dependents = [action for action in found if missing in dependencies.needs(action)]
        text = "is missing" + (f"; needed by {', '.join(map(str, dependents))}" if dependents else "")
        rank = placement.rank_of(missing.stage)
        raise _error(program, rank, missing, text, *(found[action] for action in dependents))


def _expected_actions(program: Program, dependencies: Dependencies, first_backward: int) -> set[Action]:
    """Return the actions of a complete program with the stages and micro-batches of `program`."""
    present = {action for _, action in _positions(program)}
    stages = range(dependencies.placement.stages)
    micros = range(1 + max(action.micro for action in present))
    computes: list[Action] = []
    for stage in stages:
        for micro in micros:
            ops_of_ways = TRAINING if stage >= first_backward else EVALUATION
            ways = [[Action(op, stage, micro) for op in ops] for ops in ops_of_ways]
            computes += max(ways, key=lambda way: len(present.intersection(way)))
    messages = [message for compute in computes for message in dependencies.messages(compute)]
    reduces = [Action(Op.R, stage) for stage in stages[first_backward:]]
    return {*computes, *messages, *reduces}


def _row_actions(route: RowRoute, micros: Collection[int], *, is_trained: bool) -> set[Action]:
    """Return the messages about the tables of a route, and the reduction of these."""
    owner, user = route
    sends = [Action(ROWS.send, owner, micro, user) for micro in micros]
    if is_trained:
        sends += [Action(ROW_GRADIENTS.send, user, micro, owner) for micro in micros]
    return {*sends, *(send.receive for send in sends), *([Action(Op.RT, owner)] if is_trained else [])}


def _check_message_order(program: Program) -> None:
    channels: defaultdict[tuple[Op, int, int], list[tuple[Position, Action]]] = defaultdict(list)
    for position, action in _positions(program):
        if action.operation.kind in ("send", "receive"):
            channels[action.op, action.stage, action.peer].append((position, action))
    for (op, stage, peer), sends in sorted(channels.items()):
        route = OPERATIONS[op].route
        if route is None or op is not route.send:
            continue
        for (sent_at, send), (posted_at, receive) in zip(sends, channels[route.receive, peer, stage], strict=True):
            if send.micro != receive.micro:
                text = f"is posted where {send} arrives; messages of one boundary arrive in sending order"
                raise _error(program, posted_at[0], receive, text, posted_at, sent_at)


def _check_reduced_last(program: Program) -> None:
    reduced: dict[int, Position] = {}
    for position, action in _positions(program):
        if action.operation.kind == "reduce":
            reduced[action.stage] = position
        elif action.operation.completes and action.stage in reduced:
            reduce = Action(Op.R, action.stage)
            text = f"comes before {action}; reduce a stage after its last {action.op}"
            raise _error(program, position[0], reduce, text, reduced[action.stage], position)


def _positions(program: Program) -> Iterator[tuple[Position, Action]]:
    for rank, actions in enumerate(program):
        for index, action in enumerate(actions):
            yield (rank, index), action


def _error(program: Program, rank: int, action: Action, text: str, *mark: Position) -> ValueError:
    return ValueError(f"rank {rank}, action {action}: {text}\n{draw(program, mark)}")
