"""Convert a Hugging Face directory to layer shards, with one layer in memory at a time."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Collection
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from acsgd.notes import print_note
from acsgd.seeds import mix_seed
from acsgd.shards.check import first_names
from acsgd.shards.config import derive_layers
from acsgd.shards.disk import VERSION, Manifest, copy_model_files, write_layer
from acsgd.shards.journal import Journal
from acsgd.shards.locate import HFModel, open_hf
from acsgd.shards.writer import bytes_of

Report = Callable[[int, int], object]
"""Called with the number of bytes written and that of all bytes to write."""


def from_hf(source: Path, target: Path, *, task: str = "lm", report: Report = lambda done, total: None) -> None:
    """Convert a Hugging Face directory to layer shards in `target`, a directory.

    It is empty, or was left by an interrupted conversion of the same source, which continues. Tensors keep their dtype
    and bits. A head that the files lack is initialised, and named on stderr. Raises as `open_hf`, ValueError if a
    parameter is not finite, LayersError if the model cannot be divided into layers.
    """
    opened = open_hf(source, task)
    model = derive_layers(source, opened.config, task)
    if opened.new:
        print_note(f"{source} lacks {first_names(opened.new)}: a new head is initialised")
    sizes = {key: sum(bytes_of(x.header) for x in at.sources.values()) for key, at in opened.tensors.items()}
    done, total = 0, sum(sizes.values())
    journal = Journal(target, _identity(source, task))
    files = {}
    for layer, names in model.stored().items():
        entry = journal.find(layer)
        if entry is None:
            entry = write_layer(target, layer, _read(opened, names, source))
            journal.add(layer, entry)
        files[layer] = entry
        done += sum(sizes.get(name, 0) for name in names)
        report(done, total)
    journal.remove()
    copied = copy_model_files(source, target)
    Manifest(0, task, model, files, replicas={}, model_files=copied, run=None).write(target)


def _identity(source: Path, task: str) -> str:
    """Return a hash of everything that the files of the layers depend on, but of files only name, size and time."""
    files = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in source.iterdir())
    state = (str(source.resolve()), files, task, VERSION, transformers.__version__)
    return hashlib.sha256(repr(state).encode()).hexdigest()


def _read(opened: HFModel, names: Collection[str], source: Path) -> dict[str, Tensor]:
    """Read the tensors of a layer, and draw those of a new head. Raises ValueError if a parameter is not finite."""
    tensors = opened.read([name for name in names if name not in opened.new])
    params = {name for name, _ in opened.model.named_parameters()}
    for name in params & tensors.keys():
        if tensors[name].numel() and not all(x.isfinite() for x in tensors[name].aminmax()):
            path = next(iter(opened.tensors[name].sources.values())).path
            raise ValueError(f"{path}: {name} has values that are not finite; give weights without NaN and infinities")
    return tensors | _draw(opened.model, [name for name in names if name in opened.new])


@torch.no_grad()
def _draw(model: PreTrainedModel, names: Collection[str]) -> dict[str, Tensor]:
    """Return new parameters, as transformers initialises them, the same in every conversion."""
    drawn: dict[str, Tensor] = {}
    for index, path in enumerate(dict.fromkeys(name.rpartition(".")[0] for name in names)):
        module = copy.deepcopy(model.get_submodule(path)).to_empty(device="cpu")
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(mix_seed(0, index))
            model._init_weights(module)
        drawn |= {f"{path}.{leaf}": param.detach() for leaf, param in module.named_parameters(recurse=False)}
    return {name: drawn[name] for name in names}
