"""Step time and traffic of padded rows, cut to the longest row of each micro-batch, against rows of full length:

    .venv/bin/python -m benchmarks.data.cut [--prompts FILE.jsonl] [--labelled GLUE-TASK:FILE.tsv] [--rounds 9]

Three tasks: prompts with answers for a decoder (GPT-2), labelled sentences for an encoder (BERT), and prompts with
answers for an encoder-decoder (T5), all of 4 blocks and a width of 256, in micro-batches of several sizes, in one
process and in two stages over gloo on this machine, one thread each. Both sides take turns in the same processes, step
by step, on the same batches; a step is forward, backward and update. Without files, records are drawn with lengths of a
lognormal distribution.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from acsgd.config.options import Config, DataConfig, LogConfig, ModelConfig, OptimConfig, PipelineConfig
from acsgd.groups import Groups, connect
from acsgd.io.checkpoint.progress import Progress
from acsgd.io.data.batches import BatchReader
from acsgd.launch import Launch
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.plan.job import Job, prepare
from acsgd.run.report import PP_FORWARD_BYTES
from acsgd.run.session import Session
from acsgd.run.setup import build
from acsgd.run.setup.data import open_data
from acsgd.run.setup.inputs import open_inputs
from acsgd.train import train_step
from benchmarks.common.compare import Comparison, RankRounds, alternate, on_ranks, summarise
from benchmarks.common.small_model import save_blank

WIDTH, BLOCKS, HEADS, VOCABULARY = 256, 4, 4, 2048
BATCH = 16
WARMUP = 2
SIZES = {"hidden_size": WIDTH, "num_hidden_layers": BLOCKS, "num_attention_heads": HEADS}
T5 = {"d_model": WIDTH, "d_kv": WIDTH // HEADS, "d_ff": 4 * WIDTH, "num_layers": BLOCKS // 2, "num_heads": HEADS}


class Case(NamedTuple):
    """What is trained."""

    task: str
    model_type: str
    options: dict[str, Any]
    """Of the config of the model."""
    source: str
    sequence: int


@dataclass
class Side:
    """A session as one side of a comparison."""

    session: Session
    reader: BatchReader
    progress: Progress = field(default_factory=Progress)
    sent: list[int] = field(default_factory=list)
    """Bytes of the activations sent between the stages in each step."""

    def __call__(self, number: int) -> float:
        """Run step `number`; return this rank's part of the loss."""
        result = train_step(self.session, self.reader.batch(number), self.progress)
        self.progress = result.progress
        self.sent.append(round(result.summary[PP_FORWARD_BYTES]))
        return result.loss / self.session.job.topology.world_size


class Row(NamedTuple):
    """A case in one setting."""

    case: str
    stages: int
    micro: int
    padding: float
    """Share of padding in the rows."""
    bytes: float
    """Bytes of activations in steps of full length / bytes in cut ones; 0 without a link."""
    times: Comparison


def config_of(scratch: Path, case: Case, stages: int, micro: int) -> Config:
    return Config(
        model=ModelConfig(str(scratch / case.task), init="scratch", task=case.task),  # type: ignore[arg-type]
        data=DataConfig(sources=case.source, sequence=case.sequence, batch=BATCH, rows="single"),
        optim=OptimConfig(lr=1e-4, steps=10**6, warmup=0),
        pp=PipelineConfig(stages=stages, micro=micro),
        log=LogConfig(dir=str(scratch / "runs" / case.task)),
    )


def open_sides(job: Job, groups: Groups) -> tuple[Side, Side]:
    """Return a session whose micro-batches are cut, and one whose are not."""
    reader, shapes_of = open_data(job).reader, build.micro_shapes
    if not shapes_of(job).is_cut:
        raise ValueError(f"micro-batches of {job.model.config.model_type} are not cut")
    cut = Side(build.build_session(job, open_weight_source(job), groups), reader)
    build.micro_shapes = lambda job: replace(shapes_of(job), is_cut=False)
    try:
        return cut, Side(build.build_session(job, open_weight_source(job), groups), reader)
    finally:
        build.micro_shapes = shapes_of


def compare_rank(
    rank: int, scratch: Path, case: Case, stages: int, micro: int, rounds: int
) -> tuple[RankRounds, list[int], list[int]]:
    """Run one rank; return its times and the bytes of the steps of both sides."""
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    job = prepare(config_of(scratch, case, stages, micro), Launch(rank, rank, stages))
    store = dist.FileStore(str(scratch / f"store-{case.task}-{stages}-{micro}"), stages)
    with connect(job.topology, timeout=timedelta(seconds=600), store=store) as groups:
        sides = open_sides(job, groups)
        times = alternate(*sides, warmup=WARMUP, rounds=rounds, steps=1, barrier=dist.barrier)
    return times, sides[0].sent, sides[1].sent


