"""Datasets in the layouts in which they are distributed, from local files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from acsgd.io.data.sources.base import TEXT, BadRecord, NamedSource, RecordCounts, SourceRecord
from acsgd.io.data.sources.files import check_file, fingerprint_of, names_of, read_files
from acsgd.io.data.sources.text import open_text, reading
from acsgd.shards.files import blame


@dataclass(frozen=True)
class LocalSet(NamedSource):
    """A set with a name such as "cot:PATH", of a file, a directory or a pattern."""

    endings: ClassVar[Sequence[str]] = ()
    """Of the names of files that are read in directories and by patterns."""

    @property
    def parts(self) -> list[str]:
        """What follows the colons of the name."""
        return self.name.split(":")[1:]

    @property
    def path(self) -> Path:
        """File of the set."""
        return Path(self.parts[-1]).expanduser()

    def files(self) -> Sequence[Path]:
        """Return the files of the set. Raises ValueError."""
        prefix = self.name.removesuffix(self.parts[-1])
        return [Path(name).expanduser() for name in names_of(str(self.path), self.endings, prefix)]

    @property
    def fingerprint(self) -> str:
        """Name of the set and fingerprints of its files. Raises ValueError if one cannot be read."""
        states = [type(self).__name__, *self.parts[:-1]]
        for path in self.files():
            with reading(path, key=self.key):
                states.append(fingerprint_of(path))
        return " ".join(states)

    def check(self) -> None:
        """Raise ValueError unless all files are readable and not empty."""
        for path in self.files():
            check_file(str(path))

    def records(self, counts: RecordCounts) -> Iterator[SourceRecord | BadRecord]:
        """Yield the records of each file, in the order of their names."""
        return read_files([str(path) for path in self.files()], counts, self._read_file)

    def _read_file(self, name: str, counts: RecordCounts) -> Iterator[SourceRecord | BadRecord]:
        """Yield the records of a file. counts: of this file."""
        raise NotImplementedError


class ChainOfThought(LocalSet):
    """Files of one JSON object of texts by subject, "cot:PATH": a document for each subject."""

    endings = (".json",)

    def _read_file(self, name: str, counts: RecordCounts) -> Iterator[SourceRecord]:
        subjects = read_object(Path(name), self.key)
        for counts.records, (subject, text) in enumerate(subjects.items(), start=1):
            yield SourceRecord({TEXT: text, "subject": subject}, f'{name}, "{subject}"')


def read_object(path: Path, key: str) -> Mapping[str, Any]:
    """Read a file that is one JSON object. Raises ValueError."""
    with open_text(path, key=key) as file:
        text = file.read()
    with blame(path, "is not JSON", "download it again"):
        value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"{key}: {path} is not one JSON object; give the file as it is distributed")
    return value
