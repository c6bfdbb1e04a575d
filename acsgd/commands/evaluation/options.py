"""Options of `acsgd eval`. Imports no torch, which takes seconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro

from acsgd.commands.generation.options import Decoding
from acsgd.config.options import Offload
from acsgd.config.ranges import Range, out_of_range
from acsgd.errors import missing

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Types of parameters by their names in options of a run -> names in torch."""
OF_LOSS = ("metrics", "sequence", "rows", "long", "targets", "stages", "micro", "timeout")
"""Options without effect on generated answers."""
OF_RECORDS = (
    *("task", "format", "fields", "input_format", "output_format", "split_special_tokens", "on_error", "json"),
    "offload",
)
"""Further options without effect on tasks of lm-eval."""


@dataclass(frozen=True)
class EvalOptions:
    """Evaluate a model: loss, perplexity and metrics of --data, each example counted once.

    Start it with torchrun for several stages or replicas: torchrun --nproc-per-node 4 -m acsgd eval ... --stages 4
    """

    typed: ClassVar[Mapping[str, str]] = {
        "data.sources": "--data",
        "data.eval_sources": "--data",
        "data.batch": "--micro",
    }
    """Options by the options of a run that they set, where the names differ."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Checkpoint, run directory (its newest checkpoint), layer-shard directory, Hugging Face directory or id; adapter
    directory of PEFT that names its base."""
    adapter: Path | None = None
    """Adapter directory of PEFT, trained on the model, which is merged with it."""
    data: str | None = None
    """Sources without weights, as data.eval_sources of a run. Default: what the run that saved the checkpoint evaluates
    on, its data.eval_sources or its data.eval_fraction."""
    generate: bool = False
    """Generate the answer to each prompt of --data instead, and compare it: exact match and ROUGE. In one process."""
    lm_eval: str | None = None
    """Tasks of lm-eval to run on the model instead, comma-separated. In one process; needs acsgd[lm-eval]."""
    lm_eval_args: str = ""
    """Further arguments of lm-eval, after an equals sign: --lm-eval-args="--limit 100 --num_fewshot 5"."""
    metrics: str | None = None
    """Metrics besides the loss, as eval.metrics of a run. Default: as in the run that saved the checkpoint."""
    json: bool = False
    """Print JSON instead of a table."""
    task: str | None = None
    """What the model is trained for. Default: that of layer shards, "lm" for a Hugging Face model."""
    sequence: Annotated[int, Range(1, 2**24)] | None = None
    """Sequence length, tokens. Default: that of the run that saved the checkpoint."""
    rows: Literal["concat", "pack", "single"] | None = None
    """How documents are put into sequences, as data.rows. Default: as in the run that saved the checkpoint."""
    long: Literal["split", "truncate", "skip", "error"] | None = None
    """What is done with a document that is longer than a sequence, as data.long. Default: as in that run."""
    format: str | None = None
    """Format of the records, as data.format. Default: as in that run, else that of a run, as for the options below."""
    fields: str | None = None
    """Names of fields, as data.fields."""
    targets: Literal["answers", "all"] | None = None
    """Which tokens count, as data.targets."""
    input_format: str | None = None
    """Text of a prompt, as data.input_format."""
    output_format: str | None = None
    """Text of an answer, as data.output_format."""
    split_special_tokens: bool | None = None
    """Whether special tokens in messages of chats are ordinary text, as data.split_special_tokens."""
    on_error: Literal["stop", "skip"] | None = None
    """What an unreadable record does, as data.on_error."""
    decoding: tyro.conf.OmitArgPrefixes[Decoding] = dataclasses.field(default_factory=Decoding)
    stages: Annotated[int, Range(1, 2**16)] = 1
    """Ranks per pipeline, as pp.stages of a run. The other processes are replicas, which share the examples."""
    micro: Annotated[int, Range(1, 2**20)] | None = None
    """Micro-batch size, sequences, as pp.micro. Default: as in the run that saved the checkpoint, else 8."""
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Type of parameters and activations. Default: as in the run that saved the checkpoint, else fp32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device: "auto" = one GPU per local rank if the host has any, else the CPU."""
    offload: Offload = "none"
    """Where weights lie between uses, as model.offload: "cpu" = in host memory; "disk" = in the files of the model.
    "none" = on the device."""
    timeout: Annotated[float, Range(0.1, 10**6)] = 600.0
    """Maximum time a rank waits for a message of a peer, seconds."""
    cache: Path = Path("runs/cache")
    """Directory of tokenized data and converted models. Default: that of runs in runs/."""

    def check(self, world_size: int) -> None:
        """Raise ValueError for the first invalid option. world_size: number of processes."""
        for error in out_of_range(self):
            raise ValueError(f"--{error}")
        self.decoding.check()
        if self.generate and self.lm_eval is not None:
            raise ValueError("--generate and --lm-eval exclude each other; give one of them")
        if self.data is not None and self.lm_eval is not None:
            raise ValueError("--lm-eval brings its own data; remove --data")
        if self.lm_eval_args and self.lm_eval is None:
            raise ValueError("--lm-eval-args are for lm-eval; give --lm-eval TASKS, too")
        if world_size > 1 and (self.generate or self.lm_eval is not None):
            option = "--generate" if self.generate else "--lm-eval"
            raise ValueError(f"{option} runs in one process; start acsgd eval without torchrun")

    def check_model(self) -> None:
        """Raise ValueError if model or adapter do not exist, or if the model is not local and there is no --data."""
        from acsgd.shards.hub import refuse_unknown

        path = Path(self.model)
        if self.data is None and self.lm_eval is None and not path.exists():
            raise ValueError(f"{path} {missing(path)}; give a run or a checkpoint or, for a Hugging Face id, --data")
        refuse_unknown(self.model, self.adapter)

    def describe_unread(self) -> list[str]:
        """Return a sentence on the options that are given but have no effect on what is evaluated, if there are any."""
        unread = [*OF_LOSS] if self.generate else [*OF_LOSS, *OF_RECORDS] if self.lm_eval is not None else []
        given = [name for name in unread if getattr(self, name) != getattr(EvalOptions, name)]
        if not self.generate:
            given += [name for name, value in vars(self.decoding).items() if value != getattr(Decoding, name)]
        if not given:
            return []
        what = "generated answers" if self.generate else "tasks of lm-eval" if self.lm_eval is not None else "the loss"
        flags, many = ", ".join(f"--{name.replace('_', '-')}" for name in given), len(given) > 1
        add = "add --generate, or " if what == "the loss" else ""
        return [f"{flags} {'have' if many else 'has'} no effect on {what}; {add}remove {'them' if many else 'it'}"]
