"""Every option of a run: its type, unit, range and default.

A TOML file and command-line flags of the same names describe a run; flags > file > defaults. Plug-ins (schedule,
codecs, data-parallel mode, sources) are spec strings, "name:key=value,...", which `acsgd.run.plan.job` parses
against the tables of the plug-ins. This file imports none of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from acsgd.config.ranges import COUNT, COUNT_OR_NONE, Range

RENAMED = {
    "data.task": "data.sources",
    "data.eval_task": "data.eval_sources",
    "data.eval_share": "data.eval_fraction",
    "data.bad": "data.on_error",
}
"""Former name of an option -> its name. A former name is refused, with the new one in the message."""
REMOVED = {"elastic.replay_log": "a run that loses a stage returns to the newest snapshot, see elastic.snapshot"}
"""Former option -> what happens without it. It is refused, with this in the message."""
FORMER_SWITCHES = {"checkpoint.best": 'the name of a metric, checkpoint.best="eval_loss"'}
"""Option that was true or false -> what to give now. Its former values are refused, with this in the message."""
OF_LINKS = ("pp.forward", "pp.backward")
"""Options that have a value for each link, too: "pp.forward.1" is that of link 1. It is kept as "1=none 2=hadamard"."""

EPOCHS = re.compile(r"(\d+(?:\.\d+)?) ?epochs?")
"""Number of steps in epochs, such as "1 epoch" or "0.5 epochs"; a run knows it in steps when its data are open."""


def in_steps(given: int | str, steps_of: Callable[[float], int]) -> str:
    """Return a number of steps, or a text with some, with those in epochs in steps."""
    return EPOCHS.sub(lambda match: str(steps_of(float(match[1]))), str(given))


TransportName = Literal["auto", "gloo", "nccl"]
OwnTransport = Literal["run", "auto", "gloo", "nccl"]
ShardKind = Literal["none", "optimizer", "gradients", "weights"]
OptimOffload = Literal["none", "cpu"]
Offload = Literal["none", "cpu", "disk"]


@dataclass(frozen=True)
class ModelConfig:
    """The model, its initial weights and its precision."""

    name: str
    """Hugging Face id, Hugging Face model directory, layer-shard directory, or an address of one of them, such as
    s3://bucket/run, where the newest checkpoint counts."""
    tokenizer: str | None = None
    """Hugging Face id or directory of the tokenizer, which checkpoints and exports carry. Default: that of the
    model."""
    task: str = "lm"
    """What the model is trained for, which determines its head: "lm" predicts the next token, "classification" and
    "regression" a label of the sequence, "seq2seq" a target sequence."""
    init: Literal["pretrained", "scratch"] = "pretrained"
    """Initial weights: "pretrained" loads them; "scratch" initializes new ones and needs only config.json."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Type of parameters and activations. bf16 and fp16 keep fp32 master weights and accumulate gradients in fp32."""
    recompute: str = "none"
    """Activation recomputation, less memory for more time: "layers" keeps only each layer's input for backward,
    "every:2" that of every second layer, "attention" all but what attention makes of its input."""
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """Attention, by transformers' switch attn_implementation: "sdpa" = torch's, with the fastest kernel for the device;
    "eager" = plain matrix products; "auto" = what transformers chooses for the type of the model."""
    compile: bool = False
    """Whether torch.compile compiles each block, with the same dropout masks: faster steps on a GPU, after minutes in
    the first ones. Losses differ by rounding."""
    freeze: str | None = None
    """Parameters that are not trained, comma-separated patterns of names: "transformer.wte.*,transformer.h.[0-5].*".
    They take no memory for gradients and optimizer state, and stages below the first trained parameter run no backward.
    Default: none."""
    quantize: Literal["none", "nf4", "int8"] = "none"
    """Keep the frozen linear layers of blocks in 4 ("nf4") or 8 bits ("int8"), as QLoRA does; needs adapter.spec=lora
    and acsgd[8bit]. "none" keeps them in model.dtype."""
    offload: Offload = "none"
    """Where parameters are while their layer, or recomputed group of layers, does not run: "none" = on the device;
    "cpu" = in host memory, trained ones only with optim.offload="cpu"; "disk" = frozen ones in the files of the model.
    Those of the next layer are fetched behind the one that runs."""
    offload_activations: bool = False
    """Whether what backward needs of a layer, or the input of a recomputed group of layers, waits for it in host
    memory. On a GPU."""
    dropout_mask: Literal["step", "sample"] = "step"
    """What a dropout mask depends on: "step" draws new masks in every step; "sample" gives a sequence the same masks in
    every epoch, so that its activations change little between epochs, as delta codecs need. "sample" computes one
    sequence at a time."""


