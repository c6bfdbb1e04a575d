"""Step time relative to plain PyTorch, on the CPU with one thread per process, and on a GPU if there is one:

    .venv/bin/python -m benchmarks.runs.speed [--json runs/benchmarks/speed.json]

    1 process     against a training loop over the Hugging Face model
    2 stages      against torch.distributed.pipelining with the same stages, GPipe and 1F1B
    2 replicas    against DistributedDataParallel: buckets of the same size, no_sync before the last micro-batch
    1 GPU         as 1 process, with GPT-2 of 124 M parameters

The two sides alternate in the same processes. They have the same initial weights, tokens and micro-batches, clip by the
global gradient norm (in every step: the limit is low) and use the same fused AdamW, all in fp32. Their losses in the
warm-up must agree to LOSS_TOLERANCE. acsgd reduces loss, gradient norm and byte counts over all ranks in every step, as
in any run; the other side does not. torch's pipelining cannot tie weights across stages, so in those cases the head is
untied on both sides. The loss is the sum over target tokens divided by their number.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

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
from acsgd.launch import Launch
from acsgd.layers.batch import Batch
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.plan.job import Job, prepare
from acsgd.run.session import Session
from acsgd.run.setup.build import build_session
from acsgd.train import train_step
from benchmarks.common.compare import Comparison, RankRounds, Step, alternate, on_ranks, summarise

BUCKET_MB = 5
"""Bucket size of both sides, 2**20 bytes. DistributedDataParallel's default, 25, is most of the model: no overlap."""
OPTIM = OptimConfig(lr=3e-4, steps=10**9, clip=0.1, weight_decay=0.01)
"""The learning rate is nearly constant, since it decays over `steps`."""
WARMUP, STEPS_PER_BLOCK = 3, 1
LOSS_TOLERANCE = 1e-4
TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class Size:
    """A GPT-2 and its batch."""

    vocabulary: int = 4096
    width: int = 320
    blocks: int = 6
    heads: int = 5
    sequence: int = 128
    micro: int = 2
    """Sequences per micro-batch."""
    num_micros: int = 8
    """Micro-batches per step."""


SMALL = Size()
GPT2 = Size(vocabulary=50257, width=768, blocks=12, heads=12, sequence=512, micro=8, num_micros=4)


@dataclass(frozen=True)
class Case:
    """One comparison."""

    name: str
    baseline: str
    goal: float
    """Largest acceptable ratio of step times."""
    open_baseline: Callable[[Job, Size, GPT2LMHeadModel, dist.ProcessGroup | None], Step]
    """Takes a model with the weights of the session, and the group of ranks of its messages; None = all, over gloo."""
    stages: int = 1
    replicas: int = 1
    schedule: str = "1f1b"
    tied: bool = True
    size: Size = SMALL
    device: str = "cpu"

    def config(self, model: Path, *, init: Literal["pretrained", "scratch"] = "pretrained") -> Config:
        """Return acsgd's configuration."""
        return Config(
            model=ModelConfig(name=str(model), init=init),
            data=DataConfig(sources="demo", sequence=self.size.sequence, batch=self.size.micro * self.size.num_micros),
            optim=OPTIM,
            pp=PipelineConfig(stages=self.stages, micro=self.size.micro, schedule=self.schedule),
            dp=ReplicaConfig(mode=f"allreduce:bucket_mb={BUCKET_MB * 2**20 / 1e6}"),
            run=RunConfig(device=self.device),
            log=LogConfig(dir=str(model.parent / "run")),
        )


def tokens_of(step: int, size: Size = SMALL) -> Tensor:
    """Return the global batch, [M, B, T + 1]; there are four different ones, so the loss falls."""
    generator = torch.Generator().manual_seed(step % 4)
    return torch.randint(size.vocabulary, (size.num_micros, size.micro, size.sequence + 1), generator=generator)


def acsgd(session: Session, size: Size = SMALL) -> Step:
    """Return acsgd's step."""
    job = session.job
    rows = slice(job.micro_ids.start, job.micro_ids.stop)
    is_first, is_last = 0 in job.layout.stages, len(job.layout.specs) - 1 in job.layout.stages

    def step(number: int) -> float:
        tokens = tokens_of(number, size)[rows]
        batch = Batch(
            {"input_ids": tokens[..., :-1]} if is_first else None,
            tokens[..., 1:] if is_last else None,
            sample_ids=torch.zeros(tokens.shape[:2], dtype=torch.int64),
            micro_ids=job.micro_ids,
        )
        return train_step(session, batch, Progress(step=number)).loss / job.topology.world_size

    return step


