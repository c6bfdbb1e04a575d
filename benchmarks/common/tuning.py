"""Train a small GPT-2 as often as wanted, from scratch or once pretrained: real runs, whose outcomes are kept as JSON.

Every run is the whole of `train.train`, or torch's own replicas on the same batches (replicas/ddp.py), in processes
of its own over gloo. The text to train on is a number of sequences that come again in every epoch; the sequences that
follow them in the text are held out.
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
from acsgd.io.cache import once_per_host
from acsgd.io.sources.sources import parse_sources
from acsgd.shards.convert import to_hf
from benchmarks.common.small_model import cut, digest, save_blank, with_dropout, written
from benchmarks.forks import started
from benchmarks.replicas import ddp

ROOT = Path(__file__).parents[2]
PROCESSES = 2
LONGEST = timedelta(hours=1)
"""A run that takes longer hangs."""


@dataclass(frozen=True)
class Setting:
    """What all runs have in common."""

    vocabulary: int = 2048
    hidden: int = 128
    blocks: int = 4
    heads: int = 4
    sequence: int = 128
    batch: int = 16
    micro: int = 4
    """So a scale per channel is that of 512 tokens, as in runs whose micro-batches are one longer sequence."""
    pretrain_steps: int = 1200
    pretrain_lr: float = 1e-3
    init: Literal["pretrained", "scratch"] = "pretrained"
    """Whether runs begin with the pretrained weights, or with new ones, others for each seed."""
    trained: int = 256
    """Sequences to train on."""
    held_out: int = 96
    """Sequences to evaluate on, after every epoch."""
    epochs: int = 10
    exact_epochs: int = 1
    """Epochs at the start that travel without codecs in all runs, as first visits do where sequences are remembered."""
    lr: float = 5e-4
    """Peak; it rises to it over `warmup` of an epoch and falls to 0 in the rest of the run."""
    warmup: float = 1.0

    @property
    def steps_per_epoch(self) -> int:
        return self.trained // self.batch

    @property
    def elements(self) -> int:
        """Activations that cross the cut in a step."""
        return self.batch * self.sequence * self.hidden


class Variant(NamedTuple):
    """What a run has for itself, besides its seed."""

    forward: str = "none"
    backward: str = "none"
    dropout: float = 0.0
    dropout_mask: Literal["step", "sample"] = "step"
    mode: str = "allreduce"
    """How replicas agree: as dp.mode says, or in one of torch's ways, "torch:ddp", say."""
    replicas: int = 1
    """With more than one, each is a single stage."""
    rate: float = 1.0
    """Factor of the learning rate."""

    @property
    def stages(self) -> int:
        return PROCESSES if self.replicas == 1 else 1


class Outcome(NamedTuple):
    """What a finished run has said of itself."""

    losses: list[float]
    """By step."""
    held_out: list[float]
    """By epoch."""
    forward_bytes: list[int]
    """By step, headers included, evaluations not."""
    dp_bytes: list[int]
    """By step, of all replicas."""