@dataclass(frozen=True)
class DataConfig:
    """The sources and the size of a batch."""

    sources: str
    """Sources, "a.jsonl,b/", with optional weights, "a.jsonl:0.3,b/:0.7": files (*.jsonl, *.jsonl.zst, *.jsonl.gz,
    *.json, *.csv, *.tsv, *.parquet, *.arrow, *.txt), directories and patterns of them, http(s) addresses of them,
    datasets of the Hugging Face Hub ("hf:NAME:CONFIG:SPLIT"), sets in their own layout ("wikitext:PATH", "cot:PATH",
    "natural_instructions:DIRECTORY", "p3:DIRECTORY", "pile:DIRECTORY", "arxiv21:DIRECTORY", "glue:TASK:PATH"), or
    "demo". "stream:SOURCE" tokenizes *.jsonl, *.parquet or "hf:NAME" during training."""
    sequence: Annotated[int, Range(1, 2**24)]
    """Sequence length, tokens."""
    batch: Annotated[int, Range(1, 2**24)]
    """Global batch size, sequences per optimizer step over all replicas. Independent of the number of ranks."""
    deal: Literal["even", "speed"] = "even"
    """How the micro-batches of a batch are dealt to replicas: "even", or by measured "speed", so that slower hosts get
    fewer. Which sequences a step trains on stays the same."""
    objective: Literal["causal", "prefix", "ul2r"] = "causal"
    """What model.task="lm" learns: "causal" predicts each token from those before it; "prefix" attends to a prefix in
    both directions, and predicts the rest; "ul2r" restores what denoisers removed (Tay et al. 2022)."""
    sentinels: str = "<extra_id_{}>"
    """Tokens that mark what "ul2r" removed, with {} in place of their numbers; unused tokens of the tokenizer, such as
    "<|reserved_special_token_{}|>"."""
    modes: str = "[NLU],[S2S],[NLG]"
    """Texts that name the denoisers of "ul2r", comma-separated: those of short spans (R), of the end of a text (S), and
    of long or many spans (X)."""
    rows: Literal["auto", "concat", "pack", "single"] = "auto"
    """How documents are put into sequences: "concat" cuts the concatenation of all documents; "pack" puts whole
    documents together so that little padding is left; "single" pads one document to a sequence. "auto" = "concat"; for
    objectives other than "causal" "pack"; for other tasks than "lm" always "single"."""
    long: Literal["auto", "split", "truncate", "skip", "error"] = "auto"
    """What is done with a document that is longer than a sequence, unless documents are concatenated: "split" makes
    several of it, "truncate" cuts its end off, "skip" leaves it out, "error" ends the run. "auto" = "split", for
    other tasks than "lm" "truncate"."""
    isolate: bool = False
    """Whether documents that are packed into one sequence attend only to themselves. Needs data.rows="pack"."""
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    """Seed of the sample order, of dropout and of new weights."""
    weights: Literal["sequences", "tokens"] = "sequences"
    """What the weights of data.sources are fractions of: "sequences", or "tokens", the target tokens of the sequences.
    Without weights, each sequence of any source is trained on once per epoch."""
    window: Annotated[int, COUNT] = 1024
    """Shuffle window of streamed sources, sequences: their order is shuffled within windows of this length."""
    format: str | tuple[str, ...] = "auto"
    """Format of the records: "text", "messages", "sharegpt", "prompt", "p3", "io", "alpaca", "dolly", "oig", or "label"
    for classification and regression. "auto" detects it from the first record of each source. This and the options
    below up to data.max_answer have one value, or one for each source: ["alpaca", "auto"]."""
    fields: str | tuple[str, ...] | None = None
    """Names of fields that differ from those of the format, "text=content,..."; fields of objects in objects:
    "text=meta.body"; "" = none. Default: none."""
    input_format: str | tuple[str, ...] = "__input__"
    """Text of a prompt in the formats "prompt", "p3" and "io", such as "Question: __input__\\nAnswer: "."""
    output_format: str | tuple[str, ...] = "__output__"
    """Text of an answer in the formats "prompt", "p3" and "io"."""
    max_prompt: Annotated[int, COUNT_OR_NONE] | tuple[Annotated[int, COUNT_OR_NONE], ...] = 0
    """Maximum number of tokens of a prompt, for records of a prompt and an answer; 0 = no limit. Longer ones lose their
    end; those of model.task="seq2seq" are treated as data.long says."""
    max_answer: Annotated[int, COUNT_OR_NONE] | tuple[Annotated[int, COUNT_OR_NONE], ...] = 0
    """Maximum number of tokens of an answer, with the token that ends it, as data.max_prompt."""
    targets: Literal["answers", "all"] = "answers"
    """Which tokens are learned: "answers" masks prompts in the loss, "all" masks nothing."""
    chat_template: str | None = None
    """File with a chat template (Jinja), which checkpoints and exports carry; "openchatkit" writes turns as lines that
    begin with "<human>:" and "<bot>:". Default: that of the tokenizer."""
    chat_template_kwargs: str | None = None
    """Variables of the chat template for all chats, "enable_thinking=false,...": JSON values or texts, or one JSON
    object, unless a record has others under "chat_template_kwargs". Checkpoints and exports carry them in the template.
    Default: none."""
    split_special_tokens: bool = True
    """Whether the texts of special tokens in the messages of a chat, such as "<|im_end|>", are encoded as ordinary
    text, for model.task="lm". Otherwise they are control tokens."""
    on_error: Literal["stop", "skip"] = "stop"
    """What an unreadable record does: "stop" ends the run and names it; "skip" leaves it out and reports the count."""
    eval_sources: str | None = None
    """Sources to evaluate on, as in data.sources but without weights; every sequence is read once. Default: none."""
    eval_fraction: Annotated[float, Range(0, 1, below=True)] = 0.0
    """Fraction of each source that is held out for evaluation, taken from its end; 0.05 = 5 %."""


