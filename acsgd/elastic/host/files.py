"""Files of a run that members get from each other outside of training: checkpoints, and the model it starts from.

A member requests a file on a connection to the daemon of another host, see `transport`: the answer is a signed line,
and then the bytes of the file in parts, each with a code that only who has the run's secret can compute. Nothing is
served but what the manifest of a directory lists, or the config and the tokenizer of a model; nothing is taken that a
program could execute.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import hmac
import io
import json
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import IO, Annotated, Protocol

from acsgd.comm.addresses import split_address
from acsgd.elastic.membership.messages import PROTOCOL, Host, SharedFiles, seal, unseal
from acsgd.errors import CorruptFileError, explain
from acsgd.io.checkpoint.directory import CheckpointDirectory, step_of
from acsgd.io.data.sources.files import READERS
from acsgd.io.files.atomic import flush
from acsgd.io.files.checksum import file_checksum, new_file_checksum
from acsgd.io.files.fields import Natural, from_json
from acsgd.shards.disk import model_files
from acsgd.shards.files import check_file_name, unusable
from acsgd.shards.manifest import MANIFEST, Manifest, StoredFile
from acsgd.shards.writer import open_weights

MODEL, DATA = "model", "data"
"""Names of the directories of the model and of the data, beside those of checkpoints, step-XXXXXXXX. A file of data is
named by its number in `SharedFiles.data` and its ending, "0.jsonl", so that no path travels."""
WEIGHTS = ".weights"
"""End of the name of a directory that has the files of a checkpoint without the state of optimizer and replicas."""
KINDS = (".safetensors", ".json", ".txt", ".model", ".spm", ".jinja", ".bpe", *READERS)
"""Ends of the names of files that are taken from another host: none is code, and none is unpickled."""
CHUNK_BYTES = 1 << 20
THREADS = 4
"""Number of threads that list files for others."""
TIMEOUT_S = 60.0
"""Time for a part of CHUNK_BYTES, or for an answer, seconds."""
CODE_BYTES = hashlib.sha256().digest_size
"""Length of the code of a part."""
HELD_S = 600.0
"""Time in which a host reads the files of model and data, to list them, seconds."""
MAX_ANSWER = 1 << 20
"""Maximum length of the line of an answer, bytes."""
MAX_LISTING = 1 << 28
"""Maximum size of a listing, or of a manifest, bytes."""


@dataclass(frozen=True)
class FileRequest:
    """Request to a daemon for a file from some byte on; without a file, for the `HeldFiles` of a directory; without a
    directory, for its `Listing` of checkpoints."""

    nonce: str
    """Random text that the answer repeats, so that one that was recorded is refused."""
    directory: str = ""
    file: str = ""
    offset: Natural = 0


@dataclass(frozen=True)
class FileAnswer:
    """What comes before the bytes."""

    bytes: Natural = 0
    """Number of bytes that follow, without the codes of their parts."""
    problem: str | None = None
    """Why nothing follows."""


def _check_directory(name: str) -> None:
    check_file_name(name)
    if name not in (MODEL, DATA) and step_of(Path(name.removesuffix(WEIGHTS))) is None:
        raise ValueError(f"{name!r:.50} is no directory of a checkpoint")


def check_taken(name: str) -> None:
    """Raise ValueError for the name of a file that is not taken from another host."""
    check_file_name(name)
    if not name.endswith(KINDS):
        raise ValueError(
            f"{name!r:.70} is not taken from another host: it is not one of {', '.join(KINDS)}, of which none can "
            "be executed; copy it yourself if you trust it"
        )


@dataclass(frozen=True)
class HeldFiles:
    """What a host holds of one directory."""

    files: tuple[StoredFile, ...]
    sha256: str = ""
    """Of its manifest; empty without one."""


@dataclass(frozen=True)
class Listing:
    """What a host holds of a run."""

    directories: dict[Annotated[str, _check_directory], HeldFiles] = field(default_factory=dict)
    best: str | None = None
    """Name of the checkpoint with the best evaluation; None if there is none."""
    hosts: tuple[str, ...] = ()
    """Addresses of the daemons that it knows."""


class PartCodes:
    """Authentication codes of the parts of one answer: HMAC-SHA256 of all bytes up to the end of a part.

    So none can be changed, left out or sent in another order by somebody without the run's secret.
    """

    def __init__(self, secret: bytes, nonce: str) -> None:
        self._code = hmac.new(hmac.digest(secret, nonce.encode(), "sha256"), digestmod="sha256")

    def next(self, part: bytes) -> bytes:
        """Return the code of the next part."""
        self._code.update(part)
        return self._code.digest()


class FileSource(Protocol):
    """Where files come from: another host, or a directory on this one."""

    @property
    def name(self) -> str:
        """Name for messages."""
        ...

    def list(self) -> Listing:
        """Return what it holds. Raises OSError, ValueError."""
        ...

    def held(self, directory: str) -> HeldFiles:
        """Return what it holds of the model, of the data, or of the weights of a checkpoint, all of which it reads.

        Raises OSError, ValueError.
        """
        ...

    def read(self, directory: str, file: str, offset: int) -> Iterator[bytes]:
        """Yield the bytes of a file from an offset on. Raises OSError, ValueError."""
        ...


@dataclass(frozen=True)
class LocalFiles:
    """The files of a run that this host sees."""

    shared: SharedFiles

    @property
    def name(self) -> str:
        return self.shared.checkpoints

    def list(self) -> Listing:
        checkpoints = CheckpointDirectory(Path(self.shared.checkpoints))
        steps = checkpoints.steps() if self.shared.checkpoints else []
        held = {}
        for path in map(checkpoints.of, steps):
            with contextlib.suppress(ValueError, CorruptFileError, OSError):  # being removed, or no use to others
                held[path.name] = _held(path)
        best = checkpoints.best() if steps else None
        return Listing(held, best.name if best is not None else None)

    def read(self, directory: str, file: str, offset: int) -> Iterator[bytes]:
        with self.open(directory, file) as content:
            content.seek(offset)
            while part := content.read(CHUNK_BYTES):
                yield part

    def held(self, directory: str) -> HeldFiles:
        if directory == DATA:
            paths = self._data.items()
            return HeldFiles(tuple(_stored(name, path) for name, path in paths))
        if directory.endswith(WEIGHTS):
            return _held_weights(Path(self.shared.checkpoints) / directory.removesuffix(WEIGHTS))
        if directory != MODEL or not self.shared.model:
            raise ValueError(f"there is no directory {directory!r:.50}")
        return _held(Path(self.shared.model))

    @property
    def _data(self) -> dict[str, Path]:
        """The files of data by their names for others."""
        return {
            f"{number}{''.join(Path(path).suffixes[-2:])}": Path(path) for number, path in enumerate(self.shared.data)
        }

    def open(self, directory: str, file: str) -> IO[bytes]:
        """Open a file that a member may have. Raises OSError, ValueError."""
        _check_directory(directory)
        check_taken(file)
        if directory == DATA:
            if file not in self._data:
                raise ValueError(f"there is no file {file!r:.70} of data")
            return self._data[file].open("rb")
        root = self.shared.model if directory == MODEL else self.shared.checkpoints
        path = Path(root) if directory == MODEL else Path(root) / directory.removesuffix(WEIGHTS)
        if not root or not path.is_dir():
            raise ValueError(f"there is no directory {directory}")
        if file != MANIFEST and file not in {stored.file for stored in _listed(path)}:
            raise ValueError(f"{directory} has no file {file!r:.70}")
        if (problem := unusable(path / file)) is not None:
            raise ValueError(f"{path / file} {problem}")
        if directory.endswith(WEIGHTS) and file in {stored.file for stored in Manifest.read(path).trained_files}:
            return open_weights(path / file)
        return (path / file).open("rb")


def _listed(path: Path) -> list[StoredFile]:
    """Return the files of a directory of shards, or config and tokenizer of a model."""
    if (path / MANIFEST).is_file():
        return Manifest.read(path).files
    found = [file for file in model_files(path) if file.name.endswith(KINDS)]
    return [_stored(file.name, file) for file in found]


def _stored(name: str, path: Path) -> StoredFile:
    """Return a file with its size and its checksum, which is computed again only if the file has changed."""
    stat = path.stat()
    return StoredFile(name, stat.st_size, _checksum(path, stat.st_size, stat.st_mtime_ns))


@lru_cache(maxsize=4096)
def _checksum(path: Path, size: int, mtime_ns: int) -> str:
    """Return the checksum of a file as it was at some time. Raises OSError."""
    return file_checksum(path)


def _held(path: Path) -> HeldFiles:
    raw = (path / MANIFEST).read_bytes() if (path / MANIFEST).is_file() else b""
    files = [stored for stored in _listed(path) if _size(path / stored.file) == stored.bytes]
    return HeldFiles(tuple(files), hashlib.sha256(raw).hexdigest() if raw else "")


def _held_weights(path: Path) -> HeldFiles:
    """Return the files with weights of a checkpoint. Those that differ from its manifest are left out."""
    held, manifest = _held(path), Manifest.read(path)
    states = {file for files in manifest.replicas.values() for file in files}
    files = []
    for stored in held.files:
        if stored in manifest.trained_files:
            if _stored(stored.file, path / stored.file) == stored:
                files.append(_weights_of(path / stored.file, stored.checksum))
        elif stored not in states:
            files.append(stored)
    return HeldFiles(tuple(files), held.sha256)


@lru_cache(maxsize=4096)
def _weights_of(path: Path, checksum: str) -> StoredFile:
    """Return the file of `open_weights`. checksum: of the file at the path."""
    with open_weights(path) as file:
        digest = hashlib.file_digest(file, new_file_checksum)  # type: ignore[arg-type]
        return StoredFile(path.name, file.tell(), digest.hexdigest())


def _size(path: Path) -> int | None:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return None


class FileService:
    """Answers the requests of members, one part at a time, so that the daemon is never busy for long."""

    def __init__(self) -> None:
        self._free_at = 0.0
        """When the bytes sent so far are within the rate, a time.monotonic()."""
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="files")
        """Apart from those of the daemon's votes: checksums of all data take minutes."""

    async def answer(
        self, request: FileRequest, shared: SharedFiles, hosts: Collection[str]
    ) -> tuple[FileAnswer, IO[bytes]]:
        """Return an answer and what follows it. hosts: addresses of the daemons that this one knows."""
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, _answer, request, LocalFiles(shared), tuple(hosts))
        except (OSError, ValueError, CorruptFileError) as error:
            return FileAnswer(problem=(isinstance(error, OSError) and explain(error)) or str(error)), io.BytesIO()

    async def send(
        self, writer: asyncio.StreamWriter, size: int, content: IO[bytes], codes: PartCodes, rate: float | None
    ) -> None:
        """Send what follows an answer. Raises OSError, TimeoutError."""
        with content:
            while size:
                part = await asyncio.to_thread(content.read, min(size, CHUNK_BYTES))
                if not part:
                    raise OSError("the file has become shorter")
                size -= len(part)
                await asyncio.sleep(self._free_at - time.monotonic())
                self._free_at = max(time.monotonic(), self._free_at) + (len(part) / rate if rate else 0.0)
                writer.write(part + await asyncio.to_thread(codes.next, part))
                async with asyncio.timeout(TIMEOUT_S):
                    await writer.drain()
        async with asyncio.timeout(TIMEOUT_S):
            await writer.drain()


