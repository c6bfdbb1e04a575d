"""Shapes of the micro-batches of a run: each as long as its longest row, or all as long as the rows of the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from acsgd.layers.batch import Lengths, cut
from acsgd.layers.composed import Inputs


@dataclass(frozen=True)
class MicroShapes:
    """Shapes of the tensors of a micro-batch."""

    inputs: Mapping[str, tuple[str, ...]]
    """Symbols of the axes of each input of the model."""
    labels: tuple[str, ...]
    """Symbols of the axes of the labels."""
    full: Lengths
    """Tokens per row of the data."""
    is_cut: bool
    """Whether the padding behind the longest row of a micro-batch is left out."""

    def lengths(self, longest_rows: Sequence[Lengths] | None, micros: int) -> list[Lengths | None]:
        """Return the tokens per row of each micro-batch; None = known from the first message of its forward.

        longest_rows: the longest row of each of the `micros` micro-batches, without padding; None if no rows are read.
        """
        if not self.is_cut:
            return [self.full] * micros
        if longest_rows is None:
            return [None] * micros
        return [lengths.rounded_up(self.full) for lengths in longest_rows]

    def cut_inputs(self, inputs: Inputs, lengths: Lengths) -> Inputs:
        """Return the inputs of a micro-batch with rows of some lengths."""
        return {name: cut(x, self.inputs[name], lengths) for name, x in inputs.items()}

    def cut_labels(self, labels: Tensor, lengths: Lengths) -> Tensor:
        """Return the labels of a micro-batch with rows of some lengths."""
        return cut(labels, self.labels, lengths)
