"""AdamW's second moments on replicas that step apart: row by row as large as they would be for the mean gradient.

AdamW divides by the root of the mean square of the gradients that it sees. On one of R replicas that is signal + noise,
of their mean it is signal + noise / R: up to R times less, so a step on the mean is up to sqrt(R) times longer. By how
much differs most between rows, the row of a rare token, say, which one replica has a gradient for and the others have
not. So a row keeps its form, which is that of a replica's own gradients, and gets its size from all: now and then three
numbers per row travel, of which one, a random projection of g, tells the square of the mean g without exchanging g.

R replicas; N = rows of all weights of a stage; g = a row of a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from acsgd.codecs.log_levels import LogLevels
from acsgd.dp.exchange.averaging import parts, served_mean
from acsgd.dp.exchange.peers import Peers
from acsgd.meter import Meter
from acsgd.optim.base import SecondMoments
from acsgd.seeds import mix_seed
from acsgd.shards.weights import WeightState

ROWS = "moment_rows"
"""Name under which [rows, 4] per weight is saved: the fields of _Rows."""
NARROWEST = 8
"""Elements of a row at least, where a weight can be cut so; what travels per row is not worth it for fewer."""
EVERY, KEPT = 16, 0.7
"""Steps between two measurements, and what an earlier one counts for in the next."""
PRIOR = 2.0
"""Measurements of a row that its weight as a whole counts for: one projection says little."""
BLOCK = 128
"""Rows that share two draws of signs."""


class _Rows(NamedTuple):
    """What is known of each row of a stage, fp32 [N] each."""

    agreed: Tensor
    """Of its second moments, what is left of the mean on which replicas have agreed; NaN = not known yet."""
    of_mean: Tensor
    """Sum over the measurements of (mean of p)^2, p a replica's projection of g; earlier ones count for less."""
    of_each: Tensor
    """The same of the mean of p^2."""
    measured: Tensor
    """How many measurements that are: those in which the row had a gradient."""