@dataclass(frozen=True)
class EvalConfig:
    """When the model is evaluated, and by which metrics."""

    every: Annotated[int, COUNT] | None = None
    """Interval between evaluations, optimizer steps. The last step always evaluates. Default: only then."""
    metrics: str | None = None
    """Metrics besides the loss, comma-separated: "perplexity" of tokens; "accuracy", "f1" and "matthews" of classes;
    "pearson" and "spearman" of numbers. Default: those of the task of GLUE ("glue:TASK:PATH"), else "perplexity",
    "accuracy" or "pearson,spearman"."""


@dataclass(frozen=True)
class PipelineConfig:
    """Pipeline parallelism: the stages, the schedule, and the codecs of what travels between stages."""

    stages: Annotated[int, Range(1, 2**16)] = 1
    """Ranks per pipeline. Must divide the number of processes; the quotient is the number of replicas."""
    micro: Annotated[int, Range(1, 2**24)] = 1
    """Micro-batch size, sequences; must divide data.batch. Larger = fewer, longer messages and a larger bubble."""
    schedule: str = "1f1b"
    """Pipeline schedule: "gpipe", "1f1b", "1f1b:lead=2", "interleaved:chunks=2", or, with gradients of weights in waits
    for other stages, "zb", "zb:lead=2", "zbv" or "1f1b:lead=4,split_last=true"; "auto" = the one of the shortest step,
    by what the ranks and the links between them measure at the start."""
    forward: str = "none"
    """Codec of activations: "none", "none:dtype=bf16", "fixpoint:bits=8", "lloyd:bits=4", "hadamard:bits=4",
    "transform:step=0.1", or, for sequences that are trained on more than once, "delta:bits=4" or "delta:step=2"."""
    backward: str = "none"
    """Codec of activation gradients: any of these."""
    compress: str | None = None
    """How codecs are chosen: "auto", or "auto:max_loss_cost=0.01", measures each link and direction, and changes its
    codec when the link changes. pp.forward.1 and pp.backward.1 then give that of the link behind stage 1, and so on.
    Default: pp.forward and pp.backward are the codecs of all links."""
    tied: str = "rows"
    """What travels of a table that is both embedding and head, if these are on different ranks: "rows" of the tokens of
    a batch and their gradients, exactly or quantized ("rows:bits=8"), or the "dense" gradient of the whole table."""
    exact_steps: Annotated[int, COUNT_OR_NONE] | str = 0
    """Number of initial steps that send activations, gradients and rows without codecs; 0 = none. Or of epochs,
    "1 epoch"."""
    exact_eval: bool = True
    """Whether evaluations send activations and rows without codecs."""
    transport: OwnTransport = "run"
    """Transport of activations and gradients between stages, as run.transport; "run" = that of run.transport."""
    layers: tuple[Annotated[int, Range(0, 2**16)], ...] | Literal["auto"] | None = None
    """Transformer blocks per stage, first to last, without the embedding and the head. Default: balanced by estimated
    cost; "auto" = by the time that each rank measures at the start, and by its memory, for ranks that are unequal."""
    hosts: tuple[Annotated[int, Range(0, 2**16)], ...] | Literal["auto"] | None = None
    """Order of the hosts along the pipelines, by their numbers in torchrun; the first one holds the first stages of the
    first pipeline. Default: 0 1 2 ...; "auto" = the order with the shortest predicted step, from layer times and link
    rates that are measured at the start."""

    @property
    def blocks(self) -> tuple[int, ...] | None:
        """Blocks per stage if `layers` gives them."""
        return None if self.layers == "auto" else self.layers

    @property
    def host_order(self) -> tuple[int, ...] | None:
        """Order of the hosts if `hosts` gives it."""
        return None if self.hosts == "auto" else self.hosts

    @property
    def num_exact_steps(self) -> int:
        """Value of `exact_steps` in steps. Of epochs, it is known when the data are open."""
        return int(self.exact_steps)


