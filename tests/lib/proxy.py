"""A connection to a store that stops answering, as behind a cut network or while torchrun is stopped."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import torch.distributed as dist


class Proxy:
    """A TCPStore behind a TCP proxy, which forwards the answers of the store until it is told to freeze.

    limit: number of bytes of answers after which it freezes by itself.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._limit = limit
        self._forwarded = 0
        self._counting = threading.Lock()
        self._open = threading.Event()
        self._open.set()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def freeze(self) -> None:
        """Forward no answer from now on. Connections stay open."""
        self._open.clear()

    def thaw(self) -> None:
        """Forward the answers since `freeze`, and all later ones."""
        self._limit = None
        self._open.set()

    def num_keys(self) -> int:
        """Return the number of keys in the store."""
        return self._store.num_keys()

    def close(self) -> None:
        """Accept no more connections, and let those that wait end."""
        self._server.close()
        self.thaw()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                store = socket.create_connection(("127.0.0.1", self._store.port))
                threading.Thread(target=self._pump, args=(client, store, False), daemon=True).start()
                threading.Thread(target=self._pump, args=(store, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        with contextlib.suppress(OSError), source, target:
            while data := source.recv(65536):
                if is_answer:
                    self._count(len(data))
                    self._open.wait()
                target.sendall(data)

    def _count(self, size: int) -> None:
        with self._counting:
            self._forwarded += size
            if self._limit is not None and self._forwarded > self._limit:
                self._open.clear()


@contextlib.contextmanager
def proxied_store(limit: int | None = None) -> Iterator[Proxy]:
    """Start a store behind a proxy."""
    proxy = Proxy(limit)
    try:
        yield proxy
    finally:
        proxy.close()
