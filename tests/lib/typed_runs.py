"""Runs of models of many types, on batches drawn at random. Besides its usual files, a run directory gets WEIGHTS."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from acsgd import train
from acsgd.config.options import Config, DataConfig, LogConfig, ModelConfig, OptimConfig, PipelineConfig
from acsgd.groups import connect
from acsgd.io.checkpoint.identity import RunIdentity
from acsgd.io.checkpoint.resume import find
from acsgd.io.data.rows.base import RowReader
from acsgd.io.data.sampler import Sampler
from acsgd.launch import Launch
from acsgd.layers.batch import Batch, Lengths
from acsgd.model_classes import MODEL_CLASSES
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.lock.lock import RunLock
from acsgd.run.plan.job import Job, prepare
from acsgd.run.session import Session
from acsgd.run.setup.inputs import RunInputs, plan_activation_caches
from acsgd.run.step.run import TrainingRun
from acsgd.streams import mix_seed, seed_generators
from tests.lib.model_types import VOCABULARY, small_config, task_of
from tests.lib.patience import NO_LIMIT_S
from tests.lib.ranks import on_ranks
from tests.lib.training import RELATIVE, train_whole

SEQUENCE, BATCH = 12, 6
SAMPLES = 2 * BATCH
"""Number of training samples: every second step has the same ones, as delta needs."""
START = torch.tensor([1])
"""First token that enters a decoder."""
END = 2
"""Last token of a sequence to classify."""
STEPS, HALF = 4, 2
SMALL, SCALE = 0.05, 4.0
"""New matrices with a standard deviation below SMALL are multiplied by SCALE: attention would be nearly uniform,
whatever its mask. Those of t5 are larger."""


SMOOTHED = "bart"
"""Type that is trained with label smoothing."""
TIMEOUT = timedelta(seconds=NO_LIMIT_S)
WEIGHTS = "weights-{step}-{rank}.json"
"""File with the hash of each weight on a rank by its key, at the first step of a start and after the last one."""


class Drawn:
    """Batches drawn at random for one replica, in place of a data set. Sequences are padded where the task allows it.

    micros: of the global batch. wants_inputs, wants_labels: as in `BatchReader`.
    """

    notes = ()

    def __init__(self, config: Config, micros: range, *, wants_inputs: bool = True, wants_labels: bool = True) -> None:
        self._config = config
        self._micros = micros
        self._wants_inputs = wants_inputs
        self._wants_labels = wants_labels
        self.rows = RowReader([], config.pp.micro)
        self.sampler = Sampler(config.data.seed, config.data.batch, counts=(1,), sizes=(SAMPLES,))

    @classmethod
    def of(cls, job: Job) -> Drawn:
        """Return those of a rank."""
        has_last = len(job.layout.specs) - 1 in job.layout.stages
        return cls(job.config, job.micro_ids, wants_inputs=job.wants_inputs, wants_labels=has_last)

    @classmethod
    def whole(cls, config: Config) -> Drawn:
        """Return the global batches of a run."""
        return cls(config, range(config.data.batch // config.pp.micro))

    def fingerprint(self) -> str:
        return "drawn"

    def __len__(self) -> int:
        """Return the number of samples for evaluation."""
        return self._config.data.batch

    def batch(self, step: int, micros: object = None) -> Batch:
        """Return the batch of a step. micros: not used, since dealing is even."""
        return self._draw(step % 2 * BATCH, (step + 1) % 2 * BATCH)

    def batches(self, micros: int, idle: object = (), *, even: bool = False) -> Iterator[Batch]:
        """Yield the batches for evaluation. idle: not used, since no rank joins; even: they are."""
        yield self._draw(SAMPLES, SAMPLES)

    def most_batches(self, micros: int, idle: object = ()) -> int:
        return 1

    def stream_states(self, step: int) -> tuple[()]:
        return ()

    def look_ahead(self, step: int) -> None:
        """Nothing is streamed."""

    def restore(self, states: Sequence[object]) -> None:
        pass

    def close(self, *, wait: bool = True) -> None:
        """Nothing is open."""

    def _draw(self, first: int, upcoming: int) -> Batch:
        micro = self._config.pp.micro
        offsets = torch.arange(self._micros.start * micro, self._micros.stop * micro)
        samples = [self._sample(first + int(offset)) for offset in offsets]
        tensors = {name: self._in_micros(torch.stack([sample[name] for sample in samples])) for name in samples[0]}
        labels = tensors.pop("labels")
        longest_rows = [Lengths(*rows) for rows in tensors.pop("lengths").amax(dim=1).tolist()]
        return Batch(
            inputs=tensors if self._wants_inputs else None,
            labels=labels if self._wants_labels else None,
            sample_ids=self._in_micros(first + offsets),
            micro_ids=self._micros,
            upcoming_ids=self._in_micros(upcoming + offsets),
            longest_rows=longest_rows if self._wants_inputs or self._wants_labels else None,
        )

    def _in_micros(self, rows: Tensor) -> Tensor:
        return rows.unflatten(0, (len(self._micros), -1))

    def _sample(self, index: int) -> dict[str, Tensor]:
        """Return the inputs, the labels and the lengths of one sequence."""
        generator = torch.Generator().manual_seed(index)
        tokens, target = torch.randint(3, VOCABULARY, (2, SEQUENCE), generator=generator)
        lengths = torch.randint(SEQUENCE // 4, SEQUENCE + 1, (2,), generator=generator)
        length, target_length = lengths
        place = torch.arange(SEQUENCE)
        task = self._config.model.task
        if task == "lm":
            labels = tokens.roll(-1).where(place < length - 1, -100)
            return {"input_ids": tokens, "labels": labels, "lengths": lengths}
        is_token = (place < length).long()
        padded = {"input_ids": tokens * is_token, "attention_mask": is_token, "lengths": lengths}
        if task == "seq2seq":
            labels = target.where(place < target_length, -100)
            return {**padded, "decoder_input_ids": torch.cat([START, labels[:-1].clamp(min=0)]), "labels": labels}
        padded["input_ids"][length - 1] = END  # some classifiers look for it
        return {**padded, "labels": torch.tensor(index % 3 if task == "classification" else index / SAMPLES)}


def train_run(config: Config, launch: Launch, store: dist.Store) -> None:
    """Train a run to its last step on this rank. store: of this run alone."""
    job = prepare(config, launch)
    drawn: Any = Drawn.of(job)
    identity = RunIdentity.of(job.model.config, tokenizer="", texts=drawn.fingerprint(), data={})
    with connect(job.topology, timeout=TIMEOUT, store=store) as groups:
        candidates = find(job.paths.checkpoints, "auto", identity)
        fresh = not candidates.checkpoints
        source = open_weight_source(job) if fresh else None
        caches = plan_activation_caches(job, SAMPLES, run_id=identity.digest(), fresh=fresh)
        inputs = RunInputs(drawn, drawn, identity, candidates, source, caches, job.config.optim.num_steps, ())
        train.train(job, inputs, groups, RunLock([]))


def fill_cache(config: Config, world_size: int) -> None:
    """Put into the cache of a run what its ranks would each compute or wait for."""
    job = prepare(config, Launch(0, 0, world_size))
    job.paths.layers_cache.verify(job.model.config, job.model.description, reports_wait=False)
    open_weight_source(job)


def _record_weights(run_steps: Callable[..., None]) -> Callable[..., None]:
    """Return `run_steps` that writes WEIGHTS before and after."""

    def write(session: Session, step: int) -> None:
        job = session.job
        hashes = {weight.key: digest(weight.master) for weight in session.weights}
        path = Path(job.config.log.dir) / WEIGHTS.format(step=step, rank=job.topology.rank)
        path.write_text(json.dumps(hashes))

    def recorded(run: TrainingRun) -> None:
        write(run.session, run.state.progress.step)
        run_steps(run)
        write(run.session, run.num_steps)

    return recorded


def digest(tensor: Tensor) -> str:
    """Return a hash that differs if any bit does."""
    return hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()


def train_ranks(rank: int, world_size: int, store: Path, configs: Sequence[Config]) -> None:
    """Train each run to its last step on this rank, one after the other."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "run_steps", _record_weights(train.run_steps))
        for number, config in enumerate(configs):
            train_run(config, Launch(rank, rank, world_size), dist.FileStore(f"{store}-{number}", world_size))


