"""CocktailSGD: replicas step on their own gradients and, one step later, exchange a few coordinates of the change.

Source: Wang et al. 2023, "CocktailSGD: Fine-tuning Foundation Models over 500Mbps Networks" (ICML), Algorithm 1. Unlike
its code: shared copy and errors in fp32, the fraction asked is the fraction sent, any number of replicas and weights,
an error of the exchange ends the run, positions are entropy-coded, and `outer_lr`.

n = weights of a unit, R = replicas; part j of n is what replica j serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from acsgd.codecs.base import NotFiniteError
from acsgd.codecs.message import MessageCodec
from acsgd.codecs.topk import TopK
from acsgd.dp.exchange.averaging import Agreed, parts, served_mean
from acsgd.dp.exchange.local_weights import SERVED_ERROR, Merging, OwnWeights, Unit, load_served, served_state
from acsgd.dp.exchange.masks import Draw, chosen
from acsgd.dp.exchange.peers import Peers, UnderWay
from acsgd.dp.sync import GradSync
from acsgd.errors import RunError
from acsgd.optim.base import Capability, SecondMoments
from acsgd.shards.weights import Weight, WeightState


@dataclass(frozen=True)
class Cocktail:
    """Local steps; of the changes, a `random` share of the coordinates is looked at, of which the `topk` share is sent.

    What is not sent stays owed: by the replica in its own weights, by the server of a part in an error. The exchange
    runs beside forward and backward of the next step.
    """

    random: float = 0.1
    """Share of the coordinates that is looked at in a step, in (0, 1]."""
    topk: float = 0.2
    """Share of these that is sent, the largest, in (0, 1]."""
    bits: int = 4
    """Per value, 1 to 8."""
    group: int = 128
    """Values that share a scale."""
    sampling: Draw = "rolling"
    """How the coordinates are drawn."""
    outer_lr: float = 1.0
    """The mean change is applied so many times."""
    moment_correction: bool = True
    """Whether AdamW's second moments are kept at the size that they have for mean gradients, row by row (moments.py);
    else each replica divides by the noise of its own, and the mean step is up to sqrt(R) times shorter."""
    exact_steps: int = 0
    """So many steps at the start are made together, on gradients summed exactly."""

    RENAMED: ClassVar[dict[str, str]] = {
        "bucket": "group",
        "draw": "sampling",
        "gain": "outer_lr",
        "moments": "moment_correction",
    }

    def __post_init__(self) -> None:
        for name in ("random", "topk"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must lie in (0, 1]; 0.1 and 0.2 are usual")
        if not self.outer_lr > 0:
            raise ValueError(f"outer_lr={self.outer_lr} must be greater than 0; 1 = as published")
        if self.exact_steps < 0:
            raise ValueError(f"exact_steps={self.exact_steps} must be 0 or more")
        self.compressor()

    def compressor(self) -> MessageCodec:
        """Return what makes messages of what is looked at."""
        return TopK(self.topk, self.bits, self.group)

    @property
    def requires(self) -> frozenset[Capability]:
        """Optimizer capabilities that this mode uses."""
        return frozenset(("second_moments",)) if self.moment_correction else frozenset()

    def open(self, weights: Sequence[Weight], peers: Peers) -> GradSync:
        """Return the agreement of this replica with its peers on one stage's weights."""
        return Merging(weights) if peers.size == 1 else _CocktailSync(self, weights, peers)


class _Change(NamedTuple):
    """What an exchange changes in a unit."""

    where: list[Tensor | slice]
    """By part, the coordinates within it that were looked at."""
    agreed: Agreed


class _CocktailSync(OwnWeights):
    remembers = (SERVED_ERROR,)

    def __init__(self, mode: Cocktail, weights: Sequence[Weight], peers: Peers) -> None:
        super().__init__(weights, peers, exact_steps=mode.exact_steps, moments=mode.moment_correction)
        self._mode = mode
        self._compressor = mode.compressor()
        self._errors = [torch.zeros_like(parts(unit.own, peers.size)[peers.replica]) for unit in self.units]
        self._under_way: UnderWay[list[_Change]] | None = None

    def begin_step(self, step: int, scale: float = 1.0) -> None:
        super().begin_step(step)
        if step > self.exact_steps:  # there is a local step behind
            self._under_way = self.peers.begin(partial(self._exchange, step))

    def wait(self) -> None:
        super().wait()
        if self._under_way is not None:
            changes = self._under_way.result(self.meter)
            self._under_way = None
            for unit, error, change in zip(self.units, self._errors, changes, strict=True):
                self._apply(unit, error, change)

    def after_step(self, step: int, moments: SecondMoments) -> None:
        if step < self.exact_steps:
            for unit in self.units:
                unit.shared.copy_(unit.own)
        super().after_step(step, moments)

    def state_dict(self) -> WeightState:
        return {**super().state_dict(), SERVED_ERROR: served_state(self.units, self._errors, self.peers)}

    @torch.no_grad()
    def load_state_dict(self, saved: Sequence[WeightState]) -> None:
        self._under_way = None
        super().load_state_dict(saved)
        load_served(self.units, self._errors, self.peers, saved)

    @torch.no_grad()
    def _exchange(self, step: int) -> list[_Change]:
        try:
            return [
                self._exchange_unit(unit, error, step) for unit, error in zip(self.units, self._errors, strict=True)
            ]
        except NotFiniteError as error:
            raise RunError(
                f"replica {self.peers.replica}: weights are not finite ({error}); go back to a checkpoint"
            ) from error

    def _exchange_unit(self, unit: Unit, error: Tensor, step: int) -> _Change:
        mode, peers = self._mode, self.peers
        own, shared = parts(unit.own, peers.size), parts(unit.shared, peers.size)
        where = [chosen(len(part), mode.random, step, mode.sampling, seed=0, device=part.device) for part in own]
        changed = [mine[index] - common[index] for mine, common, index in zip(own, shared, where, strict=True)]
        agreed = served_mean(changed, error[where[peers.replica]], self._compressor, peers, self.meter)
        return _Change(where, agreed)

    @torch.no_grad()
    def _apply(self, unit: Unit, error: Tensor, change: _Change) -> None:
        agreed, peers = change.agreed, self.peers
        error[change.where[peers.replica]] = agreed.error
        for own, shared, index, sent, mean in zip(
            parts(unit.own, peers.size),
            parts(unit.shared, peers.size),
            change.where,
            agreed.sent,
            agreed.mean,
            strict=True,
        ):
            step = mean * self._mode.outer_lr
            own[index] += step - sent
            shared[index] += step
        unit.publish()
