"""PowerSGD: of each matrix of gradients a product of two thin ones is summed; what that lacks is owed.

Source: Vogels et al. 2019, arXiv:1905.13727, Algorithms 1 and 2, with sums in place of means. R replicas; M = gradient
of one weight as a matrix [rows, cols], its first dimension and all others; r = rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from acsgd.dp.exchange.buckets import Bucket, BucketSync, InBuckets
from acsgd.dp.exchange.peers import Peers
from acsgd.dp.modes.allreduce import start_sum
from acsgd.dp.sync import Alone, GradSync, refuse_others
from acsgd.optim.base import SecondMoments
from acsgd.seeds import mix_seed
from acsgd.shards.weights import Weight, WeightState

GRADIENT_ERROR = "gradient_error"
"""Name under which is saved what a replica owes of its gradients. Replicas' and tied copies' add up."""
BASIS = "basis"
"""Of Q [cols, r], from which the next step starts; equal on all replicas."""


@dataclass(frozen=True)
class PowerSGD(InBuckets):
    """M += error; P = orthonormal(sum M Q); Q = sum M^T P; the gradient is P Q^T; error = M - P (M^T P)^T.

    Of a matrix travel r (rows + cols) numbers in fp32 for rows cols parameters, all other gradients as they are; of R
    replicas, each sends every number 2 (R - 1) / R times per step, by ring all-reduce. Each replica makes P and P Q^T
    itself, so they stay equal to the bit on machines of one kind. Takes memory for two more gradients.
    """

    rank: int = 4
    """Columns of P and Q."""
    exact_steps: int = 0
    """So many steps at the start are summed exactly."""
    warm_start: bool = True
    """Whether a step starts from the Q of the one before, as published; else it is drawn anew in each."""

    RENAMED: ClassVar[dict[str, str]] = {"start": "exact_steps", "warm": "warm_start"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank < 1:
            raise ValueError(f"rank={self.rank} must be 1 or more; 4 is usual")
        if self.exact_steps < 0:
            raise ValueError(f"exact_steps={self.exact_steps} must be 0 or more steps")

    def open(self, weights: Sequence[Weight], peers: Peers) -> GradSync:
        """Return the agreement of this replica with its peers on one stage's weights."""
        return _Paying(weights) if peers.size == 1 else _PowerSGDSync(self, weights, peers)

    def compresses(self, matrix: Tensor, step: int) -> bool:
        """Whether less than all of a gradient [rows, cols] travels in a step."""
        rows, cols = matrix.shape
        return step >= self.exact_steps and self.rank * (rows + cols) < rows * cols

    def first_basis(self, key: str, matrix: Tensor, step: int) -> Tensor:
        """Draw Q [cols, r] for a gradient [rows, cols]: the same on all replicas and in a resumed run."""
        number = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest(), "little")
        generator = torch.Generator().manual_seed(mix_seed(0, number, 0 if self.warm_start else step))
        return torch.randn(matrix.shape[1], self.rank, generator=generator).to(matrix.device)