def _answer(request: FileRequest, files: LocalFiles, hosts: tuple[str, ...]) -> tuple[FileAnswer, IO[bytes]]:
    if not request.file:
        if request.directory:
            held: HeldFiles | Listing = files.held(request.directory)
        else:
            held = dataclasses.replace(files.list(), hosts=hosts)
        content = json.dumps(asdict(held)).encode()
        return FileAnswer(len(content)), io.BytesIO(content)
    opened = files.open(request.directory, request.file)
    size = opened.seek(0, io.SEEK_END)
    opened.seek(offset := min(request.offset, size))
    return FileAnswer(size - offset), opened


class RemoteFiles:
    """The files of a run on another host. Connects to its daemon. Raises OSError, ValueError.

    connect_s: time in which it accepts the connection, and in which it greets, seconds.
    """

    def __init__(self, address: str, run: str, secret: bytes, *, connect_s: float = TIMEOUT_S) -> None:
        self.name = address
        self._run, self._secret, self._number = run, secret, 0
        self._connection = socket.create_connection(split_address(address), connect_s)
        self._file = self._connection.makefile("rb")
        match self._file.readline(MAX_ANSWER).decode(errors="replace").split():
            case ["acsgd", protocol, _, name] if protocol == str(PROTOCOL):
                self._greeting = name
                self._connection.settimeout(TIMEOUT_S)
            case ["acsgd", *_]:
                self.close()
                raise ValueError(f"{address} has another version of acsgd: install the same version on all hosts")
            case _:
                self.close()
                raise ValueError(f"{address} is no daemon of acsgd, or has just ended")

    def close(self) -> None:
        """End the connection."""
        self._file.close()
        self._connection.close()

    def list(self) -> Listing:
        return from_json(Listing, json.loads(b"".join(self._request(FileRequest(secrets.token_hex(16))))))

    def held(self, directory: str) -> HeldFiles:
        """Return what it holds of a directory, all of which its host reads. Raises OSError, ValueError."""
        self._connection.settimeout(HELD_S)
        content = b"".join(self._request(FileRequest(secrets.token_hex(16), directory)))
        self._connection.settimeout(TIMEOUT_S)
        return from_json(HeldFiles, json.loads(content))

    def read(self, directory: str, file: str, offset: int) -> Iterator[bytes]:
        return self._request(FileRequest(secrets.token_hex(16), directory, file, offset))

    def _request(self, request: FileRequest) -> Iterator[bytes]:
        self._number += 1
        me = Host("", "")
        self._connection.sendall(seal(self._secret, self._run, me, self._greeting, self._number, request))
        line = self._file.readline(MAX_ANSWER)
        if not line.endswith(b"\n"):
            raise ConnectionError(f"{self.name} has ended the connection")
        envelope = unseal(self._secret, line)  # also for a daemon of another run, which answers "refused"
        if envelope.kind != FileAnswer.__name__ or envelope.connection != request.nonce:
            raise ValueError(f"{self.name} has sent something else than an answer")
        answer: FileAnswer = from_json(FileAnswer, envelope.body)
        if answer.problem is not None:
            raise ValueError(f"{self.name}: {answer.problem}")
        if request.file in ("", MANIFEST) and answer.bytes > MAX_LISTING:
            raise ValueError(f"{self.name} lists too much")
        left, codes = answer.bytes, PartCodes(self._secret, request.nonce)
        while left:
            part = self._file.read(min(left, CHUNK_BYTES))
            code = self._file.read(CODE_BYTES)
            if len(code) < CODE_BYTES:
                raise ConnectionError(f"{self.name} has ended the connection")
            if not hmac.compare_digest(code, codes.next(part)):
                raise ValueError(f"{self.name}: what was received is not what a member of the run has sent")
            left -= len(part)
            yield part


