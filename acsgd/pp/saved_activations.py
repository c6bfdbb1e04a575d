"""Activations that wait in host memory for their backward (model.offload_activations).

What autograd saves of a group of layers is copied to pinned buffers on the side stream once the group has run forward,
and back on it while the group behind it runs backward. The side stream orders the uses of a buffer, so that the host
never waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from acsgd.streams import Streams


class _SavedStorage:
    """The storage of tensors that autograd saves, on the device or in host memory."""

    def __init__(self, values: Tensor) -> None:
        """values: of the whole storage, [n]."""
        self.values: Tensor | None = values
        self.buffer: Tensor | None = None
        self._form = len(values), values.dtype, values.device

    def allocate(self) -> Tensor:
        """Allocate values on the device, which are not defined yet."""
        size, dtype, device = self._form
        self.values = torch.empty(size, dtype=dtype, device=device)
        return self.values


class _SavedView(NamedTuple):
    """A tensor that autograd saves."""

    storage: _SavedStorage
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class SavedGroup:
    """What autograd saves of a group of layers in one forward. Each storage is copied once, whatever its views.

    kept: addresses of storages that stay on the device anyway, such as those of parameters.
    """

    def __init__(self, streams: Streams, buffers: dict[int, list[Tensor]], kept: Collection[int]) -> None:
        self._streams = streams
        self._buffers = buffers
        self._kept = kept
        self._storages: dict[int, _SavedStorage] = {}
        self._is_fetched = False
        self._event: Any = None

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Context of the forward, whose saved tensors are copied to the host at its end."""
        with saved_tensors_hooks(self._pack, self._unpack):
            yield
        self._offload()

    def fetch(self) -> None:
        """Start to copy everything back, unless it is started."""
        if self._is_fetched:
            return
        self._is_fetched, storages = True, [*self._storages.values()]
        targets = [each.allocate() for each in storages]
        with self._streams.side_stream(), torch.no_grad():
            for each, target in zip(storages, targets, strict=True):
                assert each.buffer is not None
                target.copy_(each.buffer.view(target.dtype), non_blocking=True)
                self._buffers.setdefault(each.buffer.nbytes, []).append(each.buffer)
                each.buffer = None
            self._event = self._streams.record_event()
        self._storages.clear()

    def finish_fetch(self) -> None:
        """Let later work on the current stream wait for what `fetch` copies."""
        self.fetch()
        self._streams.wait_for(self._event)

    def _offload(self) -> None:
        """Start to copy all that was saved to the host."""
        storages = [(each, each.values) for each in self._storages.values() if each.values is not None]
        with self._streams.side_stream(*(values for _, values in storages)), torch.no_grad():
            for each, values in storages:
                free = self._buffers.get(values.nbytes)
                each.buffer = free.pop() if free else self._streams.host_buffer(values.nbytes)
                each.buffer.view(values.dtype).copy_(values, non_blocking=True)
                each.values = None

    def _pack(self, tensor: Tensor) -> Tensor | _SavedView:
        address, nbytes = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        if tensor.device != self._streams.device or address in self._kept or nbytes % tensor.itemsize or not nbytes:
            return tensor
        if address not in self._storages:
            whole = tensor.detach().as_strided((nbytes // tensor.itemsize,), (1,), 0)
            self._storages[address] = _SavedStorage(whole)
        storage, offset = self._storages[address], int(tensor.storage_offset())
        return _SavedView(storage, tensor.dtype, tuple(tensor.size()), tuple(tensor.stride()), offset)

    def _unpack(self, saved: Tensor | _SavedView) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if saved.storage.values is None:
            self.finish_fetch()
        values = saved.storage.values
        assert values is not None
        values = values if values.dtype == saved.dtype else values.view(saved.dtype)
        return values.as_strided(saved.size, saved.stride, saved.offset)


class ActivationOffload:
    """Copies what autograd saves of groups of layers to host memory and back."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._buffers: dict[int, list[Tensor]] = {}
        """Host buffers that are not in use, by size, bytes."""

    def group(self, *kept: Any) -> SavedGroup:
        """Return what saves a group of layers. kept: trees with the tensors that stay on the device anyway."""
        tensors: Iterable[Any] = tree_leaves(kept)
        addresses = {x.untyped_storage().data_ptr() for x in tensors if isinstance(x, Tensor) and not x.is_meta}
        return SavedGroup(self._streams, self._buffers, addresses)


def begin_backward(groups: Sequence[SavedGroup], index: int) -> None:
    """Wait for what a group of layers has saved, and start to fetch that of the group before it."""
    groups[index].finish_fetch()
    if index:
        groups[index - 1].fetch()
