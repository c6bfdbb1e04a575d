"""How much the ends of links remember, and where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from acsgd.pp.wire.cache import Memory, RamStore
from acsgd.pp.wire.cache_disk import DiskStore
from acsgd.pp.wire.coder import TensorSpec
from acsgd.pp.wire.delta import Delta
from acsgd.streams import Streams


@dataclass(frozen=True)
class MemoryPlan:
    """What the memories of one replica's links have in common."""

    capacity: int
    """How many sequences each of them remembers."""
    directory: Path
    """Of the files of this replica, where they are on disk."""
    cuts: Sequence[str]
    """By boundary, the first layer after it: one that has moved to another layer starts with another file."""
    kept: Mapping[str, Any]
    """What the entries of a file must be of to be gone on with."""
    fresh: bool
    """Whether the run begins, so that no file is gone on with."""
    note: str = ""
    """How much that is, in words."""

    def open(self, boundary: int, name: str, delta: Delta, spec: TensorSpec, streams: Streams) -> Memory:
        """Return the memory of one tensor at one end of a boundary; name: tells it from all others there.

        Raises RunError if its file cannot be written.
        """
        nbytes = delta.entry_bytes(spec)
        if delta.memory == "ram":
            return Memory(self.capacity, RamStore(nbytes, streams))
        kept = {**self.kept, "tensor": repr(spec), "memory_bits": delta.memory_bits}
        path = self.directory / f"{self.cuts[boundary]}.{name}"
        return Memory(self.capacity, DiskStore(path, nbytes, kept, streams, fresh=self.fresh))


def plan_capacity(delta: Delta, specs: Sequence[TensorSpec], *, sequences: int, at_once: int) -> int:
    """Return how many of `sequences` one end of a link is to remember; at_once: of one step.

    Raises ValueError if memory_gib has no room for those of one step.
    """
    nbytes = sum(map(delta.entry_bytes, specs))
    if not delta.memory_gib:
        return sequences
    capacity = int(delta.memory_gib * 2**30) // nbytes
    if capacity < min(at_once, sequences):
        raise ValueError(
            f"memory_gib={delta.memory_gib:g} has room for {capacity} sequences of {nbytes} bytes, but one step has "
            f"{at_once}; give memory_gib={1.1 * at_once * nbytes / 2**30:.2g} or more, fewer memory_bits, or a smaller "
            "data.batch"
        )
    return min(capacity, sequences)
