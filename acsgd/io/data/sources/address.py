"""Files at an address of fsspec, such as s3://bucket/data: downloaded when they are tokenized, or streamed."""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from glob import has_magic
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO

from acsgd.io.data.sources.base import BadRecord, NamedSource, RecordCounts, SourceRecord
from acsgd.io.data.sources.files import (
    NO_RECORDS,
    SPLITS,
    check_forms,
    check_parts,
    check_written,
    read_files,
    readable_endings,
    reader_of,
    refuse_other_records,
    split_of,
)
from acsgd.io.data.sources.files import version_of as version_of_content
from acsgd.io.data.sources.remote import ConnectionLostError
from acsgd.io.data.sources.text import reading
from acsgd.io.files.remote import LOCAL, check_address, explain_remote, hub_refusal, version_of

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class FsspecFiles(NamedSource):
    """Files at an address: one, all of a directory, or those that match a pattern."""

    @property
    def fingerprint(self) -> str:
        """Address, and names and versions of the files. Raises ValueError."""
        return f"{self.name} {self.version()}"

    def version(self) -> str:
        """Return a hash of names and versions of the files, equal on all hosts. Raises ValueError."""
        versions = [(address, self._version_of(entry)) for address, entry in self._entries().items()]
        return hashlib.sha256(repr(versions).encode()).hexdigest()

    def check(self) -> None:
        """Raise ValueError if the address cannot be opened here, or holds a password. Does not need the network."""
        check_address(self.name)

    def names(self) -> list[str]:
        """Return the addresses of the files. Raises ValueError if there are none."""
        return [*self._entries()]

    def records(self, counts: RecordCounts) -> Iterator[SourceRecord | BadRecord]:
        """Download each file into a temporary directory, and yield its records."""
        entries = self._entries()

        def read(address: str, counts: RecordCounts) -> Iterator[SourceRecord | BadRecord]:
            reader = reader_of(address)
            assert reader
            with tempfile.TemporaryDirectory(prefix="acsgd-") as directory:
                target = Path(directory) / PurePosixPath(address).name
                self._download(address, target, entries[address]["size"])
                yield from reader(target, address, self.key, counts)

        return read_files([*entries], counts, read, sizes=[entry["size"] for entry in entries.values()])

    @contextlib.contextmanager
    def open(self, address: str) -> Iterator[BinaryIO]:
        """Open a file, readable and seekable. Raises ConnectionLostError if trying again may succeed.

        Raises ValueError if the file is refused, or if it has changed by the end of the context.
        """
        with self._lost():
            files = self._file_system()[0]
            before = version_of(files.info(address))
            file = files.open(address, "rb")
        with contextlib.closing(file), io.BufferedReader(_Reader(file, self._lost), CHUNK_BYTES) as content:
            yield content
        with self._lost():
            files.invalidate_cache()
            after = version_of(files.info(address))
        if before != after:
            raise ValueError(f"{self.key}: {address} changed while it was read; start again")

    def _download(self, address: str, target: Path, size: int) -> None:
        """Copy a file of `size` bytes. Raises ValueError."""
        if size > (free := shutil.disk_usage(target.parent).free):
            raise ValueError(
                f"{self.key}: {address} has {size / 1e9:.1f} GB, and {target.parent} has room for {free / 1e9:.1f} GB; "
                f"set TMPDIR to a larger directory, or read it without a copy: stream:{self.name}"
            )
        with self._errors(), self.open(address) as content:
            try:
                with target.open("wb") as file:
                    shutil.copyfileobj(content, file, CHUNK_BYTES)
            except OSError as error:  # of the copy: reading raises ConnectionLostError
                raise ValueError(
                    f"{self.key}: {address} cannot be copied to {target.parent} ({error.strerror}); set TMPDIR to "
                    f"another directory, or read it without a copy: stream:{self.name}"
                ) from None
        if (received := target.stat().st_size) != size:
            raise ValueError(f"{self.key}: {address} was cut off after {received} of {size} bytes; start again")

    def _entries(self) -> dict[str, Mapping[str, Any]]:
        """Return fsspec's info of each file, by address, in the order of their names. Raises ValueError."""
        with self._errors():
            files, path = self._file_system()
            if reader_of(path) and not has_magic(path) and not files.isdir(path):
                return {files.unstrip_protocol(path): files.info(path)}
            search = files.glob if has_magic(path) else files.find
            found = {name: entry for name, entry in search(path, detail=True).items() if entry["type"] == "file"}
        return {files.unstrip_protocol(name): found[name] for name in self._chosen(sorted(found), path)}

    def _chosen(self, paths: Sequence[str], directory: str) -> Sequence[str]:
        """Return those of the files of a directory or pattern that hold records. Raises ValueError."""
        fixed = "/".join(itertools.takewhile(lambda part: not has_magic(part), directory.split("/")))
        below = {path: Path(path.removeprefix(fixed).lstrip("/")) for path in paths}
        if not has_magic(directory):
            self._check_written([*below.values()])
        paths = [path for path in paths if _may_hold_records(below[path]) and reader_of(path)]
        paths = [path for path in paths if not path.endswith(".txt")] or paths  # as in a local directory
        if not paths:
            raise ValueError(f"{self.key}: {self.name} holds no files that can be read, {readable_endings()}")
        splits = {SPLITS.get(split_of(below[path]), "") for path in paths}
        if len(splits) > 1 and not has_magic(directory):
            named, pattern = sorted(split or "others" for split in splits), f"{self.name.rstrip('/')}/*{max(splits)}*"
            raise ValueError(
                f"{self.key}: {self.name} has several splits, {', '.join(named)}; give one of them by a pattern, such "
                f"as {pattern}"
            )
        if not has_magic(directory):
            above, read = f"{self.name.rstrip('/')}/", [below[path] for path in paths]
            check_parts(self.name, read, above)
            check_forms(self.name, read, prefix=above)
        return paths

    def _check_written(self, files: Sequence[Path]) -> None:
        """Raise ValueError if a directory is not complete, or has records that cannot be read. files: paths in it."""
        above, found = f"{self.name.rstrip('/')}/", {*files}.union(*(path.parents for path in files))
        for directory in sorted(found):
            has = partial(_contains, found, directory)
            check_written(f"{above}{directory}".removesuffix("/."), has)
        for path in files:
            if _may_hold_records(path) and reader_of(path.name) is None:
                refuse_other_records(f"{above}{path}")

    def _version_of(self, entry: Mapping[str, Any]) -> str:
        """Return the version of a file; of a local one that of its content, since each host may have a copy."""
        if self.name.partition("://")[0].lower() not in LOCAL:
            return version_of(entry)
        with reading(Path(entry["name"]), key=self.key):
            return version_of_content(Path(entry["name"]))

    def _file_system(self) -> tuple[Any, str]:
        """Return the file system of fsspec, and the path there."""
        from fsspec.core import url_to_fs

        files, path = url_to_fs(self.name, skip_instance_cache=True)  # which would hold outdated directories
        return files, path

    @contextlib.contextmanager
    def _lost(self) -> Iterator[None]:
        """Turn an OSError of a file system into a ConnectionLostError, or a ValueError if the file is refused."""
        try:
            yield
        except (FileNotFoundError, PermissionError) as error:
            raise self._refused(error) from None
        except OSError as error:
            raise ConnectionLostError(explain_remote(error)) from None

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn an error of a file system into a ValueError that names the address."""
        try:
            yield
        except ValueError:
            raise
        except Exception as error:  # packages of protocols raise errors of many classes
            raise self._refused(error) from None

    def _refused(self, error: Exception) -> ValueError:
        is_absent = isinstance(error, FileNotFoundError) and not hub_refusal(error)
        problem = "it does not exist" if is_absent else explain_remote(error)
        return ValueError(
            f"{self.key}: {self.name} cannot be read ({problem}); check the address, its credentials and the network"
        )


def _contains(paths: Collection[Path], directory: Path, name: str) -> bool:
    return directory / name in paths


def _may_hold_records(path: Path) -> bool:
    return not any(map(NO_RECORDS.fullmatch, path.parts))


class _Reader(io.RawIOBase):
    """A file of fsspec. Its errors pass through `errors`, so that they differ from those of its readers. Not closed."""

    def __init__(self, file: BinaryIO, errors: Callable[[], AbstractContextManager[None]]) -> None:
        self._file = file
        self._errors = errors

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        with self._errors():
            self._file.seek(offset, whence)
            return self._file.tell()

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        with self._errors():
            content = self._file.read(len(view))
        view[: len(content)] = content
        return len(content)
