"""Report the content of checkpoints, verify every byte of them, and check every tensor."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from acsgd.errors import CorruptFileError
from acsgd.io.checkpoint.contents import Contents, build_tensors
from acsgd.io.checkpoint.directory import directories_at
from acsgd.io.checkpoint.progress import RunState
from acsgd.shards.disk import ShardDirectory
from acsgd.shards.files import tensor_headers
from acsgd.shards.manifest import MANIFEST, ModelTensors, StoredFile

DTYPES = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}
"""safetensors name of a dtype -> its name in model.dtype."""


@dataclass(frozen=True)
class LayerReport:
    """Content of one layer of a checkpoint, or of one table."""

    layer: str
    """Name of the layer, or of the parameter."""
    file: str
    """File of its trained parameters."""
    bytes: int
    """Size of this file and of that of its constants, if it has one."""
    parameters: int
    dtype: str
    """Type of the weights."""
    optimizer_state: list[str]
    """Names of the optimizer's tensors, such as exp_avg."""


@dataclass(frozen=True)
class CheckpointReport:
    """Content of one checkpoint."""

    path: str
    step: int | None
    """Number of optimizer steps; None if the manifest is missing or corrupt."""
    tokens: int | None = None
    """Number of target tokens trained on; None for a converted model."""
    loss: float | None = None
    eval_loss: float | None = None
    bytes: int = 0
    layers: list[LayerReport] = field(default_factory=list)
    """Layers whose files are valid."""
    elsewhere: dict[str, list[str]] = field(default_factory=dict)
    """Hosts of the files that are not in this directory but in those of hosts with disks of their own. Not verified."""
    errors: list[str] = field(default_factory=list)
    """One message for each file that is missing, corrupt, or does not hold what the model needs."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


def inspect(path: Path) -> list[CheckpointReport]:
    """Report on a checkpoint, a layer-shard directory, or all checkpoints of a run, oldest first.

    Reads and verifies every byte, and checks every tensor. Raises ValueError if `path` is none of these.
    """
    return [_report(directory) for directory in directories_at(path)]


def _report(path: Path) -> CheckpointReport:
    if not (path / MANIFEST).is_file():
        error = f"{path / MANIFEST} is missing: {path.name} is incomplete, or was not copied completely"
        return CheckpointReport(str(path), step=None, errors=[error])
    try:
        shards = ShardDirectory(path)
        manifest, run = shards.manifest, RunState.of(shards)
    except CorruptFileError as corrupt:
        return CheckpointReport(str(path), step=None, errors=[str(corrupt)])
    errors = _errors(shards)
    layers = []
    elsewhere = shards.elsewhere
    for name, file in (manifest.layers | manifest.tables).items():
        if not (errors.keys() | elsewhere.keys()) & {read.file for read in _files_of(shards, name)}:
            try:
                layers.append(_layer(shards, name))
            except CorruptFileError as corrupt:
                errors[file.file] = str(corrupt)
    progress = run.progress if run else None
    return CheckpointReport(
        path=str(path),
        step=manifest.step,
        tokens=progress.tokens if progress else None,
        loss=progress.loss if progress else None,
        eval_loss=progress.eval_loss if progress else None,
        bytes=sum(file.bytes for file in manifest.files if file.file not in elsewhere),
        layers=layers,
        elsewhere=elsewhere,
        errors=list(errors.values()),
    )


def _errors(shards: ShardDirectory) -> dict[str, str]:
    """Return what is wrong with files, by file: bytes that differ from the manifest, else tensors that do not fit."""
    if errors := {corrupt.path.name: str(corrupt) for corrupt in shards.corrupt_files()}:
        return errors
    if "config.json" in (elsewhere := shards.elsewhere):  # what files must hold is not known here
        return {}
    try:
        contents = Contents.of(shards, shards.manifest.checked_tensors or _build_tensors(shards))
    except ValueError as error:
        return {"config.json": str(error)}
    except CorruptFileError as error:
        return {error.path.name: str(error)}
    for index, layer in enumerate(shards.manifest.model.layers):
        if elsewhere.keys() & {file.file for file in shards.all_files_of(layer.name)}:
            continue
        try:
            contents.check(index)
        except CorruptFileError as error:
            errors.setdefault(error.path.name, str(error))
    return errors


def _build_tensors(shards: ShardDirectory) -> ModelTensors:
    """Return the tensors of the model of a directory whose manifest does not have them. Raises as `read_config`."""
    from acsgd.shards.config import read_config  # imports transformers, which takes a second

    return build_tensors(shards.manifest, read_config(shards.path, shards.manifest.task))


def _files_of(shards: ShardDirectory, name: str) -> list[StoredFile]:
    """Return the files that a report on a layer or a table reads."""
    manifest = shards.manifest
    if name in manifest.tables:
        return [manifest.tables[name]]
    return [*shards.files_of(name).values(), *filter(None, [manifest.constants.get(name)])]


def _layer(shards: ShardDirectory, name: str) -> LayerReport:
    """Report on a layer without its tables, or on a table."""
    manifest = shards.manifest
    files = [manifest.layers.get(name) or manifest.tables[name], *filter(None, [manifest.constants.get(name)])]
    if name in manifest.tables:
        headers = tensor_headers(shards.path / files[0].file)
    else:
        every = shards.tensor_headers(name).items()
        headers = {key: header for key, header in every if key.rpartition("/")[2] not in manifest.tables}
    weights = [header for key, header in headers.items() if "/" not in key]
    return LayerReport(
        layer=name,
        file=files[0].file,
        bytes=sum((shards.path / file.file).stat().st_size for file in files),
        parameters=sum(prod(weight.shape) for weight in weights),
        dtype=", ".join(sorted({DTYPES.get(weight.dtype, weight.dtype) for weight in weights})),
        optimizer_state=sorted({key.partition("/")[0] for key in headers if "/" in key}),
    )


def as_tables(reports: list[CheckpointReport]) -> Group:
    """Return what a terminal shows: the layers of one checkpoint, or a line for each of several; then the errors."""
    errors = [Text(f"CORRUPT: {error}") for report in reports for error in report.errors]
    elsewhere = [
        Text(f"{Path(report.path).name}: {file} is on {' and '.join(hosts)}, and was not verified")
        for report in reports
        for file, hosts in report.elsewhere.items()
    ]
    elsewhere += [Text(f"to get them: acsgd fetch {report.path}") for report in reports if report.elsewhere]
    verdict = errors or [Text("all files on this host are valid" if elsewhere else "all files are valid")]
    if len(reports) > 1:
        return Group(_checkpoints_table(reports), *elsewhere, *verdict)
    report = reports[0]
    if report.step is None:
        return Group(*verdict)
    return Group(Text(report.path), Text(_headline(report)), _layers_table(report), *elsewhere, *verdict)


def _headline(report: CheckpointReport) -> str:
    size = f"{_megabytes(report.bytes)} MB"
    if report.tokens is None:
        return f"a converted model without run state, {size}"
    return (
        f"step {report.step}: {report.tokens:,} tokens, loss {_loss(report.loss)}, "
        f"held-out loss {_loss(report.eval_loss)}, {size}"
    )


def _checkpoints_table(reports: list[CheckpointReport]) -> Table:
    table = _table("checkpoint", "tokens", "loss", "held-out loss", "MB", text=["files"])
    for report in reports:
        table.add_row(
            Path(report.path).name,
            "-" if report.tokens is None else f"{report.tokens:,}",
            _loss(report.loss),
            _loss(report.eval_loss),
            "-" if report.step is None else _megabytes(report.bytes),
            "CORRUPT" if report.errors else "part is elsewhere" if report.elsewhere else "valid",
        )
    return table


def _layers_table(report: CheckpointReport) -> Table:
    table = _table("layer", "parameters", "MB", text=["dtype", "optimizer state"])
    for layer in report.layers:
        optimizer_state = ", ".join(layer.optimizer_state) or "none"
        table.add_row(layer.layer, f"{layer.parameters:,}", _megabytes(layer.bytes), layer.dtype, optimizer_state)
    table.add_section()
    parameters = sum(layer.parameters for layer in report.layers)
    table.add_row(f"{len(report.layers)} files", f"{parameters:,}", _megabytes(sum(x.bytes for x in report.layers)))
    return table


def _table(first: str, *numbers: str, text: list[str]) -> Table:
    """Return an empty table whose columns are a name, right-aligned numbers, and text."""
    table = Table(first, box=box.SIMPLE_HEAD, pad_edge=False)
    for header in numbers:
        table.add_column(header, justify="right")
    for header in text:
        table.add_column(header)
    return table


def _loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4f}"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.2f}"
