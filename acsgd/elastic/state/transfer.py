"""Transfer of the state of layers from the memory of a rank to that of another rank.

Travels: global weights, optimizer state, and what the data-parallel mode's replicas have in common. Residuals and local
weights are those of a replica, and stay there. Frozen parameters and stored buffers never change, so every host reads
them from the files that it has: with an adapter, they are nearly all of the model.
"""

from __future__ import annotations

import functools
import json
import struct
import time
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from safetensors.torch import load, save
from torch import Tensor
from transformers import PreTrainedModel

from acsgd.dp.resize import ReplicaPlace, carry_over
from acsgd.errors import RunError
from acsgd.groups import Groups
from acsgd.optim.ownership import fill_rows, parts_of, weight_of
from acsgd.run.plan.model import RunModel
from acsgd.run.session import Session
from acsgd.run.setup.continued import restart_syncs
from acsgd.shards.layer_tensors import LayerTensors
from acsgd.shards.load import Constants, LoadedLayer
from acsgd.shards.weights import Weight, WeightState, part_of
from acsgd.shards.writer import OpenTensor

TAG = 2
"""Tag of these messages in the group of all ranks."""
PROBE_BYTES = 2**19
"""Size of the message that measures a link."""
MAX_PROBES, PROBES_S = 8, 0.1
"""Maximum number of these messages, and time after which no further one is sent, seconds."""
END_OF_PROBES = -1
"""Sent in place of the length of a message after the last one."""
ROUNDED_BITS = 3
"""Bits of the mantissa of a rounded number: its relative error is at most 1 / 16."""
WEIGHT, OPTIMIZER, MODE, SEPARATOR = "weight", "optimizer", "mode", "\n"
"""Kinds of tensors in a message, and what separates the parts of their names."""


