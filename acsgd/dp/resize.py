"""State that replicas keep between steps, and how N saved states become those of M replicas.

A mode declares its state as a table of `ReplicaState`. Every replica saves its own tensors: name -> weight -> tensor.
Nothing else merges the states of several replicas. If replicas join and leave while others train on, each restores what
it has itself, since the state of those that have ended is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from acsgd.errors import RunError
from acsgd.shards.weights import Weight, WeightState, weight_shape

MergeRule = Literal["mean", "share", "sum", "first", "reset"]
"""What each of M replicas restores from N saved tensors, its own if N = M; otherwise:

mean   the mean of all N.
share  1 / M of the sum of all N.
sum    the sum of all N, even if N = M: each tensor is 0 outside of the part that its replica owns, and parts may move.
first  the tensor of replica 0, even if N = M: all are equal.
reset  nothing.
"""
Single = Literal["replace_weight", "add_to_weight", "add_to_gradient", "drop"]
"""What a single replica, which keeps no state, does with the merged tensor."""
TiedCopy = Literal["equal", "partial", "none"]
"""What a copy of a tied weight on another rank has.

equal    the same tensor as the original weight.
partial  a tensor of its own; those of both copies add up. Merging the copies sums them.
none     nothing that a new copy needs.
"""


class ReplicaState(NamedTuple):
    """One kind of tensor, fp32, that every replica keeps per weight."""

    name: str
    """Name in checkpoints."""
    merge: MergeRule
    shape: Callable[[Tensor], tuple[int, ...] | None] = weight_shape
    """Shape of the tensor of a weight; None if this weight has none. A tensor of another shape, saved under other
    options, is not restored."""
    single: Single = "drop"
    tied: TiedCopy = "equal"
    required: bool = True
    """Whether every checkpoint of the mode with several replicas holds it for every weight, tied copies excepted."""
    may_be_nan: bool = False
    """Whether NaN is a value that means "none yet". Other values are finite."""
    is_common: bool = False
    """Whether a replica that joins others starts with the tensor of one of them; else without one."""
    moves_to: str = ""
    """Of a "sum": name of the state to which a replica adds its part, times R, if parts get other owners. The next mean
    of R replicas then contains the part once."""


class ReplicaPlace(NamedTuple):
    """A replica's place among others."""

    replica: int
    """Its index."""
    replicas: int
    """Number of replicas, R."""


def check_names(table: Collection[ReplicaState], saved: Sequence[WeightState]) -> None:
    """Raise RunError if the saved states hold tensors that the table does not declare."""
    if names := {name for state in saved for name in state} - {state.name for state in table}:
        raise RunError(
            f"the checkpoint holds {sorted(names)} of another data-parallel mode, which this mode would discard; "
            "resume in the mode that saved it (dp.mode in its config.toml)"
        )


def restore(
    state: ReplicaState, saved: Sequence[WeightState], weights: Mapping[str, Tensor], *, replica: int, replicas: int
) -> dict[str, Tensor]:
    """Return one replica's tensors of one kind, fp32, by weight, without those that were not saved.

    saved: by replica. weights: the weights, by key, for their shapes. replica: one of the `replicas` of this run.
    """
    restored = {}
    for key, weight in weights.items():
        merged = _merge(state, saved, key, replica, replicas)
        if merged is not None and tuple(merged.shape) == state.shape(weight):
            restored[key] = merged.float()
    return restored


