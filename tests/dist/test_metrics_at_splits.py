"""Laws: metrics are those of the whole set at every split, and a run in stages evaluates as one process does."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lib.cache import with_shared_cache
from lib.forks import finish
from lib.labelled import save_model, with_special_tokens
from lib.patience import NO_LIMIT_S
from lib.ranks import on_ranks
from lib.training import TIMEOUT, plain_config
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from acsgd.config.options import CheckpointConfig, Config, EvalConfig, PipelineConfig, RunConfig
from acsgd.groups import connect
from acsgd.io.checkpoint.directory import CheckpointDirectory
from acsgd.launch import Launch
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.plan.job import prepare
from acsgd.run.setup.build import build_session
from acsgd.run.setup.data import open_data

CLASSES = {"classification": 3, "regression": 1}
TEXTS = [f"{'no ' * (n % 5)}number {n * n} of {n}" for n in range(23)]
LABELS = {"classification": [n % 3 for n in range(23)], "regression": [n * n % 23 / 4 for n in range(23)]}
"""23 examples: the last micro-batch, the last batch and one replica have fewer than the others."""


@pytest.fixture(scope="module")
def special(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """A tokenizer with special tokens around texts."""
    return with_special_tokens(tokenizer)


def save_classifier(directory: Path, tokenizer: PreTrainedTokenizerFast, task: str, num_labels: int) -> Path:
    """Write a BERT with new weights, and a bias with which each class is predicted for some texts."""
    # weights so large that rounding is small beside the differences of predictions
    save_model(directory, tokenizer, "bert", task, num_labels=num_labels, initializer_range=0.2)
    model = AutoModelForSequenceClassification.from_pretrained(directory)
    with torch.no_grad():
        model.classifier.bias -= model(**tokenizer(TEXTS, padding=True, return_tensors="pt")).logits.mean(0)
    model.save_pretrained(directory)
    return directory


def run_of(model: Path, run_dir: Path, task: str, source: str, **pp: int) -> Config:
    """Return a run that evaluates on a source."""
    config = plain_config(model, run_dir, **pp)
    data = dataclasses.replace(config.data, sources=source, eval_sources=source, sequence=32)
    metrics = "accuracy,f1,matthews" if task == "classification" else None
    model_config = dataclasses.replace(config.model, task=task)
    return dataclasses.replace(config, data=data, model=model_config, eval=EvalConfig(metrics=metrics))


def scores_of_rank(rank: int, world_size: int, store: Path, configs: list[Config]) -> list[dict[str, float]]:
    """Return the metrics of the initial weights, for each config."""
    torch.set_num_threads(1)
    found = []
    for number, config in enumerate(configs):
        job = prepare(config, Launch(rank, rank, world_size))
        file_store = dist.FileStore(f"{store}-{number}", world_size)
        with connect(job.topology, timeout=TIMEOUT, store=file_store) as groups:
            session = build_session(job, open_weight_source(job), groups)
            held_out = open_data(job).held_out
            assert held_out is not None
            found.append(session.evaluate(held_out.batches(len(job.micro_ids)), 0))
    return found


def scores_of_whole(model: Path, tokenizer: PreTrainedTokenizerFast, task: str) -> dict[str, float]:
    """Return the metrics of transformers' model on all examples at once, as scikit-learn and scipy compute them."""
    from scipy.stats import pearsonr, spearmanr  # more than a second, which each worker would take to collect this file
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    whole = AutoModelForSequenceClassification.from_pretrained(model).eval()
    with torch.no_grad():
        logits = whole(**tokenizer(TEXTS, padding=True, return_tensors="pt")).logits
    labels, y = torch.tensor(LABELS[task]), np.array(LABELS[task])
    if task == "regression":
        numbers = logits.squeeze(-1)
        loss = torch.nn.functional.mse_loss(numbers, labels).item()
        return {"eval_loss": loss, "pearson": pearsonr(numbers, y)[0], "spearman": spearmanr(numbers, y)[0]}
    predicted = logits.argmax(-1)
    assert len(predicted.unique()) == CLASSES[task], "the metrics tell little"
    return {
        "eval_loss": torch.nn.functional.cross_entropy(logits, labels).item(),
        "accuracy": accuracy_score(y, predicted),
        "f1": f1_score(y, predicted, average="macro"),
        "matthews": matthews_corrcoef(y, predicted),
    }


