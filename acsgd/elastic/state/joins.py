"""Joining in the background: a rank without state takes part in steps while its state arrives, layer by layer.

Its replica has no micro-batches, so the rank adds zeros to the gradients, and gets the sums, as all replicas do. It
requests a layer in its report of a step. The source of its state copies that layer after the step, and sends it through
a separate connection. The rank records the gradients of the layer from the next step on. When the layer has arrived,
it repeats these steps on it. From then on it steps the layer as all others do. Meanwhile, it reads what is not trained
from its own files.

Of several ranks of a host that need the same, the first one requests for all of them, and passes on what it receives:
state reaches a host once.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from safetensors.torch import load

from acsgd.dp.modes import redundant_steps
from acsgd.elastic.membership.plan import Plan
from acsgd.elastic.state.channel import Address, StateReceiver, StateSender
from acsgd.elastic.state.transfer import LayersInMemory, answer_link, layer_message, measure_link, state_bytes
from acsgd.errors import RunError
from acsgd.groups import Groups, collective_errors
from acsgd.host_memory import host_memory
from acsgd.optim.replay import Recording, ReplayOptimizer
from acsgd.run.initial_weights import lacks_base_layers
from acsgd.run.plan.job import Job
from acsgd.run.session import Session
from acsgd.run.setup.build import DeferredConstants
from acsgd.shards.layer_tensors import layer_tensors
from acsgd.shards.load import Constants, LoadedLayer

MAX_REQUESTED = 2
"""Layers that a rank has requested and not got, so that the next one is on its way when one has arrived."""
LINK_SHARE, SLOW_SHARE = 0.5, 0.03
"""Shares of the measured rate of a link at which state is sent, without elastic.join_rate: at first in each step, and
when it has taken the link for BUDGET_SHARE of elastic.join_budget."""
BUDGET_SHARE = 0.65
MEMORY_SHARE = 0.5
"""Share of the available host memory that recorded gradients may take; then training waits for a layer. And share that
copies of all layers may take, if they are copied in one step; with less memory, ranks join before training goes on."""


class StateSource:
    """Sends the layers of a session to ranks that join, in the background.

    senders: by rank that joins. link_rates: measured rates of the links to them, bytes per second.
    """

    def __init__(self, session: Session, senders: Mapping[int, StateSender], link_rates: Mapping[int, float]) -> None:
        self._session = session
        self._layers = _layers(session)
        self._senders = senders
        self._link_rates = link_rates

    def after_step(self, requested: Sequence[int | None]) -> None:
        """Copy the layers that were requested in a step, by rank. Raises RunError if a connection has failed."""
        self._limit()
        copies = dict[tuple[int, bool], bytes]()
        for rank, sender in self._senders.items():
            if sender.error is not None:
                raise _failure(self._session, f"sending state to rank {rank}", sender.error, rank)
            if (layer := requested[rank]) is not None:
                rounds = self._session.job.config.elastic.join_moments == "rounded" and sender.compresses
                for each in _copied_layers(self._session, layer):
                    if (each, rounds) not in copies:
                        copies[each, rounds] = layer_message(self._session, self._layers[each], rounds_moments=rounds)
                    sender.send(copies[each, rounds])

    def close(self) -> None:
        for sender in self._senders.values():
            sender.close()

    def _limit(self) -> None:
        """Limit what is sent during the next step so that it delays the step by at most elastic.join_budget.

        If all of its messages wait for the link, that is the time for which state takes the link. A longer step is
        delayed by SLOW_SHARE of its time.
        """
        config = self._session.job.config.elastic
        for rank, sender in self._senders.items():
            if config.join_rate is not None:
                sender.limit(config.join_rate * 1e6 / len(self._senders))
            else:
                rate = self._link_rates[rank] / len(self._senders)
                sender.limit(LINK_SHARE * rate, BUDGET_SHARE * config.join_budget * rate, SLOW_SHARE * rate)


class ReceivedState(NamedTuple):
    """The part of a rank's state that has arrived."""

    layers: int
    of_layers: int
    """Number of layers of the rank."""
    nbytes: int