@dataclass(frozen=True)
class ReplicaConfig:
    """Data parallelism: how replicas of the pipeline synchronize."""

    mode: str = "allreduce"
    """Data-parallel mode: "allreduce", or a compressed one such as "cocktail:random=0.1,topk=0.2,bits=4". Its
    exact_steps or redundant_steps may be epochs, "quantized:exact_steps=1 epoch"."""
    compress: str | None = None
    """How the mode is chosen: "auto", or "auto:max_loss_cost=0.02", measures the links between replicas, and takes
    another mode when they change. Default: dp.mode is the mode."""
    transport: OwnTransport = "run"
    """Transport of the sums of gradients and of the updates that replicas exchange, as run.transport; "run" = that of
    run.transport."""
    local: Literal["auto", "none"] = "auto"
    """Replicas of one domain: "auto" = if there are several domains, they sum their gradients exactly and act as one
    replica towards other domains; "none" = each exchanges with all others. With `shard`, also which replicas divide the
    weights: those of a domain, or all."""
    shard: ShardKind = "none"
    """What each of R replicas, or of the R replicas of each domain, holds 1 / R of: "optimizer" = fp32 masters and
    optimizer state (ZeRO stage 1); "gradients" = these and fp32 gradients, which are then summed after each micro-batch
    (ZeRO stage 2); "weights" = these and all parameters, of which each layer's are gathered while it runs (ZeRO stage
    3)."""
    domain: str | None = None
    """Name of this host's domain, such as a rack with a fast network; hosts may differ in it. Default: each host is
    one."""

    @property
    def sums_passes(self) -> bool:
        """Whether gradients are summed over replicas after each backward, so that whole ones are dropped then."""
        return self.shard in ("gradients", "weights")


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its learning-rate schedule."""

    lr: Annotated[float, Range(0, 1000, above=True)]
    """Peak learning rate."""
    steps: Annotated[int, COUNT] | None = None
    """Number of optimizer steps of the whole run. Either this or optim.epochs."""
    epochs: Annotated[float, Range(0, 10**6, above=True)] | None = None
    """Length of the run in place of optim.steps: number of sequences of the run, divided by the number of training
    sequences of all sources; 0.5 = as many as half of them."""
    name: str = "adamw"
    """Optimizer: "adamw", "adamw8bit", "adafactor", "lion", "muon", "schedule_free_adamw" or "sgd", computed in
    fp32. Modes of `dp.mode` that keep second moments need AdamW's."""
    offload: OptimOffload = "none"
    """Where fp32 masters, their gradients and the optimizer's state are, and its step is computed: "none" = on the
    device of the weights; "cpu" = in host memory."""
    masters: Literal["fp32", "none"] = "fp32"
    """Master weights of a bf16 run: "fp32", or "none": updates are rounded to the bf16 parameters at random, up or
    down, so that the expectation is kept."""
    warmup: Annotated[int, COUNT_OR_NONE] | str = 0
    """Number of steps over which the learning rate rises linearly to its peak, or of epochs, "1 epoch"."""
    schedule: str = "linear"
    """Learning rate after the warm-up: "linear" or "cosine" to 0 at the last step, "constant", "polynomial:power=2",
    "exponential:min=0.01", or "wsd:decay=0.2", which stays at the peak and falls at the end."""
    clip: Annotated[float, Range(0, math.inf, above=True)] = 1.0
    """Maximum global gradient norm; inf = no clipping."""
    weight_decay: Annotated[float, Range(0, 1000)] = 0.01
    """Decoupled weight decay, times the learning rate, of matrices and embeddings only (not of norms and biases)."""
    betas: tuple[Annotated[float, Range(0, 1, below=True)], Annotated[float, Range(0, 1, below=True)]] = (0.9, 0.999)
    """Decay rates of AdamW's first and second moments. The first one is the share of the average in the weights that
    schedule-free AdamW trains."""
    eps: Annotated[float, Range(0, 1, above=True)] = 1e-8
    """Term added to AdamW's denominator."""
    label_smoothing: Annotated[float, Range(0, 1, below=True)] = 0.0
    """Fraction of the target distribution that is spread evenly over all classes in training. 0 = none."""
    on_nan: Literal["stop", "skip"] = "stop"
    """What NaN or inf in the loss or the gradients does: "stop" ends the run and names its origin; "skip" skips the
    update."""
    spike: Annotated[float, Range(1, 10**6, above=True)] | None = None
    """Loss spike threshold, a multiple of the mean loss of the last 16 updates. A spike restores the
    newest valid checkpoint and skips the batch. Default: never."""
    loss_scale: Annotated[float, Range(1, 2**32)] = 65536.0
    """Initial loss scale of fp16 runs, a power of 2. Halved when gradients overflow, doubled after 2000 steps
    without overflow."""

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps of the whole run. Of optim.epochs, it is known when the data are open."""
        assert self.steps is not None
        return self.steps

    @property
    def num_warmup(self) -> int:
        """Value of `warmup` in steps. Of epochs, it is known when the data are open."""
        return int(self.warmup)


@dataclass(frozen=True)
class AdapterConfig:
    """An adapter: a few new parameters that are trained in place of those of the model. Needs acsgd[adapters]."""

    spec: str | None = None
    """Adapter of PEFT, such as "lora:r=16,alpha=32,dropout=0.05,targets=all-linear", "ia3", "prompt_tuning:tokens=20"
    or "prefix_tuning:tokens=20". All parameters of the model are frozen. Default: none."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When the run is saved, which checkpoints are kept, and which one a run resumes from."""

    dir: str | None = None
    """Directory of the checkpoints, step-XXXXXXXX each. Default: "checkpoints" inside log.dir."""
    every: str | None = None
    """Interval between checkpoints: optimizer steps, "500", or minutes, "10min". The last step is always saved.
    Default: only that."""
    keep: Annotated[int, COUNT] = 10
    """Number of most recent checkpoints to keep; older ones are removed when a new one is complete."""
    keep_every: Annotated[int, COUNT] | None = None
    """Also keep, forever, the checkpoints of steps that are multiples of this number. Default: none."""
    best: str | None = None
    """Metric of the evaluations, such as "eval_loss" or "matthews": each best value so far is saved, and the link
    "best" points to that checkpoint. Default: none."""
    resume: str = "auto"
    """Checkpoint to resume from: "auto" = the newest valid one in the directory, if any; "never" moves those that are
    there into a directory of their own, and starts a new run; or a path, or an address as of checkpoint.upload."""
    copies: Annotated[int, COUNT] = 2
    """Number of hosts that hold each file of a checkpoint, if the hosts do not share the directory. Any copies - 1 of
    them may be lost with their disks."""
    rate: Annotated[float, Range(0, 10**6, above=True)] | None = None
    """Maximum rate at which a host sends files of checkpoints to others, MB/s. Default: no limit."""
    upload: str | None = None
    """Address to which checkpoints are uploaded in the background, "s3://bucket/run", "gs://...", "hf://owner/name",
    "sftp://host/path" or "file:///path"; nothing is removed there. Default: none."""
    upload_rate: Annotated[float, Range(0, 10**6, above=True)] | None = None
    """Maximum rate of uploads of a host, MB/s. Default: no limit."""
    on_error: Literal["stop", "continue"] = "stop"
    """What a failed save (such as a full disk) does to the run. Earlier checkpoints are not affected."""

    @property
    def every_steps(self) -> int | None:
        """Interval in optimizer steps, if it is given in steps."""
        return int(self.every) if self.every is not None and not self.every.endswith("min") else None

    @property
    def bytes_per_s(self) -> float | None:
        """Value of `rate`, bytes per second."""
        return None if self.rate is None else self.rate * 1e6

    @property
    def every_s(self) -> float | None:
        """Interval in seconds, if it is given in minutes."""
        return 60 * float(self.every.removesuffix("min")) if self.every and self.every.endswith("min") else None


