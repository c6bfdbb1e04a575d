"""PowerSGD: all-reduce of two low-rank factors that approximate each gradient matrix, with error feedback.

Source: Vogels et al. 2019, arXiv:1905.13727, Algorithms 1 and 2, with sums instead of means. R replicas; M = gradient
of one weight as a matrix [rows, cols], its first dimension and all others; r = rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from acsgd.dp.exchange.buckets import Bucket, BucketOptions, BucketSync, make_buckets
from acsgd.dp.peers import Peers
from acsgd.dp.resize import ReplicaState, check_names, restore
from acsgd.dp.sync import GradSync, SingleReplicaSync
from acsgd.optim.base import SecondMoments
from acsgd.shards.weights import Weight, WeightState
from acsgd.streams import load_onto, mix_seed


@dataclass(frozen=True)
class PowerSGD(BucketOptions):
    """M += residual; P = orthonormal(sum M Q); Q = sum M^T P; the gradient is P Q^T; residual = M - P (M^T P)^T.

    A matrix sends r (rows + cols) numbers in fp32 instead of rows cols, all other gradients are sent whole; by ring
    all-reduce each of R replicas sends every number 2 (R - 1) / R times per step. Each replica computes P and P Q^T
    itself, so they are equal bit for bit on machines of one kind. Needs memory for two more gradients.
    """

    RENAMED: ClassVar[dict[str, str]] = {"start": "exact_steps", "warm": "warm_start"}

    rank: int = 4
    """Rank of the factors: columns of P and Q, r."""
    exact_steps: int = 0
    """Number of initial steps that use exact all-reduce. 0 = none."""
    warm_start: bool = True
    """Whether a step starts from the Q of the previous one, as published; otherwise Q is random in each step."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank={self.rank} must be 1 or more; 4 is usual")
        if self.exact_steps < 0:
            raise ValueError(f"exact_steps={self.exact_steps} must be 0 or more steps")

    @property
    def states(self) -> tuple[ReplicaState, ...]:
        """Residual of a replica's gradients, unscaled, [rows, cols]; Q of the previous step, [cols, r].

        Only of weights that an update has compressed.
        """
        return (
            ReplicaState(RESIDUAL, "share", _matrix_shape, single="add_to_gradient", tied="partial", required=False),
            ReplicaState(
                BASIS,
                "first",
                lambda weight: (_matrix_shape(weight)[1], self.rank),
                tied="none",
                required=False,
                is_common=True,
            ),
        )

    def open(self, weights: Sequence[Weight], peers: Peers) -> GradSync:
        """Return the synchronization of one stage's weights with the other replicas."""
        return SingleReplicaSync(weights, self.states) if peers.is_single else PowerSGDSync(self, weights, peers)

    def compresses(self, matrix: Tensor, step: int) -> bool:
        """Whether a gradient [rows, cols] is sent as factors in a step."""
        rows, cols = matrix.shape
        return step >= self.exact_steps and self.rank * (rows + cols) < rows * cols

    def first_basis(self, key: str, matrix: Tensor, step: int) -> Tensor:
        """Return a random Q [cols, r] for a gradient [rows, cols]: the same on all replicas and in a resumed run."""
        number = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest(), "little")
        generator = torch.Generator().manual_seed(mix_seed(0, number, 0 if self.warm_start else step))
        return load_onto(matrix.device, torch.randn(matrix.shape[1], self.rank, generator=generator))


RESIDUAL, BASIS = "gradient_residual", "basis"


