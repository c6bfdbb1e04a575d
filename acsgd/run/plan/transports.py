"""Which transport carries the messages between stages, and the sums of gradients and the updates of replicas.

Along the pipeline travel the rows of tied tables, too. All else travels over gloo, such as control messages.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from acsgd.comm.host_links import HostLinkTimes
from acsgd.config.options import Config, OwnTransport, TransportName
from acsgd.dp.modes.allreduce import AllReduce
from acsgd.dp.modes.local import Local
from acsgd.dp.modes.powersgd import PowerSGD
from acsgd.dp.sync import Mode
from acsgd.groups import MACHINE
from acsgd.run.plan.plugins import Plugins
from acsgd.topology import Axis, Topology

SECTIONS: dict[Axis, str] = {"pipeline": "pp", "replica": "dp"}
"""Section of the configuration of each axis."""
SUBJECTS: dict[Axis, str] = {"pipeline": "messages between stages", "replica": "gradients and updates of replicas"}


Where = Literal["nowhere", "within hosts", "everywhere"]


class Endpoint(NamedTuple):
    """Where a rank runs."""

    machine: str
    """See `machine_name`."""
    gpu: str
    """Identity of its GPU; empty = it runs on the CPU."""
    nccl: str
    """Version of NCCL; empty = there is none."""

    @property
    def host(self) -> str:
        """Host name, for the user."""
        return self.machine.partition(MACHINE)[0]


class HostLinks(NamedTuple):
    """A measurement of the links between hosts."""

    machines: Sequence[str]
    """See `Endpoint`."""
    times: HostLinkTimes

    def covers(self, machines: Collection[str]) -> bool:
        """Return whether it holds between some machines, too: if they are among its own, or if NCCL did not connect
        these, so that each further attempt would take all of its time."""
        return {*machines} <= {*self.machines} or math.isinf(self.times.ordered_s)


@dataclass(frozen=True)
class Transports:
    """The transports of a run, equal on all ranks."""

    endpoints: Sequence[Endpoint]
    """Those of the ranks."""
    nccl: dict[Axis, Where]
    """Which ranks use NCCL."""
    reasons: dict[Axis, str]
    """Why `auto` has chosen that, where it was not by hosts alone."""
    links: HostLinks | None = None
    """The measurement by which it has chosen; None = there was none."""

    @property
    def machines(self) -> list[str]:
        """Machine of each rank."""
        return [each.machine for each in self.endpoints]

    def uses_nccl(self, axis: Axis, ranks: Collection[int]) -> bool:
        """Return whether some ranks use NCCL among them."""
        share_host = len({self.machines[rank] for rank in ranks}) == 1
        return self.nccl[axis] == "everywhere" or (self.nccl[axis] == "within hosts" and share_host)

    @property
    def host_ring(self) -> list[int]:
        """The first rank of each host."""
        return [rank for rank, machine in enumerate(self.machines) if machine not in self.machines[:rank]]

    def unmeasured(self, topology: Topology) -> list[Axis]:
        """Return the axes along which links between hosts decide what `auto` uses."""
        return [
            axis
            for axis, where in self.nccl.items()
            if where == "within hosts"
            and any(len({self.machines[rank] for rank in line}) > 1 for line in topology.lines(axis))
        ]

    def with_measured(self, axes: Collection[Axis], links: HostLinks) -> Transports:
        """Return these transports with NCCL between hosts along some axes if it is faster there than gloo."""
        times = links.times
        reason = f"between hosts {times.describe('nccl')}"
        if math.isinf(times.ordered_s):
            reason += "; NCCL_DEBUG=INFO prints why"
        nccl: dict[Axis, Where] = dict.fromkeys(axes, "everywhere" if times.prefers_ordered else "within hosts")
        return replace(self, nccl=self.nccl | nccl, reasons=self.reasons | dict.fromkeys(axes, reason), links=links)

    def describe(self, topology: Topology, unused: Collection[Axis] = ()) -> list[str]:
        """Return a sentence on each kind of link that the run has. unused: axes along which nothing of it travels."""
        sentences = []
        for axis in (axis for axis in SECTIONS if topology.sizes[axis] > 1 and axis not in unused):
            form = {"everywhere": "nccl", "within hosts": "nccl within a host, else gloo", "nowhere": "gloo"}
            reason = f" ({self.reasons[axis]})" if axis in self.reasons else ""
            sentences.append(f"transport of {SUBJECTS[axis]}: {form[self.nccl[axis]]}{reason}")
        return sentences


def sums_gradients(mode: Mode) -> bool:
    """Return whether a mode sums gradients exactly over all replicas, in some steps at least."""
    return isinstance(mode, AllReduce | PowerSGD) or getattr(mode, "exact_steps", 0) > 0


def exchanges_updates(mode: Mode) -> bool:
    """Return whether the replicas of a mode send each other messages of their own, in some steps at least."""
    return not isinstance(mode, AllReduce | PowerSGD | Local)


def wanted_transport(config: Config, axis: Axis) -> TransportName:
    """Return the transport that the options name."""
    own = _own_transport(config, axis)
    return config.run.transport if own == "run" else own


def _own_transport(config: Config, axis: Axis) -> OwnTransport:
    return config.pp.transport if axis == "pipeline" else config.dp.transport


def check_transports(config: Config, plugins: Plugins, *, on_gpu: bool, has_mesh: bool) -> None:
    """Raise ValueError if NCCL is to carry what it cannot, as far as this rank alone knows."""
    reasons = {axis: _obstacle(config, plugins, axis, has_mesh=has_mesh) for axis in SECTIONS}
    if not on_gpu:
        reasons = dict.fromkeys(SECTIONS, "NCCL connects GPUs, and this rank runs on the CPU")
    _refuse(config, reasons)


def choose_transports(config: Config, plugins: Plugins, endpoints: Sequence[Endpoint], *, has_mesh: bool) -> Transports:
    """Choose the transports of a run from where its ranks are. Raises ValueError if NCCL cannot be used as asked."""
    chosen, of_ranks = Transports(endpoints, {}, {}), _obstacle_of_ranks(endpoints)
    reasons = {axis: _obstacle(config, plugins, axis, has_mesh=has_mesh) or of_ranks for axis in SECTIONS}
    _refuse(config, reasons)
    for axis, reason in reasons.items():
        wanted = wanted_transport(config, axis)
        if wanted == "gloo" or reason:
            chosen.nccl[axis] = "nowhere"
        else:
            chosen.nccl[axis] = "everywhere" if wanted == "nccl" else "within hosts"
        if wanted == "auto" and reason:
            chosen.reasons[axis] = reason
    return chosen


def _obstacle(config: Config, plugins: Plugins, axis: Axis, *, has_mesh: bool) -> str | None:
    """Return why NCCL cannot be used along an axis, None if it can."""
    if has_mesh:
        return "NCCL opens its own connections, which a mesh does not carry"
    if config.data.deal == "speed":
        return "data.deal=speed needs the times of waits, which over NCCL are those of the device"
    if axis == "replica" and config.dp.shard != "none":
        return f"parts of gradients and weights of dp.shard={config.dp.shard} travel over gloo"
    if axis == "replica" and config.optim.offload == "cpu":
        return "gradients of optim.offload=cpu are in host memory"
    if axis == "replica" or config.pp.stages == 1:
        return None
    if plugins.ladder is not None:
        return f"pp.compress={config.pp.compress} measures links over gloo"
    if plugins.delta is not None:
        return f"the activation caches of {plugins.delta_option(config.pp)} are in the memory of the host"
    for key, (codec, *_) in (("forward", plugins.forward), ("backward", plugins.backward)):
        if codec.entropy_coding:
            spec = getattr(config.pp, key)
            return f"NCCL needs messages of known sizes, and those of pp.{key}={spec} are entropy-coded"
    return None


def _obstacle_of_ranks(endpoints: Sequence[Endpoint]) -> str | None:
    """Return why NCCL cannot connect the ranks, None if it can."""
    for rank, each in enumerate(endpoints):
        if not each.gpu:
            return f"rank {rank} on {each.host} runs on the CPU"
        if not each.nccl:
            return f"torch on {each.host} is built without NCCL"
        if each.nccl != endpoints[0].nccl:
            versions = (
                f"{endpoints[0].nccl} of rank 0 on {endpoints[0].host}, {each.nccl} of rank {rank} on {each.host}"
            )
            return f"NCCL has different versions: {versions}"
    gpu, count = Counter((each.machine, each.gpu) for each in endpoints).most_common(1)[0]
    if count > 1:
        ranks = [rank for rank, each in enumerate(endpoints) if (each.machine, each.gpu) == gpu]
        return f"ranks {' and '.join(map(str, ranks))} on {endpoints[ranks[0]].host} share one GPU"
    return None


def _refuse(config: Config, reasons: Mapping[Axis, str | None]) -> None:
    """Raise ValueError if NCCL is asked for along an axis, and there is a reason why it cannot be used there."""
    used = [axis for axis in SECTIONS if axis == "replica" or config.pp.stages > 1]
    asked = [axis for axis in used if reasons[axis] and wanted_transport(config, axis) == "nccl"]
    if not asked:
        return
    axis, section = asked[0], SECTIONS[asked[0]]
    of_run = [each for each in used if _own_transport(config, each) == "run"]
    key = "run.transport" if axis in of_run else f"{section}.transport"
    instead = f"--{section}.transport gloo for {SUBJECTS[axis]}"
    if axis in of_run and all(reasons[each] == reasons[axis] for each in of_run):
        instead = "--run.transport gloo"
    raise ValueError(f"{key}=nccl: {reasons[axis]}; use {instead}, or change that")
