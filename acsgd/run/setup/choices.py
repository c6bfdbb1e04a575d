"""Choices of a run that have no effect, or defeat their purpose: a sentence each, with what to type."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import NamedTuple

import torch

from acsgd.config.adapters import LoRA
from acsgd.config.checks import traced_steps
from acsgd.config.options import Config, DataConfig, ElasticConfig, ModelConfig, OptimConfig
from acsgd.dp.modes import redundant_steps
from acsgd.dp.modes.diloco import DiLoCo
from acsgd.dp.modes.sparseloco import SparseLoCo
from acsgd.io.checkpoint.progress import RECENT
from acsgd.io.data.sources.streamed import Streamed
from acsgd.optim.adamw import AdamW
from acsgd.optim.adamw8bit import AdamW8bit
from acsgd.optim.muon import Muon
from acsgd.optim.schedule import learning_rate
from acsgd.optim.schedule_free import ScheduleFreeAdamW
from acsgd.pp.schedules.schedules import GPipe
from acsgd.pp.tied.plan import TiedRows
from acsgd.pp.wire.delta import Delta
from acsgd.pp.wire.ladder import codecs_of_links
from acsgd.run.plan.job import Job
from acsgd.run.plan.partition import most_replicas
from acsgd.run.plan.transports import exchanges_updates, sums_gradients


class Choice(NamedTuple):
    """A choice that is reported at the start of a run."""

    applies: Callable[[Job, float], bool]
    """Whether a run has made it, by its job and its number of epochs."""
    text: str
    """Sentence, formatted with `config` and `epochs`."""


DEFAULTS = Config(ModelConfig(""), DataConfig("", sequence=1, batch=1), OptimConfig(lr=1.0))


def without_effect(options: str, applies: Callable[[Job], bool], reason: str, remedy: str = "") -> Choice:
    """Return the choice of options that have no effect in some runs.

    options: names, separated by spaces; applies: whether they have none; reason: clause; remedy: imperative, what to do
    besides removing them. Both are formatted as `Choice.text`.
    """
    getters = [attrgetter(name) for name in options.split()]

    def is_made(job: Job, _: float) -> bool:
        return any(get(job.config) != get(DEFAULTS) for get in getters) and applies(job)

    given = " and ".join(f"{name}={{config.{name}}}" for name in options.split())
    remove = "remove it" if len(getters) == 1 else "remove them"
    return Choice(is_made, f"{given} {'has' if len(getters) == 1 else 'have'} no effect: {reason}; {remedy}{remove}")


def _of_delta(direction: str, tensors: str) -> Iterator[Choice]:
    """Yield the choices with which a delta of a direction gains little. tensors: those that it caches."""
    option = f"pp.{direction}"
    yield Choice(
        lambda job, epochs: _has_caches(job, direction) and 0 < epochs <= 1,
        f"{option}={{config.{option}}} sends a sequence without compression when it is trained on first, and no "
        f"sequence is trained on twice in {{epochs:.2f}} epochs; give --{option} fixpoint:bits=8, or a longer run",
    )
    yield Choice(
        lambda job, _: _has_caches(job, direction) and job.config.model.dropout_mask == "step" and _has_dropout(job),
        f"{option}={{config.{option}}} needs {tensors} that change little between epochs, but "
        "model.dropout_mask=step draws new dropout masks in every step; give --model.dropout_mask sample",
    )


CHOICES = (
    without_effect(
        "pp.forward pp.backward", lambda job: job.topology.stages == 1, "there is one stage", "give --pp.stages 2, or "
    ),
    without_effect(
        "pp.schedule",
        lambda job: job.topology.stages == 1 and not isinstance(job.plugins.schedule, GPipe),
        "there is one stage",
    ),
    Choice(
        lambda job, _: len(job.micro_ids) < job.topology.stages and job.config.pp.micro > 1,
        "data.batch={config.data.batch} with pp.micro={config.pp.micro} gives a replica fewer micro-batches than its "
        "{config.pp.stages} stages, which wait for each other; give a smaller --pp.micro",
    ),
    without_effect(
        "pp.backward",
        lambda job: 0 < len(job.layout.specs) - 1 == job.programs.first_backward,
        "all trained parameters are in the last stage, so that no gradient is sent",
    ),
    Choice(
        lambda job, _: any(
            link < job.programs.first_backward for link in codecs_of_links(job.config.pp.backward) or ()
        ),
        'pp.backward="{config.pp.backward}" gives codecs of links without effect: before the first stage with trained '
        "parameters, no gradient is sent; remove those of these links",
    ),
    without_effect(
        "pp.compress",
        lambda job: job.topology.stages == 1,
        "there is one stage, so there are no links to choose codecs for",
        "give --pp.stages 2, or ",
    ),
    without_effect("pp.transport", lambda job: job.topology.stages == 1, "there is one stage"),
    without_effect("dp.transport", lambda job: _is_alone(job), "there is one replica"),
    without_effect(
        "dp.transport",
        lambda job: not (_is_alone(job) or sums_gradients(job.plugins.mode) or exchanges_updates(job.plugins.mode)),
        "replicas of dp.mode={config.dp.mode} exchange nothing",
    ),
    without_effect("pp.layers", lambda job: job.topology.stages == 1, "there is one stage", "give --pp.stages 2, or "),
    without_effect("pp.hosts", lambda job: job.topology.stages == 1, "there is one stage", "give --pp.stages 2, or "),
    without_effect(
        "pp.hosts",
        lambda job: job.topology.stages > 1 and job.local_world_size == job.topology.world_size,
        "there is one host",
    ),
    without_effect("pp.tied", lambda job: not job.tied, "no table is both embedding and head on different ranks"),
    without_effect(
        "pp.exact_steps",
        lambda job: not _sends_codes(job),
        "nothing is sent with a codec",
        "give --pp.stages 2 --pp.forward fixpoint:bits=8, or ",
    ),
    without_effect(
        "pp.exact_eval",
        lambda job: not (_sends_codes(job) and _evaluates(job.config.data)),
        "no evaluation sends anything with a codec",
    ),
    Choice(
        lambda job, _: _sends_codes(job) and job.config.pp.num_exact_steps >= job.config.optim.num_steps,
        "pp.exact_steps={config.pp.exact_steps} sends everything without codecs in all {config.optim.steps} steps; "
        "give a smaller --pp.exact_steps",
    ),
    *_of_delta("forward", "activations"),
    *_of_delta("backward", "gradients"),
    Choice(
        lambda job, _: bool(
            not _is_alone(job)
            and redundant_steps(job.plugins.mode)
            and job.plugins.delta is not None
            and job.plugins.delta.cache_gib
        ),
        "dp.mode={config.dp.mode}: in redundant steps each replica caches the sequences of all, and keeps them where "
        "cache_gib leaves no room for its own; give no cache_gib, or fewer redundant_steps",
    ),
    Choice(
        lambda job, _: job.config.model.dtype == "fp16" and _caches_gradients(job),
        "pp.backward={config.pp.backward} caches gradients times the loss scale of model.dtype=fp16, so that their "
        "differences are large whenever it changes; give --model.dtype bf16, or --pp.backward fixpoint:bits=8",
    ),
    Choice(
        lambda job, _: job.config.model.dropout_mask == "sample" and not _has_dropout(job),
        "model.dropout_mask=sample computes one sequence at a time, but the model has no dropout; remove it",
    ),
    Choice(
        lambda job, epochs: (
            job.config.model.dropout_mask == "sample" and _has_dropout(job) and not _has_caches(job) and 0 < epochs <= 1
        ),
        "model.dropout_mask=sample computes one sequence at a time, but no sequence is trained on twice in "
        "{epochs:.2f} epochs; remove it",
    ),
    Choice(
        lambda job, _: job.config.model.init == "scratch" and bool(job.config.model.freeze or job.config.adapter.spec),
        "model.init=scratch gives frozen parameters random values, which nothing trains; remove it, or adapter.spec "
        "and model.freeze",
    ),
    without_effect("dp.mode", lambda job: _is_alone(job), "there is one replica", "start more processes, or "),
    *(
        without_effect(option, lambda job: _is_alone(job), "there is one replica", "start more processes, or ")
        for option in ("dp.compress", "dp.local", "dp.domain", "dp.shard")
    ),
    without_effect(
        "dp.local",
        lambda job: not _is_alone(job) and job.plugins.mode.exchanges == "nothing",
        "with dp.mode={config.dp.mode} no replicas act as one",
    ),
    without_effect(
        "dp.domain",
        lambda job: not (job.domain or _is_alone(job)),
        "with dp.local={config.dp.local}, dp.mode={config.dp.mode} no replicas act as one",
    ),
    without_effect("data.deal", lambda job: _is_alone(job), "there is one replica", "start more processes, or "),
    without_effect(
        "data.deal",
        lambda job: 1 < job.topology.replicas == job.shapes.num_micros and not job.is_elastic,
        "there is one micro-batch per replica",
        "give a smaller --pp.micro or a larger --data.batch, or ",
    ),
    Choice(
        lambda job, _: not _is_alone(job) and getattr(job.plugins.mode, "exact_steps", 0) >= job.config.optim.num_steps,
        "dp.mode={config.dp.mode} sends everything without compression in its exact_steps, which are all of the "
        "{config.optim.steps} steps; give fewer, or --dp.mode allreduce",
    ),
    Choice(
        lambda job, _: not _is_alone(job) and redundant_steps(job.plugins.mode) >= job.config.optim.num_steps,
        "dp.mode={config.dp.mode}: in redundant_steps, all {config.optim.steps} of the run, each replica computes all "
        "micro-batches, so that several are no faster than one; give fewer",
    ),
    Choice(
        lambda job, _: not _is_alone(job) and _steps_after_exchange(job) >= job.config.optim.num_steps,
        "dp.mode={config.dp.mode} exchanges weights after `inner` steps, but the run has {config.optim.steps}: "
        "replicas are never the same model; give a smaller inner, or a longer run",
    ),
    Choice(
        lambda job, _: not _is_alone(job) and 0 < _steps_after_exchange(job) < job.config.optim.num_steps,
        "dp.mode={config.dp.mode}: the run of {config.optim.steps} steps ends between two exchanges of weights, so the "
        "model will have nothing of the steps after the last one; give an inner, or optim.steps, with which the last "
        "step is followed by an exchange",
    ),
    Choice(
        lambda job, _: job.streams.device.type == "cpu" and job.config.optim.offload == "cpu",
        "optim.offload=cpu saves no memory on a CPU, whose memory holds masters and moments anyway, and copies each "
        "gradient; remove it",
    ),
    Choice(
        lambda job, _: job.streams.device.type == "cpu" and job.config.model.offload == "cpu",
        "model.offload=cpu saves no memory on a CPU, whose memory holds the weights anyway, and copies those of each "
        "layer in each pass; give --model.offload disk, or remove it",
    ),
    without_effect(
        "model.offload_activations",
        lambda job: job.streams.device.type == "cpu",
        "the device is the CPU, whose memory holds activations anyway",
        "give --model.recompute layers, or ",
    ),
    without_effect(
        "optim.loss_scale",
        lambda job: job.config.model.dtype != "fp16",
        "model.dtype={config.model.dtype} needs no loss scale",
        "give --model.dtype fp16, or ",
    ),
    Choice(
        lambda job, _: 0 < job.config.optim.num_warmup >= job.config.optim.num_steps,
        "optim.warmup={config.optim.warmup}: the learning rate rises in all {config.optim.steps} steps and does not "
        "reach optim.lr; give a smaller --optim.warmup, or a longer run",
    ),
    without_effect(
        "optim.schedule",
        lambda job: _stays_at_peak(job.config.optim),
        "the learning rate does not fall in any step",
        "give --optim.schedule constant, or ",
    ),
    *(
        without_effect(
            option,
            lambda job: not isinstance(job.plugins.optimizer, AdamW | AdamW8bit | Muon | ScheduleFreeAdamW),
            "optim.name={config.optim.name} has parameters of its own",
            "give --optim.name adamw, or ",
        )
        for option in ("optim.betas", "optim.eps")
    ),
    Choice(
        lambda job, _: job.model.config.dtype == torch.float16 and job.config.model.dtype != "fp16",
        "model.dtype={config.model.dtype}: config.json of the model says float16, but checkpoints generate in "
        "{config.model.dtype} and are exported in the type of their weights; for files as small as the model's, give "
        "acsgd convert to-hf --dtype float16",
    ),
    without_effect(
        "optim.label_smoothing",
        lambda job: job.config.model.task == "regression",
        "model.task=regression has no classes",
    ),
    without_effect(
        "data.sentinels data.modes",
        lambda job: job.config.data.objective != "ul2r",
        "data.objective={config.data.objective}",
        "give --data.objective ul2r, or ",
    ),
    without_effect(
        "data.window",
        lambda job: not any(isinstance(source, Streamed) for source, _ in job.sources),
        "no source is streamed, and others are shuffled as a whole",
        "write stream:SOURCE in data.sources, or ",
    ),
    without_effect("data.weights", lambda job: len(job.sources) == 1, "there is one source"),
    without_effect(
        "data.split_special_tokens",
        lambda job: job.config.model.task == "seq2seq",
        "model.task=seq2seq takes special tokens in prompts for control tokens",
    ),
    without_effect(
        "eval.metrics",
        lambda job: not _evaluates(job.config.data),
        "there is no evaluation data",
        "give --data.eval-fraction 0.05, or ",
    ),
    without_effect(
        "eval.every",
        lambda job: (job.config.eval.every or 0) >= job.config.optim.num_steps,
        "the run has {config.optim.steps} steps, and the last one is always evaluated",
    ),
    without_effect(
        "checkpoint.every",
        lambda job: (job.config.checkpoint.every_steps or 0) >= job.config.optim.num_steps,
        "the run has {config.optim.steps} steps, and the last one is always saved",
    ),
    without_effect(
        "optim.spike",
        lambda job: job.config.optim.num_steps <= RECENT,
        f"it compares with the last {RECENT} losses, and the run has {{config.optim.steps}} steps",
    ),
    without_effect(
        "log.trace",
        lambda job: traced_steps(job.config.log.trace)[0] > job.config.optim.num_steps,
        "the run has {config.optim.steps} steps",
    ),
    without_effect(
        "checkpoint.keep",
        lambda job: _keeps_all(job),
        "checkpoint.keep_every={config.checkpoint.keep_every} keeps all checkpoints",
        "give a larger --checkpoint.keep_every, or ",
    ),
    without_effect(
        "checkpoint.keep_every",
        lambda job: not _saves_once(job) and _kept_interval(job) >= job.config.optim.num_steps,
        "no step that is a multiple of it is saved before the last one",
        "give a multiple of checkpoint.every that is below {config.optim.steps}, or ",
    ),
    without_effect(
        "checkpoint.keep_every",
        lambda job: _saves_once(job),
        "only the last step is saved unless the run is stopped",
        "give --checkpoint.every {config.checkpoint.keep_every}, or ",
    ),
    *(
        without_effect(
            option,
            lambda job: _saves_once(job),
            "only the last step is saved unless the run is stopped",
            "give --checkpoint.every 500, or ",
        )
        for option in ("checkpoint.keep", "checkpoint.on_error")
    ),
    without_effect(
        "log.every",
        lambda job: {*job.config.log.to.split(",")} <= {"jsonl", "text"},
        "log.to={config.log.to}",
    ),
    without_effect(
        "log.name",
        lambda job: not {*job.config.log.to.split(",")} & {"mlflow", "trackio", "wandb"},
        "log.to={config.log.to}",
        "give --log.to print,jsonl,text,mlflow (or trackio, wandb), or ",
    ),
    *(
        without_effect(
            f"run.{option}", lambda job: job.topology.world_size == 1 and not job.is_elastic, "there is one process"
        )
        for option in ("transport", "timeout", "connections", "congestion")
    ),
    *(
        without_effect(
            f"elastic.{each.name}",
            lambda job: not job.is_elastic,
            "the run is not elastic",
            "start it with torchrun --rdzv-backend acsgd, or ",
        )
        for each in fields(ElasticConfig)
    ),
    Choice(
        lambda job, _: job.is_elastic and job.config.elastic.hang >= job.config.run.timeout,
        "elastic.hang={config.elastic.hang} is not below run.timeout={config.run.timeout}, after which the ranks that "
        "wait for a worker that hangs end themselves; give a larger --run.timeout, or a smaller --elastic.hang",
    ),
    without_effect("elastic.replan", lambda job: job.is_elastic and job.topology.stages == 1, "there is one stage"),
    *(
        without_effect(
            f"elastic.{name}",
            lambda job: job.is_elastic and job.config.dp.shard != "none",
            "dp.shard={config.dp.shard}",
        )
        for name in ("snapshot", "join_budget", "join_rate", "join_moments")
    ),
)


def describe_choices(job: Job, epochs: Sequence[float], best: Collection[str] = ()) -> list[str]:
    """Return the sentences that apply to a run whose number of steps is known.

    epochs: of each source, or of all of them; 0 if streamed. best: metrics whose best value the run resumes with.
    """
    most = max(epochs)
    found = [each.text.format(config=job.config, epochs=most) for each in CHOICES if each.applies(job, most)]
    return [*found, *_describe_best(job, best), *_describe_rank(job)]


def _describe_best(job: Job, known: Collection[str]) -> Iterator[str]:
    """Yield a sentence if checkpoint.best chooses among one value. known: see `describe_choices`."""
    metric, steps = job.config.checkpoint.best, job.config.optim.num_steps
    if metric is not None and metric not in known and (job.config.eval.every or steps) >= steps:
        yield (
            f"checkpoint.best={metric} has nothing to compare: only the last step is evaluated; give a smaller "
            "--eval.every, or remove it"
        )


def _describe_rank(job: Job) -> Iterator[str]:
    """Yield a sentence if the rank of LoRA is not below the number of inputs or of outputs of what it adapts."""
    if not isinstance(adapter := job.model.adapter, LoRA):
        return
    shapes = {name: weight.shape for name, weight in job.model.build(torch.float32).named_parameters()}
    # A is [r, inputs], B is [outputs, r]
    sides = {
        name.partition(".lora_A.")[0]: (shape[1], shapes[name.replace(".lora_A.", ".lora_B.")][0])
        for name, shape in shapes.items()
        if ".lora_A." in name
    }
    full = {name: size for name, size in sides.items() if adapter.r >= min(size)}
    if full:
        name, (inputs, outputs) = min(full.items(), key=lambda each: min(each[1]))
        yield (
            f"adapter.spec={job.config.adapter.spec}: factors of rank {adapter.r} have more parameters than "
            f"{len(full)} of the {len(sides)} matrices that they adapt, such as {name} with {inputs} inputs and "
            f"{outputs} outputs; give r={max(1, min(inputs, outputs) // 2)} or less, or name other targets"
        )


def _sends_codes(job: Job) -> bool:
    """Return whether a codec between ranks is other than none: of activations, gradients or rows of tied weights."""
    pp, rows = job.config.pp, job.plugins.tied
    has_rows = bool(job.tied) and isinstance(rows, TiedRows) and rows != TiedRows()
    return job.topology.stages > 1 and ((pp.forward, pp.backward, pp.compress) != ("none", "none", None) or has_rows)


def _has_caches(job: Job, direction: str | None = None) -> bool:
    """Return whether what travels in a direction, "forward", "backward" or either, is cached by the given codec."""
    codecs = (*job.plugins.forward, *job.plugins.backward) if direction is None else getattr(job.plugins, direction)
    has_delta = any(isinstance(codec, Delta) for codec in codecs) and any(job.cached_tensors)
    return job.plugins.ladder is None and has_delta and job.topology.stages > 1


def _caches_gradients(job: Job) -> bool:
    """Return whether the codec of gradients that is given for a link, or for all, caches them."""
    links = range(job.programs.first_backward, len(job.layout.specs) - 1)
    return job.topology.stages > 1 and any(job.plugins.deltas_at(link, of_gradients=True) for link in links)


def _has_dropout(job: Job) -> bool:
    return any(layer.random for layer in job.model.layers)


def _steps_after_exchange(job: Job) -> int:
    """Return the number of steps of a run after the last one that an exchange of local weights has followed."""
    mode, steps = job.plugins.mode, job.config.optim.num_steps
    if isinstance(mode, DiLoCo):
        last = mode.last_send(steps - 1 - mode.delay)
        return max(0, steps - mode.redundant_steps if last is None else steps - 1 - mode.delay - last)
    return max(0, steps - mode.redundant_steps) % mode.inner if isinstance(mode, SparseLoCo) else 0


def _is_alone(job: Job) -> bool:
    """Return whether there is one replica, and no other can join."""
    return job.topology.replicas == 1 and not (job.is_elastic and most_replicas(job.config) > 1)


def _evaluates(data: DataConfig) -> bool:
    return data.eval_sources is not None or data.eval_fraction > 0


def _saves_once(job: Job) -> bool:
    """Return whether no step but the last is saved, unless the run is stopped. An elastic one saves at changes, too."""
    return job.config.checkpoint.every is None and job.config.checkpoint.best is None and not job.is_elastic


def _keeps_all(job: Job) -> bool:
    """Return whether checkpoint.keep_every keeps every checkpoint but those of best values."""
    config = job.config.checkpoint
    return bool(config.keep_every and config.every_steps and config.every_steps % config.keep_every == 0)


def _kept_interval(job: Job) -> int:
    """Return the interval of the steps that checkpoint.keep_every keeps, in steps; 0 = none."""
    config = job.config.checkpoint
    return math.lcm(config.keep_every or 0, config.every_steps or 1)


def _stays_at_peak(optim: OptimConfig) -> bool:
    """Return whether a schedule other than constant leaves the learning rate of several steps at its peak."""
    first, last = optim.num_warmup, optim.num_steps - 1
    return first < last and optim.schedule != "constant" and learning_rate(last, optim) == optim.lr
