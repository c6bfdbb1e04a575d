"""Convert layer shards to a Hugging Face directory with a model card, with two layers in memory at a time."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from acsgd.io.files.atomic import check_space
from acsgd.io.files.read_ahead import read_ahead
from acsgd.layers.description import LayerSpec
from acsgd.model_classes import UNTIED
from acsgd.shards.convert import ReportProgress
from acsgd.shards.disk import FORMATS, RUN_OPTIONS, TASK, ShardDirectory, copy_model_files, list_model_files
from acsgd.shards.files import CONFIG, TensorHeader
from acsgd.shards.generation import set_ends
from acsgd.shards.hf_model import INDEX, SINGLE, tensor_of
from acsgd.shards.layer_tensors import layer_tensors
from acsgd.shards.locate import TIE, open_shards
from acsgd.shards.manifest import Manifest, StoredFile
from acsgd.shards.names import to_files
from acsgd.shards.writer import DTYPES, TensorWriter, bytes_of, header_of


def model_card(config: PreTrainedConfig, manifest: Manifest, task: str) -> str:
    """Return the model card of a model, from the manifest of its shards. It names no directories."""
    run: dict[str, Any] = manifest.run or {}
    origin = run.get("origin", {})
    front = {"library_name": "transformers", **({"base_model": origin["model"]} if origin.get("model") else {})}
    lines = [
        "---",
        *(f"{key}: {json.dumps(value)}" for key, value in front.items()),
        "---",
        "",
        f"# {(config.architectures or [config.model_type])[0]}",
        "",
        f"A model of the type `{config.model_type}`, " + ("trained" if run else "converted") + " with acsgd.",
        "",
    ]
    if run:
        lines += [*_table(_training(run, task)), "", "## Options", "", *_table(_options(run))]
    return "\n".join(lines).rstrip() + "\n"


def _training(run: dict[str, Any], task: str) -> Iterable[tuple[str, Any]]:
    progress, origin = run["progress"], run.get("origin", {})
    losses, evaluation = progress.get("recent") or [None], dict(progress.get("evaluation", {}))
    return (
        ("task", task),
        ("started from", origin.get("model")),
        ("sources", origin.get("sources")),
        ("optimizer steps", progress["step"]),
        ("target tokens", f"{progress['tokens']:,}"),
        ("loss of the last step", losses[-1]),
        ("held-out loss", progress.get("eval_loss", evaluation.pop("eval_loss", None))),
        *((f"held-out {name}", value) for name, value in evaluation.items()),
        ("replicas", run.get("replicas")),
    )


def _options(run: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    return sorted({**run["identity"]["data"], **run.get("options", {})}.items())


def _table(rows: Iterable[tuple[str, Any]]) -> list[str]:
    """Return a table in Markdown of the rows that have a value."""
    cells = [f"| {name} | {str(value).replace('|', ' ')} |" for name, value in rows if value is not None]
    return ["| | |", "|---|---|", *cells]


CASTS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
OF_OTHER_FILES = ("data.sources", "data.eval_sources", "data.eval_fraction", "data.chat_template")
"""Options of a run that its exports do not record: those of files that do not belong to the model."""
SHARD_BYTES = 5 * 10**9
"""Default maximum size of a file, as of transformers."""


def to_hf(
    source: Path,
    target: Path,
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    report: ReportProgress = lambda done, total: None,
) -> None:
    """Convert layer shards to a Hugging Face directory in `target`, an empty directory.

    dtype: "float32", "bfloat16" or "float16" to cast parameters to; None = keep each tensor's dtype and bits.
    shard_bytes: maximum size of a file with several tensors. Raises as `open_shards`.
    """
    directory, config, model = open_shards(source)
    task, layers = directory.manifest.task, directory.manifest.model
    headers = {layer: _headers(directory, layer, names, model, dtype) for layer, names in layers.stored().items()}
    files = _Files(target, {name: header for each in headers.values() for name, header in each.items()}, shard_bytes)

    def read(layer: LayerSpec) -> dict[str, Tensor]:
        return directory.tensors(layer.name, layer_tensors(model, layers, layer.index))

    with contextlib.closing(read_ahead(read, layers.layers, 1)) as tensors:
        for _ in layers.layers:
            files.write_all(to_files(model, _cast(next(tensors), model, dtype)), report)
    files.write_index()
    config.architectures = [type(model).__name__]
    dtypes = {DTYPES[header.dtype] for each in headers.values() for header in each.values()}
    write_model_files(directory, config, {CASTS[dtype]} if dtype is not None else dtypes, target)
    (target / "README.md").write_text(model_card(config, directory.manifest, task))


def write_model_files(
    shards: ShardDirectory, config: PreTrainedConfig, dtypes: Collection[torch.dtype], target: Path
) -> list[StoredFile]:
    """Write config and tokenizer of an exported model; return their manifest entries. dtypes: of its tensors.

    The config of a model that a run has trained names the tokens that end its texts.
    """
    copy_model_files(shards.path, target)
    write_run_options(shards.manifest, target)
    if shards.manifest.run is not None:
        set_ends(config, shards.path)
    floating = {each for each in dtypes if each.is_floating_point}
    if len(floating) == 1:
        config.dtype = floating.pop()
    write_config(config, target)
    return list_model_files(target)


def write_config(config: PreTrainedConfig, target: Path) -> None:
    """Write config.json. It does not tie embedding and head if they are not, though the model's class ties them."""
    config.save_pretrained(target)
    if hasattr(config, UNTIED):
        fields = json.loads((target / CONFIG).read_text())
        del fields[UNTIED]
        (target / CONFIG).write_text(json.dumps(fields | {TIE: False}, indent=2) + "\n")


