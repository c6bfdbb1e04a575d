"""Which rank holds a weight that layers of several ranks share, and what travels between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import torch

from acsgd.codecs.base import Codec, wire_bytes
from acsgd.codecs.fixpoint import FixPoint
from acsgd.codecs.lossless import BytePlanes
from acsgd.config.ranges import Range
from acsgd.config.spec import from_spec
from acsgd.layers.description import ModelLayers
from acsgd.pp.wire.coder import EXACT


@dataclass(frozen=True)
class TiedRows:
    """One rank holds the table of an embedding: that of its last layer, usually the head. It sends the others the rows
    that their batch uses, and they send the gradients of these rows back.

    Weights that another layer uses as more than a table travel as in `dense`.
    """

    holds_once: ClassVar[bool] = True

    bits: Annotated[int, Range(0, 8)] = 0
    """Bits per element, 2 to 8, with a scale per row; gradients are rounded stochastically. 0 = exact."""
    entropy_coding: bool = False
    """Whether messages are entropy-coded, which takes time of both ends. Exact rows then travel as differences from the
    step before, and stay exact; both ends keep the rows of two steps."""

    def __post_init__(self) -> None:
        if self.bits == 1:
            raise ValueError("bits=1 must be 0 for exact rows, or 2 to 8; 8 is usual")

    @property
    def rows(self) -> Codec:
        """Codec of rows."""
        return FixPoint(self.bits, dims="token", entropy_coding=self.entropy_coding) if self.bits else self._exact

    @property
    def gradients(self) -> Codec:
        """Codec of the gradients of rows. Unbiased, so that it needs no residual, which could get lost with a host."""
        if not self.bits:
            return self._exact
        return FixPoint(self.bits, dims="token", rounding="stochastic", entropy_coding=self.entropy_coding)

    @property
    def _exact(self) -> Codec:
        return BytePlanes() if self.entropy_coding else EXACT


@dataclass(frozen=True)
class TiedDense:
    """Each rank has a copy of the whole weight with its own optimizer state, and sends its whole gradient to the
    others."""

    holds_once: ClassVar[bool] = False


TIED: Mapping[str, type] = {"rows": TiedRows, "dense": TiedDense}
"""Ways to share a weight, by the names of pp.tied."""


class RowRung(NamedTuple):
    """A way to send rows of tables and their gradients."""

    spec: str
    loss_cost: float
    """Train loss above that of an uncompressed run."""
    coded: tuple[float, float] | None = None
    """Length of rows and of gradients relative to exact ones, after entropy coding; None = there is none."""

    @property
    def how(self) -> TiedRows:
        """The options of pp.tied."""
        how: TiedRows = from_spec(self.spec, TIED, key="pp.tied")
        return how

    def element_bytes(self, width: int, dtype: torch.dtype) -> tuple[float, float]:
        """Return the bytes per element of rows, and of gradients. width: elements of a row; dtype: of the table."""
        whole = (self.how.rows, dtype), (self.how.gradients, torch.float32)
        sizes = [wire_bytes(codec.wire((1, width), of)) / width for codec, of in whole]
        rows, gradients = self.coded or (1.0, 1.0)
        return rows * sizes[0], gradients * sizes[1]


ROW_RUNGS = (
    RowRung("rows", 0.0),
    RowRung("rows:entropy_coding=true", 0.0, (0.65, 0.95)),
    RowRung("rows:bits=8", 0.0012),
)
"""What pp.compress chooses among, by loss cost. Costs, and lengths of rows in fp32 at a learning rate of 1e-4, are in
docs/measurements/stages.md."""


class TiedWeight(NamedTuple):
    """A weight that layers of several ranks share."""

    key: str
    number: int
    """Position among the tied weights of the model."""
    layers: tuple[int, ...]
    """Layers that use it, in ascending order."""
    ranks: tuple[int, ...]
    """Ranks with layers that use it, in the order of the layers."""
    owner: int
    """Rank of the last of these layers."""
    lookups: Mapping[int, tuple[str, ...]]
    """By rank that gets rows from the owner: the inputs of the model that are their indices. Empty = each of `ranks`
    has a copy."""


def tied_weights(
    description: ModelLayers, rank_of_layer: Callable[[int], int], how: TiedRows | TiedDense
) -> list[TiedWeight]:
    """Return the weights that layers of several ranks share, in the order of the model."""
    found = []
    for number, (key, layers) in enumerate(description.tied().items()):
        ranks = tuple(dict.fromkeys(map(rank_of_layer, layers)))
        owner = rank_of_layer(layers[-1])
        others = [layer for layer in layers if rank_of_layer(layer) != owner]
        lookups: dict[int, tuple[str, ...]] = {}
        if how.holds_once and all(key in description.layers[layer].lookups for layer in others):
            for layer in others:
                rank, inputs = rank_of_layer(layer), description.layers[layer].lookups[key]
                lookups[rank] = tuple(dict.fromkeys((*lookups.get(rank, ()), *inputs)))
        if others:
            found.append(TiedWeight(key, number, tuple(layers), ranks, owner, lookups))
    return found
