"""Save the model of a running job as layer shards: every rank of one replica writes the layers it holds."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from acsgd.failure import RunError
from acsgd.shards.base import LayerShard, Weight
from acsgd.shards.disk import LayerFile, copy_companions, write_layer, write_manifest
from acsgd.topology import Groups, Topology, together

ENTRY_BYTES = 8 + 32
"""Of one layer in the table that the ranks fill together: its file's length and its sha256."""


def save(
    directory: Path,
    step: int,
    *,
    held: Sequence[tuple[LayerShard, Sequence[Weight]]],
    layers: Sequence[LayerShard],
    model_dir: Path,
    topology: Topology,
    groups: Groups,
) -> Path:
    """Write directory/step-XXXXXXXX and return its path; it appears whole or not at all.

    held: this rank's layers with their weights, of which the fp32 masters are saved; layers: all of the model;
    model_dir: where config and tokenizer are copied from. Called by every rank; the first replica writes.
    Raises RunError if the directory is not shared by all hosts.
    """
    path = directory / f"step-{step:08d}"
    if topology.replica > 0:
        return path
    partial = directory / f".{path.name}.partial"
    if topology.stage_rank == 0:
        shutil.rmtree(partial, ignore_errors=True)  # what a run that died here has left
    with together("starting to save", groups.pp):
        dist.barrier(groups.pp)
    partial.mkdir(parents=True, exist_ok=True)
    table = torch.zeros(len(layers), ENTRY_BYTES, dtype=torch.uint8)
    for shard, weights in held:
        tensors = {weight.key: weight.master for weight in weights if weight.copy_of is None}
        table[shard.index] = _pack(write_layer(partial, shard.name, tensors))
    with together("saving", groups.pp):
        dist.all_reduce(table, group=groups.pp)  # each row is zero on all ranks but one
    if topology.stage_rank == 0:
        files = [_unpack(shard.name, table[shard.index]) for shard in layers]
        _check_shared(partial, files)
        copy_companions(model_dir, partial)
        write_manifest(partial, files, step=step)
        _publish(partial, path)
    return path


def _pack(entry: LayerFile) -> Tensor:
    raw = entry.bytes.to_bytes(8, "little") + bytes.fromhex(entry.sha256)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _unpack(layer: str, row: Tensor) -> LayerFile:
    raw = bytes(row.tolist())
    return LayerFile(layer, f"{layer}.safetensors", int.from_bytes(raw[:8], "little"), raw[8:].hex())


def _check_shared(partial: Path, files: Sequence[LayerFile]) -> None:
    absent = [entry.file for entry in files if not (partial / entry.file).is_file()]
    if absent:
        raise RunError(
            f"{partial} lacks {', '.join(absent[:3])}, which other ranks have written: "
            "checkpoint.dir must lie on a file system that all hosts share"
        )


def _publish(partial: Path, path: Path) -> None:
    """Rename the complete directory into place, over an older save of the same step."""
    if path.exists():
        shutil.rmtree(path)
    partial.rename(path)
    parent = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)
