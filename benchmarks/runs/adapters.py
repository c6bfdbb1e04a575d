"""LoRA: step time against PEFT in a plain PyTorch loop, and bytes per step and memory per rank beside full fine-tuning:

    .venv/bin/python -m benchmarks.runs.adapters [--json runs/benchmarks/adapters.json]

time      one process on one thread. Both sides have the same base, initial adapter, tokens and micro-batches, clip by
          the norm of the gradients and use the same fused AdamW. They alternate; their losses in the warm-up must agree
          to LOSS_TOLERANCE.
traffic   2 stages x 2 replicas: bytes that all ranks send in a step, in the first epoch and in the last of EPOCHS, and
          the bytes of the tensors of each rank: weights, gradients, optimizer state, and state of the
          data-parallel mode. Activations and activation caches are not counted.

The model is a GPT-2 of 9 M parameters (10 M with an untied head, in `traffic`) without dropout.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers.utils import logging as transformers_logging

from acsgd.config.options import (
    AdapterConfig,
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    PipelineConfig,
    ReplicaConfig,
)
from acsgd.groups import connect
from acsgd.io.checkpoint.progress import Progress
from acsgd.launch import Launch
from acsgd.layers.batch import Batch
from acsgd.pp.wire.cache_plan import CachePlan
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.plan.job import Job, prepare
from acsgd.run.report import DP_BYTES, PP_BACKWARD_BYTES, PP_FORWARD_BYTES
from acsgd.run.session import Session
from acsgd.run.setup.build import build_session
from acsgd.train import train_step
from benchmarks.common.compare import Comparison, Step, alternate, on_ranks, summarise
from benchmarks.runs.speed import (
    OPTIM,
    SMALL,
    acsgd,
    make_adamw,
    pretrained,
    save_model,
    summed_loss,
    tokens_of,
)

RANK, ALPHA = 8, 16
LORA = f"lora:r={RANK},alpha={ALPHA}"
UPPER = "+".join(f"h.{block}.{name}" for block in (3, 4, 5) for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc"))
"""Three of the four linear layers of each block of the upper stage."""
GOAL = 1.05
"""Largest acceptable ratio of step times."""
LOSS_TOLERANCE = 1e-5
WARMUP = 3
STAGES, REPLICAS = 2, 2
SEQUENCES = 4
"""Number per step; a micro-batch is one of them in `traffic`, and two in `time`."""
STEPS_PER_EPOCH, EPOCHS = 2, 2
TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class Way:
    """A way to fine-tune on stages and replicas."""

    name: str
    adapter: str | None = None
    forward: str = "none"
    backward: str = "none"
    mode: str = "allreduce"


WAYS = (
    Way("full"),
    Way("LoRA", LORA),
    Way("LoRA, delta", LORA, forward="delta:bits=4"),
    Way("LoRA, cocktail_grad", LORA, mode="cocktail_grad"),
    Way("LoRA, all compressed", LORA, "delta:bits=4", "fixpoint:bits=8", "cocktail_grad"),
    Way("LoRA on the upper stage", f"{LORA},targets={UPPER}"),
    Way("LoRA on the upper stage, delta", f"{LORA},targets={UPPER}", forward="delta:bits=4,entropy_coding=true"),
)


class Traffic(NamedTuple):
    """Bytes that all ranks send in a step, mean over an epoch."""

    activations: float
    gradients: float
    """Activation gradients."""
    replicas: float


class Memory(NamedTuple):
    """Bytes of the tensors of one rank."""

    weights: int
    gradients: int
    optimizer: int
    mode: int


def config_of(way: Way, model: Path, stages: int = 1) -> Config:
    """Return a run."""
    return Config(
        model=ModelConfig(str(model)),
        data=DataConfig(sources="demo", sequence=SMALL.sequence, batch=SEQUENCES),
        optim=OPTIM,
        adapter=AdapterConfig(way.adapter),
        pp=PipelineConfig(
            stages,
            micro=1 if stages > 1 else 2,
            forward=way.forward,
            backward=way.backward,
            layers=(3, 3) if stages > 1 else None,
        ),
        dp=ReplicaConfig(way.mode),
        log=LogConfig(dir=str(model.parent / "run")),
    )


def peft_loop(job: Job, session: Session) -> Step:
    """Return the step of a plain PyTorch loop over PEFT's model with the initial adapter of a session."""
    described = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(pretrained(job), described).train()
    names = dict(model.named_parameters())
    with torch.no_grad():
        for weight in session.weights:
            names[f"base_model.model.{weight.key}"].copy_(weight.master)
    trained = nn.ParameterList(param for param in model.parameters() if param.requires_grad)
    adamw = make_adamw(trained)

    def step(number: int) -> float:
        total = torch.zeros(())
        for micro in tokens_of(number)[: job.shapes.num_micros]:
            logits = model(input_ids=micro[:, :-1], use_cache=False).logits
            loss = summed_loss(logits, micro[:, 1:]) / (SEQUENCES * SMALL.sequence)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(trained, OPTIM.clip)
        adamw.step()
        adamw.zero_grad()
        return total.item()

    return step