class LayersInMemory:
    """Trained state of the layers that a rank needs: what it keeps, and what it has received. A `WeightSource`.

    Parts of weights have keys of their own, see `Part`. constants: source of all other tensors; None if they are loaded
    already. model: for the shapes of weights of which parts are missing, since other replicas own them; these are NaN
    until these share them. None if all weights are here.
    """

    def __init__(self, constants: Constants | None = None, model: RunModel | None = None) -> None:
        self._constants = constants
        self._model = model
        self._weights: dict[str, Tensor] = {}
        self._parts: dict[str, list[str]] = {}
        """Keys of the parts of each weight that are here."""
        self._optimizer: WeightState = {}
        self._mode: WeightState = {}
        self._messages: list[Mapping[str, Tensor]] = []

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Add the tensors of one message."""
        self._messages.append(tensors)
        for name, tensor in tensors.items():
            kind, *parts = name.split(SEPARATOR)
            if kind == WEIGHT:
                self._weights[parts[0]] = tensor
                self._parts.setdefault(weight_of(parts[0]), []).append(parts[0])
            else:
                state = self._optimizer if kind == OPTIMIZER else self._mode
                state.setdefault(parts[0], {})[parts[1]] = tensor

    def add_missing(self, tensors: Mapping[str, Tensor]) -> None:
        """Add the tensors of one message that are not here yet."""
        known = {name for message in self._messages for name in message}
        self.add({name: tensor for name, tensor in tensors.items() if name not in known})

    def tensors(self, layer: str, stored: LayerTensors) -> dict[str, Tensor]:
        # a weight that is stored with a layer may be another stage's, which sends its rows: then it is missing, or NaN
        held = {key: self._weight(key) for key in stored.weights if self._has(key)}
        return held | self.constants(layer, stored)

    def _has(self, key: str) -> bool:
        return key in self._weights or self._model is not None

    def _weight(self, key: str) -> Tensor:
        """Return a whole weight. It takes no memory if no part of it is here."""
        if self._model is None or key in self._weights:
            return self._weights[key]
        blank = torch.tensor(torch.nan).expand(self._blank_model.get_parameter(key).shape)
        parts = [(part, self._weights[part]) for part in self._parts.get(key, ())]
        return fill_rows(blank.clone(memory_format=torch.contiguous_format), parts) if parts else blank

    @functools.cached_property
    def _blank_model(self) -> PreTrainedModel:
        """The model, without values: built once a weight is divided, which it is not where nothing moves."""
        assert self._model is not None
        return self._model.build(torch.float32)

    def constants(self, layer: str, stored: LayerTensors, *, check: bool = True) -> dict[str, Tensor]:
        assert self._constants is not None
        return self._constants.of_layer(layer, stored, check=check)

    def tensor(self, layer: str, key: str) -> Tensor:
        assert self._constants is not None
        constant = self._constants.find(layer, key)
        return self._weight(key) if constant is None else constant

    def stored(self, layer: str, key: str) -> OpenTensor:
        assert self._constants is not None
        return self._constants.stored(layer, key)

    def send(self, layers: Sequence[int], groups: Groups, to: int) -> None:
        """Send all messages on to a rank of this host; layers: those that they have."""
        send_tensors(groups, to, self._messages)

    @torch.no_grad()
    def load_layer(self, layer: LoadedLayer, session: Session) -> None:
        """Load the tensors of a `layer_message` into the layer of a session, in place."""
        for weight in layer.weights:
            session.owned.load(weight, self._weights[weight.key])
        for stage in session.stages.values():
            stage.sync.load_layer(layer.weights, self._mode)
        session.owned.load_state(session.optimizer, layer.weights, self._optimizer)

    @torch.no_grad()
    def replace(self, session: Session) -> list[WeightState]:
        """Load weights and optimizer state into a session, in place; return the state of the mode, by stage."""
        for weight in session.weights:
            session.owned.load(weight, self._weights[weight.key])
        session.owned.load_state(session.optimizer, session.weights, self._optimizer)
        return [part_of(self._mode, {weight.key for weight in stage.weights}) for stage in session.stages.values()]

    def restore(self, session: Session, was: ReplicaPlace) -> None:
        """Load optimizer state and state of the data-parallel mode. Weights were loaded when the session was built.

        was: place of the replica whose state this is, for what replicas do not have in common.
        Raises RunError if a part of a weight that this rank owns is missing.
        """
        self.check_has(session.owned.of(session.weights))
        session.owned.load_state(session.optimizer, session.weights, self._optimizer)
        table, now = session.job.plugins.mode.states, ReplicaPlace(session.peers.replica, session.peers.size)
        for stage in session.stages.values():
            weights = {weight.key for weight in stage.weights}
            own = part_of(
                self._mode, {key for keys in self._mode.values() for key in keys if weight_of(key) in weights}
            )
            stage.sync.load_state_dict(carry_over(table, own, was=was, now=now, is_same_stage=False))

    def check_has(self, owned: Iterable[Weight]) -> None:
        """Raise RunError if weights, or parts of weights, that a rank owns are missing: they were filled with NaN."""
        for each in owned:
            has_whole = {each.key, weight_of(each.key)} & self._weights.keys()
            pieces = {part: self._weights[part] for part in self._parts.get(weight_of(each.key), ())}
            if not has_whole and not parts_of([each], {WEIGHT: pieces}):
                raise RunError(f"the state of {each.key} is incomplete: no rank has sent these weights")


class HeldLayers:
    """The layers of a session that was aborted, to send or to keep.

    Loads the global weights into the master weights, so that `reconnect` must follow, or another session. replicas:
    number of those that exchange something in the next view.
    """

    def __init__(self, session: Session, replicas: int) -> None:
        self._replicas = replicas
        self._session = session
        self.parts = session.owned.ownership.place[1]
        """Number of parts into which replicas divide the state of each layer, of which these are one."""
        self._layers = {layer.spec.index: layer for layer in session.layers}
        states = [stage.sync.take_state() for stage in session.stages.values()]
        names = {name for state in states for name in state}
        self._mode = {name: {key: x for each in states for key, x in each.get(name, {}).items()} for name in names}

    def send(self, layers: Sequence[int], groups: Groups, to: int) -> None:
        """Send the state of some layers to a rank of the next view, one message per layer."""
        mode = self._common
        send_tensors(groups, to, [layer_tensors_of(self._session, self._layers[layer], {}, mode) for layer in layers])

    def keep(self, layers: Collection[int], memory: LayersInMemory, *, is_common: bool = False) -> None:
        """Add the state of some layers, not copied, in place of what was received with other layers.

        is_common: what replicas have in common alone, and of that only what was not received: with the parts of others.
        Layers that this rank does not hold are left out then.
        """
        mode = self._common if is_common else self._mode
        for layer in layers:
            if not is_common:
                memory.add(layer_tensors_of(self._session, self._layers[layer], {}, mode))
            elif layer in self._layers:
                memory.add_missing(layer_tensors_of(self._session, self._layers[layer], {}, mode))

    @property
    def _common(self) -> WeightState:
        """The state of the mode that its replicas have in common."""
        table, is_same = self._session.job.plugins.mode.states, self._replicas == self._session.peers.size
        common = [state.name for state in table if state.is_common and (is_same or state.merge != "reset")]
        return {name: by_key for name, by_key in self._mode.items() if name in common}


def layer_tensors_of(
    session: Session, layer: LoadedLayer, global_weights: Mapping[str, Tensor], mode: WeightState
) -> dict[str, Tensor]:
    """Return the trained state of a layer, not copied: fp32 weights, optimizer state, and state of the mode.

    Weights are all that the layer uses, also those that are stored with an earlier layer: global ones where they are
    given, else the master weights. Of weights that replicas divide, the parts that this rank owns.
    """
    used = [weight for weight in session.weights if weight.key in layer.spec.parameters]
    own = session.owned.of(used)
    weights = {weight.key: global_weights.get(weight.key, weight.master).detach() for weight in own}
    tensors = {f"{WEIGHT}{SEPARATOR}{key}": tensor for key, tensor in weights.items()}
    optimizer = session.owned.state_of(session.optimizer, used)
    for kind, state in ((OPTIMIZER, optimizer), (MODE, part_of(mode, weights.keys()))):
        for name, by_key in state.items():
            tensors |= {f"{kind}{SEPARATOR}{name}{SEPARATOR}{key}": tensor for key, tensor in by_key.items()}
    return tensors


def send_tensors(groups: Groups, to: int, layers: Sequence[Mapping[str, Tensor]]) -> None:
    """Send the tensors of some layers to a rank, one message per layer. Those that several share travel once."""
    _send(groups, to, struct.pack("<q", len(layers)))
    sent: set[str] = set()
    for tensors in layers:
        payload = save({name: tensor.cpu().contiguous() for name, tensor in tensors.items() if name not in sent})
        _send(groups, to, struct.pack("<q", len(payload)))
        _send(groups, to, payload)
        sent |= tensors.keys()


def receive_layers(groups: Groups, sender: int, memory: LayersInMemory) -> int:
    """Receive what a rank sends by `HeldLayers.send`; return the number of bytes."""
    (number,) = struct.unpack("<q", _receive(groups, sender, 8))
    nbytes = 0
    for _ in range(number):
        (length,) = struct.unpack("<q", _receive(groups, sender, 8))
        tensors = load(_receive(groups, sender, length))
        memory.add(tensors)
        nbytes += sum(tensor.nbytes for tensor in tensors.values())
    return nbytes


def align_domain(session: Session, key: str = "", *, is_whole: bool = True) -> None:
    """Let the members of each domain have equal state: that of the first of them that has kept its own.

    Of a former domain whose members act apart now, the first keeps its residuals, so that each counts once. All ranks
    call it together, with syncs that have no exchange under way. key: `Peers.state_key` of the state of this rank,
    before; empty if it has not kept its own. is_whole: whether it has kept that of all its layers.
    """
    job, groups, peers, table = session.job, session.groups, session.peers, session.job.plugins.mode.states
    if not job.domain or job.config.dp.shard != "none":  # members that divide their state have different parts
        return
    ranks, me = peers.group.ranks, groups.world.rank()
    text = json.dumps([key, is_whole])
    texts = groups.all_gather_text("comparing replicas of a domain", text, timeout_s=groups.timeout_s)
    keys, are_whole = zip(*map(json.loads, texts), strict=True)
    members = [ranks[member] for member in peers.members]
    kept = [rank for rank in members if keys[rank]]
    source = next((rank for rank in kept if are_whole[rank]), (kept or members)[0])
    of_source = [rank for rank in ranks if keys[rank] and keys[rank] == keys[source]]
    is_equal = {*members} <= {*of_source} and all(are_whole[rank] for rank in members)
    is_extra = bool(of_source) and of_source[0] not in members
    has_equal_start = not kept and job.plugins.mode.exchanges == "gradients"
    if peers.is_observer or has_equal_start or ((is_equal or len(members) == 1) and not is_extra):
        return
    states = [stage.sync.take_state() for stage in session.stages.values()]
    added = {state.name for state in table if state.merge in ("share", "sum")} if is_extra else set()
    states = [{name: by_key for name, by_key in state.items() if name not in added} for state in states]
    if not is_equal and me == source:
        mode = {
            name: {key: x for each in states for key, x in each.get(name, {}).items()} for name in set().union(*states)
        }
        tensors = [layer_tensors_of(session, layer, {}, mode) for layer in session.layers]
        for rank in members:
            if rank != source:
                send_tensors(groups, rank, tensors)
    elif not is_equal:
        memory = LayersInMemory()
        receive_layers(groups, source, memory)
        states = memory.replace(session)
    restart_syncs(session, ReplicaPlace(peers.replica, peers.size), states)


def state_bytes(session: Session, layers: Collection[int]) -> int:
    """Return the size of the state of some layers of a session, bytes, without that of the mode."""
    own = [layer_tensors_of(session, layer, {}, {}) for layer in session.layers if layer.spec.index in layers]
    return sum(tensor.nbytes for tensors in own for tensor in tensors.values())


def layer_message(session: Session, layer: LoadedLayer, *, rounds_moments: bool = False) -> bytes:
    """Return a copy of what `layer_tensors_of` returns, as one message: global weights if the mode has some, and what
    its replicas have in common.

    rounds_moments: whether the state of the optimizer is rounded, so that compression halves the message.

    Trained weights that several layers of the session use are in the message of the first one only: they change.
    """
    earlier = {weight.key for weight in session.weights} - {weight.key for weight in layer.weights}
    tensors = layer_tensors_of(session, layer, *_common_state(session))
    own = {name: tensor for name, tensor in tensors.items() if name.rpartition(SEPARATOR)[2] not in earlier}
    if rounds_moments:
        own |= {name: rounded(tensor) for name, tensor in own.items() if name.startswith(OPTIMIZER) and tensor.dim()}
    return save({name: tensor.cpu().contiguous() for name, tensor in own.items()})


def rounded(x: Tensor) -> Tensor:
    """Return fp32 numbers, rounded to 1 + ROUNDED_BITS significant bits; the exponent is kept."""
    dropped = 23 - ROUNDED_BITS
    return (x.float().view(torch.int32) + (1 << (dropped - 1)) >> dropped << dropped).view(torch.float32)


def _common_state(session: Session) -> tuple[dict[str, Tensor], WeightState]:
    """Return the global weights where they differ from the masters, and the state that replicas have in common."""
    weights, common, mode = dict[str, Tensor](), dict[str, dict[str, Tensor]](), session.job.plugins.mode
    if mode.exchanges == "updates" and not session.peers.is_single:
        names = {state.name for state in mode.states if state.is_common}
        for stage in session.stages.values():
            weights |= stage.sync.global_weights() or {}
            for name, by_key in stage.sync.state_dict().items():
                if name in names:
                    common.setdefault(name, {}).update(by_key)
    return weights, common


def measure_link(groups: Groups, to: int, nbytes: int) -> float:
    """Return the estimated time to send `nbytes` to a rank that calls `answer_link`, seconds.

    Measures the round trips of empty messages and of messages of PROBE_BYTES. The fastest of each kind counts, since a
    rank that waits for a core answers late. The estimate is one empty round trip, plus the rest in proportion to
    `nbytes`.
    """
    probe = bytes(min(nbytes, PROBE_BYTES))
    _round_trip_s(groups, to, b"")  # it is ready
    trip_s, probe_s = (_fastest_trip_s(groups, to, payload) for payload in (b"", probe))
    _send(groups, to, struct.pack("<q", END_OF_PROBES))
    return trip_s + max(0.0, probe_s - trip_s) * nbytes / max(1, len(probe))


def answer_link(groups: Groups, sender: int) -> None:
    """Answer the messages of `measure_link` until it ends."""
    while (length := struct.unpack("<q", _receive(groups, sender, 8))[0]) != END_OF_PROBES:
        if length:
            _receive(groups, sender, length)
        _send(groups, sender, b"\0")


def _fastest_trip_s(groups: Groups, to: int, payload: bytes) -> float:
    """Return the shortest of several round trips of a message, seconds."""
    trips_s = [_round_trip_s(groups, to, payload)]
    while len(trips_s) < MAX_PROBES and sum(trips_s) < PROBES_S:
        trips_s.append(_round_trip_s(groups, to, payload))
    return min(trips_s)


def _round_trip_s(groups: Groups, to: int, payload: bytes) -> float:
    """Send a message; return the time until its answer arrives, seconds."""
    started = time.perf_counter()
    _send(groups, to, struct.pack("<q", len(payload)))
    if payload:
        _send(groups, to, payload)
    _receive(groups, to, 1)
    return time.perf_counter() - started


def _send(groups: Groups, to: int, payload: bytes) -> None:
    message = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(groups.world.device)
    groups.waits.wait(groups.world.isend(message, to, TAG))


def _receive(groups: Groups, sender: int, length: int) -> bytes:
    buffer = torch.empty(length, dtype=torch.uint8, device=groups.world.device)
    groups.waits.wait(groups.world.irecv(buffer, sender, TAG))
    return buffer.cpu().numpy().tobytes()
