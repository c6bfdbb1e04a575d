"""Which replicas own the fp32 masters and the optimizer state of which parts of the weights.

A part is a weight, or some of its rows. The optimizer of an owner steps a part as a weight of its own, whose parameter
is a view, and whose key, such as "lm_head.weight[0:512]", names its state in messages. Where there are no parts, each
replica owns all weights of its stages.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from acsgd.errors import RunError
from acsgd.optim.base import Optimizer
from acsgd.shards.weights import MIN_ROW, Weight, WeightState

_PART_KEY = re.compile(r"(.*)\[(\d+):(\d+)\]")


class Part(NamedTuple):
    """A weight or some of its rows, and the replica that owns its master and optimizer state."""

    weight: str
    """Key of the weight."""
    start: int
    stop: int | None
    """None = all rows."""
    owner: int
    """Position of the owner among the replicas that divide the weights."""

    @property
    def key(self) -> str:
        return self.weight if self.stop is None else f"{self.weight}[{self.start}:{self.stop}]"

    def rows(self, tensor: Tensor) -> Tensor:
        """Return these rows of a tensor of the weight's shape, not copied."""
        return tensor if self.stop is None else tensor[self.start : self.stop]

    def of(self, weight: Weight, *, is_view: bool = True) -> Weight:
        """Return the part of a weight, without a gradient. It has its own master if the weight has.

        is_view: whether its parameter is a view of the weight's; else it is a copy.
        """
        rows = self.rows(weight.param.detach())
        param = nn.Parameter(rows if is_view else rows.clone(), requires_grad=weight.param.requires_grad)
        param.grad_dtype = weight.param.grad_dtype
        master = param
        if weight.master is not weight.param:
            master = nn.Parameter(self.rows(weight.master.detach()).clone())
        return weight._replace(key=self.key, param=param, master=master)


def divide(weights: Iterable[Weight], replicas: int, *, by_rows: bool) -> list[Part]:
    """Divide weights among some replicas, so that each owns about as many elements.

    by_rows: whether weights are split into rows; else each has one owner, as optimizers need whose update of an element
    depends on others. So have vectors and matrices with short rows, whose statistics are not by row. Copies of a tied
    weight on several ranks are divided alike.
    """
    parts, loads = list[Part](), [0] * replicas
    for weight in sorted(weights, key=lambda each: (not each.is_tied, -each.master.numel())):
        if by_rows and weight.master.dim() > 1 and weight.master[0].numel() >= MIN_ROW:
            parts += divide_rows(weight, replicas)
        else:
            owner = 0 if weight.is_tied else min(range(replicas), key=loads.__getitem__)
            loads[owner] += weight.master.numel()
            parts.append(Part(weight.key, 0, None, owner))
    return parts


