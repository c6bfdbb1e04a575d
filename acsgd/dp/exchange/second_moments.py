"""Correction of second moments on replicas that make local steps: row by row as large as those of the mean gradient.

AdamW divides by the root of the mean square of the gradients that it sees. On one of R replicas that is signal + noise;
for the mean gradient it is signal + noise / R: up to R times less, so a step on the mean gradient is up to sqrt(R)
times longer. The ratio differs most between rows: a rare token's row, for example, has a gradient on one replica only.
So the second moments of a row keep the relative sizes that a replica's own gradients give them, and their mean is
corrected. At some steps the replicas exchange three numbers per row. One is a random projection of the gradient row,
whose mean over the replicas gives the square of the mean gradient without exchanging the gradient. Nothing is exchanged
of weights that have no second moments, such as the matrices that Muon orthogonalizes.

R replicas; N = rows of all weights of a stage; g = a row of a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from acsgd.codecs.log_levels import LogLevels
from acsgd.comm.waits import Meter
from acsgd.dp.exchange.averaging import sharded_mean, split_evenly
from acsgd.dp.exchange.buckets import FlatLayout
from acsgd.dp.exchange.vectors import dense
from acsgd.dp.peers import Peers
from acsgd.dp.resize import ReplicaState, restore
from acsgd.optim.base import SecondMoments
from acsgd.shards.weights import MIN_ROW, WeightState
from acsgd.streams import load_onto, mix_seed

INTERVAL = 16
"""Steps between two measurements."""
DECAY = 0.7
"""Weight of the earlier measurements in a new one."""
PRIOR = 2.0
"""Measurements of a row that the ratio of its whole weight counts for, since one projection is noisy."""
SIGN_ROWS = 128
"""Rows that share two draws of random signs."""
BLOCK = 1 << 20
"""Largest number of elements that are projected at once, unless SIGN_ROWS rows have more."""


class _RowStatistics(NamedTuple):
    """Statistics of the rows of a stage, fp32 [N] each."""

    mean: Tensor
    """Mean second moment of the row on which the replicas have agreed, decayed since; NaN = none yet."""
    mean_squared: Tensor
    """Decayed sum over the measurements of (mean of p)^2, where p is a replica's projection of g."""
    squared_mean: Tensor
    """Decayed sum over the measurements of the mean of p^2."""
    measurements: Tensor
    """Decayed number of measurements in which the row had a gradient."""


class Measurement(NamedTuple):
    """What the replicas have measured of each row after a step, fp32 [N] each; 0 for weights without second moments."""

    added: Tensor
    """Mean over the replicas of what gradients have added to second moments since."""
    squares: Tensor
    """Mean over the replicas of p^2, where p is a replica's projection of g."""
    projected: Tensor
    """Mean of p."""


def _rows_shape(weight: Tensor) -> tuple[int, ...]:
    return (len(by_rows(weight)),)


ROW_MEANS = ReplicaState("second_moment_means", merge="mean", shape=_rows_shape, may_be_nan=True, is_common=True)
"""_RowStatistics.mean."""
ROW_RATIOS = ReplicaState(
    "second_moment_ratios", merge="reset", shape=lambda weight: (*_rows_shape(weight), 3), is_common=True
)
"""The other fields of _RowStatistics."""


def moment_states(*, required: bool) -> tuple[ReplicaState, ReplicaState]:
    """Return the state of the correction. required: whether it is switched on."""
    return ROW_MEANS._replace(required=required), ROW_RATIOS._replace(required=required)


