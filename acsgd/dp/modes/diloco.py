"""DiLoCo: many local steps, then one step of an outer optimizer on the mean update.

Sources: Douillard et al. 2023, arXiv:2311.08105, Algorithm 1; for fragments, delay and few bits, 2025, arXiv:2501.18512
(Streaming DiLoCo).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from acsgd.codecs.base import Codec
from acsgd.codecs.fixpoint import FixPoint
from acsgd.codecs.identity import Identity
from acsgd.codecs.message import PackedCodec
from acsgd.config.ranges import COUNT_OR_NONE, Range
from acsgd.dp.exchange.averaging import sharded_mean, split_evenly
from acsgd.dp.exchange.local_weights import LOCAL_WEIGHTS, LocalWeightsSync, WeightBuffer
from acsgd.dp.exchange.second_moments import moment_states
from acsgd.dp.exchange.vectors import dense
from acsgd.dp.peers import AsyncResult, Peers
from acsgd.dp.resize import ReplicaState
from acsgd.dp.sync import Exchanges, GradSync, SingleReplicaSync
from acsgd.optim.base import Capability, SecondMoments
from acsgd.shards.weights import Weight, WeightState

GROUP = 128
"""Number of values that share a scale, below 16 bits."""
OUTER_MOMENTUM = ReplicaState("outer_momentum", merge="mean", is_common=True)
SENT_UPDATE = ReplicaState("sent_update", merge="mean")
"""Global - local weights when a fragment was last sent, to send it again in a run that resumes during the delay."""


@dataclass(frozen=True)
class DiLoCo:
    """Every `inner` steps, one step of SGD with Nesterov momentum on the mean of global - local weights.

    Then all replicas load the global weights. Each keeps its own AdamW moments.
    """

    exchanges: ClassVar[Exchanges] = "updates"
    RENAMED: ClassVar[dict[str, str]] = {"moments": "moment_correction"}

    inner: int = 50
    """Number of local steps between two exchanges of a weight, H."""
    outer_lr: Annotated[float, Range(0, 1000, above=True)] = 0.7
    """Learning rate of the outer optimizer."""
    momentum: float = 0.9
    """Momentum of the outer optimizer, in [0, 1)."""
    fragments: int = 1
    """Number of parts of the weights that are exchanged one after another, evenly spread over the inner steps."""
    delay: int = 0
    """Number of steps between sending a fragment and applying the outer step to it. 0 = training waits."""
    mix: float = 0.0
    """Fraction of the local weights that is kept when the global weights are loaded, in [0, 1]."""
    bits: int = 32
    """Bits per value: 32, 16 (bf16), or 1 to 8 with a scale per 128 values."""
    moment_correction: bool = False
    """Whether to keep AdamW's second moments as large as those of the mean gradient, row by row."""
    redundant_steps: Annotated[int, COUNT_OR_NONE] = 0
    """Number of initial steps in which each replica computes all micro-batches: nothing is exchanged, none differs."""

    def __post_init__(self) -> None:
        if self.inner < 1 or self.fragments < 1 or self.inner % self.fragments:
            raise ValueError(f"inner={self.inner} must be a multiple of fragments={self.fragments}, both at least 1")
        if not 0 <= self.delay < self.inner // self.fragments:
            most = self.inner // self.fragments - 1
            raise ValueError(f"delay={self.delay} must lie in 0 to {most}: only one fragment is exchanged at a time")
        if not (0 <= self.momentum < 1 and 0 <= self.mix <= 1):
            raise ValueError(f"momentum={self.momentum} must lie in [0, 1), and mix={self.mix} in [0, 1]")
        self.codec()

    def codec(self) -> Codec:
        """Return the codec of updates. Raises ValueError if an option is invalid."""
        if self.bits in (16, 32):
            return Identity("fp32" if self.bits == 32 else "bf16")
        return FixPoint(self.bits, dims="group", group=GROUP)

    @property
    def requires(self) -> frozenset[Capability]:
        """Optimizer capabilities that this mode uses."""
        return frozenset(("second_moments",)) if self.moment_correction else frozenset()

    @property
    def states(self) -> tuple[ReplicaState, ...]:
        """The state that each of several replicas keeps between steps."""
        sent = SENT_UPDATE._replace(required=self.delay > 0)
        return LOCAL_WEIGHTS, *moment_states(required=self.moment_correction), OUTER_MOMENTUM, sent

    def open(self, weights: Sequence[Weight], peers: Peers) -> GradSync:
        """Return the synchronization of one stage's weights with the other replicas."""
        if peers.is_single:
            return SingleReplicaSync(weights, self.states)
        return DiLoCoSync(self, weights, peers)

    def last_send(self, step: int) -> int | None:
        """Return the last step, up to this one, after which a fragment was sent."""
        last = step - self._local_steps(step) % (self.inner // self.fragments)
        return last if last >= self.redundant_steps else None

    def fragment(self, last: int) -> int:
        """Return the index of the fragment that is sent after step `last`."""
        return self._local_steps(last) // (self.inner // self.fragments) % self.fragments

    def _local_steps(self, step: int) -> int:
        """Return the number of local steps up to and with this one."""
        return step + 1 - self.redundant_steps


class DiLoCoSync(LocalWeightsSync):
    """Local weights with an outer optimizer."""

    def __init__(self, mode: DiLoCo, weights: Sequence[Weight], peers: Peers) -> None:
        super().__init__(
            weights,
            peers,
            mode.states,
            redundant_steps=mode.redundant_steps,
            moment_correction=mode.moment_correction,
        )
        self._mode = mode
        self._codec = PackedCodec(mode.codec())
        self._momentum = [torch.zeros_like(buffer.local) for buffer in self.buffers]
        self._sent = [torch.zeros_like(buffer.local) for buffer in self.buffers] if mode.delay else []
        self._pending: AsyncResult[list[Tensor]] | None = None

    def tensors(self) -> dict[str, list[Tensor]]:
        sent = {SENT_UPDATE.name: self._sent} if self._sent else {}
        return super().tensors() | {OUTER_MOMENTUM.name: self._momentum} | sent

    def begin_step(self, step: int, scale: float = 1.0) -> None:
        super().begin_step(step)
        last = self._mode.last_send(step - 1)
        if self._pending is None and last is not None and step <= last + self._mode.delay:  # resumed during the delay
            self._send_again(last)

    def exchanges_after(self, step: int) -> bool:
        last = self._mode.last_send(step)
        return super().exchanges_after(step) or (last is not None and last + self._mode.delay == step)

    @torch.no_grad()
    def exchange(self, step: int, moments: SecondMoments) -> None:
        last, self.received = self._mode.last_send(step), []
        if last == step:
            self._send([self._update(buffer, step) for buffer in self.buffers])
        if last is not None and last + self._mode.delay == step:
            if self._pending is None:  # this runs again, after a failure
                self._send_again(last)
            assert self._pending is not None
            self.received = self._pending.result(self.meter)
            self._pending = None
        super().exchange(step, moments)

    @torch.no_grad()
    def after_step(self, step: int, moments: SecondMoments) -> None:
        last = self._mode.last_send(step)
        if last == step:
            for sent, buffer in zip(self._sent, self.buffers, strict=False):
                self._fragment(sent, step).copy_(self._update(buffer, step))
        if last is not None and self.received:
            self._outer_step(last, self.received)
            self.received = []
        super().after_step(step, moments)

    @torch.no_grad()
    def load_state_dict(self, saved: Sequence[WeightState]) -> None:
        super().load_state_dict(saved)
        self._pending = None

    def _send(self, updates: list[Tensor]) -> None:
        """Start to send updates, which the exchange overwrites."""
        self._pending = self.peers.submit(partial(self._exchange, updates))

    def _send_again(self, last: int) -> None:
        """Send the fragment that was sent after step `last`."""
        self._send([self._fragment(sent, last).clone() for sent in self._sent])

    def _exchange(self, updates: Sequence[Tensor]) -> list[Tensor]:
        """Return the mean updates, decoded: during a delay, training goes on meanwhile."""
        parts = [split_evenly(update, self.peers.size) for update in updates]
        return [dense(sharded_mean(each, None, self._codec, self.peers, self.meter).mean) for each in parts]

    def _outer_step(self, last: int, updates: Sequence[Tensor]) -> None:
        """Apply the outer optimizer to the fragment sent after step `last`, and load it into the local weights.

        updates: mean updates, overwritten.
        """
        mode = self._mode
        for buffer, momentum, update in zip(self.buffers, self._momentum, updates, strict=True):
            m, shared, local = (self._fragment(flat, last) for flat in (momentum, buffer.shared, buffer.local))
            m.mul_(mode.momentum).add_(update)
            shared.sub_(update.add_(m, alpha=mode.momentum), alpha=mode.outer_lr)
            local.lerp_(shared, 1 - mode.mix)
            buffer.update_params()

    def _update(self, buffer: WeightBuffer, last: int) -> Tensor:
        """Return the update to send after step `last`, of its fragment."""
        return self._fragment(buffer.shared, last) - self._fragment(buffer.local, last)

    def _fragment(self, flat: Tensor, last: int) -> Tensor:
        """View the fragment of a tensor [n] that is sent after step `last`."""
        return split_evenly(flat, self._mode.fragments)[self._mode.fragment(last)]
