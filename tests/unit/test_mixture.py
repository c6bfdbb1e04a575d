"""Laws of the mixture of sources: shares by sequence and by token, sources without weights, and epochs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lib.corpora import documents_of
from lib.saved import SMALL, small_run, train_alone

from acsgd.config.options import Config, PipelineConfig, in_steps
from acsgd.config.run_file import parse
from acsgd.io.data.batches import BatchReader, Dataset
from acsgd.io.data.row_spec import LongDocument
from acsgd.io.data.rows import base as base_module
from acsgd.io.data.rows.documents import ConcatRows, DocumentRows
from acsgd.io.data.rows.layout import RowKind, make_layout
from acsgd.io.data.sampler import BLOCK, Sampler, block_counts
from acsgd.launch import Launch
from acsgd.layers.batch import Batch
from acsgd.model_classes import IGNORED
from acsgd.run.plan.job import Job, prepare
from acsgd.run.setup.data import Data, open_data
from acsgd.shards.disk import ShardDirectory

TinyModel = Callable[..., Path]
LENGTHS = {"a": [3, 5, 2, 4, 4, 1], "b": [30, 9, 22, 15, 8, 40, 11, 12, 9, 13]}
"""Numbers of words of the answers of a source."""
ALONE = Launch()
SINGLE = ["--data.rows", "single", "--data.long", "truncate"]
"""Options of a run with a sequence for each record."""


def write_sources(directory: Path) -> dict[str, Path]:
    """Write one file of prompts and answers for each of LENGTHS."""
    paths = {name: directory / f"{name}.jsonl" for name in LENGTHS}
    for name, path in paths.items():
        records = [{"input": "word " * 7, "output": "word " * count} for count in LENGTHS[name]]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return paths


def job_of(model: Path, directory: Path, sources: str, *options: str, launch: Launch = ALONE) -> Job:
    """Prepare a rank of a run."""
    flags = f"--model.name {model} --log.dir {directory / 'runs' / 'a'} --data.sequence 64 --data.batch 4 --optim.lr 1"
    length = [] if "--optim.epochs" in options else ["--optim.steps", "2"]
    return prepare(parse([*flags.split(), "--data.sources", sources, *length, *options]), launch)


def targets_of(data: Data) -> list[list[int]]:
    """Return the number of labels of each row of each source that are not ignored."""
    sources = data.reader.rows.rows
    return [[int((each.read(row)["labels"] != IGNORED).sum()) for row in range(len(each))] for each in sources]


# ---- weights


@pytest.mark.parametrize(
    ("unit", "rows"), [("sequences", "single"), ("tokens", "concat"), ("tokens", "pack"), ("tokens", "single")]
)
def test_shares_of_a_mixture_are_within_the_bound_of_a_block(
    unit: str, rows: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """A source with the fraction p of the sequences has c = p BLOCK + e slots per block, |e| < 1.

    With m units (sequences or target tokens) per sequence, its share c m / sum(c m) differs from its weight w, which is
    p m / sum(p m), by at most (m + w sum(m)) / sum(c m).
    """
    paths = write_sources(tmp_path)
    for weight in (0.5, 0.0021):
        spec, weights = f"{paths['a']}:{weight},{paths['b']}:{1 - weight}", np.array([weight, 1 - weight])
        size = ["--data.sequence", "16"]  # so that each source has several rows
        data = open_data(job_of(tiny_model(), tmp_path, spec, "--data.weights", unit, "--data.rows", rows, *size))
        sampler, counts = data.reader.sampler, np.array(data.reader.sampler.counts)
        units = [np.array(each) if unit == "tokens" else np.ones(len(each)) for each in targets_of(data)]
        means = np.array([each.mean() for each in units])
        # over so many blocks that each source is trained on for whole epochs
        blocks = math.lcm(
            *(size // math.gcd(size, int(each)) for size, each in zip(sampler.sizes, counts, strict=True))
        )
        drawn = dataclasses.replace(sampler, batch=blocks * int(counts.sum())).samples(0)
        seen = np.array([units[source][drawn.indices[drawn.sources == source]].sum() for source in range(2)])
        errors = np.abs(seen / seen.sum() - weights)
        slack = 1e-6 if rows != "concat" else 0.02  # of concat, the remainder that is dropped counts
        assert (errors <= (means + weights * means.sum()) / (counts * means).sum() + slack).all(), weight
        if unit == "tokens" and weight == 0.5:
            assert counts[0] > 1.5 * counts[1], "the source with shorter answers has more sequences"


@pytest.mark.parametrize("kind", ["pack", "single"])
@pytest.mark.parametrize("long", ["split", "truncate", "skip"])
def test_the_number_of_targets_of_a_layout_is_that_of_its_labels(
    kind: RowKind, long: LongDocument, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [9, 2, 30, 5, 8, 9, 3, 17, 2, 3]
    monkeypatch.setattr(base_module, "CHUNK", 8)
    for targets in (None, np.random.default_rng(0).random(sum(lengths)) < 0.4):
        corpus = documents_of(lengths, targets=targets)
        rows = DocumentRows(corpus, make_layout(corpus, 8, kind, long), 8, padding=0)
        labels = np.concatenate([rows.read(row)["labels"] for row in range(len(rows))])
        assert rows.layout.num_targets == (labels != IGNORED).sum()
        assert rows.mean_targets == rows.layout.num_targets / len(rows)
        concatenated = ConcatRows(corpus, 8)
        for each in (rows, concatenated):
            is_empty = [(each.read(row)["labels"] == IGNORED).all() for row in range(len(each))]
            assert [each.num_empty(range(row, row + 1)) for row in range(len(each))] == is_empty
            assert any("have no target tokens" in note for note in each.notes) == any(is_empty)


@pytest.mark.parametrize("rows", ["concat", "pack", "single"])
@pytest.mark.parametrize("option", ["sources", "eval_sources"])
def test_a_source_without_targets_is_refused(rows: str, option: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    """Prompts longer than a row, of which the rest is left out."""
    (tmp_path / "a.jsonl").write_text('{"input": "%s", "output": "a"}\n' % ("one two " * 40))
    other = tmp_path / "b.jsonl"
    other.write_text('{"text": "one two three four five six seven eight"}\n')
    options = ["--data.rows", rows, *(["--data.long", "truncate"] if rows != "concat" else [])]
    sources = [str(other), str(tmp_path / "a.jsonl")][:: 1 if option == "eval_sources" else -1]
    options += ["--data.eval_sources", sources[1], "--data.sequence", "4"]
    job = job_of(tiny_model(), tmp_path, sources[0], *options)
    if rows == "concat":  # the rows with the answer have one
        open_data(job)
    else:
        with pytest.raises(ValueError, match=rf"^data\.{option}: .*a\.jsonl has no target tokens in any row"):
            open_data(job)


def test_a_source_whose_answers_are_not_learned_is_not_told_to_use_longer_rows(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two", "weight": 0}]
    (tmp_path / "a.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 40)
    template = tmp_path / "template.jinja"
    template.write_text("{% for each in messages %}{{ each.role + ' ' + each.content + ' ' }}{% endfor %}")
    for rows in ("concat", "single"):
        options = ["--data.rows", rows, "--data.sequence", "8", "--data.chat_template", str(template)]
        with pytest.raises(ValueError, match=r"no target tokens: none of its answers is learned, .*data\.targets=all"):
            open_data(job_of(tiny_model(), tmp_path, str(tmp_path / "a.jsonl"), *options))


def test_a_step_without_targets_has_no_loss_and_changes_nothing(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Three of four rows have no targets: the loss of the others is no spike, and the held-out loss is theirs."""
    long, short = ({"input": "one two " * count, "output": "a"} for count in (40, 1))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (long, short, long, long) * 8))
    run = small_run(tiny_model(), tmp_path / "run", steps=24, every="1", keep=100)
    rows: dict[str, Any] = {"rows": "single", "long": "truncate", "sequence": 16, "batch": 1}
    data = dataclasses.replace(run.data, sources=str(tmp_path / "a.jsonl"), eval_fraction=0.2, **rows)
    optim = dataclasses.replace(run.optim, spike=2.0, weight_decay=0.1)
    run = dataclasses.replace(run, data=data, optim=optim, pp=PipelineConfig(micro=1))
    checkpoints = train_alone(run)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "step" in line]
    assert [line["step"] for line in steps] == [*range(1, 25)]
    assert len(steps) == len(lines), "a step was repeated"
    assert [line["loss"] is None for line in steps] == [not line["targets_per_s"] for line in steps]
    assert 12 < sum(line["loss"] is None for line in steps) < 24, "not few"
    files = [ShardDirectory(checkpoints / f"step-{step:08d}").manifest.layers for step in range(1, 25)]
    for step, (before, after) in zip(steps[1:], itertools.pairwise(files), strict=True):
        assert (before == after) == (step["loss"] is None)
    assert steps[-1]["eval_loss"] > 0.5


