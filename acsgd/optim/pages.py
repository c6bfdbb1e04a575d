"""Memory of the system that can be given from one tensor to another, each of which stays where it is.

The kernel clears the pages that a process takes, which takes as long as three quarters of a copy. Pages that are moved
from a tensor that does not need its values any more to one of the same size keep what was in them, and are not cleared.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os

import torch

_MOVE, _TO_ADDRESS, _KEEP_RANGE = 1, 2, 4
"""Flags of Linux's mremap: MREMAP_MAYMOVE, MREMAP_FIXED and MREMAP_DONTUNMAP (Linux 5.7)."""


class Pages:
    """A buffer of its own pages, which lie in memory from the first use until `drop`."""

    def __init__(self, nbytes: int) -> None:
        self._mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError, AttributeError):  # a kernel without huge pages
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self.buffer = torch.frombuffer(self._mapping, dtype=torch.uint8)
        """uint8 [nbytes]."""

    @property
    def nbytes(self) -> int:
        """Size of the buffer, bytes."""
        return self.buffer.nbytes

    def drop(self) -> None:
        """Give the pages back to the system. The buffer is 0 then, and takes new ones where it is written."""
        self._mapping.madvise(mmap.MADV_DONTNEED)

    def move_from(self, other: Pages) -> None:
        """Take the pages of another buffer of the same size, which has none then, in place of those of this one.

        Where the system cannot move pages, the other one drops them. Raises MemoryError if it has no memory for that.
        """
        size, target = -(-self.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, self.buffer.data_ptr()
        if _mremap is not None and _mremap(other.buffer.data_ptr(), size, size, _FLAGS, target) == target:
            return
        # any other error may come after the system has removed the buffer from the memory of this process
        if _mremap is not None and ctypes.get_errno() not in _UNSUPPORTED:
            raise MemoryError(f"{size} bytes cannot be moved: {os.strerror(ctypes.get_errno())}")
        other.drop()


class PagePool:
    """Buffers that are not in use but keep their pages, which the next ones of the same size take.

    As many bytes are dropped as new ones are taken. So there are never more, in use or not, than once were in use.
    """

    def __init__(self) -> None:
        self._kept: list[Pages] = []
        """In the order in which they were given."""

    def take(self, pages: Pages) -> None:
        """Begin to use a buffer, whose values are not defined."""
        if pages in self._kept:
            self._kept.remove(pages)
            return
        if other := next((each for each in self._kept if each.nbytes == pages.nbytes), None):
            self._kept.remove(other)
            pages.move_from(other)
            return
        excess = pages.nbytes
        while self._kept and excess > 0:
            dropped = self._kept.pop(0)
            dropped.drop()
            excess -= dropped.nbytes

    def give(self, pages: Pages) -> None:
        """End the use of a buffer."""
        self._kept.append(pages)

    def drop(self) -> None:
        """Give the pages of buffers that are not in use back to the system."""
        while self._kept:
            self._kept.pop().drop()


_FLAGS = _MOVE | _TO_ADDRESS | _KEEP_RANGE
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EPERM)
"""Errors of systems that do not know these flags, or do not allow the call."""
_mremap = getattr(ctypes.CDLL(None, use_errno=True), "mremap", None)
if _mremap is not None:
    _mremap.restype = ctypes.c_void_p
    _mremap.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
