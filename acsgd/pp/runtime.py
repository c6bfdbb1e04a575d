"""Execute a program on this rank: a step's forwards, backwards, messages and reductions, or forwards to evaluate."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from acsgd.errors import RunError
from acsgd.pp.nan_probe import NaNProbe
from acsgd.pp.nonfinite import NonFiniteTensor
from acsgd.pp.schedules.actions import Action, Op
from acsgd.pp.stage import MicroBatch, Stage
from acsgd.pp.tied_weights import TiedPair
from acsgd.pp.wire.coder import TransferInfo
from acsgd.pp.wire.link import Link
from acsgd.shards.layers import State

Handlers = Mapping[Op, Callable[[Action], None]]
"""What to do at each kind of action."""


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
    def upcoming_ids(self) -> Tensor:
        """int64, on the host: sample ids of the next batch."""
        ...

    @property
    def micro_ids(self) -> Sequence[int]:
        """Each micro-batch's place in the global batch."""
        ...

    @property
    def sample_ids(self) -> Tensor:
        """int64 [M, B], on the host: one number per sequence of the data, the same in every epoch."""
        ...


class Pipeline:
    """This rank's part of one pipeline.

    Args:
        train_actions, eval_actions: this rank's actions in the lowered programs of a training step and of an evaluation
        stages: the stages this rank holds, by index
        links: this rank's end of each boundary that it shares with another rank, by the stage before the boundary
        tied: the tied weight whose other copy another rank holds, if there is one
        exact_steps: number of initial steps that send without the links' codecs
        exact_eval: whether evaluations send without the links' codecs
    """

    def __init__(
        self,
        train_actions: Sequence[Action],
        eval_actions: Sequence[Action],
        stages: Mapping[int, Stage],
        links: Mapping[int, Link],
        tied: TiedPair | None,
        *,
        exact_steps: int = 0,
        exact_eval: bool = True,
    ) -> None:
        self._exact_steps = exact_steps
        self._exact_eval = exact_eval
        self._train_actions = train_actions
        self._eval_actions = eval_actions
        self._stages = stages
        self._links = links
        self._tied = tied
        self._final_backward = {action.stage: action for action in train_actions if action.op is Op.B}
        messages: Handlers = {
            Op.SF: self._send_activation,
            Op.SB: self._send_gradient,
            Op.RF: self._post_activation,
            Op.RB: self._post_gradient,
        }
        self._training: Handlers = {Op.F: self._forward, Op.B: self._backward, Op.R: self._reduce, **messages}
        self._evaluation: Handlers = {Op.F: self._evaluate, **messages}

    def run(self, batch: Batch, step: int, scale: float = 1.0) -> Tensor:
        """Leave the gradients of the step, summed over the replicas and times `scale`, in the masters.

        Returns this rank's share of the loss, not scaled: fp64, its part of the mean over the global batch; 0 without
        the last stage. scale: what keeps fp16 gradients from underflow (Micikevicius et al. 2017, arXiv:1710.03740).
        Raises RunError that names rank, host, stage and action if a peer does not do its part.
        """
        return self._train(batch, step, scale, self._training)

    def evaluate(self, batch: Batch, step: int) -> Tensor:
        """Return this rank's share of the loss, summed over the target tokens of the batch: fp64, on the host.

        0 without the last stage. No dropout, no gradients: training goes on as if this had not been. The batch has as
        many micro-batches as one of training; labels of -100 are no targets. step: what failures are told with, the
        same on all ranks. Raises RunError as `run` does.
        """
        with contextlib.ExitStack() as modes:
            for stage in self._stages.values():
                modes.enter_context(stage.evaluating())
            self._execute(self._eval_actions, self._evaluation, batch, step, exact=self._exact_eval, remember=False)
        for index in self._stages:
            with self._named(Action(Op.F, index)):
                self._drain()
        return self._total_loss()

    def find_non_finite(self, batch: Batch, step: int, scale: float = 1.0) -> NonFiniteTensor | None:
        """Run a step whose loss or gradients are not finite again, looking at everything; all ranks together.

        Returns the first NaN or inf on this rank; `first_non_finite` of all ranks' is the origin. Leaves what `run`
        leaves; but replicas whose agreement has a memory add to it once more, and meters count the messages again.
        """
        with NaNProbe(self._stages, batch.micro_ids) as probe:

            def forward(action: Action) -> None:
                with probe.during(action):
                    self._forward(action)
                    if self._stages[action.stage].is_last:
                        probe.look("loss", self._losses[-1])

            def backward(action: Action) -> None:
                with probe.during(action):
                    self._backward(action)

            self._train(batch, step, scale, {**self._training, Op.F: forward, Op.B: backward})
            probe.look_at_sums()
        return probe.first

    def close(self) -> None:
        """End the links' threads, and wait until activation caches on disk are saved."""
        for link in self._links.values():
            link.close()
        if self._tied is not None:
            self._tied.close()

    def _train(self, batch: Batch, step: int, scale: float, handlers: Handlers) -> Tensor:
        self._scale = scale
        for stage in self._stages.values():
            stage.sync.begin_step(step, scale)
        for link in self._links.values():
            link.begin_step(batch.sample_ids.flatten().tolist(), batch.upcoming_ids.flatten().tolist())
        self._execute(self._train_actions, handlers, batch, step, exact=step < self._exact_steps, remember=True)
        self._finish()
        return self._total_loss()

    def _execute(
        self, row: Sequence[Action], handlers: Handlers, batch: Batch, step: int, *, exact: bool, remember: bool
    ) -> None:
        """Do the actions of a row; remember: whether the links are to learn from what passes."""
        self._batch, self._step = batch, step
        samples = batch.sample_ids.tolist() if remember else [()] * len(batch.sample_ids)
        self._transfers = [TransferInfo(step, micro, exact, tuple(ids)) for micro, ids in enumerate(samples)]
        self._losses: list[Tensor] = []
        self._made: dict[Action, State] = {}
        for action in row:
            with self._named(action):
                handlers[action.op](action)

    @contextlib.contextmanager
    def _named(self, action: Action) -> Iterator[None]:
        """Say of a failure in which action it came."""
        try:
            yield
        except RunError as error:
            where = f"step {self._step + 1}, stage {action.stage}, action {action}"
            raise RunError(f"{where}: {error}", awaited=error.awaited) from error

    def _forward(self, action: Action) -> None:
        self._keep(action, self._stages[action.stage].forward(*self._inputs(action)))

    def _evaluate(self, action: Action) -> None:
        self._keep(action, self._stages[action.stage].evaluate(*self._inputs(action)))

    def _inputs(self, action: Action) -> tuple[MicroBatch, State, Tensor | None]:
        """Return what a stage needs for the forward of a micro-batch."""
        stage, micro = self._stages[action.stage], action.micro
        sample_ids = tuple(self._batch.sample_ids[micro].tolist())
        place = MicroBatch(self._step, micro, self._batch.micro_ids[micro], sample_ids)
        if stage.is_first:
            assert self._batch.tokens is not None
            inputs = {"tokens": self._batch.tokens[micro]}
        else:
            inputs = self._take(Op.F, action.stage - 1, micro)
        labels = self._batch.labels[micro] if stage.is_last and self._batch.labels is not None else None
        return place, inputs, labels

    def _keep(self, action: Action, outputs: State) -> None:
        if self._stages[action.stage].is_last:
            self._losses.append(outputs["loss"])
        else:
            self._made[action] = outputs

    def _backward(self, action: Action) -> None:
        stage, micro = self._stages[action.stage], action.micro
        grads = None if stage.is_last else self._take(Op.B, action.stage + 1, micro)
        last = self._final_backward[action.stage] == action
        made = stage.backward(micro, grads, last=last, scale=self._scale)
        if not stage.is_first:
            self._made[action] = made

    def _take(self, op: Op, source: int, micro: int) -> State:
        """Return what `source` made of a micro-batch: from this rank, or off the wire."""
        if source in self._stages:
            return self._made.pop(Action(op, source, micro))
        for link in self._links.values():
            link.outbox.flush(wait=True)  # the peer may need these before it can make what is awaited here
        return self._links[source if op is Op.F else source - 1].receive(self._transfers[micro])

    def _send_activation(self, action: Action) -> None:
        made = self._made.pop(Action(Op.F, action.stage, action.micro))
        self._links[action.stage].send(self._transfers[action.micro], made)

    def _send_gradient(self, action: Action) -> None:
        made = self._made.pop(Action(Op.B, action.stage, action.micro))
        self._links[action.stage - 1].send(self._transfers[action.micro], made)

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
                self._drain()
                stage.sync.wait()
        if self._tied is not None:
            with self._named(Action(Op.R, min(self._stages))):
                self._tied.sum_gradients(self._step)

    def _drain(self) -> None:
        for link in self._links.values():
            link.outbox.drain()

    def _total_loss(self) -> Tensor:
        return sum((loss.double().cpu() for loss in self._losses), start=torch.zeros((), dtype=torch.float64))
