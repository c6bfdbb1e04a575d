"""Repeated training runs of a small GPT-2, from scratch or pretrained once, with results cached as JSON.

Every run is a complete `acsgd.train.train`, or torch's DistributedDataParallel on the same batches (replicas/ddp.py),
in processes of its own over gloo. The training text is a fixed number of sequences, repeated in every epoch; the
sequences that follow in the text are held out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from acsgd.config.options import (
    AdapterConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    PipelineConfig,
    ReplicaConfig,
)
from acsgd.config.run_file import to_toml
from acsgd.io.data.sources.base import TEXT, RecordCounts, SourceRecord
from acsgd.io.data.sources.sources import parse_sources
from acsgd.io.files.cache import open_cached
from acsgd.shards.export import to_hf
from benchmarks.common.small_model import cut, digest, save_blank, with_dropout, written
from benchmarks.replicas import ddp
from tests.lib.forks import started

ROOT = Path(__file__).parents[2]
PROCESSES = 2
LONGEST = timedelta(hours=1)
"""Time limit of a run."""


@dataclass(frozen=True)
class Setting:
    """Options that all runs share."""

    vocabulary: int = 2048
    hidden: int = 128
    blocks: int = 4
    heads: int = 4
    sequence: int = 128
    batch: int = 16
    micro: int = 4
    """With 4, a scale per channel covers 512 tokens, as in a micro-batch of one longer sequence."""
    pretrain_steps: int = 1200
    pretrain_lr: float = 1e-3
    init: Literal["pretrained", "scratch"] = "pretrained"
    """Initial weights: the pretrained ones, or new ones that depend on the seed."""
    trained: int = 256
    """Sequences to train on."""
    held_out: int = 96
    """Sequences to evaluate on, after every epoch."""
    epochs: int = 10
    exact_epochs: int = 1
    """Number of initial epochs without codecs in all runs; a delta codec's first epoch is uncompressed anyway."""
    lr: float = 5e-4
    """Peak learning rate, reached after `warmup` epochs; decays to 0 at the end of the run."""
    warmup: float = 1.0

    @property
    def steps_per_epoch(self) -> int:
        return self.trained // self.batch

    @property
    def elements(self) -> int:
        """Number of activation elements sent per step."""
        return self.batch * self.sequence * self.hidden


SIZES = {
    "small": Setting(),
    "large": Setting(
        vocabulary=8192,
        hidden=768,
        blocks=14,
        heads=12,
        batch=8,
        micro=2,
        pretrain_steps=60,
        pretrain_lr=3e-4,
        trained=64,
        held_out=32,
        epochs=5,
        lr=1e-4,
    ),
}
"""Of 1.3 M and of 106 M parameters. A step of the latter takes 10 to 20 s on two cores."""


class Variant(NamedTuple):
    """Options in which runs differ, besides the seed."""

    forward: str = "none"
    backward: str = "none"
    tied: str = "rows"
    dropout: float = 0.0
    dropout_mask: Literal["step", "sample"] = "step"
    mode: str = "allreduce"
    """dp.mode, or a DistributedDataParallel variant such as "torch:ddp"."""
    replicas: int = 1
    """Number of replicas; with more than one, each has a single stage."""
    rate: float = 1.0
    """Factor of the learning rate."""
    adapter: str | None = None
    optimizer: str = "adamw"
    """optim.name"""
    schedule: str = "linear"
    """optim.schedule"""
    dtype: Literal["fp32", "bf16"] = "fp32"
    masters: Literal["fp32", "none"] = "fp32"
    is_exact_first: bool = True
    """Whether the exact epochs of the setting are."""

    @property
    def stages(self) -> int:
        return PROCESSES if self.replicas == 1 else 1


class Outcome(NamedTuple):
    """Metrics of a finished run."""

    losses: list[float]
    """By step."""
    held_out: list[float]
    """By epoch."""
    forward_bytes: list[int]
    """By step, with headers, without evaluations."""
    backward_bytes: list[int]
    """The same of gradients of activations."""
    dp_bytes: list[int]
    """By step, sum over all replicas."""


