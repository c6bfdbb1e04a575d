"""CocktailSGD: local steps, and a sparse quantized exchange of sampled coordinates, overlapped with computation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from acsgd.codecs.topk import TopK
from acsgd.config.ranges import Range
from acsgd.dp.exchange.averaging import ShardedMean, sharded_mean, split_evenly
from acsgd.dp.exchange.error_feedback import SERVER_RESIDUAL, ErrorFeedback
from acsgd.dp.exchange.local_weights import LOCAL_WEIGHTS, LocalWeightsSync, WeightBuffer
from acsgd.dp.exchange.second_moments import moment_states
from acsgd.dp.exchange.vectors import dense
from acsgd.dp.peers import AsyncResult, Peers
from acsgd.dp.resize import ReplicaState
from acsgd.dp.sync import Exchanges, GradSync, SingleReplicaSync
from acsgd.optim.base import Capability
from acsgd.shards.weights import Weight, WeightState
from acsgd.streams import load_onto, mix_seed

Sampling = Literal["rolling", "shuffled", "random"]
"""Order in which coordinates are sampled.

rolling   evenly spaced, shifted by one in each step; costs nothing.
shuffled  without replacement, in a new random order each time all have been sampled.
random    independently in each step. As for shuffled, a step costs a permutation of n numbers.
"""
MAX_DENOMINATOR = 1 << 20
"""Largest denominator to which fractions are rounded, so that all arithmetic is exact."""


def sample_coordinates(
    n: int, fraction: float, step: int, sampling: Sampling, *, seed: int, device: torch.device
) -> Tensor | slice:
    """Return an index of the coordinates of a step, in ascending order: int64 on `device`, or a slice.

    fraction: in (0, 1]; exact to within one coordinate per step.
    """
    ratio = Fraction(fraction).limit_denominator(MAX_DENOMINATOR)
    if ratio == 1:
        return slice(0, n)
    if sampling == "rolling":
        return _rolling(n, ratio, step, device)
    count = round(ratio * n)
    if sampling == "random":
        return load_onto(device, _permutation(n, seed, step)[:count].sort().values)
    past, first = divmod(step * count, max(1, n))
    orders = torch.cat([_permutation(n, seed, past), _permutation(n, seed, past + 1)])
    return load_onto(device, orders[first : first + count].unique())  # across two permutations a few may occur twice


def _rolling(n: int, ratio: Fraction, step: int, device: torch.device) -> Tensor | slice:
    """Return each i for which floor(ratio * (i + step)) increases from i to i + 1."""
    p, q = ratio.numerator, ratio.denominator
    past = step % q
    first, end = p * past // q + 1, p * (past + n) // q + 1
    if p == 1:
        return slice(first * q - 1 - past, n, q)
    increases = torch.arange(first, end, device=device)
    return (increases * q + (p - 1)) // p - 1 - past


def _permutation(n: int, seed: int, number: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(mix_seed(seed, number)))


@dataclass(frozen=True)
class Cocktail:
    """Local steps; of the updates, a sample of the coordinates is considered, of which the largest are sent.

    The residual of a replica stays in its local weights, that of a mean with the owner of the part. The exchange runs
    during forward and backward of the next step.
    """

    exchanges: ClassVar[Exchanges] = "updates"
    RENAMED: ClassVar[dict[str, str]] = {
        "bucket": "group",
        "draw": "sampling",
        "gain": "outer_lr",
        "moments": "moment_correction",
    }

    random: float = 0.1
    """Fraction of coordinates sampled per step, in (0, 1]."""
    topk: float = 0.2
    """Fraction of the sampled coordinates that is sent, the largest, in (0, 1]."""
    bits: int = 4
    """Bits per value, 1 to 8."""
    group: int = 128
    """Number of values that share a scale."""
    sampling: Sampling = "rolling"
    """Order in which coordinates are sampled: rolling, shuffled or random."""
    outer_lr: Annotated[float, Range(0, 1000, above=True)] = 1.0
    """Multiplier on the decoded mean update (outer learning rate). 1 = as published."""
    moment_correction: bool = True
    """Whether to keep AdamW's second moments as large as those of the mean gradient, row by row. Otherwise each replica
    divides by its own noise, and the mean update is up to sqrt(R) times smaller."""
    exact_steps: int = 0
    """Number of initial steps that use exact all-reduce. 0 = none."""

    def __post_init__(self) -> None:
        for name in ("random", "topk"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must lie in (0, 1]; 0.1 and 0.2 are usual")
        if self.exact_steps < 0:
            raise ValueError(f"exact_steps={self.exact_steps} must be 0 or more")
        self.codec()

    def codec(self) -> TopK:
        """Return the codec of sampled updates. Raises ValueError if an option is invalid."""
        return TopK(self.topk, self.bits, self.group)

    @property
    def requires(self) -> frozenset[Capability]:
        """Optimizer capabilities that this mode uses."""
        return frozenset(("second_moments",)) if self.moment_correction else frozenset()

    @property
    def states(self) -> tuple[ReplicaState, ...]:
        """The state that each of several replicas keeps between steps."""
        server_residual = SERVER_RESIDUAL._replace(moves_to=LOCAL_WEIGHTS.name)  # where that of the sender is, too
        return LOCAL_WEIGHTS, *moment_states(required=self.moment_correction), server_residual

    def open(self, weights: Sequence[Weight], peers: Peers) -> GradSync:
        """Return the synchronization of one stage's weights with the other replicas."""
        if peers.is_single:
            return SingleReplicaSync(weights, self.states)
        return CocktailSync(self, weights, peers)


