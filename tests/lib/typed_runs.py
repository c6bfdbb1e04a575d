"""Runs of models of many types, on batches drawn at random. Besides its usual files, a run directory gets WEIGHTS."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from acsgd import train
from acsgd.config.options import Config
from acsgd.groups import connect
from acsgd.io.checkpoint.identity import RunIdentity
from acsgd.io.checkpoint.resume import find
from acsgd.launch import Launch
from acsgd.layers.batch import Batch
from acsgd.layers.lengths import Lengths
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.lock.lock import RunLock
from acsgd.run.plan.job import Job, prepare
from acsgd.run.session import Session
from acsgd.run.setup.inputs import RunInputs, plan_activation_caches
from acsgd.run.step.run import Run
from lib.model_types import VOCABULARY

SEQUENCE, BATCH = 12, 6
SAMPLES = 2 * BATCH
"""Number of training samples: every second step has the same ones, as delta needs."""
START = torch.tensor([1])
"""First token that enters a decoder."""
END = 2
"""Last token of a sequence to classify."""
TIMEOUT = timedelta(seconds=120)
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

    def batches(self, micros: int, idle: object = ()) -> Iterator[Batch]:
        """Yield the batches for evaluation. idle: not used, since no rank joins."""
        yield self._draw(SAMPLES, SAMPLES)

    def stream_states(self, step: int) -> tuple[()]:
        return ()

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

    def recorded(run: Run) -> None:
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