def write_run_options(manifest: Manifest, target: Path) -> None:
    """Write the options with which the run read records and made rows of them; nothing if no run made the model."""
    if manifest.run is not None:
        recorded = {TASK: manifest.task, **manifest.run["identity"]["data"], **manifest.run.get("data", {})}
        kept_keys = ("model.", "data.", "eval.", FORMATS)
        kept = {
            key: value for key, value in recorded.items() if key.startswith(kept_keys) and key not in OF_OTHER_FILES
        }
        (target / RUN_OPTIONS).write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")


class _Files:
    """The files of a model, of which those with tensors still to write are open."""

    def __init__(self, directory: Path, headers: Mapping[str, TensorHeader], shard_bytes: int) -> None:
        """Raises OSError if the disk has no room for all."""
        self._directory = directory
        self._headers = headers
        self.done = 0
        """Number of bytes written."""
        shards: list[list[str]] = [[]]
        size = 0
        for name, header in headers.items():
            if shards[-1] and size + bytes_of(header) > shard_bytes:
                shards.append([])
                size = 0
            shards[-1].append(name)
            size += bytes_of(header)
        self.total = sum(map(bytes_of, headers.values()))
        """Number of bytes to write."""
        check_space(directory, self.total, "weights")
        self._shards = {
            SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors": names
            for number, names in enumerate(shards, start=1)
        }
        self._file_of = {name: file for file, names in self._shards.items() for name in names}
        self._open: dict[str, tuple[TensorWriter, set[str]]] = {}

    def write_all(self, tensors: Mapping[str, Tensor], report: ReportProgress) -> None:
        """Write the tensors of a layer."""
        for name, tensor in tensors.items():
            self._write(name, tensor)
            report(self.done, self.total)

    def _write(self, name: str, tensor: Tensor) -> None:
        file = self._file_of[name]
        if file not in self._open:
            names = self._shards[file]
            writer = TensorWriter(self._directory / file, {each: self._headers[each] for each in names})
            self._open[file] = writer, set(names)
        writer, missing = self._open[file]
        writer.write(name, tensor)
        missing.remove(name)
        self.done += bytes_of(self._headers[name])
        if not missing:
            writer.close()
            del self._open[file]

    def write_index(self) -> None:
        """Write the index, if there are several files."""
        if len(self._shards) > 1:
            index = {"metadata": {"total_size": self.total}, "weight_map": dict(sorted(self._file_of.items()))}
            (self._directory / INDEX).write_text(json.dumps(index, indent=2))


def _headers(
    directory: ShardDirectory, layer: str, names: Sequence[str], model: PreTrainedModel, dtype: str | None
) -> dict[str, TensorHeader]:
    """Return the headers of the tensors that a layer becomes, from those in its file; reads no values."""
    stored = directory.tensor_headers(layer)
    tensors = {
        name: torch.empty(tensor.shape, dtype=DTYPES[stored.get(name, header_of(tensor)).dtype], device="meta")
        for name in names
        for tensor in [tensor_of(model, name)]
    }
    return {name: header_of(tensor) for name, tensor in to_files(model, _cast(tensors, model, dtype)).items()}


def _cast(tensors: Mapping[str, Tensor], model: PreTrainedModel, dtype: str | None) -> dict[str, Tensor]:
    """Cast parameters, not buffers."""
    if dtype is None:
        return dict(tensors)
    params = dict(model.named_parameters())
    return {name: tensor.to(CASTS[dtype]) if name in params else tensor for name, tensor in tensors.items()}
