"""Histories of elastic runs in virtual time: hosts that run `Membership` over a network that loses, delays and cuts."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from acsgd.elastic.membership.effects import Contact, Excluded, Install, RecordView, Send, StopWorkers, Timing
from acsgd.elastic.membership.messages import DaemonMessage, Host, Refused, View, is_majority
from acsgd.elastic.membership.plan import WorkerState, make_plan
from acsgd.elastic.membership.views import Membership

TIMING = Timing(heartbeat_s=0.5)
STEP_S = 0.1
"""Seconds between two attempts to complete a training step."""


class SimulatedHost:
    """One host: its membership, and its workers as a set of names that run a view or have stopped."""

    def __init__(self, simulation: Simulation, address: str, workers: int) -> None:
        self.simulation = simulation
        self.address = address
        self.workers = workers
        self.is_alive = True
        self.is_paused = False
        self.inbox: list[Callable[[], None]] = []
        """Inputs that arrived while the host was paused."""
        self.held: tuple[int, int] | None = None
        """(applied steps, position in the pipeline) of the state that its workers hold; the same for all of them."""
        self.newest: View | None = None
        """The newest view on its disk, if hosts have disks of their own."""
        self.join()

    def join(self) -> None:
        """Start a new membership."""
        simulation = self.simulation
        disk = self.address if simulation.has_own_disks else ""
        self.me = Host(f"{self.address}-{next(simulation.numbers)}", self.address, disk)
        self.running: View | None = None
        self.states: dict[str, WorkerState] = {}
        self.membership = Membership(
            self.me,
            endpoints=simulation.endpoints,
            min_hosts=simulation.min_hosts,
            max_hosts=8,
            planner=partial(make_plan, cuts=[simulation.cut], max_replicas=simulation.max_replicas),
            newest=self.newest
            if simulation.has_own_disks
            else simulation.register.get(max(simulation.register, default=0)),
            force=simulation.force,
            timing=TIMING,
            now=simulation.now,
        )
        self.states = {str(number): WorkerState() for number in range(self.workers)}
        self.membership.stopped(self.states)
        simulation.at(simulation.random.uniform(0, TIMING.heartbeat_s), partial(self.on_timer, self.membership))

    def on_timer(self, membership: Membership) -> None:
        if self.is_alive and self.membership is membership:
            if membership.newest and self.simulation.is_abandoned(membership.newest, self.me.disk):
                self.input(lambda: membership.abandoned(self.simulation.now))
            self.input(lambda: membership.on_timer(self.simulation.now))
            self.simulation.at(TIMING.heartbeat_s, partial(self.on_timer, membership))

    def input(self, call: Callable[[], None]) -> None:
        """Let the membership handle an input, now or when the host is resumed."""
        if self.is_paused:
            self.inbox.append(call)
        elif self.is_alive:
            call()
            for effect in self.membership.take_effects():
                self.carry_out(effect)

    def carry_out(self, effect: object) -> None:
        simulation, membership = self.simulation, self.membership
        match effect:
            case Send(to, message):
                simulation.send(self, to.address, message, to.id)
            case Contact(address, message):
                simulation.send(self, address, message, None)
            case StopWorkers():
                stop = partial(self.stop_workers, membership, self.running)
                simulation.at(simulation.random.expovariate(10), stop)
            case RecordView(view, voters, _):
                simulation.at(simulation.random.expovariate(20), partial(self.record, membership, view, voters))
            case Install(view):
                assert simulation.register[view.epoch] == view, "a view that is not the recorded one"
                assert self.running is None, f"view {view.epoch} is installed while the workers run another one"
                self.running = self.newest = view
                if not self.workers:
                    self.stop_workers(membership, view)
            case Refused(parts):
                simulation.refusals[self.me.id] = parts
                self.is_alive = False
            case Excluded():
                self.running = None
                self.join()

    def stop_workers(self, membership: Membership, view: View | None) -> None:
        """Stop the workers, and report their states, once: requests reach them in order, before the next view does.

        view: that they ran when this was requested.
        """
        if self.is_alive and membership is self.membership and self.running is view:
            if self.is_paused:
                self.inbox.append(partial(self.stop_workers, membership, view))
                return
            self.states = {str(n): self.simulation.state_of(self, str(n)) for n in range(self.workers)}
            self.running = None
            self.input(lambda: membership.stopped(self.states))

    def record(self, membership: Membership, view: View, voters: Sequence[str]) -> None:
        if not self.is_alive or membership is not self.membership:
            return
        register = self.simulation.register
        is_lost = self.simulation.random.random() < self.simulation.register_loss
        if is_lost or not is_majority(self.simulation.disks_at(self), voters):
            self.input(membership.recording_failed)
            return
        winner, before = register.setdefault(view.epoch, view), register.get(view.epoch - 1)
        is_forced = self.simulation.force or before is None
        assert is_forced or winner.history == before.history, f"view {view.epoch} begins a history of its own"
        self.input(lambda: membership.recorded(winner, self.simulation.now))


class Simulation:
    """A run of several hosts in virtual time. Raises AssertionError when a law is broken.

    The laws: a step completes only in the newest view that has completed one; hosts run only recorded views, and stop
    before they run another one; a history of its own begins only with the first view, or by force.
    """

    def __init__(
        self,
        seed: int,
        *,
        hosts: int,
        workers: int = 1,
        stages: int = 1,
        min_hosts: int = 1,
        max_replicas: int | None = None,
        has_own_disks: bool = False,
    ) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.numbers = itertools.count()
        self.stages, self.min_hosts, self.max_replicas = stages, min_hosts, max_replicas
        self.cut = tuple((stage,) for stage in range(stages))
        self.endpoints = [f"host{number}:1" for number in range(min(hosts, 3))]
        self.has_own_disks = has_own_disks
        self.force = False
        self.register: dict[int, View] = {}
        self.register_loss = 0.0
        self.refusals: dict[str, tuple[str, ...]] = {}
        """What hosts have different that were refused, by their ids."""
        self.loss = 0.0
        """Share of messages that are lost."""
        self.cuts: set[frozenset[str]] = set()
        """Pairs of addresses between which nothing arrives."""
        self.steps: list[int] = []
        """Epoch of each completed step."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self.hosts = [SimulatedHost(self, f"host{number}:1", workers) for number in range(hosts)]
        self.at(STEP_S, self._try_step)

    def at(self, delay_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self.numbers), call))

    def run(self, seconds: float) -> None:
        """Run for some virtual seconds."""
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self.now, _, call = heapq.heappop(self._events)
            call()
        self.now = end

    def send(self, sender: SimulatedHost, address: str, message: DaemonMessage, host_id: str | None) -> None:
        """Deliver a message after a random delay, unless it is lost; refuse it if no process listens."""
        delay = self.random.expovariate(50)
        me = sender.me

        def deliver() -> None:
            receiver = next((host for host in self.hosts if host.address == address and host.is_alive), None)
            if sender.address != address and frozenset((sender.address, address)) in self.cuts:
                return
            if receiver is None:
                sender.input(partial(sender.membership.ended, address, host_id))
            elif host_id in (None, receiver.me.id):
                receiver.input(lambda: receiver.membership.receive(me, message, self.now))
            elif sender.me == me:  # another process listens there by now
                sender.input(partial(sender.membership.ended, address, host_id))

        if sender.address == address or self.random.random() >= self.loss:
            self.at(delay, deliver)

    def state_of(self, host: SimulatedHost, name: str) -> WorkerState:
        """Return the state of a worker as it stops."""
        plan = host.running.plan if host.running else None
        rank = plan.rank_of(f"{host.me.id}/{name}") if plan else None
        if plan is None or rank is None:
            return WorkerState()
        return WorkerState(len(self.steps), (rank % self.stages,), True, {}, {})

    def is_abandoned(self, view: View, disk: str) -> bool:
        """Return whether no host of a disk runs a view or may still install it, as its lease on the directory shows."""
        return not any(host.is_alive and view.has(host.me.id) for host in self.hosts if host.me.disk == disk)

    def disks_at(self, host: SimulatedHost) -> set[str]:
        """Return the disks that can vote for a view of a host: its own, and those of others that answer."""
        others = [other for other in self.hosts if other.is_alive and not other.is_paused]
        return {host.me.disk} | {
            other.me.disk for other in others if frozenset((host.address, other.address)) not in self.cuts
        }

    def can_step(self, view: View) -> bool:
        """Whether all ranks of a view run it and reach each other."""
        members = [next((host for host in self.hosts if host.me == each), None) for each in view.hosts]
        ranks = [host for host in members if host is None or host.me.id in view.rank_hosts()]
        if not ranks or any(h is None or not h.is_alive or h.is_paused or h.running is not view for h in ranks):
            return False
        pairs = itertools.combinations([host.address for host in ranks if host], 2)
        return not any(frozenset(pair) in self.cuts for pair in pairs)

    def _try_step(self) -> None:
        views = {host.running.epoch: host.running for host in self.hosts if host.running}
        able = [epoch for epoch, view in views.items() if self.can_step(view)]
        assert len(able) <= 1, f"views {able} train at the same time"
        if able:
            assert not self.steps or able[0] >= self.steps[-1], f"view {able[0]} trains after view {self.steps[-1]}"
            self.steps.append(able[0])
        self.at(STEP_S, self._try_step)

    # Faults.

    def kill(self, host: SimulatedHost) -> None:
        host.is_alive = False
        host.running = None

    def restart(self, host: SimulatedHost) -> None:
        host.is_alive, host.is_paused = True, False
        host.inbox.clear()
        host.join()

    def resume(self, host: SimulatedHost) -> None:
        """Continue a host that was paused; it handles what arrived meanwhile."""
        host.is_paused = False
        waiting, host.inbox = host.inbox, []
        for call in waiting:
            host.input(call)

    def partition(self, part: Iterable[SimulatedHost]) -> None:
        """Cut all links between `part` and the other hosts."""
        inside = {host.address for host in part}
        for a, b in itertools.combinations([host.address for host in self.hosts], 2):
            if (a in inside) != (b in inside):
                self.cuts.add(frozenset((a, b)))

    def heal(self) -> None:
        """Undo all cuts and losses; resume and restart all hosts."""
        self.cuts.clear()
        self.loss = self.register_loss = 0.0
        for host in self.hosts:
            if host.is_paused and host.is_alive:
                self.resume(host)
            elif not host.is_alive:
                self.restart(host)