def measure(scratch: Path, case: Case, stages: int, micro: int, rounds: int) -> Row:
    """Compare cut and full micro-batches in one setting."""
    job = prepare(config_of(scratch, case, stages, micro), Launch(0, 0, stages))
    batches = [open_inputs(job).reader.batch(step) for step in range(WARMUP + rounds)]
    texts = 2 if case.task == "seq2seq" else 1
    filled = sum(batch.num_tokens for batch in batches) / len(batches) / (BATCH * case.sequence * texts)
    ranks = on_ranks(stages, compare_rank, scratch, case, stages, micro, rounds)
    cut, full = (sum(sent) for sent in ranks[0][1:])
    times = summarise([times for times, _, _ in ranks], steps=1)
    return Row(case.task, stages, micro, 1 - filled, full / cut if cut else 0.0, times)


def drawn_words(draw: random.Random, median: float) -> str:
    """Return words whose number is drawn from a lognormal distribution."""
    count = max(1, round(draw.lognormvariate(0, 0.4) * median))
    return " ".join(draw.choice(("one", "two", "three", "four", "five")) for _ in range(count))


def write_records(scratch: Path) -> tuple[Path, Path]:
    """Write prompts with answers, and labelled sentences, of lengths drawn at random; return the files."""
    draw, prompts, labelled = random.Random(0), scratch / "prompts.jsonl", scratch / "labelled.jsonl"
    pairs = [{"input": drawn_words(draw, 50), "output": drawn_words(draw, 100)} for _ in range(2000)]
    prompts.write_text("\n".join(map(json.dumps, pairs)))
    sentences = [{"text": drawn_words(draw, 9), "label": draw.randrange(2)} for _ in range(2000)]
    labelled.write_text("\n".join(map(json.dumps, sentences)))
    return prompts, labelled


def save_models(scratch: Path, cases: Sequence[Case], text: str) -> None:
    """Write the config and a tokenizer of the model of each case. text: what the tokenizers are trained on."""
    for case in cases:
        directory = scratch / case.task
        save_blank(directory, text, vocabulary=VOCABULARY, sequence=1024, hidden=WIDTH, blocks=BLOCKS, heads=HEADS)
        known = json.loads((directory / "config.json").read_text())
        special = {"pad_token_id": known["eos_token_id"], "decoder_start_token_id": known["eos_token_id"]}
        kept = {name: known[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")} | special
        if case.model_type != "gpt2":
            AutoConfig.for_model(case.model_type, **kept, **case.options).save_pretrained(directory)


def table_of(rows: Sequence[Row]) -> Table:
    """Return a table of all settings. A ratio above 1 = cut micro-batches are faster, or send less."""
    table = Table(title="Micro-batches of full length, relative to micro-batches cut to their longest row")
    for name in ("task", "stages", "pp.micro", "padding", "step time", "quartiles", "CPU time", "bytes", "cut step, s"):
        table.add_column(name, justify="left" if name == "task" else "right")
    for row in rows:
        low, high = row.times.quartiles
        table.add_row(
            row.case,
            str(row.stages),
            str(row.micro),
            f"{row.padding:.0%}",
            f"{1 / row.times.median:.2f}",
            f"{1 / high:.2f} - {1 / low:.2f}",
            f"{1 / row.times.cpu:.2f}",
            f"{row.bytes:.2f}" if row.bytes else "-",
            f"{row.times.ours_s:.3f}",
        )
    return table


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, help='JSON lines with "input" and "output"; default: drawn')
    parser.add_argument("--labelled", help="source with labelled sentences, such as glue:cola:train.tsv")
    parser.add_argument("--micro", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/cut.json"))
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        prompts, labelled = write_records(scratch)
        prompts, labelled = options.prompts or prompts, options.labelled or labelled
        cases = [
            Case("lm", "gpt2", {}, str(prompts), 512),
            Case("classification", "bert", SIZES | {"intermediate_size": 4 * WIDTH}, str(labelled), 128),
            Case("seq2seq", "t5", T5, str(prompts), 384),
        ]
        save_models(scratch, cases, Path(prompts).read_text()[:500_000])
        for case in cases:
            for stages in options.stages:
                for micro in options.micro:
                    rows.append(measure(scratch, case, stages, micro, options.rounds))
                    Console(width=140).print(table_of(rows[-1:]))
    Console(width=140).print(table_of(rows))
    results = [row._asdict() | {"times": row.times._asdict()} for row in rows]
    about = {"torch": torch.__version__, "rounds": options.rounds, "batch": BATCH}
    about |= {"median_ratio": statistics.median(1 / row.times.median for row in rows)}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"about": about, "rows": results}, indent=1))


if __name__ == "__main__":
    main()