def receive(
    source: FileSource,
    directory: str,
    file: StoredFile,
    partial: Path,
    report: Callable[[int], None],
    *,
    name: str | None = None,
) -> None:
    """Receive a file, verify it and wait until it is on disk.

    partial: path of what was received before, which is completed, and removed if it is corrupt; report: called with the
    number of bytes that are there; name: of the file at the source. Default: the same. Raises OSError, ValueError.
    """
    if partial.is_file() and partial.stat().st_size > file.bytes:
        partial.unlink()
    digest, size = new_file_checksum(), 0
    with partial.open("a+b") as content:
        content.seek(0)
        while part := content.read(CHUNK_BYTES):
            digest.update(part)
            size += len(part)
        if size < file.bytes:
            for part in source.read(directory, name or file.file, size):
                if (size := size + len(part)) > file.bytes:
                    break
                digest.update(part)
                content.write(part)
                report(size)
    if size < file.bytes:
        raise ConnectionError("the file has ended too soon")
    if size > file.bytes or digest.hexdigest() != file.checksum:
        partial.unlink()
        raise ValueError(f"{file.file} is not what its manifest says")
    flush(partial)


def check_room(directory: Path, size: int) -> None:
    """Raise ValueError if a directory has no room for some bytes."""
    if size > (free := shutil.disk_usage(directory).free):
        raise ValueError(
            f"{directory} has {free / 1e9:.2f} GB free, and {size / 1e9:.2f} GB are to be received; free space there, "
            "or use a directory on another disk"
        )