HEALED_S, CHECK_S = 60, 5
"""Simulated time within which all hosts train again, and between two checks of that, seconds."""


def run_history(seed: int, *, has_own_disks: bool = False) -> Simulation:
    """Run a random history of faults; then heal everything, and check that all hosts train again."""
    choose = random.Random(f"history {seed}")
    workers = choose.choice((1, 1, 2))
    hosts = choose.randint(2, 5)
    stages = choose.choice([n for n in (1, 2) if n <= hosts * workers])
    min_hosts = hosts if has_own_disks else choose.randint(1, hosts)  # fewer may begin runs of their own
    simulation = Simulation(
        seed, hosts=hosts, workers=workers, stages=stages, min_hosts=min_hosts, has_own_disks=has_own_disks
    )
    simulation.loss = choose.choice((0.0, 0.0, 0.02, 0.3))
    simulation.register_loss = choose.choice((0.0, 0.3))
    simulation.run(choose.uniform(2, 8))
    simulation.min_hosts = 1
    for _ in range(choose.randint(1, 8)):
        inject_fault(simulation, choose)
        simulation.run(choose.choice((0.05, 0.5, 3.0, 8.0)))
    simulation.heal()
    for _ in range(HEALED_S // CHECK_S):
        before = len(simulation.steps)
        simulation.run(CHECK_S)
        newest = simulation.register[max(simulation.register)]
        if len(simulation.steps) > before and len(newest.hosts) == hosts:
            return simulation
    raise AssertionError(f"after everything was healed, not all {hosts} hosts train within {HEALED_S} s: {newest}")


def inject_fault(simulation: Simulation, choose: random.Random) -> None:
    """Let a random fault occur, or undo one."""
    host = choose.choice(simulation.hosts)
    fault = choose.choice(("kill", "restart", "pause", "resume", "partition", "cut", "heal links", "leave", "broken"))
    if fault == "kill":
        simulation.kill(host)
    elif fault == "restart" and not host.is_alive:
        simulation.restart(host)
    elif fault == "pause" and host.is_alive:
        host.is_paused = True
    elif fault == "resume" and host.is_alive:
        simulation.resume(host)
    elif fault == "partition":
        simulation.partition(choose.sample(simulation.hosts, choose.randint(1, len(simulation.hosts) - 1)))
    elif fault == "cut" and len(simulation.hosts) > 1:
        simulation.cuts.add(frozenset(each.address for each in choose.sample(simulation.hosts, 2)))
    elif fault == "heal links":
        simulation.cuts.clear()
    elif fault == "leave" and host.is_alive:
        host.membership.leave()
    elif fault == "broken" and host.is_alive:
        at_step_end = choose.random() < 0.5
        host.input(partial(host.membership.request_change, "a test", at_step_end=at_step_end))
