"""Weights of which every replica has its own: what modes share that exchange weights instead of gradients.

n = parameters of a unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from acsgd.dp.base import Alone, Unsummed, refuse_others
from acsgd.dp.peers import Peers
from acsgd.shards.base import Weight
from acsgd.shards.disk import WeightState

OWN = "own"
"""Name under which a replica's weights are saved."""
SERVED_ERROR = "served_error"
"""Of what replicas lack of the means that they have been told; each saves it of the part it serves, and 0 elsewhere."""
OWN_ERROR = "own_error"
"""Of what a replica still has to tell of changes of its own."""


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


def parts(flat: Tensor, count: int) -> list[Tensor]:
    """Cut a tensor [n] into `count` views of about the same length."""
    return [flat[len(flat) * j // count : len(flat) * (j + 1) // count] for j in range(count)]


def make_units(weights: Sequence[Weight]) -> list[Unit]:
    """Cut a stage's weights into units: those with a copy on another rank alone, all others together.

    What happens to a unit depends on nothing but its own numbers, so the copies of a weight stay equal.
    """
    alone = [[weight] for weight in weights if weight.is_tied]
    others = [weight for weight in weights if not weight.is_tied]
    return [Unit(members) for members in [*alone, others] if members]


class Merging(Alone):
    """The only replica, which may take over from several: the mean of their weights, and what is owed."""

    @torch.no_grad()
    def load_state_dict(self, saved: Sequence[WeightState]) -> None:
        if any(OWN not in state for state in saved):
            refuse_others(saved)
        for weight in self.weights if saved else ():
            by_name = {name: [state[name][weight.key] for state in saved] for name in saved[0]}
            merged = _mean(by_name[OWN])
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

    def __init__(self, weights: Sequence[Weight], peers: Peers) -> None:
        super().__init__(weights)
        self.units = make_units(weights)
        self.peers = peers

    def is_local(self, step: int) -> bool:
        return True

    def after_step(self, step: int, moments: Mapping[str, Tensor]) -> None:
        pass

    def shared(self) -> Mapping[str, Tensor] | None:
        return {key: view for unit in self.units for key, view in unit.views(unit.shared).items()}

    def state_dict(self) -> WeightState:
        return {OWN: {key: view for unit in self.units for key, view in unit.views(unit.own).items()}}

    @torch.no_grad()
    def load_state_dict(self, saved: Sequence[WeightState]) -> None:
        refuse_others(saved, (OWN, *self.remembers))
        for unit in self.units:
            unit.shared.copy_(unit.own)
            if saved:
                self.load_into(unit, unit.own, [state[OWN] for state in saved])
            unit.publish()

    def load_into(self, unit: Unit, flat: Tensor, saved: Sequence[Mapping[str, Tensor]]) -> None:
        """Fill `flat`, [n], with what was saved of this replica, or, if there were more or fewer, the mean of all.

        So what replicas are ahead of what they share, in the mean, stays what it was: that is what they owe it.
        """
        for key, view in unit.views(flat).items():
            if len(saved) == self.peers.size:
                view.copy_(saved[self.peers.replica][key])
            else:
                view.copy_(_mean([state[key] for state in saved]))


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([tensor.double() for tensor in tensors]).mean(0)
