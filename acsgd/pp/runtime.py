"""Execute a program on this rank: one optimizer step's forwards, backwards, messages and reductions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from acsgd.failure import RunError
from acsgd.pp.actions import Action, Op
from acsgd.pp.link import Link, TiedPair
from acsgd.pp.stage import MicroBatch, Stage
from acsgd.shards.base import State


class Batch(Protocol):
    """What this rank's replica trains on in one step. M micro-batches of B sequences of T tokens."""

    @property
    def tokens(self) -> Tensor | None:
        """[M, B, T], on the first stage's rank."""
        ...

    @property
    def labels(self) -> Tensor | None:
        """[M, B, T], on the last stage's rank; -100 = no target."""
        ...

    @property
    def micro_ids(self) -> Sequence[int]:
        """Each micro-batch's place in the global batch."""
        ...


class Pipeline:
    """This rank's part of one pipeline.

    row: its actions, lowered; stages: those it holds, by index; links: the boundaries it shares with another rank,
    by the stage before the cut; tied: the pair of a weight whose other copy another rank holds.
    """

    def __init__(
        self,
        row: Sequence[Action],
        stages: Mapping[int, Stage],
        links: Mapping[int, Link],
        tied: TiedPair | None,
    ) -> None:
        self._row = row
        self._stages = stages
        self._links = links
        self._tied = tied
        self._final_backward = {action.stage: i for i, action in enumerate(row) if action.op is Op.B}
        self._handlers = {
            Op.F: self._forward,
            Op.B: self._backward,
            Op.SF: self._send_activation,
            Op.SB: self._send_gradient,
            Op.RF: self._post_activation,
            Op.RB: self._post_gradient,
            Op.R: self._reduce,
        }

    def run(self, batch: Batch, step: int) -> Tensor:
        """Leave the gradients of the step, summed over the replicas, in the masters.

        Returns this rank's share of the loss: fp64, its part of the mean over the global batch; 0 without the last
        stage. Raises RunError that names rank, host, stage and action if a peer does not do its part.
        """
        self._batch, self._step = batch, step
        self._losses: list[Tensor] = []
        self._made: dict[tuple[Op, int, int], State] = {}
        for stage in self._stages.values():
            stage.sync.begin()
        for index, action in enumerate(self._row):
            self._index = index
            with self._named(action):
                self._handlers[action.op](action)
        self._finish()
        return sum((loss.double().cpu() for loss in self._losses), start=torch.zeros((), dtype=torch.float64))

    @contextlib.contextmanager
    def _named(self, action: Action) -> Iterator[None]:
        """Say of a failure in which action it came."""
        try:
            yield
        except RunError as error:
            raise RunError(f"step {self._step}, stage {action.stage}, action {action}: {error}") from error

    def _forward(self, action: Action) -> None:
        stage, micro = self._stages[action.stage], action.micro
        place = MicroBatch(self._step, micro, self._batch.micro_ids[micro])
        if stage.is_first:
            assert self._batch.tokens is not None
            inputs = {"tokens": self._batch.tokens[micro]}
        else:
            inputs = self._take(Op.F, action.stage - 1, micro)
        labels = self._batch.labels[micro] if stage.is_last and self._batch.labels is not None else None
        outputs = stage.forward(place, inputs, labels)
        if stage.is_last:
            self._losses.append(outputs["loss"])
        else:
            self._made[Op.F, action.stage, micro] = outputs

    def _backward(self, action: Action) -> None:
        stage, micro = self._stages[action.stage], action.micro
        grads = None if stage.is_last else self._take(Op.B, action.stage + 1, micro)
        last = self._final_backward[action.stage] == self._index
        made = stage.backward(micro, grads, last=last)
        if not stage.is_first:
            self._made[Op.B, action.stage, micro] = made

    def _take(self, op: Op, source: int, micro: int) -> State:
        """Return what `source` made of a micro-batch: from this rank, or off the wire."""
        if source in self._stages:
            return self._made.pop((op, source, micro))
        for link in self._links.values():
            link.outbox.flush(wait=True)  # the peer may need these before it can make what is awaited here
        boundary = source if op is Op.F else source - 1
        return self._links[boundary].inbox.take(self._step, micro)

    def _send_activation(self, action: Action) -> None:
        made = self._made.pop((Op.F, action.stage, action.micro))
        self._links[action.stage].outbox.send(self._step, action.micro, made)

    def _send_gradient(self, action: Action) -> None:
        made = self._made.pop((Op.B, action.stage, action.micro))
        self._links[action.stage - 1].outbox.send(self._step, action.micro, made)

    def _post_activation(self, action: Action) -> None:
        self._links[action.stage - 1].inbox.post()

    def _post_gradient(self, action: Action) -> None:
        self._links[action.stage].inbox.post()

    def _reduce(self, action: Action) -> None:
        self._stages[action.stage].sync.reduce()

    def _finish(self) -> None:
        """Wait for what is still under way; a failure then belongs to the reduction it keeps from ending."""
        for index, stage in self._stages.items():
            with self._named(Action(Op.R, index)):
                for link in self._links.values():
                    link.outbox.drain()
                stage.sync.wait()
        if self._tied is not None:
            with self._named(Action(Op.R, min(self._stages))):
                self._tied.sum_gradients(self._step)
