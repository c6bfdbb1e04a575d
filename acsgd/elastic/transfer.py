"""Transfer of the layers of a rank from its memory to that of another rank.

Travels: global weights, optimizer state, and what the data-parallel mode's replicas have in common. Residuals and local
weights are those of a replica, and stay there.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from acsgd.dp.resize import Place, carry_over
from acsgd.run.session import Session
from acsgd.shards.layer_tensors import LayerTensors
from acsgd.shards.load import LoadedLayer
from acsgd.shards.weights import WeightState
from acsgd.topology import Groups

TAG = 2
"""Tag of these messages in the group of all ranks."""
WEIGHT, OPTIMIZER, MODE, SEPARATOR = "weight", "optimizer", "mode", "\n"
"""Kinds of tensors in a message, and what separates the parts of their names."""


class MemoryWeights:
    """State that another rank has sent. A `WeightSource`."""

    def __init__(self) -> None:
        self.nbytes = 0
        """Bytes received."""
        self._tensors: dict[str, Tensor] = {}
        self._optimizer: WeightState = {}
        self._mode: WeightState = {}

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Add the tensors of one message."""
        for name, tensor in tensors.items():
            kind, *parts = name.split(SEPARATOR)
            if kind == WEIGHT:
                self._tensors[parts[0]] = tensor
            else:
                state = self._optimizer if kind == OPTIMIZER else self._mode
                state.setdefault(parts[0], {})[parts[1]] = tensor

    def tensors(self, layer: str, stored: LayerTensors) -> dict[str, Tensor]:
        return {key: self._tensors[key] for key in (*stored.weights, *stored.constants)}

    def tensor(self, layer: str, key: str) -> Tensor:
        return self._tensors[key]

    def restore(self, session: Session) -> None:
        """Load optimizer state and state of the data-parallel mode. Weights were loaded when the session was built."""
        for weight in session.weights:
            own = {name: by_key for name, by_key in self._optimizer.items() if weight.key in by_key}
            if own:
                session.optimizer.load_state_of(weight, own, weight.key)
        topology, table = session.job.topology, session.job.plugins.mode.states
        place = Place(topology.replica, topology.replicas)
        for stage in session.stages.values():
            stage.sync.load_state_dict(carry_over(table, self._mode, was=place, now=place))


def send_layers(session: Session, groups: Groups, to: int) -> None:
    """Send the state of all layers of this rank to a rank of new groups, one message per layer.

    Loads the global weights into the master weights, so that `reconnect` must follow.
    """
    common = _common_state(session, replicas=groups.dp.size())
    layers = [layer for stage in session.stages.values() for layer in stage.layers]
    _send(groups, to, struct.pack("<q", len(layers) + 1))
    _send_tensors(groups, to, _outer_buffers(session))
    for layer in layers:
        _send_tensors(groups, to, _state_of(session, layer, common))


def receive_layers(groups: Groups, sender: int) -> MemoryWeights:
    """Receive what a rank sends by `send_layers`."""
    received = MemoryWeights()
    (number,) = struct.unpack("<q", _receive(groups, sender, 8))
    for _ in range(number):
        (length,) = struct.unpack("<q", _receive(groups, sender, 8))
        received.add(load(_receive(groups, sender, length)))
        received.nbytes += length
    return received


def _common_state(session: Session, *, replicas: int) -> WeightState:
    """Return what the replicas of this rank's stages have in common, besides weights; load the global weights.

    replicas: number of replicas of the new groups.
    """
    table, is_same = session.job.plugins.mode.states, replicas == session.job.topology.replicas
    names = [state.name for state in table if state.is_common and (is_same or state.merge != "reset")]
    own = [stage.sync.take_state() for stage in session.stages.values()]
    return {name: {key: x for state in own for key, x in state.get(name, {}).items()} for name in names}


def _state_of(session: Session, layer: LoadedLayer, common: WeightState) -> dict[str, Tensor]:
    """Return the tensors of a layer, not copied: fp32 weights, constants, optimizer state, and state of the mode."""
    weights = {weight.key: weight.master.detach() for weight in layer.weights} | layer.constants
    tensors = {f"{WEIGHT}{SEPARATOR}{key}": tensor for key, tensor in weights.items()}
    for name, by_key in session.optimizer.state_of(layer.weights).items():
        tensors |= {f"{OPTIMIZER}{SEPARATOR}{name}{SEPARATOR}{key}": tensor for key, tensor in by_key.items()}
    for name, by_key in common.items():
        own = {weight.key: by_key[weight.key] for weight in layer.weights if weight.key in by_key}
        tensors |= {f"{MODE}{SEPARATOR}{name}{SEPARATOR}{key}": tensor for key, tensor in own.items()}
    return tensors


def _outer_buffers(session: Session) -> dict[str, Tensor]:
    """Return the stored buffers outside of blocks, which every rank has."""
    model, last = next(iter(session.stages.values())).composed.model, session.job.model.description.layers[-1]
    return {f"{WEIGHT}{SEPARATOR}{key}": model.get_buffer(key) for key in last.buffers}


def _send_tensors(groups: Groups, to: int, tensors: Mapping[str, Tensor]) -> None:
    payload = save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()})
    _send(groups, to, struct.pack("<q", len(payload)))
    _send(groups, to, payload)


def _send(groups: Groups, to: int, payload: bytes) -> None:
    work = dist.isend(torch.frombuffer(bytearray(payload), dtype=torch.uint8), to, groups.world, TAG)
    assert work is not None
    groups.waits.wait(work)


def _receive(groups: Groups, sender: int, length: int) -> bytes:
    buffer = torch.empty(length, dtype=torch.uint8)
    work = dist.irecv(buffer, sender, groups.world, TAG)
    assert work is not None
    groups.waits.wait(work)
    return buffer.numpy().tobytes()
