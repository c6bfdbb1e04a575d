"""Every option of a run: its type, unit, default and the arithmetic that must hold between options.

A run is described by a TOML file and command-line flags of the same names; flags > file > defaults.
Plug-ins (schedule, codecs, data-parallel mode, tasks) are spec strings, parsed against their own tables in
`acsgd.run.job`: this file lies below them and knows none of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class ModelConfig:
    """Which model is trained, from which weights, in which precision."""

    name: str
    """Hugging Face id, Hugging Face directory, or layer-shard directory."""
    init: Literal["pretrained", "scratch"] = "pretrained"
    """"scratch" draws new weights and needs only the model's config.json."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Type of weights and activations; bf16 and fp16 keep fp32 master weights and accumulate gradients in fp32."""
    recompute: Literal["none", "layers"] = "none"
    """"layers" keeps only the input of each layer for backward and computes the rest again: less memory, more time."""
    dropout_mask: Literal["step", "sample"] = "step"
    """"step" draws new dropout masks in every step; with "sample" a sequence has the same ones in every epoch, so its
    activations change little between visits, as delta codecs need. It then trains one sequence at a time."""


@dataclass(frozen=True)
class DataConfig:
    """What is read, and how much of it makes one optimizer step."""

    task: str
    """Sources with optional weights: "a.jsonl:0.3,b.txt:0.7", *.jsonl, *.jsonl.zst, *.txt or "demo"."""
    sequence: int
    """Tokens per sequence."""
    batch: int
    """Sequences per optimizer step, over all replicas; it does not change with the number of ranks."""
    seed: int = 0
    """Seed of the data order, of dropout and of new weights."""
    bad: Literal["stop", "skip"] = "stop"
    """What a line that cannot be read does: end the run, naming it, or be left out, counted and reported."""
    eval_task: str | None = None
    """Sources to evaluate on, as in data.task, without weights: each of their sequences once."""
    eval_share: float = 0.0
    """Part of each source of data.task, its end, that is held out to evaluate on; 0.05 = 5 %."""


@dataclass(frozen=True)
class EvalConfig:
    """When the model is evaluated on data.eval_task or data.eval_share."""

    every: int | None = None
    """Optimizer steps between evaluations; the end of the run always evaluates. Default: only then."""


@dataclass(frozen=True)
class PipelineConfig:
    """How the model is cut into stages and how micro-batches flow through them."""

    stages: int = 1
    """Ranks per pipeline; must divide the number of processes. The rest are replicas."""
    micro: int = 1
    """Sequences per micro-batch; must divide data.batch. Larger = fewer, longer messages and a larger bubble."""
    schedule: str = "1f1b"
    """"gpipe", "1f1b" or "interleaved:chunks=2"."""
    forward: str = "none"
    """Codec of the activations: "none", "none:dtype=bf16", "fixpoint:bits=8", "lloyd:bits=4", "hadamard", or, for data
    that are visited again, "delta:bits=4" or "delta:step=2"."""
    backward: str = "none"
    """Codec of the activations' gradients."""
    exact_steps: int = 0
    """Optimizer steps at the start of the run that send without these codecs."""
    exact_eval: bool = True
    """Whether evaluations send without them."""
    layers: tuple[int, ...] | None = None
    """Blocks per stage, first to last; overrides the plan by cost. The embedding and head come on top."""


@dataclass(frozen=True)
class ReplicaConfig:
    """How replicas of the pipeline agree."""

    mode: str = "allreduce"
    """"allreduce", or how weights are exchanged where links are slow: "cocktail:random=0.1,topk=0.2,bits=4"."""


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its learning rate, counted in optimizer steps."""

    lr: float
    """Peak learning rate."""
    steps: int
    """Optimizer steps of the whole run."""
    name: Literal["adamw"] = "adamw"
    """AdamW, in fp32 on the master weights."""
    warmup: int = 0
    """Optimizer steps over which the rate rises linearly to its peak."""
    schedule: Literal["linear", "cosine"] = "linear"
    """How the rate falls to 0 after the warm-up."""
    clip: float = 1.0
    """Largest global gradient norm; "inf" = no clipping."""
    weight_decay: float = 0.01
    """Decoupled decay per step, of matrices and embeddings only: never of norms and biases."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of AdamW's first and second moments."""
    eps: float = 1e-8
    """Added to AdamW's denominator."""
    on_nan: Literal["stop", "skip"] = "stop"
    """What NaN or inf in the loss or the gradients does: end the run, naming its origin, or leave the update out."""
    spike: float | None = None
    """A loss of more than this many times the mean of the last 16 sends the run back to its last checkpoint and
    past the batch. Default: never."""
    loss_scale: float = 65536.0
    """What fp16 multiplies the loss by at first; halved when gradients overflow, doubled after 2000 good steps."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When the state of the run is saved, which saves are kept, and from which one it goes on."""

    dir: str | None = None
    """Directory of step-XXXXXXXX directories; default: "checkpoints" inside log.dir."""
    every: str | None = None
    """Time between saves: optimizer steps, "500", or minutes, "10min". The end always saves. Default: only then."""
    keep: int = 10
    """Newest checkpoints that are kept; older ones are removed when a new one is complete."""
    keep_every: int | None = None
    """Checkpoints at multiples of this many steps are kept for ever, besides the newest."""
    best: bool = False
    """Save when an evaluation is the best so far, and keep that checkpoint, to which the link "best" leads."""
    resume: str = "auto"
    """"auto" = go on from the newest complete checkpoint in dir, if any; "never"; or a checkpoint's path."""
    on_error: Literal["stop", "continue"] = "stop"
    """What a save that fails (a full disk) does to the run. Earlier checkpoints stay as they are."""

    @property
    def every_steps(self) -> int | None:
        """Optimizer steps between saves, if told in steps."""
        return int(self.every) if self.every is not None and not self.every.endswith("min") else None

    @property
    def every_s(self) -> float | None:
        """Seconds between saves, if told in minutes."""
        return 60 * float(self.every.removesuffix("min")) if self.every and self.every.endswith("min") else None


@dataclass(frozen=True)
class LogConfig:
    """What is written about the run."""

    dir: str = "runs/default"
    """The run directory: config.toml, metrics.jsonl, logs/, checkpoints/. Caches lie beside it."""
    to: str = "print,jsonl,text"
    """Comma-separated: "print" (a progress line), "jsonl" (metrics.jsonl), "text" (logs/, one file per rank),
    "wandb" (offline where it is not logged in or has no network)."""
    name: str | None = None
    """The run's name in wandb; default: the last part of log.dir."""


@dataclass(frozen=True)
class RunConfig:
    """How the processes of the run treat each other."""

    timeout: float = 600.0
    """Seconds without an awaited message after which a rank gives its peer up and the run ends."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto" = a GPU per local rank where there is one, else the CPU."""


@dataclass(frozen=True)
class Config:
    """All options of a run."""

    model: ModelConfig
    data: DataConfig
    optim: OptimConfig
    pp: PipelineConfig = field(default_factory=PipelineConfig)
    dp: ReplicaConfig = field(default_factory=ReplicaConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    run: RunConfig = field(default_factory=RunConfig)
