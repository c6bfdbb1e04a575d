"""Weights of which each replica holds parts, gathered while a layer uses them (dp.shard=weights).

As ZeRO stage 3 (Rajbhandari et al. 2020, arXiv:1910.02054). R replicas; a gather of P bytes sends (R - 1) P / R bytes
from each of them on average. FSDP2 is not used: its parameters are DTensors, and are gathered by the forwards of
modules, which layers that run the model's own code do not call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from acsgd.comm.waits import Meter
from acsgd.dp.peers import AsyncResult, Peers
from acsgd.errors import RunError
from acsgd.layers.description import LayerSpec
from acsgd.optim.ownership import OwnedWeights, Part, divide
from acsgd.shards.weights import Weight
from acsgd.streams import load_onto


class GatheredParam:
    """A parameter of the model that has its values while it is used, and is else a stand-in without memory.

    Autograd keeps views of the values for backward. Their storage is freed after each use, and has the same values
    again in the next one, before backward reads them.

    weight: has its values, which are freed; parts: all of its parts; own: those of this replica, with their values.
    """

    def __init__(self, weight: Weight, parts: Sequence[Part], own: Sequence[Weight]) -> None:
        self.key = weight.key
        self.uses = 0
        """Number of groups of layers that use it now or next. Without any it has no values."""
        self._param = weight.param
        self._parts = parts
        self._own = own
        self._values = weight.param.data.contiguous()
        self._nbytes = self._values.nbytes
        missing = float("nan") if self._values.is_floating_point() else 0
        self._stand_in = self._values.new_full((), missing).expand(self._values.shape)
        self.release()

    def allocate(self) -> None:
        """Allocate the values, which are not defined yet."""
        self._values.untyped_storage().resize_(self._nbytes)

    def set_values(self) -> None:
        """Give the parameter its values, which are gathered."""
        self._param.data = self._values

    def release(self) -> None:
        """Free the values."""
        self._param.data = self._stand_in
        self._values.untyped_storage().resize_(0)

    def own_bytes(self) -> list[Tensor]:
        """Return the parts of this replica, uint8 [n] each, not copied."""
        return [_bytes_of(weight.param.detach()) for weight in self._own]

    def bytes_of(self, replica: int) -> list[Tensor]:
        """Return the parts of a replica in the allocated values, uint8 [n] each, not copied."""
        return [_bytes_of(part.rows(self._values)) for part in self._parts if part.owner == replica]


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as bytes, not copied."""
    return tensor.view(-1).view(torch.uint8)


class DividedParams:
    """The parameters of a rank's layers that are gathered. Divides each as soon as it is loaded.

    owned: what this replica owns of the trained weights.
    """

    def __init__(self, owned: OwnedWeights) -> None:
        self._owned = owned
        self._by_key: dict[str, GatheredParam] = {}

    def add(self, spec: LayerSpec, weights: Sequence[Weight], model: nn.Module) -> None:
        """Divide the parameters of a layer of a model, in place. weights: the trained ones that no layer before has."""
        ownership = self._owned.ownership
        self._owned.add(weights)
        for weight in weights:
            if weight.key in ownership.gathered:
                self._by_key[weight.key] = GatheredParam(weight, ownership.parts_of(weight), self._owned.of([weight]))
        for key in spec.parameters:
            if key in ownership.gathered and key not in self._by_key:
                param = model.get_parameter(key)
                weight = Weight(key, param, param)
                parts = divide([weight], ownership.replicas, by_rows=True)
                own = [part.of(weight, is_view=False) for part in parts if part.owner == ownership.replica]
                self._by_key[key] = GatheredParam(weight, parts, own)

    def of(self, layers: Sequence[LayerSpec]) -> list[GatheredParam]:
        """Return the gathered parameters that some layers use, each once."""
        keys = dict.fromkeys(key for layer in layers for key in layer.parameters)
        return [self._by_key[key] for key in keys if key in self._by_key]


class LayerGather:
    """Gathers the parameters of groups of layers, each group before it runs.

    All replicas call it in the same order. groups: the parameters of each; one may be in several.
    """

    def __init__(self, groups: Sequence[Sequence[GatheredParam]], peers: Peers, meter: Meter) -> None:
        self.keys = frozenset(param.key for group in groups for param in group)
        """Keys of the parameters, of which gradients are complete once their first layer's backward has ended."""
        self._groups = groups
        self._peers = peers
        self._meter = meter
        self._pending: dict[int, AsyncResult[None]] = {}
        """Groups that are gathered ahead."""

    @property
    def is_idle(self) -> bool:
        """Whether no group is gathered ahead: its values would be old after the next update."""
        return not self._pending

    @contextlib.contextmanager
    def whole(self, group: int) -> Iterator[None]:
        """Context in which the parameters of a group have their values, and those of the next are on their way."""
        self.enter(group, group + 1)
        try:
            yield
        finally:
            self.leave(group)

    def enter(self, group: int, ahead: int) -> None:
        """Wait for the parameters of a group, and start to gather those of the group `ahead`, if there is one."""
        self._start(group)
        self._pending.pop(group).result(self._meter)
        if 0 <= ahead < len(self._groups):
            self._start(ahead)
        for param in self._groups[group]:
            param.set_values()

    def leave(self, group: int) -> None:
        """Free the parameters of a group that no group ahead uses."""
        for param in self._groups[group]:
            param.uses -= 1
            if not param.uses:
                param.release()

    @contextlib.contextmanager
    def unmetered(self) -> Iterator[None]:
        """Context whose messages are not counted."""
        meter, self._meter = self._meter, Meter()
        try:
            yield
        finally:
            self._meter = meter

    def _start(self, group: int) -> None:
        """Start to gather the parameters of a group that have no values, unless it is started."""
        if group in self._pending:
            return
        missing = [param for param in self._groups[group] if not param.uses]
        for param in missing:
            param.allocate()
        for param in self._groups[group]:
            param.uses += 1
        self._pending[group] = self._peers.submit(partial(self._gather, missing))

    @torch.no_grad()
    def _gather(self, params: Collection[GatheredParam]) -> None:
        """Send the parts of this replica to all, and copy theirs into the values. Runs in the thread of the peers."""
        parts = [[x for param in params for x in param.bytes_of(j)] for j in range(self._peers.size)]
        own, sizes = [x for param in params for x in param.own_bytes()], [sum(map(len, each)) for each in parts]
        for x, values in zip(parts[self._peers.replica], own, strict=True):
            x.copy_(values)
        outgoing = dict.fromkeys(self._peers.others, torch.cat(own).to(self._peers.device)) if own else {}
        longest = {j: sizes[j] for j in self._peers.others if sizes[j]}
        for j, message in self._peers.exchange(outgoing, longest, self._meter).items():
            if len(message) != sizes[j]:
                raise RunError(f"replica {j} sent {len(message)} bytes of weights instead of {sizes[j]}")
            on_device = load_onto(parts[j][0].device, message)
            for x, values in zip(parts[j], on_device.split([len(x) for x in parts[j]]), strict=True):
                x.copy_(values)