class RowMoments:
    """Keeps the second moments of a stage, together with the same stage of all other replicas."""

    def __init__(self, weights: Mapping[str, Tensor], peers: Peers) -> None:
        """weights: by key; their shapes count, and the device that they are on."""
        self._peers = peers
        self._lengths = {key: len(by_rows(weight)) for key, weight in weights.items()}
        device = next(iter(weights.values())).device
        self._rows = _Rows(*torch.zeros(4, sum(self._lengths.values()), device=device))
        self._rows.agreed.fill_(torch.nan)
        self._share = torch.ones_like(self._rows.agreed)
        """How much of the squares of a replica's gradients is to be added to second moments, [N], in [1 / R, 1]."""

    def is_due(self, steps: int) -> bool:
        """Whether to measure after so many steps apart: more often at the start."""
        return steps % EVERY == 0 or steps in (1, 2, 4, 8)

    def shares(self) -> dict[str, Tensor]:
        """Return by key, [rows], what shares of the squares of gradients AdamW is to add."""
        return self._split(self._share)

    def note(self, step: int, moments: SecondMoments) -> None:
        """Take note that step `step`, counted from 0, has been made apart.

        A weight that took no part in it has lost nothing; that counts as gained, when it is measured.
        """
        agreed = self._rows.agreed
        if step == 0:
            agreed.zero_()
        agreed.mul_(moments.decay)

    @torch.no_grad()
    def measure(self, step: int, grads: Mapping[str, Tensor], moments: SecondMoments, meter: Meter) -> None:
        """Look at the gradients of a step and its second moments, by key; agree on shares, and on the means of rows.

        A weight that has no gradient here has one of zeros. Changes the second moments. To be called in the thread of
        the peers, by all of them, after `note`.
        """
        agreed, *sums = self._rows
        now = self._means(moments)
        agreed.copy_(torch.where(agreed.isnan(), now, agreed))
        projected = torch.zeros_like(now)
        for key, piece in self._split(projected).items():
            if key in grads:
                piece.copy_(project(by_rows(grads[key]), step))
        levels = LogLevels()
        projected = levels.decode(levels.encode(projected), len(projected))  # so that its square is told exactly
        told = torch.cat([(now - agreed).clamp_min_(0) / self._share, projected.square(), projected])
        means = served_mean(parts(told, self._peers.size), None, levels, self._peers, meter).mean
        added, squares, projected = torch.cat(means).split(len(now))
        for total, latest in zip(sums, (projected.square(), squares, torch.ones_like(squares)), strict=True):
            total.copy_(torch.where(squares > 0, KEPT * total + latest, total))
        self._find_shares()
        agreed.add_(self._share * added)
        self._resize(moments, now)

    def state_dict(self) -> WeightState:
        """Return what is known of the rows, by key, [rows, 4]."""
        return {ROWS: self._split(torch.stack(self._rows, 1))}

    def load_state_dict(self, saved: Sequence[WeightState]) -> None:
        """Take over what as many replicas knew; of more or fewer the sizes alone hold, in the mean."""
        known = [state[ROWS] for state in saved if ROWS in state]
        if known and len(known) == len(saved) == self._peers.size:
            self.load(known[self._peers.replica])
            return
        rows = torch.zeros(sum(self._lengths.values()), 4)
        rows[:, 0] = torch.nan
        if known and len(known) == len(saved):
            rows[:, 0] = torch.stack([torch.cat([each[key][:, 0] for key in self._lengths]) for each in known]).mean(0)
        self.load(self._split(rows))

    @torch.no_grad()
    def load(self, rows: Mapping[str, Tensor]) -> None:
        """Take over what this replica itself knew, by key, [rows, 4]."""
        whole = torch.cat([rows[key] for key in self._lengths])
        for total, column in zip(self._rows, whole.unbind(1), strict=True):
            total.copy_(column)
        self._find_shares()

    def _split(self, rows: Tensor) -> dict[str, Tensor]:
        """View [N, ...] as what belongs to each weight, by key."""
        return dict(zip(self._lengths, rows.split(list(self._lengths.values())), strict=True))

    def _means(self, moments: SecondMoments) -> Tensor:
        """Return the means of the rows of second moments, [N]; 0 where there are none."""
        means = torch.zeros_like(self._share)
        for key, piece in self._split(means).items():
            if key in moments.by_key:
                piece.copy_(by_rows(moments.by_key[key]).mean(1))
        return means

    def _find_shares(self) -> None:
        _, of_mean, of_each, measured = self._rows
        own = (of_mean / of_each).nan_to_num(1.0)
        sums = zip(self._split(of_mean).values(), self._split(of_each).values(), strict=True)
        whole = torch.cat([(mean.sum() / each.sum()).nan_to_num(1.0).expand(len(mean)) for mean, each in sums])
        shares = (measured * own + PRIOR * whole) / (measured + PRIOR)
        self._share = shares.clamp_(1 / self._peers.size, 1.0)

    def _resize(self, moments: SecondMoments, now: Tensor) -> None:
        """Multiply rows, whose means are now those, so that they are what is agreed; a row of zeros is filled."""
        agreed = self._rows.agreed
        factors = self._split(torch.where(now > 0, agreed / now, 1.0))
        fills = self._split(torch.where(now > 0, 0.0, agreed))
        for key, factor in factors.items():
            if key in moments.by_key:
                by_rows(moments.by_key[key]).mul_(factor.unsqueeze(1)).add_(fills[key].unsqueeze(1))


def by_rows(x: Tensor) -> Tensor:
    """Return a view [rows, elements] of a weight, cut by its first dimension unless that makes rows too short."""
    elements = x.numel() // len(x) if x.dim() > 1 else 1
    if elements < NARROWEST:
        elements = NARROWEST if x.numel() % NARROWEST == 0 else x.numel()
    return x.view(-1, elements)


def project(grad: Tensor, step: int) -> Tensor:
    """Return random projections [rows] of the rows of a gradient, [rows, n]; the mean of a square is that of g^2.

    On signs drawn anew in each step, the same on all replicas and for copies of a weight. Rows of a gradient are often
    alike, so each is projected on others: else what a weight as a whole is taken to have would be that of one number.
    """
    n, count = grad.shape[1], min(BLOCK, grad.shape[1])
    generator = torch.Generator().manual_seed(mix_seed(step, grad.numel()))
    pieces = []
    for rows in grad.split(count):
        one, other = torch.randint(0, 2, (2, n), generator=generator).mul_(2).sub_(1).to(grad.device, grad.dtype)
        # one, turned by a place per row, times the other, turned the other way
        signs = one.repeat(2).unfold(0, n, 1)[:count] * other.repeat(2).unfold(0, n, 1)[:count].flip(0)
        pieces.append((rows * signs[: len(rows)]).sum(1))
    return torch.cat(pieces) / n**0.5