class _Exchange(NamedTuple):
    """Result of the exchange of one buffer."""

    sampled: list[Tensor | slice]
    """Sampled coordinates, by part."""
    residuals: list[Tensor]
    """What this replica's messages have omitted of its updates, by part; of an observer, its updates."""
    result: ShardedMean


class CocktailSync(LocalWeightsSync):
    """Local weights with an overlapped exchange; error feedback on the server's side only."""

    def __init__(self, mode: Cocktail, weights: Sequence[Weight], peers: Peers) -> None:
        super().__init__(
            weights,
            peers,
            mode.states,
            exact_steps=mode.exact_steps,
            moment_correction=mode.moment_correction,
        )
        self._mode = mode
        self._codec = mode.codec()
        self._feedback = [ErrorFeedback(buffer.local, peers, sender=False) for buffer in self.buffers]
        self._pending: AsyncResult[list[_Exchange]] | None = None

    def tensors(self) -> dict[str, list[Tensor]]:
        return super().tensors() | {SERVER_RESIDUAL.name: [feedback.server_residual for feedback in self._feedback]}

    def begin_step(self, step: int, scale: float = 1.0) -> None:
        super().begin_step(step)
        if step > self.exact_steps:  # the previous step was a local one
            self._pending = self.peers.submit(partial(self._exchange_all, step))

    def wait(self) -> None:
        super().wait()
        if self._pending is not None:
            self.received = self._pending.result(self.meter)
            self._pending = None

    def commit(self) -> None:
        if self.received:
            for buffer, feedback, exchange in zip(self.buffers, self._feedback, self.received, strict=True):
                self._apply(buffer, feedback, exchange)
            self.received = []

    def load_state_dict(self, saved: Sequence[WeightState]) -> None:
        super().load_state_dict(saved)
        self._pending, self.received = None, []

    @torch.no_grad()
    def _exchange_all(self, step: int) -> list[_Exchange]:
        pairs = zip(self.buffers, self._feedback, strict=True)
        return [self._exchange(buffer, feedback, step) for buffer, feedback in pairs]

    def _exchange(self, buffer: WeightBuffer, feedback: ErrorFeedback, step: int) -> _Exchange:
        mode, peers = self._mode, self.peers
        local, shared = split_evenly(buffer.local, peers.size), split_evenly(buffer.shared, peers.size)
        sampled = [
            sample_coordinates(len(part), mode.random, step, mode.sampling, seed=0, device=part.device)
            for part in local
        ]
        updates = [mine[index] - common[index] for mine, common, index in zip(local, shared, sampled, strict=True)]
        residual = feedback.server_residual[sampled[peers.replica]]
        result = sharded_mean(updates, residual, self._codec, peers, self.meter)
        return _Exchange(sampled, updates, result)

    @torch.no_grad()
    def _apply(self, buffer: WeightBuffer, feedback: ErrorFeedback, exchange: _Exchange) -> None:
        """Move the global weights by the mean update; the local weights differ from them by what was not sent."""
        result, replicas = exchange.result, self.peers.size
        feedback.server_residual[exchange.sampled[self.peers.replica]] = result.server_residual
        for local, shared, index, residual, mean in zip(
            split_evenly(buffer.local, replicas),
            split_evenly(buffer.shared, replicas),
            exchange.sampled,
            exchange.residuals,
            dense(result.mean).split([*map(len, exchange.residuals)]),
            strict=True,
        ):
            moved = torch.add(shared[index], mean, alpha=self._mode.outer_lr)
            shared[index] = moved
            local[index] = moved.add_(residual)
        buffer.update_params()
