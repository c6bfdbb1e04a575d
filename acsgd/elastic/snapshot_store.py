"""The snapshots that a worker has in memory, from view to view."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from acsgd.elastic.plan import CopiedLayers
from acsgd.elastic.transfer import LayersInMemory, send_tensors
from acsgd.topology import Groups


@dataclass
class Snapshot:
    """What one worker has of the snapshot of one step."""

    epoch: int
    """View in which it was taken."""
    step: int
    progress: dict[str, Any]
    """Progress of the run after `step` steps."""
    streams: tuple[dict[str, Any] | None, ...] = ()
    """As of WorkerState."""
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
