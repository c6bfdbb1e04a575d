"""Execute this rank's part of a program: a training step or an evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from acsgd.comm.spans import SpanRecorder
from acsgd.errors import RunError
from acsgd.layers.batch import Batch
from acsgd.layers.composed import Inputs, State
from acsgd.optim.ownership import OwnedWeights
from acsgd.pp.micro_shapes import MicroShapes
from acsgd.pp.nan_probe import NaNProbe, NonFiniteTensor
from acsgd.pp.schedules.actions import ACTIVATION, GRADIENT, OPERATIONS, Action, Op, Route
from acsgd.pp.schedules.programs import StepActions
from acsgd.pp.stage import MicroBatch, Stage
from acsgd.pp.tied.ties import Ties
from acsgd.pp.wire.coder import CodecChoice, CodecIndices, TransferInfo
from acsgd.pp.wire.device_mailbox import DeviceInbox, check_received
from acsgd.pp.wire.link import AnyOutbox, Link

Handler = Callable[[Action], None]
Handlers = Mapping[Op, Handler]
"""Function that performs the actions of each operation."""


class Evaluated(NamedTuple):
    """This rank's part of the evaluation of a batch, on the host."""

    loss: Tensor
    """Sum over the target tokens or examples, fp64; 0 without the last stage."""
    predictions: Tensor | None
    """Prediction of each example, fp64 [M, B]; None without the last stage, and for tasks that predict tokens."""