class JoiningRank:
    """Requests and receives the state of the layers of a session.

    The optimizer of the session must be a ReplayOptimizer. constants: those of its layers; limit_bytes: maximum size of
    recorded gradients; members: ranks that get the same state, of which the first requests it; senders: by which this
    rank passes on to the others what `receiver` receives.
    """

    def __init__(
        self,
        session: Session,
        source: int,
        receiver: StateReceiver,
        constants: DeferredConstants,
        limit_bytes: float,
        members: Sequence[int],
        senders: Collection[StateSender] = (),
    ) -> None:
        assert isinstance(session.optimizer, ReplayOptimizer)
        self._session = session
        self._source = source
        self._receiver = receiver
        self._limit_bytes = limit_bytes
        self._members = members
        self._senders = senders
        self._optimizer = session.optimizer
        self._layers = _layers(session)
        self._missing = deque(self._layers)
        self._received_bytes = 0
        self._requested = deque[tuple[LoadedLayer, Recording]]()
        """Layers that the source has copied, in the order in which they arrive."""
        self._stale = 0
        """Number of layers that arrive before these, and were copied before a restart."""
        self._constants = constants
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="constants")
        self._reading = self._thread.submit(constants.load)

    @property
    def is_pending(self) -> bool:
        """Whether some layers are not loaded yet."""
        return bool(self._missing or self._requested or not self._constants.is_complete)

    @property
    def wanted(self) -> int | None:
        """The layer to request in the next step; None if enough are requested, or another rank requests."""
        requests = self._session.job.topology.rank == self._members[0] and len(self._requested) < MAX_REQUESTED
        return self._missing[0] if self._missing and requests else None

    def after_step(self, requested: Sequence[int | None]) -> None:
        """Record the layer that was requested for this rank in a step, by rank, and load those that have arrived.

        Raises RunError if the connection to the source has failed, and CorruptFileError if a file of constants is.
        """
        if self._reading.done():
            self._reading.result()
        if (wanted := requested[self._members[0]]) is not None:
            for index in _copied_layers(self._session, wanted):
                self._missing.remove(index)
                layer = self._layers[index]
                self._requested.append((layer, self._optimizer.record(self._session.owned.of(layer.weights))))
        if self._optimizer.nbytes > self._limit_bytes:
            self._wait_for_message()
        while self._requested and (message := self._receiver.take()) is not None:
            if self._stale:
                self._stale -= 1
                continue
            layer, recording = self._requested.popleft()
            self._received_bytes += len(message)
            received = LayersInMemory()
            received.add(load(message))
            received.load_layer(layer, self._session)
            self._optimizer.replay(recording)
        if self._requested and self._receiver.error is not None:
            self._fail(self._receiver.error)

    def received(self) -> ReceivedState:
        """Return what has arrived; the size counts layers twice that were requested again."""
        missing, of_layers = len(self._missing) + len(self._requested), len(self._layers)
        return ReceivedState(of_layers - missing, of_layers, self._received_bytes)

    def restart(self, lacking: Collection[int]) -> None:
        """Request all layers again, since the run has returned to an earlier step.

        Not if this rank and those that get the same have all of their state: then they have returned to the earlier
        one, too. lacking: ranks that had not all of it in the last step.
        """
        if not {*lacking}.intersection(self._members):
            return
        self._stale += len(self._requested)
        for _, recording in self._requested:
            self._optimizer.discard(recording)
        self._requested.clear()
        self._missing = deque(self._layers)

    def close(self) -> None:
        self._receiver.close()
        for sender in self._senders:
            sender.close()
        self._constants.stop()
        self._thread.shutdown(wait=False)  # the thread ends after the layer that it reads

    def _wait_for_message(self) -> None:
        timeout_s = self._session.groups.timeout_s
        if not self._session.groups.waits.poll(self._receiver.wait, timeout_s):
            self._fail(f"no layer in {timeout_s:g} s")

    def _fail(self, error: str) -> None:
        raise _failure(self._session, f"receiving state from rank {self._source}", error, self._source)


class BackgroundJoins(NamedTuple):
    """The ranks that join in the background; the same on all ranks except `senders`."""

    sources: Mapping[int, int]
    """The rank that sends its state, or passes it on, by rank that joins."""
    members: Mapping[int, Sequence[int]]
    """The ranks of its host that get the same state, by rank that joins."""
    addresses: Mapping[int, Address]
    """Where that rank listens, by rank that joins."""
    senders: Mapping[int, StateSender]
    """Connections of this rank, by rank that joins."""
    link_rates: Mapping[int, float]
    """Measured rates of the links to these ranks, bytes per second."""


def plan_joins(
    session: Session | None, job: Job, groups: Groups, plan: Plan, constants: Constants, host: str
) -> BackgroundJoins:
    """Decide whether ranks join in the background: if it takes longer than elastic.join_budget otherwise.

    All ranks call it together. session: of this rank in the view before, if it holds state; constants: of the model;
    host: address of this host. Opens the ports to which ranks that join connect. None does if replicas divide the
    state, since all of them compute in each step then, or in redundant steps, in which nothing is exchanged that a rank
    could follow. Raises RunError if a rank fails.
    """
    is_redundant = plan.step < redundant_steps(job.plugins.mode)
    if is_redundant or job.config.dp.shard != "none" or not (holders := _possible_sources(plan)):
        return BackgroundJoins({}, {}, {}, {}, {})
    members = _members(plan, holders)
    sources = {rank: holder if members[rank][0] == rank else members[rank][0] for rank, holder in holders.items()}
    joining_s, link_rates = _measure(session, job, groups, sources, constants)
    if joining_s <= job.config.elastic.join_budget:
        return BackgroundJoins({}, {}, {}, {}, {})
    with contextlib.ExitStack() as stack:
        senders = dict[int, StateSender]()
        for target in (rank for rank, source in sources.items() if source == job.topology.rank):
            senders[target] = StateSender(host, groups.timeout_s)
            stack.callback(senders[target].close)
        groups.publish_ports()
        mine = json.dumps({target: sender.address for target, sender in senders.items()})
        texts = groups.all_gather_text("opening ports for state", mine, timeout_s=groups.timeout_s)
        stack.pop_all()
    addresses = {int(target): Address(*address) for text in texts for target, address in json.loads(text).items()}
    return BackgroundJoins(sources, members, addresses, senders, link_rates)