def time_steps(model: Path, store: str, rounds: int) -> Comparison:
    """Time the steps of both sides in this process. Raises RuntimeError if their losses differ."""
    torch.set_num_threads(1)
    job = prepare(config_of(Way("LoRA", LORA), model), Launch())
    with connect(job.topology, timeout=TIMEOUT, store=dist.FileStore(store, 1)) as groups:
        session = build_session(job, open_weight_source(job), groups)
        theirs = peft_loop(job, session)
        timed = alternate(acsgd(session), theirs, warmup=WARMUP, rounds=rounds, steps=1, barrier=dist.barrier)
    result = summarise([timed], steps=1)
    if result.loss_error > LOSS_TOLERANCE:
        raise RuntimeError(f"the relative difference of the two losses, {result.loss_error:.1e}, is too large")
    return result


def count_rank(rank: int, model: Path, store: str) -> list[tuple[list[Traffic], Memory]]:
    """Train every way on this rank; return the traffic of each epoch, and the memory of this rank."""
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    return [_count(rank, config_of(way, model, STAGES), f"{store}-{index}") for index, way in enumerate(WAYS)]


def _count(rank: int, config: Config, store: str) -> tuple[list[Traffic], Memory]:
    job = prepare(config, Launch(rank, rank, STAGES * REPLICAS))
    plan = CachePlan((STEPS_PER_EPOCH * config.data.batch,), Path(store), ("upper",), run_id="", fresh=True)
    with connect(job.topology, timeout=TIMEOUT, store=dist.FileStore(store, STAGES * REPLICAS)) as groups:
        session, progress, epochs = build_session(job, open_weight_source(job), groups, plan), Progress(), []
        for _ in range(EPOCHS):
            sent = []
            for step in range(STEPS_PER_EPOCH):
                result = train_step(session, batch_of(job, step), progress)
                progress, summary = result.progress, result.summary
                sent.append((int(summary[PP_FORWARD_BYTES]), int(summary[PP_BACKWARD_BYTES]), int(summary[DP_BYTES])))
            epochs.append(Traffic(*(sum(part) / STEPS_PER_EPOCH for part in zip(*sent, strict=True))))
        memory = memory_of(session)
        session.close()
    return epochs, memory


def batch_of(job: Job, step: int) -> Batch:
    """Return this rank's part of step `step` of an epoch."""
    ids = torch.arange(job.config.data.batch).view(SEQUENCES, 1) + step * job.config.data.batch
    rows = slice(job.micro_ids.start, job.micro_ids.stop)
    tokens = tokens_of(step).flatten(0, 1)[:SEQUENCES, None][rows]
    return Batch(
        {"input_ids": tokens[..., :-1]} if 0 in job.layout.stages else None,
        tokens[..., 1:] if STAGES - 1 in job.layout.stages else None,
        sample_ids=ids[rows],
        micro_ids=job.micro_ids,
    )


