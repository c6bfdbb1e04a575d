"""The manifest of a layer-shard directory: what it holds, and a checksum of every file and of itself."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from acsgd.errors import CorruptFileError, missing
from acsgd.io.files.atomic import fsync_directory
from acsgd.io.files.checksum import check_file_checksum, new_file_checksum
from acsgd.io.files.fields import Natural, from_json
from acsgd.layers.description import ModelLayers, Verification
from acsgd.model_classes import MODEL_CLASSES
from acsgd.shards.files import ADAPTER_CONFIG, check_file_name, unusable

MANIFEST = "manifest.json"
FORMAT = "acsgd-shards"
VERSION = 6
WITHOUT_TABLES = 5
"""Version in which tables are stored with the first layer that uses them; its layers have no `lookups`."""
OTHERS = {
    "config.json": "; it is a Hugging Face directory, of which acsgd convert from-hf makes layer shards",
    ADAPTER_CONFIG: "; it is an adapter directory of PEFT, which acsgd convert merge adds to its base",
}
"""File of a directory of another kind, and what that is."""


def _check_task(name: str) -> None:
    if name not in MODEL_CLASSES:
        raise ValueError(f"{name[:70]!r} is not one of {', '.join(MODEL_CLASSES)}")


def find_manifest(directory: Path) -> Path:
    """Return the path of the manifest of a complete shard directory. Raises ValueError if `directory` is not one."""
    path = directory / MANIFEST
    if not os.path.lexists(directory):
        raise ValueError(f"{directory} {missing(directory)}; give a checkpoint or a layer-shard directory")
    if not os.path.lexists(path):
        kind = next((kind for file, kind in OTHERS.items() if os.path.lexists(directory / file)), "")
        raise ValueError(f"{directory} is not a checkpoint or layer-shard directory: it has no {MANIFEST}{kind}")
    return path


@dataclass(frozen=True)
class StoredFile:
    """Manifest entry of one file."""

    file: Annotated[str, check_file_name]
    bytes: Natural
    checksum: Annotated[str, check_file_checksum]


@dataclass(frozen=True)
class ModelTensors:
    """What checks of the files of a model need to know of the model, so that they need not build it."""

    shapes: dict[str, tuple[Natural, ...]]
    """Shape of each tensor that is stored with a layer, by name."""
    hidden_matrices: tuple[str, ...]
    """See `acsgd.shards.layer_tensors.hidden_matrices`."""
    config: str
    """Checksum of the config.json that describes the model."""


@dataclass(frozen=True)
class Manifest:
    """Contents of a complete shard directory."""

    step: Natural
    """Number of optimizer steps trained."""
    task: Annotated[str, _check_task]
    """Name of the model's class, which determines its head."""
    model: ModelLayers
    """Layers of the model, as derived when it was converted."""
    layers: dict[str, StoredFile]
    """File of each layer, first layer first."""
    replicas: dict[str, list[StoredFile]]
    """For each layer and each table, one file per replica with the state of a stateful data-parallel mode."""
    model_files: list[StoredFile]
    """config.json and the tokenizer files."""
    run: dict[str, Any] | None
    """State of the run besides its tensors, needed to resume; None for a converted model."""
    verification: Verification | None = None
    """Comparison of the layers with the whole model, if it was made when the model was converted."""
    new: tuple[str, ...] = ()
    """Parameters of a head that was initialised when the model was converted, and that nothing has trained."""
    constants: dict[str, StoredFile] = field(default_factory=dict)
    """For each layer with constants, the file that has them, besides other tensors that do not count: the checkpoints
    of a run share it by hard links. Empty in a converted model, whose layers have one file each."""
    tables: dict[str, StoredFile] = field(default_factory=dict)
    """File of each tied weight that has one of its own, by its name; others are in the file of their layer."""
    adapter: str | None = None
    """Adapter of the model, as a spec string; None = none."""
    hosts: dict[str, list[str]] = field(default_factory=dict)
    """Hosts that hold each file, by its name, if the hosts of the run have disks of their own; else empty."""
    tensors: ModelTensors | None = None
    """Tensors of the model; None in manifests of older versions."""

    @property
    def files(self) -> list[StoredFile]:
        """All files except the manifest."""
        states = (file for files in self.replicas.values() for file in files)
        return [*self.trained_files, *self.constants.values(), *states, *self.model_files]

    @property
    def trained_files(self) -> list[StoredFile]:
        """Files with weights, and in a checkpoint with the state of the optimizer."""
        return [*self.layers.values(), *self.tables.values()]

    @property
    def weights_checksum(self) -> str:
        """Checksum of the contents of the files with weights. Conversions of the same model have the same."""
        files = {**self.layers, **self.tables, **{f"{layer}.constants": each for layer, each in self.constants.items()}}
        entries = sorted((name, entry.checksum) for name, entry in files.items())
        return new_file_checksum(repr(entries).encode()).hexdigest()

    @property
    def checked_tensors(self) -> ModelTensors | None:
        """`tensors`, if they are those of the layers and of config.json that the manifest lists."""
        names = {name for stored in self.model.stored().values() for name in stored}
        known = self.tensors
        is_same = known and known.shapes.keys() == names and known.config == config_checksum(self.model_files)
        return known if is_same else None

    def write(self, directory: Path) -> None:
        """Write the manifest, which completes a shard directory, and wait until it is on disk."""
        path = directory / MANIFEST
        with path.open("wb") as file:
            file.write(_with_checksum({"format": FORMAT, "version": VERSION, **asdict(self)}))
            file.flush()
            os.fsync(file.fileno())
        fsync_directory(directory)

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read the manifest of a complete shard directory.

        Raises ValueError if `directory` is not one or has another version, CorruptFileError if the manifest is corrupt.
        """
        path = find_manifest(directory)
        if (problem := unusable(path)) is not None:
            raise CorruptFileError(path, problem)
        try:
            fields = _verified_fields(path.read_bytes(), path)
        except OSError as error:
            raise CorruptFileError(path, f"cannot be read ({error.strerror})") from None
        _check_version(directory, fields)
        content = {key: value for key, value in fields.items() if key not in ("format", "version")}
        try:
            manifest = from_json(cls, content)
            _check_distinct([file.file for file in manifest.files] + [MANIFEST])
        except ValueError as error:
            raise CorruptFileError(
                path, f"is invalid: {error}; restore it from a copy, or remove {directory}"
            ) from None
        # the layers of an older version are derived again before they are used
        return replace(manifest, verification=None) if fields["version"] == WITHOUT_TABLES else manifest


def config_checksum(model_files: Iterable[StoredFile]) -> str:
    """Return the checksum of config.json, empty if it is not listed."""
    return next((file.checksum for file in model_files if file.file == "config.json"), "")


def _check_distinct(names: list[str]) -> None:
    if len(set(names)) < len(names):
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} is listed twice")


def _with_checksum(fields: dict[str, Any]) -> bytes:
    """Serialise a manifest canonically, with the checksum of the other fields as its last field."""
    checksum = new_file_checksum(_canonical(fields)).hexdigest()
    return _canonical({**fields, "checksum": checksum})


def _verified_fields(raw: bytes, path: Path) -> dict[str, Any]:
    """Parse and verify a manifest. Raises CorruptFileError if any byte differs from what was written.

    A manifest of another program or of an older version, which had no such checksum, is returned unverified.
    """
    try:
        fields: dict[str, Any] = json.loads(raw)
        if "checksum" not in fields and not (
            fields.get("format") == FORMAT and fields.get("version") in (VERSION, WITHOUT_TABLES)
        ):
            return fields
        fields.pop("checksum", None)
        is_valid = _with_checksum(fields) == raw
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise CorruptFileError(path, "is corrupt: it is not a JSON object") from None
    if not is_valid:
        raise CorruptFileError(path, "is corrupt: its content differs from its checksum")
    return fields


def _check_version(directory: Path, fields: dict[str, Any]) -> None:
    """Raise ValueError if a manifest has another format or version."""
    if fields.get("format") != FORMAT:
        raise ValueError(f"{directory / MANIFEST} is not the manifest of a layer-shard directory")
    version = fields.get("version")
    if version not in (VERSION, WITHOUT_TABLES):
        is_older = isinstance(version, int) and version < VERSION
        advice = "convert the model again, or use the acsgd that wrote it" if is_older else "upgrade acsgd"
        raise ValueError(
            f"{directory} was written in version {version} of the format, this acsgd reads version {VERSION}; {advice}"
        )


def _canonical(fields: dict[str, Any]) -> bytes:
    return (json.dumps(fields, indent=1) + "\n").encode()
