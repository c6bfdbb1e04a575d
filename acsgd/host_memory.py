"""Memory and processors that this process may use: all of the host, or what control groups allow, as in containers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

CGROUPS = Path("/sys/fs/cgroup")
"""Where Linux shows control groups of version 2, and of version 1 in folders by resource.

https://docs.kernel.org/admin-guide/cgroup-v2.html, https://docs.kernel.org/admin-guide/cgroup-v1/memory.html."""
OWN_CGROUP = Path("/proc/self/cgroup")
_MEMORY_FILES = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}
"""Of a control group: its limit, and what it uses; of version 2, and of version 1, whose "no limit" is above 2**62."""


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
        for file, used_file in _MEMORY_FILES.items():
            limit = _number(group / file)
            if limit is not None:
                used = (_number(group / used_file) or 0) - _cached_bytes(group)
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
    lines = OWN_CGROUP.read_text().splitlines() if OWN_CGROUP.exists() else ["0::/"]
    for number, controllers, path in (line.split(":", 2) for line in lines):
        if number == "0" or "memory" in controllers.split(","):
            own = CGROUPS / controllers / path.lstrip("/")
            yield from (group for group in (own, *own.parents) if group == CGROUPS or CGROUPS in group.parents)


def _cached_bytes(group: Path) -> int:
    """Return how much of the memory of a control group holds files that can be read again."""
    path = group / "memory.stat"
    fields = dict(line.split() for line in path.read_text().splitlines()) if path.exists() else {}
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))  # version 1 counts groups in it apart


def _number(path: Path) -> int | None:
    """Return the number in a file of a control group; None if there is no limit, or no file."""
    text = path.read_text().strip() if path.exists() else ""
    return int(text) if text.isdecimal() else None
