"""The pipelines of network.py: one process per host of a simulated network, which runs steps on request.

The computations of paced ranks take a given time, of which they sleep what is left. So a step takes as long as on hosts
with free cores, as far as this machine lets the processes run: with all that messages take, codecs included.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from acsgd.config.options import Config, DataConfig, LogConfig, ModelConfig, OptimConfig, PipelineConfig, RunConfig
from acsgd.launch import Launch
from acsgd.layers.batch import Batch
from acsgd.pp.stage import Stage
from acsgd.run.plan.job import prepare
from acsgd.run.report import COMPUTE_S, PP_BACKWARD_BYTES, PP_FORWARD_BYTES, TIED_BYTES, by_rank
from benchmarks.common import netlab
from benchmarks.pipeline.forms import open_trainings, with_form

SEQUENCE, WIDTH, BLOCKS, HEADS = 384, 256, 4, 4
TIMEOUT_S = 300.0
UNTIED = "/untied"
"""End of a form that trains a model whose head has weights of its own."""
PRELOAD = ["acsgd.run.setup.build", "acsgd.run.setup.inputs", "transformers.models.gpt2.modeling_gpt2", "rich.table"]


@dataclass(frozen=True)
class Setting:
    """Options of a pipeline, sent to every rank."""

    model: Path
    """Its head is the embedding."""
    untied: Path
    """The same model, whose head has weights of its own."""
    stages: int
    schedule: str
    micros: int
    """Micro-batches per step, one sequence each; every step has the same."""
    forms: tuple[str, ...]
    """Codecs (forms.py), also of the untied model; the first is the uncompressed one."""
    vocabulary: int

    def config(self, form: str) -> Config:
        """Return the configuration with these codecs."""
        blocks, model = (BLOCKS // self.stages,) * self.stages, self.model
        if form.endswith(UNTIED):
            form, model = form.removesuffix(UNTIED), self.untied
        config = Config(
            model=ModelConfig(str(model)),
            data=DataConfig(sources="demo", sequence=SEQUENCE, batch=self.micros),
            optim=OptimConfig(lr=1e-4, steps=10**9),
            pp=PipelineConfig(self.stages, 1, self.schedule, layers=blocks),
            log=LogConfig(dir=str(self.model.parent / "run")),
            run=RunConfig(timeout=TIMEOUT_S),
        )
        return with_form(config, form)


@dataclass(frozen=True)
class PacedSetting(Setting):
    """A pipeline whose computations take a given time, if they are not longer."""

    forward_s: tuple[float, ...]
    """Time of a forward, by stage; a backward takes twice as long."""
    split: float = 1.0
    """Time of a backward in two parts relative to that of a whole one."""


class Step(NamedTuple):
    """One optimizer step."""

    seconds: float
    forward_bytes: float
    """Sum over all ranks."""
    backward_bytes: float
    tied_bytes: float
    compute_s: float
    """Of the rank that computes longest, without its waits for others."""


class Pipeline:
    """A pipeline with one rank per host that runs steps with any of the codecs."""

    def __init__(self, setting: Setting, network: netlab.Lab) -> None:
        self.network = network
        self._setting = setting
        self._body = be_paced_rank if isinstance(setting, PacedSetting) else be_rank
        self._pipes: Sequence[Connection] = ()

    @contextlib.contextmanager
    def running(self) -> Iterator[Pipeline]:
        """Start the ranks and terminate them at the end."""
        with on_hosts(self.network, self._body, self._setting) as self._pipes:
            yield self

    def step(self, form: str) -> Step:
        """Run one step; its time is that of the slowest rank. Raises RuntimeError if a rank has ended."""
        return max(request_all(self._pipes, form))

    def limit(self, mbit: float | None) -> None:
        """Change the rate of all hosts, and run one step so that TCP adapts."""
        self.network.limit(mbit)
        self.step(self._setting.forms[-1])

    def traffic_s(self, step: Step, mbit: float) -> float:
        """Return the transfer time of a step for the host that sends most, without packet headers, seconds."""
        boundaries = self._setting.stages - 1
        forward, backward = step.forward_bytes / boundaries, step.backward_bytes / boundaries
        tied = step.tied_bytes / 2  # as many up as down
        if boundaries == 1:
            most = max(forward, backward) + tied
        else:  # a host in the middle, or one of those with the table
            most = max(forward + backward, max(forward, backward) + tied)
        return most * 8 / 1e6 / mbit


@contextlib.contextmanager
def on_hosts(network: netlab.Lab, body: Callable[..., None], setting: object) -> Iterator[list[Connection]]:
    """Call body(rank, setting, store, pipe) in a process of one thread on each host; yield our ends of the pipes.

    store: path of a FileStore. The processes are killed at the end.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    pipes = []
    with contextlib.ExitStack() as started:
        store = started.enter_context(tempfile.TemporaryDirectory()) + "/store"
        for rank, namespace in enumerate(network.namespaces):
            ours, theirs = context.Pipe()
            arguments = namespace, body, rank, setting, store, theirs
            process = context.Process(target=_be_on_host, args=arguments, daemon=True)
            process.start()
            started.callback(process.join)
            started.callback(process.kill)
            theirs.close()
            pipes.append(ours)
        yield pipes


