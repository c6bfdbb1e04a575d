"""Which replicas own the optimizer state of which parts of the weights.

A weight is whole or split into parts, each some of its rows. The optimizer of an owner steps a part as a weight of its
own, whose tensors are views, and whose key, such as "lm_head.weight[0:512]", names its state in files and messages.
Where nothing is split, each replica owns all weights of its stages.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from acsgd.optim.base import Optimizer
from acsgd.shards.weights import Weight, WeightState, part_of

_PART_KEY = re.compile(r"(.*)\[(\d+):(\d+)\]")


class Part(NamedTuple):
    """Rows of a weight, and the replicas that own the optimizer state of them."""

    weight: str
    """Key of the weight."""
    start: int
    stop: int
    owners: tuple[int, ...]

    @property
    def key(self) -> str:
        return f"{self.weight}[{self.start}:{self.stop}]"

    def of(self, weight: Weight) -> Weight:
        """Return the part of a weight that shares its memory, without a gradient."""
        master = nn.Parameter(weight.master.detach()[self.start : self.stop])
        param = nn.Parameter(weight.param.detach()[self.start : self.stop])
        return weight._replace(key=self.key, param=master if weight.param is weight.master else param, master=master)


@dataclass(frozen=True)
class Ownership:
    """The owners of the optimizer state, as one replica sees them."""

    replica: int
    """Index of this replica."""
    replicas: int
    """Number of replicas."""
    parts: tuple[Part, ...] = ()
    """Parts of all weights that are split, in the order of their rows; the same on all ranks. Checks of checkpoints,
    snapshots and the plans of elastic runs know whole weights only, so far."""

    def owned(self, weight: Weight) -> tuple[Weight, ...]:
        """Return what this replica owns of a weight: the weight, or parts of it."""
        parts = [part for part in self.parts if part.weight == weight.key]
        return tuple(part.of(weight) for part in parts if self.replica in part.owners) if parts else (weight,)

    def is_writer(self, key: str, turn: int, idle: Collection[int] = ()) -> bool:
        """Return whether this replica saves or sends, for all of its owners, what `key` names. They take turns.

        key: of a part, or else of anything that all replicas hold. turn: such as the index of the layer. idle: replicas
        that have no state yet.
        """
        owners = next((part.owners for part in self.parts if part.key == key), range(self.replicas))
        writers = [replica for replica in owners if replica not in idle]
        return writers[turn % len(writers)] == self.replica

    def written(self, state: WeightState, turn: int, idle: Collection[int] = ()) -> WeightState:
        """Return the part of a state, not copied, of which this replica is the writer. Arguments as `is_writer`."""
        keys = {key for by_key in state.values() for key in by_key}
        return part_of(state, {key for key in keys if self.is_writer(key, turn, idle)})

    def squared_norms(self, by_replica: Sequence[float]) -> list[float]:
        """Return the squared gradient norm of the model on each replica. by_replica: of `OwnedWeights.counted`."""
        return [sum(by_replica)] * self.replicas if self.parts else [*by_replica]


class OwnedWeights:
    """The weights of a rank, and what its optimizer steps of them: each weight, or parts of it."""

    def __init__(self, weights: Sequence[Weight], ownership: Ownership) -> None:
        self.weights = weights
        self.ownership = ownership
        self._owned = {weight.key: ownership.owned(weight) for weight in weights}

    def of(self, weights: Iterable[Weight]) -> list[Weight]:
        """Return what this rank owns of some of its weights."""
        return [owned for weight in weights for owned in self._owned[weight.key]]

    @property
    def counted(self) -> list[Weight]:
        """What this rank counts in the gradient norm of its replica; where weights are split, in that of all."""
        owned, ownership = self.of(self.weights), self.ownership
        return [each for each in owned if not ownership.parts or ownership.is_writer(each.key, 0)]

    def state_of(self, optimizer: Optimizer, weights: Iterable[Weight]) -> WeightState:
        """Return the optimizer state of what this rank owns of some of its weights, not copied."""
        return optimizer.state_of(self.of(weights))

    def load_state(self, optimizer: Optimizer, weights: Iterable[Weight], state: WeightState) -> None:
        """Load a copy of the optimizer state of some weights. state: of these weights at least, whole or in parts."""
        whole = join_parts(state)
        for owned in self.of(weights):
            optimizer.load_state_of(owned, _state_of(owned.key, whole))


def join_parts(state: WeightState) -> WeightState:
    """Return the state of whole weights, given that of all of their parts. Scalars are those of the first part."""
    joined: WeightState = {}
    for name, by_key in state.items():
        rows: dict[str, dict[int, Tensor]] = {}
        for key, tensor in by_key.items():
            weight, start, _ = _split_key(key)
            rows.setdefault(weight, {})[start] = tensor
        joined[name] = {weight: _concatenate([x for _, x in sorted(parts.items())]) for weight, parts in rows.items()}
    return joined


def _concatenate(rows: Sequence[Tensor]) -> Tensor:
    return torch.cat([*rows]) if len(rows) > 1 and rows[0].dim() else rows[0]


def _state_of(key: str, whole: WeightState) -> WeightState:
    """Return the state of a weight or part, not copied, given that of whole weights."""
    weight, start, stop = _split_key(key)
    tensors = {name: by_key[weight] for name, by_key in whole.items() if weight in by_key}
    return {name: {key: tensor[start:stop] if tensor.dim() else tensor} for name, tensor in tensors.items()}


def _split_key(key: str) -> tuple[str, int, int | None]:
    """Return the weight, the first row and the end of the part that a key names. All rows: 0, None."""
    found = _PART_KEY.fullmatch(key)
    return (found[1], int(found[2]), int(found[3])) if found else (key, 0, None)
