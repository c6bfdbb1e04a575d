"""Passes: what autograd records of the forward of a micro-batch, and its backward, in one part or in two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from acsgd.layers.composed import State


class LayerGraph(NamedTuple):
    """Inputs and outputs of consecutive layers that autograd has recorded."""

    inputs: State
    """Leaves; those that require gradients get them."""
    outputs: State

    @property
    def differentiable(self) -> list[Tensor]:
        """Outputs that depend on leaves."""
        return [x for x in self.outputs.values() if x.requires_grad]


class WeightPart(NamedTuple):
    """The rest of a backward, which accumulates gradients of weights."""

    graph: int
    """Number of its graph in the forward."""
    run: Callable[[], None]


class ForwardPass(NamedTuple):
    """A forward of some rows of a micro-batch, kept for its backward."""

    rows: slice
    """Rows of the part in the micro-batch."""
    graphs: list[LayerGraph]
    """Of the first layers to the last ones."""

    @property
    def state(self) -> State:
        """Inputs from the previous stage."""
        return self.graphs[0].inputs

    @property
    def outputs(self) -> State:
        """Inputs of the next stage, or the loss."""
        return self.graphs[-1].outputs

    def output_grads(self, grads: State | None, scale: float) -> list[Tensor]:
        """Return the gradients of differentiable outputs among those of a micro-batch; None = of the loss, `scale`."""
        return [
            torch.full_like(output, scale) if grads is None else grads[name][self.rows]
            for name, output in self.outputs.items()
            if output.requires_grad
        ]

    def backward_inputs(self, grads: State | None, scale: float) -> list[WeightPart]:
        """Accumulate gradients of the inputs of all graphs. Returns what accumulates those of weights, first to last.

        grads, scale: see `output_grads`.
        """
        outputs, output_grads = self.graphs[-1].differentiable, self.output_grads(grads, scale)
        weight_parts: list[WeightPart] = []
        for index in reversed(range(len(self.graphs))):
            leaves = {name: x for name, x in self.graphs[index].inputs.items() if x.requires_grad}
            weight_parts.insert(0, WeightPart(index, backward_inputs([*leaves.values()], outputs, output_grads)))
            reached = {name: x.grad for name, x in leaves.items() if x.grad is not None}
            if not index or not reached:
                break
            outputs, output_grads = [self.graphs[index - 1].outputs[name] for name in reached], [*reached.values()]
        return weight_parts


def take_gradients(state: State) -> State:
    """Return the gradients of the floating-point tensors and clear them; zeros where a tensor had no effect."""
    taken = {}
    for name, x in state.items():
        if x.is_floating_point():
            taken[name], x.grad = torch.zeros_like(x) if x.grad is None else x.grad, None
    return taken


def join_parts(parts: Sequence[State]) -> State:
    """Concatenate the rows of the parts of a micro-batch; sum losses."""
    if len(parts) == 1:
        return parts[0]
    by_name = {name: [part[name] for part in parts] for name in parts[0]}
    return {name: torch.cat(rows) if rows[0].dim() else torch.stack(rows).sum() for name, rows in by_name.items()}


def backward_inputs(inputs: Sequence[Tensor], outputs: Sequence[Tensor], grads: Sequence[Tensor]) -> Callable[[], None]:
    """Accumulate the gradients of the inputs of a graph; return what accumulates those of all other leaves, each once.

    inputs: leaves; if there are none, all is left to the second part. grads: of the outputs. The first part keeps the
    gradients that reach operations with weights. The second part runs these operations again for their weights alone,
    as torch.distributed.pipelining does: together they do the arithmetic of one backward, by the same kernels. Until
    then the graph and all that it saved is kept.
    """
    if not inputs:
        return partial(torch.autograd.backward, outputs, grads)
    uses = _Uses.of(inputs, outputs)
    kept: dict[Node, tuple[Tensor | None, ...]] = {}
    hooks = [node.register_prehook(partial(kept.__setitem__, node)) for node in uses.alone]
    torch.autograd.backward(outputs, grads, inputs=inputs, retain_graph=True)
    for hook in hooks:
        hook.remove()

    def backward_weights() -> None:
        for node, weights in uses.alone.items():
            edges = {GradientEdge(node, i): grad for i, grad in enumerate(kept[node]) if grad is not None}
            torch.autograd.backward([*edges], [*edges.values()], retain_graph=True, inputs=weights)
        if uses.shared:
            torch.autograd.backward(outputs, grads, inputs=uses.shared)

    return backward_weights


class _Uses(NamedTuple):
    """Where weights enter a graph."""

    alone: Mapping[Node, Sequence[Tensor]]
    """Weights that one operation on the way from the inputs to the outputs uses, by operation, the last one first."""
    shared: Sequence[Tensor]
    """Weights that several such operations use, or an output that does not depend on the inputs."""

    @classmethod
    def of(cls, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> _Uses:
        """Find the uses of all leaves but the inputs."""
        roots = [output.grad_fn for output in outputs if output.grad_fn is not None]
        ends = {id(tensor) for tensor in inputs}
        leaves: dict[Node, tuple[Tensor, ...]] = {}
        """Leaves below a node that does not depend on the inputs."""
        uses: dict[Node, tuple[Tensor, ...]] = {}
        """Leaves below a node that does, but for those below other such nodes."""
        for node in _sources_first(roots):
            below = [source for source, _ in node.next_functions if source is not None]
            found = tuple(dict.fromkeys(leaf for source in below for leaf in leaves.get(source, ())))
            if hasattr(node, "variable"):
                found = (node.variable,)
            if any(source not in leaves for source in below) or any(id(leaf) in ends for leaf in found):
                uses[node] = tuple(leaf for leaf in found if id(leaf) not in ends)
            else:
                leaves[node] = found
        free = dict.fromkeys(leaf for root in roots for leaf in leaves.get(root, ()))
        count = Counter(leaf for found in (free, *uses.values()) for leaf in found)
        shared = free | {leaf: None for leaf in count if count[leaf] > 1}
        alone = {node: [leaf for leaf in found if leaf not in shared] for node, found in reversed(uses.items())}
        return cls({node: found for node, found in alone.items() if found}, tuple(shared))


def _sources_first(roots: Sequence[Any]) -> list[Any]:
    """Return the nodes of autograd's graph, each after those that its gradients go to."""
    order, seen, stack = list[Any](), set[Any](), [(root, False) for root in roots]
    while stack:
        node, is_left = stack.pop()
        if is_left:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack += [(node, True), *((source, False) for source, _ in node.next_functions if source is not None)]
    return order
