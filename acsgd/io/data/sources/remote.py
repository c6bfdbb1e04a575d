"""A file at an http or https address, read at any place without a download."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from http.client import HTTPException, HTTPResponse
from typing import TYPE_CHECKING
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from acsgd.io.data.sources.url import TIMEOUT_S

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

SKIP_BYTES = 2**20
"""Bytes that are read at a time to reach a place on a server without ranges."""


class ConnectionLostError(Exception):
    """A server does not answer, or a response ended early. Trying again may succeed."""


# fsspec has such a file, too, but it needs aiohttp, refuses servers without ranges, does not notice that the file has
# changed, requests each block on its own, and reports a server that fails as a file that does not exist.
class RemoteFile(io.RawIOBase):
    """A file of a server, readable and seekable. Bytes are requested from where they are read on, in one response.

    A server that does not serve ranges sends the whole file, of which the bytes before that place are discarded.
    Raises ConnectionLostError if the connection fails or ends early, ValueError if the server refuses the request or
    the file changed since it was opened.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._position = 0
        self._response: HTTPResponse | None = None
        self._version: str | None = None
        self._size: int | None = None
        """Bytes; None before the first request."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END and self._size is None:
            self._request()
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size or 0}[whence]
        if base + offset != self._position:
            self._drop_response()
        self._position = base + offset
        return self._position

    def readinto(self, buffer: WriteableBuffer) -> int:
        target = memoryview(buffer).cast("B")
        if self._size is not None and self._position >= self._size:
            return 0
        if self._response is None:
            self._request()
        assert self._response is not None
        assert self._size is not None
        wanted = min(len(target), self._size - self._position)
        with _connection_errors(self._address):
            count = self._response.readinto(target[:wanted])
        if not count:  # http.client reports a connection that was closed in the middle as the end
            raise ConnectionLostError(f"the response ended after {self._position} of {self._size} bytes")
        self._position += count
        return count

    def close(self) -> None:
        self._drop_response()
        super().close()

    def _drop_response(self) -> None:
        if self._response is not None:
            self._response.close()
            self._response = None

    def _request(self) -> None:
        """Request the bytes from the present position on."""
        self._drop_response()
        start = self._position
        # no compression on the way, which would change the places of bytes
        headers = {"Range": f"bytes={start}-", "Accept-Encoding": "identity"} if start else {}
        with _connection_errors(self._address):
            response = urlopen(Request(self._address, headers=headers), timeout=TIMEOUT_S)
        self._response = response
        total = re.fullmatch(r"bytes \d+-\d+/(\d+)", response.headers.get("Content-Range") or "")
        length = total[1] if total else response.headers.get("Content-Length")
        if length is None:
            raise ValueError(f"the server of {self._address} does not send its size; download it and give its path")
        version = f"{length} {response.headers.get('ETag')} {response.headers.get('Last-Modified')}"
        if self._version not in (None, version):
            raise ValueError(f"{self._address} changed while it was read; start a new run, or restore the file")
        self._version, self._size = version, int(length)
        if start and response.status != 206:
            self._discard(start)

    def _discard(self, count: int) -> None:
        assert self._response is not None
        while count:
            with _connection_errors(self._address):
                skipped = len(self._response.read(min(count, SKIP_BYTES)))
            if not skipped:
                raise ConnectionLostError(f"the response ended {count} bytes before the place to read")
            count -= skipped


@contextlib.contextmanager
def _connection_errors(address: str) -> Iterator[None]:
    """Turn the errors of a request into those of RemoteFile."""
    try:
        yield
    except (OSError, HTTPException) as error:
        problem = getattr(error, "reason", None) or error
        if isinstance(error, HTTPError) and error.code < 500:
            raise ValueError(f"{address} cannot be read ({error.code} {problem}); check the address") from None
        raise ConnectionLostError(str(problem) or type(error).__name__) from None
