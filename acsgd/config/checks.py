"""Checks of options that depend neither on the model nor on the number of processes."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re

from acsgd.config.adapters import Adapter, LoRA, parse_adapter
from acsgd.config.options import EPOCHS, CheckpointConfig, Config, DataConfig, ElasticConfig, OptimConfig
from acsgd.config.ranges import COUNT, out_of_range

MAX_TRACED = 1000
"""Largest number of steps in log.trace, whose spans are kept in memory."""


def check(config: Config) -> None:
    """Raise ValueError for the first invalid option; the message names the key and a valid value."""
    _check_ranges(config)
    for key in ("optim.warmup", "pp.exact_steps"):
        if isinstance(text := config.lengths[key], str) and not EPOCHS.fullmatch(text):
            raise ValueError(f'{key}="{text}" is not a length; give a number of steps, 100, or of epochs, "1 epoch"')
    _check_optim(config.optim)
    _check_batch(config.data, config.pp.micro)
    _check_limits(config.data)
    _check_objective(config.data)
    _check_checkpoint(config.checkpoint)
    if config.dp.domain is not None and not config.dp.domain.strip():
        raise ValueError(
            "dp.domain is empty; give a name such as --dp.domain rack-1, the same on all hosts of a domain"
        )
    hosts = config.pp.host_order
    if hosts is not None and {*hosts} != {*range(len(hosts))}:
        raise ValueError(
            f"pp.hosts={' '.join(map(str, hosts))} does not name each host once, by its number from 0; give, for "
            "example, --pp.hosts 2 0 1"
        )
    _check_evaluation(config)
    _check_elastic(config.elastic)
    _check_adapter(config)
    _check_offload(config)
    _check_masters(config)
    if config.model.compile and config.model.recompute == "attention":
        raise ValueError(
            "model.recompute=attention runs attention by itself, and model.compile compiles each block as a whole; "
            "use --model.recompute layers, or remove model.compile"
        )
    traced_steps(config.log.trace)
    steps, every = config.optim.steps, config.checkpoint.every_steps
    is_last = every is not None and steps is not None and every >= steps
    if config.optim.spike is not None and (config.checkpoint.every is None or is_last):
        raise ValueError(
            f"optim.spike={config.optim.spike} restores the last checkpoint, but there is none before the end of the "
            f'run; give, for example, checkpoint.every="{-(-(steps or 5000) // 10)}"'
        )


def traced_steps(trace: str | None) -> range:
    """Return the steps of log.trace, counted from 1. Raises ValueError if it is malformed."""
    match = re.fullmatch(r"(\d{1,12}):(\d{1,12})", trace or "")
    steps = range(int(match[1]), int(match[2]) + 1) if match else range(0)
    if trace is not None and not (steps and steps[0] and len(steps) <= MAX_TRACED):
        raise ValueError(
            f'log.trace="{trace}" is not a range of steps; give the first and the last, as "100:105", of at most '
            f"{MAX_TRACED} steps"
        )
    return steps


def _check_adapter(config: Config) -> None:
    spec, sequence = config.adapter.spec, config.data.sequence
    if spec is not None and config.model.freeze is not None:
        raise ValueError("model.freeze: adapter.spec freezes all parameters of the model; remove one of both")
    adapter = parse_adapter(spec)
    _check_quantize(config.model.quantize, adapter)
    if adapter is None or not adapter.virtual_tokens:
        return
    if sequence < adapter.virtual_tokens + 2:
        raise ValueError(
            f'adapter.spec="{spec}": the virtual tokens count towards data.sequence={sequence}; use '
            f"data.sequence={adapter.virtual_tokens + 2} or more"
        )


def _check_quantize(quantization: str, adapter: Adapter | None) -> None:
    if quantization == "none":
        return
    if adapter is None:
        raise ValueError(
            f"model.quantize={quantization}: quantized weights cannot be trained; add an adapter, such as "
            "--adapter.spec lora, or remove model.quantize"
        )
    if not isinstance(adapter, LoRA) or adapter.dora:
        raise ValueError(
            f"model.quantize={quantization} is for lora without dora=true; use --adapter.spec lora, or remove "
            "model.quantize"
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(
            f"model.quantize={quantization} needs bitsandbytes, which is not installed; "
            'pip install "acsgd[8bit,adapters]"'
        )


def _check_offload(config: Config) -> None:
    """Raise ValueError if parameters cannot lie where model.offload says."""
    model, offload = config.model, config.model.offload
    trains_all = config.adapter.spec is None and model.freeze is None
    on_disk, adapter = offload == "disk", "train an adapter, such as --adapter.spec lora"
    trains = "all weights are trained, and"
    problems = (
        (config.dp.shard == "weights", "dp.shard=weights keeps parts of all weights on each device; remove one"),
        (
            not on_disk and trains_all and config.optim.offload == "none",
            f"{trains} lie where their masters are; add --optim.offload cpu, or {adapter}",
        ),
        (
            on_disk and trains_all,
            f"{trains} those in files are only read; use --model.offload cpu --optim.offload cpu, or {adapter}",
        ),
        (
            on_disk and model.quantize != "none",
            f"weights in files are not quantized, and model.quantize={model.quantize} would do so in each use; use "
            "--model.offload cpu, or remove model.quantize",
        ),
        (on_disk and model.init == "scratch", "model.init=scratch has no files of weights; use --model.offload cpu"),
    )
    problem = next((text for is_given, text in problems if is_given), None)
    if offload != "none" and problem is not None:
        raise ValueError(f"model.offload={offload}: {problem}")


def _check_masters(config: Config) -> None:
    """Raise ValueError if a run cannot be without masters."""
    if config.optim.masters == "fp32":
        return
    if config.model.dtype != "bf16":
        raise ValueError(
            f"optim.masters=none rounds updates to bf16, and model.dtype={config.model.dtype}; use --model.dtype bf16, "
            "or --optim.masters fp32"
        )
    if config.optim.offload == "cpu":
        raise ValueError("optim.masters=none: optim.offload=cpu keeps fp32 masters in host memory; remove one of both")


def _check_ranges(config: Config) -> None:
    for section in dataclasses.fields(config):
        for error in out_of_range(getattr(config, section.name)):
            raise ValueError(f"{section.name}.{error}")


def _check_optim(optim: OptimConfig) -> None:
    if optim.steps is None and optim.epochs is None:
        raise ValueError("the length of the run is missing; give, for example, --optim.epochs 3 or --optim.steps 1000")
    if optim.steps is not None and optim.epochs is not None:
        raise ValueError(
            f"optim.steps={optim.steps} and optim.epochs={optim.epochs:g} are both given; remove one of them, or add "
            "--optim.steps None or --optim.epochs None"
        )
    if optim.steps is not None and isinstance(optim.warmup, int) and optim.warmup > optim.steps:
        raise ValueError(f"optim.warmup={optim.warmup} must be at most optim.steps={optim.steps}")
    if not math.log2(optim.loss_scale).is_integer():
        raise ValueError(f"optim.loss_scale={optim.loss_scale} must be a power of 2; use, for example, 65536")


def _check_batch(data: DataConfig, micro: int) -> None:
    if data.batch % micro:
        small = [n for n in range(1, math.isqrt(data.batch) + 1) if data.batch % n == 0]
        divisors = {*small, *(data.batch // n for n in small)}
        nearest = sorted(divisors, key=lambda n: abs(n - micro))[:3]
        raise ValueError(
            f"pp.micro={micro} does not divide data.batch={data.batch}; "
            f"use pp.micro={' or '.join(str(n) for n in sorted(nearest))}, or another data.batch"
        )


def _check_limits(data: DataConfig) -> None:
    for key in ("max_prompt", "max_answer"):
        value = getattr(data, key)
        if (largest := max(value, default=0) if isinstance(value, tuple) else value) > data.sequence:
            raise ValueError(f"data.{key}={largest} must be at most data.sequence={data.sequence}")


def _check_objective(data: DataConfig) -> None:
    if data.sentinels.count("{}") != 1:
        raise ValueError(f'data.sentinels="{data.sentinels}" must contain {{}} once, as in "<extra_id_{{}}>"')
    modes = [mode.strip() for mode in data.modes.split(",")]
    if not (len({*modes}) == len(modes) == 3 and all(modes)):
        raise ValueError(f'data.modes="{data.modes}" must be three different texts, as "[NLU],[S2S],[NLG]"')


def _check_checkpoint(checkpoint: CheckpointConfig) -> None:
    if checkpoint.upload is None and checkpoint.upload_rate is not None:
        raise ValueError(
            f"checkpoint.upload_rate={checkpoint.upload_rate:g} is of checkpoint.upload, which is not given; remove it"
        )
    every = checkpoint.every
    if every is None:
        return
    is_interval = re.fullmatch(r"[0-9]+|[0-9]+(\.[0-9]+)?min", every)
    if not (is_interval and 0 < float(every.removesuffix("min")) <= COUNT.high):
        raise ValueError(f'checkpoint.every={every} is not an interval; give steps, "500", or minutes, "10min"')


def _check_evaluation(config: Config) -> None:
    evaluating = [f"eval.every={config.eval.every}"] if config.eval.every is not None else []
    evaluating += [f'checkpoint.best="{config.checkpoint.best}"'] if config.checkpoint.best is not None else []
    if evaluating and config.data.eval_sources is None and not config.data.eval_fraction:
        raise ValueError(
            f"{evaluating[0]} needs evaluation data; give data.eval_sources or, for example, data.eval_fraction=0.05"
        )


def _check_elastic(elastic: ElasticConfig) -> None:
    low, high = elastic.min_replicas, elastic.max_replicas
    if high is not None and low > high:
        raise ValueError(f"elastic.min_replicas={low} must be at most elastic.max_replicas={high}")
    if elastic.snapshot != "auto" and not (elastic.snapshot.isdecimal() and int(elastic.snapshot) <= COUNT.high):
        raise ValueError(f'elastic.snapshot={elastic.snapshot} is not an interval; give steps, "20", "0", or "auto"')
