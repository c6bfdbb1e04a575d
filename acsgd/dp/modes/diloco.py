"""DiLoCo: many local steps, then one step of an outer optimizer on the mean change; streaming: fragment by fragment.

Sources: Douillard et al. 2023, arXiv:2311.08105, Algorithm 1; 2025, arXiv:2501.18512 (fragments, delay, few bits).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from acsgd.codecs.base import Codec
from acsgd.codecs.fixpoint import FixPoint
from acsgd.codecs.identity import Identity
from acsgd.codecs.message import PackedCodec
from acsgd.dp.exchange.averaging import Agreed, parts, served_mean
from acsgd.dp.exchange.local_weights import Merging, OwnWeights
from acsgd.dp.exchange.peers import Peers, UnderWay
from acsgd.dp.sync import GradSync
from acsgd.optim.base import Capability, SecondMoments
from acsgd.shards.weights import Weight, WeightState

GROUP = 128
"""Elements that share a scale, below 16 bits."""


@dataclass(frozen=True)
class DiLoCo:
    """Every `inner` steps the outer optimizer, SGD with Nesterov momentum, makes a step on the mean of shared - own.

    All replicas then go on from what is shared. Each keeps its AdamW's moments.
    """

    inner: int = 50
    """Steps between two exchanges of the same weights, H."""
    outer_lr: float = 0.7
    momentum: float = 0.9
    fragments: int = 1
    """Parts of the weights that are exchanged one after another, evenly spread over the inner steps."""
    delay: int = 0
    """Steps between sending a fragment and applying what comes of it; 0 = training waits."""
    mix: float = 0.0
    """How much of a replica's own weights stays when what is shared is applied."""
    bits: int = 32
    """Per element: 32, 16, or 1 to 8 with a scale per 128 elements."""
    moment_correction: bool = False
    """Whether AdamW's second moments are kept at the size that they have for mean gradients, by row (moments.py)."""

    RENAMED: ClassVar[dict[str, str]] = {"moments": "moment_correction"}

    def __post_init__(self) -> None:
        if self.inner < 1 or self.fragments < 1 or self.inner % self.fragments:
            raise ValueError(f"inner={self.inner} must be a multiple of fragments={self.fragments}, both at least 1")
        if not 0 <= self.delay < self.inner // self.fragments:
            most = self.inner // self.fragments - 1
            raise ValueError(f"delay={self.delay} must lie in 0 to {most}, so that one fragment is under way at a time")
        if not (self.outer_lr > 0 and 0 <= self.momentum < 1 and 0 <= self.mix <= 1):
            raise ValueError(
                f"outer_lr={self.outer_lr} must be greater than 0, momentum={self.momentum} in [0, 1), and "
                f"mix={self.mix} in [0, 1]"
            )
        self.codec()

    def codec(self) -> Codec:
        """Return in which form changes travel."""
        if self.bits in (16, 32):
            return Identity("fp32" if self.bits == 32 else "bf16")
        return FixPoint(self.bits, dims="group", group=GROUP)

    @property
    def requires(self) -> frozenset[Capability]:
        """Optimizer capabilities that this mode uses."""
        return frozenset(("second_moments",)) if self.moment_correction else frozenset()

    def open(self, weights: Sequence[Weight], peers: Peers) -> GradSync:
        """Return the agreement of this replica with its peers on one stage's weights."""
        return Merging(weights) if peers.size == 1 else _DiLoCoSync(self, weights, peers)

    def sent_after(self, step: int) -> int | None:
        """Return the last step, up to this one, after which a fragment was sent."""
        last = step - (step + 1) % (self.inner // self.fragments)
        return last if last >= 0 else None


class _DiLoCoSync(OwnWeights):
    remembers = ("momentum", "sent")

    def __init__(self, mode: DiLoCo, weights: Sequence[Weight], peers: Peers) -> None:
        super().__init__(weights, peers, moments=mode.moment_correction)
        self._mode = mode
        self._compressor = PackedCodec(mode.codec())
        self._momentum = [torch.zeros_like(unit.own) for unit in self.units]
        self._sent = [torch.zeros_like(unit.own) for unit in self.units] if mode.delay else []
        """shared - own of this replica, as it was when a fragment was sent; kept for a run that is resumed before it
        comes back."""
        self._under_way: UnderWay[list[Agreed]] | None = None

    def begin_step(self, step: int, scale: float = 1.0) -> None:
        super().begin_step(step)
        sent_after = self._mode.sent_after(step - 1)
        if self._under_way is None and sent_after is not None and step <= sent_after + self._mode.delay:
            self._send([self._of(sent, sent_after) for sent in self._sent])

    @torch.no_grad()
    def after_step(self, step: int, moments: SecondMoments) -> None:
        sent_after = self._mode.sent_after(step)
        if sent_after == step:
            changes = [self._of(unit.shared, step) - self._of(unit.own, step) for unit in self.units]
            for sent, change in zip(self._sent, changes, strict=False):
                self._of(sent, step).copy_(change)
            self._send(changes)
        if sent_after is not None and sent_after + self._mode.delay == step:
            self._receive(sent_after)
        super().after_step(step, moments)

    def state_dict(self) -> WeightState:
        remembered = {name: self._views(flats) for name, flats in self._remembered().items()}
        return super().state_dict() | remembered

    @torch.no_grad()
    def load_state_dict(self, saved: Sequence[WeightState]) -> None:
        super().load_state_dict(saved)
        self._under_way = None
        for name, flats in self._remembered().items():
            for unit, flat in zip(self.units, flats, strict=True):
                flat.zero_()
                if any(name in state for state in saved):
                    self.load_into(unit, flat, [state[name] for state in saved])

    def _remembered(self) -> dict[str, list[Tensor]]:
        """Return what goes on from one exchange to the next, by the name under which it is saved."""
        return {"momentum": self._momentum} | ({"sent": self._sent} if self._sent else {})

    def _views(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        return {key: x for unit, flat in zip(self.units, flats, strict=True) for key, x in unit.views(flat).items()}

    def _send(self, changes: list[Tensor]) -> None:
        self._under_way = self.peers.begin(partial(self._exchange, changes))

    def _exchange(self, changes: Sequence[Tensor]) -> list[Agreed]:
        cut = [parts(change, self.peers.size) for change in changes]
        return [served_mean(each, None, self._compressor, self.peers, self.meter) for each in cut]

    def _receive(self, sent_after: int) -> None:
        """Make the outer step, and let this replica go on from what is shared."""
        assert self._under_way is not None
        agreed = self._under_way.result(self.meter)
        self._under_way = None
        mode = self._mode
        for unit, momentum, part in zip(self.units, self._momentum, agreed, strict=True):
            m, shared, own = (self._of(flat, sent_after) for flat in (momentum, unit.shared, unit.own))
            change = torch.cat(part.mean)
            m.mul_(mode.momentum).add_(change)
            shared.sub_(change.add_(m, alpha=mode.momentum), alpha=mode.outer_lr)
            own.lerp_(shared, 1 - mode.mix)
            unit.publish()

    def _of(self, flat: Tensor, sent_after: int) -> Tensor:
        """View the part of a tensor [n] that is in the fragment sent after a step."""
        fragment = (sent_after + 1) // (self._mode.inner // self._mode.fragments) % self._mode.fragments
        return parts(flat, self._mode.fragments)[fragment]
