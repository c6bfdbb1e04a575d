"""Sources that are read while training goes on, "stream:SOURCE": from a cursor, and again after a lost connection."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Protocol
from urllib.parse import urlsplit

from acsgd.io.data.sources.address import FsspecFiles
from acsgd.io.data.sources.base import BadRecord, NamedSource, RecordCounts, Source, SourceRecord
from acsgd.io.data.sources.files import STATE, Files, version_of
from acsgd.io.data.sources.hub import PREFIX as HUB
from acsgd.io.data.sources.hub import first_line, from_hub_or_cache, is_saved, load_dataset, loading, parse_name
from acsgd.io.data.sources.remote import RemoteFile
from acsgd.io.data.sources.seekable import SEEKABLE, FilePlace
from acsgd.io.data.sources.tables import row_of
from acsgd.io.data.sources.text import reading
from acsgd.io.data.sources.url import Url
from acsgd.io.files.remote import is_address
from acsgd.notes import print_note

PREFIX = "stream:"
DELAYS_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
"""Seconds before each attempt to continue after a lost connection. An attempt that yields a record starts anew."""
BUFFER_BYTES = 2**20
"""Bytes of a remote file that are requested at a time."""


def refuse_streams(sources: Sequence[Source], action: str) -> None:
    """Raise ValueError if a source is streamed. action: what needs all records at once."""
    for source in sources:
        if isinstance(source, Streamed):
            raise ValueError(f"{source.key}: {action} reads all records of {source.name}; remove {PREFIX}")


class RecordStream(Protocol):
    """Reads the records of a source from any cursor on."""

    def check(self) -> None:
        """As `Source.check`. Raises ValueError, too, if the source cannot be streamed."""
        ...

    def version(self) -> str:
        """Return what changes with the records, and is equal on all hosts. Raises ValueError."""
        ...

    def records(self, counts: RecordCounts) -> Iterator[SourceRecord | BadRecord]:
        """Yield the records from counts.cursor on, as `Source.records`, updating it before each.

        Raises ValueError, or another exception if trying again may succeed.
        """
        ...


@dataclass(frozen=True)
class Streamed(NamedSource):
    """A source that is read while training goes on, "stream:SOURCE"."""

    @cached_property
    def stream(self) -> RecordStream:
        """Reader of the records."""
        name = self.name.removeprefix(PREFIX)
        if name.startswith(("http://", "https://")):
            return FileStream(Url(name, self.key))
        if is_address(name):
            return FileStream(FsspecFiles(name, self.key))
        return HubStream(name, self.key) if name.startswith(HUB) else FileStream(Files(name, self.key))

    @property
    def fingerprint(self) -> str:
        """Version of the records, equal on all hosts. Raises ValueError."""
        return self.stream.version()

    def check(self) -> None:
        """Raise ValueError if the source cannot be opened or streamed. Does not read the records."""
        self.stream.check()

    def records(self, counts: RecordCounts) -> Iterator[SourceRecord | BadRecord]:
        """Yield the records from counts.cursor on, and continue after a lost connection."""
        failures = 0
        while True:
            start = counts.cursor
            try:
                yield from self.stream.records(counts)
                return
            except ValueError:
                raise
            except Exception as error:  # the libraries under `datasets` raise errors of every class
                failures = 1 if counts.cursor != start else failures + 1
                self._wait(failures, counts, first_line(error))

    def _wait(self, failures: int, counts: RecordCounts, problem: str) -> None:
        """Wait before the next attempt. Raises ValueError after the last one."""
        where = f"{self.key}: {self.name}: reading failed after {counts.records:,} records ({problem})"
        if failures > len(DELAYS_S):
            raise ValueError(
                f"{where}, {failures} times in a row, at {json.dumps(counts.cursor)}; check the network, and start the "
                "run again: it resumes from its newest checkpoint"
            )
        delay = DELAYS_S[failures - 1]
        print_note(f"{where}; trying again in {delay:g} s")
        time.sleep(delay)


class FileStream:
    """Records of files of JSON lines, Parquet or Arrow: local ones, or those at an address.

    A cursor is the number of a file and a place in it: [file, record, byte].
    """

    def __init__(self, source: Files | Url | FsspecFiles) -> None:
        self._name = source.name
        self._key = source.key
        self._source = source

    def check(self) -> None:
        """Raise ValueError unless all files can be opened and streamed."""
        names = [] if isinstance(self._source, FsspecFiles) else self._names  # those need the network
        for name in names:
            self._ending(name)
        self._source.check()

    def version(self) -> str:
        """Return a hash of sizes and samples of the files; of an address what the server sends about it."""
        if not isinstance(self._source, Files):
            return self._source.version()
        parts = []
        for name in self._names:
            with reading(Path(name), key=self._key):
                parts.append(version_of(Path(name).expanduser()))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def records(self, counts: RecordCounts) -> Iterator[SourceRecord | BadRecord]:
        """Yield the records of each file, in the order of their names."""
        first, *place = counts.cursor or (0,)
        for number, name in itertools.islice(enumerate(self._names), first, None):
            here = FilePlace(*place) if number == first else FilePlace()
            earlier = counts.records - here.record
            ending = self._ending(name)
            with reading(Path(name), key=self._key), self._open(name) as file:
                for record, after in SEEKABLE[ending](file, name, self._key, here):
                    counts.cursor, counts.records = [number, *after], earlier + after.record
                    yield record

    @cached_property
    def _names(self) -> Sequence[str]:
        """Files in the order of their names, listed once: a cursor has the number of one, and others may be added."""
        return [self._name] if isinstance(self._source, Url) else self._source.names()

    def _open(self, name: str) -> AbstractContextManager[BinaryIO]:
        if isinstance(self._source, Url):
            return io.BufferedReader(RemoteFile(name), BUFFER_BYTES)
        return self._source.open(name) if isinstance(self._source, FsspecFiles) else Path(name).expanduser().open("rb")

    def _ending(self, name: str) -> str:
        """Return the ending of a file that can be streamed. Raises ValueError for others."""
        path = urlsplit(name).path if isinstance(self._source, Url) else name
        if found := next((ending for ending in SEEKABLE if path.endswith(ending)), None):
            return found
        raise ValueError(
            f"{PREFIX}{self._name}: {Path(name).name} cannot be streamed, only {', '.join(SEEKABLE)} and {HUB} can; "
            f"give {self._name} without {PREFIX}, and it is tokenized before training"
        )


class HubStream:
    """Rows of a dataset of the Hugging Face Hub, or of a local copy of one, as `datasets` streams it.

    A cursor is the state of `datasets`, from which it reads the file of the cursor from its beginning.
    """

    def __init__(self, name: str, key: str) -> None:
        self._name = name
        self._key = key
        self._is_local = os.path.isdir(os.path.expanduser(name.removeprefix(HUB).partition(":")[0]))

    def check(self) -> None:
        """Raise ValueError unless the name has the parts that it must have. Does not need the network."""
        parse_name(self._name)

    def version(self) -> str:
        """Return the revision of the dataset; of a local copy a hash of sizes and samples of its files."""
        with loading(self._name, self._key):
            files, revision = _open(self._name)[1:]
        if all(os.path.isfile(file) for file in files):
            return hashlib.sha256("\n".join(version_of(Path(file)) for file in files).encode()).hexdigest()
        return revision

    def records(self, counts: RecordCounts) -> Iterator[SourceRecord | BadRecord]:
        """Yield the rows."""
        with loading(self._name, self._key):
            dataset = _open(self._name)[0].decode(False)  # no images or sounds
        if counts.cursor is not None:
            dataset.load_state_dict(counts.cursor)
        try:
            schema = dataset.features and dataset.features.arrow_schema
            # not in batches of Arrow: their states may lead to files that were read long before
            for fields in dataset:
                counts.records += 1
                counts.cursor = dataset.state_dict()
                yield SourceRecord(row_of(fields, schema), f"{self._name}, row {counts.records}")
        except Exception as error:  # `datasets` and the libraries under it raise errors of every class
            if not (self._is_local or isinstance(error, ValueError)):  # an error of the network is none of these
                raise
            raise ValueError(
                f"{self._key}: {self._name} cannot be read after row {counts.records} ({first_line(error)}); correct "
                "its files, or download them again"
            ) from None


@lru_cache(maxsize=8)
def _open(name: str) -> tuple[Any, list[str], str]:
    """Return a dataset that is read on the way, the files of its split, and its revision."""
    import datasets  # takes most of a second

    parts = parse_name(name)
    path = os.path.expanduser(parts.path)
    if is_saved(path):
        directory = os.path.join(path, parts.split) if not os.path.lexists(os.path.join(path, STATE)) else path
        return load_dataset(parts).to_iterable_dataset(), Files(directory).names(), ""
    with from_hub_or_cache(path):
        builder = datasets.load_dataset_builder(path, parts.config, revision=parts.revision)
    files = (builder.config.data_files or {}).get(parts.split)
    revision = f"{builder.hash} {getattr(files, 'origin_metadata', None)}"
    return builder.as_streaming_dataset(split=parts.split), [*map(str, files or ())], revision
