"""Reports of the files that ranks have written for a checkpoint, from which rank 0 makes its manifest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from acsgd.errors import RunError
from acsgd.layers.description import ModelLayers
from acsgd.shards.disk import flush
from acsgd.shards.manifest import StoredFile

Kind = Literal["layer", "table", "constants", "replica"]
"""Content of a file: trained parameters of a layer, or a tied weight, and state of the optimizer; tensors that never
change; state of a replica."""


@dataclass(frozen=True)
class WrittenFile:
    """Report of one written file."""

    kind: Kind
    layer: str
    """Name of the layer, or of the tied weight."""
    entry: dict[str, Any]
    """As of `StoredFile`."""
    replica: int
    """Index of the replica whose state is in it; 0 for other kinds."""

    @classmethod
    def of(cls, directory: Path, kind: Kind, layer: str, file: StoredFile, replica: int = 0) -> WrittenFile:
        """Wait until a file is on disk; return the report of it."""
        flush(directory / file.file)
        return cls(kind, layer, asdict(file), replica)

    @property
    def stored(self) -> StoredFile:
        """Its entry in a manifest."""
        return StoredFile(**self.entry)


def files_of_layers(written: Sequence[WrittenFile], kind: Kind, model: ModelLayers) -> dict[str, StoredFile]:
    """Return the file of a kind of each layer that has one, first layer first."""
    by_layer = {file.layer: file.stored for file in written if file.kind == kind}
    return {layer.name: by_layer[layer.name] for layer in model.layers if layer.name in by_layer}


def files_of_tables(written: Sequence[WrittenFile]) -> dict[str, StoredFile]:
    """Return the files of tied weights that have one of their own, by the names of these."""
    return {file.layer: file.stored for file in written if file.kind == "table"}


def files_of_replicas(written: Sequence[WrittenFile]) -> dict[str, list[StoredFile]]:
    """Return the files with the state of replicas, first replica first, by layer or tied weight."""
    by_layer: dict[str, list[StoredFile]] = {}
    for file in sorted(written, key=lambda file: (file.layer, file.replica)):
        if file.kind == "replica":
            by_layer.setdefault(file.layer, []).append(file.stored)
    return by_layer


def check_visible(directory: Path, written: Sequence[WrittenFile]) -> None:
    """Raise RunError if files that ranks have written are not in the directory, as this rank sees it."""
    absent = [file.entry["file"] for file in written if not (directory / file.entry["file"]).is_file()]
    if absent:
        raise RunError(
            f"{directory} has no {', '.join(absent[:3])}, which other ranks have written; "
            "put checkpoint.dir on a file system that all hosts share"
        )
