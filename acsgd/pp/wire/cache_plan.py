"""Size and place of the activation caches of one replica's links, planned before the run starts."""

from __future__ import annotations

import operator
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from acsgd.host_memory import host_memory
from acsgd.pp.wire.cache import ActivationCache, HostMemoryStore
from acsgd.pp.wire.cache_disk import DiskStore
from acsgd.pp.wire.coder import TensorSpec
from acsgd.pp.wire.delta import Delta
from acsgd.streams import Streams

CacheKey = tuple[int, str]
"""Boundary, and name of the cache there."""


@dataclass(frozen=True)
class CachePlan:
    """What the caches of one replica's links have in common."""

    capacities: Sequence[int]
    """By boundary, the number of samples per cache."""
    directory: Path
    """Directory of this replica's cache files, for cache=disk."""
    first_layers: Sequence[str]
    """By boundary, the name of the first layer after it: part of the file name, so a moved boundary has other files."""
    run_id: str
    """Identity of the run. Cache files of other runs are overwritten."""
    fresh: bool
    """Whether the run starts without a checkpoint, so that no cache file is reused."""
    note: str = ""
    """Size and place, in words."""
    kept: Mapping[CacheKey, ActivationCache] = field(default_factory=dict)
    """Caches of links that were connected before, which are used again."""

    def open(self, boundary: int, name: str, delta: Delta, spec: TensorSpec, streams: Streams) -> ActivationCache:
        """Open the cache of one tensor at one end of a boundary, unless it is kept; name: unique at this boundary.

        Raises RunError if its file cannot be written.
        """
        if (boundary, name) in self.kept:
            return self.kept[boundary, name]
        nbytes = delta.entry_bytes(spec)
        if delta.cache == "ram":
            return ActivationCache(self.capacities[boundary], HostMemoryStore(nbytes, streams))
        tensor = f"TensorSpec(shape={spec.shape}, dtype={spec.dtype})"
        identity = {"run": self.run_id, "tensor": tensor, "cache_bits": delta.cache_bits}
        path = self.directory / f"{self.first_layers[boundary]}.{name}"
        return ActivationCache(self.capacities[boundary], DiskStore(path, nbytes, identity, streams, fresh=self.fresh))


def plan_capacity(delta: Delta, entry_bytes: int, *, samples: int, per_step: int) -> int:
    """Return the number of samples that one end of a link caches.

    entry_bytes: of all cached tensors of a sample; samples: number in the data; per_step: number per step and replica.
    Raises ValueError if cache_gib is too small for one step.
    """
    if not (delta.cache_gib and entry_bytes):
        return samples
    capacity = int(delta.cache_gib * 2**30) // entry_bytes
    if capacity < min(per_step, samples):
        raise ValueError(
            f"cache_gib={delta.cache_gib:g} has room for {capacity} samples of {entry_bytes} bytes, but one step has "
            f"{per_step}; give cache_gib={1.1 * per_step * entry_bytes / 2**30:.2g} or more, fewer cache_bits, or a "
            "smaller data.batch"
        )
    return min(capacity, samples)


def check_space(delta: Delta, directory: Path, nbytes: Sequence[int], *, processes: int) -> None:
    """Raise ValueError if the caches of a rank do not fit into the free memory or disk of its host.

    directory: of the cache files of all replicas, whose present size counts as free; nbytes: of each end of a link on
    this rank; processes: ranks on this host.
    """
    ends = len(nbytes)
    if delta.cache == "ram":
        available, place = host_memory().available, "this host"
    else:
        existing = next(parent for parent in directory.absolute().parents if parent.exists())
        reused = sum(path.stat().st_blocks * 512 for path in directory.rglob("*"))
        available, place = shutil.disk_usage(existing).free + reused, str(existing)
    if sum(nbytes) > available / processes:
        raise ValueError(
            f"the activation caches of {ends} ends of links need {sum(nbytes) / 2**30:.3g} GiB, but {place} has "
            f"{available / 2**30:.3g} GiB free for {processes} processes; give "
            f"cache_gib={0.9 * available / processes / ends / 2**30:.2g}, fewer cache_bits"
            + (", or cache=disk" if delta.cache == "ram" else "")
        )


def plan_caches(
    delta: Delta,
    boundaries: Sequence[Iterable[TensorSpec]],
    *,
    samples: int,
    per_step: int,
    ends: Sequence[int],
    processes: int,
    directory: Path,
    replica: int,
    first_layers: Sequence[str],
    run_id: str,
    fresh: bool,
    are_kept: bool = False,
) -> CachePlan:
    """Plan the caches of one rank.

    boundaries: by boundary, the tensors that its ends cache; samples, per_step: see `plan_capacity`; ends: boundaries
    of which this rank has an end; processes, directory: see `check_space`; first_layers, run_id, fresh: see
    `CachePlan`; are_kept: whether this process has them already. Raises ValueError if there is no room for them.
    """
    entry_bytes = [sum(map(delta.entry_bytes, specs)) for specs in boundaries]
    capacities = [plan_capacity(delta, nbytes, samples=samples, per_step=per_step) for nbytes in entry_bytes]
    if not are_kept:
        check_space(delta, directory, [capacities[each] * entry_bytes[each] for each in ends], processes=processes)
    place = "host memory" if delta.cache == "ram" else str(directory)
    fewest, most = min(capacities), max(map(operator.mul, capacities, entry_bytes))
    rest = "" if fewest == samples else " (the others are always cache misses)"
    note = (
        f"activation cache at each end of a link: {fewest} of {samples} samples{rest}, {most / 2**20:,.1f} MiB in "
        f"{place}"
    )
    return CachePlan(capacities, directory / f"replica-{replica:05d}", first_layers, run_id, fresh, note)