def memory_for_joins(job: Job) -> float:
    """Return how much host memory recorded gradients of one rank, or its copies of all layers, may take, bytes."""
    return MEMORY_SHARE * host_memory().available / job.local_world_size


def _possible_sources(plan: Plan) -> dict[int, int]:
    """Return, by rank that may join in the background, a rank that has its layers.

    Such a rank has no state, and gets all of it. Its replica waits meanwhile, so another one must have all of its own.
    """
    lacking = {transfer.target for transfer in plan.transfers}
    complete = [replica for replica in range(plan.replicas) if replica not in plan.replicas_of(lacking)]
    joining = sorted(rank for rank in lacking if plan.ranks[rank] not in plan.holders)
    if plan.from_snapshot or not complete:
        return {}
    host_of = {replica: _host(plan, replica * plan.stages) for replica in plan.replicas_of(joining)}
    by_host = {host: complete[number % len(complete)] for number, host in enumerate(dict.fromkeys(host_of.values()))}
    return {rank: by_host[host_of[rank // plan.stages]] * plan.stages + rank % plan.stages for rank in joining}


def _members(plan: Plan, holders: Mapping[int, int]) -> dict[int, list[int]]:
    """Return, by rank that joins, the ranks of its host that get the same. holders: of that state, by the same rank."""
    together = dict[tuple[str, int], list[int]]()
    for rank, holder in holders.items():
        together.setdefault((_host(plan, rank), holder), []).append(rank)
    return {rank: members for members in together.values() for rank in members}


def _host(plan: Plan, rank: int) -> str:
    """Return the id of the host of a rank."""
    return plan.ranks[rank].partition("/")[0]


def _measure(
    session: Session | None,
    job: Job,
    groups: Groups,
    sources: Mapping[int, int],
    constants: Constants,
) -> tuple[float, dict[int, float]]:
    """Return the time that all other ranks would wait for ranks that join, seconds, and the rates of links.

    The time, the same on all ranks, is that to send it to the first of those of each host that get the same, one after
    another. Meanwhile, all read their constants from disk. The rates are those to the ranks of which this rank is the
    source, bytes per second. The time is 0 if a source has no memory for copies of its layers.
    """
    rank, sending_s, reading_s, rates, has_room = job.topology.rank, 0.0, 0.0, dict[int, float](), True
    with collective_errors("measuring links", groups.world):
        for target, source in sources.items():
            if source in sources:
                continue  # it passes on what it gets
            if target == rank:
                answer_link(groups, source)
            elif source == rank:
                assert session is not None
                nbytes = state_bytes(session, job.layout.layers)
                has_room = len(_copied_layers(session, 0)) == 1 or nbytes <= memory_for_joins(job)
                seconds = measure_link(groups, target, nbytes)
                sending_s += seconds
                rates[target] = nbytes / seconds or math.inf
        if rank in sources:
            reading_s = _reading_s(job, constants)
    mine = f"{sending_s} {reading_s} {float(has_room)}"
    times = groups.all_gather_text("measuring links", mine, timeout_s=groups.timeout_s)
    sending, reading, have_room = zip(*(map(float, each.split()) for each in times), strict=True)
    return (sum(sending) + max(reading) if all(have_room) else 0.0), rates


def _reading_s(job: Job, constants: Constants) -> float:
    """Return the time that reading the constants of this rank's layers takes, estimated from that of one of them.

    Infinity if they are also quantized, which takes longer, or if other hosts have to send them.
    """
    if job.config.model.quantize != "none":
        return math.inf
    model, layers = job.model.build(torch.float32), job.model.description
    stored = {layer: layer_tensors(model, layers, layer) for layer in job.layout.layers}
    sizes = {layer: sum(constant.numel() for constant in each.constants.values()) for layer, each in stored.items()}
    middle = sorted(job.layout.layers, key=sizes.__getitem__)[len(job.layout.layers) // 2]
    if not any(sizes.values()):
        return 0.0
    if lacks_base_layers(job):
        return math.inf
    started = time.perf_counter()
    for tensor in constants.of_layer(layers.layers[middle].name, stored[middle]).values():
        tensor.clone()
    return (time.perf_counter() - started) * sum(sizes.values()) / sizes[middle]


def _copied_layers(session: Session, requested: int) -> list[int]:
    """Return the layers that a source copies after the step in which a rank has requested a layer.

    All of its layers if nothing that is exchanged could bring copies of different steps to the same one.
    """
    return [*_layers(session)] if session.job.plugins.mode.exchanges == "nothing" else [requested]


def _layers(session: Session) -> dict[int, LoadedLayer]:
    """Return the layers of a rank by index."""
    return {layer.spec.index: layer for layer in session.layers}


def _failure(session: Session, action: str, error: str, peer: int) -> RunError:
    rank = session.job.topology.rank
    return RunError(f"rank {rank} on {socket.gethostname()}: {action} failed: {error}", awaited=[peer])
