"""Weights of which every replica has its own: what modes share that exchange weights instead of gradients.

n = parameters of a unit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from acsgd.dp.exchange.averaging import parts
from acsgd.dp.exchange.peers import Peers
from acsgd.dp.exchange.second_moments import ROWS, RowMoments
from acsgd.dp.modes.allreduce import AllReduce, AllReduceSync
from acsgd.dp.sync import Alone, Unsummed, refuse_others
from acsgd.optim.base import LocalStep, SecondMoments
from acsgd.shards.weights import Weight, WeightState

OWN = "own"
"""Name under which a replica's weights are saved."""
SERVED_ERROR = "served_error"
"""Of what replicas lack of the means that they have been told; each saves it of the part it serves, and 0 elsewhere."""
OWN_ERROR = "own_error"
"""Of what a replica still has to tell of changes of its own."""
LARGEST = 1 << 25
"""Elements of a unit, if one weight does not have more. An exchange needs memory for a few times its unit; more units
are more messages, each of which waits for the delay of the link."""


class Unit:
    """Weights that are exchanged together: one flat fp32 tensor, of which the masters become views."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        self.weights = tuple(weights)
        self.own = torch.cat([weight.master.detach().view(-1) for weight in weights])
        """[n], this replica's."""
        for weight, view in zip(weights, self.views(self.own).values(), strict=True):
            weight.master.data = view
        self.shared = self.own.clone()
        """[n], equal on all replicas."""
        self._rounded = [weight for weight in weights if weight.master is not weight.param]

    def __len__(self) -> int:
        return len(self.own)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return a tensor [n] as those of the weights, by key."""
        pieces = flat.split([weight.master.numel() for weight in self.weights])
        return {w.key: piece.view(w.master.shape) for w, piece in zip(self.weights, pieces, strict=True)}

    @torch.no_grad()
    def publish(self) -> None:
        """Let the parameters be what the masters are."""
        if self._rounded:
            torch._foreach_copy_([w.param for w in self._rounded], [w.master for w in self._rounded])


def make_units(weights: Sequence[Weight], largest: int = LARGEST) -> list[Unit]:
    """Cut a stage's weights into units: those with a copy on another rank alone, the others up to `largest` together.

    What happens to a unit depends on nothing but its own numbers, so the copies of a weight stay equal.
    """
    alone = [[weight] for weight in weights if weight.is_tied]
    together: list[list[Weight]] = [[]]
    size = 0
    for weight in (weight for weight in weights if not weight.is_tied):
        size += weight.master.numel()
        if size > largest and together[-1]:
            together.append([])
            size = weight.master.numel()
        together[-1].append(weight)
    return [Unit(members) for members in [*alone, *together] if members]


class Merging(Alone):
    """The only replica, which may take over from several: the mean of their weights, and what is owed."""

    @torch.no_grad()
    def load_state_dict(self, saved: Sequence[WeightState]) -> None:
        if any(state.keys().isdisjoint((OWN, OWN_ERROR)) for state in saved):
            refuse_others(saved)
        for weight in self.weights if saved else ():
            by_name = {name: [state[name][weight.key] for state in saved] for name in saved[0]}
            merged = _mean(by_name.get(OWN, [weight.master]))
            if OWN_ERROR in by_name:
                merged += _mean(by_name[OWN_ERROR])
            if SERVED_ERROR in by_name:
                merged += _mean(by_name[SERVED_ERROR]) * len(saved)
            weight.master.copy_(merged)
            weight.param.copy_(merged)


class OwnWeights(Unsummed):
    """The agreement of replicas that step on their own gradients. A mode adds when and how they exchange weights.

    A checkpoint holds what they share as the model, and for each replica its own weights beside it.
    """

    remembers: tuple[str, ...] = ()
    """Names of what a mode saves besides; 0 where a checkpoint of a mode without it has none."""

    def __init__(
        self,
        weights: Sequence[Weight],
        peers: Peers,
        *,
        exact_steps: int = 0,
        how: LocalStep = LocalStep(),  # noqa: B008 -- a tuple
        moments: bool = False,
    ) -> None:
        """exact_steps: so many at the start are made together, on gradients summed exactly; how: AdamW makes the
        others; moments: whether it keeps the second ones at the size that they have for mean gradients (moments.py)."""
        super().__init__(weights)
        self.units = make_units(weights)
        self.peers = peers
        self.exact_steps = exact_steps
        self.how = how
        self._exact: AllReduceSync | None = None
        """In an exact step, what sums its gradients; made for the first, given up after the last."""
        self._rows = RowMoments({weight.key: weight.master for weight in weights}, peers) if moments else None

    def local_step(self, step: int) -> LocalStep | None:
        if step < self.exact_steps:
            return None
        return self.how._replace(shares=self._rows.shares()) if self._rows is not None else self.how

    def begin_step(self, step: int, scale: float = 1.0) -> None:
        super().begin_step(step)
        if step >= self.exact_steps:
            self._exact = None
            return
        if self._exact is None:
            self._exact = AllReduceSync(AllReduce().buckets(self.weights), self.peers)
            self._exact.meter = self.meter
        self._exact.begin_step(step)

    def grad_ready(self, weight: Weight, *, is_final: bool) -> None:
        if self._exact is not None:
            self._exact.grad_ready(weight, is_final=is_final)

    def reduce(self) -> None:
        if self._exact is not None:
            self._exact.reduce()

    def wait(self) -> None:
        if self._exact is not None:
            self._exact.wait()

    def after_step(self, step: int, moments: SecondMoments) -> None:
        if self._rows is None or step < self.exact_steps:
            return
        self._rows.note(step, moments)
        if self._rows.is_due(step - self.exact_steps):
            grads = {weight.key: weight.master.grad for weight in self.weights if weight.master.grad is not None}
            self.peers.begin(partial(self._rows.measure, step, grads, moments, self.meter)).result(self.meter)

    def global_weights(self) -> Mapping[str, Tensor] | None:
        return {key: view for unit in self.units for key, view in unit.views(unit.shared).items()}

    def state_dict(self) -> WeightState:
        own = {OWN: {key: view for unit in self.units for key, view in unit.views(unit.own).items()}}
        return own | self.rows_state()

    @torch.no_grad()
    def load_state_dict(self, saved: Sequence[WeightState]) -> None:
        self.load_rows(saved, (OWN, *self.remembers))
        for unit in self.units:
            unit.shared.copy_(unit.own)
            if saved:
                self.load_into(unit, unit.own, [state[OWN] for state in saved])
            unit.publish()

    def rows_state(self) -> WeightState:
        """Return what is remembered of second moments."""
        return self._rows.state_dict() if self._rows is not None else {}

    def load_rows(self, saved: Sequence[WeightState], known: Collection[str]) -> None:
        """Take that over. Raises RunError if there is anything else under a name that is not among `known`."""
        refuse_others(saved, (*known, ROWS))
        if self._rows is not None:
            self._rows.load_state_dict(saved)

    def load_into(self, unit: Unit, flat: Tensor, saved: Sequence[Mapping[str, Tensor]]) -> None:
        """Fill `flat`, [n], with what was saved of this replica, or, if there were more or fewer, the mean of all.

        So what replicas are ahead of what they share, in the mean, stays what it was: that is what they owe it.
        """
        for key, view in unit.views(flat).items():
            if len(saved) == self.peers.size:
                view.copy_(saved[self.peers.replica][key])
            else:
                view.copy_(_mean([state[key] for state in saved]))


def served_state(units: Sequence[Unit], served: Sequence[Tensor], peers: Peers) -> dict[str, Tensor]:
    """Return by key the errors of the parts that this replica serves, given by unit; 0 where others serve."""
    by_key: dict[str, Tensor] = {}
    for unit, error in zip(units, served, strict=True):
        whole = torch.zeros_like(unit.own)
        parts(whole, peers.size)[peers.replica].copy_(error)
        by_key |= unit.views(whole)
    return by_key


def load_served(units: Sequence[Unit], served: Sequence[Tensor], peers: Peers, saved: Sequence[WeightState]) -> None:
    """Fill in the errors that `served_state` has given on each replica of a run; there may have been more or fewer."""
    for unit, error in zip(units, served, strict=True):
        whole = torch.zeros_like(unit.own)
        for key, view in unit.views(whole).items():
            for state in saved:
                if SERVED_ERROR in state:
                    view += state[SERVED_ERROR][key].to(view.device)
        error.copy_(parts(whole, peers.size)[peers.replica])


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([tensor.double() for tensor in tensors]).mean(0)