@pytest.fixture(scope="module")
def evaluated(
    special: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Config, dict[str, float]]]:
    """For each task, a run with its data, and the metrics of the whole model."""
    directory, runs = tmp_path_factory.mktemp("scores"), {}
    for task, num_labels in CLASSES.items():
        model = save_classifier(directory / "models" / task, special, task, num_labels)
        rows = [f"{text}\t{label}" for text, label in zip(TEXTS, LABELS[task], strict=True)]
        source = directory / f"{task}.tsv"
        source.write_text("\n".join(["text\tlabel", *rows]))
        runs[task] = run_of(model, directory / "runs", task, str(source)), scores_of_whole(model, special, task)
    return runs


@pytest.mark.parametrize(
    ("stages", "replicas"), [(1, 2), *(pytest.param(*each, marks=pytest.mark.soak) for each in ((1, 1), (2, 2)))]
)
def test_metrics_are_those_of_scikit_learn_on_the_whole_set(
    stages: int, replicas: int, evaluated: dict[str, tuple[Config, dict[str, float]]], tmp_path: Path
) -> None:
    pp = PipelineConfig(stages=stages, micro=2)
    configs = [with_shared_cache(dataclasses.replace(config, pp=pp)) for config, _ in evaluated.values()]
    for of_rank in on_ranks(stages * replicas, scores_of_rank, tmp_path / "store", configs):
        for found, (_, whole) in zip(of_rank, evaluated.values(), strict=True):
            assert found == pytest.approx(whole, rel=1e-5)


def cola(path: Path, *, rows: int, shift: int = 0) -> str:
    """Write a file of CoLA, in which each second sentence is not acceptable, for a reason; return the source."""
    good, bad = "made\t1\t\tThe number is {}.", "made\t0\t*\tThe number {} is."
    lines = [(bad if n % 2 else good).format(n // 2) for n in range(shift, shift + rows)]
    path.write_text("\n".join(lines) + "\n")
    return f"glue:cola:{path}"


def test_a_run_on_cola_has_the_same_matthews_in_one_and_in_four_stages(
    special: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """The metrics of every evaluation are equal, and the best one is in the checkpoint, and marked."""
    model = save_model(
        tmp_path / "models" / "bert",
        special,
        "bert",
        "classification",
        num_labels=2,
        num_hidden_layers=4,
        initializer_range=0.2,
    )
    train, dev = cola(tmp_path / "train.tsv", rows=120), cola(tmp_path / "dev.tsv", rows=37, shift=200)
    found = []
    for stages in (1, 4):
        config = run_of(model, tmp_path / f"{stages}-stages", "classification", train, stages=stages, micro=2)
        config = dataclasses.replace(
            config,
            data=dataclasses.replace(config.data, sources=train, eval_sources=dev, batch=8),
            optim=dataclasses.replace(config.optim, lr=3e-3, steps=8),
            eval=EvalConfig(every=1),
            checkpoint=CheckpointConfig(best="matthews"),
            run=RunConfig(timeout=NO_LIMIT_S),
        )
        finish(with_shared_cache(config), stages)
        found.append([line for line in lines_of(config) if "matthews" in line])
    for line, other in zip(*found, strict=True):
        assert line["matthews"] == other["matthews"]
        assert line["eval_loss"] == pytest.approx(other["eval_loss"], rel=1e-5)
    values = [line["matthews"] for line in found[0]]
    assert len(set(values)) > 2, "the metric tells little"
    best = found[0][values.index(max(values))]["step"]
    directory = CheckpointDirectory(Path(config.log.dir) / "checkpoints")
    assert directory.best() == directory.of(best)
    progress = json.loads((directory.of(8) / "manifest.json").read_text())["run"]["progress"]
    assert progress["best"]["matthews"] == max(values)
    assert progress["evaluation"]["matthews"] == values[-1]


def lines_of(config: Config) -> list[dict[str, float]]:
    return [json.loads(line) for line in (Path(config.log.dir) / "metrics.jsonl").read_text().splitlines()]
