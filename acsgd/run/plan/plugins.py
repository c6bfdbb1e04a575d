"""Plug-ins of a run, parsed from the spec strings of its configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from acsgd.codecs.base import Codec
from acsgd.config.options import Config, PipelineConfig, ReplicaConfig, in_steps
from acsgd.config.spec import from_spec
from acsgd.dp import MODES
from acsgd.dp.ladder import COMPRESS as DP_COMPRESS
from acsgd.dp.ladder import AutoMode, ModeRung
from acsgd.dp.modes.allreduce import AllReduce
from acsgd.dp.modes.local import Local
from acsgd.dp.modes.powersgd import PowerSGD
from acsgd.dp.sync import Mode
from acsgd.io.data.sources.streamed import PREFIX
from acsgd.optim import OPTIMIZERS
from acsgd.optim.base import Capability, OptimizerSpec
from acsgd.optim.schedule import parse_schedule
from acsgd.pp.recompute import Recompute
from acsgd.pp.schedules.actions import Placement
from acsgd.pp.schedules.schedules import CHOICE, SCHEDULES, AutoSchedule, OneFOneB, Schedule
from acsgd.pp.tied.plan import ROW_RUNGS, TIED, RowRung, TiedDense, TiedRows
from acsgd.pp.wire.delta import Delta
from acsgd.pp.wire.ladder import COMPRESS, SPECS, Auto, Ladder, Rung, codecs_of_links
from acsgd.tasks import find_task


class Plugins(NamedTuple):
    """The plug-ins that a configuration names."""

    schedule: Schedule
    forward: tuple[Codec | Delta, ...]
    """Codecs of activations, after the lossless one."""
    backward: tuple[Codec | Delta, ...]
    """Codecs of activation gradients."""
    ladder: Ladder | None
    """What pp.compress chooses among; None = each direction has one codec."""
    tied: TiedRows | TiedDense
    """What travels of tied weights."""
    row_rungs: tuple[RowRung, ...]
    """Ways to send rows of tied tables among which pp.compress chooses; empty = as `tied` says."""
    optimizer: OptimizerSpec
    mode: Mode
    recompute: Recompute

    @property
    def delta(self) -> Delta | None:
        """The codec with activation caches; if there are several, these cache alike."""
        return next((codec for codec in (*self.forward, *self.backward) if isinstance(codec, Delta)), None)

    def deltas_at(self, boundary: int, *, of_gradients: bool = False) -> list[Delta]:
        """Return the deltas with which activations, or their gradients, may cross a boundary.

        If there are any, its ends cache them.
        """
        codecs: Sequence[Codec | Delta] = self.backward if of_gradients else self.forward
        if self.ladder is not None:
            codecs = self.ladder.codecs_at(boundary, of_gradients=of_gradients)
        return [codec for codec in codecs if isinstance(codec, Delta)]

    def delta_option(self, pp: PipelineConfig) -> str:
        """Return the option that names the codec with activation caches, and its value."""
        key = "backward" if not any(isinstance(codec, Delta) for codec in self.forward) else "forward"
        return f"pp.{key}={getattr(pp, key)}"

    def without_chosen_delta(self, *, of_activations: bool = True) -> Plugins:
        """Return the plug-ins with which pp.compress chooses no delta, or none for gradients."""
        if self.ladder is None:
            return self
        ladder = self.ladder.without_delta(forward=of_activations)
        return self._replace(ladder=ladder, forward=_rungs(ladder.forward), backward=_rungs(ladder.backward))


def parse_plugins(config: Config) -> Plugins:
    """Parse the spec strings of a configuration. Raises ValueError that names the key.

    Steps of dp.mode that are given in epochs are 1, as their lengths are not known yet; see `Job.with_steps`.
    """
    parse_schedule(config.optim.schedule)  # kept in a cache for `learning_rate`
    schedule = _parse_schedule(config.pp.schedule)
    ladder = _parse_ladder(config, schedule)
    parse_modes(config)
    forward, backward = (_rungs(ladder.forward), _rungs(ladder.backward)) if ladder else _parse_codecs(config.pp)
    _check_balance(config.pp, forward, backward)
    tied: TiedRows | TiedDense = from_spec(config.pp.tied, TIED, key="pp.tied")
    return Plugins(
        schedule=schedule,
        forward=forward,
        backward=backward,
        ladder=ladder,
        tied=tied,
        row_rungs=_row_rungs(ladder, tied),
        optimizer=_parse_optimizer(config),
        mode=from_spec(in_steps(config.dp.mode, lambda _: 1), MODES, key="dp.mode"),
        recompute=Recompute.parse(config.model.recompute),
    )


def _parse_schedule(spec: str) -> Schedule:
    """Return the schedule of pp.schedule; for "auto" 1F1B, until another one is chosen."""
    parsed: Schedule | AutoSchedule = from_spec(spec, {**SCHEDULES, **CHOICE}, key="pp.schedule")
    return OneFOneB() if isinstance(parsed, AutoSchedule) else parsed


def _parse_ladder(config: Config, schedule: Schedule) -> Ladder | None:
    """Return what pp.compress chooses among, None without it. Raises ValueError that names the key."""
    pp, data = config.pp, config.data
    if pp.compress is None:
        for key, text in (("pp.forward", pp.forward), ("pp.backward", pp.backward)):
            if of_links := codecs_of_links(text):
                raise ValueError(f"{key}.{min(of_links)} is for pp.compress=auto; add it, or give {key} for all links")
        return None
    auto: Auto = from_spec(pp.compress, COMPRESS, key="pp.compress")
    placement = Placement.of(schedule.program(pp.stages, 1))
    is_padded = find_task(config.model.task).layout(data) == "single"  # and cut, which caches do not allow
    has_delta = auto.delta and data.deal == "even" and PREFIX not in data.sources and not is_padded
    ladder = Ladder.of(auto, pp.forward, pp.backward, placement=placement, has_delta=has_delta)
    # a changed loss scale would change all gradients
    return ladder.without_delta(forward=False) if config.model.dtype == "fp16" else ladder


def _row_rungs(ladder: Ladder | None, tied: TiedRows | TiedDense) -> tuple[RowRung, ...]:
    if ladder is None or not ladder.chooses_rows or tied != TiedRows():
        return ()
    return tuple(rung for rung in ROW_RUNGS if rung.loss_cost <= ladder.max_loss_cost)


def parse_modes(config: Config) -> tuple[ModeRung, ...]:
    """Return the modes that dp.compress chooses among; none without it. Raises ValueError that names the key."""
    dp = config.dp
    if dp.compress is None:
        return ()
    auto: AutoMode = from_spec(dp.compress, DP_COMPRESS, key="dp.compress")
    if dp.mode != ReplicaConfig().mode:
        raise ValueError(f"dp.compress={dp.compress} chooses dp.mode; remove dp.mode={dp.mode} or dp.compress")
    return tuple(auto.rungs(from_scratch=config.model.init == "scratch"))


def _rungs(rungs: Sequence[Rung]) -> tuple[Any, ...]:
    return tuple(rung.codec for rung in rungs[1:])


def check_capabilities(config: Config, required: frozenset[Capability], provided: frozenset[Capability]) -> None:
    """Raise ValueError if dp.mode uses optimizer capabilities that optim.name does not have."""
    if missing := required - provided:
        able = [f'"{name}"' for name, optimizer in OPTIMIZERS.items() if optimizer.capabilities >= required]
        raise ValueError(
            f'dp.mode="{config.dp.mode}" requires {", ".join(sorted(missing))}, which optim.name="{config.optim.name}" '
            f"does not support; use optim.name={' or '.join(able)}, or another dp.mode"
        )
    if "second_moments" in required and config.optim.betas[1] == 0:
        raise ValueError(
            f'dp.mode="{config.dp.mode}" corrects means of squared gradients, and optim.betas={config.optim.betas} has '
            "none; give --optim.betas 0.9 0.999, or moment_correction=false in dp.mode"
        )


def has_masters(config: Config) -> bool:
    """Return whether trained weights have masters apart from their parameters."""
    is_rounded = config.model.dtype != "fp32" and config.optim.masters == "fp32"
    return is_rounded or config.optim.offload == "cpu" or _parse_optimizer(config).averages


def _parse_optimizer(config: Config) -> OptimizerSpec:
    optimizer: OptimizerSpec = from_spec(config.optim.name, OPTIMIZERS, key="optim.name")
    return optimizer


def check_masters(config: Config, plugins: Plugins) -> None:
    """Raise ValueError if other options do not work with the masters, which are averages or not kept."""
    optim, averages = config.optim, plugins.optimizer.averages
    if averages and optim.masters == "none":
        raise ValueError(
            f"optim.masters=none: optim.name={optim.name} averages weights in fp32 masters; use --optim.masters fp32, "
            "or another optimizer, such as adamw"
        )
    if averages and optim.schedule != "constant":
        raise ValueError(
            f"optim.name={optim.name} averages weights in place of lowering the learning rate, which optim.schedule="
            f"{optim.schedule} does; use --optim.schedule constant"
        )
    if (averages or optim.masters == "none") and plugins.mode.exchanges != "gradients":
        are = "averages" if averages else "not kept"
        raise ValueError(
            f"dp.mode={config.dp.mode} steps and exchanges fp32 masters, which are {are} with optim.name={optim.name} "
            f"and optim.masters={optim.masters}; use --dp.mode allreduce or powersgd, or --optim.name adamw "
            "--optim.masters fp32"
        )


def check_deal(config: Config, plugins: Plugins) -> None:
    """Raise ValueError if micro-batches are dealt by speed, and what a replica computes depends on which it gets."""
    if config.data.deal != "speed":
        return
    if plugins.mode.exchanges != "gradients":
        raise ValueError(
            f"data.deal=speed: with dp.mode={config.dp.mode} each replica makes steps of its own, so the result would "
            "depend on the speed of hosts; use data.deal=even, or allreduce, sharded_ps, central_ps or powersgd"
        )
    if plugins.delta is not None:
        raise ValueError(
            f"data.deal=speed: with {plugins.delta_option(config.pp)} a sequence should return to the same replica, "
            "which has its activations; use data.deal=even, or another codec, such as fixpoint:bits=8"
        )


def check_shard(config: Config, plugins: Plugins, *, splits_backward: bool, is_alone: bool) -> None:
    """Raise ValueError if dp.shard does not work with other options.

    splits_backward: whether the schedule does. is_alone: whether there is one replica, and no other can join.
    """
    shard = config.dp.shard
    if shard == "none":
        return
    if isinstance(plugins.mode, PowerSGD | Local):
        what = "compresses whole matrices" if isinstance(plugins.mode, PowerSGD) else "never exchanges weights"
        raise ValueError(
            f"dp.mode={config.dp.mode} {what}, and dp.shard={shard} leaves each replica a part of them; use --dp.shard "
            "none, or --dp.mode allreduce"
        )
    is_whole = plugins.schedule.chunks == 1 and not splits_backward
    if not config.dp.sums_passes or is_alone:
        return
    if not is_whole:
        raise ValueError(
            f"dp.shard={shard} sums gradients after each backward of the one stage of a rank, and "
            f"pp.schedule={config.pp.schedule} has several, or backwards in two parts; use --dp.shard optimizer, or "
            "--pp.schedule 1f1b"
        )
    if config.data.deal == "speed":
        raise ValueError(
            f"dp.shard={shard} sums gradients after each micro-batch, so that all replicas need the same number of "
            "them, and data.deal=speed gives faster ones more; use --data.deal even, or --dp.shard optimizer"
        )


def check_equal_micros(config: Config, replicas: int) -> None:
    """Raise ValueError if replicas divide gradients, and do not get the same number of micro-batches."""
    num_micros = config.data.batch // config.pp.micro
    if config.dp.sums_passes and num_micros % replicas:
        raise ValueError(
            f"dp.shard={config.dp.shard} sums gradients after each micro-batch, so that all {replicas} replicas need "
            f"the same number of micro-batches, of {num_micros} in a step (data.batch / pp.micro); use a data.batch of "
            f"{config.pp.micro * replicas * -(-num_micros // replicas)}, or --dp.shard optimizer"
        )


def check_sharded_mode(config: Config, plugins: Plugins, domains: Sequence[Sequence[int]]) -> None:
    """Raise ValueError if dp.shard lets all replicas divide the weights, and dp.mode needs replicas of the same parts.

    domains: the replicas that would act as one.
    """
    sizes = {*map(len, domains)}
    can_share = config.dp.local == "auto" and len(domains) > 1 and len(sizes) == 1 and sizes != {1}
    if config.dp.shard == "none" or isinstance(plugins.mode, AllReduce) or can_share:
        return
    raise ValueError(
        f"dp.mode={config.dp.mode} with dp.shard={config.dp.shard} needs several hosts (or dp.domain) with as many "
        "replicas each, at least two, which divide the weights among themselves (dp.local=auto); use --dp.mode "
        "allreduce, or --dp.shard none"
    )


def _parse_codecs(pp: PipelineConfig) -> tuple[tuple[Codec | Delta, ...], ...]:
    """Return the codecs of pp.forward and pp.backward. Raises ValueError if both are deltas that cache differently."""
    found = [
        from_spec(spec, SPECS, key=key) for key, spec in (("pp.forward", pp.forward), ("pp.backward", pp.backward))
    ]
    if len({(codec.cache, codec.cache_bits, codec.cache_gib) for codec in found if isinstance(codec, Delta)}) > 1:
        raise ValueError(
            f'pp.forward="{pp.forward}" and pp.backward="{pp.backward}" cache differently; give both the same cache, '
            "cache_bits and cache_gib"
        )
    return tuple((codec,) for codec in found)


def _check_balance(pp: PipelineConfig, forward: Sequence[Codec | Delta], backward: Sequence[Codec | Delta]) -> None:
    """Raise ValueError if a delta has a balance, and the sender has no gradients of the visit before for it."""
    has_gradients = any(isinstance(codec, Delta) for codec in backward)
    if any(isinstance(codec, Delta) and codec.balance for codec in backward):
        raise ValueError(f'pp.backward="{pp.backward}": balance is for activations; move it to pp.forward')
    has_balance = any(isinstance(codec, Delta) and codec.balance for codec in forward)
    if has_balance and pp.compress:
        raise ValueError(
            f'pp.forward="{pp.forward}": balance needs cached gradients in all steps, and pp.compress may choose '
            "another codec for them; remove balance or pp.compress"
        )
    if has_balance and not has_gradients:
        raise ValueError(
            f'pp.forward="{pp.forward}": balance has no effect without cached gradients of activations; give '
            "pp.backward=delta:step=0.5,transform=true,rounding=stochastic, or remove it"
        )