class PowerSGDSync(BucketSync):
    """Gradient sync by low-rank factors. State changes only after the optimizer step, so a step may be skipped."""

    def __init__(self, mode: PowerSGD, weights: Sequence[Weight], peers: Peers) -> None:
        super().__init__(make_buckets(weights, mode.bucket_mb), peers)
        self._mode = mode
        self._weights = {weight.key: weight.master for weight in weights}
        self._residuals: dict[str, Tensor] = {}
        self._bases: dict[str, Tensor] = {}

    def begin_step(self, step: int, scale: float = 1.0) -> None:
        super().begin_step(step)
        self._step, self._scale = step, scale
        self._next_residuals: dict[str, Tensor] = {}
        self._next_bases: dict[str, Tensor] = {}
        self._second_reductions: list[Callable[[], None]] = []

    def start_reduction(self, bucket: Bucket) -> Callable[[], None]:
        grads = {weight.key: _matrix(weight.master.grad) for weight in bucket.weights}
        for key in grads.keys() & self._residuals.keys():
            grads[key].add_(self._residuals[key], alpha=self._scale)
        matrices = {key: grad for key, grad in grads.items() if self._mode.compresses(grad, self._step)}
        if not matrices:
            return self._peers.start_sum(bucket.flat, self.meter)
        exact = [grad for key, grad in grads.items() if key not in matrices]
        lefts = [matrix @ self._basis(key, matrix) for key, matrix in matrices.items()]
        wait, sums = self._start_sums(lefts + exact)

        def finish() -> None:
            wait()
            for grad, total in zip(exact, sums[len(lefts) :], strict=True):
                grad.copy_(total)
            self._second_reductions.append(self._start_second_reduction(matrices, sums[: len(lefts)]))

        return finish

    def wait(self) -> None:
        super().wait()
        for finish in self._second_reductions:
            finish()

    def after_step(self, step: int, moments: SecondMoments) -> None:
        self._residuals, self._bases = self._next_residuals, self._next_bases

    def state_dict(self) -> WeightState:
        by_name = {RESIDUAL: self._residuals, BASIS: self._bases}
        return {name: by_key for name, by_key in by_name.items() if by_key}

    def load_state_dict(self, saved: Sequence[WeightState]) -> None:
        check_names(self._mode.states, saved)
        here = {"replica": self._peers.replica, "replicas": self._peers.size}
        self._residuals, self._bases = (
            {
                key: tensor.to(self._weights[key].device, copy=True)
                for key, tensor in restore(state, saved, self._weights, **here).items()
            }
            for state in self._mode.states
        )

    def _basis(self, key: str, matrix: Tensor) -> Tensor:
        basis = self._bases.get(key)
        return self._mode.first_basis(key, matrix, self._step) if basis is None else basis

    def _start_second_reduction(self, matrices: Mapping[str, Tensor], lefts: Sequence[Tensor]) -> Callable[[], None]:
        """Start to sum M^T P; return a function that waits for it and replaces each matrix M by P Q^T."""
        lefts = [torch.linalg.qr(left).Q for left in lefts]
        rights = [matrix.T @ left for matrix, left in zip(matrices.values(), lefts, strict=True)]
        for (key, matrix), left, right in zip(matrices.items(), lefts, rights, strict=True):
            residual = torch.addmm(matrix, left, right.T, alpha=-1)
            self._next_residuals[key] = residual.div_(self._scale)
        wait, sums = self._start_sums(rights)

        def finish() -> None:
            wait()
            for (key, matrix), left, total in zip(matrices.items(), lefts, sums, strict=True):
                torch.mm(left, total.T, out=matrix)
                if self._mode.warm_start:
                    # a copy has the alignment of a restored tensor, on which the bits of products may depend
                    self._next_bases[key] = total.clone()

        return finish

    def _start_sums(self, tensors: Sequence[Tensor]) -> tuple[Callable[[], None], list[Tensor]]:
        """Start to all-reduce tensors in one message; return a function that waits, and views of the sums."""
        message = torch.cat([tensor.flatten() for tensor in tensors])
        pieces = message.split([tensor.numel() for tensor in tensors])
        views = [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]
        return self._peers.start_sum(message, self.meter), views


def _matrix_shape(weight: Tensor) -> tuple[int, ...]:
    return (len(weight), weight.numel() // len(weight)) if weight.dim() else (1, 1)


def _matrix(grad: Tensor | None) -> Tensor:
    """View the gradient of a weight, in a bucket, as [rows, cols]."""
    assert grad is not None
    return grad.view(_matrix_shape(grad))
