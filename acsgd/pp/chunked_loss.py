"""Loss of the last stage, in chunks of positions, so that the logits of all positions never exist at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from acsgd.layers.description import Head
from acsgd.streams import LOGITS_AT_ONCE, generator_states, restore_generators

PartLoss = Callable[[Tensor, Tensor], Tensor]
"""Loss of the hidden states [B, T, H] and labels [B, T] of some positions, summed over them."""


class Criterion(Protocol):
    """Loss and predictions of a task, computed from the hidden states that enter the model's head."""

    @property
    def sums_positions(self) -> bool:
        """Whether the loss is the sum of those of any parts of the T positions of hidden states and labels."""
        ...

    def loss(self, hidden: Tensor, head: Head, labels: Tensor, label_smoothing: float) -> Tensor:
        """Return the loss summed over the labels, fp32. label_smoothing: in training, as of optim.label_smoothing."""
        ...

    def predict(self, hidden: Tensor, head: Head, labels: Tensor) -> Tensor | None:
        """Return the prediction of each example, fp64 [B], in evaluations; None if there are none."""
        ...


class HeadLoss:
    """Loss and predictions of the last stage, from the hidden states that enter the model's head.

    label_smoothing: fraction of the target distribution that training spreads evenly over all classes. logits_at_once:
    see `HeadUse.chunk_length`.
    """

    def __init__(
        self, criterion: Criterion, *, label_smoothing: float = 0.0, logits_at_once: int = LOGITS_AT_ONCE
    ) -> None:
        self.criterion = criterion
        self._label_smoothing = label_smoothing
        self._logits_at_once = logits_at_once
        self._head_use: HeadUse | None = None

    def results(
        self, hidden: Tensor, head: Head, labels: Tensor, *, is_training: bool, value_only: bool
    ) -> dict[str, Tensor]:
        """Return the summed loss and, in evaluations, the predictions if the task has them.

        value_only: see `chunked_loss`.
        """
        smoothing = self._label_smoothing if is_training else 0.0

        def loss(hidden: Tensor, labels: Tensor) -> Tensor:
            return self.criterion.loss(hidden, head, labels, smoothing)

        results = {"loss": self._sum(loss, hidden, head, labels, value_only=value_only)}
        predictions = None if is_training else self.criterion.predict(hidden, head, labels)
        return results if predictions is None else {**results, "predictions": predictions}

    def _sum(self, loss: PartLoss, hidden: Tensor, head: Head, labels: Tensor, *, value_only: bool) -> Tensor:
        """Return the summed loss, in chunks of positions if the logits of all would take much memory."""
        if not self.criterion.sums_positions:
            return loss(hidden, labels)
        if self._head_use is None:
            self._head_use = HeadUse.of(head, hidden)
        length = self._head_use.chunk_length(hidden, self._logits_at_once)
        if length >= hidden.shape[1]:
            return loss(hidden, labels)
        return chunked_loss(loss, hidden, labels, length, self._head_use.weights, value_only=value_only)


