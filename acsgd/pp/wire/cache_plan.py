"""How much the ends of links remember, and where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from acsgd.pp.wire.cache import ActivationCache, HostMemoryStore
from acsgd.pp.wire.cache_disk import DiskStore
from acsgd.pp.wire.coder import TensorSpec
from acsgd.pp.wire.delta import Delta
from acsgd.streams import Streams


@dataclass(frozen=True)
class CachePlan:
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

    def open(self, boundary: int, name: str, delta: Delta, spec: TensorSpec, streams: Streams) -> ActivationCache:
        """Return the memory of one tensor at one end of a boundary; name: tells it from all others there.

        Raises RunError if its file cannot be written.
        """
        nbytes = delta.entry_bytes(spec)
        if delta.cache == "ram":
            return ActivationCache(self.capacity, HostMemoryStore(nbytes, streams))
        kept = {**self.kept, "tensor": repr(spec), "cache_bits": delta.cache_bits}
        path = self.directory / f"{self.cuts[boundary]}.{name}"
        return ActivationCache(self.capacity, DiskStore(path, nbytes, kept, streams, fresh=self.fresh))


def plan_capacity(delta: Delta, specs: Sequence[TensorSpec], *, sequences: int, at_once: int) -> int:
    """Return how many of `sequences` one end of a link is to remember; at_once: of one step.

    Raises ValueError if cache_gib has no room for those of one step.
    """
    nbytes = sum(map(delta.entry_bytes, specs))
    if not delta.cache_gib:
        return sequences
    capacity = int(delta.cache_gib * 2**30) // nbytes
    if capacity < min(at_once, sequences):
        raise ValueError(
            f"cache_gib={delta.cache_gib:g} has room for {capacity} sequences of {nbytes} bytes, but one step has "
            f"{at_once}; give cache_gib={1.1 * at_once * nbytes / 2**30:.2g} or more, fewer cache_bits, or a smaller "
            "data.batch"
        )
    return min(capacity, sequences)
