"""Codecs chosen by pp.compress, modes by dp.compress, and hosts ordered by pp.hosts, on links that change; needs root:

    .venv/bin/python -m benchmarks.pipeline.chosen [--json runs/benchmarks/chosen.json]

The hosts are those of network.py: a process of one thread each. A small GPT-2, but in one part with an untied head,
trains on random tokens, one sequence per micro-batch. All steps have the same batch, so a delta sends differences from
the second on.

one     four stages; the last link is so slow that uncompressed messages take --ratio times the compute. Codecs given by
        hand for that link, within the max_loss_cost of the default, and chosen ones take turns, step by step
tied    two stages of a model whose head is its embedding, on a link on which uncompressed messages, rows included, take
        --ratio times the compute: as one
falls   two stages; the link has 1 Gbit/s, then --slow, then 1 Gbit/s. Each change of a codec is printed with the
        number of steps since the link has changed
none    two stages on an unlimited link: steps with pp.compress=auto and steps without it take turns, of a wider model,
        whose steps take .3 to .8 s on two cores
modes   as "falls", two replicas with dp.compress=auto: each change of the mode is printed
hosts   four stages without codecs; the second host is so slow that the messages of one boundary take --ratio times the
        compute. Runs with hosts in order, and in the order that pp.hosts=auto takes, take turns
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from acsgd.config.options import (
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    PipelineConfig,
    ReplicaConfig,
    RunConfig,
)
from acsgd.groups import connect
from acsgd.io.checkpoint.progress import Progress
from acsgd.io.telemetry.record import RunEvent
from acsgd.launch import Launch
from acsgd.layers.batch import Batch
from acsgd.pp.wire.ladder import Auto
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.plan.job import Job, prepare
from acsgd.run.session import Session
from acsgd.run.setup.auto import choose_hosts, choose_options, chooses_hosts
from acsgd.run.setup.build import build_session
from acsgd.run.setup.inputs import plan_activation_caches
from acsgd.run.setup.measured import find_transports
from acsgd.run.step.hooks import LoopState, StepHook
from acsgd.run.step.link_codecs import LONGEST, LinkCodecs
from acsgd.run.step.replica_mode import ReplicaMode
from acsgd.train import train_step
from benchmarks.common import netlab
from benchmarks.pipeline.forms import DeferredSession
from benchmarks.pipeline.network_ranks import (
    BLOCKS,
    TIMEOUT_S,
    on_hosts,
    request_all,
    save_model,
    zipf_tokens,
)

SEQUENCE, WIDTH, WIDTH_OF_NONE, VOCABULARY_OF_TIED = 128, 64, 256, 4096
CHOSEN, PLAIN = "chosen", "none/none"
IN_A_BASIS = (
    "delta:step=0.25,transform=true,first_bits=8/delta:step=0.5,transform=true,rounding=stochastic,first_bits=8"
)
BY_HAND = (
    PLAIN,
    "none:dtype=bf16/none:dtype=bf16",
    "fixpoint:bits=8/fixpoint:bits=8",
    "delta:bits=4,first_bits=8/fixpoint:bits=8",
    "delta:bits=4,first_bits=8/fixpoint:bits=4",
    IN_A_BASIS,
)
"""Codecs of activations and gradients of the slow link."""
TIED_BY_HAND = (
    "none/none/rows",
    "fixpoint:bits=8/fixpoint:bits=8/rows",
    *(
        f"{codecs}/{rows}"
        for codecs in ("delta:bits=4,first_bits=8/fixpoint:bits=4", IN_A_BASIS)
        for rows in ("rows", "rows:entropy_coding=true", "rows:bits=8")
    ),
)
"""The same with pp.tied, of a model whose head is its embedding."""
SETTLE = 40
"""Steps of the chosen form before anything is compared: eight measurements."""
FAST = 1000.0
"""Rate before the link falls and after it recovers, Mbit/s."""
ANSWER = 50
"""Goal for the number of steps after which a changed link has other codecs."""


@dataclass(frozen=True)
class Setting:
    """Options of a pipeline, sent to every rank."""

    model: Path
    stages: int
    micros: int
    forms: tuple[str, ...]
    schedule: str = "1f1b:lead=2"
    vocabulary: int = 512
    hosts: Literal["auto"] | None = None
    replicas: int = 1

    @property
    def ranks(self) -> int:
        """Number of ranks, one per host."""
        return self.stages * self.replicas

    def config(self, form: str) -> Config:
        """Return the configuration in which the last link has codecs given by hand, or all have chosen ones."""
        layers = (BLOCKS // self.stages,) * self.stages
        pipeline = PipelineConfig(self.stages, 1, self.schedule, layers=layers, hosts=self.hosts)
        if form == CHOSEN:
            pipeline = replace(pipeline, compress="auto" if self.stages > 1 else None)
        elif form != PLAIN:
            others, codecs = "".join(f"{link}=none " for link in range(self.stages - 2)), form.split("/")
            forward, backward = (f"{others}{self.stages - 2}={codec}" for codec in codecs[:2])
            pipeline = replace(pipeline, compress="auto:rows=false", forward=forward, backward=backward)
            pipeline = replace(pipeline, tied=(*codecs, "rows")[2])
        return Config(
            model=ModelConfig(str(self.model)),
            data=DataConfig(sources="demo", sequence=SEQUENCE, batch=self.micros),
            dp=ReplicaConfig(compress="auto" if self.replicas > 1 else None),
            optim=OptimConfig(lr=1e-4, steps=10**9),
            pp=pipeline,
            log=LogConfig(dir=str(self.model.parent / "run")),
            run=RunConfig(timeout=TIMEOUT_S),
        )


class Step(NamedTuple):
    """One optimizer step, with what lies between it and the next one."""

    seconds: float
    changes: list[str]
    """Sentences on the codecs, or the mode, that have changed after it."""
    cpu_s: float
    """CPU time of the rank, or of all ranks."""


class Run:
    """A run on one rank. Codecs given by hand change nothing, so nothing is measured between its steps."""

    def __init__(self, session: Session, form: str) -> None:
        self._session = DeferredSession(**vars(session))
        self._state, self._changes = LoopState(Progress()), list[str]()
        self._hook: StepHook | None = None
        if session.job.modes is not None:
            self._hook = ReplicaMode(session, session.job.modes, self._note)
        elif form == CHOSEN:
            self._hook = LinkCodecs(session, self._note, self._state)

    def _note(self, event: RunEvent) -> None:
        self._changes.append(event.text)

    def step(self, batch: Batch) -> Step:
        """Run one step, together with the other ranks."""
        hook, state, votes = self._hook, self._state, {}
        dist.barrier()
        start, worked = time.perf_counter(), time.process_time()
        self._session.send_deferred()
        if hook is not None:
            hook.before_step(state)
            reported = hook.report(state)
            votes = {field: reported.get(field, 0.0) for field in hook.fields}
        train_step(self._session, batch, state.progress, votes, state=state)
        if hook is not None:
            hook.before_next(state)
        changes, self._changes = self._changes, []
        return Step(time.perf_counter() - start, changes, time.process_time() - worked)


def be_rank(rank: int, setting: Setting, store: str, pipe: Connection) -> None:
    """Run one rank: one step of the requested form for each request, until the pipe is closed."""
    launch = Launch(rank, 0, setting.ranks)
    jobs = [prepare(setting.config(form), launch) for form in setting.forms]
    files, timeout = dist.FileStore(store, setting.ranks), timedelta(seconds=TIMEOUT_S)
    if chooses_hosts(jobs[0]):
        with connect(jobs[0].topology, timeout=timeout, store=dist.PrefixStore("hosts", files)) as groups:
            jobs[0], choice = choose_hosts(jobs[0], groups)
        if rank == 0:
            print(choice.text)
    batch = make_batch(jobs[0], setting)
    opened = connect(jobs[0].topology, timeout=timeout, store=files)
    with contextlib.suppress(EOFError), opened as groups:
        runs = {}
        for form, prepared in zip(setting.forms, jobs, strict=True):
            job, _ = choose_options(prepared, launch, groups, find_transports(prepared, groups))
            plan = plan_activation_caches(job, setting.micros, run_id="", fresh=True)
            runs[form] = Run(build_session(job, open_weight_source(job), groups, plan), form)
        while True:
            pipe.send(runs[pipe.recv()].step(batch))


def make_batch(job: Job, setting: Setting) -> Batch:
    """Return the batch of this replica in every step."""
    micros, rank = job.micro_ids, job.topology.stage_rank
    tokens = zipf_tokens(setting.micros, setting.vocabulary)[micros.start : micros.stop, None, : SEQUENCE + 1]
    batch = Batch(
        {"input_ids": tokens[..., :-1]} if rank == 0 else None,
        tokens[..., 1:] if rank == setting.stages - 1 else None,
        sample_ids=torch.arange(micros.start, micros.stop).view(-1, 1),
        micro_ids=micros,
    )
    return replace(batch, upcoming=batch)


@contextlib.contextmanager
def running(setting: Setting, network: netlab.Lab) -> Iterator[list[Connection]]:
    """Start the ranks of a pipeline."""
    with on_hosts(network, be_rank, setting) as pipes:
        yield pipes


def run_step(pipes: Sequence[Connection], form: str) -> Step:
    """Run one step on all ranks; its time is that of the slowest."""
    steps: list[Step] = request_all(pipes, form)
    return Step(max(step.seconds for step in steps), steps[0].changes, sum(step.cpu_s for step in steps))


def measure_one(model: Path, options: argparse.Namespace, console: Console) -> dict[str, object]:
    """Compare chosen codecs with those by hand, where one link of three is slow."""
    return compare(Setting(model, 4, options.micros, (*BY_HAND, CHOSEN)), options, console)


def measure_tied(model: Path, options: argparse.Namespace, console: Console) -> dict[str, object]:
    """The same with two stages of a model whose head is its embedding."""
    setting = Setting(model, 2, options.micros, (*TIED_BY_HAND, CHOSEN), vocabulary=VOCABULARY_OF_TIED)
    return {"tied": compare(setting, options, console)}


def compare(setting: Setting, options: argparse.Namespace, console: Console) -> dict[str, object]:
    """Compare chosen codecs with those by hand, the first of which are none."""
    plain, *_ = by_hand = setting.forms[:-1]
    seconds: dict[str, list[float]] = {form: [] for form in setting.forms}
    with netlab.lab(hosts=setting.stages) as network, running(setting, network) as pipes:
        for form in setting.forms:  # fills the caches
            run_step(pipes, form)
        compute_s = statistics.median(run_step(pipes, plain).seconds for _ in range(3))
        tokens = zipf_tokens(options.micros, setting.vocabulary)[:, :SEQUENCE]
        rows = len(tokens.unique()) if plain == TIED_BY_HAND[0] else 0
        mbit = (tokens.numel() + rows) * WIDTH * 4 * 8e-6 / (options.ratio * compute_s)
        network.limit(mbit, setting.stages - 1)
        console.print(f"compute {compute_s:.2f} s, the last link has {mbit:.2f} Mbit/s")
        changes = [text for _ in range(SETTLE) for text in run_step(pipes, CHOSEN).changes]
        console.print(*changes, sep="\n")
        for form in setting.forms:
            run_step(pipes, form)
        for _ in range(options.rounds):
            for form in setting.forms:
                step = run_step(pipes, form)
                seconds[form].append(step.seconds)
                changes += step.changes
    times = {form: statistics.median(of_form) for form, of_form in seconds.items()}
    best = min(times[form] for form in by_hand)
    shown = Table(title=f"A slow link between the last two of {setting.stages} stages, {options.micros} micro-batches")
    for name in ("codecs of the slow link", "step, s", "of the best by hand"):
        shown.add_column(name)
    for form, time_s in times.items():
        shown.add_row(form, f"{time_s:.2f}", f"{time_s / best:.3f}")
    console.print(shown)
    return {"compute_s": compute_s, "mbit": mbit, "seconds": seconds, "changes": changes}


def measure_falls(model: Path, options: argparse.Namespace, console: Console) -> dict[str, object]:
    """Let a link between stages fall and recover; print after how many steps the codecs change."""
    return {"falls": fall(Setting(model, 2, options.micros, (CHOSEN,)), options, console)}


def measure_modes(model: Path, options: argparse.Namespace, console: Console) -> dict[str, object]:
    """Let a link between replicas fall and recover; print after how many steps the mode changes."""
    return {"modes": fall(Setting(model, 1, options.micros, (CHOSEN,), replicas=2), options, console)}


def fall(setting: Setting, options: argparse.Namespace, console: Console) -> list[dict[str, object]]:
    """Let the link of two hosts fall and recover; return the times of steps, and what has changed after which."""
    log = list[dict[str, object]]()
    with netlab.lab(hosts=2) as network, running(setting, network) as pipes:
        for mbit in (FAST, options.slow, FAST):
            network.limit(mbit)
            times = list[float]()
            for number in range(1, options.steps + 1):
                step = run_step(pipes, CHOSEN)
                times.append(step.seconds)
                for text in step.changes:
                    console.print(f"{mbit:g} Mbit/s, after {number} steps: {text}", highlight=False)
                    log.append({"mbit": mbit, "steps": number, "text": text})
            console.print(
                f"{mbit:g} Mbit/s: first step {times[0]:.2f} s, last five {statistics.median(times[-5:]):.2f} s"
            )
            log.append({"mbit": mbit, "seconds": times})
    return log


def measure_none(model: Path, options: argparse.Namespace, console: Console) -> dict[str, object]:
    """Compare chosen codecs with none on an unlimited link."""
    setting = Setting(model, 2, options.micros, (PLAIN, CHOSEN))
    seconds, worked = (dict[str, list[float]]((form, []) for form in setting.forms) for _ in range(2))
    with netlab.lab(hosts=2) as network, running(setting, network) as pipes:
        changes = [text for _ in range(SETTLE) for text in run_step(pipes, CHOSEN).changes]
        for number in range(options.rounds):
            steps: dict[str, list[Step]] = {form: [] for form in setting.forms}
            for _ in range(LONGEST):  # of which one measures the link
                for form in setting.forms[:: -1 if number % 2 else 1]:
                    steps[form].append(run_step(pipes, form))
            for form, of_form in steps.items():
                seconds[form].append(sum(step.seconds for step in of_form))
                worked[form].append(sum(step.cpu_s for step in of_form))
                changes += [text for step in of_form for text in step.changes]
    console.print(f"a step without pp.compress takes {statistics.median(seconds[PLAIN]) / LONGEST:.2f} s")
    for name, times in (("time", seconds), ("CPU time", worked)):
        ratios = [chosen / plain for plain, chosen in zip(times[PLAIN], times[CHOSEN], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        console.print(f"unlimited: {middle:.3f} times the {name} of steps without (quartiles {low:.3f} to {high:.3f})")
    console.print(f"{len(changes)} changes: {'; '.join(changes)}")
    return {"none": {"seconds": seconds, "cpu_s": worked, "changes": changes}}


def measure_hosts(model: Path, options: argparse.Namespace, console: Console) -> dict[str, object]:
    """Compare the order of hosts that is chosen with that of their numbers, where the second host is slow."""
    setting = Setting(model, 4, options.micros, (PLAIN,))
    orders = (setting, replace(setting, hosts="auto"))
    seconds: dict[str, list[float]] = {"in order": [], "chosen": []}
    with netlab.lab(hosts=4) as network:
        with running(setting, network) as pipes:
            compute_s = statistics.median(run_step(pipes, PLAIN).seconds for _ in range(4))
        mbit = options.micros * SEQUENCE * WIDTH * 4 * 8e-6 / (options.ratio * compute_s)
        network.limit(mbit, 1)
        console.print(f"compute {compute_s:.2f} s, host 1 has {mbit:.2f} Mbit/s")
        for _ in range(options.rounds):
            for times, each in zip(seconds.values(), orders, strict=True):
                with running(each, network) as pipes:
                    steps = [run_step(pipes, PLAIN).seconds for _ in range(4)]
                times.append(statistics.median(steps[1:]))
    ratios = [chosen / plain for plain, chosen in zip(*seconds.values(), strict=True)]
    shown = ", ".join(f"{name} {statistics.median(times):.2f} s" for name, times in seconds.items())
    console.print(
        f"{shown}; chosen / in order: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )
    return {"hosts": {"compute_s": compute_s, "mbit": mbit, "seconds": seconds}}


MEASURES = {
    "one": measure_one,
    "tied": measure_tied,
    "falls": measure_falls,
    "none": measure_none,
    "modes": measure_modes,
    "hosts": measure_hosts,
}


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/chosen.json"), help="where the numbers go")
    parser.add_argument("--parts", nargs="+", default=[*MEASURES], choices=[*MEASURES])
    parser.add_argument("--micros", type=int, default=8, help="micro-batches per step")
    parser.add_argument("--ratio", type=float, default=4.0, help="uncompressed transfer over compute")
    parser.add_argument("--slow", type=float, default=20.0, help="rate to which the link falls, Mbit/s")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=ANSWER, help="steps between two changes of the link")
    options, console = parser.parse_args(), Console(width=160)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    results: dict[str, object] = {"max_loss_cost": asdict(Auto())["max_loss_cost"]}
    with tempfile.TemporaryDirectory() as directory:
        for part in options.parts:
            width = WIDTH_OF_NONE if part == "none" else WIDTH
            vocabulary, tied = VOCABULARY_OF_TIED if part == "tied" else Setting.vocabulary, part == "tied"
            model = save_model(Path(directory) / part, vocabulary=vocabulary, tied=tied, width=width)
            results |= MEASURES[part](model, options, console)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
