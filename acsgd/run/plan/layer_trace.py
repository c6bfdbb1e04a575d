"""Memory of each layer of a model in training, traced on fake tensors: no weights, no arithmetic.

The code that trains is what runs, so that all of it is counted: recomputation, adapters, the loss. Of equal layers
that follow each other, two are run.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from acsgd.dp.sync import SingleReplicaSync
from acsgd.layers.composed import ComposedModel, Context, Inputs, State
from acsgd.layers.description import BATCH, HIDDEN, Head, LayerSpec, ModelLayers
from acsgd.layers.recorders import KnownValues, probe_batch
from acsgd.layers.skeleton import experts_without_values, parameter_names, set_tied_parameter
from acsgd.layers.trace import on_fake_tensors
from acsgd.pp.chunked_loss import HeadLoss
from acsgd.pp.recompute import KEEP_ALL, Recompute
from acsgd.pp.stage import MicroBatch, Stage
from acsgd.shards.load import LoadedLayer
from acsgd.shards.weights import Weight, as_own_master
from acsgd.streams import LOGITS_AT_ONCE, generator_states, restore_generators
from acsgd.tasks.base import Task


@dataclass(frozen=True)
class LayerTrace:
    """What one micro-batch needs in a layer, bytes, besides weights and their gradients."""

    kept: int
    """Kept from forward to backward, with the layer's outputs."""
    forward_peak: int
    """Largest memory in forward, beyond that before it."""
    backward_peak: int
    """Largest memory in backward, beyond that before it."""
    first_backward_peak: int
    """The same in the first backward of a step, which makes the gradients of the weights."""
    inputs_peak: int
    """As `backward_peak`, of the first part of a split backward."""
    kept_between: int
    """Kept, besides, from the first part to the second."""


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of the storages that operations of this thread create, while they exist.

    On fake tensors, they take no memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        """Bytes of the storages that exist."""
        self.peak = 0
        """Largest value of `now` so far, or since it was set."""
        self._known = weakref.WeakSet[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self._add(tensor)
        return out

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        nbytes = storage.nbytes()
        self._known.add(storage)
        self.now += nbytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._release, nbytes).atexit = False

    def _release(self, nbytes: int) -> None:
        self.now -= nbytes


S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)


