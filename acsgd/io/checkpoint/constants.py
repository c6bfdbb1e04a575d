"""Files with the constants of layers, which the checkpoints of a run share."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from acsgd.errors import CorruptFileError
from acsgd.shards.disk import ShardDirectory, write_layer
from acsgd.shards.manifest import StoredFile

log = logging.getLogger(__name__)


class ConstantsFiles:
    """Adds the constants of layers to checkpoints: hard links to files that have them, where the file system has links.

    A linked file stays when the directory it was first in is removed, so each checkpoint is complete by itself.

    sources: shard directories of which the run has loaded one, such as the model or the checkpoint it resumes from.
    """

    def __init__(self, sources: Sequence[ShardDirectory] = ()) -> None:
        self._sources = sources
        self._known: dict[str, _VerifiedFile] = {}

    def add(self, directory: Path, published: Path, layer: str, constants: Mapping[str, Tensor]) -> StoredFile:
        """Add the constants of a layer to a checkpoint, by a link if possible, and return their entry.

        directory: of the checkpoint; published: its path when it is complete, from which later ones are linked.
        """
        name = f"{layer}.constants"
        path = directory / f"{name}.safetensors"
        for known in filter(None, (self._known.get(layer), self._find(layer, constants))):
            if _link(known, path):
                entry = StoredFile(path.name, known.entry.bytes, known.entry.checksum)
                break
        else:
            entry = write_layer(directory, name, constants)
        self.keep(directory, published, layer, entry)
        return entry

    def link(self, directory: Path, published: Path, layer: str, entry: StoredFile) -> bool:
        """Add constants that a rank of another host has written by a link to a file with the same content, if possible.

        Returns whether there was one. Arguments as `add`; entry: of the file.
        """
        path = directory / entry.file
        for known in filter(None, (self._known.get(layer), self._find_content(entry))):
            if known.entry.checksum == entry.checksum and _link(known, path):
                self.keep(directory, published, layer, entry)
                return True
        return False

    def keep(self, directory: Path, published: Path, layer: str, entry: StoredFile) -> None:
        """Note a file with the constants of a layer that was just written. Arguments as `link`."""
        self._known[layer] = _VerifiedFile.of(published / entry.file, entry, (directory / entry.file).stat())

    def _find_content(self, entry: StoredFile) -> _VerifiedFile | None:
        """Return the file of a source that has the same content."""
        for source in self._sources:
            with contextlib.suppress(CorruptFileError, OSError):
                for each in source.manifest.files:
                    if each.checksum == entry.checksum:
                        path = source.verify(each).resolve()
                        return _VerifiedFile.of(path, each, path.stat())
        return None

    def _find(self, layer: str, constants: Mapping[str, Tensor]) -> _VerifiedFile | None:
        """Return the file of a source that has the constants of a layer."""
        for source in self._sources:
            with contextlib.suppress(CorruptFileError, OSError):
                if (entry := source.file_with(layer, constants.keys())) is not None:
                    path = source.verify(entry).resolve()
                    return _VerifiedFile.of(path, entry, path.stat())
        return None


class _VerifiedFile(NamedTuple):
    """A file whose content was compared with its entry, or just written."""

    path: Path
    entry: StoredFile
    state: tuple[int, ...]
    """What shows whether the file at the path is still the same."""

    @classmethod
    def of(cls, path: Path, entry: StoredFile, status: os.stat_result) -> _VerifiedFile:
        return cls(path, entry, _state(status))


def _state(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _link(known: _VerifiedFile, path: Path) -> bool:
    """Link a file to a path if it is still the one that was verified; return whether it is there now."""
    try:
        os.link(known.path, path)
    except OSError as error:  # another file system, one without links, or the file was removed
        log.info("%s is not linked to %s: %s", path, known.path, error.strerror)
        return False
    if _state(path.stat()) == known.state:
        return True
    path.unlink()
    return False