class HeadUse(NamedTuple):
    """What a head makes logits with."""

    classes: int
    """Number of logits of a position."""
    weights: tuple[Tensor, ...]
    """Trained leaves of autograd's graph that the logits depend on."""

    @classmethod
    def of(cls, head: Head, hidden: Tensor) -> HeadUse:
        """Run the head on the first position of hidden states [B, T, H]. Does not advance generators."""
        generators = generator_states()
        with _graph_of_its_own():
            logits = head(hidden[:, :1].detach())
        restore_generators(generators)
        return cls(logits.shape[-1], _leaves(logits))

    def chunk_length(self, hidden: Tensor, logits_at_once: int) -> int:
        """Return the number of positions whose logits are computed at a time; all of them if they take little memory.

        logits_at_once: of a chunk, if one position of all sequences has no more and the head few weights. Until the
        backward, gradients of the weights take the place of the logits, so these must be larger. A chunk has half as
        many logits as there are weights, or more: their gradients are summed over chunks.
        """
        sequences, length = hidden.shape[:2]
        num_weights = sum(weight.numel() for weight in self.weights)
        if sequences * length * self.classes <= max(logits_at_once, num_weights):
            return length
        return max(1, max(logits_at_once, num_weights // 2) // (sequences * self.classes))


def chunked_loss(
    loss: PartLoss, hidden: Tensor, labels: Tensor, length: int, weights: Sequence[Tensor], *, value_only: bool
) -> Tensor:
    """Return the loss summed over chunks of `length` positions, with the gradients that the whole would have.

    hidden: [B, T, H]; labels: [B, T]; weights: see HeadUse. The gradients are computed with the loss, while the logits
    of a chunk exist, as in Liger-Kernel (Hsu et al. 2024, arXiv:2410.10989, section 3.2). value_only: do not compute
    them, since the layer will run again before its backward, as activation checkpointing does.
    """
    if not torch.is_grad_enabled():
        return _value(loss, hidden, labels, length)
    total: Tensor = _ChunkedLoss.apply(hidden, labels, loss, length, value_only, *weights)
    return total


class _ChunkedLoss(torch.autograd.Function):
    """Keeps the gradients of the inputs, which its backward scales."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, labels: Tensor, loss: PartLoss, length: int, value_only: bool, *weights: Tensor
    ) -> Tensor:
        ctx.dtypes = [weight.dtype for weight in weights]
        if value_only:  # activation checkpointing compares the shapes of what is saved with those of the second run
            like_sums = (weight.new_empty((), dtype=torch.float32).expand(weight.shape) for weight in weights)
            ctx.save_for_backward(hidden.new_empty(()).expand(hidden.shape), *like_sums)
            return _value(loss, hidden, labels, length)
        total, of_hidden = torch.zeros((), device=hidden.device), torch.empty_like(hidden)
        # in fp32 until they are scaled: sums in 16 bits would lose precision, and unscaled ones overflow in fp16
        sums: list[Tensor | None] = [None] * len(weights)
        for part in _positions(hidden, length):
            with _graph_of_its_own():
                inputs = hidden[:, part].detach().requires_grad_()
                value = loss(inputs, labels[:, part])
                of_hidden[:, part], *grads = torch.autograd.grad(value, [inputs, *weights])
            total += value.detach()
            for index, grad in enumerate(grads):
                so_far = sums[index]
                # a copy, if another weight may have the same tensor as its gradient
                sums[index] = grad.to(torch.float32, copy=len(grads) > 1) if so_far is None else so_far.add_(grad)
        ctx.save_for_backward(of_hidden, *sums)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = grad_outputs
        of_hidden, *sums = ctx.saved_tensors
        scaled = [
            torch.mul(each, scale, out=torch.empty_like(each, dtype=dtype))
            for each, dtype in zip(sums, ctx.dtypes, strict=True)
        ]
        return of_hidden * scale, None, None, None, None, *scaled


def _value(loss: PartLoss, hidden: Tensor, labels: Tensor, length: int) -> Tensor:
    total = torch.zeros((), device=hidden.device)
    for part in _positions(hidden, length):
        total += loss(hidden[:, part], labels[:, part])
    return total


def _positions(hidden: Tensor, length: int) -> list[slice]:
    return [slice(start, start + length) for start in range(0, hidden.shape[1], length)]


@contextlib.contextmanager
def _graph_of_its_own() -> Iterator[None]:
    """Context in which autograd records, and activation checkpointing does not see what it keeps."""
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
        yield


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _leaves(output: Tensor) -> tuple[Tensor, ...]:
    """Return the leaves of autograd's graph that a tensor depends on, in a fixed order."""
    found: dict[Tensor, None] = {}
    nodes, seen = [output.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found[node.variable] = None
        nodes += [following for following, _ in node.next_functions]
    return tuple(found)
