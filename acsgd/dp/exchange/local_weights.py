"""Local weights: each replica makes its own optimizer steps, and replicas exchange weights instead of gradients.

n = parameters of a buffer; R replicas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from acsgd.codecs.bits import has_values
from acsgd.codecs.identity import Identity
from acsgd.codecs.message import PackedCodec
from acsgd.dp.exchange.averaging import sharded_mean, split_evenly
from acsgd.dp.exchange.buckets import AllReduceSync, BucketSync, DomainSync, FlatLayout, make_buckets
from acsgd.dp.exchange.error_feedback import pad_part
from acsgd.dp.exchange.second_moments import Measurement, SecondMomentCorrection
from acsgd.dp.exchange.vectors import Vector, add_to, dense
from acsgd.dp.peers import Peers
from acsgd.dp.resize import ReplicaState, check_names, restore
from acsgd.dp.sync import GradSync
from acsgd.io.files.checksum import checksum
from acsgd.optim.base import LocalStep, SecondMoments
from acsgd.shards.weights import Weight, WeightState, part_of

LOCAL_WEIGHTS = ReplicaState("local_weights", merge="mean", single="replace_weight")
EXACT = PackedCodec(Identity("fp32"))
"""Codec of weights that are averaged once, after redundant steps."""
MAX_ELEMENTS = 1 << 25
"""Elements of a buffer, unless one weight has more. An exchange may need memory for a few times its buffer, besides its
results; more buffers are more messages, each of which waits for the latency of the link."""


class WeightBuffer:
    """Weights that are exchanged together, in flat fp32 tensors."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        self.layout = FlatLayout({weight.key: weight.master.shape for weight in weights})
        self.local = torch.cat([weight.master.detach().view(-1) for weight in weights])
        """[n], this replica's; the master weights become views of it."""
        for weight, view in zip(weights, self.layout.views(self.local).values(), strict=True):
            weight.master.data = view
        self.shared = self.local.clone()
        """[n], the global weights, equal on all replicas."""
        self._rounded = [weight for weight in weights if weight.master is not weight.param]

    @torch.no_grad()
    def load_shared(self, update: Vector, scale: float = 1.0) -> None:
        """Add `scale` times an update [n] to the global weights, and load them into the local ones."""
        add_to(self.shared, update, scale)
        self.local.copy_(self.shared)
        self.update_params()

    @torch.no_grad()
    def update_params(self) -> None:
        """Copy the master weights to the parameters, if these have another dtype."""
        if self._rounded:
            torch._foreach_copy_([w.param for w in self._rounded], [w.master for w in self._rounded])


def make_buffers(weights: Sequence[Weight], max_elements: int = MAX_ELEMENTS) -> list[WeightBuffer]:
    """Split a stage's weights into buffers, see `group_weights`."""
    return [*map(WeightBuffer, group_weights(weights, max_elements))]


def group_weights(weights: Sequence[Weight], max_elements: int = MAX_ELEMENTS) -> list[Sequence[Weight]]:
    """Split weights into groups that are exchanged together: each tied one alone, others up to `max_elements`.

    An exchange depends on nothing but the values in its group, so the copies of a tied weight stay equal.
    """
    tied = [[weight] for weight in weights if weight.is_tied]
    others: list[list[Weight]] = [[]]
    size = 0
    for weight in (weight for weight in weights if not weight.is_tied):
        size += weight.master.numel()
        if size > max_elements and others[-1]:
            others.append([])
            size = weight.master.numel()
        others[-1].append(weight)
    return [members for members in [*tied, *others] if members]


