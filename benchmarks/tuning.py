"""Pretrain a small GPT-2 once, then fine-tune it as often as wanted: real runs, whose outcomes are kept as JSON.

Every run is the whole of `train.train`, in processes of its own over gloo. The text to fine-tune on is a few hundred
sequences that come again in every epoch; the sequences that follow them in the text are held out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, GPT2Config, PreTrainedTokenizerFast

sys.path.append(str(Path(__file__).parents[1]))  # of a script only its own directory is there

from acsgd.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    PipelineConfig,
    ReplicaConfig,
    to_toml,
)
from acsgd.io.cache import once_per_host
from acsgd.io.tasks import parse_tasks
from acsgd.shards.convert import to_hf
from benchmarks.forks import started

ROOT = Path(__file__).parents[1]
END = "<|endoftext|>"
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
    trained: int = 256
    """Sequences to fine-tune on."""
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
    """How replicas agree."""
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
    """Pretrained, a Hugging Face directory."""
    text: Path
    """As many tokens as make the sequences to train on and those held out."""
    code: str
    """A hash of the sources of acsgd: what another version made is not taken for what this one would make."""

    @classmethod
    def open(cls, directory: Path, setting: Setting, *, pretrain: str, finetune: str) -> Tuning:
        """Make what the runs need, unless it is there. pretrain, finetune: the texts.

        Raises ValueError if there is too little text to fine-tune on.
        """
        sources = [ROOT / "train.py", *sorted((ROOT / "acsgd").rglob("*.py"))]
        code = digest("".join(path.read_text() for path in sources))
        model = pretrained(directory, setting, pretrain)
        text = written(directory, cut(finetune, model, setting))
        return cls(directory, setting, model, text, code)

    def outcome(self, variant: Variant, seed: int) -> Outcome:
        """Return the outcome of a run, which is made now if it is not there. Raises RuntimeError if it fails."""
        config = self._config(variant, seed)
        made_with = {"config": to_toml(config), "torch": torch.__version__, "code": self.code}

        def build(target: Path) -> None:
            with finished(config, variant.stages * variant.replicas) as run_dir:
                outcome = outcome_of(run_dir)
            target.write_text(json.dumps({**outcome._asdict(), **made_with}))

        path = once_per_host(self.directory / "outcomes" / f"{digest(json.dumps(made_with))}.json", build)
        kept = json.loads(path.read_text())
        return Outcome(*(kept[name] for name in Outcome._fields))

    def _config(self, variant: Variant, seed: int) -> Config:
        s = self.setting
        return Config(
            model=ModelConfig(str(with_dropout(self.model, variant.dropout)), dropout_mask=variant.dropout_mask),
            data=DataConfig(
                task=str(self.text),
                sequence=s.sequence,
                batch=s.batch,
                seed=seed,
                eval_share=s.held_out / (s.trained + s.held_out),
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


def pretrained(directory: Path, setting: Setting, text: str) -> Path:
    """Return a model trained from scratch on a text, a Hugging Face directory; train it first if it is not there."""
    s = setting

    def build(target: Path) -> None:
        target.mkdir()
        save_blank(target, text, s)
        config = Config(
            model=ModelConfig(str(target), init="scratch"),
            data=DataConfig(task=str(written(directory, text)), sequence=s.sequence, batch=s.batch),
            optim=OptimConfig(lr=s.pretrain_lr, steps=s.pretrain_steps, warmup=s.pretrain_steps // 10),
            pp=PipelineConfig(micro=s.batch // PROCESSES),
            log=LogConfig(dir=str(directory), to="jsonl"),
        )
        with finished(config, PROCESSES) as run_dir:
            to_hf(run_dir / "checkpoints" / f"step-{s.pretrain_steps:08d}", target)

    shape = (s.vocabulary, s.hidden, s.blocks, s.heads, s.sequence, s.batch, s.pretrain_steps, s.pretrain_lr)
    return once_per_host(directory / f"pretrained-{digest(repr((shape, torch.__version__, text)))}", build)


def save_blank(directory: Path, text: str, setting: Setting) -> None:
    """Write the config of a GPT-2 without dropout, and a byte-level BPE tokenizer trained on a text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=setting.vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(text.splitlines(keepends=True), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END)
    tokenizer.save_pretrained(directory)
    GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=setting.sequence,
        n_embd=setting.hidden,
        n_layer=setting.blocks,
        n_head=setting.heads,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **dropouts(0.0),
    ).save_pretrained(directory)


def with_dropout(model: Path, share: float) -> Path:
    """Return a copy of a model, beside it, whose config asks for dropout; the model itself if it is to have none."""
    if not share:
        return model

    def build(target: Path) -> None:
        shutil.copytree(model, target)
        config = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps({**config, **dropouts(share)}, indent=2))

    return once_per_host(model.with_name(f"{model.name}-dropout-{share:g}"), build)


def dropouts(share: float) -> dict[str, float]:
    """Return a GPT-2's keys for dropout, at all places alike."""
    return {"resid_pdrop": share, "embd_pdrop": share, "attn_pdrop": share}


def cut(text: str, model: Path, setting: Setting) -> str:
    """Return the beginning of a text that is the setting's number of sequences. Raises ValueError if it has fewer."""
    sequences = setting.trained + setting.held_out
    # half a sequence more, which is no sequence: a cut may change a token or two
    wanted = sequences * setting.sequence + setting.sequence // 2
    tokenizer = AutoTokenizer.from_pretrained(model)
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    if len(offsets) <= wanted:
        raise ValueError(
            f"the text to fine-tune on has {len(offsets)} tokens, too few for {sequences} sequences of "
            f"{setting.sequence}; give a longer one"
        )
    return text[: offsets[wanted][0]]


def read(sources: str) -> str:
    """Return the text of some sources, which are named as in data.task. Raises ValueError if one cannot be read."""
    return "\n".join(piece.text for task, _ in parse_tasks(sources) for piece in task.pieces())


def written(directory: Path, text: str) -> Path:
    """Return a file with a text, and nothing else, in a directory; its name follows from the text."""
    return once_per_host(directory / f"{digest(text)}.txt", lambda path: path.write_text(text, newline=""))


@contextlib.contextmanager
def finished(config: Config, processes: int) -> Iterator[Path]:
    """Make a run, from its first step to its last, and yield its directory: a new one in log.dir, removed at the end.

    Raises RuntimeError with what rank 0 said last, if a rank fails or does not come to its end.
    """
    with tempfile.TemporaryDirectory(dir=config.log.dir, prefix="run-") as run_dir:
        log = dataclasses.replace(config.log, dir=run_dir)
        with started(dataclasses.replace(config, log=log), processes) as run:
            try:
                codes, notes = run.join(LONGEST), run.notes()
            finally:
                shutil.rmtree(run.told)
        if codes != [0] * processes:
            raise RuntimeError(f"a run ended with {codes}: {notes[-1] if notes else 'before it began'}")
        yield Path(run_dir)


def outcome_of(run_dir: Path) -> Outcome:
    """Return what a finished run has written into its metrics.jsonl."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return Outcome(
        losses=[line["loss"] for line in lines],
        held_out=[line["eval_loss"] for line in lines if line.get("eval_loss") is not None],
        forward_bytes=[line["pp_forward_bytes"] for line in lines],
        dp_bytes=[line["dp_bytes"] for line in lines],
    )


def digest(text: str) -> str:
    """Return a short hash of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]