def request_all(pipes: Sequence[Connection], request: object) -> list[Any]:
    """Send a request to all ranks; return the responses by rank. Raises RuntimeError if a rank has ended."""
    try:
        for pipe in pipes:
            pipe.send(request)
        return [pipe.recv() for pipe in pipes]
    except (EOFError, OSError):
        raise RuntimeError("a rank has ended; its error is above") from None


def _be_on_host(namespace: str, body: Callable[..., None], *args: object) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles it
    netlab.enter(namespace)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    body(*args)


def be_rank(rank: int, setting: Setting, store: str, pipe: Connection) -> None:
    """Run one rank: one step with the requested codecs for each request, until the pipe is closed."""
    jobs = [prepare(setting.config(form), Launch(rank, 0, setting.stages)) for form in setting.forms]
    batch = make_batch(rank, setting)
    with open_trainings(jobs, store, sequences=setting.micros) as opened, contextlib.suppress(EOFError):
        trainings = dict(zip(setting.forms, opened, strict=True))
        while True:
            form = pipe.recv()
            dist.barrier()
            start = time.perf_counter()
            summary = trainings[form].step(batch).summary
            seconds = time.perf_counter() - start
            sent = (int(summary[each]) for each in (PP_FORWARD_BYTES, PP_BACKWARD_BYTES, TIED_BYTES))
            pipe.send(Step(seconds, *sent, max(by_rank(summary[COMPUTE_S]))))


def be_paced_rank(rank: int, setting: PacedSetting, store: str, pipe: Connection) -> None:
    """Run one rank, see `be_rank`: before all else that runs here, since it needs little of a core."""
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))  # its threads inherit that
    lengths = {"forward": 1.0, "backward": 2.0, "backward_input": setting.split, "backward_weight": setting.split}
    with contextlib.ExitStack() as patched:
        for name, length in lengths.items():
            paced = _paced(getattr(Stage, name), length * setting.forward_s[rank])
            patched.enter_context(mock.patch.object(Stage, name, paced))
        be_rank(rank, setting, store, pipe)


def _paced(compute: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """Return a function that takes so long, if it is not longer."""

    def run(*args: Any, **options: Any) -> Any:
        end = time.perf_counter() + seconds
        result = compute(*args, **options)
        time.sleep(max(0.0, end - time.perf_counter()))
        return result

    return run


def relative_forwards(stages: int, vocabulary: int) -> list[float]:
    """Return the time of a forward of each stage relative to the longest one, by its number of multiplications."""
    block = 12 * WIDTH**2 + 2 * WIDTH * SEQUENCE  # per token
    counts = [BLOCKS // stages * block] * stages
    counts[-1] += WIDTH * vocabulary
    return [count / max(counts) for count in counts]


def make_batch(rank: int, setting: Setting) -> Batch:
    """Return the batch of every step, the whole data set."""
    tokens = zipf_tokens(setting.micros, setting.vocabulary).unsqueeze(1)
    batch = Batch(
        {"input_ids": tokens[..., :-1]} if rank == 0 else None,
        tokens[..., 1:] if rank == setting.stages - 1 else None,
        sample_ids=torch.arange(setting.micros).view(-1, 1),
        micro_ids=range(setting.micros),
    )
    return replace(batch, upcoming=batch)


def zipf_tokens(micros: int, vocabulary: int) -> torch.Tensor:
    """Return random tokens, int64 [micros, SEQUENCE + 1], whose frequencies follow Zipf's law."""
    generator, shape = torch.Generator().manual_seed(0), (micros, SEQUENCE + 1)
    frequencies = 1 / torch.arange(1, vocabulary + 1)
    return frequencies.multinomial(math.prod(shape), replacement=True, generator=generator).view(shape)


def save_model(directory: Path, *, vocabulary: int, tied: bool, width: int = WIDTH) -> Path:
    """Write a GPT-2 of 4 blocks, of 3 M parameters in its usual width, with new weights, and a placeholder tokenizer.

    tied: whether its head is the embedding.
    """
    config = GPT2Config(
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        n_positions=SEQUENCE,
        n_embd=width,
        n_layer=BLOCKS,
        n_head=HEADS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(directory)
    save_tokenizer(directory)
    return directory


def save_tokenizer(directory: Path) -> None:
    """Write a placeholder tokenizer, which knows one token."""
    words = Tokenizer(models.WordLevel({"<|endoftext|>": 0}, unk_token="<|endoftext|>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|endoftext|>").save_pretrained(directory)
