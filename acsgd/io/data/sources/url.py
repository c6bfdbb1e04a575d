"""Files on the web: downloaded when they are tokenized."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import BinaryIO, Literal
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from acsgd.io.data.sources.base import BadRecord, NamedSource, RecordCounts, SourceRecord
from acsgd.io.data.sources.files import READERS, reader_of

TIMEOUT_S = 60.0
"""Maximum time without an answer of the server, seconds."""
CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class Url(NamedSource):
    """A file at an http or https address. The end of its path says what kind of file it is."""

    @property
    def fingerprint(self) -> str:
        """Address, and what the server sends about the version of the file. Raises ValueError."""
        return f"{self.name} {self.version()}"

    def version(self) -> str:
        """Return what the server sends about the version of the file. Raises ValueError."""
        with self._open("HEAD") as response:
            return str([response.headers.get(name) for name in ("ETag", "Last-Modified", "Content-Length")])

    def check(self) -> None:
        """Raise ValueError unless the path ends as that of a file that can be read."""
        if reader_of(urlsplit(self.name).path) is None:
            endings = ", ".join(f"*{ending}" for ending in READERS)
            raise ValueError(f"{self.name} is not the address of a file that can be read, {endings}")

    def records(self, counts: RecordCounts) -> Iterator[SourceRecord | BadRecord]:
        """Download the file into a temporary directory, and yield its records."""
        path = Path(urlsplit(self.name).path)
        reader = reader_of(path.name)
        assert reader
        with tempfile.TemporaryDirectory(prefix="acsgd-") as directory:
            target = Path(directory) / path.name
            with target.open("wb") as file:
                self._download(file)
            yield from reader(target, self.name, self.key, counts)

    def _download(self, file: BinaryIO) -> None:
        with self._open("GET") as response:
            while chunk := response.read(CHUNK_BYTES):
                file.write(chunk)
            expected = response.headers.get("Content-Length")
        if expected is not None and file.tell() != int(expected):
            raise ValueError(
                f"{self.key}: {self.name} was cut off after {file.tell()} of {expected} bytes; start again"
            )

    @contextlib.contextmanager
    def _open(self, method: Literal["GET", "HEAD"]) -> Iterator[HTTPResponse]:
        """Send a request. Raises ValueError if it fails."""
        try:
            with urlopen(Request(self.name, method=method), timeout=TIMEOUT_S) as response:
                yield response
        except (URLError, HTTPException, OSError) as error:
            problem = getattr(error, "reason", None) or error
            failed = {
                "GET": f"{self.name} cannot be downloaded ({problem}); check the address and the network, or ",
                "HEAD": f"the server of {self.name} cannot be reached for the version of the file ({problem}), which "
                "every start compares with that of the cached tokens; check the address and the network; to start "
                "without a network, ",
            }
            raise ValueError(f"{self.key}: {failed[method]}download the file and give its path") from None