def plain(job: Job, size: Size, model: nn.Module, group: dist.ProcessGroup | None) -> Step:
    """Return the step of a plain PyTorch loop, or of DistributedDataParallel if there are replicas."""
    model = model.to(job.streams.device)
    adamw = make_adamw(model)
    if job.topology.replicas == 1:
        return loop(job, size, model, adamw, lambda _: nullcontext())
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True)
    return loop(job, size, ddp, adamw, lambda is_last: nullcontext() if is_last else ddp.no_sync())


def loop(
    job: Job,
    size: Size,
    model: nn.Module,
    adamw: torch.optim.Optimizer,
    during: Callable[[bool], AbstractContextManager[None]],
) -> Step:
    """Return the step of a plain loop. during: takes whether a micro-batch is the last one; opens its context."""
    device, replicas = job.streams.device, job.topology.replicas
    rows = slice(job.micro_ids.start, job.micro_ids.stop)

    def step(number: int) -> float:
        total = torch.zeros((), device=device)
        batch = tokens_of(number, size)[rows].to(device)
        for index, micro in enumerate(batch):
            with during(index == len(batch) - 1):
                logits = model(micro[:, :-1], use_cache=False).logits
                loss = summed_loss(logits, micro[:, 1:]) / batch[..., 1:].numel()
                loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), OPTIM.clip)
        adamw.step()
        adamw.zero_grad()
        return total.item() / replicas

    return step


def pipelined(job: Job, size: Size, model: GPT2LMHeadModel, group: dist.ProcessGroup | None) -> Step:
    """Return the step of torch.distributed.pipelining, with acsgd's stages."""
    rank, stages = job.topology.rank, job.topology.stages
    targets = size.num_micros * size.micro * size.sequence
    device = job.streams.device
    module = GPT2Stage(model, *job.layout.specs[rank]).to(device)
    stage = PipelineStage(module, rank, stages, device, group=group)
    schedule_class = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[job.config.pp.schedule]
    schedule = schedule_class(
        stage, size.num_micros, lambda logits, labels: summed_loss(logits, labels) / targets, scale_grads=False
    )
    adamw = make_adamw(module)
    params = list(module.parameters())

    def step(number: int) -> float:
        tokens = tokens_of(number, size).flatten(0, 1).to(device)
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(tokens[:, :-1].contiguous(), return_outputs=False)
        else:
            schedule.step(target=tokens[:, 1:], losses=losses, return_outputs=False)
        squared = nn.utils.get_total_norm([param.grad for param in params if param.grad is not None]).square()
        dist.all_reduce(squared, group=group)
        nn.utils.clip_grads_with_norm_(params, OPTIM.clip, squared.sqrt())
        adamw.step()
        adamw.zero_grad()
        return sum(loss.item() for loss in losses)

    return step


