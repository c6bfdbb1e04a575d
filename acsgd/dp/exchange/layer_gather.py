"""Weights of which each replica holds parts, gathered while a layer uses them (dp.shard=weights).

As ZeRO stage 3 (Rajbhandari et al. 2020, arXiv:1910.02054). R replicas; a gather of P bytes sends (R - 1) P / R bytes
from each of them on average. FSDP2 is not used: its parameters are DTensors, and are gathered by the forwards of
modules, which layers that run the model's own code do not call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from acsgd.comm.waits import Meter
from acsgd.dp.peers import Peers
from acsgd.errors import RunError
from acsgd.optim.fetch import FetchedParam, ParamSource
from acsgd.optim.ownership import OwnedWeights, Part, divide_rows
from acsgd.shards.weights import Weight
from acsgd.streams import load_onto


class DividedParams(ParamSource):
    """Parameters of which each replica has parts. All replicas fetch them in the same order.

    counts: whether bytes that are sent count, since these replicas are not those of one of several domains.
    """

    is_collective = True

    def __init__(self, owned: OwnedWeights, peers: Peers, *, counts: bool = True) -> None:
        super().__init__(owned, owned.ownership.gathered)
        self.connect(peers, counts=counts)
        self._parts: dict[str, Sequence[Part]] = {}
        self._frozen: dict[str, list[Weight]] = {}
        """The parts of frozen parameters that this replica has."""

    def connect(self, peers: Peers, *, counts: bool) -> None:
        """Fetch from other replicas from now on, of which each has the same parts as one of those before."""
        self._peers = peers
        self._counts = counts

    def keep(self, param: FetchedParam) -> None:
        weight, ownership = Weight(param.key, param.param, param.param), self.owned.ownership
        parts = divide_rows(weight, len(ownership.owners))
        own = [part.of(weight, is_view=False) for part in parts if part.owner == ownership.position]
        self._parts[param.key], self._frozen[param.key] = parts, own

    def keep_trained(self, param: FetchedParam, weight: Weight) -> Weight:
        self._parts[param.key] = self.owned.ownership.parts_of(weight)
        return weight

    def start(self, params: Sequence[FetchedParam], meter: Meter) -> Callable[[], None]:
        sent = meter if self._counts else Meter()
        return partial(self._peers.submit(partial(self._gather, params, sent)).result, meter)

    def _own_bytes(self, param: FetchedParam) -> Iterable[Tensor]:
        """Return the parts of this replica, uint8 [n] each, not copied."""
        own = self._frozen[param.key] if param.key in self._frozen else self.owned.of_key(param.key)
        return (_bytes_of(weight.param.detach()) for weight in own)

    def _bytes_in(self, param: FetchedParam, replica: int) -> Iterable[Tensor]:
        """Return the parts of a replica in the allocated values, uint8 [n] each, not copied."""
        return (_bytes_of(part.rows(param.values)) for part in self._parts[param.key] if part.owner == replica)

    @torch.no_grad()
    def _gather(self, params: Sequence[FetchedParam], meter: Meter) -> None:
        """Send the parts of this replica to all, and copy theirs into the values. Runs in the thread of the peers."""
        parts = [[x for param in params for x in self._bytes_in(param, j)] for j in range(self._peers.size)]
        own, sizes = [x for param in params for x in self._own_bytes(param)], [sum(map(len, each)) for each in parts]
        for x, values in zip(parts[self._peers.replica], own, strict=True):
            x.copy_(values)
        outgoing = dict.fromkeys(self._peers.others, torch.cat(own).to(self._peers.device)) if own else {}
        longest = {j: sizes[j] for j in self._peers.others if sizes[j]}
        for j, message in self._peers.exchange(outgoing, longest, meter).items():
            if len(message) != sizes[j]:
                raise RunError(f"{self._peers.name(j)} sent {len(message)} bytes of weights instead of {sizes[j]}")
            on_device = load_onto(parts[j][0].device, message)
            for x, values in zip(parts[j], on_device.split([len(x) for x in parts[j]]), strict=True):
                x.copy_(values)


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as bytes, not copied."""
    return tensor.view(-1).view(torch.uint8)
