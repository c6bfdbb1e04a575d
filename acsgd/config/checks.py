"""Checks of options that depend neither on the model nor on the number of processes."""

from __future__ import annotations

import math
import re

from acsgd.config.options import CheckpointConfig, Config, DataConfig, LogConfig, OptimConfig

SINKS = ("print", "jsonl", "text", "wandb")
"""Names allowed in log.to."""


def check(config: Config) -> None:
    """Raise ValueError for the first invalid option; the message names the key and a valid value."""
    _check_positive(config)
    _check_optim(config.optim)
    _check_batch(config.data, config.pp.micro)
    _check_checkpoint(config.checkpoint)
    _check_evaluation(config)
    _check_log(config.log)
    if config.optim.spike is not None and config.checkpoint.every is None:
        raise ValueError(
            f"optim.spike={config.optim.spike} restores the last checkpoint, but there is none before the end of the "
            'run; give, for example, checkpoint.every="500"'
        )


def _check_positive(config: Config) -> None:
    data, pp, optim = config.data, config.pp, config.optim
    positive = {
        "data.sequence": data.sequence,
        "data.batch": data.batch,
        "pp.stages": pp.stages,
        "pp.micro": pp.micro,
        "optim.steps": optim.steps,
        "optim.lr": optim.lr,
        "optim.clip": optim.clip,
        "optim.eps": optim.eps,
        "optim.loss_scale": optim.loss_scale,
        "eval.every": config.eval.every,
        "checkpoint.keep": config.checkpoint.keep,
        "checkpoint.keep_every": config.checkpoint.keep_every,
        "run.timeout": config.run.timeout,
    }
    for key, value in positive.items():
        if value is not None and not value > 0:
            raise ValueError(f"{key}={value} must be greater than 0")
    if pp.exact_steps < 0:
        raise ValueError(f"pp.exact_steps={pp.exact_steps} must not be negative")


def _check_optim(optim: OptimConfig) -> None:
    if not math.isfinite(optim.lr):
        raise ValueError(f"optim.lr={optim.lr} must be finite")
    if not 0 <= optim.warmup <= optim.steps:
        raise ValueError(f"optim.warmup={optim.warmup} must lie between 0 and optim.steps={optim.steps}")
    if not optim.weight_decay >= 0:
        raise ValueError(f"optim.weight_decay={optim.weight_decay} must not be negative")
    if not all(0 <= beta < 1 for beta in optim.betas):
        raise ValueError(f"optim.betas={optim.betas} must lie in [0, 1)")
    if not (math.isfinite(optim.loss_scale) and math.log2(optim.loss_scale).is_integer()):
        raise ValueError(f"optim.loss_scale={optim.loss_scale} must be a power of 2; use, for example, 65536")
    if optim.spike is not None and not optim.spike > 1:
        raise ValueError(
            f"optim.spike={optim.spike} must be greater than 1, a multiple of the mean loss; use, for example, 2"
        )


def _check_batch(data: DataConfig, micro: int) -> None:
    if not 0 <= data.seed < 2**63:
        raise ValueError(f"data.seed={data.seed} must lie between 0 and 2**63 - 1")
    if data.batch % micro:
        divisors = [n for n in range(1, data.batch + 1) if data.batch % n == 0]
        nearest = sorted(divisors, key=lambda n: abs(n - micro))[:3]
        raise ValueError(
            f"pp.micro={micro} does not divide data.batch={data.batch}; "
            f"use pp.micro={' or '.join(str(n) for n in sorted(nearest))}, or another data.batch"
        )


def _check_checkpoint(checkpoint: CheckpointConfig) -> None:
    every = checkpoint.every
    if every is None:
        return
    if not (re.fullmatch(r"\d+|\d+(\.\d+)?min", every) and float(every.removesuffix("min")) > 0):
        raise ValueError(f'checkpoint.every={every} is not an interval; give steps, "500", or minutes, "10min"')


def _check_evaluation(config: Config) -> None:
    evaluating = [f"eval.every={config.eval.every}"] if config.eval.every is not None else []
    evaluating += ["checkpoint.best"] if config.checkpoint.best else []
    if evaluating and config.data.eval_sources is None and not config.data.eval_fraction:
        raise ValueError(
            f"{evaluating[0]} needs evaluation data; give data.eval_sources or, for example, data.eval_fraction=0.05"
        )


def _check_log(log: LogConfig) -> None:
    unknown = set(filter(None, log.to.split(","))) - set(SINKS)
    if unknown:
        known = ", ".join(f'"{sink}"' for sink in SINKS)
        raise ValueError(f'log.to="{log.to}": unknown {", ".join(sorted(unknown))}; use {known}, comma-separated')