class Split(NamedTuple):
    """Division of a model over ranks."""

    stages: int
    replicas: int
    layers: tuple[int, ...]
    """Number of blocks of each stage."""
    schedule: str = "1f1b"


def splits(model_type: str) -> dict[str, Split]:
    """Return divisions of a small model, by name."""
    if task_of(model_type).name == "seq2seq":
        return {
            "2 replicas": Split(1, 2, (4,)),
            "2 stages": Split(2, 1, (3, 1)),
            "2 stages x 2 replicas": Split(2, 2, (1, 1, 1, 1), "interleaved:chunks=2"),
            "4 stages": Split(4, 1, (1, 1, 1, 1)),
        }
    return {
        "2 replicas": Split(1, 2, (3,)),
        "2 stages": Split(2, 1, (2, 1)),
        "2 stages x 2 replicas": Split(2, 2, (1, 2), "gpipe"),
        "4 stages": Split(4, 1, (1, 1, 1, 0)),
    }


class Runs:
    """Runs in a directory, to be trained with one start of processes per number of ranks.

    A run is named by its type, its split and what else is special: "t5, 4 stages".
    """

    def __init__(self, directory: Path) -> None:
        self.configs: dict[str, Config] = {}
        self._ranks: dict[str, int] = {}
        self._directory = directory

    def add(self, model_type: str, split: str, special: str = "", **options: Any) -> Config:
        """Add a run. options: of the config of the model, or of a run as "pp.forward"."""
        task = options.pop("model.task", task_of(model_type).name)
        run_options = {key: options.pop(key) for key in list(options) if "." in key}
        name = ", ".join(filter(None, [model_type, split, special]))
        stages, replicas, layers, schedule = splits(model_type)[split]
        config = Config(
            model=ModelConfig(str(self._model(model_type, task, options)), task=task),
            data=DataConfig(sources="demo", sequence=SEQUENCE, batch=BATCH, seed=3),
            optim=OptimConfig(
                lr=1e-3,
                steps=STEPS,
                warmup=3,
                clip=0.5,
                weight_decay=0.1,
                label_smoothing=0.1 if model_type == SMOOTHED else 0.0,
            ),
            pp=PipelineConfig(stages=stages, layers=layers, schedule=schedule, micro=2),
            log=LogConfig(dir=str(self._directory / "runs" / name), to="jsonl"),
        )
        for key, value in run_options.items():
            section, _, option = key.partition(".")
            config = dataclasses.replace(
                config, **{section: dataclasses.replace(getattr(config, section), **{option: value})}
            )
        self.configs[name] = config
        self._ranks[name] = stages * replicas
        return config

    def _model(self, model_type: str, task: str, options: dict[str, Any]) -> Path:
        """Return the directory of a model, which is written if it is not there yet."""
        changes = [f"{key}={value}" for key, value in options.items()]
        directory = self._directory / "models" / " ".join([model_type, task, *changes])
        if not directory.exists():
            save_model(directory, task, small_config(model_type, **options))
        return directory

    def train(self, ranks: int) -> None:
        """Train all runs of a number of ranks, in the order in which they were added."""
        configs = [config for name, config in self.configs.items() if self._ranks[name] == ranks]
        for config in configs:
            fill_cache(config, ranks)
        on_ranks(ranks, train_ranks, self._directory / f"store-{ranks}", configs)


