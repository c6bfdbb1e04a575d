"""A device whose tensors lie apart from those of the host, computed by the CPU, and the waits of the host for it.

Its results are those of the CPU, bit for bit. An operation that mixes tensors of the device and the host raises, as on
a GPU; one that would make the host wait for a GPU is counted. Torch allows one such device per process: use it in a
process of its own.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from acsgd.layers.stand_ins import LookupTable
from acsgd.shards import plan
from acsgd.streams import Streams

HOST = torch.device("cpu")
_READ_VALUES = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim"}
_READ_VALUES |= {"unique_consecutive", "bincount", "_nested_tensor_from_mask", "_linalg_eigh"}
"""Operations whose result, or its shape, depends on values."""
_BY_INDEX = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"}
_COPIES = {"copy_", "_to_copy", "_foreach_copy_"}


class DeviceTensor(Tensor):
    """A tensor of the device. held: its values; those of a view are a view."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> DeviceTensor:
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        tensor: DeviceTensor = Tensor._make_wrapper_subclass(cls, held.size(), device="standin:0", **layout)  # type: ignore[attr-defined]
        tensor.held = held
        _note(held)
        return tensor

    @property  # type: ignore[misc]
    def data(self) -> DeviceTensor:
        return DeviceTensor(self.held.data)

    @data.setter
    def data(self, values: DeviceTensor) -> None:
        """Take other values of the same shape, of which torch keeps no strides."""
        self.held = values.held

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _DeviceTable(LookupTable, DeviceTensor):
    """A table on the device, of which a rank has some rows."""

    @staticmethod
    def __new__(cls, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> _DeviceTable:
        table: _DeviceTable = DeviceTensor.__new__(cls, torch.full((), torch.nan, dtype=dtype).expand(shape))  # type: ignore[assignment]
        return table


class StandInStreams(Streams):
    """Streams of the device, which does nothing before the host waits for it. Counts what the host waits for."""

    def __init__(self) -> None:
        _register()
        super().__init__(torch.device("standin", 0))
        self.waits = _waits
        self.buffers = 0
        """Number of host buffers allocated."""

    def live_bytes(self) -> int:
        """Return the memory of all tensors of the device."""
        with _noting:
            return sum(storage.nbytes() for storage in map(_alive, _refs.values()) if storage is not None)

    def host_buffer(self, nbytes: int) -> Tensor:
        self.buffers += 1
        return _pin(super().host_buffer(nbytes))

    def record_event(self) -> _Event:
        return _Event()


class _Event:
    """Done once the host has waited for anything later."""

    def __init__(self) -> None:
        self._number = len(_history)

    def query(self) -> bool:
        return len(_history) > self._number

    def synchronize(self) -> None:
        _wait("event")


@contextlib.contextmanager
def on_stand_in() -> Iterator[StandInStreams]:
    """Context in which runs are prepared for the device."""
    streams = StandInStreams()
    with contextlib.ExitStack() as patches:
        for patch in (
            mock.patch("torch.accelerator.current_stream", return_value=_Event()),
            mock.patch.dict(plan.FLOPS_PER_BYTE, {"standin": plan.FLOPS_PER_BYTE["cpu"]}),
            mock.patch("acsgd.run.plan.job.open_streams", return_value=streams),
            mock.patch("acsgd.shards.load.LookupTable", _DeviceTable),
            mock.patch.object(Tensor, "pin_memory", lambda tensor: _pin(tensor.clone())),
        ):
            patches.enter_context(patch)
        yield streams


_waits = Counter[str]()
_history: list[str] = []
"""All waits of this process."""
_pinned: dict[int, Tensor] = {}
"""Tensors in pinned memory, by its address."""
_refs: dict[int, StorageWeakRef] = {}
"""All storages that tensors of the device have had, some of which are freed."""
_noting = threading.Lock()
"""Held while these change: threads that send and receive make tensors, too."""
_libraries: list[torch.library.Library] = []


def _note(held: Tensor) -> None:
    """Note the storage of a tensor of the device."""
    ref = StorageWeakRef(held.untyped_storage())
    with _noting:
        _refs.setdefault(ref.cdata, ref)
        if not len(_refs) % 4096:
            for freed in [key for key, each in _refs.items() if each.expired()]:
                del _refs[freed]


def _alive(ref: StorageWeakRef) -> torch.UntypedStorage | None:
    storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
    return storage


def _pin(tensor: Tensor) -> Tensor:
    """Take the memory of a tensor of the host for pinned."""
    _pinned[tensor.untyped_storage().data_ptr()] = tensor
    return tensor


def _is_pinned(tensor: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() in _pinned


def _wait(what: str) -> None:
    _waits[what] += 1
    _history.append(what)


def _register() -> None:
    if _libraries:
        return
    _setup_privateuseone_for_python_backend("standin")
    fallback, direct = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    fallback.fallback(lambda op, *args, **kwargs: _run(op, args, kwargs), "PrivateUse1")
    aten = torch.ops.aten
    for op in (aten.copy_.default, aten._to_copy.default, aten.empty_strided.default, aten.empty.memory_format):
        name = op.name().removeprefix("aten::")  # torch.tensor calls these beneath the dispatch to Python
        direct.impl(name, lambda *args, op=op, **kwargs: _run(op, args, kwargs), "PrivateUse1")
    _libraries.extend([fallback, direct])


def _run(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the values of its arguments."""
    name, tensors = op.overloadpacket.__name__, [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    _check_devices(name, tensors, op)
    _count(name, args, kwargs)
    onto = kwargs.get("device")
    if onto is not None:
        kwargs = kwargs | {"device": HOST}
    held = tree_map_only(DeviceTensor, _held, tuple(args))
    if name == "histc" and not held[0].is_floating_point():  # of GPUs alone
        return DeviceTensor(op(held[0].float(), *held[1:], **kwargs).to(held[0].dtype))
    result = op(*held, **tree_map_only(DeviceTensor, _held, kwargs))
    known = {id(_held(tensor)): tensor for tensor in tensors}

    def place(tensor: Tensor) -> Tensor:
        if id(tensor) in known:
            return known[id(tensor)]
        is_here = torch.device(onto).type != "cpu" if onto is not None else True
        return DeviceTensor(tensor) if is_here else tensor

    return tree_map_only(Tensor, place, result)


def _held(tensor: Tensor) -> Tensor:
    return tensor.held if isinstance(tensor, DeviceTensor) else tensor


def _check_devices(name: str, tensors: Sequence[Tensor], op: Any) -> None:
    here = [isinstance(tensor, DeviceTensor) for tensor in tensors]
    elsewhere = [x for x, is_here in zip(tensors, here, strict=True) if not is_here and x.dim() and x.device == HOST]
    if any(here) and elsewhere and name not in _COPIES | _BY_INDEX:
        raise RuntimeError(f"{op} takes tensors of the device and of the host: {[tuple(x.shape) for x in elsewhere]}")


def _count(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    if name in _READ_VALUES:
        _wait(name)
    elif name in _BY_INDEX and len(args) > 1:
        indices = [x for x in args[1] if x is not None]
        fills = name in {"index_put_", "_index_put_impl_"} and args[2].numel() == 1 and len(indices) == 1
        if isinstance(args[0], DeviceTensor) and not fills:
            if any(x.dtype in (torch.bool, torch.uint8) for x in indices):
                _wait(f"{name} by a mask")
            if any(not isinstance(x, DeviceTensor) for x in indices):
                _wait(f"{name} by an index of the host")
    elif name in _COPIES:
        _count_copy(name, args, kwargs)


def _count_copy(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    is_async = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
    if name == "_to_copy":
        to_host, source = torch.device(kwargs.get("device") or args[0].device).type == "cpu", args[0]
        is_pinned = to_host or _is_pinned(source)  # torch pins what it makes of a tensor of the device
    else:
        target, source = (tree_leaves(args[place])[0] for place in (0, 1))
        to_host = not isinstance(target, DeviceTensor)
        is_pinned = _is_pinned(target if to_host else source)
        if not isinstance(source, DeviceTensor) and not source.dim():
            return  # a number of the host is an argument of the kernel
    if to_host == isinstance(source, DeviceTensor) and not (is_async and is_pinned):
        _wait("copy to the host" if to_host else "copy from the host")
