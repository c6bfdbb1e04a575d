"""The files that an interrupted conversion has written, so that it continues with the others."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from acsgd.errors import CorruptFileError
from acsgd.fields import from_json
from acsgd.shards.disk import verify_file
from acsgd.shards.manifest import StoredFile

NAME = ".written.jsonl"


@dataclass(frozen=True)
class _Line:
    layer: str
    entry: StoredFile


class Journal:
    """A file in a directory under construction that lists its complete files, a line of JSON each.

    The first line identifies what is converted. What was written of something else is removed.
    """

    def __init__(self, directory: Path, identity: str) -> None:
        self._directory = directory
        self._path = directory / NAME
        self._entries: dict[str, StoredFile] = {}
        text = self._path.read_text(errors="replace") if self._path.exists() else ""
        first, *lines = text.splitlines() or [""]
        if first == identity:
            self._entries = dict(filter(None, map(_parse, lines)))
            return
        if first:  # of another conversion
            for path in directory.iterdir():
                path.unlink()
        self._path.write_text(f"{identity}\n")

    def find(self, layer: str) -> StoredFile | None:
        """Return the entry of a layer's file if it was written and is valid."""
        entry = self._entries.get(layer)
        if entry is None:
            return None
        try:
            verify_file(self._directory / entry.file, entry)
        except CorruptFileError:
            return None
        return entry

    def add(self, layer: str, entry: StoredFile) -> None:
        """Add the file of a layer."""
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(_Line(layer, entry))) + "\n")

    def remove(self) -> None:
        """Remove the journal of a complete directory."""
        self._path.unlink()


def _parse(line: str) -> tuple[str, StoredFile] | None:
    """Return the layer and the entry of a line, None if it is not complete."""
    try:
        parsed = from_json(_Line, json.loads(line))
    except ValueError:
        return None
    return parsed.layer, parsed.entry
