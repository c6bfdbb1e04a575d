"""Memory and processors that this process may use: all of the host, or what control groups allow, as in containers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

CGROUPS = Path("/sys/fs/cgroup")
"""Where Linux shows control groups of version 2: https://docs.kernel.org/admin-guide/cgroup-v2.html."""
OWN_CGROUP = Path("/proc/self/cgroup")


class HostMemory(NamedTuple):
    """Memory in bytes."""

    total: int
    """Of the host, or the limit of a control group, if that is less; without swap."""
    available: int
    """What new allocations can use."""
    swap: int
    """Swap, whether or not it is used."""
    is_limited: bool
    """Whether `total` is the limit of a control group."""


def host_memory() -> HostMemory:
    """Return the memory that this process may use."""
    host, swap = psutil.virtual_memory(), psutil.swap_memory().total
    total, available = host.total, host.available
    for group in _cgroups():
        limit = _number(group / "memory.max")
        if limit is not None:
            used = (_number(group / "memory.current") or 0) - _cached_bytes(group)
            total, available = min(total, limit), min(available, max(limit - used, 0))
        swap_limit = _number(group / "memory.swap.max")
        swap = swap if swap_limit is None else min(swap, swap_limit)
    return HostMemory(total, available, swap, total < host.total)


def usable_processors() -> float:
    """Return the number of processors that this process may use; a control group may allow a part of one."""
    usable: float = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for path in (group / "cpu.max" for group in _cgroups()):
        quota, period = path.read_text().split() if path.exists() else ("max", "")
        if quota != "max":
            usable = min(usable, int(quota) / int(period))
    return usable


def _cgroups() -> Iterator[Path]:
    """Yield the control groups of this process that are visible here: its own one, and those that contain it."""
    lines = OWN_CGROUP.read_text().splitlines() if OWN_CGROUP.exists() else []
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    path = CGROUPS / own
    yield from (group for group in (path, *path.parents) if group == CGROUPS or CGROUPS in group.parents)


def _cached_bytes(group: Path) -> int:
    """Return how much of the memory of a control group holds files that can be read again."""
    path = group / "memory.stat"
    fields = dict(line.split() for line in path.read_text().splitlines()) if path.exists() else {}
    return int(fields.get("inactive_file", 0))


def _number(path: Path) -> int | None:
    """Return the number in a file of a control group; None if there is no limit, or no file."""
    text = path.read_text().strip() if path.exists() else ""
    return int(text) if text.isdecimal() else None
