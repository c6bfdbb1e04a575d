"""A model on disk: one safetensors file per layer, and a JSON manifest that is written last.

    manifest.json            format, version, step, and per layer: file, bytes, sha256
    embed.safetensors        parameters under their Hugging Face names, in the dtype they were given in
    block-00000.safetensors  ...
    head.safetensors
    config.json, tokenizer   as Hugging Face wrote them

No rank and no stage in any name, so a run of any size can read what a run of any other size wrote.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from acsgd.failure import RunError

MANIFEST = "manifest.json"
FORMAT = "acsgd-shards"
VERSION = 1

COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.model",
)
"""Files that make weights a usable Hugging Face model."""


@dataclass(frozen=True)
class LayerFile:
    """The manifest's entry of one layer."""

    layer: str
    file: str
    bytes: int
    sha256: str


def write_layer(directory: Path, layer: str, tensors: Mapping[str, Tensor]) -> LayerFile:
    """Write one layer's file into `directory` and return its entry."""
    path = directory / f"{layer}.safetensors"
    on_host = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    save_file(on_host, path, metadata={"format": "pt"})
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return LayerFile(layer, path.name, path.stat().st_size, _sha256(path))


def write_manifest(directory: Path, files: Iterable[LayerFile], *, step: int) -> None:
    """Complete a shard directory. Its layers are listed first to last; step: optimizer steps trained."""
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "layers": [asdict(file) for file in files],
    }
    path = directory / MANIFEST
    with path.open("w") as file:
        json.dump(manifest, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def copy_companions(source: Path, target: Path) -> None:
    """Copy the config and tokenizer files of a model directory."""
    for pattern in COMPANIONS:
        for path in source.glob(pattern):
            shutil.copyfile(path, target / path.name)


class ShardDirectory:
    """A complete shard directory, opened for reading."""

    def __init__(self, path: Path) -> None:
        """Read the manifest. Raises ValueError if `path` is no shard directory or a newer version's."""
        self.path = path
        manifest = _read_manifest(path)
        self.step: int = manifest["step"]
        self.files = {entry["layer"]: LayerFile(**entry) for entry in manifest["layers"]}
        self._verified: set[str] = set()

    def tensors(self, layer: str, keys: Collection[str]) -> dict[str, Tensor]:
        """Read the named tensors of one layer, which must be all of them.

        Raises RunError if the file is not the one the manifest was written for.
        """
        path = self._verify(layer)
        with safe_open(path, framework="pt") as file:
            stored = set(file.keys())
            if stored != set(keys):
                raise RunError(
                    f"{path} does not hold the parameters of this model: "
                    f"missing {sorted(set(keys) - stored)[:3]}, unexpected {sorted(stored - set(keys))[:3]}"
                )
            return {key: file.get_tensor(key) for key in keys}

    def tensor(self, layer: str, key: str) -> Tensor:
        """Read one tensor of one layer."""
        with safe_open(self._verify(layer), framework="pt") as file:
            return file.get_tensor(key)

    def _verify(self, layer: str) -> Path:
        """Check a layer's file against the manifest, once, and return its path."""
        if layer not in self.files:
            raise RunError(f'{self.path / MANIFEST} lists no layer "{layer}"; it is the manifest of another model')
        entry = self.files[layer]
        path = self.path / entry.file
        if layer not in self._verified:
            if not path.is_file():
                raise RunError(f"{path} is missing; copy the whole directory again")
            if path.stat().st_size != entry.bytes or _sha256(path) != entry.sha256:
                raise RunError(f"{path} is damaged: its content differs from the manifest's sha256")
            self._verified.add(layer)
        return path


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a complete layer-shard directory: {MANIFEST}: {error}") from None
    if manifest.get("format") != FORMAT:
        raise ValueError(f"{path / MANIFEST} is not the manifest of a layer-shard directory")
    if manifest["version"] > VERSION:
        raise ValueError(
            f"{path} was written in version {manifest['version']} of the format, this acsgd reads up to {VERSION}; "
            "upgrade acsgd"
        )
    return manifest


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