class _PowerSGDSync(BucketSync):
    """What a step has made of errors and bases counts once the optimizer has made it, so a step may be left out."""

    def __init__(self, mode: PowerSGD, weights: Sequence[Weight], peers: Peers) -> None:
        super().__init__(mode.buckets(weights))
        self._mode = mode
        self._peers = peers
        self._weights = weights
        self._errors: dict[str, Tensor] = {}
        """By key, [rows, cols], of gradients that are not scaled; none = nothing is owed."""
        self._bases: dict[str, Tensor] = {}

    def begin_step(self, step: int, scale: float = 1.0) -> None:
        super().begin_step(step)
        self._step, self._scale = step, scale
        self._next_errors: dict[str, Tensor] = {}
        self._next_bases: dict[str, Tensor] = {}
        self._coming_back: list[Callable[[], None]] = []

    def leave(self, bucket: Bucket) -> Callable[[], None]:
        grads = {weight.key: _matrix(weight.master.grad) for weight in bucket.weights}
        for key in grads.keys() & self._errors.keys():
            grads[key].add_(self._errors[key], alpha=self._scale)
        matrices = {key: grad for key, grad in grads.items() if self._mode.compresses(grad, self._step)}
        if not matrices:
            return start_sum(bucket.flat, self._peers.group, self.meter)
        exact = [grad for key, grad in grads.items() if key not in matrices]
        lefts = [matrix @ self._basis(key, matrix) for key, matrix in matrices.items()]
        wait, sums = self._start_sums(lefts + exact)

        def finish() -> None:
            wait()
            for grad, total in zip(exact, sums[len(lefts) :], strict=True):
                grad.copy_(total)
            self._coming_back.append(self._come_back(matrices, sums[: len(lefts)]))

        return finish

    def wait(self) -> None:
        super().wait()
        for finish in self._coming_back:
            finish()

    def after_step(self, step: int, moments: SecondMoments) -> None:
        self._errors, self._bases = self._next_errors, self._next_bases

    def state_dict(self) -> WeightState:
        remembered = {GRADIENT_ERROR: self._errors, BASIS: self._bases}
        return {name: by_key for name, by_key in remembered.items() if by_key}

    def load_state_dict(self, saved: Sequence[WeightState]) -> None:
        refuse_others(saved, (GRADIENT_ERROR, BASIS))
        if len(saved) == self._peers.size:
            self._errors = _owed(saved[self._peers.replica : self._peers.replica + 1], self._weights)
        else:
            self._errors = _owed(saved, self._weights, shares=self._peers.size)
        bases = saved[0].get(BASIS, {}) if saved else {}
        self._bases = {w.key: bases[w.key].to(w.master.device, copy=True) for w in self._weights if w.key in bases}

    def _basis(self, key: str, matrix: Tensor) -> Tensor:
        basis = self._bases.get(key)
        if basis is None or basis.shape[1] != self._mode.rank:
            return self._mode.first_basis(key, matrix, self._step)
        return basis

    def _come_back(self, matrices: Mapping[str, Tensor], lefts: Sequence[Tensor]) -> Callable[[], None]:
        """Start to sum M^T P; return what then replaces each matrix M by P Q^T."""
        lefts = [torch.linalg.qr(left).Q for left in lefts]
        rights = [matrix.T @ left for matrix, left in zip(matrices.values(), lefts, strict=True)]
        for (key, matrix), left, right in zip(matrices.items(), lefts, rights, strict=True):
            error = torch.addmm(matrix, left, right.T, alpha=-1)
            self._next_errors[key] = error.div_(self._scale)
        wait, sums = self._start_sums(rights)

        def finish() -> None:
            wait()
            for (key, matrix), left, total in zip(matrices.items(), lefts, sums, strict=True):
                torch.mm(left, total.T, out=matrix)
                if self._mode.warm_start:
                    self._next_bases[key] = total.clone()  # aligned as when it is read again: products may depend on it

        return finish

    def _start_sums(self, tensors: Sequence[Tensor]) -> tuple[Callable[[], None], list[Tensor]]:
        """Start to sum tensors over the replicas in one message; return what waits for it, and views of the sums."""
        message = torch.cat([tensor.flatten() for tensor in tensors])
        pieces = message.split([tensor.numel() for tensor in tensors])
        views = [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]
        return start_sum(message, self._peers.group, self.meter), views


class _Paying(Alone):
    """The only replica, which may take over from several: what they owe is added to its next gradients."""

    _owed: Mapping[str, Tensor] = {}

    def begin_step(self, step: int, scale: float = 1.0) -> None:
        super().begin_step(step)
        self._scale = scale

    def reduce(self) -> None:
        for weight in self.weights:
            if weight.key in self._owed:
                owed, grad = self._owed[weight.key].view_as(weight.master) * self._scale, weight.master.grad
                weight.master.grad = owed if grad is None else grad + owed

    def after_step(self, step: int, moments: SecondMoments) -> None:
        self._owed = {}

    def state_dict(self) -> WeightState:
        return {GRADIENT_ERROR: dict(self._owed)} if self._owed else {}

    def load_state_dict(self, saved: Sequence[WeightState]) -> None:
        refuse_others(saved, (GRADIENT_ERROR, BASIS))
        self._owed = _owed(saved, self.weights)


def _matrix(grad: Tensor | None) -> Tensor:
    """View the gradient of a weight, in a bucket, as [rows, cols]."""
    assert grad is not None
    return grad.view(len(grad), -1) if grad.dim() else grad.view(1, 1)


def _owed(saved: Sequence[WeightState], weights: Sequence[Weight], *, shares: int = 1) -> dict[str, Tensor]:
    """Return one of so many equal shares of what replicas owe together, by key, [rows, cols]."""
    owed = {}
    for weight in weights:
        errors = [state[GRADIENT_ERROR][weight.key] for state in saved if weight.key in state.get(GRADIENT_ERROR, {})]
        if errors:
            total = torch.stack([error.double() for error in errors]).sum(0) / shares
            owed[weight.key] = total.to(weight.master.device, torch.float32)
    return owed
