"""Step time and memory that `acsgd plan` predicts, against those of the run, for runs of different kinds; needs root:

    .venv/bin/python -m benchmarks.models.planned [--json runs/benchmarks/planned.json] [--svg docs/planned.svg]

Each rank is a process of one thread in a network namespace (netlab.py). Models have 15 M parameters.

time     A round measures the layers as `--calibrate` does, in all ranks at once and by CPU time, and then runs steps.
         Times are medians, as is the ratio within a round, with its range in brackets. CPU is that of the training
         thread of the busiest rank; on a loaded machine, step times tell nothing. Links without a limit have the rate
         that `--calibrate` measures between two processes, as is the CPU time of messages.
memory   By how much the resident memory of a rank is larger at the peak of its second step than before the run. Each
         rank is a process of its own whose allocator returns each tensor of more than 64 kB to the kernel at once.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig
from transformers.utils import logging as transformers_logging

from acsgd.config.options import Config
from acsgd.config.run_file import parse
from acsgd.groups import Groups, connect
from acsgd.io.checkpoint.progress import Progress
from acsgd.launch import Launch
from acsgd.layers.batch import Batch
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.plan.job import Job, prepare
from acsgd.run.plan.measure import copy_rate, measure_layers, memory_rate
from acsgd.run.plan.measure_messages import MeasuredMessages, measure_messages
from acsgd.run.plan.model import describe_run_model
from acsgd.run.plan.planner import RunPlanner
from acsgd.run.plan.rates import LayerTimes, LinkRate, Rates
from acsgd.run.setup.build import build_session
from acsgd.run.setup.inputs import plan_activation_caches
from acsgd.train import train_step
from benchmarks.common import netlab
from benchmarks.common.compare import Cost
from benchmarks.common.compare import setting as about
from benchmarks.common.pictures import save
from benchmarks.pipeline.network_ranks import TIMEOUT_S, on_hosts, request_all, save_tokenizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEQUENCE, BATCH, VOCABULARY, WIDTH = 64, 4, 4096, 512
RUN = (
    *("--data.sources", "demo", "--data.sequence", str(SEQUENCE), "--data.batch", str(BATCH), "--pp.micro", "1"),
    *("--optim.lr", "1e-4", "--optim.steps", "1000", "--run.device", "cpu", "--run.timeout", str(TIMEOUT_S)),
)
GPT2, LLAMA = "gpt2", "llama"
MODELS = {
    GPT2: GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=SEQUENCE,
        n_embd=WIDTH,
        n_layer=4,
        n_head=8,
        bos_token_id=0,
        eos_token_id=0,
        architectures=["GPT2LMHeadModel"],
    ),
    LLAMA: LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=1376,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=SEQUENCE,
        bos_token_id=0,
        eos_token_id=0,
        architectures=["LlamaForCausalLM"],
    ),
}
MessagesOf = Callable[[str], MeasuredMessages]
SLOW = LinkRate(50e6 / 8, 0.01)
"""The limited link: 50 Mbit/s, 10 ms in each direction."""
GOALS = {"time": 0.10, "memory": 0.05}
"""Largest deviation of a prediction, relative to what is measured."""
MMAP_THRESHOLD, SMALL_BYTES = -3, 2**16
"""Option of mallopt, and the size of allocations from which each is returned to the kernel when it is freed."""


GREY, INK, GRID, COLOR = "#5b6672", "#1f2933", "#e4e8ec", "#1f5fbf"


class Run(NamedTuple):
    """A run that is planned and run."""

    model: str
    world: int
    flags: str = ""
    link: LinkRate | None = None
    """None = no limit."""


RUNS = {
    "fp32": Run(GPT2, 1),
    "bf16": Run(GPT2, 1, "--model.dtype bf16"),
    "Llama": Run(LLAMA, 1),
    "recompute": Run(LLAMA, 1, "--model.recompute every:2"),
    "offload": Run(LLAMA, 1, "--optim.offload cpu"),
    "parameters": Run(LLAMA, 1, "--model.offload cpu --optim.offload cpu"),
    "disk": Run(LLAMA, 1, "--model.offload disk --adapter.spec lora:r=16"),
    "1f1b": Run(GPT2, 2, "--pp.stages 2"),
    "delta": Run(GPT2, 2, "--pp.stages 2 --pp.forward delta:bits=4 --pp.backward fixpoint:bits=8"),
    "zb": Run(LLAMA, 2, "--pp.stages 2 --pp.schedule zb"),
    "interleaved": Run(LLAMA, 2, "--pp.stages 2 --pp.schedule interleaved:chunks=2"),
    "LoRA": Run(LLAMA, 2, "--pp.stages 2 --adapter.spec lora:r=16"),
    "replicas": Run(GPT2, 2),
    "cocktail": Run(GPT2, 2, "--dp.mode cocktail_grad"),
    "shard": Run(LLAMA, 2, "--dp.shard optimizer"),
    "slow link": Run(GPT2, 2, "--pp.stages 2", SLOW),
}


@dataclass(frozen=True)
class Setting:
    """A run, sent to every rank."""

    config: Config
    world: int
    counts_memory: bool
    """Whether each rank builds its run for a step at a time, and returns memory to the kernel."""


class Times(NamedTuple):
    """Medians over the rounds, seconds."""

    predicted: float
    measured: float
    ratio: float
    """Predicted over measured, within a round."""
    range: tuple[float, float]
    """Smallest and largest ratio within a round."""


@dataclass
class Result:
    """Predictions and measurements of a run."""

    name: str
    world: int
    flags: str
    predicted_bytes: list[int]
    """By stage."""
    measured_bytes: list[int]
    """By rank."""
    predicted: list[Cost] = field(default_factory=list)
    """Time of a step and CPU time of the rank that works longest, by round."""
    measured: list[Cost] = field(default_factory=list)

    def times(self, kind: int) -> Times:
        """Return the times of a step (kind 0), or of the CPU of its busiest rank (1)."""
        pairs = [(ours[kind], theirs[kind]) for ours, theirs in zip(self.predicted, self.measured, strict=True)]
        ratios = [ours / theirs for ours, theirs in pairs]
        predicted, measured = map(median, zip(*pairs, strict=True))
        return Times(predicted, measured, median(ratios), (min(ratios), max(ratios)))

    @property
    def memory_ratios(self) -> list[float]:
        """Predicted over measured memory, by rank."""
        stages = len(self.predicted_bytes)
        return [self.predicted_bytes[rank % stages] / each for rank, each in enumerate(self.measured_bytes)]

    @property
    def worst_rank(self) -> int:
        """The rank whose memory is predicted worst."""
        return max(range(self.world), key=lambda rank: abs(self.memory_ratios[rank] - 1))


def config_of(directory: Path, name: str) -> Config:
    """Return the options of a run. directory: of the models, which are written there with new weights."""
    run = RUNS[name]
    if not (model := directory / run.model).exists():
        AutoModelForCausalLM.from_config(MODELS[run.model]).save_pretrained(model)
        save_tokenizer(model)
    places = ("--model.name", str(model), "--log.dir", str(directory / "runs" / name.replace(" ", "-")))
    return parse([*places, *RUN, *run.flags.split()], prog="planned", is_main=False)


def be_rank(rank: int, setting: Setting, store: str, pipe: Connection) -> None:
    """Run one rank: what each request asks for, until the pipe is closed."""
    transformers_logging.disable_progress_bar()
    job = prepare(setting.config, Launch(rank, 0, setting.world))
    files = dist.FileStore(store, setting.world)
    opened = connect(job.topology, timeout=timedelta(seconds=TIMEOUT_S), store=files)
    with opened as groups, contextlib.suppress(EOFError):
        if setting.counts_memory:
            pipe.recv()
            pipe.send(step_memory(job, groups))
            pipe.recv()  # until the pipe is closed, by which all ranks have ended
        training = Training(job, groups)
        while True:
            seconds, steps = pipe.recv()
            dist.barrier()
            pipe.send(training.run(steps) if steps else cpu_rates(job, seconds))


class Training:
    """A run on one rank; each step has the same random tokens."""

    def __init__(self, job: Job, groups: Groups) -> None:
        cache_plan = plan_activation_caches(job, BATCH, run_id="", fresh=True)
        self._session = build_session(job, open_weight_source(job), groups, cache_plan)
        self._progress = Progress()
        tokens = torch.randint(VOCABULARY, (BATCH, 1, SEQUENCE + 1), generator=torch.Generator().manual_seed(0))
        tokens = tokens[job.micro_ids.start : job.micro_ids.stop]
        ids = torch.arange(job.micro_ids.start, job.micro_ids.stop).view(-1, 1)
        position, last = job.topology.stage_rank, job.topology.stages - 1
        self._batch = Batch(
            {"input_ids": tokens[..., :-1]} if position == 0 else None,
            tokens[..., 1:] if position == last else None,
            sample_ids=ids,
            micro_ids=job.micro_ids,
        )
        self._batch = replace(self._batch, upcoming=self._batch)

    def run(self, steps: int) -> list[Cost]:
        """Run steps, together with the other ranks; return what each costs."""
        costs = list[Cost]()
        for _ in range(steps):
            started, worked = time.perf_counter(), time.thread_time()
            self._progress = train_step(self._session, self._batch, self._progress).progress
            costs.append(Cost(time.perf_counter() - started, time.thread_time() - worked))
        return costs


def cpu_rates(job: Job, seconds: float) -> Rates:
    """Measure layers, memory and copies as `measure_rates` does, by CPU time, without what predicts other layers."""
    layers = measure_layers(job, seconds, time.thread_time)
    copied, fetched = (rate(job.streams, time.thread_time) for rate in (memory_rate, copy_rate))
    return Rates("the CPU of this host", False, job.config.model.dtype, 1.0, copied, fetched, layers=layers)


def step_memory(job: Job, groups: Groups) -> int:
    """Return by how much the resident memory is larger at the peak of a run's second step than before the run."""
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, SMALL_BYTES)
    Training(job, groups).run(1)  # loads code
    gc.collect()
    before = status_bytes("VmRSS")
    training = Training(job, groups)
    training.run(1)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now the present memory
    training.run(1)
    return status_bytes("VmHWM") - before


