"""The snapshots that a worker has in memory: their packed layers, their lifetime over views, and their cost."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from acsgd.codecs.base import Field, Wire, pack, unpack, wire_bytes
from acsgd.elastic.membership.plan import CopiedLayers
from acsgd.elastic.state.transfer import LayersInMemory, send_tensors
from acsgd.groups import Groups
from acsgd.streams import Streams

Fields = dict[int, dict[str, Field]]
"""Dtypes and shapes of tensors, by layer and name."""


@dataclass(frozen=True)
class PackedLayers:
    """Named tensors of layers in host memory, all of them views of one buffer, uint8[n]."""

    fields: Fields
    buffer: Tensor

    @classmethod
    def copy_of(cls, layers: Mapping[int, Mapping[str, Tensor]], streams: Streams) -> PackedLayers:
        """Return a copy of the tensors of layers, which may be on any device."""
        packed = cls.empty(
            {
                layer: {name: Field(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
                for layer, tensors in layers.items()
            }
        )
        pack(tuple(tensor.detach() for tensors in layers.values() for tensor in tensors.values()), packed.buffer)
        streams.record_event().synchronize()
        return packed

    @classmethod
    def empty(cls, fields: Fields) -> PackedLayers:
        """Return tensors whose values are not set."""
        return cls(fields, torch.empty(wire_bytes(_wire(fields)), dtype=torch.uint8))

    def layers(self) -> dict[int, dict[str, Tensor]]:
        """Return the tensors by layer and name. They share memory with the buffer."""
        tensors = iter(unpack(self.buffer, _wire(self.fields)))
        return {layer: {name: next(tensors) for name in names} for layer, names in self.fields.items()}


def header_of(fields: Fields) -> bytes:
    """Return a message from which `fields_of` makes the same fields."""
    described = {
        layer: {name: [str(field.dtype).removeprefix("torch."), *field.shape] for name, field in by_name.items()}
        for layer, by_name in fields.items()
    }
    return json.dumps(described).encode()


def fields_of(header: bytes) -> Fields:
    """Return what `header_of` has put into a message."""
    return {
        int(layer): {name: Field(getattr(torch, dtype), tuple(shape)) for name, (dtype, *shape) in by_name.items()}
        for layer, by_name in json.loads(header).items()
    }


def _wire(fields: Fields) -> Wire:
    return tuple(field for by_name in fields.values() for field in by_name.values())


@dataclass
class Snapshot:
    """What one worker has of the snapshot of one step."""

    epoch: int
    """View in which it was taken."""
    step: int
    progress: dict[str, Any]
    """Progress of the run after `step` steps."""
    streams: tuple[dict[str, Any] | None, ...] = ()
    """See WorkerState."""
    layers: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """Tensors by layer, named as in the messages of `elastic.transfer`."""

    def report(self) -> CopiedLayers:
        """Return what of it the worker reports."""
        return CopiedLayers(self.epoch, self.step, tuple(sorted(self.layers)), self.progress, self.streams)

    def send(self, layers: Sequence[int], groups: Groups, to: int) -> None:
        """Send the state of some layers to a rank, as `HeldLayers.send` does."""
        send_tensors(groups, to, [self.layers[layer] for layer in layers])

    def keep(self, layers: Sequence[int], memory: LayersInMemory) -> None:
        """Add the state of some layers, not copied."""
        for layer in layers:
            memory.add(self.layers.get(layer, {}))  # a rank that joins in the background may have none


class SnapshotStore:
    """The snapshots that a worker has. It keeps them from view to view."""

    def __init__(self) -> None:
        self.by_step: dict[int, Snapshot] = {}
        self._complete: int | None = None
        """Step of the newest snapshot that all ranks have."""

    def reports(self) -> tuple[CopiedLayers, ...]:
        """Return what the worker reports of its snapshots."""
        return tuple(snapshot.report() for snapshot in list(self.by_step.values()))

    def begin(self, snapshot: Snapshot) -> None:
        """Add a snapshot; drop all but the newest complete one."""
        self._keep(lambda step: step == self._complete)
        self.by_step[snapshot.step] = snapshot

    def complete(self, step: int) -> None:
        """Note that all ranks have the snapshot of a step; drop those before."""
        self._complete = step
        self._keep(lambda each: each >= step)

    def return_to(self, step: int) -> None:
        """Drop the snapshots after a step to which the run returns."""
        self._keep(lambda each: each <= step)
        if self._complete is not None and self._complete > step:
            self._complete = max(self.by_step, default=None)

    def _keep(self, is_kept: Callable[[int], bool]) -> None:
        self.by_step = {step: snapshot for step, snapshot in self.by_step.items() if is_kept(step)}


FIRST = 8
"""Steps of a view before its first snapshot, whose cost is not known yet."""
SNAPSHOTS, STEPS = 4, 16
"""Number of snapshots, and of steps without one in progress, over which is averaged."""


class SnapshotCost:
    """Measures how much longer steps take because of snapshots. budget: share of the step time that they may take."""

    def __init__(self, budget: float) -> None:
        self._budget = budget
        self._calm_s = deque[float](maxlen=STEPS)
        """Durations of steps without a snapshot in progress."""
        self._costs_s = deque[float](maxlen=SNAPSHOTS)
        self._copy_s = self._busy_s = 0.0
        """Time of the newest snapshot in which training stood still, and by which later steps were longer."""

    @property
    def interval(self) -> int:
        """Smallest number of steps between two snapshots with which they keep the budget."""
        if not self._costs_s or not self._calm_s:
            return FIRST
        cost_s = sum(self._costs_s) / len(self._costs_s)
        return max(1, math.ceil(cost_s / (self._budget * median(self._calm_s))))

    def begin(self, copy_s: float) -> None:
        """Record the start of a snapshot. copy_s: time for which training was stopped to copy the state, seconds."""
        self._copy_s, self._busy_s = copy_s, 0.0

    def record(self, step_s: float, *, is_pending: bool, completes: bool) -> None:
        """Record the duration of a step.

        is_pending: whether a snapshot was in progress; completes: whether this is the first step since it is complete.
        """
        if is_pending:
            self._busy_s += step_s - (median(self._calm_s) if self._calm_s else step_s)
            return
        self._calm_s.append(step_s)
        if completes:
            self._costs_s.append(self._copy_s + max(0.0, self._busy_s))
