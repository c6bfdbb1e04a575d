"""Gradients and weights of replicas that own parts of the weights: reduce-scatter, all-gather, and whole state to save.

R replicas that divide the weights; replica j receives the gradients of its parts from all, and sends the parts after
their update to all. So each sends 2 (R - 1) / R numbers per parameter and step, as in an all-reduce.

If these are the replicas of one of several domains, such as hosts, the owners of the same parts synchronize them with
each other in a data-parallel mode, as if they were a model: the hybrid sharding of FSDP (Zhao et al. 2023,
arXiv:2304.11277), with any mode in place of its all-reduce.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from safetensors.torch import load, save
from torch import Tensor

from acsgd.codecs.identity import Identity
from acsgd.codecs.message import PackedCodec
from acsgd.comm.waits import Meter
from acsgd.dp.exchange.averaging import decode_message
from acsgd.dp.exchange.buckets import Dtype, split_weights
from acsgd.dp.peers import AsyncResult, Peers
from acsgd.dp.sync import GradSync, SingleReplicaSync
from acsgd.errors import RunError
from acsgd.optim.base import LocalStep, SecondMoments
from acsgd.optim.ownership import OwnedWeights, Part, parts_of
from acsgd.shards.weights import Weight, WeightState
from acsgd.streams import load_onto

SEPARATOR = "\n"
"""Separates the name of a state from the key of its weight in messages."""
MAX_PENDING = 2
"""Buckets whose gradients wait for their reduction where whole gradients shall not exist."""


class ShardedBucket:
    """Weights whose gradients are reduced in one message per owner."""

    def __init__(self, weights: Sequence[Weight], owned: OwnedWeights, replicas: int) -> None:
        self.weights = tuple(weights)
        self.owned = owned.of(weights)
        """What this replica owns of them."""
        self.is_late = any(weight.has_remote_lookups for weight in weights)
        """Whether gradients are complete only after the last backward of a step."""
        self.missing = 0
        """Number of gradients that are not ready yet."""
        self.sum: Tensor | None = None
        """Sum of the gradients of what this replica owns, of the reductions of this step."""
        self._whole = {weight.key for weight in weights} - owned.ownership.gathered
        pairs = [(weight, part) for weight in weights for part in owned.ownership.parts_of(weight)]
        self._parts: list[list[tuple[Weight, Part]]] = [
            [(weight, part) for weight, part in pairs if part.owner == replica] for replica in range(replicas)
        ]

    @property
    def has_whole(self) -> bool:
        """Whether some parameters stay whole, so that their updated parts are gathered."""
        return bool(self._whole)

    def numels(self) -> list[int]:
        """Return the number of elements that each replica owns."""
        return [sum(part.rows(weight.param).numel() for weight, part in parts) for parts in self._parts]

    def take_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the weights, by key, and drop them there; zeros of weights without one."""
        grads = {weight.key: weight.master.grad for weight in self.weights}
        for weight in self.weights:
            weight.master.grad = None
        masters = {weight.key: weight.master for weight in self.weights}
        return {
            key: torch.zeros(masters[key].shape, device=masters[key].device) if grad is None else grad
            for key, grad in grads.items()
        }

    def gradients_for(self, replica: int, grads: Mapping[str, Tensor]) -> Tensor:
        """Return the gradients of the parts of a replica, flat. grads: of whole weights."""
        return _flat([part.rows(grads[part.weight]) for _, part in self._parts[replica]])

    def add(self, total: Tensor) -> None:
        """Add a sum over the replicas to the gradients of what this replica owns."""
        self.sum = total if self.sum is None else self.sum.add_(total)

    def reset(self) -> None:
        """Drop all gradients."""
        self.sum = None
        for weight in (*self.weights, *self.owned):
            weight.master.grad = None

    def set_gradients(self) -> None:
        """Make the sum the gradients of what this replica owns, as views, which keep its memory."""
        if self.sum is None:
            return
        pieces = self.sum.split([weight.master.numel() for weight in self.owned])
        for weight, piece in zip(self.owned, pieces, strict=True):
            weight.master.grad = piece.view(weight.master.shape)
        self.sum = None

    @torch.no_grad()
    def store_parts(self, replica: int) -> None:
        """Copy what this replica owns into the parameters that stay whole, unless it is a view of them.

        A mode with local weights keeps fp32 ones in buffers of its own. replica: this one.
        """
        for (weight, part), own in zip(self._parts[replica], self.owned, strict=True):
            rows = part.rows(weight.param.detach())
            if part.weight in self._whole and own.param.data_ptr() != rows.data_ptr():
                rows.copy_(own.param)

    def params_of(self, replica: int) -> list[Tensor]:
        """Return views of the parameters that stay whole, of the parts of a replica."""
        return [part.rows(weight.param.detach()) for weight, part in self._parts[replica] if part.weight in self._whole]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


