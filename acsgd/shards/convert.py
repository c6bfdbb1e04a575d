"""Convert models in files of other formats to layer shards, with two layers in memory at a time.

An interrupted conversion continues with the files that it has not written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import Protocol

import transformers
from torch import Tensor
from transformers import PreTrainedModel

from acsgd.errors import CorruptFileError
from acsgd.io.files.atomic import check_space
from acsgd.io.files.fields import from_json
from acsgd.io.files.read_ahead import read_ahead
from acsgd.layers.description import ModelLayers
from acsgd.model_classes import MODEL_CLASSES
from acsgd.notes import print_note
from acsgd.shards.check import first_names
from acsgd.shards.config import derive_layers
from acsgd.shards.disk import copy_model_files, list_model_files, verify_file, write_layer
from acsgd.shards.layer_tensors import describe_tensors
from acsgd.shards.load import draw
from acsgd.shards.locate import open_hf
from acsgd.shards.manifest import VERSION, Manifest, StoredFile
from acsgd.shards.resize import resize

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


ReportProgress = Callable[[int, int], object]
"""Called with the number of bytes written and that of all bytes to write."""


class OpenedModel(Protocol):
    """A model in the files of a directory, in any format, whose names and shapes are checked."""

    @property
    def model(self) -> PreTrainedModel:
        """The model, its parameters on the meta device."""
        ...

    @property
    def new(self) -> Collection[str]:
        """Parameters of a new head, which the files lack."""
        ...

    def read(self, names: Collection[str]) -> dict[str, Tensor]:
        """Read tensors of the model. names: without new ones."""
        ...

    def path_of(self, name: str) -> Path:
        """Return the file with a tensor."""
        ...

    def bytes_of(self, name: str) -> int:
        """Return the number of bytes of a tensor in the files, 0 if they lack it."""
        ...


def from_hf(
    source: Path,
    target: Path,
    *,
    task: str = "lm",
    layers: ModelLayers | None = None,
    verify: bool = False,
    resize_embeddings: bool = False,
    report: ReportProgress = lambda done, total: None,
) -> None:
    """Convert a Hugging Face directory to layer shards in `target`, a directory.

    It is empty, or was left by an interrupted conversion of the same source, which continues. Tensors keep their dtype
    and bits. A head that the files lack is initialised, and named on stderr. layers: of the model, if they are known;
    verify: whether to compare the layers with the whole model, so that a run need not; resize_embeddings: whether to
    add rows for tokens of the tokenizer that the model lacks. Raises as `open_hf`, `HFModel.verify` and `resize`,
    ValueError if a parameter is not finite, LayersError if the model cannot be divided into layers.
    """
    files_of_source = open_hf(source, task, is_valid=lambda config: layers is not None)
    resized = resize(files_of_source, source, MODEL_CLASSES[task]) if resize_embeddings else None
    if resize_embeddings and resized is None:
        print_note(f"{source} has rows for all tokens of its tokenizer: none are added")
    opened = resized or files_of_source
    model = layers or derive_layers(source, opened.config, task)
    verification = MODEL_CLASSES[task].verify(opened.config, model) if verify else None
    files_of_source.verify()
    files = write_layers(opened, model, target, sources=[source], report=report)
    copied = copy_model_files(source, target)
    if resized:
        resized.config.save_pretrained(target)
        copied = list_model_files(target)
    new, tensors = tuple(sorted(opened.new)), describe_tensors(opened.model, model, copied)
    Manifest(0, task, model, files, {}, copied, run=None, verification=verification, new=new, tensors=tensors).write(
        target
    )


def write_layers(
    opened: OpenedModel, layers: ModelLayers, target: Path, *, sources: Sequence[Path], report: ReportProgress
) -> dict[str, StoredFile]:
    """Write the file of each layer, or continue a conversion; return their manifest entries.

    sources: directories that are converted. Raises ValueError if a parameter is not finite, OSError before the first
    file if the disk has no room for all.
    """
    if opened.new:
        print_note(f"{sources[0]} lacks {first_names([*opened.new])}: a new head is initialised")
    stored = layers.stored()
    sizes = {layer: sum(map(opened.bytes_of, names)) for layer, names in stored.items()}
    shapes = [tuple(param.shape) for param in opened.model.parameters()]
    journal = Journal(target, _identity(sources, (layers, shapes)))
    files = {layer: entry for layer in stored if (entry := journal.find(layer)) is not None}
    missing = [layer for layer in stored if layer not in files]
    check_space(target, sum(sizes[layer] for layer in missing), "layers")
    with contextlib.closing(read_ahead(lambda layer: _read(opened, stored[layer]), missing, 1)) as tensors:
        for layer in missing:
            files[layer] = write_layer(target, layer, next(tensors))  # no name holds them while the one after is read
            journal.add(layer, files[layer])
            report(sum(sizes[each] for each in files), sum(sizes.values()))
    journal.remove()
    return {layer: files[layer] for layer in stored}


def _identity(sources: Sequence[Path], model: tuple[ModelLayers, object]) -> str:
    """Return a hash of everything that the files of the layers depend on, but of files only name, size and time."""
    files = [
        (str(source.resolve()), sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths))
        for source in sources
        for paths in [source.iterdir()]
    ]
    return hashlib.sha256(repr((files, model, VERSION, transformers.__version__)).encode()).hexdigest()


def _read(opened: OpenedModel, names: Collection[str]) -> dict[str, Tensor]:
    """Read the tensors of a layer, and draw those of a new head. Raises ValueError if a parameter is not finite."""
    tensors = opened.read([name for name in names if name not in opened.new])
    params = {name for name, _ in opened.model.named_parameters()}
    for name in params & tensors.keys():
        if tensors[name].numel() and not all(x.isfinite() for x in tensors[name].aminmax()):
            path = opened.path_of(name)
            raise ValueError(f"{path}: {name} has values that are not finite; give weights without NaN and infinities")
    return tensors | draw(opened.model, [name for name in names if name in opened.new])


def describe_shards(target: Path) -> str:
    """Return a sentence on new layer shards."""
    manifest = Manifest.read(target)
    task = "" if manifest.task == "lm" else f" --model.task {manifest.task}"
    return _describe(manifest, target, f"train it with --model.name {quote(str(target))}{task}")


def describe_hf(source: Path, target: Path) -> str:
    """Return a sentence on a new Hugging Face directory that layer shards were converted to."""
    manifest = Manifest.read(source)
    load = f"{MODEL_CLASSES[manifest.task].auto_class.__name__}.from_pretrained({str(target)!r})"
    return _describe(manifest, target, f"load it with {load}")


def describe_legacy(source: Path, target: Path) -> str:
    """Return a sentence on a new model of a replaced system that layer shards were converted to."""
    back = f"acsgd convert from-legacy {quote(str(target))} SHARDS"
    return _describe(Manifest.read(source), target, f"convert it back with {back}")


def _describe(manifest: Manifest, target: Path, following: str) -> str:
    size = sum(path.stat().st_size for path in target.iterdir())
    layers = f"{len(manifest.model.layers)} layers, {size / 1e6:,.1f} MB, task {manifest.task}"
    return f"wrote {target}: {layers}; {following}"