@dataclass(frozen=True)
class Tuning:
    """Runs that fine-tune one model on one text; all that they write lies in one directory."""

    directory: Path
    setting: Setting
    model: Path
    """A Hugging Face directory, without weights if runs begin with new ones."""
    text: Path
    """As many tokens as make the sequences to train on and those held out."""
    code: str
    """A hash of the sources of all runs: what another version made is not taken for what this one would make."""

    @classmethod
    def open(cls, directory: Path, setting: Setting, *, pretrain: str, finetune: str) -> Tuning:
        """Make what the runs need, unless it is there. pretrain: the text of the tokenizer and of what is pretrained;
        finetune: the text of the runs.

        Raises ValueError if there is too little of that.
        """
        sources = [Path(ddp.__file__), *sorted((ROOT / "acsgd").rglob("*.py"))]
        code = digest("".join(path.read_text() for path in sources))
        make = pretrained if setting.init == "pretrained" else blank
        model = make(directory, setting, pretrain)
        sequences = setting.trained + setting.held_out
        text = written(directory, cut(finetune, model, sequences=sequences, sequence=setting.sequence))
        return cls(directory, setting, model, text, code)

    def outcome(self, variant: Variant, seed: int) -> Outcome:
        """Return the outcome of a run, which is made now if it is not there. Raises RuntimeError if it fails."""
        config, processes = self._config(variant, seed), variant.stages * variant.replicas
        made_with = {"config": to_toml(config), "processes": processes, "torch": torch.__version__, "code": self.code}

        def build(target: Path) -> None:
            with finished(config, processes) as run_dir:
                outcome = outcome_of(run_dir)
            target.write_text(json.dumps({**outcome._asdict(), **made_with}))

        path = once_per_host(self.directory / "outcomes" / f"{digest(json.dumps(made_with))}.json", build)
        kept = json.loads(path.read_text())
        return Outcome(*(kept[name] for name in Outcome._fields))

    def _config(self, variant: Variant, seed: int) -> Config:
        s = self.setting
        return Config(
            model=ModelConfig(
                str(with_dropout(self.model, variant.dropout)), init=s.init, dropout_mask=variant.dropout_mask
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
            ),
            dp=ReplicaConfig(variant.mode),
            pp=PipelineConfig(
                stages=variant.stages,
                micro=s.micro,
                forward=variant.forward,
                backward=variant.backward,
                exact_steps=s.exact_epochs * s.steps_per_epoch,
                layers=(s.blocks // 2, s.blocks - s.blocks // 2) if variant.stages == 2 else None,
            ),
            eval=EvalConfig(every=s.steps_per_epoch),
            checkpoint=CheckpointConfig(resume="never"),
            log=LogConfig(dir=str(self.directory), to="jsonl"),
        )


def blank(directory: Path, setting: Setting, text: str) -> Path:
    """Return a model without weights, a Hugging Face directory; make it first if it is not there."""
    s = setting
    sizes = {name: getattr(s, name) for name in ("vocabulary", "sequence", "hidden", "blocks", "heads")}
    path = directory / f"blank-{digest(repr((sizes, text)))}"

    def build(target: Path) -> None:
        target.mkdir()
        save_blank(target, text, **sizes)

    return once_per_host(path, build)


def pretrained(directory: Path, setting: Setting, text: str) -> Path:
    """Return a model trained from scratch on a text, a Hugging Face directory; train it first if it is not there."""
    s, begun = setting, blank(directory, setting, text)

    def build(target: Path) -> None:
        config = Config(
            model=ModelConfig(str(begun), init="scratch"),
            data=DataConfig(sources=str(written(directory, text)), sequence=s.sequence, batch=s.batch),
            optim=OptimConfig(lr=s.pretrain_lr, steps=s.pretrain_steps, warmup=s.pretrain_steps // 10),
            pp=PipelineConfig(micro=s.batch // PROCESSES),
            log=LogConfig(dir=str(directory), to="jsonl"),
        )
        with finished(config, PROCESSES) as run_dir:
            target.mkdir()
            to_hf(run_dir / "checkpoints" / f"step-{s.pretrain_steps:08d}", target)

    made_with = (begun.name, s.batch, s.pretrain_steps, s.pretrain_lr, torch.__version__)
    return once_per_host(directory / f"pretrained-{digest(repr(made_with))}", build)


def read(sources: str) -> str:
    """Return the text of some sources, which are named as in data.sources. Raises ValueError if one cannot be read."""
    return "\n".join(piece.text for source, _ in parse_sources(sources) for piece in source.pieces())


@contextlib.contextmanager
def finished(config: Config, processes: int) -> Iterator[Path]:
    """Make a run, from its first step to its last, and yield its directory: a new one in log.dir, removed at the end.

    Raises RuntimeError if a rank fails or does not come to its end.
    """
    with tempfile.TemporaryDirectory(dir=config.log.dir, prefix="run-") as run_dir:
        config = dataclasses.replace(config, log=dataclasses.replace(config.log, dir=run_dir))
        if ddp.is_torch(config.dp.mode):
            ddp.finish(config, processes, LONGEST)
        else:
            finish(config, processes)
        yield Path(run_dir)


def finish(config: Config, processes: int) -> None:
    """Make a run of acsgd. Raises RuntimeError with what rank 0 said last, if a rank fails or does not end."""
    with started(config, processes) as run:
        try:
            codes, notes = run.join(LONGEST), run.notes()
        finally:
            shutil.rmtree(run.told)
    if codes != [0] * processes:
        raise RuntimeError(f"a run ended with {codes}: {notes[-1] if notes else 'before it began'}")


def outcome_of(run_dir: Path) -> Outcome:
    """Return what a finished run has written into its metrics.jsonl."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return Outcome(
        losses=[line["loss"] for line in lines],
        held_out=[line["eval_loss"] for line in lines if line.get("eval_loss") is not None],
        forward_bytes=[line["pp_forward_bytes"] for line in lines],
        dp_bytes=[line["dp_bytes"] for line in lines],
    )