class Recorder(Protocol[S_co]):
    """Records forward and backward in segments, while it is entered as a context."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> Any: ...

    def end_segment(self) -> S_co:
        """Return what was recorded since the last segment or the start, and start another."""
        ...


class _Segment(NamedTuple):
    """What the tracker has counted between two points of forward and backward."""

    grown: int
    """By how many bytes the memory is larger at the end."""
    peak: int
    """Largest memory, beyond that at the start."""


NOTHING = _Segment(0, 0)
"""Of a layer without a backward."""


class _Recorder(MemoryTracker):
    """Tracks one forward and backward in segments."""

    def __init__(self) -> None:
        super().__init__()
        self._start = 0

    def __enter__(self) -> Self:
        super().__enter__()
        self._start = self.peak = self.now
        return self

    def end_segment(self) -> _Segment:
        """Return what was counted since the last segment or the start, and start another."""
        segment = _Segment(self.now - self._start, self.peak - self._start)
        self._start = self.peak = self.now
        return segment


class RecordingModel(ComposedModel, Generic[S]):
    """A model that ends a segment of forward before each layer, and one of backward behind each."""

    def __init__(self, model: PreTrainedModel, layers: ModelLayers, recorder: Recorder[S]) -> None:
        super().__init__(model, layers)
        self.recorder = recorder
        self.forward: dict[int, S] = {}
        """Segments by the index of the layer."""
        self.backward: dict[int, S] = {}
        self.contexts: list[S] = []
        """Segments before the first layer, of each forward."""
        self._layer: int | None = None
        self._first_trained = layers.first_trained

    def call(self, index: int, state: State, inputs: Inputs, context: Context) -> State:
        self._enter(index, state)
        return super().call(index, state, inputs, context)

    def call_to_head(self, state: State, inputs: Inputs) -> tuple[Tensor, Head]:
        self._enter(len(self.layers) - 1, state)
        return super().call_to_head(state, inputs)

    def run_two(
        self, stage: Stage, batch: Inputs, labels: Tensor, sequences: int
    ) -> list[tuple[dict[int, S], dict[int, S]]]:
        """Run forward and backward of the first two micro-batches of a step; return the segments of each.

        stage: whose layers this model runs.
        """
        stage.sync.begin_step(0)
        passes = []
        for micro in range(2):
            self.forward, self.backward = {}, {}
            with self.recorder:
                stage.forward(MicroBatch(0, micro, micro, tuple(range(sequences))), batch, {}, labels)
                self._end_forward()
                stage.backward(micro, None, last=True)
                self.backward[self._first_trained] = self.recorder.end_segment()
            passes.append((self.forward, self.backward))
        return passes

    def run_inputs(self, stage: Stage, batch: Inputs, labels: Tensor, sequences: int) -> dict[int, S]:
        """Run forward and split backward of a micro-batch; return the segments of the first part of the backward."""
        self.forward, self.backward = {}, {}
        with self.recorder:
            stage.forward(MicroBatch(0, 0, 0, tuple(range(sequences)), is_split=True), batch, {}, labels)
            self._end_forward()
            stage.backward_input(0, None)
            segments = {**self.backward, self._first_trained: self.recorder.end_segment()}
        stage.backward_weight(0, last=True)
        return segments

    def _end_forward(self) -> None:
        """End the segment of the last layer."""
        assert self._layer is not None
        self.forward[self._layer] = self.recorder.end_segment()
        self._layer = None

    def _enter(self, index: int, state: State) -> None:
        if index in self.forward:  # recomputed in backward
            return
        if self._layer is not None:
            self.forward[self._layer] = self.recorder.end_segment()
        else:
            self.contexts.append(self.recorder.end_segment())
        self._layer = index
        hidden = state.get(HIDDEN)
        if hidden is not None and hidden.requires_grad:

            def end(_: Tensor) -> None:
                self.backward[index] = self.recorder.end_segment()

            hidden.register_hook(end)


def trace_layers(
    task: Task,
    model: PreTrainedModel,
    layers: ModelLayers,
    sizes: Mapping[str, int],
    *,
    dtype: torch.dtype,
    has_masters: bool,
    label_smoothing: float = 0.0,
    recompute: Recompute = KEEP_ALL,
    splits_backward: bool = False,
    logits_at_once: int = LOGITS_AT_ONCE,
) -> list[LayerTrace]:
    """Trace forward and backward of one micro-batch; return what each layer needs.

    model: with its adapter, on the meta device, its frozen layers not quantized; changed in place. sizes: of the
    micro-batch. dtype: of the parameters. has_masters: whether trained ones have masters of their own.
    """
    same = alike(model, layers)
    runs = [index for index in range(len(layers.layers)) if index not in same]
    generators = generator_states()
    _cast(model, dtype)
    with on_fake_tensors(model), experts_without_values(model), KnownValues() as known:
        for key in layers.frozen:
            model.get_parameter(key).requires_grad_(False)
        composed, inputs = RecordingModel(model, layers, _Recorder()), task.model_class.inputs_of(model.config)
        batch = probe_batch(model, inputs, sizes, known)
        labels = torch.zeros([sizes[size] for size in task.model_class.labels], dtype=torch.long)
        loaded = [LoadedLayer(layers.layers[index], [], {}, {}) for index in runs]
        stage = Stage(
            composed,
            HeadLoss(task, label_smoothing=label_smoothing, logits_at_once=logits_at_once),
            loaded,
            SingleReplicaSync(add_weights(model, layers, loaded, has_masters=has_masters)),
            targets=1,
            seed=0,
            recompute=recompute,
            first_trained=layers.first_trained,
        )
        (_, first), (forward, backward) = composed.run_two(stage, batch, labels, sizes[BATCH])
        stage.graph_per_layer = splits_backward
        first_part = composed.run_inputs(stage, batch, labels, sizes[BATCH]) if splits_backward else {}
    restore_generators(generators)
    found = {
        index: LayerTrace(ahead.grown, ahead.peak, back.peak, earlier.peak, part.peak, part.grown)
        for index, ahead in forward.items()
        for back, earlier, part in [[each.get(index, NOTHING) for each in (backward, first, first_part)]]
    }
    for index in same:  # in ascending order
        found[index] = found[index - 1]
    return [found[layer.index] for layer in layers.layers]


def _cast(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast all parameters in place, as loading does, also those that PEFT makes in fp32."""
    for names in parameter_names(model).values():
        set_tied_parameter(model, names, nn.Parameter(model.get_parameter(names[0]).detach().to(dtype)))


def alike(model: PreTrainedModel, layers: ModelLayers) -> list[int]:
    """Return the layers that need what the layer before needs: each follows an equal one that follows an equal one."""
    kinds = [_kind(model, layers, layer) for layer in layers.layers]
    return [index for index in range(2, len(kinds) - 1) if kinds[index] == kinds[index - 1] == kinds[index - 2]]


def _kind(model: PreTrainedModel, layers: ModelLayers, layer: LayerSpec) -> str:
    """Return a text that is equal for layers that need the same."""
    if layer.block is None:
        return layer.name
    place = (layer.index > layers.first_trained) - (layer.index < layers.first_trained)
    frozen = [key in layers.frozen for key in layer.parameters]
    return repr((model.get_submodule(layer.block), layer.runs_forward, place, frozen))


def add_weights(
    model: PreTrainedModel, layers: ModelLayers, loaded: Sequence[LoadedLayer], *, has_masters: bool
) -> list[Weight]:
    """Add the trained weights of layers to these, and return them. has_masters: whether with masters of their own."""
    weights: dict[str, Weight] = {}
    for layer in loaded:
        for key in layer.spec.parameters:
            if key not in weights and key not in layers.frozen:
                param = model.get_parameter(key)
                master = nn.Parameter(param.detach().float()) if has_masters else as_own_master(param)
                weights[key] = Weight(key, param, master)
                layer.weights.append(weights[key])
    return [*weights.values()]
