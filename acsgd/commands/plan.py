"""Say before a run what memory it needs: acsgd plan RUN.toml. Reads config.json, no weights and no data."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import tyro

from acsgd.config.options import Config, ShardKind
from acsgd.config.ranges import COUNT, out_of_range, parse_size
from acsgd.config.run_file import parse, with_run_options
from acsgd.launch import Launch

if TYPE_CHECKING:
    from acsgd.run.plan.memory import RankMemory, TracedModel
    from acsgd.run.plan.model import RunModel

GIB = 2**30
PROCESS_BYTES = GIB
"""What a process with its libraries needs besides, in host memory and, as context and workspaces, on its GPU."""


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
    per_host: Annotated[int, COUNT] = 1
    """Number of processes on each host. Replicas of a host may act as one (dp.local)."""
    memory: str | None = None
    """Memory for each process, "24GiB", to which the need is compared: of its GPU, or of the host with --run.device
    cpu. Default: not compared."""
    sequences: Annotated[int, COUNT] | None = None
    """Number of sequences in the data, which the activation caches of delta hold. Default: not known."""
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
        config = parse([str(self.run_file), *self.overrides], prog="acsgd plan", is_main=False)
        planner = MemoryPlanner(config, self.world or config.pp.stages, self.sequences, self.per_host)
        ranks = planner.memory(config)
        needed = [*map(planner.needed, ranks)]
        lacking = limit is not None and max(needed) > limit
        fitting = planner.first_that_fits(limit) if limit is not None and lacking else None
        if self.json:
            print(json.dumps(_as_json(ranks, needed, limit, fitting), indent=2))
        else:
            _print(ranks, planner.describe(), on_gpu=planner.on_gpu)
            if limit is not None:
                print(verdict(needed, limit, fitting))
        sys.exit(lacking)


class MemoryPlanner:
    """Plans of a run, and of others that differ in a few options. Each model is traced once per kind of micro-batch."""

    def __init__(self, config: Config, world: int, sequences: int | None = None, per_host: int = 1) -> None:
        from acsgd.run.plan.model import describe_run_model
        from acsgd.tasks import check_options

        check_options(config)
        self._config = config
        self._world = world
        self._per_host = per_host
        self.sequences = sequences
        self.on_gpu = config.run.device != "cpu"
        self._model: RunModel = describe_run_model(config)
        self._traced: dict[tuple[int, str], TracedModel] = {}

    def describe(self) -> str:
        """Return the model and the ranks in words."""
        stages = self._config.pp.stages
        device = "GPU" if self.on_gpu else "CPU"
        return f"{self._model.describe_size()}, on {stages} stages x {self._world // stages} replicas, {device}"

    def needed(self, rank: RankMemory) -> int:
        """Return the memory that a process needs where its tensors are: on its GPU, or on the host."""
        return (rank.on_device if self.on_gpu else rank.total) + PROCESS_BYTES

    def memory(self, config: Config) -> list[RankMemory]:
        """Return the memory of the ranks of a pipeline, first to last. Raises ValueError if the run is not possible."""
        import torch

        from acsgd.run.plan.memory import plan_memory, trace_model
        from acsgd.run.plan.partition import divide_model, open_grid
        from acsgd.streams import Streams
        from acsgd.tasks import check_options

        check_options(config)
        grid = open_grid(config, Launch(world_size=self._world, local_world_size=self._per_host))
        device = "cuda" if self.on_gpu else "cpu"
        partition = divide_model(config, grid, self._model, Streams(torch.device(device)))
        key = config.pp.micro, config.model.recompute
        if key not in self._traced:
            self._traced[key] = trace_model(partition)
        return plan_memory(partition, self._traced[key], self.sequences)

    def first_that_fits(self, limit: int) -> tuple[str, ...] | None:
        """Return the flags of the nearest run that fits: with less changed, and then with fewer stages."""
        for flags, config in self._variants():
            try:
                ranks = self.memory(config)
            except ValueError:
                continue
            if max(map(self.needed, ranks)) <= limit:
                return flags
        return None

    def _variants(self) -> Iterator[tuple[tuple[str, ...], Config]]:
        """Yield runs that need less memory, nearest first, with the flags that make them."""
        config, world = self._config, self._world
        shards: Sequence[ShardKind] = ("none", "optimizer") if config.dp.shard == "none" else (config.dp.shard,)
        more = [n for n in range(config.pp.stages, world + 1) if world % n == 0 and n % config.pp.stages == 0]
        micros = [config.pp.micro]
        while micros[-1] > 1:
            micros.append(max(n for n in range(1, micros[-1] // 2 + 1) if config.data.batch % n == 0))
        for stages in more:
            for micro in micros:
                for recompute, shard in product(dict.fromkeys((config.model.recompute, "layers")), shards):
                    changed = replace(
                        config,
                        model=replace(config.model, recompute=recompute),
                        pp=replace(
                            config.pp,
                            stages=stages,
                            micro=micro,
                            layers=config.pp.layers if stages == config.pp.stages else None,
                        ),
                        dp=replace(config.dp, shard=shard),
                    )
                    yield _flags(config, changed), changed


def _flags(config: Config, changed: Config) -> tuple[str, ...]:
    """Return the flags that make one run of another."""
    pairs = {
        "--pp.stages": (config.pp.stages, changed.pp.stages),
        "--pp.layers": (config.pp.layers, changed.pp.layers),
        "--pp.micro": (config.pp.micro, changed.pp.micro),
        "--model.recompute": (config.model.recompute, changed.model.recompute),
        "--dp.shard": (config.dp.shard, changed.dp.shard),
    }
    return tuple(f"{flag} {after}" for flag, (before, after) in pairs.items() if before != after)


def _as_json(
    ranks: Sequence[RankMemory], needed: Sequence[int], limit: int | None, fitting: tuple[str, ...] | None
) -> dict[str, Any]:
    return {
        "memory": [
            {**dataclasses.asdict(each), "on_host": each.on_host, "total": each.total, "needed": bytes_needed}
            for each, bytes_needed in zip(ranks, needed, strict=True)
        ],
        "limit": limit,
        "fits": None if limit is None else max(needed) <= limit,
        "nearest": None if fitting is None else [*fitting],
    }


def _print(ranks: Sequence[RankMemory], title: str, *, on_gpu: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from acsgd.run.plan.memory import KINDS

    sums = ["on_device", "on_host"] if on_gpu else ["total"]
    shown = [name for name in KINDS if any(getattr(each, name) for each in ranks)] + sums
    headings = [{"on_device": "on GPU", "on_host": "on host"}.get(name, name) for name in shown]
    table = Table("rank", *headings, box=None, title=f"GiB of each rank: {title}", title_justify="left")
    for rank, each in enumerate(ranks):
        table.add_row(str(rank), *(f"{getattr(each, name) / GIB:.2f}" for name in shown))
    Console(soft_wrap=True).print(table)
    if on_gpu:
        print("messages and caches are in host memory; --run.device cpu plans a run without GPUs")
    if unknown := max(each.cache_per_sequence for each in ranks):
        print(
            f"not counted: activation caches, up to {unknown / 2**20:.3g} MiB of host memory on a rank for each "
            "sequence of the data; give their number, --sequences N, or cache_gib in pp.forward"
        )
    print(
        f"besides: the process and its libraries, about {PROCESS_BYTES / GIB:.0f} GiB"
        f"{' each on the GPU and on the host' if on_gpu else ''}, and the data that the host reads"
    )


def verdict(needed: Sequence[int], limit: int, fitting: tuple[str, ...] | None) -> str:
    """Return in a sentence whether ranks fit, and if not, what to type."""
    rank = max(range(len(needed)), key=needed.__getitem__)
    need = (
        f"rank {rank} needs {needed[rank] / GIB:.2f} of {limit / GIB:.2f} GiB, of which the process and its libraries "
        f"{PROCESS_BYTES / GIB:.2f}"
    )
    if needed[rank] <= limit:
        return f"fits: {need}"
    if fitting is None:
        return f"does not fit: {need}; use more processes with more pp.stages, or an adapter (adapter.spec)"
    return f"does not fit: {need}; use {' '.join(fitting)}"