@dataclass(frozen=True)
class LogConfig:
    """Where metrics and logs are written."""

    dir: str = "runs/default"
    """Run directory: config.toml, metrics.jsonl, logs/, checkpoints/. The caches lie beside it, in ../cache."""
    to: str = "print,jsonl,text"
    """Sinks, comma-separated: "print" (progress line), "jsonl" (metrics.jsonl), "text" (logs/, one file per rank),
    "tensorboard", "mlflow", "trackio", "wandb" (offline without login or network)."""
    every: Annotated[int, COUNT] | None = None
    """Interval between the steps that "print" shows and trackers get, optimizer steps; besides the first and the last
    one, and for trackers those with an evaluation. metrics.jsonl has all. Default: all, but 20 lines of a run where
    standard output is not a terminal."""
    trace: str | None = None
    """First and last step of which each rank records actions, messages, codecs and waits, such as "100:105". They are
    written into the run directory as trace-100-105.json, for Perfetto or chrome://tracing."""
    name: str | None = None
    """Name of the run in mlflow, trackio and wandb. Default: in wandb, WANDB_NAME; else the last component of
    log.dir."""


@dataclass(frozen=True)
class RunConfig:
    """Timeouts, devices and transports."""

    timeout: Annotated[float, Range(0.1, 10**6)] = 600.0
    """Maximum time a rank waits for a message of a peer, seconds; then the run ends."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device: "auto" = one GPU per local rank if the host has any, else the CPU."""
    memory: Literal["check", "ignore"] = "check"
    """What is done with a run that, as `acsgd plan` counts, does not fit the memory of the host or GPU: "check" refuses
    it at its start. A model whose weights and gradients alone exceed it is always refused."""
    transport: TransportName = "auto"
    """Transport of device tensors: "gloo", "nccl", or "auto" = NCCL among GPUs of one host, and between hosts if it is
    measured to be 1.5 times as fast as gloo. NCCL needs one GPU per rank, the same version on all hosts, and codecs
    without entropy coding, other than delta."""
    connections: Annotated[int, Range(1, 16)] = 1
    """Number of TCP connections between two ranks that carry messages between stages, and sums of gradients, in turn,
    and equal parts of each compressed update of replicas: for links that one connection does not fill, such as 1 Gbit/s
    with a delay of 100 ms. Over gloo."""
    congestion: str | None = None
    """TCP congestion control of connections between ranks, such as "bbr" for links that lose packets. Default: that of
    the system, net.ipv4.tcp_congestion_control."""


