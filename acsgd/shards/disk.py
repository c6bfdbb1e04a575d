"""Layer shards: a model on disk as one safetensors file per layer and a JSON manifest, written last.

    manifest.json            format, version, step, state of the run; name, size in bytes and checksum of every file
    embed.safetensors        parameters under their Hugging Face names, in their original dtype;
    block-00000.safetensors  in a checkpoint also optimizer state, as "name/parameter": "exp_avg/lm_head.weight"
    ...
    head.safetensors
    config.json, tokenizer   as Hugging Face wrote them

In a checkpoint the constants of a layer (frozen parameters and stored buffers) have a file of their own, such as
block-00000.constants.safetensors: a hard link to a file that has them, if the file system has links.

No name holds a rank or a stage, so any number of ranks can read what any other number wrote. Checksums cover every
byte: the manifest has those of all files, and its last field is its own.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from acsgd.errors import CorruptFileError
from acsgd.io.files.atomic import flush
from acsgd.io.files.checksum import file_checksum
from acsgd.layers.description import ModelLayers
from acsgd.shards.check import FLOATING, check_tensors, expected_tensors, first_names
from acsgd.shards.files import TensorHeader, check_file_name, open_tensors, tensor_headers, unusable
from acsgd.shards.layer_tensors import LayerTensors
from acsgd.shards.manifest import MANIFEST, Manifest, StoredFile
from acsgd.shards.weights import WeightState
from acsgd.shards.writer import OpenTensor, open_stored, save_tensors

T = TypeVar("T")

RUN_OPTIONS = "run_options.json"
"""File of an exported model with the options of the run that trained it on which reading of data depends."""
TASK = "model.task"
"""Option of a run; in `RUN_OPTIONS` the task of the manifest."""
FORMATS = "formats"
"""Name of the formats of the sources in what a run, and `RUN_OPTIONS`, record of data."""
TOKENIZER = (
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.model",
    "*.spm",
)
"""Patterns of the files of a tokenizer."""
MODEL_FILES = ("config.json", "generation_config.json", RUN_OPTIONS, *TOKENIZER)
"""Patterns of the files that a Hugging Face model needs besides its weights."""


def write_layer(
    directory: Path, stem: str, tensors: Mapping[str, Tensor], state: WeightState | None = None
) -> StoredFile:
    """Write one layer's file into `directory` and return its manifest entry. Does not wait until it is on disk.

    stem: file name without suffix; state: optimizer or mode state of the layer's parameters.
    """
    path = directory / f"{stem}.safetensors"
    state_tensors = {f"{name}/{key}": x for name, by_key in (state or {}).items() for key, x in by_key.items()}
    checksum = save_tensors({**tensors, **state_tensors}, path)
    return StoredFile(path.name, path.stat().st_size, checksum)


def model_files(directory: Path) -> list[Path]:
    """List the config and tokenizer files of a model directory.

    Raises ValueError if one of them is not a file, or is a link that leads outside of the directory.
    """
    # not with Path.glob, which passes over dangling links
    paths = sorted(path for path in directory.iterdir() if any(fnmatch(path.name, pattern) for pattern in MODEL_FILES))
    for path in paths:
        check_file_name(path.name)
        if (problem := unusable(path)) is not None:
            raise ValueError(f"{path} {problem}")
    return paths


def copy_model_files(source: Path, target: Path, *, tokenizer: Path | None = None) -> list[StoredFile]:
    """Copy the config and tokenizer files of a model directory; return their manifest entries.

    tokenizer: directory of the tokenizer. Default: the same. Raises as `model_files`.
    """
    origin = tokenizer or source
    for path in {*model_files(source), *model_files(origin)}:
        if path.parent == (origin if any(fnmatch(path.name, pattern) for pattern in TOKENIZER) else source):
            shutil.copyfile(path, target / path.name)
    return list_model_files(target)


def list_model_files(directory: Path) -> list[StoredFile]:
    """Return the manifest entries of the config and tokenizer files in a directory.

    Raises as `model_files`.
    """
    return [_flushed(path) for path in model_files(directory)]


class ShardDirectory:
    """A complete shard directory, opened for reading. Verifies each file before its first use."""

    def __init__(self, path: Path, get: Callable[[Path, StoredFile], None] | None = None) -> None:
        """Read the manifest. Raises as `Manifest.read`.

        get: called with the path of a file that is on other hosts alone before it is read, to get it from them.
        """
        self.path = path
        self._get = get
        self.manifest = Manifest.read(path)
        self.step = self.manifest.step
        self._verified: set[str] = set()
        self._opened: dict[str, dict[str, OpenTensor]] = {}

    @property
    def verified_layers(self) -> ModelLayers | None:
        """Layers of the model, if they were verified when it was converted, with the installed transformers."""
        import transformers  # takes a second

        verification = self.manifest.verification
        return self.manifest.model if verification and verification.version == transformers.__version__ else None

    def tensors(self, layer: str, stored: LayerTensors) -> dict[str, Tensor]:
        """Read all tensors of one layer of the model; they lie in the memory-mapped file.

        stored: their names and shapes. Raises CorruptFileError if the file is corrupt,
        or if its parameters are others, are not floating-point numbers, or are not finite.
        """
        tensors, path = self.read_layer(layer), self.path / self.file_of(layer).file
        check_tensors(path, tensors, expected_tensors(stored), FLOATING, is_complete=True)
        return tensors

    def constants(self, layer: str, stored: LayerTensors, *, check: bool = True) -> dict[str, Tensor]:
        """Read the tensors of one layer that are not trained. stored: see `tensors`. Raises as that.

        check: whether they are checked, which reads the mapped file into memory.
        """
        if not stored.constants:
            return {}
        tensors, path = self.read_constants(layer) or self.read_layer(layer), self.path / self.file_of(layer).file
        if check:
            check_tensors(path, tensors, expected_tensors(stored._replace(weights={})), FLOATING, is_complete=False)
        return {key: tensors[key] for key in stored.constants}

    def read_layer(self, layer: str) -> dict[str, Tensor]:
        """Read parameters and buffers of one layer, not checked; they lie in memory-mapped files."""
        files = self.files_of(layer).values()
        tensors = {key: x for file in files for key, x in self.read(file).items() if "/" not in key}
        return tensors | self.read_constants(layer)

    def read_constants(self, layer: str) -> dict[str, Tensor]:
        """Read the constants of a layer that has a file of them. Raises CorruptFileError if it lacks one."""
        if (entry := self.manifest.constants.get(layer)) is None:
            return {}
        found, names = self.read(entry), self._constants(layer)
        if missing := [name for name in names if name not in found]:
            raise CorruptFileError(self.path / entry.file, f"is invalid: it lacks {first_names(missing)}")
        return {name: found[name] for name in names}

    def file_with(self, layer: str, constants: Collection[str]) -> StoredFile | None:
        """Return a file that has these constants of a layer, and no state of an optimizer; None if there is none."""
        if (entry := self.manifest.constants.get(layer)) is not None:
            return entry if {*self._constants(layer)}.issuperset(constants) else None
        entry = self.manifest.layers.get(layer)
        if entry is None or self.manifest.run is not None:
            return None
        return entry if self.tensor_headers(layer).keys() >= {*constants} else None

    def tensor_headers(self, layer: str) -> dict[str, TensorHeader]:
        """Read dtype and shape of all tensors in the files of a layer."""
        files = [self.path / file.file for file in self.files_of(layer).values()]
        headers = {name: header for file in files for name, header in tensor_headers(file).items()}
        constants = self.manifest.constants.get(layer)
        if constants is None:
            return headers
        of_file = tensor_headers(self.path / constants.file)
        return headers | {name: of_file[name] for name in self._constants(layer) if name in of_file}

    def _constants(self, layer: str) -> list[str]:
        """Return the names of the constants of a layer."""
        return self.manifest.model.own_constants(self.manifest.model.index(layer))

    def tensor(self, layer: str, key: str) -> Tensor:
        """Read one parameter or buffer of one layer."""
        with open_tensors(self._present(self._file_with(layer, key))) as opened:
            return opened.get_tensor(key)

    def stored(self, layer: str, key: str) -> OpenTensor:
        """Return where one parameter or buffer of one layer is, in a file that stays open."""
        entry = self._file_with(layer, key)
        if entry.file not in self._opened:
            self._opened[entry.file] = open_stored(self._present(entry))
        return self._opened[entry.file][key]

    def _file_with(self, layer: str, key: str) -> StoredFile:
        """Return the file with a parameter or buffer of a layer."""
        manifest = self.manifest
        if key in manifest.tables:
            return manifest.tables[key]
        if layer in manifest.constants and key in self._constants(layer):
            return manifest.constants[layer]
        return self.file_of(layer)

    def state(self, layer: str) -> WeightState:
        """Read the optimizer state of a layer's parameters; the tensors lie in the memory-mapped file."""
        return self._state(self.files_of(layer).values())

    def replica_states(self, layer: str) -> list[WeightState]:
        """Read the saved mode state of a layer, one entry per replica; empty for a stateless mode."""
        return [self._state(files.values()) for files in self.replica_files_of(layer)]

    def file_of(self, layer: str) -> StoredFile:
        """Return the file of a layer. Raises CorruptFileError if the manifest does not list the layer."""
        if layer not in self.manifest.layers:
            raise CorruptFileError(self.path / MANIFEST, f'lists no layer "{layer}"; it belongs to another model')
        return self.manifest.layers[layer]

    def files_of(self, layer: str) -> dict[str, StoredFile]:
        """Return the file of a layer by its name, and by their names those of its tied weights that have one.

        Raises as `file_of`.
        """
        model, tables = self.manifest.model, self.manifest.tables
        own = [key for key in model.own_parameters(model.index(layer)) if key in tables]
        return {layer: self.file_of(layer), **{key: tables[key] for key in own}}

    def replica_files_of(self, layer: str) -> list[dict[str, StoredFile]]:
        """Return by replica the files with its state, by the names of `files_of`; empty for a stateless mode."""
        files = {name: self.manifest.replicas.get(name, []) for name in self.files_of(layer)}
        return [
            {name: each[replica] for name, each in files.items() if replica < len(each)}
            for replica in range(max(map(len, files.values())))
        ]

    def all_files_of(self, layer: str) -> list[StoredFile]:
        """Return all files of a layer: those of `files_of`, its constants, and the state of all replicas."""
        replicas = [file for files in self.replica_files_of(layer) for file in files.values()]
        return [*self.files_of(layer).values(), *filter(None, [self.manifest.constants.get(layer)]), *replicas]

    def split(self, layer: str, tensors: Mapping[str, T]) -> dict[str, dict[str, T]]:
        """Return by the names of `files_of` which tensors of a layer, or of its state, are in which file."""
        parts: dict[str, dict[str, T]] = {name: {} for name in self.files_of(layer)}
        for name, tensor in tensors.items():
            key = name.rpartition("/")[2]
            parts[key if key in parts else layer][name] = tensor
        return parts

    def verify_model_files(self) -> None:
        """Verify config.json and the tokenizer files. Raises CorruptFileError."""
        if "config.json" not in {entry.file for entry in self.manifest.model_files}:
            raise CorruptFileError(self.path / MANIFEST, "does not list config.json; restore the directory from a copy")
        for entry in self.manifest.model_files:
            self.verify(entry)

    def read(self, entry: StoredFile) -> dict[str, Tensor]:
        """Read all tensors of a file by their names in it; they lie in the memory-mapped file."""
        with open_tensors(self._present(entry)) as file:
            return {key: file.get_tensor(key) for key in _keys(file)}

    def lacks(self, layer: str) -> bool:
        """Whether a file of a layer is on other hosts alone."""
        return any(file.file in self.elsewhere for file in self.files_of(layer).values())

    def _present(self, entry: StoredFile) -> Path:
        """Verify a file, as `verify` does; get it first if it is on other hosts alone."""
        if self._get is not None and entry.file in self.manifest.hosts and not os.path.lexists(self.path / entry.file):
            self._get(self.path / entry.file, entry)
        return self.verify(entry)

    def verify(self, entry: StoredFile) -> Path:
        """Verify a file against its manifest entry, once, and return its path. Raises CorruptFileError."""
        path = self.path / entry.file
        if entry.file not in self._verified:
            if entry.file in self.manifest.hosts and not os.path.lexists(path):
                raise CorruptFileError(self.path, self.describe_elsewhere())
            verify_file(path, entry)
            self._verified.add(entry.file)
        return path

    @property
    def elsewhere(self) -> dict[str, list[str]]:
        """Hosts of the files that are not in this directory, but in those of hosts with disks of their own."""
        hosts = self.manifest.hosts
        return {file: hosts[file] for file in hosts if not os.path.lexists(self.path / file)}

    def describe_elsewhere(self) -> str:
        """Return which files are on other hosts, and what to type, as a clause."""
        elsewhere = self.elsewhere
        hosts = dict.fromkeys(host for each in elsewhere.values() for host in each)
        lacks = (
            f"lacks {first_names(sorted(elsewhere))}, which {'is' if len(elsewhere) == 1 else 'are'} on "
            f"{' and '.join(hosts)}, not on this host: "
        )
        if self.manifest.run is None:
            return f"{lacks}train with these hosts, by acsgd join, or copy the whole model to this host"
        return f"{lacks}acsgd fetch {shlex.quote(str(self.path))}, with --weights --to DIRECTORY for the weights alone"

    def corrupt_files(self) -> Iterator[CorruptFileError]:
        """Verify every file of this host and yield an error for each corrupt one."""
        elsewhere = self.elsewhere
        for entry in (file for file in self.manifest.files if file.file not in elsewhere):
            try:
                self.verify(entry)
            except CorruptFileError as error:
                yield error

    def _state(self, files: Iterable[StoredFile]) -> WeightState:
        state: WeightState = {}
        for stored, tensor in (item for file in files for item in self.read(file).items()):
            name, slash, key = stored.partition("/")
            if slash:
                state.setdefault(name, {})[key] = tensor
        return state


def verify_file(path: Path, entry: StoredFile) -> None:
    """Raise CorruptFileError if a file differs from its manifest entry."""
    try:
        _verify(path, entry)
    except OSError as error:
        raise CorruptFileError(path, f"cannot be read ({error.strerror})") from None


def _verify(path: Path, entry: StoredFile) -> None:
    if not os.path.lexists(path):
        raise CorruptFileError(path, "is missing; copy the whole directory again")
    if (problem := unusable(path)) is not None:
        raise CorruptFileError(path, problem)
    if (size := path.stat().st_size) != entry.bytes:
        raise CorruptFileError(path, f"is corrupt: it has {size} bytes, the manifest says {entry.bytes}")
    if file_checksum(path) != entry.checksum:
        raise CorruptFileError(path, "is corrupt: its content differs from the manifest's checksum")


def _keys(file: Any) -> list[str]:
    """List the tensor names of an open safetensors file."""
    return list(file.keys())


def _flushed(path: Path) -> StoredFile:
    """Wait until a file is on disk; return its manifest entry."""
    flush(path)
    return StoredFile(path.name, path.stat().st_size, file_checksum(path))