def status_bytes(name: str) -> int:
    """Return a number of /proc/self/status, such as VmRSS."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


@contextlib.contextmanager
def running(run: Run, setting: Setting) -> Iterator[list[Connection]]:
    """Start the ranks of a run, each on a host of its own."""
    delay_s, mbit = (run.link.delay_s, run.link.bytes_per_s * 8e-6) if run.link else (0.0, None)
    with netlab.lab(hosts=run.world, delay_s=delay_s) as network:
        network.limit(mbit)
        with on_hosts(network, be_rank, setting) as pipes:
            yield pipes


def measure(name: str, directory: Path, options: argparse.Namespace, messages_of: MessagesOf) -> Result:
    """Plan a run and run it. messages_of: those of a dp.mode between processes of this machine, whose cores the hosts
    share."""
    run, config = RUNS[name], config_of(directory, name)
    messages = messages_of(config.dp.mode)
    planner = RunPlanner(config, run.world, describe_run_model(config), on_gpu=False, sequences=BATCH)
    planned = [each.total for each in planner.memory(config)]
    with running(run, Setting(config, run.world, counts_memory=True)) as pipes:
        result = Result(name, run.world, run.flags, planned, request_all(pipes, None))
    with running(run, Setting(config, run.world, counts_memory=False)) as pipes:
        request_all(pipes, (0, 2))
        for _ in range(options.rounds):
            times = replace(messages.times, cores=messages.times.cores / run.world)
            rates = replace(slowest(request_all(pipes, (options.seconds, 0))), messages=times)
            step = planner.step(config, planner.step_planner(rates, run.link or messages.link))
            result.predicted.append(Cost(step.total_s, step.compute_s + step.update_s))
            by_step = [*zip(*request_all(pipes, (0, options.steps)), strict=True)]
            wall_s, cpu_s = ([max(rank[kind] for rank in ranks) for ranks in by_step] for kind in (0, 1))
            result.measured.append(Cost(median(wall_s), median(cpu_s)))
    return result


def slowest(of_ranks: Sequence[Rates]) -> Rates:
    """Return the rates of the ranks together: the longest time of each layer."""
    times = functools.reduce(LayerTimes.slower_of, (each.layers for each in of_ranks if each.layers is not None))
    return replace(of_ranks[0], bytes_per_s=min(each.bytes_per_s for each in of_ranks), layers=times)


def table(results: Sequence[Result]) -> Table:
    """Return the table of predictions and measurements."""
    shown = Table("run", "processes", "flags", title="Planned and measured")
    for measured in ("step, s", "CPU, s", "rank, MB"):
        for name in (measured, "planned", "of it"):
            shown.add_column(name, justify="right")
    for each in results:
        rank = each.worst_rank
        planned, measured = each.predicted_bytes[rank % len(each.predicted_bytes)], each.measured_bytes[rank]
        times = [
            text
            for kind in (0, 1)
            for found in [each.times(kind)]
            for text in (
                f"{found.measured:.3f}",
                f"{found.predicted:.3f}",
                f"{marked(found.ratio, GOALS['time'])} ({found.range[0]:.2f} - {found.range[1]:.2f})",
            )
        ]
        memory = f"{measured / 1e6:.1f}", f"{planned / 1e6:.1f}", marked(planned / measured, GOALS["memory"])
        shown.add_row(each.name, str(each.world), each.flags, *times, *memory)
    return shown


def marked(ratio: float, goal: float) -> str:
    """Return a ratio, green within a goal and red beyond it."""
    return f"[{'green' if abs(ratio - 1) <= goal else 'red'}]{ratio:.3f}[/]"


def draw(results: Sequence[Result]) -> Figure:
    """Draw planned over measured, a point per run: step times on the left, memory on the right."""
    from matplotlib.figure import Figure

    names = [each.name for each in results]
    panels = {
        "Step time": (GOALS["time"], [each.times(0).ratio for each in results]),
        "CPU time": (GOALS["time"], [each.times(1).ratio for each in results]),
        "Memory": (GOALS["memory"], [each.memory_ratios[each.worst_rank] for each in results]),
    }
    figure = Figure(figsize=(10.4, 4.6), layout="constrained")
    for axes, (title, (goal, ratios)) in zip(figure.subplots(1, 3, sharey=True), panels.items(), strict=True):
        axes.axvspan(1 - goal, 1 + goal, color=GRID, linewidth=0)
        axes.axvline(1, color=GREY, linewidth=1)
        axes.plot(ratios, range(len(ratios)), "o", color=COLOR, markersize=6)
        axes.set_title(title, loc="left", fontsize=11, color=INK)
        axes.set_xlabel(f"planned over measured; grey: within {goal:.0%}", fontsize=9.5, color=GREY)
        axes.set_yticks(range(len(names)), names)
        axes.tick_params(length=0, labelsize=9, labelcolor=INK)
        axes.locator_params(axis="x", nbins=5)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    figure.axes[0].invert_yaxis()
    return figure


def main() -> None:
    """Plan, measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=[*RUNS], help="runs to measure")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="time in which layers are measured in a round")
    parser.add_argument("--steps", type=int, default=4, help="steps of a round")
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/planned.json"), help="path of the results")
    parser.add_argument("--svg", type=Path, help="path of the picture")
    options, console = parser.parse_args(), Console(width=180)
    try:
        netlab.check(needs_tun=True)
    except RuntimeError as error:
        sys.exit(f"benchmarks/models/planned.py: {error}")
    transformers_logging.disable_progress_bar()
    results: list[Result] = []
    torch.set_num_threads(1)
    messages_of = functools.cache(functools.partial(measure_messages, options.seconds))
    with tempfile.TemporaryDirectory() as directory:
        for name in options.runs:
            results.append(measure(name, Path(directory), options, messages_of))
            console.print(table(results[-1:]))
            found = {**about("two CPU cores"), "load": os.getloadavg()[1], "runs": [asdict(each) for each in results]}
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    console.print(table(results))
    if options.svg is not None:
        save(draw(results), options.svg)


if __name__ == "__main__":
    main()
