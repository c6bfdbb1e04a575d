"""Named tensors in one flat tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor


class FlatLayout:
    """Layout of named tensors, one after another, in a flat tensor [n]."""

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        self._shapes = {key: tuple(shape) for key, shape in shapes.items()}
        self._sizes = [math.prod(shape) for shape in self._shapes.values()]
        self.n = sum(self._sizes)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views of a tensor [n, ...] by name: [*shape, ...]."""
        pieces = zip(self._shapes.items(), flat.split(self._sizes), strict=True)
        return {key: piece.view(*shape, *flat.shape[1:]) for (key, shape), piece in pieces}

    def fill(self, flat: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Copy named tensors into a flat tensor [n, ...], in place; names without a tensor keep their values."""
        for key, view in self.views(flat).items():
            if key in tensors:
                view.copy_(tensors[key])