def memory_of(session: Session) -> Memory:
    """Return the memory of this rank."""
    parameters = {x.data_ptr(): x for layer in session.layers for x in _parameters(session, layer.spec.parameters)}
    masters = {weight.master.data_ptr(): weight.master for weight in session.weights}
    gradients = [weight.master.grad for weight in session.weights if weight.master.grad is not None]
    states = [
        session.optimizer.state_of(session.weights),
        *(stage.sync.state_dict() for stage in session.stages.values()),
    ]
    optimizer, *modes = (sum(x.nbytes for by_key in state.values() for x in by_key.values()) for state in states)
    weights = sum(x.nbytes for x in (parameters | masters).values())
    return Memory(weights, sum(x.nbytes for x in gradients), optimizer, sum(modes))


def _parameters(session: Session, keys: Iterable[str]) -> list[Tensor]:
    model = next(iter(session.stages.values())).composed.model
    return [model.get_parameter(key).data for key in keys]


def show_times(result: Comparison) -> Table:
    """Return a table of the step times."""
    shown = Table("LoRA, s", "PEFT, s", "ratio", "quartiles", "CPU ratio", "goal", title="Step time of LoRA on 1 x 1")
    low, high = result.quartiles
    mark = "[green]met[/]" if result.median <= GOAL else "[red]missed[/]"
    times = f"{result.ours_s:.3f}", f"{result.theirs_s:.3f}", f"{result.median:.3f}", f"{low:.3f} - {high:.3f}"
    shown.add_row(*times, f"{result.cpu:.3f}", f"<= {GOAL:g} {mark}")
    return shown


def show_traffic(ranks: Sequence[Sequence[tuple[list[Traffic], Memory]]]) -> Table:
    """Return a table of the bytes of a step, kB, and the memory of the rank that needs most, MB."""
    columns = "activations, first epoch", "last", "gradients", "replicas", *Memory._fields
    shown = Table("fine-tuning", *columns, title="kB per step of all ranks; MB of the rank that needs most")
    for index, way in enumerate(WAYS):
        first, *_, last = ranks[0][index][0]
        sent = first.activations, last.activations, last.gradients, last.replicas
        memory = max((of_rank[index][1] for of_rank in ranks), key=sum)
        shown.add_row(way.name, *(f"{x / 1e3:,.1f}" for x in sent), *(f"{x / 1e6:.1f}" for x in memory))
    return shown


def main() -> None:
    """Measure, print, save."""
    transformers_logging.disable_progress_bar()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/adapters.json"), help="the results")
    parser.add_argument("--rounds", type=int, default=15, help="a step of each side")
    parser.add_argument("--only", choices=("time", "traffic"), help="measure only one part")
    options = parser.parse_args()
    console = Console(width=140)
    about = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.processor()}
    results: dict[str, object] = {"about": about}
    with tempfile.TemporaryDirectory() as directory:
        if options.only != "traffic":
            tied = save_model(Path(directory) / "tied" / "model", tied=True)
            times = time_steps(tied, f"{directory}/store", options.rounds)
            results["time"] = times._asdict()
            console.print(show_times(times))
        if options.only != "time":
            untied = save_model(Path(directory) / "untied" / "model", tied=False)
            ranks = on_ranks(STAGES * REPLICAS, count_rank, untied, f"{directory}/store-of-ranks")
            results["traffic"] = [
                {
                    **asdict(way),
                    "epochs": [traffic._asdict() for traffic in ranks[0][index][0]],
                    "ranks": [of_rank[index][1]._asdict() for of_rank in ranks],
                }
                for index, way in enumerate(WAYS)
            ]
            console.print(show_traffic(ranks))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
