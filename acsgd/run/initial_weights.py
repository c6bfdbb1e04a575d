"""Initial weights of a run: those of its model, converted into layer shards or drawn, and those of its adapter."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

from acsgd.adapters.initial import NewAdapter, check_base
from acsgd.errors import CorruptFileError
from acsgd.io.checkpoint.resume import Checkpoint, refuse
from acsgd.io.files.cache import open_cached
from acsgd.run.plan.job import Job
from acsgd.shards.convert import from_hf
from acsgd.shards.disk import ShardDirectory
from acsgd.shards.load import RandomWeights, WeightSource
from acsgd.shards.manifest import MANIFEST, VERSION, StoredFile


def open_weight_source(job: Job) -> WeightSource:
    """Return the initial weights. Converts a Hugging Face directory into the cache if it is not there yet.

    A checkpoint with an adapter, which is only evaluated, has all of them.
    """
    model, model_class, source = job.model, job.model.task.model_class, _open_base(job)
    if model.adapter is None or (isinstance(source, ShardDirectory) and source.manifest.adapter is not None):
        return source
    built, seed = model_class.build(model.config), job.config.data.seed
    return NewAdapter(
        source, built, model.description, model.adapter, model_class.name, seed=seed, tokenizer=model.tokenizer
    )


def base_checksums(job: Job) -> str:
    """Return the checksum of the files of a model with frozen parameters, by an adapter or by model.freeze.

    Empty if none are frozen, or if the weights are drawn.
    """
    if job.model.adapter is None and not job.config.model.freeze:
        return ""
    return "" if job.config.model.init == "scratch" else checksum_of(job, _open_base(job))


def checksum_of(job: Job, source: WeightSource) -> str:
    """Return the checksum of the contents of the initial weights, or how they are drawn. Reads no weights."""
    base = source.base if isinstance(source, NewAdapter) else source
    return base.manifest.weights_checksum if isinstance(base, ShardDirectory) else f"seed {job.config.data.seed}"


def check_start_of(job: Job, checkpoint: Checkpoint) -> list[str]:
    """Raise ValueError if the run of a checkpoint started from other weights than model.name and model.init give.

    Returns a sentence if that is not known. Converts the model if it is not in the cache.
    """
    recorded, path = checkpoint.run.identity.weights, checkpoint.path
    if not recorded:
        return [f"{path} does not record the weights that its run started from; those of model.name are not compared"]
    if checksum_of(job, _open_base(job)) in (recorded, checkpoint.shards.manifest.weights_checksum):
        return []
    config, origin = job.config.model, checkpoint.run.origin.get("model", "another model")
    ours = f"model.name={config.name} has" if config.init == "pretrained" else "model.init=scratch gives"
    started = f"the weights of {origin}" if not recorded.startswith("seed") else "new weights (model.init=scratch)"
    refuse(path, f"its run started from {started}, and {ours} others")


def check_base_of(job: Job, checkpoint: ShardDirectory) -> None:
    """Raise RunError if the adapter of a checkpoint was trained on another model, as far as this rank's layers show.

    Layers of the model that are on other hosts alone show nothing.
    """
    base = _open_base(job)
    if isinstance(base, ShardDirectory):
        layers = [layer for layer in _own_layers(job) if not base.lacks(layer)]
        check_base(checkpoint, base, layers, name=job.config.model.name)


def lacks_base_layers(job: Job) -> bool:
    """Return whether files of this rank's layers of the model are on other hosts alone."""
    base = _open_base(job)
    return isinstance(base, ShardDirectory) and any(map(base.lacks, _own_layers(job)))


def _own_layers(job: Job) -> list[str]:
    """Return the names of the layers of this rank's stages."""
    return [job.model.layers[index].name for stage in job.layout.stages for index in range(*job.layout.specs[stage])]


def _open_base(job: Job) -> WeightSource:
    """Return the initial weights of the model without its adapter."""
    if job.config.model.init == "scratch":
        return RandomWeights(job.model.task.model_class, job.model.config, job.model.derived, seed=job.config.data.seed)
    path, task = base_directory(job), job.model.task.model_class.name
    if path == job.model.directory:
        return ShardDirectory(path, job.get_model_file)

    def convert(target: Path) -> None:
        target.mkdir(exist_ok=True)
        from_hf(job.model.directory, target, task=task, layers=job.model.derived)

    return open_cached(path, convert, CachedModel, resumable=True, reports_wait=job.is_first_on_host)


def base_directory(job: Job) -> Path:
    """Return the directory of the model's layer shards, which may not be there yet; that of the model if it has none.

    It has none if model.init is "scratch".
    """
    if job.config.model.init == "scratch" or (job.model.directory / MANIFEST).is_file():
        return job.model.directory
    files = sorted(
        path
        for path in job.model.directory.iterdir()
        if path.suffix in (".safetensors", ".bin", ".json") and path.is_file()
    )
    state = repr([(path.resolve(), path.stat().st_size, path.stat().st_mtime_ns) for path in files])
    task = job.model.task.model_class.name
    name = f"{job.model.directory.name}-{task}-{VERSION}-{hashlib.sha256(state.encode()).hexdigest()[:16]}"
    return job.paths.cache / "models" / name


class CachedModel(ShardDirectory):
    """A model in the cache. A corrupt one is not opened again, so that the next start converts it again."""

    def __init__(self, path: Path) -> None:
        """Read the manifest. Raises CorruptFileError if it is missing, or a file has another size than it says."""
        if not os.path.lexists(path / MANIFEST):
            raise CorruptFileError(path / MANIFEST, "is missing")
        super().__init__(path)
        for entry in self.manifest.files:
            file = path / entry.file
            if not file.is_file() or file.stat().st_size != entry.bytes:
                raise CorruptFileError(
                    file, f"is corrupt: it was written with {entry.bytes} bytes, and has another size"
                )

    def verify(self, entry: StoredFile) -> Path:
        try:
            return super().verify(entry)
        except CorruptFileError as error:
            with contextlib.suppress(OSError):
                (self.path / MANIFEST).unlink(missing_ok=True)
            raise CorruptFileError(
                error.path, f"{error.problem}; start again, and the model is converted again"
            ) from None
