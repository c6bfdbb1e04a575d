"""A transport with the semantics of NCCL on the CPU.

Each communicator performs its operations one after another, in the order of issue, without tags; a send lasts until the
receive that matches it; an abort ends all operations; a rank that ends leaves the others waiting, with an error that
only `get_error` reports. Random delays, by a
seed, let operations of different communicators run in any order.
"""

from __future__ import annotations

import contextlib
import queue
import random
import socket
import struct
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ErrorType

from acsgd.comm.communicators import OrderedTransport

MAX_DELAY_S = 0.0005
_LENGTH = struct.Struct("<q")
_RECEIVED = b"\1"


class OrderedWork:
    """Handle of an operation."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._error: str | None = None

    def wait(self) -> bool:
        """Block until the operation has ended. Raises RuntimeError if it was aborted."""
        self._ended.wait()
        if self._error is not None:
            raise RuntimeError(self._error)
        return True

    def is_completed(self, within_s: float = 0.0) -> bool:
        """Wait for at most some seconds; return whether the operation has ended."""
        return self._ended.wait(within_s)

    def end(self, error: str | None = None) -> None:
        """Let the operation end, once."""
        if not self._ended.is_set():
            self._error = error
            self._ended.set()


class OrderedBackend:
    """A communicator; see the module. delay: returns the time to wait before the next operation, seconds."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, delay: Callable[[], float]) -> None:
        self._rank, self._size, self._delay = rank, size, delay
        self._to, self._from = _connect(store, rank, size, timeout)
        self._operations: queue.SimpleQueue[tuple[Callable[[], None], OrderedWork] | None] = queue.SimpleQueue()
        self._issued: list[OrderedWork] = []
        self.is_aborted = self._has_failed = False
        threading.Thread(target=self._run, name="ordered transport", daemon=True).start()

    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> OrderedWork:  # noqa: N803
        return self._issue(partial(self._send, _values(tensors[0]), dstRank))

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> OrderedWork:  # noqa: N803
        return self._issue(partial(self._receive, _values(tensors[0]), srcRank))

    def allreduce(self, tensors: list[Tensor]) -> OrderedWork:
        return self._issue(partial(self._all_reduce, _values(tensors[0])))

    def alltoall(self, output_tensor: list[Tensor], input_tensor: list[Tensor]) -> OrderedWork:
        return self._issue(partial(self._all_to_all, [*map(_values, output_tensor)], [*map(_values, input_tensor)]))

    def get_error(self) -> ErrorType:
        return ErrorType.COMM_ERROR if self._has_failed else ErrorType.SUCCESS

    def abort(self) -> None:
        self.is_aborted = True
        for work in self._issued:
            work.end("the communicator was aborted")
        self.shutdown()

    def shutdown(self) -> None:
        self._operations.put(None)
        for connection in (*self._to.values(), *self._from.values()):
            with contextlib.suppress(OSError):  # the other end has gone
                connection.shutdown(socket.SHUT_RDWR)

    def _issue(self, run: Callable[[], None]) -> OrderedWork:
        work = OrderedWork()
        self._issued = [*(each for each in self._issued if not each.is_completed()), work]
        if self.is_aborted:
            work.end("the communicator was aborted")
        self._operations.put((run, work))
        return work

    def _run(self) -> None:
        while (operation := self._operations.get()) is not None:
            run, work = operation
            time.sleep(self._delay())
            try:
                run()
            except (OSError, EOFError):  # the other end has gone: hang until an abort, as NCCL does
                self._has_failed = True
                return
            except RuntimeError as error:
                work.end(str(error))
            work.end()

    def _send(self, tensor: Tensor, peer: int) -> None:
        data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        self._to[peer].sendall(_LENGTH.pack(len(data)) + data)
        _read(self._to[peer], 1)

    def _receive(self, buffer: Tensor, peer: int) -> None:
        (length,) = _LENGTH.unpack(_read(self._from[peer], _LENGTH.size))
        data = _read(self._from[peer], length)
        self._from[peer].sendall(_RECEIVED)
        if length != buffer.nbytes:
            raise RuntimeError(f"a message of {length} bytes came for a receive of {buffer.nbytes}")
        buffer.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def _all_to_all(self, received: list[Tensor], sent: list[Tensor]) -> None:
        """Send and receive in the order of senders; what is empty is not sent."""
        for sender in range(self._size):
            for receiver in range(self._size):
                if sender == self._rank and len(sent[receiver]):
                    self._send(sent[receiver], receiver)
                elif receiver == self._rank and len(received[sender]):
                    self._receive(received[sender], sender)

    def _all_reduce(self, tensor: Tensor) -> None:
        """Sum in the order of ranks."""
        parts = {self._rank: tensor.clone()}
        for sender in range(self._size):
            if sender == self._rank:
                for peer in self._to:
                    self._send(parts[sender], peer)
            else:
                parts[sender] = torch.empty_like(tensor)
                self._receive(parts[sender], sender)
        tensor.copy_(parts[0])
        for rank in range(1, self._size):
            tensor.add_(parts[rank])


def ordered_transport(seed: int = 0) -> OrderedTransport:
    """Return the transport of a rank, which delays its operations by a seed."""
    draw = random.Random(seed)

    def open_backend(store: dist.Store, rank: int, size: int, timeout: timedelta) -> OrderedBackend:
        return OrderedBackend(store, rank, size, timeout, lambda: draw.random() * MAX_DELAY_S)

    return OrderedTransport("ordered", open_backend)


class OrderedProcessGroup(dist.ProcessGroup):
    """A group of torch.distributed whose backend is a communicator."""

    def __init__(self, backend: OrderedBackend, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._backend = backend

    def _get_backend(self, device: torch.device) -> OrderedBackend:  # type: ignore[override]
        return self._backend


def register_ordered_transport(seed: int = 0) -> str:
    """Make the transport of this rank a backend of torch.distributed; return its name."""
    transport = ordered_transport(seed)

    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> OrderedProcessGroup:
        return OrderedProcessGroup(transport.open(store, rank, size, timeout), rank, size)

    dist.Backend.register_backend(transport.name, create, devices=["cpu"])
    return transport.name


def _values(tensor: Tensor) -> Tensor:
    """Return a tensor, or the values of one of the stand-in device, which share its memory."""
    held: Tensor = getattr(tensor, "held", tensor)
    return held


Connections = dict[int, socket.socket]


def _connect(store: dist.Store, rank: int, size: int, timeout: timedelta) -> tuple[Connections, Connections]:
    """Return the connections to all other ranks, and those from them: one per direction."""
    others = [other for other in range(size) if other != rank]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")  # Linux chooses an abstract address
        listener.listen(size)
        store.set(f"ordered/{rank}", listener.getsockname())
        to, came = Connections(), Connections()
        for other in others:
            to[other] = socket.socket(socket.AF_UNIX)
            store.wait([f"ordered/{other}"], timeout)
            to[other].connect(bytes(store.get(f"ordered/{other}")))
            to[other].sendall(bytes([rank]))
        for _ in others:
            connection, _ = listener.accept()
            came[_read(connection, 1)[0]] = connection
    return to, came


def _read(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