class Pipeline:
    """This rank's part of one pipeline.

    Args:
        actions: returns this rank's actions for some number of micro-batches
        stages: the stages this rank holds, by index
        links: this rank's end of each boundary that it shares with another rank, by the stage before the boundary
        ties: the tied weights that this rank shares with others
        placeholders: inputs of the model for the longest rows, for ranks that do not need their values
        shapes: shapes of micro-batches
        codecs: chooses the codecs of the links for each step
        load: returns a tensor of a batch on the device, see `Streams.load`
        mark: called before each action, to record progress; may raise
    """

    def __init__(
        self,
        actions: Callable[[int], StepActions],
        stages: Mapping[int, Stage],
        links: Mapping[int, Link],
        ties: Ties,
        placeholders: Inputs,
        shapes: MicroShapes,
        codecs: CodecChoice,
        *,
        load: Callable[[Tensor], Tensor],
        mark: Callable[[], None] = lambda: None,
    ) -> None:
        self.trace: SpanRecorder | None = None
        """Records the actions of training while steps are traced."""
        self._mark = mark
        self._load = load
        self.codecs = codecs
        self._actions = actions
        self._stages = stages
        self.links = links
        self.ties = ties
        self._placeholders = placeholders
        self._shapes = shapes
        self._training = self._handlers(
            {Op.F: self._forward, Op.B: self._backward, Op.I: self._backward_input, Op.W: self._backward_weight}
        )
        self._evaluation = self._handlers({Op.F: self._evaluate})

    def _handlers(self, computes: Handlers) -> Handlers:
        """Return `computes` with the handlers of all other operations."""
        messages = {Op.SF: self._send, Op.SB: self._send, Op.RF: self._post_receive, Op.RB: self._post_receive}
        rows = dict.fromkeys((Op.SR, Op.RR, Op.SG, Op.RG), self.ties.perform)
        return {**computes, **messages, **rows, Op.R: self._reduce, Op.RT: self._reduce_tables}

    def run(self, batch: Batch, step: int, scale: float = 1.0) -> Tensor:
        """Run one training step: leave its gradients, summed over the replicas and times `scale`, in the masters.

        scale: loss scale, which keeps fp16 gradients from underflow (Micikevicius et al. 2017, arXiv:1710.03740).
        Returns this rank's part of the mean loss over the global batch, unscaled, fp64 on the device; 0 without the
        last stage. Raises RunError that names rank, host, stage and action if a peer fails or times out.
        """
        return self._train(batch, step, scale, self._training)

    def evaluate(self, batch: Batch, step: int) -> Evaluated:
        """Evaluate a batch without dropout and gradients, and without effect on training.

        Labels of -100 are ignored. step: number named in errors, the same on all ranks. Raises RunError as `run` does.
        """
        actions = self._actions(len(batch.micro_ids)).evaluate
        with contextlib.ExitStack() as modes:
            for stage in self._stages.values():
                modes.enter_context(stage.evaluating())
            self._step = step
            with self._naming(Action(Op.F, min(self._stages))):
                self.ties.begin_evaluation(batch, step)
            self._execute(actions, self._evaluation, batch, step, self.codecs.of_evaluation(), use_caches=False)
            with self._naming(Action(Op.F, min(self._stages))):
                self._drain()
                self._check_received()
        predictions = [prediction for _, prediction in sorted(self._predictions.items())]
        return Evaluated(self._total_loss().cpu(), torch.stack(predictions).cpu() if predictions else None)

    def find_non_finite(
        self, batch: Batch, owned: OwnedWeights, step: int, scale: float = 1.0
    ) -> NonFiniteTensor | None:
        """Repeat a training step whose loss or gradients are not finite and check every tensor; all ranks together.

        owned: what this rank owns of the weights, of which it has the gradients summed over replicas.

        Returns the first NaN or inf on this rank; `first_non_finite` over all ranks gives the origin. Has the side
        effects of `run`: error feedback changes once more, and meters count the messages again.
        """
        with NaNProbe(self._stages, owned, batch.micro_ids) as probe:

            def checked(compute: Handler) -> Handler:
                def run_and_check(action: Action) -> None:
                    with probe.during(action):
                        compute(action)
                        if self._stages[action.stage].is_last and action.operation.phase == "forward":
                            probe.check("loss", self._losses[-1])

                return run_and_check

            handlers = {
                op: checked(handler) if OPERATIONS[op].kind == "compute" else handler
                for op, handler in self._training.items()
            }
            self._train(batch, step, scale, handlers)
            probe.check_reduced_gradients()
        return probe.first

    def send_ahead(self) -> None:
        """Send the first rows of the next step from the tables that this step has updated. Does not wait."""
        with self._naming(Action(Op.F, min(self._stages))):
            self.ties.send_ahead()

    def discard_ahead(self) -> None:
        """Forget the rows that `send_ahead` has sent. All ranks of a pipeline call it together."""
        with self._naming(Action(Op.F, min(self._stages))):
            self.ties.discard_ahead()

    def settle(self) -> None:
        """Wait for the rows that `send_ahead` sends. Collective: all ranks of a pipeline call it together."""
        with self._naming(Action(Op.F, min(self._stages))):
            self.ties.settle()

    def close(self) -> None:
        """End the links' threads, and wait until activation caches on disk are saved."""
        for link in self.links.values():
            link.close()
        self.ties.close()

    def abort(self) -> None:
        """End the links' threads and drop their messages, without waiting for anything; activation caches stay open."""
        for link in self.links.values():
            link.abort()
        self.ties.abort()

    def _train(self, batch: Batch, step: int, scale: float, handlers: Handlers) -> Tensor:
        self._scale = scale
        for stage in self._stages.values():
            stage.sync.begin_step(step, scale)
        for link in self.links.values():
            link.begin_step(batch.sample_ids.flatten().tolist(), batch.upcoming_ids.flatten().tolist())
        actions = self._actions(len(batch.micro_ids)).train
        self._last_backward = {action.stage: action for action in actions if action.operation.completes}
        self._step = step
        with self._naming(Action(Op.F, min(self._stages))):
            self.ties.begin_step(batch, step)
        if self.trace is not None:
            handlers = _traced(handlers, self.trace)
        self._execute(actions, handlers, batch, step, self.codecs.of_step(step), use_caches=True)
        self._finish()
        return self._total_loss()

    def _execute(
        self,
        actions: Sequence[Action],
        handlers: Handlers,
        batch: Batch,
        step: int,
        codecs: CodecIndices,
        *,
        use_caches: bool,
    ) -> None:
        """Perform actions in order; use_caches: whether the links read and update their activation caches."""
        self._batch, self._step = batch, step
        self._first_parts = {action for action in actions if action.op is Op.I}
        self._inputs_of_batch = {name: self._load(tensor) for name, tensor in (batch.inputs or {}).items()}
        self._labels = None if batch.labels is None else self._load(batch.labels)
        samples = batch.sample_ids.tolist() if use_caches else [()] * len(batch.sample_ids)
        lengths = self._shapes.lengths(batch.longest_rows, len(samples))
        self._transfers = [  # lengths that are None become known with the forward's first message
            TransferInfo(step, micro, samples=tuple(ids), lengths=tokens)
            for micro, (ids, tokens) in enumerate(zip(samples, lengths, strict=True))
        ]
        self._codec_of = {ACTIVATION: codecs.forward, GRADIENT: codecs.backward}
        self._losses: list[Tensor] = []
        self._predictions: dict[int, Tensor] = {}  # by micro-batch
        self._outputs: dict[tuple[Route, int, int], State] = {}  # by route, stage and micro-batch, until sent or read
        for action in actions:
            self._mark()
            with self._naming(action):
                handlers[action.op](action)

    @contextlib.contextmanager
    def _naming(self, action: Action) -> Iterator[None]:
        """Prefix a RunError raised within by step, stage and action."""
        try:
            yield
        except RunError as error:
            where = f"step {self._step + 1}, stage {action.stage}, action {action}"
            raise RunError(f"{where}: {error}", awaited=error.awaited) from error

    def _forward(self, action: Action) -> None:
        inputs = self._inputs(action)
        self._store_output(action, self._stages[action.stage].forward(*inputs))

    def _evaluate(self, action: Action) -> None:
        inputs = self._inputs(action)
        outputs = self._stages[action.stage].evaluate(*inputs)
        if "predictions" in outputs:
            self._predictions[action.micro] = outputs["predictions"]
        self._store_output(action, outputs)

    def _inputs(self, action: Action) -> tuple[MicroBatch, Inputs, State, Tensor | None]:
        """Return the arguments of a stage's forward, once the rows that it looks up are there."""
        self.ties.receive_rows(action, self._flush)
        stage, micro, batch = self._stages[action.stage], action.micro, self._batch
        samples, is_split = tuple(batch.sample_ids[micro].tolist()), action._replace(op=Op.I) in self._first_parts
        micro_batch = MicroBatch(self._step, micro, batch.micro_ids[micro], samples, is_split)
        state = {} if stage.is_first else self._take_input(action, ACTIVATION)
        lengths = self._transfers[micro].lengths
        assert lengths is not None, "the batch has inputs, but not the lengths of its rows"
        inputs = self._placeholders
        if batch.inputs is not None:
            inputs = {name: tensor[micro] for name, tensor in self._inputs_of_batch.items()}
        labels = None
        if stage.is_last and self._labels is not None:
            labels = self._shapes.cut_labels(self._labels[micro], lengths)
        return micro_batch, self._shapes.cut_inputs(inputs, lengths), state, labels

    def _store_output(self, action: Action, outputs: State) -> None:
        if self._stages[action.stage].is_last:
            self._losses.append(outputs["loss"])
        else:
            self._outputs[ACTIVATION, action.stage, action.micro] = outputs

    def _backward(self, action: Action) -> None:
        stage, last = self._stages[action.stage], self._last_backward[action.stage] == action
        grads = None if stage.is_last else self._take_input(action, GRADIENT)
        self._store_gradients(action, stage.backward(action.micro, grads, last=last, scale=self._scale))

    def _backward_input(self, action: Action) -> None:
        stage = self._stages[action.stage]
        grads = None if stage.is_last else self._take_input(action, GRADIENT)
        self._store_gradients(action, stage.backward_input(action.micro, grads, scale=self._scale))

    def _backward_weight(self, action: Action) -> None:
        last = self._last_backward[action.stage] == action
        self._stages[action.stage].backward_weight(action.micro, last=last)

    def _store_gradients(self, action: Action, grads: State) -> None:
        if self._stages[action.stage].sends_gradient:
            self._outputs[GRADIENT, action.stage, action.micro] = grads

    def _take_input(self, action: Action, route: Route) -> State:
        """Return what reaches an action's stage by a route, from another stage of this rank or from a link."""
        source = action.stage - route.step
        if source in self._stages:
            return self._outputs.pop((route, source, action.micro))
        self._flush()
        boundary = min(source, action.stage)
        info = self._transfers[action.micro]._replace(codec=self._codec_of[route][boundary])
        received = self.links[boundary].receive(info)
        self._transfers[action.micro] = info._replace(lengths=received.lengths)
        return received.state

    def _send(self, action: Action) -> None:
        route = action.operation.route
        assert route is not None
        info = self._transfers[action.micro]._replace(codec=self._codec_of[route][action.boundary])
        self.links[action.boundary].send(info, self._outputs.pop((route, action.stage, action.micro)))

    def _post_receive(self, action: Action) -> None:
        self.links[action.boundary].inbox.post()

    def _reduce(self, action: Action) -> None:
        self._stages[action.stage].reduce()

    def _reduce_tables(self, action: Action) -> None:
        if len(self._batch.micro_ids):
            self._flush()
            self.ties.add_gradients(action.stage)
        self._stages[action.stage].finish_lookups()

    def _finish(self) -> None:
        """Wait for the sends and reductions in flight; errors name the reduction of the stage."""
        with self._naming(Action(Op.R, min(self._stages))):
            self._drain()
        for index, stage in self._stages.items():
            with self._naming(Action(Op.R, index)):
                stage.sync.wait()
        with self._naming(Action(Op.R, min(self._stages))):
            self.ties.sum_copies(self._step)
            self._check_received()

    @property
    def _outboxes(self) -> list[AnyOutbox]:
        """Sending ends of all channels of this rank."""
        return [link.outbox for link in self.links.values()] + self.ties.outboxes

    def _flush(self) -> None:
        """Pass all messages to the transport: a peer may need them for what this rank waits for next."""
        for outbox in self._outboxes:
            outbox.flush(wait=True)

    def _drain(self) -> None:
        for outbox in self._outboxes:
            outbox.drain()

    def _check_received(self) -> None:
        """Check the messages that stayed on the device, of which no header was read so far."""
        inboxes = [link.inbox for link in self.links.values()] + self.ties.inboxes
        check_received(inbox for inbox in inboxes if isinstance(inbox, DeviceInbox))

    def _total_loss(self) -> Tensor:
        return sum((loss.double() for loss in self._losses), start=torch.zeros((), dtype=torch.float64))


def _traced(handlers: Handlers, trace: SpanRecorder) -> Handlers:
    """Return handlers that also record the time of each action."""

    def run(action: Action) -> None:
        with trace.span("action", str(action)):
            handlers[action.op](action)

    return dict.fromkeys(handlers, run)