@dataclass(frozen=True)
class ElasticConfig:
    """Runs whose hosts join and leave: torchrun --rdzv-backend acsgd."""

    min_replicas: Annotated[int, Range(1, 10**6)] = 1
    """Number of replicas below which training waits for hosts."""
    max_replicas: Annotated[int | None, Range(1, 10**6)] = None
    """Number of replicas beyond which workers are spares. At most, and by default, one per micro-batch of a step."""
    below_min: Literal["wait", "end"] = "wait"
    """What a run does that has trained and has fewer replicas: wait for hosts, or end."""
    replan: bool = False
    """Whether pipelines have fewer stages than pp.stages while there are too few workers for elastic.min_replicas of
    pp.stages: as many as there are workers for. Needs memory for larger stages."""
    snapshot: str = "auto"
    """Interval between snapshots of the state in the memory of the next host, to which a run returns that has lost all
    holders of a layer: optimizer steps, "20"; "auto" = by measured cost, for 3 % of the step time, .5 % if
    each stage has replicas on several hosts; "0" = none."""
    silence: Annotated[float, Range(0.2, 3600)] = 2.0
    """Time without a message after which a host counts as lost, seconds."""
    join_budget: Annotated[float, Range(0, 10**6)] = 2.0
    """Time for which training may stand still while a host that joins gets its state, seconds. If the link is too slow
    for that, the state travels in the background, layer by layer."""
    join_rate: Annotated[float, Range(0, 10**6, above=True)] | None = None
    """Rate at which a process sends that state in the background, MB/s. Default: half of the measured rate of the link,
    and 3 % when that could have delayed a step by join_budget."""
    join_moments: Literal["exact", "rounded"] = "exact"
    """Moments of the optimizer that travel in the background over a slow link: as they are, or rounded to a relative
    error of 6 %, in half of the bytes. Only in modes in which each replica has its own."""
    hang: Annotated[float, Range(0.5, 10**6)] = 60.0
    """Time after which a worker is killed that does nothing while all others wait, seconds."""
    force: bool = False
    """Whether this host may start a run again without a majority of the hosts that trained last, if hosts have disks
    of their own. What the others have done since is given up: they are refused until their log.dir is moved away."""