@dataclass(frozen=True)
class Tuning:
    """Runs of one model on one text, with all their files in one directory."""

    directory: Path
    setting: Setting
    model: Path
    """A Hugging Face directory, without weights if init is "scratch"."""
    text: Path
    """Text of the training and the held-out sequences."""
    code: str
    """Hash of the package's source code; results of another version are not reused."""

    @classmethod
    def open(cls, directory: Path, setting: Setting, *, pretrain: str, finetune: str) -> Tuning:
        """Create model and text unless they exist.

        pretrain: text of the tokenizer and of pretraining; finetune: text of the runs. Raises ValueError if the latter
        is too short.
        """
        sources = [Path(ddp.__file__), *sorted((ROOT / "acsgd").rglob("*.py"))]
        code = digest("".join(path.read_text() for path in sources))
        make = pretrained if setting.init == "pretrained" else blank
        model = make(directory, setting, pretrain)
        sequences = setting.trained + setting.held_out
        text = written(directory, cut(finetune, model, sequences=sequences, sequence=setting.sequence))
        return cls(directory, setting, model, text, code)

    def outcome(self, variant: Variant, seed: int) -> Outcome:
        """Return the result of a run, from the cache or by running it. Raises RuntimeError if the run fails."""
        config, processes = self.config(variant, seed), variant.stages * variant.replicas
        made_with = {"config": to_toml(config), "processes": processes, "torch": torch.__version__, "code": self.code}

        def build(target: Path) -> None:
            with finished(config, processes) as run_dir:
                outcome = outcome_of(run_dir)
            target.write_text(json.dumps({**outcome._asdict(), **made_with}))

        path = open_cached(self.directory / "outcomes" / f"{digest(json.dumps(made_with))}.json", build, Path)
        kept = json.loads(path.read_text())
        return Outcome(*(kept[name] for name in Outcome._fields))

    def config(self, variant: Variant, seed: int) -> Config:
        """Return the configuration of a run."""
        s = self.setting
        return Config(
            model=ModelConfig(
                str(with_dropout(self.model, variant.dropout)),
                init=s.init,
                dropout_mask=variant.dropout_mask,
                dtype=variant.dtype,
            ),
            data=DataConfig(
                sources=str(self.text),
                sequence=s.sequence,
                batch=s.batch,
                seed=seed,
                eval_fraction=s.held_out / (s.trained + s.held_out),
            ),
            optim=OptimConfig(
                lr=s.lr * variant.rate,
                steps=s.epochs * s.steps_per_epoch,
                warmup=round(s.warmup * s.steps_per_epoch),
                name=variant.optimizer,
                schedule=variant.schedule,
                masters=variant.masters,
            ),
            adapter=AdapterConfig(variant.adapter),
            dp=ReplicaConfig(variant.mode),
            pp=PipelineConfig(
                stages=variant.stages,
                micro=s.micro,
                forward=variant.forward,
                backward=variant.backward,
                tied=variant.tied,
                exact_steps=s.exact_epochs * s.steps_per_epoch * variant.is_exact_first,
                layers=(s.blocks // 2, s.blocks - s.blocks // 2) if variant.stages == 2 else None,
            ),
            eval=EvalConfig(every=s.steps_per_epoch),
            checkpoint=CheckpointConfig(resume="never"),
            log=LogConfig(dir=str(self.directory), to="jsonl"),
        )


def blank(directory: Path, setting: Setting, text: str) -> Path:
    """Return a Hugging Face directory without weights, created unless it exists."""
    s = setting
    sizes = {name: getattr(s, name) for name in ("vocabulary", "sequence", "hidden", "blocks", "heads")}
    path = directory / f"blank-{digest(repr((sizes, text)))}"

    def build(target: Path) -> None:
        target.mkdir()
        save_blank(target, text, **sizes)

    return open_cached(path, build, Path)


def pretrained(directory: Path, setting: Setting, text: str) -> Path:
    """Return a Hugging Face directory of a model pretrained on a text, trained unless it exists."""
    s, untrained = setting, blank(directory, setting, text)

    def build(target: Path) -> None:
        config = Config(
            model=ModelConfig(str(untrained), init="scratch"),
            data=DataConfig(sources=str(written(directory, text)), sequence=s.sequence, batch=s.batch),
            optim=OptimConfig(lr=s.pretrain_lr, steps=s.pretrain_steps, warmup=s.pretrain_steps // 10),
            pp=PipelineConfig(micro=s.batch // PROCESSES),
            log=LogConfig(dir=str(directory), to="jsonl"),
        )
        with finished(config, PROCESSES) as run_dir:
            target.mkdir()
            to_hf(run_dir / "checkpoints" / f"step-{s.pretrain_steps:08d}", target)

    made_with = (untrained.name, s.batch, s.pretrain_steps, s.pretrain_lr, torch.__version__)
    return open_cached(directory / f"pretrained-{digest(repr(made_with))}", build, Path)


def read(sources: str) -> str:
    """Return the text of sources, named as in data.sources. Raises ValueError if one cannot be read."""
    return "\n".join(
        record.fields[TEXT]
        for source, _ in parse_sources(sources)
        for record in source.records(RecordCounts())
        if isinstance(record, SourceRecord)
    )


@contextlib.contextmanager
def finished(config: Config, processes: int) -> Iterator[Path]:
    """Run a job to its end and yield its run directory, a temporary one in log.dir.

    Raises RuntimeError if a rank fails or does not end in time.
    """
    with tempfile.TemporaryDirectory(dir=config.log.dir, prefix="run-") as run_dir:
        config = dataclasses.replace(config, log=dataclasses.replace(config.log, dir=run_dir))
        if ddp.is_torch(config.dp.mode):
            ddp.finish(config, processes, LONGEST)
        else:
            finish(config, processes)
        yield Path(run_dir)


def finish(config: Config, processes: int) -> None:
    """Run a job of acsgd. Raises RuntimeError with the last output of rank 0 if a rank fails or hangs."""
    with started(config, processes) as run:
        try:
            codes, notes = run.join(LONGEST.total_seconds()), run.notes()
        finally:
            shutil.rmtree(run.directory)
    if codes != [0] * processes:
        raise RuntimeError(f"a run ended with {codes}: {notes[-1] if notes else 'before it began'}")


def outcome_of(run_dir: Path) -> Outcome:
    """Read metrics.jsonl of a finished run."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return Outcome(
        losses=[line["loss"] for line in lines],
        held_out=[line["eval_loss"] for line in lines if line.get("eval_loss") is not None],
        forward_bytes=[line["pp_forward_bytes"] for line in lines],
        backward_bytes=[line.get("pp_backward_bytes", 0) for line in lines],
        dp_bytes=[line["dp_bytes"] for line in lines],
    )
