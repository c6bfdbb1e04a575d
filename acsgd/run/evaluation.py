"""Metrics of an evaluation over all ranks, from summed losses and the predictions of examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from acsgd.groups import Groups
from acsgd.metrics import Outcome, compute_metrics
from acsgd.model_classes import IGNORED
from acsgd.pp.runtime import Evaluated
from acsgd.run.report import Gather


class Evaluation:
    """Collects what this rank evaluates, then computes the metrics of what all ranks have evaluated.

    All ranks collect together. metrics: their names; num_targets: returns the number of summands of the loss.
    """

    def __init__(self, metrics: Sequence[str], groups: Groups, num_targets: Callable[[Tensor], int]) -> None:
        self._metrics = metrics
        self._groups = groups
        self._num_targets = num_targets
        self._group = groups.world
        self._sums = torch.zeros(3, dtype=torch.float64)
        """Summed loss, targets, and examples with a prediction."""
        self._examples: list[Tensor] = []
        """Predictions and labels of examples, fp64 [2, n] each."""
        self._gather = Gather([len(self._sums)] * self._group.size(), groups)

    def add(self, part: Evaluated, labels: Tensor | None) -> None:
        """Add a batch. labels: None without the last stage. Examples whose label is IGNORED are padding."""
        self._sums[0] += part.loss
        if labels is None:
            return
        self._sums[1] += self._num_targets(labels)
        if part.predictions is not None and part.predictions.shape == labels.shape:  # one label per prediction
            is_counted = labels != IGNORED
            self._sums[2] += is_counted.sum()
            self._examples.append(torch.stack([part.predictions[is_counted], labels[is_counted].double()]))

    def compute(self) -> dict[str, float]:
        """Return the metrics by name, equal on all ranks; the loss is NaN if there are no targets.

        Raises RunError if a rank does not answer.
        """
        sums = torch.stack(self._gather.rows(self._sums))
        loss, targets, num_examples = sums.sum(0).tolist()
        loss = loss / targets if targets else math.nan
        if not num_examples:
            empty = torch.empty(0).numpy()
            return compute_metrics(self._metrics, Outcome(loss, empty, empty))
        mine = torch.cat(self._examples, dim=1).flatten() if self._examples else torch.empty(0)
        parts = Gather((2 * sums[:, 2]).int().tolist(), self._groups).rows(mine)
        predictions, labels = torch.cat([part.view(2, -1) for part in parts], dim=1).numpy()
        return self._from_first(Outcome(loss, predictions, labels))

    def _from_first(self, outcome: Outcome) -> dict[str, float]:
        """Return the metrics as the first rank computes them: rounding may differ between hosts.

        So all ranks agree on which checkpoint is the best, and only one loads scikit-learn.
        """
        is_first, lengths = self._group.rank() == 0, [len(self._metrics), *[0] * (self._group.size() - 1)]
        mine = list(compute_metrics(self._metrics, outcome).values()) if is_first else []
        values = Gather(lengths, self._groups).rows(torch.tensor(mine, dtype=torch.float64))[0].tolist()
        return dict(zip(self._metrics, values, strict=True))