class GPT2Stage(nn.Module):
    """Layers [first, last) of a GPT-2. Layer 0 is the embedding; the blocks follow, then norm and head."""

    def __init__(self, model: GPT2LMHeadModel, first: int, last: int) -> None:
        super().__init__()
        gpt2 = model.transformer
        num_blocks = len(gpt2.h)
        self.embed = nn.ModuleList([gpt2.wte, gpt2.wpe]) if first == 0 else None
        self.blocks = gpt2.h[max(first - 1, 0) : min(last - 1, num_blocks)]
        self.head = nn.Sequential(gpt2.ln_f, model.lm_head) if last == num_blocks + 2 else None

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens [B, T] or hidden states [B, T, D] to hidden states [B, T, D] or logits [B, T, V]."""
        if self.embed is not None:
            tokens, positions = self.embed
            x = tokens(x) + positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


def pretrained(job: Job) -> GPT2LMHeadModel:
    """Load the whole model from the directory from which acsgd loads its layers."""
    return AutoModelForCausalLM.from_pretrained(job.model.directory, dtype=torch.float32).train()


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy, summed over target tokens."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def make_adamw(model: nn.Module) -> torch.optim.AdamW:
    """Return torch's fused AdamW with the options and the weight decay groups of acsgd's."""
    matrices = [param for param in model.parameters() if param.dim() > 1]
    vectors = [param for param in model.parameters() if param.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": OPTIM.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=OPTIM.lr, betas=OPTIM.betas, eps=OPTIM.eps, fused=True)


CASES = [
    Case("1 process", "plain PyTorch loop", 1.03, plain),
    Case("2 stages, gpipe", "torch pipelining, GPipe", 1.0, pipelined, stages=2, schedule="gpipe", tied=False),
    Case("2 stages, 1f1b", "torch pipelining, 1F1B", 1.0, pipelined, stages=2, schedule="1f1b", tied=False),
    Case("2 replicas", "DistributedDataParallel", 1.0, plain, replicas=2),
]
if torch.cuda.is_available():
    CASES.append(Case("1 GPU", "plain PyTorch loop on it", 1.03, plain, size=GPT2, device="cuda"))


def rank_rounds(rank: int, index: int, model: Path, store: str, rounds: int) -> RankRounds:
    """Run one rank of a case."""
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    case = CASES[index]
    world_size = case.stages * case.replicas
    job = prepare(case.config(model), Launch(rank, rank, world_size))
    with connect(job.topology, timeout=TIMEOUT, store=dist.FileStore(store, world_size)) as groups:
        ours = acsgd(build_session(job, open_weight_source(job), groups), case.size)
        theirs = case.open_baseline(job, case.size, pretrained(job), None)
        return alternate(ours, theirs, warmup=WARMUP, rounds=rounds, steps=STEPS_PER_BLOCK, barrier=dist.barrier)


def config_of(size: Size, *, tied: bool) -> GPT2Config:
    """Return the config of a GPT-2 without dropout."""
    return GPT2Config(
        vocab_size=size.vocabulary,
        n_positions=size.sequence,
        n_embd=size.width,
        n_layer=size.blocks,
        n_head=size.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=0,
    )


def save_model(directory: Path, size: Size = SMALL, *, tied: bool) -> Path:
    """Write a GPT-2, by default of 9 M parameters (10 M with an untied head), with new weights and no real tokens."""
    torch.manual_seed(0)
    GPT2LMHeadModel(config_of(size, tied=tied)).save_pretrained(directory)
    return save_tokenizer(directory)


def save_tokenizer(directory: Path) -> Path:
    """Write a tokenizer of one token beside a model; return the directory."""
    words = Tokenizer(models.WordLevel({"<|endoftext|>": 0}, unk_token="<|endoftext|>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|endoftext|>").save_pretrained(directory)
    return directory


def measure(index: int, rounds: int) -> Comparison:
    """Run one case. Raises RuntimeError if the losses of the two sides differ."""
    case = CASES[index]
    with tempfile.TemporaryDirectory() as directory:
        model = save_model(Path(directory) / "model", case.size, tied=case.tied)
        store = str(Path(directory) / "store")
        ranks = on_ranks(case.stages * case.replicas, rank_rounds, index, model, store, rounds)
    result = summarise(ranks, steps=STEPS_PER_BLOCK)
    if result.loss_error > LOSS_TOLERANCE:
        raise RuntimeError(
            f"{case.name}: the losses of the two sides differ by {result.loss_error:.1e}, more than {LOSS_TOLERANCE:g}"
        )
    return result


def table(results: Sequence[tuple[Case, Comparison]]) -> Table:
    """Return a table of step times and ratios, one case per row."""
    shown = Table(title="Step time of acsgd relative to PyTorch's tools; less than 1 = acsgd is faster")
    shown.add_column("acsgd")
    shown.add_column("baseline")
    for name in ("acsgd, s", "baseline, s", "ratio", "quartiles", "CPU ratio", "goal"):
        shown.add_column(name, justify="right")
    for case, result in results:
        low, high = result.quartiles
        numbers = f"{result.ours_s:.3f}", f"{result.theirs_s:.3f}", f"{result.median:.3f}", f"{low:.3f} - {high:.3f}"
        mark = "[green]met[/]" if result.median <= case.goal else "[red]missed[/]"
        shown.add_row(case.name, case.baseline, *numbers, f"{result.cpu:.3f}", f"<= {case.goal:g} {mark}")
    return shown


def main() -> None:
    """Measure, print, save."""
    transformers_logging.disable_progress_bar()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/speed.json"), help="path of the results")
    parser.add_argument("--rounds", type=int, default=15, help="per case; a step of each side")
    parser.add_argument("--only", default="", help="run only cases whose name contains this")
    options = parser.parse_args()
    console = Console(width=120)
    results = []
    for index, case in enumerate(CASES):
        if options.only in case.name:
            results.append((case, measure(index, options.rounds)))
            console.print(f"{case.name}: {results[-1][1].median:.3f} x {case.baseline}")
    console.print(table(results))
    rows = [{"case": case.name, "baseline": case.baseline, "goal": case.goal, **r._asdict()} for case, r in results]
    about = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.processor()}
    if torch.cuda.is_available():
        about["gpu"] = torch.cuda.get_device_name()
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"about": about, "cases": rows}, indent=1))


if __name__ == "__main__":
    main()
