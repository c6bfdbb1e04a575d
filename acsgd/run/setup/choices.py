"""Choices of a run that have no effect, or defeat their purpose: a sentence each, with what to type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from acsgd.config.options import Config, DataConfig, OptimConfig
from acsgd.dp.modes.allreduce import AllReduce
from acsgd.io.data.sources.streamed import Streamed
from acsgd.pp.wire.delta import Delta
from acsgd.run.plan.job import Job


class Choice(NamedTuple):
    """A choice that is reported at the start of a run."""

    applies: Callable[[Job, float], bool]
    """Whether a run has made it, by its job and its number of epochs."""
    text: str
    """Sentence, formatted with `config` and `epochs`."""


CHOICES = (
    Choice(
        lambda job, _: job.topology.stages == 1 and _has_codecs(job.config),
        "pp.forward={config.pp.forward} and pp.backward={config.pp.backward} have no effect: there is one stage; give "
        "--pp.stages 2, or remove them",
    ),
    Choice(
        lambda job, _: _has_codecs(job.config) and job.config.pp.exact_steps >= job.config.optim.num_steps,
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
    Choice(
        lambda job, _: job.topology.replicas == 1 and not isinstance(job.plugins.mode, AllReduce),
        "dp.mode={config.dp.mode} has no effect: there is one replica; start more processes, or remove it",
    ),
    Choice(
        lambda job, _: job.config.optim.loss_scale != OptimConfig.loss_scale and job.config.model.dtype != "fp16",
        "optim.loss_scale={config.optim.loss_scale:g} has no effect: model.dtype={config.model.dtype} needs no loss "
        "scale; give --model.dtype fp16, or remove it",
    ),
    Choice(
        lambda job, _: (
            (job.config.data.sentinels, job.config.data.modes) != (DataConfig.sentinels, DataConfig.modes)
            and job.config.data.objective != "ul2r"
        ),
        "data.sentinels and data.modes have no effect: data.objective={config.data.objective}; give --data.objective "
        "ul2r, or remove them",
    ),
    Choice(
        lambda job, _: job.config.data.window != DataConfig.window and not _streams(job),
        "data.window={config.data.window} has no effect: no source is streamed, and others are shuffled as a whole; "
        "write stream:SOURCE in data.sources, or remove it",
    ),
    Choice(
        lambda job, _: job.config.eval.metrics is not None and not _evaluates(job.config.data),
        "eval.metrics={config.eval.metrics} has no effect: there is no evaluation data; give --data.eval-fraction "
        "0.05, or remove it",
    ),
    Choice(
        lambda job, _: (
            job.config.checkpoint.keep_every is not None
            and job.config.checkpoint.every is None
            and job.config.checkpoint.best is None
        ),
        "checkpoint.keep_every={config.checkpoint.keep_every} has no effect: only the last step is saved; give "
        "--checkpoint.every {config.checkpoint.keep_every}, or remove it",
    ),
)


def describe_choices(job: Job, epochs: Sequence[float]) -> list[str]:
    """Return the sentences that apply to a run whose number of steps is known.

    epochs: of each source, or of all of them; 0 if streamed.
    """
    most = max(epochs)
    return [each.text.format(config=job.config, epochs=most) for each in CHOICES if each.applies(job, most)]


def _has_codecs(config: Config) -> bool:
    return (config.pp.forward, config.pp.backward) != ("none", "none")


def _has_caches(job: Job) -> bool:
    return isinstance(job.plugins.forward, Delta) and job.topology.stages > 1


def _has_dropout(job: Job) -> bool:
    return any(layer.random for layer in job.model.layers)


def _streams(job: Job) -> bool:
    return any(isinstance(source, Streamed) for source, _ in job.sources)


def _evaluates(data: DataConfig) -> bool:
    return data.eval_sources is not None or data.eval_fraction > 0
