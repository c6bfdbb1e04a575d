"""Memory and time that a run will need: acsgd plan RUN.toml. Reads config.json, no weights and no data."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import tyro

from acsgd.config.options import Config
from acsgd.config.ranges import COUNT, out_of_range, parse_size
from acsgd.config.run_file import parse, with_run_options
from acsgd.notes import print_note

if TYPE_CHECKING:
    from acsgd.run.plan.memory import RankMemory
    from acsgd.run.plan.planner import Alternative, RunPlanner
    from acsgd.run.plan.rates import LinkRate, Rates
    from acsgd.run.plan.step_time import PlannedStep

GIB = 2**30
CALIBRATED_S = 30.0
"""Time for which layers are run to measure them, seconds; a fifth of it for messages."""


@dataclass(frozen=True)
class PlanCommand:
    """Print the memory of each rank of a run, by kind, and whether it fits; the time of a step and what it consists of;
    and runs that are faster: from the model's config.json alone.

    Starts no processes, reads no data, and downloads nothing else. Options of the run may follow, as in training:
    acsgd plan RUN.toml --pp.stages 2. Exits with 1 if the run does not fit.
    """

    run_file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN.toml")]
    """Run file, whose data need not exist."""
    world: Annotated[int, COUNT] | None = None
    """Number of processes, as torchrun starts. Default: one replica, pp.stages."""
    per_host: Annotated[int, COUNT] = 1
    """Number of processes on each host. Replicas of a host may act as one (dp.local)."""
    memory: str | None = None
    """Memory for each process, "24GiB", to which the need is compared: of its GPU, or of the host with --run.device
    cpu. Default: not compared."""
    host_memory: str | None = None
    """Memory of each host, "128GiB", for all its processes (--per-host), to which what lies there is compared, such as
    offloaded state. Default: not compared."""
    sequences: Annotated[int, COUNT] | None = None
    """Number of sequences in the data, which the activation caches of delta hold. Default: not known."""
    link: str | None = None
    """Rate and one-way delay of the link of each process to others, "100mbit,20ms". Default: that of measured rates,
    else links take no time."""
    device: str | None = None
    """GPU of each process, "RTX 4090", whose usual rates predict the time of a step. Default: measured rates."""
    calibrate: bool = False
    """Measure this machine first: layers of the model with random weights, its memory, and messages and dp.mode between
    two processes, for a minute. The measured rates are kept."""
    rates: Path | None = None
    """File of measured rates. Default: rates.json in the run directory."""
    json: bool = False
    """Print JSON in place of a table."""

    overrides: tyro.conf.Suppress[tuple[str, ...]] = ()

    @classmethod
    def parse(cls, argv: Sequence[str]) -> Self:
        """Read the options of the command, and those of the run among them: those with a dot in their name."""
        command, overrides = with_run_options(cls, argv, prog="acsgd plan")
        return replace(command, overrides=overrides)

    def run(self) -> None:
        """Print the plan."""
        for error in out_of_range(self):
            raise ValueError(f"--{error}")
        limit = None if self.memory is None else parse_size(self.memory, option="--memory", example="24GiB")
        host = self.host_memory
        host_bytes = None if host is None else parse_size(host, option="--host-memory", example="128GiB")
        if self.calibrate and self.device is not None:
            raise ValueError("--calibrate measures this machine, and --device names another; give one of them")
        if self.rates is not None and self.device is not None:
            raise ValueError("--rates reads measured rates, and --device takes those of a GPU; give one of them")
        config = parse([str(self.run_file), *self.overrides], prog="acsgd plan", is_main=False)
        if self.device is not None and config.run.device == "cpu":
            raise ValueError(f"--device {self.device} names a GPU, and run.device=cpu uses none; give one of them")
        planned = self._plan(config, limit, host_bytes)
        if self.json:
            print(json.dumps(planned.as_json(), indent=2))
        else:
            planned.print()
        sys.exit(not planned.fits)

    def _plan(self, config: Config, limit: int | None, host_bytes: int | None) -> Planned:
        from acsgd.run.plan.model import describe_run_model
        from acsgd.run.plan.planner import RunPlanner
        from acsgd.run.plan.rates import parse_link
        from acsgd.tasks import check_options

        check_options(config)
        link = None if self.link is None else parse_link(self.link)
        rates, world = self._rates(config), self.world or config.pp.stages
        planner = RunPlanner(
            config,
            world,
            describe_run_model(config),
            on_gpu=config.run.device != "cpu" if rates is None else rates.on_gpu,
            sequences=self.sequences,
            per_host=self.per_host,
        )
        if planner.on_gpu:
            planner.host_bytes = host_bytes
        elif host_bytes is not None:
            if limit is not None:
                raise ValueError(
                    "--memory and --host-memory both limit the host where no GPU is used; give one of them"
                )
            limit = host_bytes // self.per_host
        planned = Planned(config, planner, planner.memory(config), limit, link)
        if not planned.fits:
            planned = replace(planned, fitting=planner.first_that_fits(limit))
        if rates is None:
            return planned
        steps = planner.step_planner(rates, link)
        step = planner.step(config, steps)
        return replace(planned, rates=rates, step=step, fastest=planner.fastest(steps, limit))

    def _rates(self, config: Config) -> Rates | None:
        """Return the rates of the device; None if they are neither given nor measured."""
        from acsgd.run.plan.rates import RATES, Rates, rates_of_gpu

        path = self.rates or Path(config.log.dir) / RATES
        if self.calibrate:
            return self._measured(config, path)
        if self.device is not None:
            return rates_of_gpu(self.device, config.model.dtype)
        if self.rates is None and not path.exists():
            return None
        if not path.is_file():
            raise ValueError(f"--rates {path} is not there; --calibrate measures this machine and makes it")
        if (rates := Rates.read(path)) is None:
            if self.rates is not None:
                raise ValueError(
                    f"--rates {path} was written by another version; --calibrate measures this machine and overwrites "
                    "it, and without --rates the rates of the run directory are taken"
                )
            print_note(f"{path} was written by another version; measuring this machine again, for a minute")
            rates = self._measured(config, path)
        if rates.dtype != config.model.dtype or (
            config.run.device != "auto" and rates.on_gpu != (config.run.device == "cuda")
        ):
            raise ValueError(
                f"{path} holds rates of {rates.device} for model.dtype={rates.dtype}, not of run.device="
                f"{config.run.device} for {config.model.dtype}; add --calibrate, or --device NAME"
            )
        return rates

    def _measured(self, config: Config, path: Path) -> Rates:
        """Measure this machine, and keep the rates in a file."""
        import torch

        rates = measure_here(config, self.world or config.pp.stages)
        rates.write(path)
        if (threads := torch.get_num_threads()) > 1 and self.per_host > 1 and not rates.on_gpu:
            print_note(
                f"measured with {threads} threads, but torchrun gives each of several processes of a host one; to "
                "measure that: OMP_NUM_THREADS=1 acsgd plan ... --calibrate"
            )
        return rates


def measure_here(config: Config, world: int) -> Rates:
    """Measure this machine with the layers of a run. Raises ValueError if that is not possible.

    world: number of processes; dp.mode is measured if they have several replicas, which compute on CPUs.
    """
    from acsgd.run.plan.measure import measure_rates
    from acsgd.run.plan.measure_messages import measure_messages
    from acsgd.run.plan.model import describe_run_model
    from acsgd.run.plan.planner import RunPlanner
    from acsgd.streams import open_streams

    streams = open_streams(config.run.device, local_rank=0)
    planner = RunPlanner(config, config.pp.stages, describe_run_model(config), on_gpu=bool(streams.gpu))
    mode = "allreduce" if streams.gpu or world <= config.pp.stages else config.dp.mode
    messages = measure_messages(CALIBRATED_S / 20, mode)  # first: it may fail, and takes less time
    rates = measure_rates(replace(planner.partition(config), streams=streams), CALIBRATED_S)
    return replace(rates, link=messages.link, messages=messages.times)


@dataclass(frozen=True)
class Planned:
    """What is printed of a run."""

    config: Config
    planner: RunPlanner
    ranks: Sequence[RankMemory]
    limit: int | None
    """Memory of each process."""
    link: LinkRate | None
    fitting: tuple[str, ...] | None = None
    """Flags of the nearest run that fits, if this one does not."""
    rates: Rates | None = None
    step: PlannedStep | None = None
    fastest: Sequence[Alternative] = ()

    @property
    def needed(self) -> list[int]:
        """Memory that each rank of a pipeline needs."""
        return [*map(self.planner.needed, self.ranks)]

    @property
    def lacks_host_memory(self) -> bool:
        """Whether the processes of a host need more than its memory."""
        host_bytes = self.planner.host_bytes
        return host_bytes is not None and max(self.planner.needed_on_hosts(self.ranks)) > host_bytes

    @property
    def fits(self) -> bool:
        """Whether all ranks and hosts fit, as far as it is known."""
        return not self.lacks_host_memory and (self.limit is None or max(self.needed) <= self.limit)

    def as_json(self) -> dict[str, Any]:
        """Return all numbers, for JSON."""
        found: dict[str, Any] = {
            "memory": [
                {**dataclasses.asdict(each), "on_host": each.on_host, "total": each.total, "needed": needed}
                for each, needed in zip(self.ranks, self.needed, strict=True)
            ],
            "hosts": self.planner.needed_on_hosts(self.ranks) if self.planner.on_gpu else [],
            "limit": self.limit,
            "host_limit": self.planner.host_bytes,
            "fits": None if self.limit is None and self.planner.host_bytes is None else self.fits,
            "nearest": None if self.fitting is None else [*self.fitting],
        }
        if self.step is not None:
            found["step"] = {**dataclasses.asdict(self.step), "total_s": self.step.total_s}
            found["fastest"] = [{"flags": [*each.flags], "total_s": each.step.total_s} for each in self.fastest]
        return found

    def print(self) -> None:
        """Print tables and sentences."""
        from acsgd.pp.schedules.schedules import is_chosen
        from acsgd.run.plan.planner import verdict

        _print_memory(self.ranks, self.planner.describe(), on_gpu=self.planner.on_gpu)
        if self.step is None or self.rates is None:
            print("time of a step: not known; --device NAME takes rates of a GPU, --calibrate measures this machine")
        else:
            print("\n".join(_describe_step(self.config, self.step, self.rates)))
            if self.link is None and self.rates.link is None and self.step.links:
                print("links are planned to take no time; give their rate, such as --link 1gbit,1ms")
            print(_describe_fastest(self.step, self.fastest, fits=self.fits))
        if is_chosen(self.config.pp.schedule) and self.config.pp.stages > 1:
            print("pp.schedule=auto is planned as 1f1b; the run chooses by what it measures at its start")
        if self.config.pp.layers == "auto" and self.config.pp.stages > 1:
            print(
                "pp.layers=auto is planned for ranks that are alike; the run chooses by what it measures at its start"
            )
        if self.config.pp.hosts is not None and self.config.pp.stages > 1:
            print("pp.hosts is planned for hosts and links that are alike")
        if self.config.dp.compress is not None:
            print(f"dp.compress={self.config.dp.compress} is planned as allreduce; the run chooses at its start")
        if self.planner.host_bytes is not None:
            on_hosts = self.planner.needed_on_hosts(self.ranks)
            print(verdict(on_hosts, self.planner.host_bytes, self.fitting, "host"))
        if self.limit is not None:
            print(verdict(self.needed, self.limit, self.fitting))


def _describe_step(config: Config, step: PlannedStep, rates: Rates) -> list[str]:
    """Return lines on the time of a step."""
    tokens = config.data.batch * config.data.sequence
    steps = config.optim.steps
    length = f"; {steps:,} steps take {_duration(steps * step.total_s)}" if steps else ""
    parts = {
        "compute": step.compute_s,
        "bubble": step.bubble_s,
        "messages between stages": step.messages_s,
        "exchange between replicas": step.replicas_s,
        "update": step.update_s,
    }
    shares = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in parts.items() if seconds)
    return [
        f"time of a step on {rates.device}: {step.total_s:.3g} s, {tokens / step.total_s:,.0f} tokens/s{length}",
        f"  {shares}",
        *(f"  {each.name}: {each.nbytes / 1e6:,.1f} MB in a step, {each.busy_s:.3g} s" for each in step.links),
    ]


def _describe_fastest(step: PlannedStep, fastest: Sequence[Alternative], *, fits: bool) -> str:
    """Return lines on the fastest runs that fit."""
    from acsgd.run.plan.planner import CODEC, GAIN

    shown = [each for each in fastest if not fits or each.step.total_s * GAIN < step.total_s]
    if not shown:
        return "no other stages, micro-batches, schedule or codecs are faster" + (", or fit" if not fits else "")
    lines = ["faster:" if fits else "these fit:"]
    for each in shown:
        loss = "; its codecs round" if any(CODEC in flag for flag in each.flags) else ""
        lines.append(f"  {' '.join(each.flags)}   ({each.step.total_s:.3g} s{loss})")
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    """Return a time such as "20 min"."""
    for unit, length in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} s"


def _print_memory(ranks: Sequence[RankMemory], title: str, *, on_gpu: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from acsgd.run.plan.memory import KINDS
    from acsgd.run.plan.planner import PROCESS_BYTES

    sums = ["on_device", "on_host"] if on_gpu else ["total"]
    shown = [name for name in KINDS if any(getattr(each, name) for each in ranks)] + sums
    headings = [{"on_device": "on GPU", "on_host": "on host"}.get(name, name) for name in shown]
    table = Table("rank", *headings, box=None, title=f"GiB of each rank: {title}", title_justify="left")
    for rank, each in enumerate(ranks):
        table.add_row(str(rank), *(f"{getattr(each, name) / GIB:.2f}" for name in shown))
    Console(soft_wrap=True).print(table)
    if on_gpu:
        print("messages and caches are in host memory; --run.device cpu plans a run without GPUs")
        if most := max(each.masters + each.moments if each.offloaded else 0 for each in ranks):
            print(
                "masters, gradients, moments and updates are in host memory, too; a checkpoint copies masters and "
                f"moments there, up to {most / GIB:.2f} GiB"
            )
        if most := max(each.host_weights for each in ranks):
            print(f"of the weights, up to {most / GIB:.2f} GiB of a rank are in host memory")
        if most := max(each.host_activations for each in ranks):
            print(f"of the activations, up to {most / GIB:.2f} GiB of a rank are in host memory")
    if unknown := max(each.cache_per_sequence for each in ranks):
        print(
            f"not counted: activation caches, up to {unknown / 2**20:.3g} MiB of host memory on a rank for each "
            "sequence of the data; give their number, --sequences N, or cache_gib in each delta"
        )
    print(
        f"besides: the process and its libraries, about {PROCESS_BYTES / GIB:.0f} GiB"
        f"{' each on the GPU and on the host' if on_gpu else ''}, and the data that the host reads"
    )