class LocalWeightsSync(GradSync):
    """Base of syncs in which replicas make local steps. A mode adds when and how they exchange weights.

    A checkpoint holds the global weights as the model, and the local weights of each replica as its state.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        peers: Peers,
        states: Sequence[ReplicaState],
        *,
        exact_steps: int = 0,
        redundant_steps: int = 0,
        how: LocalStep = LocalStep(),  # noqa: B008 -- a tuple
        moment_correction: bool = False,
    ) -> None:
        """states: those of the mode. exact_steps: number of initial steps that use exact all-reduce.

        redundant_steps: number of initial steps in which each replica has the gradients of all micro-batches, so that
        all make the same step. how: options of the local steps. moment_correction: whether to keep second moments as
        large as those of the mean gradient.
        """
        super().__init__()
        self.peers = peers
        self.exact_steps = exact_steps
        self._redundant_steps = redundant_steps
        self._equal_steps = max(exact_steps, redundant_steps)
        """Number of initial steps after each of which all replicas have the same weights."""
        self.buffers = make_buffers(weights)
        self._states = states
        self._weights = tuple(weights)
        self._by_key = {weight.key: weight.master for weight in weights}
        self._how = how
        self._reduction: BucketSync | None = None
        """Reduces the gradients: of exact steps over all replicas, of local steps over the domain, if it has several.
        """
        self._correction = SecondMomentCorrection(self._by_key, peers) if moment_correction and weights else None
        self._is_restored = False
        """Whether a checkpoint has been loaded since the last step."""
        self._is_redundant = False
        """Whether the present step is redundant."""
        self.received: list[Any] = []
        """What this step has received for each buffer, until it is applied; empty if nothing is due."""
        self.measured: Measurement | None = None
        """What it has received for the second moments."""

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return the tensors of this mode's state by name, one per buffer: [n], or this replica's part [n_r]."""
        return {LOCAL_WEIGHTS.name: [buffer.local for buffer in self.buffers]}

    def local_step(self, step: int) -> LocalStep | None:
        if step < self.exact_steps:
            return None
        if self._correction is None or step < self._redundant_steps:
            return self._how
        return self._how._replace(shares=self._correction.shares())

    def begin_step(self, step: int, scale: float = 1.0) -> None:
        self._is_redundant = step < self._redundant_steps
        if self._is_redundant and self._is_restored:  # perhaps after local steps of a run with fewer redundant ones
            self.load_global()
        self._is_restored = False
        for weight in self._weights:
            weight.master.grad = None
        kind = AllReduceSync if step < self.exact_steps else DomainSync if len(self.peers.members) > 1 else None
        if kind is None:
            self._reduction = None
            return
        if type(self._reduction) is not kind:
            self._reduction = kind(make_buckets(self._weights), self.peers)
            self._reduction.meter = self.meter
        self._reduction.begin_step(step)

    @property
    def has_buckets(self) -> bool:
        return self._reduction is not None

    def grad_ready(self, weight: Weight, *, is_final: bool) -> None:
        if self._reduction is not None:
            self._reduction.grad_ready(weight, is_final=is_final)

    def reduce(self) -> None:
        if self._reduction is not None:
            self._reduction.reduce()

    def wait(self) -> None:
        if self._reduction is not None:
            self._reduction.wait()

    def exchanges_after(self, step: int) -> bool:
        return self.exchanges_without_update(step)

    def exchanges_without_update(self, step: int) -> bool:
        return step == self._redundant_steps - 1

    @torch.no_grad()
    def exchange(self, step: int, moments: SecondMoments) -> None:
        if self.exchanges_without_update(step):
            self.received = self.peers.submit(self._differing_weights).result(self.meter)
        self.measured = None
        correction, local_steps = self._correction, step - self._equal_steps
        if correction is not None and local_steps >= 0 and correction.is_due(local_steps):
            grads = {weight.key: weight.master.grad for weight in self._weights if weight.master.grad is not None}
            measuring = self.peers.submit(partial(correction.measure, step, grads, moments, self.meter))
            self.measured = measuring.result(self.meter)

    @torch.no_grad()
    def after_step(self, step: int, moments: SecondMoments) -> None:
        if step < self._equal_steps:
            for index, buffer in enumerate(self.buffers):
                if self.received:
                    buffer.local.copy_(self.received[index])
                    buffer.update_params()
                buffer.shared.copy_(buffer.local)
            self.received = []
        elif self._correction is not None:
            self._correction.update(step, moments, self.measured)
            self.measured = None

    def global_weights(self) -> Mapping[str, Tensor] | None:
        return {key: view for buffer in self.buffers for key, view in buffer.layout.views(buffer.shared).items()}

    def state_dict(self) -> WeightState:
        by_name = {name: self._by_weight(tensors) for name, tensors in self.tensors().items()}
        return by_name | (self._correction.state_dict() if self._correction is not None else {})

    @torch.no_grad()
    def take_state(self) -> WeightState:
        for buffer in self.buffers:
            if self._is_redundant:
                buffer.shared.copy_(buffer.local)
            for key, view in buffer.layout.views(buffer.shared).items():
                self._by_key[key].data = view
        return self.state_dict()

    @torch.no_grad()
    def load_global(self) -> None:
        """Load the global weights into the local ones."""
        for buffer in self.buffers:
            buffer.local.copy_(buffer.shared)
            buffer.update_params()

    @torch.no_grad()
    def load_layer(self, weights: Sequence[Weight], common: WeightState) -> None:
        keys, tensors = {weight.key for weight in weights}, self.tensors()
        for index, buffer in enumerate(self.buffers):
            loaded = {key: x for key, x in buffer.layout.views(buffer.local).items() if key in keys}
            buffer.layout.fill(buffer.shared, loaded)
            for name in common.keys() & tensors.keys():
                buffer.layout.fill(tensors[name][index], part_of(common, keys).get(name, {}))
        if self._correction is not None:
            rows = {name: dict(by_key) for name, by_key in self._correction.state_dict().items()}
            for name, by_key in part_of(common, keys & self._by_key.keys()).items():
                if name in rows:
                    rows[name] |= by_key
            self._correction.load(*({key: x.clone() for key, x in by_key.items()} for by_key in rows.values()))

    @torch.no_grad()
    def load_state_dict(self, saved: Sequence[WeightState]) -> None:
        check_names(self._states, saved)
        for buffer in self.buffers:
            buffer.shared.copy_(buffer.local)
        tensors = self.tensors()
        for state in self._states:
            if state.name in tensors:
                restored = restore(state, saved, self._by_key, replica=self.peers.replica, replicas=self.peers.size)
                for buffer, tensor in zip(self.buffers, tensors[state.name], strict=True):
                    self._load(buffer, tensor, restored)
        for buffer in self.buffers:
            buffer.update_params()
        if self._correction is not None:
            self._correction.load_state_dict(saved)
        self._is_restored = True

    def load_common(self, saved: Sequence[WeightState]) -> None:
        """Restore what the replicas that saved have in common; the local weights are the global ones."""
        common = {state.name for state in self._states if state.is_common}
        first = {name: by_key for name, by_key in saved[0].items() if name in common} if saved else {}
        self.load_state_dict([first, *({} for _ in range(1, self.peers.size))])

    def _differing_weights(self) -> list[Tensor]:
        """Return the mean weights of each buffer, [n], if those of replicas differ: their hosts round differently.

        Else an empty list. Runs in the thread of the peers.
        """
        if not self.buffers or (has_values(self.buffers[0].local) and self._are_equal()):
            return []
        copies = (split_evenly(buffer.local.clone(), self.peers.size) for buffer in self.buffers)
        return [dense(sharded_mean(parts, None, EXACT, self.peers, self.meter).mean) for parts in copies]

    def _are_equal(self) -> bool:
        """Return whether all replicas have the same weights, by their checksums; not if there are observers."""
        peers, of_buffers = self.peers, [checksum(b"", buffer.local.cpu().view(torch.uint8)) for buffer in self.buffers]
        mine = torch.tensor(of_buffers, dtype=torch.uint64).view(torch.uint8)
        outgoing = dict.fromkeys(peers.receivers, mine.to(peers.device))
        received = peers.exchange(outgoing, dict.fromkeys(peers.others, len(mine)), self.meter)
        return not peers.observers and all(torch.equal(mine, other.cpu()) for other in received.values())

    def _by_weight(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        by_key: dict[str, Tensor] = {}
        for buffer, tensor in zip(self.buffers, tensors, strict=True):
            by_key |= buffer.layout.views(pad_part(tensor, buffer.local, self.peers))
        return by_key

    def _load(self, buffer: WeightBuffer, tensor: Tensor, restored: Mapping[str, Tensor]) -> None:
        """Load a tensor of `tensors`; local weights that were not saved are the global ones, all others 0."""
        if tensor is buffer.local:
            buffer.layout.fill(tensor, restored)
            return
        whole = torch.zeros_like(buffer.local)
        buffer.layout.fill(whole, restored)
        tensor.copy_(whole if len(tensor) == len(whole) else split_evenly(whole, self.peers.size)[self.peers.replica])
