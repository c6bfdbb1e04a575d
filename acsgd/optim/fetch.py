"""Parameters that have values only while a layer uses them, and are fetched from where they lie between uses.

Between uses they lie in host memory or in the files of the model (model.offload), as in ZeRO-Infinity (Rajbhandari et
al. 2021, arXiv:2104.07857), or in parts on the replicas (dp.shard=weights, `acsgd.dp.exchange.layer_gather`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from acsgd.comm.waits import Meter
from acsgd.errors import RunError, WaitInterruptedError
from acsgd.layers.description import LayerSpec
from acsgd.layers.quantize import is_quantized
from acsgd.optim.ownership import OwnedWeights
from acsgd.optim.pages import PagePool, Pages
from acsgd.shards.weights import Weight
from acsgd.shards.writer import OpenTensor
from acsgd.streams import DONE, StreamEvent, Streams


class FetchedParam:
    """A parameter of the model that has its values while it is used, and is else a stand-in without memory.

    Autograd keeps views of the values for backward. Their storage is freed after each use, and has the same values
    again in the next one, before backward reads them.
    """

    def __init__(self, key: str, param: nn.Parameter, pool: PagePool) -> None:
        """param: has its values, until the first `release`. pool: of the pages of parameters on a CPU."""
        self.key = key
        self._pool = pool
        self.values = param.data.contiguous()
        """Of the shape of the parameter; without memory while they are not allocated."""
        self._pages: Pages | None = None
        """Memory of its own on a CPU: malloc does not reuse aligned blocks that were freed among others."""
        if self.values.device.type == "cpu" and self.values.nbytes and not is_quantized(param):
            self._pages = Pages(self.values.nbytes)
            pool.take(self._pages)
            values = self._pages.buffer.view(self.values.dtype).view(self.values.shape)
            self.values = values.copy_(self.values)
        self.uses = 0
        """Number of groups of layers that use it now or next. Without any it has no values."""
        self.param = param
        self._nbytes = self.values.nbytes
        missing = float("nan") if self.values.is_floating_point() else 0
        self._stand_in = self.values.new_full((), missing).expand(self.values.shape)

    def allocate(self) -> None:
        """Allocate the values, which are not defined yet."""
        if self._pages is None:
            self.values.untyped_storage().resize_(self._nbytes)
        else:
            self._pool.take(self._pages)

    def set_values(self) -> None:
        """Give the parameter its values, which are fetched."""
        self.param.data = self.values

    def hide_values(self) -> None:
        """Take the values from the parameter. It is a stand-in until `set_values`."""
        self.param.data = self._stand_in

    def release(self) -> None:
        """Take the values from the parameter, and free them."""
        self.hide_values()
        self.free()

    def free(self) -> None:
        """Free the values, which the parameter does not have any more."""
        if self._pages is None:
            self.values.untyped_storage().resize_(0)
        else:
            self._pool.give(self._pages)


class ParamSource:
    """Where parameters lie between uses. Takes those of each layer as soon as it is loaded.

    owned: what this replica owns of the trained weights. keys: the parameters that are fetched.
    """

    is_collective = False
    """Whether all replicas fetch together, in the same order."""

    def __init__(self, owned: OwnedWeights, keys: frozenset[str]) -> None:
        self.owned = owned
        self._keys = keys
        self._by_key: dict[str, FetchedParam] = {}
        self._pool = PagePool()

    def add(self, spec: LayerSpec, weights: Sequence[Weight], model: nn.Module) -> None:
        """Take the parameters of a layer of a model, in place, but for those that are on the meta device still.

        weights: the trained ones that no layer before has.
        """
        trained = {weight.key: weight for weight in weights}
        new = [key for key in spec.parameters if key in self._keys and key not in self._by_key]
        loaded = {key: each for key in new if not (each := model.get_parameter(key)).is_meta}
        params = {key: FetchedParam(key, each, self._pool) for key, each in loaded.items()}
        for key, param in params.items():
            if key in trained:
                trained[key] = self.keep_trained(param, trained[key])
            else:
                self.keep(param)
        self.owned.add(trained.values())
        for param in params.values():
            param.release()
        self._by_key |= params

    def fetches_for(self, layers: Iterable[LayerSpec]) -> bool:
        """Return whether some layers use parameters that are fetched."""
        return any(not self._keys.isdisjoint(layer.parameters) for layer in layers)

    def of(self, layers: Sequence[LayerSpec]) -> list[FetchedParam]:
        """Return the fetched parameters that some layers use, each once."""
        keys = dict.fromkeys(key for layer in layers for key in layer.parameters)
        return [self._by_key[key] for key in keys if key in self._by_key]

    def keep(self, param: FetchedParam) -> None:
        """Keep the values of a frozen parameter between its uses."""
        raise NotImplementedError

    def keep_trained(self, param: FetchedParam, weight: Weight) -> Weight:
        """Keep the values of a trained weight between its uses. Returns the weight that is stepped in its place."""
        raise NotImplementedError

    def start(self, params: Sequence[FetchedParam], meter: Meter) -> Callable[[], None]:
        """Start to fetch the values of parameters, which are allocated. Returns what waits until work may use them.

        meter: of messages to other replicas.
        """
        raise NotImplementedError

    def allocate(self, params: Sequence[FetchedParam]) -> None:
        """Allocate the values of parameters, before they are fetched."""
        for param in params:
            param.allocate()

    def release(self, params: Sequence[FetchedParam]) -> None:
        """Free the values of parameters."""
        for param in params:
            param.release()

    def drop(self) -> None:
        """Give memory back to the system that is kept for the next parameters."""
        self._pool.drop()

    def close(self) -> None:
        """End threads, and let go of files and copies."""


class HostParams(ParamSource):
    """Parameters that lie in host memory, pinned, and are copied to the device on the side stream.

    Trained ones, whose masters must be in host memory, are updated there.
    """

    def __init__(self, owned: OwnedWeights, keys: frozenset[str], streams: Streams) -> None:
        super().__init__(owned, keys)
        self._streams = streams
        self._kept: dict[str, nn.Parameter] = {}
        """Parameters that have the values. The data of trained ones may be replaced, as by replicas with local weights.
        """

    @torch.no_grad()
    def keep(self, param: FetchedParam) -> None:
        values = param.values
        copy = self._streams.host_buffer(values.nbytes).view(values.dtype).view(values.shape)
        self._kept[param.key] = nn.Parameter(copy.copy_(values), requires_grad=False)

    def keep_trained(self, param: FetchedParam, weight: Weight) -> Weight:
        self.keep(param)
        copy, kept = self._kept[param.key].data, weight.master
        if copy.dtype == kept.dtype:
            kept.data = copy
        else:
            kept = nn.Parameter(copy)
        self._kept[param.key] = kept
        return weight._replace(param=kept)

    def start(self, params: Sequence[FetchedParam], meter: Meter) -> Callable[[], None]:
        with self._streams.side_stream(), torch.no_grad():
            for param in params:
                param.values.copy_(self._kept[param.key], non_blocking=True)
            return partial(self._streams.wait_for, self._streams.record_event())

    def close(self) -> None:
        self._kept.clear()


class _HostBuffer(NamedTuple):
    """A buffer in host memory from which parameters are copied to the device."""

    content: Tensor
    """uint8 [n]."""
    copied: StreamEvent
    """Event after which the device has copied it."""

    def as_values(self, param: FetchedParam) -> Tensor:
        """Return the buffer with the shape and dtype of a parameter."""
        return self.content.view(param.values.dtype).view(param.values.shape)


class FileParams(ParamSource):
    """Frozen parameters that a thread reads from the files of the model, each time that they are used.

    On a CPU to where they are used, for a GPU to pinned buffers. find: returns where a parameter is stored.
    """

    def __init__(
        self, owned: OwnedWeights, keys: frozenset[str], find: Callable[[str], OpenTensor], streams: Streams
    ) -> None:
        super().__init__(owned, keys)
        self._find = find
        self._streams = streams
        self._stored: dict[str, OpenTensor] = {}
        self._thread = ThreadPoolExecutor(1, "parameters")
        self._free: dict[int, list[_HostBuffer]] = {}
        """Buffers by size, bytes, that the next group may use."""
        self._copied: list[_HostBuffer] = []
        """Those of the last group that is copied to the device, which the one after the next may use."""

    def keep(self, param: FetchedParam) -> None:
        self._stored[param.key] = self._find(param.key)

    def start(self, params: Sequence[FetchedParam], meter: Meter) -> Callable[[], None]:
        if self._streams.device.type == "cpu":
            return self._thread.submit(self._read_in_place, params).result
        buffers = [self._buffer(param.values.nbytes) for param in params]
        return partial(self._copy, params, buffers, self._thread.submit(self._read, params, buffers))

    @torch.no_grad()
    def _copy(self, params: Sequence[FetchedParam], buffers: Sequence[_HostBuffer], read: Future[None]) -> None:
        """Start to copy parameters to the device, once they are read."""
        read.result()
        for param, buffer in zip(params, buffers, strict=True):
            param.values.copy_(buffer.as_values(param), non_blocking=True)
        event, former = self._streams.record_event(), self._copied
        self._copied = [buffer._replace(copied=event) for buffer in buffers]
        if event.query():
            former, self._copied = [*former, *self._copied], []
        for buffer in former:
            self._free.setdefault(buffer.content.nbytes, []).append(buffer)

    def _read(self, params: Sequence[FetchedParam], buffers: Sequence[_HostBuffer]) -> None:
        """Read parameters into buffers, once the device has copied what is there. Runs in the thread."""
        for param, buffer in zip(params, buffers, strict=True):
            if not buffer.copied.query():
                buffer.copied.synchronize()
            self._stored[param.key].read_into(buffer.as_values(param))

    # On a CPU, the thread that reads also takes and gives back the memory, in the order of the calls.

    def _read_in_place(self, params: Sequence[FetchedParam]) -> None:
        super().allocate(params)
        self._read(params, [_HostBuffer(param.values, DONE) for param in params])

    def allocate(self, params: Sequence[FetchedParam]) -> None:
        if self._streams.device.type != "cpu":
            super().allocate(params)

    def release(self, params: Sequence[FetchedParam]) -> None:
        if self._streams.device.type != "cpu":
            super().release(params)
            return
        for param in params:
            param.hide_values()
        self._thread.submit(_free, params)

    def drop(self) -> None:
        self._thread.submit(super().drop)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._stored.clear()

    def _buffer(self, nbytes: int) -> _HostBuffer:
        free = self._free.get(nbytes)
        return free.pop() if free else _HostBuffer(self._streams.host_buffer(nbytes), DONE)


def _free(params: Sequence[FetchedParam]) -> None:
    for param in params:
        param.free()


class LayerFetch:
    """Fetches the parameters of groups of layers, each group before it runs and the next one behind it.

    groups: the layers of each; a parameter may be in several. The source must have all parameters of these layers
    before the first fetch.
    """

    def __init__(self, groups: Sequence[Sequence[LayerSpec]], source: ParamSource, meter: Meter) -> None:
        self.is_collective = source.is_collective
        """Whether all replicas fetch together. Gradients are then complete once their first layer's backward ends."""
        self.source = source
        """Where the parameters lie between uses."""
        self._layers = groups
        self._meter = meter
        self._pending: dict[int, Callable[[], None]] = {}
        """What waits for the groups that are fetched ahead."""
        self._entered: list[int] = []
        """The groups that have their parameters, or wait for them."""

    @functools.cached_property
    def groups(self) -> Sequence[Sequence[FetchedParam]]:
        """The parameters of each group."""
        return [self.source.of(layers) for layers in self._layers]

    @functools.cached_property
    def keys(self) -> frozenset[str]:
        """Keys of the parameters."""
        return frozenset(param.key for group in self.groups for param in group)

    @property
    def is_idle(self) -> bool:
        """Whether no group is fetched ahead: its values would be old after the next update."""
        return not self._pending

    @contextlib.contextmanager
    def whole(self, group: int) -> Iterator[None]:
        """Context in which the parameters of a group have their values, and those of the next are on their way."""
        self.enter(group, group + 1)
        try:
            yield
        finally:
            self.leave(group)

    def enter(self, group: int, ahead: int) -> None:
        """Wait for the parameters of a group, and start to fetch those of the group `ahead`, if there is one."""
        self._start(group)
        self._entered.append(group)
        self._pending.pop(group)()
        if 0 <= ahead < len(self._layers):
            self._start(ahead)
        for param in self.groups[group]:
            param.set_values()

    def leave(self, group: int) -> None:
        """Free the parameters of a group that no other group uses now or next."""
        self._entered.remove(group)
        self._free(group)

    def reset(self, meter: Meter) -> None:
        """Free the parameters of all groups after an interrupted step. meter: of later messages."""
        for finish in self._pending.values():
            with contextlib.suppress(RunError, WaitInterruptedError, CancelledError):  # from replicas that have ended
                finish()
        self._meter = meter
        for group in [*self._pending, *self._entered]:
            self._free(group)
        self._pending.clear()
        self._entered.clear()
        self.source.drop()

    def _free(self, group: int) -> None:
        for param in self.groups[group]:
            param.uses -= 1
        self.source.release([param for param in self.groups[group] if not param.uses])

    @contextlib.contextmanager
    def unmetered(self) -> Iterator[None]:
        """Context whose messages are not counted."""
        meter, self._meter = self._meter, Meter()
        try:
            yield
        finally:
            self._meter = meter

    def close(self) -> None:
        """End the threads that fetch, and let go of where the parameters lie."""
        self.source.close()

    def _start(self, group: int) -> None:
        """Start to fetch the parameters of a group that have no values, unless it is started."""
        if group in self._pending:
            return
        missing = [param for param in self.groups[group] if not param.uses]
        self.source.allocate(missing)
        self._pending[group] = self.source.start(missing, self._meter)
        for param in self.groups[group]:
            param.uses += 1
