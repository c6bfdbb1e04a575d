"""Say before a run what memory it needs: acsgd plan RUN.toml. Reads config.json, no weights and no data."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import tyro

from acsgd.config.checks import check
from acsgd.config.options import Config
from acsgd.config.ranges import COUNT, out_of_range
from acsgd.config.run_file import parse, parse_flags
from acsgd.config.units import parse_size
from acsgd.launch import Launch

if TYPE_CHECKING:
    from acsgd.run.plan.memory import RankMemory, TracedModel
    from acsgd.run.plan.model import RunModel

GIB = 2**30


@dataclass(frozen=True)
class PlanCommand:
    """Print the memory of each rank of a run, by kind, and whether it fits: from the model's config.json alone.

    Starts no processes, reads no data, and downloads nothing else. Options of the run may follow, as in training:
    acsgd plan RUN.toml --pp.stages 2. Exits with 1 if the run does not fit.
    """

    run_file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN.toml")]
    """Run file, whose data need not exist."""
    world: Annotated[int, COUNT] | None = None
    """Number of processes, as torchrun starts. Default: one replica, pp.stages."""
    memory: str | None = None
    """Memory for each process, "24GiB", to which the need is compared. Default: not compared."""
    json: bool = False
    """Print JSON in place of a table."""

    overrides: tyro.conf.Suppress[tuple[str, ...]] = ()

    @classmethod
    def parse(cls, argv: Sequence[str]) -> Self:
        """Read the options of the command, and those of the run among them: those with a dot in their name."""
        own, of_run, is_of_run = list[str](), list[str](), False
        for argument in argv:
            if argument.startswith("--"):
                is_of_run = "." in argument.partition("=")[0]
            (of_run if is_of_run else own).append(argument)
        return replace(parse_flags(cls, own, prog="acsgd plan"), overrides=tuple(of_run))

    def run(self) -> None:
        """Print the plan."""
        for error in out_of_range(self):
            raise ValueError(f"--{error}")
        limit = None if self.memory is None else parse_size(self.memory, option="--memory", example="24GiB")
        config = parse([str(self.run_file), *self.overrides], prog="acsgd plan", is_main=False)
        check(config)
        planner = Planner(config, self.world or config.pp.stages)
        ranks = planner.memory(config)
        lacking = limit is not None and max(each.total for each in ranks) > limit
        fitting = planner.first_that_fits(limit) if limit is not None and lacking else None
        if self.json:
            print(json.dumps(_as_json(ranks, limit, fitting), indent=2))
        else:
            _print(ranks, planner.describe(), limit, fitting)
        sys.exit(lacking)


class Planner:
    """Plans of a run, and of others that differ in a few options. Each model is traced once per kind of micro-batch."""

    def __init__(self, config: Config, world: int) -> None:
        from acsgd.run.plan.model import describe_run_model
        from acsgd.tasks import check_options

        check_options(config)
        self._config = config
        self._world = world
        self._model: RunModel = describe_run_model(config)
        self._traced: dict[tuple[int, str], TracedModel] = {}

    def describe(self) -> str:
        """Return the model and the ranks in words."""
        stages = self._config.pp.stages
        return f"{self._model.describe_size()}, on {stages} stages x {self._world // stages} replicas"

    def memory(self, config: Config) -> list[RankMemory]:
        """Return the memory of the ranks of a pipeline, first to last. Raises ValueError if the run is not possible."""
        import torch

        from acsgd.run.plan.memory import plan_memory, trace_model
        from acsgd.run.plan.partition import divide_model, open_grid
        from acsgd.streams import Streams

        grid = open_grid(config, Launch(world_size=self._world))
        device = "cpu" if config.run.device == "cpu" else "cuda"
        partition = divide_model(config, grid, self._model, Streams(torch.device(device)))
        key = config.pp.micro, config.model.recompute
        if key not in self._traced:
            self._traced[key] = trace_model(partition)
        return plan_memory(partition, self._traced[key])

    def first_that_fits(self, limit: int) -> tuple[str, ...] | None:
        """Return the flags of the nearest run that fits: with less changed, and then with fewer stages."""
        for flags, config in self._variants():
            try:
                needed = max(each.total for each in self.memory(config))
            except ValueError:
                continue
            if needed <= limit:
                return flags
        return None

    def _variants(self) -> Iterator[tuple[tuple[str, ...], Config]]:
        """Yield runs that need less memory, nearest first, with the flags that make them."""
        config, world = self._config, self._world
        more = [n for n in range(config.pp.stages, world + 1) if world % n == 0 and n % config.pp.stages == 0]
        for stages in more:
            for micro in dict.fromkeys((config.pp.micro, max(1, config.pp.micro // 2), 1)):
                for recompute in dict.fromkeys((config.model.recompute, "layers")):
                    changed = replace(
                        config,
                        model=replace(config.model, recompute=recompute),
                        pp=replace(
                            config.pp,
                            stages=stages,
                            micro=micro,
                            layers=config.pp.layers if stages == config.pp.stages else None,
                        ),
                    )
                    yield _flags(config, changed), changed


def _flags(config: Config, changed: Config) -> tuple[str, ...]:
    """Return the flags that make one run of another."""
    pairs = {
        "--pp.stages": (config.pp.stages, changed.pp.stages),
        "--pp.micro": (config.pp.micro, changed.pp.micro),
        "--model.recompute": (config.model.recompute, changed.model.recompute),
    }
    return tuple(f"{flag} {after}" for flag, (before, after) in pairs.items() if before != after)


def _as_json(ranks: Sequence[RankMemory], limit: int | None, fitting: tuple[str, ...] | None) -> dict[str, Any]:
    return {
        "memory": [{**dataclasses.asdict(each), "total": each.total} for each in ranks],
        "limit": limit,
        "fits": None if limit is None else max(each.total for each in ranks) <= limit,
        "nearest": None if fitting is None else [*fitting],
    }


def _print(ranks: Sequence[RankMemory], title: str, limit: int | None, fitting: tuple[str, ...] | None) -> None:
    from rich.console import Console
    from rich.table import Table

    names = [field.name for field in dataclasses.fields(ranks[0])]
    shown = [name for name in names if any(getattr(each, name) for each in ranks)]
    table = Table("rank", *shown, "total", box=None, title=f"GiB of each rank: {title}", title_justify="left")
    for rank, each in enumerate(ranks):
        table.add_row(str(rank), *(f"{getattr(each, name) / GIB:.2f}" for name in shown), f"{each.total / GIB:.2f}")
    Console(soft_wrap=True).print(table)
    print("besides: the process and its libraries, about 1 GiB, and the data that the host reads")
    if limit is not None:
        print(verdict(ranks, limit, fitting))


def verdict(ranks: Sequence[RankMemory], limit: int, fitting: tuple[str, ...] | None) -> str:
    """Return in a sentence whether ranks fit, and if not, what to type."""
    rank = max(range(len(ranks)), key=lambda each: ranks[each].total)
    needed = f"rank {rank} needs {ranks[rank].total / GIB:.2f} of {limit / GIB:.2f} GiB"
    if ranks[rank].total <= limit:
        return f"fits: {needed}"
    if fitting is None:
        return f"does not fit: {needed}; use more processes with more pp.stages, or an adapter (adapter.spec)"
    return f"does not fit: {needed}; use {' '.join(fitting)}"