class SecondMomentCorrection:
    """Correction of the second moments of a stage, together with the same stage on all other replicas."""

    def __init__(self, weights: Mapping[str, Tensor], peers: Peers) -> None:
        """weights: by key; used for their shapes and device."""
        self._weights = weights
        self._peers = peers
        self._layout = FlatLayout({key: _rows_shape(weight) for key, weight in weights.items()})
        device = next(iter(weights.values())).device
        self._rows = _RowStatistics(*torch.zeros(4, self._layout.n, device=device))
        self._rows.mean.fill_(torch.nan)
        self._shares = torch.ones_like(self._rows.mean)
        """Fraction of a replica's squared gradients that its second moments accumulate, [N], in [1 / R, 1]."""

    def is_due(self, local_steps: int) -> bool:
        """Whether to measure after a number of local steps; more often at the start."""
        return local_steps % INTERVAL == 0 or local_steps in (1, 2, 4, 8)

    def shares(self) -> dict[str, Tensor]:
        """Return the fraction of squared gradients that second moments accumulate, by key, [rows]."""
        return self._layout.views(self._shares)

    @torch.no_grad()
    def measure(self, step: int, grads: Mapping[str, Tensor], moments: SecondMoments, meter: Meter) -> Measurement:
        """Exchange row statistics. Called in the thread of the peers, by all of them. Changes nothing.

        Args:
            step: The step that was made.
            grads: Its gradients, by key; weights without one count as zeros.
            moments: The second moments after it.
            meter: Counts the bytes sent.
        """
        present, mean = self._means(step, moments)
        projected = torch.zeros_like(present)
        for key, piece in self._layout.views(projected).items():
            if key in grads:
                piece.copy_(project(by_rows(grads[key]), step))
        levels = LogLevels()
        projected = levels.decode(levels.encode(projected), len(projected))  # so that its square is exact in a message
        added = (present - mean).clamp_min_(0) / self._shares
        statistics = torch.cat([self._measured(each, moments) for each in (added, projected.square(), projected)])
        parts = split_evenly(statistics, self._peers.size)
        means = dense(sharded_mean(parts, None, levels, self._peers, meter).mean).view(3, -1)
        return Measurement(*(self._with_others(each, moments) for each in means))

    @torch.no_grad()
    def update(self, step: int, moments: SecondMoments, measured: Measurement | None) -> None:
        """Decay the row means as the optimizer has decayed the second moments in local step `step`.

        After a measurement, also update the shares, and scale the second moments to the agreed row means, in place.
        A weight without a gradient in this step has not decayed; the next measurement corrects that.
        """
        mean, *sums = self._rows
        if measured is None:
            mean.copy_(self._decayed_means(step, moments))
            return
        present, decayed = self._means(step, moments)
        squares = measured.squares
        latest = measured.projected.square(), squares, torch.ones_like(squares)
        for total, each in zip(sums, latest, strict=True):
            total.copy_(torch.where(squares > 0, DECAY * total + each, total))
        self._update_shares()
        mean.copy_(decayed + self._shares * measured.added)
        self._scale_rows(moments, present)

    def state_dict(self) -> WeightState:
        """Return the row statistics, by key: [rows] and [rows, 3]."""
        return {
            ROW_MEANS.name: self._layout.views(self._rows.mean),
            ROW_RATIOS.name: self._layout.views(torch.stack(self._rows[1:], 1)),
        }

    def load_state_dict(self, saved: Sequence[WeightState]) -> None:
        """Restore from the saved states of all replicas."""
        here = {"replica": self._peers.replica, "replicas": self._peers.size}
        self.load(*(restore(state, saved, self._weights, **here) for state in (ROW_MEANS, ROW_RATIOS)))

    @torch.no_grad()
    def load(self, means: Mapping[str, Tensor], ratios: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned on this replica; rows that are missing have not been measured."""
        self._rows.mean.fill_(torch.nan)
        self._layout.fill(self._rows.mean, means)
        columns = self._rows.mean.new_zeros(self._layout.n, 3)
        self._layout.fill(columns, ratios)
        for total, column in zip(self._rows[1:], columns.unbind(1), strict=True):
            total.copy_(column)
        self._update_shares()

    def _decayed_means(self, step: int, moments: SecondMoments) -> Tensor:
        """Return the agreed row means as the optimizer has decayed them in a step, [N]."""
        mean = self._rows.mean
        return (torch.zeros_like(mean) if step == 0 else mean) * moments.decay

    def _means(self, step: int, moments: SecondMoments) -> tuple[Tensor, Tensor]:
        """Return the row means of this replica, [N], and those on which all have agreed before, decayed."""
        present, mean = self._present_means(moments), self._decayed_means(step, moments)
        return present, torch.where(mean.isnan(), present, mean)

    def _measured(self, rows: Tensor, moments: SecondMoments) -> Tensor:
        """Return the rows, of [N], of weights that have second moments."""
        views = self._layout.views(rows)
        return torch.cat([rows[:0], *(view for key, view in views.items() if key not in moments.without)])

    def _with_others(self, measured: Tensor, moments: SecondMoments) -> Tensor:
        """Return what `_measured` has selected among all rows, [N], where the others are 0."""
        rows = torch.zeros_like(self._shares)
        views = [view for key, view in self._layout.views(rows).items() if key not in moments.without]
        for view, piece in zip(views, measured.split([*map(len, views)]), strict=True):
            view.copy_(piece)
        return rows

    def _present_means(self, moments: SecondMoments) -> Tensor:
        """Return the row means of second moments, [N]; 0 for weights that have none yet."""
        means = torch.zeros_like(self._shares)
        for key, piece in self._layout.views(means).items():
            if key in moments.by_key:
                piece.copy_(by_rows(moments.by_key[key]).mean(1))
        return means

    def _update_shares(self) -> None:
        _, mean_squared, squared_mean, measurements = self._rows
        of_row = (mean_squared / squared_mean).nan_to_num(1.0)
        sums = zip(*(self._layout.views(total).values() for total in (mean_squared, squared_mean)), strict=True)
        of_weight = torch.cat([(mean.sum() / each.sum()).nan_to_num(1.0).expand(len(mean)) for mean, each in sums])
        shares = (measurements * of_row + PRIOR * of_weight) / (measurements + PRIOR)
        self._shares = shares.clamp_(1 / self._peers.size, 1.0)

    def _scale_rows(self, moments: SecondMoments, present: Tensor) -> None:
        """Scale rows, whose present means are given, to the agreed means; rows of zeros are filled with the mean."""
        mean = self._rows.mean
        factors = self._layout.views(torch.where(present > 0, mean / present, 1.0))
        fills = self._layout.views(torch.where(present > 0, 0.0, mean))
        for key, factor in factors.items():
            if key in moments.by_key:
                by_rows(moments.by_key[key]).mul_(factor.unsqueeze(1)).add_(fills[key].unsqueeze(1))


def by_rows(x: Tensor) -> Tensor:
    """Return a view [rows, elements] of a weight, divided by its first dimension unless its rows are too short."""
    elements = x.numel() // len(x) if x.dim() > 1 else 1
    if elements < MIN_ROW:
        elements = MIN_ROW if x.numel() % MIN_ROW == 0 else x.numel()
    return x.view(-1, elements)


def project(grad: Tensor, step: int) -> Tensor:
    """Return random projections [rows] of the rows of a gradient [rows, n]; the expected square is the mean of g^2.

    The random signs are the same on all replicas and for copies of a weight, and differ between steps. They also differ
    between rows, since rows of a gradient are often alike and the mean over a weight's rows would else be as noisy as
    a single projection.
    """
    n, count = grad.shape[1], min(SIGN_ROWS, grad.shape[1])
    generator = torch.Generator().manual_seed(mix_seed(step, grad.numel()))
    draws = torch.randint(0, 2, (-(-len(grad) // count), 2, n), generator=generator)
    draws = load_onto(grad.device, draws.mul_(2).sub_(1).to(grad.dtype))
    at_once, pieces = max(1, BLOCK // (count * n)), []
    for rows, drawn in zip(grad.split(at_once * count), draws.split(at_once), strict=True):
        one, other = (each.repeat(1, 2).unfold(1, n, 1)[:, :count] for each in drawn.unbind(1))
        # one vector rotated by the index of the row, times the other rotated in the opposite direction
        signs = one.contiguous().mul_(other.flip(1)).view(-1, n)
        pieces.append((rows * signs[: len(rows)]).sum(1))
    return torch.cat(pieces) / n**0.5
