"""One stage of the pipeline: forward and backward of its layers on one micro-batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from acsgd.dp.sync import GradSync
from acsgd.layers.composed import ComposedModel, Context, Inputs, State
from acsgd.layers.description import LayerSpec, are_connected
from acsgd.layers.skeleton import parameter_names
from acsgd.optim.fetch import LayerFetch, ParamSource
from acsgd.optim.offload import GradientOffload, add_in_fp32
from acsgd.pp.chunked_loss import HeadLoss
from acsgd.pp.passes import ForwardPass, LayerGraph, WeightPart, join_parts, take_gradients
from acsgd.pp.recompute import KEEP_ALL, Recompute, recompute_attention
from acsgd.pp.recompute import recompute as run_again
from acsgd.pp.saved_activations import ActivationOffload, SavedGroup, begin_backward
from acsgd.shards.load import LoadedLayer
from acsgd.shards.weights import Weight, in_reduction_order
from acsgd.streams import mix_seed, seed_generators


class MicroBatch(NamedTuple):
    """Identity of a micro-batch. Its randomness depends on these numbers and the seed alone."""

    step: int
    local_index: int
    """Position among the micro-batches of this replica in this step."""
    global_index: int
    """Position among the micro-batches of the global batch."""
    sample_ids: tuple[int, ...]
    """One per sequence, B in all."""
    is_split: bool = False
    """Whether its backward runs in two parts."""


BackwardPart = Literal["whole", "inputs", "weights"]
"""What runs of a backward: gradients of the inputs, those of the weights, or both."""


@dataclass
class _StepState:
    """What a stage keeps from one computation of a step to the next, and which backward runs."""

    passes: dict[int, list[ForwardPass]] = field(default_factory=dict)
    """By local index of the micro-batch, until its backward begins."""
    weight_parts: dict[int, list[list[WeightPart]]] = field(default_factory=dict)
    """By the same, of backwards of which the first part has run."""
    final: set[str] = field(default_factory=set)
    """Weights whose gradients of this step are complete."""
    part: BackwardPart = "whole"
    """Of the backward that runs."""
    is_last: bool = False
    """Whether gradients of the weights are final after it."""
    group: int | None = None
    """Group of layers whose backward runs, if parameters are fetched."""


class Stage:
    """The layers of one stage on one rank.

    Args:
        composed: runs single layers
        head_loss: loss and predictions
        layers: the layers of the stage, loaded into the model
        sync: gradient sync of these weights over the replicas
        targets: divisor of the summed loss
        recompute: what the backward computes again instead of keeping it
        splits_backward: whether backwards are run in two parts, `backward_input` and `backward_weight`
        first_trained: index of the first layer of the model with a trained parameter; a stage below it runs no backward
        mask_per_sample: draw dropout masks from (seed, sample, layer) instead of (seed, step, micro-batch, layer)
        offload: adds gradients to those of masters in host memory; None = masters are on the device
        fetch: fetches the parameters of each group of layers that run together; None = they stay on the device
        activations: keeps what backward needs in host memory; None = it stays on the device

    Reseeds torch's global generators before each layer if the model has dropout. With mask_per_sample, training with
    dropout runs one sequence at a time, because one seed determines the masks of all sequences in one call.
    """

    def __init__(
        self,
        composed: ComposedModel,
        head_loss: HeadLoss,
        layers: Sequence[LoadedLayer],
        sync: GradSync,
        *,
        targets: int,
        seed: int,
        recompute: Recompute = KEEP_ALL,
        splits_backward: bool = False,
        first_trained: int = 0,
        mask_per_sample: bool = False,
        offload: GradientOffload | None = None,
        fetch: LayerFetch | None = None,
        activations: ActivationOffload | None = None,
    ) -> None:
        self.layers = layers
        self.weights = in_reduction_order(weight for layer in layers for weight in layer.weights)
        self.tables = {key: table for layer in layers for key, table in layer.tables.items()}
        self.awaits_lookups = any(weight.has_remote_lookups for weight in self.weights)
        """Whether gradients of its tables are complete only once other ranks have sent gradients of rows."""
        self.sync = sync
        self.composed = composed
        self.head_loss = head_loss
        self._range = range(layers[0].spec.index, layers[-1].spec.index + 1)
        self._targets = targets
        self._seed_number = seed
        self._first_trained = first_trained
        self._together = recompute.layers or 1
        """Number of layers of a group, which run together."""
        self._recompute = recompute if self.runs_backward else KEEP_ALL
        self._random = any(layer.random for layer in composed.layers)
        if self._recompute.attention:
            for path in filter(None, (layer.spec.block for layer in layers)):
                recompute_attention(composed.model.get_submodule(path), is_random=self._random)
        self._per_sequence = self._random and mask_per_sample
        # gradients of a weight are summed over its uses before they are accumulated: all uses are in one graph
        self.graph_per_layer = splits_backward and not are_connected([layer.spec for layer in layers])
        """Whether backwards in two parts go through the layers one by one, each of which autograd records by itself."""
        self._state = _StepState()
        self._offload = offload
        self._fetch = fetch
        self._activations = activations if self.runs_backward else None
        self._reports_groups = fetch is not None and fetch.is_collective
        """Whether gradients are reported group by group, in the order in which all replicas fetch."""
        for weight in self.weights:
            weight.param.register_post_accumulate_grad_hook(self._hook(weight))

    @property
    def is_first(self) -> bool:
        """Whether the stage starts with the first layer."""
        return self._range.start == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage ends with the last layer and computes the loss."""
        return self._range.stop == len(self.composed.layers)

    @property
    def runs_backward(self) -> bool:
        """Whether the stage or one below it has trained parameters."""
        return self._range.stop > self._first_trained

    @property
    def sends_gradient(self) -> bool:
        """Whether the backward returns gradients of the inputs, since a layer of a stage below is trained."""
        return self._range.start > self._first_trained

    def restart(self, sync: GradSync) -> None:
        """Forget micro-batches whose backward was not run, and use another gradient sync of the same weights."""
        self.sync = sync
        self._state = _StepState()
        if self._offload is not None:
            self._offload.clear()
        if self._fetch is not None:
            self._fetch.reset(sync.meter)

    @property
    def param_source(self) -> ParamSource | None:
        """Where parameters lie that the stage fetches; None if there are none."""
        return None if self._fetch is None else self._fetch.source

    def close(self) -> None:
        """End the threads that fetch parameters, and let go of where these lie."""
        if self._fetch is not None:
            self._fetch.close()

    def reduce(self) -> None:
        """Start the reductions that remain after the last backward, but for tables that other ranks look up rows of."""
        if not self.awaits_lookups:
            self.sync.reduce()
            return
        for weight in self.weights:  # those without a gradient in this step
            if not (weight.has_remote_lookups or weight.key in self._state.final):
                self.sync.grad_ready(weight, is_final=True)

    def finish_lookups(self) -> None:
        """Start the reductions that awaited the gradients of rows that other ranks look up."""
        self._state.final.clear()
        for weight in self.weights:
            if weight.has_remote_lookups:
                self.sync.grad_ready(weight, is_final=True)
        self.sync.reduce()

    def modules(self) -> dict[str, nn.Module]:
        """Return the modules with parameters of the stage, and all modules of its blocks, by path."""
        model, names = self.composed.model, parameter_names(self.composed.model)
        found: dict[str, nn.Module] = {}
        for layer in self.layers:
            if (block := layer.spec.block) is not None:
                found |= dict(model.get_submodule(block).named_modules(prefix=block))
            paths = [name.rpartition(".")[0] for key in layer.spec.parameters for name in names[key]]
            found |= {path: model.get_submodule(path) for path in paths}
        return found

    def forward(self, micro: MicroBatch, inputs: Inputs, state: State, labels: Tensor | None = None) -> State:
        """Run the layers on one micro-batch and keep what its backward needs.

        inputs: inputs of the model, such as {"input_ids": [B, T]}. state: outputs of the previous stage in separate
        tensors; empty for the first stage. Returns the inputs of the next stage; the last stage returns {"loss":
        scalar}, the loss summed over `labels` and divided by `targets`.
        """
        passes = [self._run_pass(part, rows, inputs, state, labels) for part, rows in self._parts(micro)]
        if self.runs_backward:
            self._state.passes[micro.local_index] = passes
        return {name: tensor.detach() for name, tensor in join_parts([each.outputs for each in passes]).items()}

    def backward(self, micro: int, grads: State | None, *, last: bool, scale: float = 1.0) -> State:
        """Run the backward of a micro-batch: accumulate gradients of the weights, return those of the inputs if needed.

        grads: gradients of the outputs; None for the last stage, whose loss gets the gradient `scale`. last: whether
        this is the last backward of the step, after which the gradients are final.
        """
        passes = self._state.passes.pop(micro)
        for each in passes:
            is_last = last and each is passes[-1]
            with self._running("whole", is_last=is_last):
                torch.autograd.backward(each.graphs[-1].differentiable, each.output_grads(grads, scale))
            self.sync.backward_done(is_last=is_last)
        return self._take_input_grads(passes)

    def backward_input(self, micro: int, grads: State | None, *, scale: float = 1.0) -> State:
        """Run the part of a backward that other stages wait for: return gradients of the inputs, if they are needed.

        Arguments as in `backward`; see `MicroBatch.is_split`. `backward_weight` must follow, until when activations are
        kept, and gradients too.
        """
        passes = self._state.passes.pop(micro)
        with self._running("inputs"):
            self._state.weight_parts[micro] = [each.backward_inputs(grads, scale) for each in passes]
        return self._take_input_grads(passes)

    def backward_weight(self, micro: int, *, last: bool) -> None:
        """Run the other part: accumulate gradients of the weights, bit for bit those of `backward`."""
        passes = self._state.weight_parts.pop(micro)
        for parts in passes:
            with self._running("weights", is_last=last and parts is passes[-1]):
                while parts:
                    each = parts.pop()  # its graph is freed
                    self._run_weight_part(each, ahead=parts[-1].graph if parts else -1)

    def _run_weight_part(self, part: WeightPart, *, ahead: int) -> None:
        """Accumulate gradients of the weights of a graph, with the parameters that it may read once more.

        ahead: the graph of the next part; -1 = none.
        """
        if self._fetch is None:
            part.run()
            return
        groups = [part.graph] if self.graph_per_layer else range(len(self.layers))
        for group in groups:
            self._fetch.enter(group, ahead)
        part.run()
        for group in groups:
            self._fetch.leave(group)

    @contextlib.contextmanager
    def _running(self, part: BackwardPart, *, is_last: bool = False) -> Iterator[None]:
        """Context of a backward or of a part of one, after which the gradients of masters are complete."""
        self._state.part, self._state.is_last = part, is_last
        yield
        self._end_group()
        # values that were fetched ahead would be old after the next update
        assert self._fetch is None or self._fetch.is_idle, "a group of layers is fetched that has no backward"
        self._state.is_last = False
        if self._offload is not None:
            self._offload.finish()

    def _begin_group(self, group: int, saved: Sequence[SavedGroup], _: Tensor) -> None:
        """Fetch the parameters of a group of layers, whose backward begins, and release those of the one before.

        The order is the same on all replicas, whichever parameters get a gradient. saved: activations of all groups.
        """
        if saved:
            begin_backward(saved, group)
        if self._fetch is None or self._state.part == "weights":  # which fetches before it runs
            return
        self._end_group()
        # gradients of the inputs of each layer end above the first trained one, which has a weight part only
        last = self._first_trained + (self.graph_per_layer and self._state.part == "inputs")
        reaches_next = self.sends_gradient or self.layers[group * self._together].spec.index > last
        self._fetch.enter(group, ahead=group - 1 if reaches_next else -1)
        self._state.group = group

    def _end_group(self) -> None:
        """Release the parameters of the group of layers whose backward has ended, if parameters are fetched.

        If replicas fetch together, also report its gradients. Those of other parameters, such as tables of which
        replicated tensors are made, follow at the end of the pass.
        """
        group, self._state.group = self._state.group, None
        if group is None:
            return
        assert self._fetch is not None
        if self._offload is not None and self._reports_groups:
            self._offload.finish()
        self._fetch.leave(group)
        reported = self.layers[group * self._together : (group + 1) * self._together] if self._reports_groups else ()
        for layer in reported:
            for weight in layer.weights:
                if weight.key in self._fetch.keys:
                    self.sync.grad_ready(weight, is_final=self._state.is_last)

    def _take_input_grads(self, passes: Sequence[ForwardPass]) -> State:
        """Return the gradients of the inputs, if they are needed."""
        return join_parts([take_gradients(each.state) for each in passes]) if self.sends_gradient else {}

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context in which dropout is off, for `evaluate`."""
        was_training = self.composed.model.training
        self.composed.model.eval()
        try:
            with contextlib.nullcontext() if self._fetch is None else self._fetch.unmetered():
                yield
        finally:
            self.composed.model.train(was_training)

    @torch.no_grad()  # not inference_mode: buffers of links that training uses, too, may be created here
    def evaluate(self, micro: MicroBatch, inputs: Inputs, state: State, labels: Tensor | None = None) -> State:
        """Run the layers on one micro-batch without a backward.

        Arguments and result as in `forward`, but the loss is not divided by `targets`, and the last stage also returns
        "predictions" [B] if the task has them.
        """
        return self._run_layers(micro, inputs, state, labels)

    def _parts(self, micro: MicroBatch) -> list[tuple[MicroBatch, slice]]:
        """Split a micro-batch into the parts that run together, each with its rows in the tensors."""
        if not self._per_sequence:
            return [(micro, slice(None))]
        return [(micro._replace(sample_ids=(id_,)), slice(row, row + 1)) for row, id_ in enumerate(micro.sample_ids)]

    def _run_pass(
        self, micro: MicroBatch, rows: slice, inputs: Inputs, state: State, labels: Tensor | None
    ) -> ForwardPass:
        """Run the layers on some rows of `inputs`, `state` and `labels`."""
        inputs = {name: tensor[rows] for name, tensor in inputs.items()}
        state = {name: tensor[rows] for name, tensor in state.items()}
        for tensor in state.values():
            tensor.requires_grad_(tensor.is_floating_point() and self.sends_gradient)
        graphs: list[LayerGraph] = []
        outputs = self._run_layers(micro, inputs, state, None if labels is None else labels[rows], graphs)
        if labels is not None:
            graphs[-1] = graphs[-1]._replace(outputs={"loss": outputs["loss"] / self._targets})
        return ForwardPass(rows, graphs)

    def _run_layers(
        self,
        micro: MicroBatch,
        inputs: Inputs,
        state: State,
        labels: Tensor | None,
        graphs: list[LayerGraph] | None = None,
    ) -> State:
        """Return the outputs. graphs: gets the graph of all layers, or that of each."""
        self._seed(micro, 0)  # the context may take random numbers of the first layer
        context = self.composed.context(inputs, self._range)
        entering, masks = state, [call.leaves for call in context.values()]
        saved: list[SavedGroup] = []
        for group, first in enumerate(range(0, len(self.layers), self._together)):
            layers = [layer.spec for layer in self.layers[first : first + self._together]]
            if micro.is_split and self.graph_per_layer and graphs is not None and first:
                graphs.append(LayerGraph(entering, state))
                state = entering = {name: x.detach().requires_grad_(x.requires_grad) for name, x in state.items()}
            run = self._run_of(layers, micro, inputs, context, labels)
            with contextlib.ExitStack() as running:
                if self._fetch is not None:
                    running.enter_context(self._fetch.whole(group))
                if self._activations is not None and torch.is_grad_enabled():
                    params = [self.composed.model.get_parameter(key) for layer in layers for key in layer.parameters]
                    saved.append(self._activations.group(params, entering, inputs, labels, masks))
                    running.enter_context(saved[-1].saving())
                state = self._run_group(run, state)
            if (outputs := [x for x in state.values() if x.requires_grad]) and (self._fetch is not None or saved):
                register_multi_grad_hook(outputs, partial(self._begin_group, group, saved), mode="any")
        if graphs is not None:
            graphs.append(LayerGraph(entering, state))
        return state

    def _run_group(self, run: Callable[[State], State], state: State) -> State:
        """Run a group of layers, of which backward runs it again if it is recomputed."""
        if not self._recompute.layers:
            return run(state)
        names = [*state]  # tensors that are arguments of their own are saved by autograd
        return run_again(lambda *tensors: run(dict(zip(names, tensors, strict=True))), *state.values())

    def _run_of(
        self, layers: Sequence[LayerSpec], micro: MicroBatch, inputs: Inputs, context: Context, labels: Tensor | None
    ) -> Callable[[State], State]:
        """Return consecutive layers as a function of their inputs alone, as recomputation needs.

        The last layer includes the loss, so that recomputation does not keep the logits: [B, T, V] in fp32 is larger
        than many blocks.
        """
        will_run_again = bool(self._recompute.layers)

        def run(state: State) -> State:
            nonlocal will_run_again
            for layer in layers:
                self._seed(micro, layer.index)
                if labels is not None and layer.index == len(self.composed.layers) - 1:
                    value_only, will_run_again = will_run_again, False
                    hidden, head = self.composed.call_to_head(state, inputs)
                    is_training = self.composed.model.training
                    return self.head_loss.results(hidden, head, labels, is_training=is_training, value_only=value_only)
                state = self.composed.call(layer.index, state, inputs, context)
            return state

        return run

    def _seed(self, micro: MicroBatch, layer: int) -> None:
        """Seed torch's generators for one layer, if the model draws random numbers."""
        if not (self._random and self.composed.model.training):
            return
        if self._per_sequence:  # three numbers, so never the seed of another four
            (sample_id,) = micro.sample_ids
            seed_generators(mix_seed(self._seed_number, sample_id, layer))
        else:
            seed_generators(mix_seed(self._seed_number, micro.step, micro.global_index, layer))

    def _hook(self, weight: Weight) -> Callable[[nn.Parameter], None]:
        def accumulated(*, is_final: bool) -> None:
            if is_final:
                self._state.final.add(weight.key)
            if not self._reports_groups or weight.has_remote_lookups:
                self.sync.grad_ready(weight, is_final=is_final)

        def grad_ready(param: nn.Parameter) -> None:
            is_final = self._state.is_last and not weight.has_remote_lookups
            if self._offload is not None:
                self._offload.start(weight, partial(accumulated, is_final=is_final))
                return
            if weight.master is not param:
                _accumulate_in_fp32(param, weight.master)
            accumulated(is_final=is_final)

        return grad_ready


def _accumulate_in_fp32(param: nn.Parameter, master: nn.Parameter) -> None:
    """Add a 16-bit gradient to the master's and clear it: sums over micro-batches in 16 bits would lose precision."""
    assert param.grad is not None
    if master.grad is None:
        master.grad = param.grad.float()
    else:
        add_in_fp32(master.grad, param.grad)
    param.grad = None