@dataclass(frozen=True)
class Config:
    """All options of a run."""

    model: ModelConfig
    data: DataConfig
    optim: OptimConfig
    pp: PipelineConfig = field(default_factory=PipelineConfig)
    dp: ReplicaConfig = field(default_factory=ReplicaConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    run: RunConfig = field(default_factory=RunConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)

    @property
    def lengths(self) -> dict[str, int | str]:
        """Options that are numbers of steps, or have one in their text, and may be in epochs."""
        return {
            "optim.warmup": self.optim.warmup,
            "pp.exact_steps": self.pp.exact_steps,
            "dp.mode": self.dp.mode,
        }

    def with_steps(self, steps: int, steps_of: Callable[[float], int]) -> Config:
        """Return the options with the numbers of optimizer steps that epochs amount to.

        steps: of the run; steps_of: returns those of some epochs.
        """
        optim, pp, dp = self.optim, self.pp, self.dp
        return replace(
            self,
            optim=replace(optim, steps=steps, warmup=int(in_steps(optim.warmup, steps_of))),
            pp=replace(pp, exact_steps=int(in_steps(pp.exact_steps, steps_of))),
            dp=replace(dp, mode=in_steps(dp.mode, steps_of)),
        )

    @property
    def common(self) -> Config:
        """The options with defaults for those in which hosts may differ."""
        return replace(self, dp=replace(self.dp, domain=None), elastic=replace(self.elastic, force=False))

    @property
    def as_given(self) -> Config:
        """The options without the number of steps that optim.epochs amounts to."""
        return replace(self, optim=replace(self.optim, steps=None)) if self.optim.epochs is not None else self