@torch.no_grad()
def carry_over(
    table: Collection[ReplicaState],
    own: WeightState,
    *,
    was: ReplicaPlace,
    now: ReplicaPlace,
    is_same_stage: bool = True,
) -> list[WeightState]:
    """Return the saved states from which a replica restores its own state at another place, or among other replicas.

    They have no tensors of other replicas. own: its state; tensors to which others are added are changed in place.
    is_same_stage: whether the stage has the same weights as before, so that a replica at the same place owns the same
    part of them.
    """
    kept = {name: dict(by_key) for name, by_key in own.items()}
    for state in table:
        if state.merge == "reset" and was.replicas != now.replicas:
            kept.pop(state.name, None)
        if state.merge == "sum" and not (was == now and is_same_stage) and now.replicas > 1:
            for key, part in kept.pop(state.name, {}).items():
                kept[state.moves_to][key].add_(part, alpha=now.replicas)
    saved: list[WeightState] = [{} for _ in range(now.replicas)]
    saved[0] = {state.name: kept[state.name] for state in table if state.merge == "first" and state.name in kept}
    saved[now.replica] = kept
    return saved


@torch.no_grad()
def fold(table: Sequence[ReplicaState], saved: Sequence[WeightState], weights: Sequence[Weight]) -> WeightState:
    """Fold the states of N replicas into the weights of a single one, in place.

    Returns what is to be added to the next gradients, by name and key, fp32.
    """
    gradients: WeightState = {}
    for weight in weights:
        folded = fold_into(table, saved, weight.key, weight.master)
        if folded is not weight.master:
            weight.param.copy_(folded)
            weight.master.copy_(folded)
        for state in table:
            merged = _merge(state, saved, weight.key, 0, 1)
            if merged is not None and state.single == "add_to_gradient":
                gradients.setdefault(state.name, {})[weight.key] = merged.to(weight.master.device).float()
    return gradients


def fold_into(table: Collection[ReplicaState], saved: Sequence[WeightState], key: str, weight: Tensor) -> Tensor:
    """Return the values of a weight with the states of N replicas folded in; the same tensor if there is nothing to."""
    folded = weight
    for state in sorted(table, key=lambda state: state.single != "replace_weight"):  # residuals are added to these
        merged = None if state.single in ("drop", "add_to_gradient") else _merge(state, saved, key, 0, 1)
        if merged is not None:
            merged = merged.to(weight.device)
            folded = merged if state.single == "replace_weight" else folded + merged
    return folded


def add_tied_copy(
    table: Collection[ReplicaState], saved: list[WeightState], original: Sequence[WeightState], key: str
) -> None:
    """Add the state of a copy of a tied weight to saved states that lack it, in place.

    original: the saved states of the layer with which the weight is stored.
    """
    _pad(saved, len(original))
    for each, first in zip(saved, original, strict=False):
        for state in table:
            by_key = first.get(state.name, {})
            if state.tied == "equal" and key in by_key:
                each.setdefault(state.name, {}).setdefault(key, by_key[key])


def merge_tied_copy(
    table: Collection[ReplicaState], saved: list[WeightState], copies: Sequence[WeightState], key: str
) -> None:
    """Add the state of a copy of a tied weight that no longer exists to that of another copy, in place.

    copies: the saved states of the layer of the former copy.
    """
    _pad(saved, len(copies))
    for each, copy in zip(saved, copies, strict=False):
        for state in table:
            part = copy.get(state.name, {}).get(key)
            if state.tied == "partial" and part is not None:
                by_key = each.setdefault(state.name, {})
                by_key[key] = by_key[key] + part if key in by_key else part


def _merge(state: ReplicaState, saved: Sequence[WeightState], key: str, replica: int, replicas: int) -> Tensor | None:
    """Return the tensor of a weight for one of `replicas` replicas, fp64 where tensors of several were merged."""
    by_replica = [each.get(state.name, {}).get(key) for each in saved]
    if state.merge == "first":
        return by_replica[0] if by_replica else None
    if state.merge != "sum" and len(saved) == replicas:
        return by_replica[replica]
    tensors = [tensor for tensor in by_replica if tensor is not None]
    if not tensors or state.merge == "reset":
        return None
    total = torch.stack([tensor.double() for tensor in tensors]).sum(0)
    return total / {"mean": len(saved), "share": replicas, "sum": 1}[state.merge]


def _pad(saved: list[WeightState], count: int) -> None:
    saved += [{} for _ in range(len(saved), count)]