def test_weights_by_token_need_weights_and_targets(tiny_model: TinyModel, tmp_path: Path) -> None:
    paths = [str(path) for path in write_sources(tmp_path).values()]
    with pytest.raises(ValueError, match=r'^data\.weights=tokens, but data\.sources has no weights; .*b\.jsonl:0\.5"$'):
        job_of(tiny_model(), tmp_path, ",".join(paths), "--data.weights", "tokens")
    options = [*SINGLE, "--data.weights", "tokens", "--data.sequence", "4"]
    with pytest.raises(ValueError, match=r"^data\.sources: .*a\.jsonl has no target tokens in any row"):
        open_data(job_of(tiny_model(), tmp_path, f"{paths[0]}:1,{paths[1]}:1", *options))


# ---- sources without weights


def test_without_weights_each_sequence_of_any_source_is_drawn_once_per_epoch() -> None:
    sizes = (11, 40, 1)
    sampler = Sampler(seed=7, batch=4, counts=(1,), sizes=sizes)
    drawn = [np.concatenate(field) for field in zip(*map(sampler.samples, range(13 * 5)), strict=True)]
    everything = sorted((source, index) for source, size in enumerate(sizes) for index in range(size))
    pairs = list(zip(*(field.tolist() for field in drawn[:2]), strict=True))
    epochs = [pairs[first : first + 52] for first in range(0, len(pairs), 52)]
    assert all(sorted(epoch) == everything for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 5
    starts = np.cumsum([0, *sizes[:-1]])
    assert (drawn[2] == starts[drawn[0]] + drawn[1]).all()


def test_a_run_of_sources_without_weights_samples_them_as_one(tiny_model: TinyModel, tmp_path: Path) -> None:
    paths = ",".join(map(str, write_sources(tmp_path).values()))
    data = open_data(job_of(tiny_model(), tmp_path, paths, *SINGLE, "--optim.epochs", "3"))
    assert data.reader.sampler.counts == (1,)
    assert data.steps == 12
    assert data.notes == (
        "optim.epochs=3: 12 steps; 16 sequences per epoch, 4 per step",
        "data.sources: all sources: 3.00 epochs in 12 steps",
    )


# ---- epochs


@pytest.mark.parametrize("counts", [(1,), (3, 7), block_counts([math.pi / 4, 1 - math.pi / 4])])
def test_epochs_are_the_draws_of_a_source_per_sequence(counts: tuple[int, ...]) -> None:
    sizes = (13, 40)[: max(1, len(counts))]
    sampler = Sampler(seed=0, batch=sum(counts), counts=counts, sizes=sizes)
    for steps in (1, 5):
        drawn = np.concatenate([sampler.samples(step).sources for step in range(steps)])
        assert sampler.epochs(steps) == pytest.approx(np.bincount(drawn, minlength=len(sizes)) / sizes)
    assert sum(counts) <= BLOCK + len(counts)


@pytest.mark.parametrize(
    ("epochs", "steps"), [(1.0, 10), (1.1, 11), (0.3, 3), (0.001, 1), (2.05, 21), (3.0, 30), (1.0000001, 11)]
)
def test_steps_of_epochs_are_rounded_up_and_exact_in_decimals(epochs: float, steps: int) -> None:
    """1.1 * 100 / 10 is more than 11 in floating point."""
    assert Sampler(seed=0, batch=10, counts=(1, 1), sizes=(60, 40)).steps_of(epochs) == steps


def test_a_source_that_repeats_is_noted_with_its_epochs(tiny_model: TinyModel, tmp_path: Path) -> None:
    a, b = write_sources(tmp_path).values()
    job = job_of(tiny_model(), tmp_path, f"{a}:0.75,{b}:0.25", *SINGLE, "--optim.steps", "8")
    assert open_data(job).notes == (f"data.sources: {a}: 4.00 epochs in 8 steps",)


def test_a_warm_up_longer_than_the_epochs_is_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    path = write_sources(tmp_path)["b"]
    options = [*SINGLE, "--optim.epochs", "2", "--optim.warmup"]
    assert open_data(job_of(tiny_model(), tmp_path, str(path), *options, "5")).steps == 5
    with pytest.raises(ValueError, match=r"^optim\.warmup=6 must be at most the 5 steps of optim\.epochs=2$"):
        open_data(job_of(tiny_model(), tmp_path, str(path), *options, "6"))
    with pytest.raises(ValueError, match=r"^optim\.warmup=3 epochs, 8 steps, must be at most the 5 steps of"):
        open_data(job_of(tiny_model(), tmp_path, str(path), *options, "3 epochs"))


def test_warm_up_and_exact_steps_in_epochs_are_the_same_as_in_steps(tiny_model: TinyModel, tmp_path: Path) -> None:
    epochs, path, options = "0.5 epochs", str(write_sources(tmp_path)["b"]), [*SINGLE, "--optim.epochs", "2"]

    def job(length: object) -> Job:
        lengths = f"--optim.warmup={length} --pp.exact_steps={length} --dp.mode=quantized:exact_steps={length}"
        return job_of(tiny_model(), tmp_path, path, *options, *lengths.replace(" --", "\0--").split("\0"))

    data = open_data(job(epochs))
    length = data.reader.sampler.steps_of(0.5)
    assert 0 < length < data.steps
    assert in_steps("exact_steps=1epoch,a=1.5 epochs", lambda epochs: round(10 * epochs)) == "exact_steps=10,a=15"
    assert f"; optim.warmup={epochs}: {length} steps; pp.exact_steps={epochs}: {length} steps; " in data.notes[0]
    jobs = [job(each).with_steps(data.steps, data.reader.sampler) for each in (epochs, length)]
    assert jobs[0].config == jobs[1].config
    assert jobs[0].plugins == jobs[1].plugins


def losses_of(config: Config) -> list[tuple[float, float]]:
    """Return the loss and the learning rate of each step."""
    lines = (Path(config.log.dir) / "metrics.jsonl").read_text().splitlines()
    return [(line["loss"], line["lr"]) for line in map(json.loads, lines)]


def check_rates(config: Config) -> None:
    """Check that metrics.jsonl counts tokens without padding, and of these the targets, in each step."""
    reader = open_data(prepare(config, Launch())).reader
    [rows] = reader.rows.rows
    lines = (Path(config.log.dir) / "metrics.jsonl").read_text().splitlines()
    totals = np.zeros(2)
    for step, line in enumerate(map(json.loads, lines)):
        drawn = [rows.read(int(row)) for row in reader.sampler.samples(step).indices]
        tokens = sum(int((row["input_ids"] != 0).sum()) for row in drawn)  # 0 is padding
        targets = sum(int((row["labels"] != IGNORED).sum()) for row in drawn)
        counted = [line[f"{unit}_per_s"] * line["step_s"] for unit in ("tokens", "targets")]
        assert counted == pytest.approx([tokens, targets])
        totals += [targets, tokens]
        assert 0 < line["data_wait_s"] < line["step_s"]
    assert 0 < totals[0] < totals[1] < len(lines) * 2 * 32, "some tokens are prompts, some padding"


def test_a_step_lasts_longer_than_the_wait_for_its_batch(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which the wait is a part, also if reading takes far longer than training."""
    read = BatchReader.batch

    def slow_batch(reader: BatchReader, step: int, micros: range) -> Batch:
        time.sleep(0.3)
        return read(reader, step, micros)

    monkeypatch.setattr(BatchReader, "batch", slow_batch)
    train_alone(config := small_run(tiny_model("gpt2", **SMALL), tmp_path / "run", steps=3, every=None))
    lines = map(json.loads, (Path(config.log.dir) / "metrics.jsonl").read_text().splitlines())
    times = [(line["data_wait_s"], line["step_s"]) for line in lines]
    assert len(times) == 3
    assert all(0 < wait_s < step_s for wait_s, step_s in times), times


def test_a_run_of_epochs_is_that_of_as_many_steps(
    tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bit for bit, from the learning rate to the last checkpoint; also if it is extended, and if it is resumed."""
    path = write_sources(tmp_path)["b"]
    small = small_run(tiny_model("gpt2", **SMALL), tmp_path / "runs" / "steps", steps=10)
    data = dataclasses.replace(small.data, sources=str(path), rows="single", sequence=32, eval_fraction=0.2)
    steps = dataclasses.replace(small, data=data, log=dataclasses.replace(small.log, to="jsonl,print"))

    def of_epochs(epochs: float, name: str) -> Config:
        optim = dataclasses.replace(steps.optim, steps=None, epochs=epochs)
        log = dataclasses.replace(steps.log, dir=f"{tmp_path}/runs/{name}")
        return dataclasses.replace(steps, optim=optim, log=log)

    rows = open_data(prepare(steps, Launch())).reader.sampler.sizes[0]
    train_alone(steps)
    train_alone(of_epochs(19.5 / rows, "epochs"))
    assert f"done: step 10 of 10, {tmp_path}/runs/epochs" in capsys.readouterr().out
    assert losses_of(of_epochs(1.0, "epochs")) == losses_of(steps)
    check_rates(steps)

    written = parse([str(tmp_path / "runs" / "epochs" / "config.toml")])
    assert (written.optim.steps, written.optim.epochs) == (None, 19.5 / rows), "it can be started again"
    train_alone(dataclasses.replace(written, optim=dataclasses.replace(written.optim, epochs=23.5 / rows)))
    assert [rate for _, rate in losses_of(written)[:10]] == [rate for _, rate in losses_of(steps)]
    assert len(losses_of(written)) == 12
    assert "resuming from " in (printed := capsys.readouterr().out)
    assert "optim.steps: 10 -> 12; optim.epochs: " in printed


# ---- the stream of sample ids


def ids_of(reader: BatchReader, steps: range) -> list[list[int]]:
    """Return the sample ids of one replica in each step, read ahead as in a run."""
    with Dataset(reader, range(steps.start, 10**9)) as batches:
        return [batch.sample_ids.flatten().tolist() for _, batch in zip(steps, batches, strict=False)]


@pytest.mark.parametrize(
    ("rows", "weights"), [("concat", (":0.3", ":0.7")), ("pack", ("", "")), ("single", ("", ":3"))]
)
def test_the_stream_of_ids_is_the_same_at_any_size_and_after_a_resize_or_a_kill(
    rows: str, weights: tuple[str, str], tiny_model: TinyModel, tmp_path: Path
) -> None:
    """And each sequence is in it once per epoch of its source, or of all sources without weights."""
    spec = ",".join(f"{path}{weight}" for path, weight in zip(write_sources(tmp_path).values(), weights, strict=True))
    job = job_of(tiny_model(n_layer=4), tmp_path, spec, "--data.rows", rows, "--data.sequence", "16")
    reader = open_data(job).reader
    steps = range(-(-2 * sum(reader.sampler.sizes) // reader.sampler.batch))

    def open_readers(replicas: int, stages: int) -> list[list[BatchReader]]:
        """Return the readers of the ranks of each replica."""
        config, size = dataclasses.replace(job.config, pp=PipelineConfig(stages=stages)), replicas * stages
        ranks = [open_data(prepare(config, Launch(rank, rank, size, size))).reader for rank in range(size)]
        return [ranks[first : first + stages] for first in range(0, size, stages)]

    def stream(readers: list[list[BatchReader]], steps: range) -> list[list[int]]:
        replicas = [[ids_of(each, steps) for each in ranks] for ranks in readers]
        assert all(ids == ranks[0] for ranks in replicas for ids in ranks)
        return [list(itertools.chain(*step)) for step in zip(*(ranks[0] for ranks in replicas), strict=True)]

    alone, squares, columns = ids_of(reader, steps), open_readers(2, 2), open_readers(4, 1)
    assert stream(squares, steps) == stream(columns, steps) == alone
    middle = len(steps) // 2  # the first batches read ahead are dropped, as in a kill
    assert stream(squares, steps[:middle]) + stream(columns, steps[middle:]) == alone

    sampler = reader.sampler
    drawn = np.array(alone).flatten()
    starts = np.cumsum([0, *sampler.sizes]) if len(sampler.counts) > 1 else np.array([0, sum(sampler.sizes)])
    for start, stop in itertools.pairwise(starts.tolist()):
        seen = drawn[(drawn >= start) & (drawn < stop)]
        counts = np.bincount(seen - start, minlength=stop - start)
        assert counts.max() - counts.min() <= 1, "no sequence is drawn again before all others are"


# ---- changed sources


def test_a_source_that_changed_since_the_checkpoint_is_named(tiny_model: TinyModel, tmp_path: Path) -> None:
    paths = write_sources(tmp_path)
    small = small_run(tiny_model("gpt2", **SMALL), tmp_path / "runs" / "run", steps=1)
    data = dataclasses.replace(small.data, sources=f"{paths['a']}:1,{paths['b']}:1", eval_fraction=0.0)
    config = dataclasses.replace(small, data=data)
    train_alone(config)
    paths["b"].write_text(paths["b"].read_text().replace("word", "work"))
    with pytest.raises(ValueError) as refused:
        train_alone(config)
    checkpoint = tmp_path / "runs" / "run" / "checkpoints" / "step-00000001"
    assert str(refused.value) == (
        f"cannot resume from {checkpoint}: the contents of b.jsonl changed; use what it was trained with, or start a "
        "new run: --log.dir NEW or --checkpoint.resume never; from the weights of this checkpoint: "
        f"--model.name {checkpoint} --log.dir NEW"
    )
