"""Choices of a run that have no effect, or defeat their purpose: a sentence each, with what to type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import NamedTuple

import torch

from acsgd.config.options import Config, DataConfig, ElasticConfig, ModelConfig, OptimConfig
from acsgd.io.data.sources.streamed import Streamed
from acsgd.optim.adamw import AdamW
from acsgd.optim.adamw8bit import AdamW8bit
from acsgd.optim.muon import Muon
from acsgd.pp.tied.plan import TiedRows
from acsgd.pp.wire.delta import Delta
from acsgd.run.plan.job import Job
from acsgd.run.plan.transports import sums_gradients


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


CHOICES = (
    without_effect(
        "pp.forward pp.backward", lambda job: job.topology.stages == 1, "there is one stage", "give --pp.stages 2, or "
    ),
    without_effect("pp.transport", lambda job: job.topology.stages == 1, "there is one stage"),
    without_effect("dp.transport", lambda job: _is_alone(job), "there is one replica"),
    without_effect(
        "dp.transport",
        lambda job: not (_is_alone(job) or job.domain or sums_gradients(job.plugins.mode)),
        "dp.mode={config.dp.mode} sums no gradients",
    ),
    without_effect("pp.layers", lambda job: job.topology.stages == 1, "there is one stage", "give --pp.stages 2, or "),
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
    Choice(
        lambda job, epochs: _has_caches(job) and 0 < epochs <= 1,
        "pp.forward={config.pp.forward} sends a sequence without compression when it is trained on first, and no "
        "sequence is trained on twice in {epochs:.2f} epochs; give --pp.forward fixpoint:bits=8, or a longer run",
    ),
    Choice(
        lambda job, _: _has_caches(job) and job.config.model.dropout_mask == "step" and _has_dropout(job),
        "pp.forward={config.pp.forward} needs activations that change little between epochs, but "
        "model.dropout_mask=step draws new dropout masks in every step; give --model.dropout_mask sample",
    ),
    Choice(
        lambda job, _: job.config.model.dropout_mask == "sample" and not _has_dropout(job),
        "model.dropout_mask=sample computes one sequence at a time, but the model has no dropout; remove it",
    ),
    without_effect("dp.mode", lambda job: _is_alone(job), "there is one replica", "start more processes, or "),
    *(
        without_effect(option, lambda job: _is_alone(job), "there is one replica", "start more processes, or ")
        for option in ("dp.local", "dp.domain")
    ),
    without_effect(
        "dp.domain",
        lambda job: not (job.domain or _is_alone(job)),
        "with dp.local={config.dp.local} and dp.mode={config.dp.mode} no replicas act as one",
    ),
    without_effect("data.deal", lambda job: _is_alone(job), "there is one replica", "start more processes, or "),
    without_effect(
        "optim.loss_scale",
        lambda job: job.config.model.dtype != "fp16",
        "model.dtype={config.model.dtype} needs no loss scale",
        "give --model.dtype fp16, or ",
    ),
    *(
        without_effect(
            option,
            lambda job: not isinstance(job.plugins.optimizer, AdamW | AdamW8bit | Muon),
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
    without_effect(
        "run.transport", lambda job: job.topology.world_size == 1 and not job.is_elastic, "there is one process"
    ),
    without_effect(
        "run.timeout", lambda job: job.topology.world_size == 1 and not job.is_elastic, "there is one process"
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
)


def describe_choices(job: Job, epochs: Sequence[float]) -> list[str]:
    """Return the sentences that apply to a run whose number of steps is known.

    epochs: of each source, or of all of them; 0 if streamed.
    """
    most = max(epochs)
    return [each.text.format(config=job.config, epochs=most) for each in CHOICES if each.applies(job, most)]


def _sends_codes(job: Job) -> bool:
    """Return whether a codec between ranks is other than none: of activations, gradients or rows of tied weights."""
    pp, rows = job.config.pp, job.plugins.tied
    has_rows = bool(job.tied) and isinstance(rows, TiedRows) and rows != TiedRows()
    return job.topology.stages > 1 and ((pp.forward, pp.backward) != ("none", "none") or has_rows)


def _has_caches(job: Job) -> bool:
    return isinstance(job.plugins.forward, Delta) and job.topology.stages > 1


def _has_dropout(job: Job) -> bool:
    return any(layer.random for layer in job.model.layers)


def _is_alone(job: Job) -> bool:
    """Return whether there is one replica, and no other can join."""
    return job.topology.replicas == 1 and not job.is_elastic


def _evaluates(data: DataConfig) -> bool:
    return data.eval_sources is not None or data.eval_fraction > 0


def _saves_once(job: Job) -> bool:
    """Return whether no step but the last is saved, unless the run is stopped. An elastic one saves at changes, too."""
    return job.config.checkpoint.every is None and job.config.checkpoint.best is None and not job.is_elastic