def checkpoint_of(config: Config, step: int) -> Path:
    """Return the path of a checkpoint."""
    return Path(config.log.dir) / "checkpoints" / f"step-{step:08d}"


class Result(NamedTuple):
    """Losses of a run."""

    losses: list[float]
    eval_loss: float


def records_of(config: Config) -> list[dict[str, Any]]:
    """Read the lines of metrics.jsonl."""
    return [json.loads(line) for line in (Path(config.log.dir) / "metrics.jsonl").read_text().splitlines()]


def result_of(config: Config) -> Result:
    """Read the result of a run."""
    lines = records_of(config)
    assert [line["step"] for line in lines] == list(range(1, config.optim.steps + 1))
    return Result([line["loss"] for line in lines], lines[-1]["eval_loss"])


def assert_equal(config: Config, expected: Result) -> None:
    found = result_of(config)
    assert found.losses == pytest.approx(expected.losses, rel=RELATIVE), config.log.dir
    assert found.eval_loss == pytest.approx(expected.eval_loss, rel=RELATIVE), config.log.dir
    assert found.losses[-2] < found.losses[0], "both steps have the same samples"


def oracle(config: Config) -> Result:
    """Train the run in this process with the Hugging Face model alone.

    Dropout is seeded at the start of forward and before each block, which is what acsgd does if the model's code
    between and after the blocks has none.
    """
    task, optim = MODEL_CLASSES[config.model.task], config.optim
    model = task.auto_class.from_pretrained(config.model.name, dtype=torch.float32).train()
    drawn, place = Drawn.whole(config), [0, 0]

    def reseed(index: int) -> None:
        seed_generators(mix_seed(config.data.seed, *place, index))

    def before(step: int, micro: int, batch: Batch) -> None:
        place[:] = [step, micro]
        reseed(0)

    for index, path in enumerate(task.layers(model.config).blocks):
        module = model.get_submodule(path)
        module.register_forward_pre_hook(lambda *_, layer=index + 1: reseed(layer))

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        if config.model.task == "regression":
            return (logits.squeeze(-1) - labels).square().sum()
        smoothing = optim.label_smoothing if model.training else 0.0
        logits, labels = logits.flatten(0, -2), labels.flatten()
        return torch.nn.functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)

    losses = train_whole(model, optim, map(drawn.batch, range(optim.steps)), loss=loss, before=before)
    (held_out,) = drawn.batches(0)
    assert held_out.labels is not None
    assert held_out.inputs is not None
    with torch.no_grad():
        logits = model.eval()(**{name: x.flatten(0, 1) for name, x in held_out.inputs.items()}, use_cache=False).logits
        labels = held_out.labels.flatten(0, 1)
        return Result(losses, float(loss(logits, labels) / (labels != -100).sum()))


def save_model(directory: Path, task: str, config: PreTrainedConfig) -> None:
    """Write a model with new weights, and a tokenizer of as many tokens."""
    torch.manual_seed(0)
    model = MODEL_CLASSES[task].auto_class.from_config(config)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1 and param.std() < SMALL:
                param.mul_(SCALE)
    model.save_pretrained(directory)
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {chr(ord("!") + token): token for token in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(directory)