def divide_rows(weight: Weight, replicas: int) -> list[Part]:
    """Divide the rows of a weight among some replicas. A scalar is the first one's."""
    if not weight.master.dim():
        return [Part(weight.key, 0, None, 0)]
    ends = [len(weight.master) * j // replicas for j in range(replicas + 1)]
    rows = enumerate(pairwise(ends))
    return [Part(weight.key, start, stop, owner) for owner, (start, stop) in rows if start < stop]


@dataclass(frozen=True)
class Ownership:
    """The owners of the optimizer state, as one replica sees them."""

    replica: int
    """Index of this replica."""
    replicas: int
    """Number of replicas."""
    parts: tuple[Part, ...] | None = None
    """Parts of the weights of this rank that are divided, in the order of their rows; the same on all replicas of a
    stage. None = no rank's are; empty = those of other ranks may be."""
    gathered: frozenset[str] = frozenset()
    """Parameters, trained or frozen, that are whole while a layer uses them alone: else each replica has its parts."""
    domains: Sequence[Sequence[int]] = ()
    """Replicas that divide the weights among themselves, of which each domain has all parts; none = all do."""

    @functools.cached_property
    def owners(self) -> Sequence[int]:
        """The replicas that divide the weights with this one."""
        return next((each for each in self.domains if self.replica in each), range(self.replicas))

    @property
    def position(self) -> int:
        """Position of this replica among the owners."""
        return self.owners.index(self.replica)

    @property
    def place(self) -> tuple[int, int]:
        """The part of the state of its layers that this replica has, and the number of parts; (0, 1) = all of it."""
        return (0, 1) if self.parts is None else (self.position, len(self.owners))

    @property
    def holders(self) -> list[Sequence[int]]:
        """Replicas that hold the same state: of each part, if they divide it."""
        everyone: list[Sequence[int]] = [range(self.replicas)]
        return everyone if self.parts is None else [*zip(*(self.domains or everyone), strict=True)]

    @functools.cached_property
    def _by_weight(self) -> dict[str, list[Part]]:
        by_weight: dict[str, list[Part]] = {}
        for part in self.parts or ():
            by_weight.setdefault(part.weight, []).append(part)
        return by_weight

    def parts_of(self, weight: Weight) -> list[Part]:
        """Return the parts of a weight; none if it is not divided."""
        return self._by_weight.get(weight.key, [])

    def owned(self, weight: Weight) -> tuple[Weight, ...]:
        """Return what this replica owns of a weight: the weight, or parts of it."""
        parts, is_view = self.parts_of(weight), weight.key not in self.gathered
        own = (part.of(weight, is_view=is_view) for part in parts if part.owner == self.position)
        return tuple(own) if parts else (weight,)

    def writer(self, turn: int, idle: Collection[int] = ()) -> int:
        """Return the replica that saves or sends, for all, what all replicas hold. They take turns.

        turn: such as the index of the layer. idle: replicas that have no state yet.
        """
        writers = [replica for replica in range(self.replicas) if replica not in idle]
        return writers[turn % len(writers)]

    def is_writer(self, turn: int, idle: Collection[int] = ()) -> bool:
        """Return whether this replica is the `writer`."""
        return self.writer(turn, idle) == self.replica

    def squared_norms(self, by_replica: Sequence[float]) -> list[float]:
        """Return the squared gradient norm of the model on each replica. by_replica: of what each replica owns."""
        if self.parts is None:
            return [*by_replica]
        domains = self.domains or [range(self.replicas)]
        sums = {replica: sum(by_replica[each] for each in domain) for domain in domains for replica in domain}
        return [sums[replica] for replica in range(self.replicas)]


class OwnedWeights:
    """The weights of a rank, and what its optimizer steps of them: each weight, or parts of it.

    Masters apart from the parameters, of weights that have parts, keep their shape and their gradient, but no values:
    parts have them.
    """

    def __init__(self, weights: Iterable[Weight], ownership: Ownership) -> None:
        self.ownership = ownership
        self._by_key: dict[str, Weight] = {}
        self._owned: dict[str, tuple[Weight, ...]] = {}
        self.add(weights)

    @property
    def weights(self) -> list[Weight]:
        """All weights, each with the parameter that has its values between uses, which may not be that of the model."""
        return [*self._by_key.values()]

    def add(self, weights: Iterable[Weight]) -> None:
        """Add weights of the rank, and divide them if they have parts."""
        for weight in weights:
            self._by_key[weight.key] = weight
            self._owned[weight.key] = self.ownership.owned(weight)
            if weight.master is not weight.param and self.ownership.parts_of(weight):
                weight.master.data = weight.master.new_zeros(()).expand(weight.master.shape)

    def among(self, ownership: Ownership) -> OwnedWeights:
        """Return the same weights among other replicas. This rank must own the same parts there."""
        moved = OwnedWeights((), ownership)
        moved._by_key, moved._owned = self._by_key, self._owned
        return moved

    def of(self, weights: Iterable[Weight]) -> list[Weight]:
        """Return what this rank owns of some of its weights."""
        return [owned for weight in weights for owned in self._owned[weight.key]]

    def of_key(self, key: str) -> tuple[Weight, ...]:
        """Return what this rank owns of the weight with a key."""
        return self._owned[key]

    def kept(self, weights: Iterable[Weight]) -> list[Weight]:
        """Return some of the weights as `weights` has them."""
        return [self._by_key[weight.key] for weight in weights]

    @torch.no_grad()
    def load(self, weight: Weight, values: Tensor) -> None:
        """Load fp32 values of a weight into its parameter, and into the masters that this rank owns."""
        is_whole = weight.key not in self.ownership.gathered
        if is_whole:
            self._by_key[weight.key].param.copy_(values)
        for owned in self._owned[weight.key]:
            owned.master.copy_(_rows_of(owned.key, values))
            if not is_whole:
                owned.param.copy_(_rows_of(owned.key, values))

    def state_of(self, optimizer: Optimizer, weights: Iterable[Weight]) -> WeightState:
        """Return the optimizer state of what this rank owns of some of its weights, not copied."""
        return optimizer.state_of(self.of(weights))

    def load_state(self, optimizer: Optimizer, weights: Iterable[Weight], state: WeightState) -> None:
        """Load a copy of the optimizer state of some weights. state: see `parts_of`."""
        own = self.of(weights)
        parts = parts_of(own, state)
        for owned in own:
            of_key = {name: {owned.key: by_key[owned.key]} for name, by_key in parts.items() if owned.key in by_key}
            optimizer.load_state_of(owned, of_key)


def parts_of(owned: Iterable[Weight], state: WeightState) -> WeightState:
    """Return the state of weights or parts, those without any left out.

    state: of the same ones, of whole weights, not copied then, or of all parts of these weights, divided in another
    way. Raises RunError if some of these are missing.
    """
    by_weight, parts = {name: _by_weight(by_key) for name, by_key in state.items()}, WeightState()
    for each in owned:
        weight, start, stop = _split_key(each.key)
        for name, found in by_weight.items():
            if (pieces := found.get(weight)) is None:
                continue
            same = next((tensor for key, tensor in pieces if key == each.key), None)
            rows = _rows_of(each.key, _join(pieces)) if same is None else same
            if rows.dim() and stop is not None and len(rows) != stop - start:
                raise RunError(f"the state of {weight} is incomplete: not all of its rows {start} to {stop} are here")
            parts.setdefault(name, {})[each.key] = rows
    return parts


@torch.no_grad()
def fill_rows(whole: Tensor, parts: Iterable[tuple[str, Tensor]]) -> Tensor:
    """Copy parts of a weight, by key, into their rows of a tensor of its shape, in place; return that."""
    for key, tensor in parts:
        _rows_of(key, whole).copy_(tensor)
    return whole


def join_parts(state: WeightState) -> WeightState:
    """Return the state of whole weights, given that of all of their parts. Scalars are those of the first part."""
    return {
        name: {weight: _join(pieces) for weight, pieces in _by_weight(by_key).items()} for name, by_key in state.items()
    }


Pieces = list[tuple[str, Tensor]]
"""Tensors of a weight or of its parts, by key."""


def _by_weight(by_key: Mapping[str, Tensor]) -> dict[str, Pieces]:
    """Return tensors of weights or parts by the key of the weight."""
    by_weight: dict[str, Pieces] = {}
    for key, tensor in by_key.items():
        by_weight.setdefault(weight_of(key), []).append((key, tensor))
    return by_weight


def _join(pieces: Pieces) -> Tensor:
    """Return the tensor of a whole weight. Raises RunError if there is a gap between its parts."""
    by_start = {_split_key(key)[1]: (_split_key(key)[2], key, tensor) for key, tensor in pieces}
    tensors, end = list[Tensor](), 0
    for start, (stop, key, tensor) in sorted(by_start.items()):
        if start != end:
            raise RunError(f"the state of {weight_of(key)} is incomplete: its rows {end} to {start} are missing")
        end = stop or 0
        tensors.append(tensor)
    return torch.cat(tensors) if len(tensors) > 1 and tensors[0].dim() else tensors[0]


def weight_of(key: str) -> str:
    """Return the key of the weight of which a key names a part, or all."""
    return _split_key(key)[0]


def rows_of_key(key: str) -> tuple[str, int]:
    """Return the key of the weight of which a key names a part, or all, and the first row of that part."""
    return _split_key(key)[:2]


def _rows_of(key: str, tensor: Tensor) -> Tensor:
    """Return the rows that the key of a part names, not copied; a tensor without dimensions as it is."""
    _, start, stop = _split_key(key)
    return tensor[start:stop] if tensor.dim() else tensor


def _split_key(key: str) -> tuple[str, int, int | None]:
    """Return the weight, the first row and the end of the part that a key names. All rows: 0, None."""
    found = _PART_KEY.fullmatch(key)
    return (found[1], int(found[2]), int(found[3])) if found else (key, 0, None)