class ShardedSync(GradSync):
    """Gradient sync of replicas that own parts of the weights: each gets the sums of the gradients of its parts.

    Buckets are reduced in the same order on every replica, each as soon as it and all before it are complete. Their
    gradients are dropped then. The updated parts are gathered after the optimizer's step, unless layers gather them.

    peers: those that divide the weights. dtype: of gradients in messages, whose sums are fp32. every_pass: whether
    gradients are reduced after each backward, so that those of whole weights never exist, instead of once per step;
    needs as many backwards on all replicas. across_domains: synchronization with the owners of the same parts in other
    domains; None = there are none. What is sent within a domain is not counted then.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        owned: OwnedWeights,
        peers: Peers,
        *,
        bucket_mb: float,
        dtype: Dtype,
        every_pass: bool,
        across_domains: GradSync | None = None,
    ) -> None:
        super().__init__()
        self._across_domains = across_domains or SingleReplicaSync(())
        self._domain_meter = None if across_domains is None else Meter()
        """Counts the bytes that are sent within a domain; None = `meter` does."""
        self._owned = owned.of(weights)
        late = [weight for weight in weights if weight.has_remote_lookups]
        early = [weight for weight in weights if not weight.has_remote_lookups]
        buckets = [*split_weights(early, bucket_mb), *split_weights(late, bucket_mb)]
        self._buckets = [ShardedBucket(bucket, owned, peers.size) for bucket in buckets]
        self._bucket_of = {weight.key: i for i, bucket in enumerate(self._buckets) for weight in bucket.weights}
        self._peers = peers
        self._codec = PackedCodec(Identity(dtype))
        self._every_pass = every_pass
        self._next = 0
        """Number of buckets whose reduction has started, in this backward or step."""
        self._pending = deque[AsyncResult[None]]()

    def begin_step(self, step: int, scale: float = 1.0) -> None:
        assert not self._pending
        for bucket in self._buckets:
            bucket.reset()
        self._across_domains.meter = self.meter
        if self._domain_meter is not None:
            self._domain_meter.trace = self.meter.trace
        self._across_domains.begin_step(step, scale)
        self._begin_pass()

    def grad_ready(self, weight: Weight, *, is_final: bool) -> None:
        index = self._bucket_of[weight.key]
        if (is_final or (self._every_pass and not weight.has_remote_lookups)) and index >= self._next:
            self._buckets[index].missing -= 1
            while self._next < len(self._buckets) and not self._buckets[self._next].missing:
                self._start_next()

    def backward_done(self, *, is_last: bool) -> None:
        if not self._every_pass:
            return
        while self._next < len(self._buckets) and not self._buckets[self._next].is_late:
            self._start_next()
        if not is_last:
            self._begin_pass()

    def reduce(self) -> None:
        while self._next < len(self._buckets):
            self._start_next()

    def wait(self) -> None:
        while self._pending:
            self._pending.popleft().result(self.meter)
        for bucket in self._buckets:
            bucket.set_gradients()
        for weight in reversed(self._owned):
            self._across_domains.grad_ready(weight, is_final=True)
        self._across_domains.reduce()
        self._across_domains.wait()

    def commit(self) -> None:
        self._across_domains.commit()

    def local_step(self, step: int) -> LocalStep | None:
        return self._across_domains.local_step(step)

    def exchanges_after(self, step: int) -> bool:
        return self._across_domains.exchanges_after(step)

    def exchanges_without_update(self, step: int) -> bool:
        return self._across_domains.exchanges_without_update(step)

    def exchange(self, step: int, moments: SecondMoments) -> None:
        self._across_domains.exchange(step, moments)

    def after_step(self, step: int, moments: SecondMoments) -> None:
        self._across_domains.after_step(step, moments)

    def share_parts(self) -> None:
        whole = [bucket for bucket in self._buckets if bucket.has_whole]
        for pending in [self._peers.submit(partial(self._gather, bucket)) for bucket in whole]:
            pending.result(self.meter)

    def global_weights(self) -> Mapping[str, Tensor] | None:
        return self._across_domains.global_weights()

    def state_dict(self) -> WeightState:
        return self._across_domains.state_dict()

    def take_state(self) -> WeightState:
        return self._across_domains.take_state()

    def load_state_dict(self, saved: Sequence[WeightState]) -> None:
        """Restore from the saved states of all domains, see `parts_of`. `share_parts` must follow."""
        self._across_domains.load_state_dict([parts_of(self._owned, state) for state in saved])

    def _begin_pass(self) -> None:
        self._next = 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.weights)

    def _start_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        self._pending.append(self._peers.submit(partial(self._sum, bucket, bucket.take_gradients())))
        while self._every_pass and len(self._pending) > MAX_PENDING:
            self._pending.popleft().result(self.meter)

    # These run in the thread of the peers.

    def _sum(self, bucket: ShardedBucket, grads: Mapping[str, Tensor]) -> None:
        """Sum gradients over the replicas, in their order: those of each part at its owner."""
        me, numels, device = self._peers.replica, bucket.numels(), self._peers.device
        messages = {j: self._codec.encode(bucket.gradients_for(j, grads)) for j, n in enumerate(numels) if n}
        outgoing = {j: message.to(device) for j, message in messages.items() if j != me}
        longest = {j: self._codec.max_bytes(numels[me]) for j in self._peers.others if numels[me]}
        received = self._peers.exchange(outgoing, longest, self._domain_meter or self.meter)
        if not numels[me]:
            return
        total = torch.zeros(numels[me], device=bucket.weights[0].master.device)
        for j in range(self._peers.size):
            total += decode_message(self._codec, messages[j] if j == me else received[j], total, j)
        bucket.add(total)

    @torch.no_grad()
    def _gather(self, bucket: ShardedBucket) -> None:
        """Send the parameters that this replica owns to all, and copy theirs into the weights."""
        me, params = self._peers.replica, [bucket.params_of(j) for j in range(self._peers.size)]
        bucket.store_parts(me)
        sizes = [sum(x.nbytes for x in of_owner) for of_owner in params]
        outgoing = dict[int, Tensor]()
        if sizes[me]:
            outgoing = dict.fromkeys(self._peers.others, _flat(params[me]).view(torch.uint8).to(self._peers.device))
        longest = {j: sizes[j] for j in self._peers.others if sizes[j]}
        for j, message in self._peers.exchange(outgoing, longest, self._domain_meter or self.meter).items():
            if len(message) != sizes[j]:
                raise RunError(f"{self._peers.name(j)} sent {len(message)} bytes of weights instead of {sizes[j]}")
            flat = load_onto(params[j][0].device, message).view(params[j][0].dtype)
            for x, values in zip(params[j], flat.split([x.numel() for x in params[j]]), strict=True):
                x.copy_(values.view(x.shape))


def gather_state(own: WeightState, writer: int, peers: Peers, meter: Meter) -> WeightState:
    """Send state to the replica `writer`; return there, in host memory, that of all replicas, elsewhere nothing.

    A collective of the replicas, called in the training thread.
    """
    flat = {f"{name}{SEPARATOR}{key}": x for name, by_key in own.items() for key, x in by_key.items()}
    payload = torch.frombuffer(
        bytearray(save({name: x.cpu().contiguous() for name, x in flat.items()})), dtype=torch.uint8
    )
    length, is_writer = torch.tensor([len(payload)]).view(torch.uint8), peers.replica == writer
    to, senders = ([] if is_writer else [writer]), (peers.others if is_writer else [])

    def exchange() -> dict[int, Tensor]:
        lengths = peers.exchange(dict.fromkeys(to, length), dict.fromkeys(senders, len(length)), meter)
        longest = {j: int(x.view(torch.int64)) for j, x in lengths.items()}
        return peers.exchange(dict.fromkeys(to, payload), longest, meter)

    received, state = peers.submit(exchange).result(meter), WeightState()
    for message in [payload, *received.values()] if is_writer else ():
        for name, x in load(message.numpy().tobytes()).items():
            kind, _, key = name.partition(SEPARATOR)
            state.setdefault(kind, {})[key] = x
    return state
