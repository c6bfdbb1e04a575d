"""What each action of a program waits for, and an order in which the ranks can run it."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator

from acsgd.pp.schedules.actions import (
    GRADIENT,
    PRODUCERS,
    ROW_GRADIENTS,
    ROWS,
    Action,
    Op,
    Placement,
    Position,
    Program,
    Route,
    draw,
)


class Dependencies:
    """Data dependencies between the actions of a program.

    Args:
        placement: which rank holds which stage
        actions: all actions of the program
        first_backward: first stage that runs backward; gradients travel no further
    """

    def __init__(self, placement: Placement, actions: Collection[Action], first_backward: int = 0) -> None:
        self.placement = placement
        self._actions = frozenset(actions)
        self._first_backward = first_backward
        self._row_sends: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
        """Sends of rows by the stage and the micro-batch that use them; of gradients, by the stage and -1."""
        for action in self._actions:
            if action.op is ROWS.send:
                self._row_sends[action.peer, action.micro].append(action)
            elif action.op is ROW_GRADIENTS.send:
                self._row_sends[action.peer, -1].append(action)

    @classmethod
    def of(cls, program: Program, first_backward: int = 0) -> "Dependencies":
        """Return the dependencies of a program, whose stages count from 0. first_backward: see the class."""
        return cls(Placement.of(program), [action for of_rank in program for action in of_rank], first_backward)

    def source(self, compute: Action) -> Action | None:
        """Return the computation of a neighbouring stage that gives a computation its input, if there is one."""
        route = compute.operation.route
        return self._producer(route, compute.stage - route.step, compute.micro) if route else None

    def messages(self, compute: Action) -> tuple[Action, ...]:
        """Return the send and the receive of a computation's output; () if it stays on its rank, or is not needed."""
        route = compute.operation.route
        if route is None:
            return ()
        if route == GRADIENT and compute.stage <= self._first_backward:
            return ()
        send = Action(route.send, compute.stage, compute.micro)
        rank_of = self.placement.rank_of
        return (send, send.receive) if self._exists(send.peer) and rank_of(send.peer) != rank_of(send.stage) else ()

    def inputs(self, compute: Action) -> tuple[Action, ...]:
        """Return the computations that must have run before a computation."""
        if not compute.is_compute:
            return ()
        earlier = [Action(op, compute.stage, compute.micro) for op in compute.operation.after]
        return tuple(filter(None, (*earlier, self.source(compute))))

    def needs(self, action: Action) -> tuple[Action, ...]:
        """Return the actions that must have run before an action; a send also waits for its receive to be posted."""
        needs = [need for made in self.inputs(action) for need in self._arrival(made, action.stage)]
        if action.operation.kind == "send":
            assert action.operation.route is not None
            compute = self._producer(action.operation.route, action.stage, action.micro)
            needs += [compute, action.receive] if compute else [action.receive]
        elif action.operation.phase == "forward" or action.op is Op.RT:
            needs += [need for send in self._row_sends[action.stage, action.micro] for need in (send, send.receive)]
        return tuple(needs)

    def _producer(self, route: Route, stage: int, micro: int) -> Action | None:
        """Return the computation whose output takes `route` from `stage`: the one in the program, if several could."""
        if not self._exists(stage):
            return None
        candidates = [Action(op, stage, micro) for op in PRODUCERS[route]]
        return next((action for action in candidates if action in self._actions), next(iter(candidates), None))

    def _arrival(self, compute: Action, stage: int) -> tuple[Action, ...]:
        """Return the actions after which `stage` has the output of a computation."""
        return (self.messages(compute) if compute.stage != stage else ()) or (compute,)

    def _exists(self, stage: int) -> bool:
        return 0 <= stage < self.placement.stages


def walk(program: Program, needs: Callable[[Action], Iterable[Action]]) -> Iterator[tuple[int, Action]]:
    """Yield (rank, action) in an order in which the ranks can run a program.

    needs: maps an action to those that must have run before it. Raises ValueError that marks every waiting rank if the
    program deadlocks.
    """
    done: set[Action] = set()
    index = [0] * len(program)
    waiting: defaultdict[Action, list[int]] = defaultdict(list)
    ready = list(range(len(program)))
    while ready:
        rank = ready.pop()
        while index[rank] < len(program[rank]):
            action = program[rank][index[rank]]
            missing = next((need for need in needs(action) if need not in done), None)
            if missing:
                waiting[missing].append(rank)
                break
            yield rank, action
            done.add(action)
            index[rank] += 1
            ready += waiting.pop(action, ())
    if waiting:
        raise _deadlock(program, index, {rank: need for need, ranks in waiting.items() for rank in ranks})


def _deadlock(program: Program, index: list[int], missing: dict[int, Action]) -> ValueError:
    stuck: list[Position] = [(rank, index[rank]) for rank in sorted(missing)]
    waits = [f"rank {rank}, action {program[rank][at]}: waits for {missing[rank]}" for rank, at in stuck]
    return ValueError("\n".join(["the ranks wait for each other:", *waits, draw(program, stuck)]))
