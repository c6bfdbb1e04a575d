"""The ranks that generate together, one stage of the model each, with several batches in flight."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from acsgd.comm.waits import Work
from acsgd.commands.generation.model import LoadedModel, StagePlace
from acsgd.commands.generation.stages import StageModel
from acsgd.errors import RunError, reason
from acsgd.groups import Groups
from acsgd.launch import Launch
from acsgd.notes import print_note
from acsgd.streams import generator_states, restore_generators

T = TypeVar("T")
S = TypeVar("S")


class Ranks(Protocol):
    """The ranks that generate. All call the same methods with equal arguments, in the same order."""

    @property
    def place(self) -> StagePlace | None:
        """The stage of this rank; None if it has the whole model."""
        ...

    @property
    def is_main(self) -> bool:
        """Whether this rank prints and writes."""
        ...

    @property
    def local_rank(self) -> int:
        """Position of this process on its host."""
        ...

    def take(self, loaded: LoadedModel) -> None:
        """Generate with the model of this rank from now on. Raises ValueError if it cannot generate in stages."""
        ...

    def note(self, text: str) -> None:
        """Print a sentence, once for all ranks."""
        ...

    def arguments(self) -> dict[str, Any]:
        """Return arguments of transformers' generate for this rank, within `map`; lists are added to those given."""
        ...

    def map(self, generate: Callable[[S], T], items: Iterable[S]) -> Iterator[T]:
        """Yield what a function returns for each item, in order. It may generate one batch at a time."""
        ...

    def gather(self, name: str, text: str) -> list[str]:
        """Return a text of each rank. name: purpose of the exchange."""
        ...


class SingleProcess:
    """One process with the whole model."""

    place = None
    is_main = True
    local_rank = 0

    def take(self, loaded: LoadedModel) -> None:
        pass

    def note(self, text: str) -> None:
        print_note(text)

    def arguments(self) -> dict[str, Any]:
        return {}

    def map(self, generate: Callable[[S], T], items: Iterable[S]) -> Iterator[T]:
        return map(generate, items)

    def gather(self, name: str, text: str) -> list[str]:
        return [text]


SINGLE_PROCESS = SingleProcess()


class StageRanks:
    """Ranks of which each has a stage. As many batches and one more are in flight, so that no stage waits for all.

    Each batch has a thread of its own; one at a time computes, with its own random numbers, while others wait for
    messages.
    """

    def __init__(
        self, groups: Groups, launch: Launch, stack: contextlib.ExitStack, *, timeout_s: float, options: str = ""
    ) -> None:
        """stack: is left when the ranks have generated; timeout_s: for a message, and for another rank to load.

        options: text that must be equal on all ranks.
        """
        self.place = StagePlace(launch.rank, launch.world_size)
        self.is_main = launch.rank == 0
        self.local_rank = launch.local_rank
        self._groups = groups
        self._stack = stack
        self._timeout_s = timeout_s
        self._options = options
        self._turn = threading.Lock()
        self._current = threading.local()
        self._model: StageModel | None = None

    def take(self, loaded: LoadedModel) -> None:
        assert loaded.stage is not None
        if len({*self.gather("comparing options", self._options)}) > 1:
            raise RunError("the ranks have different options: start all hosts with the same command")
        if len(found := {*self.gather("comparing models", f"{loaded.directory.name} ({loaded.digest()})")}) > 1:
            raise RunError(
                f"the ranks have loaded different models, {' and '.join(sorted(found))}: give all hosts the same one"
            )
        if problem := self.gather("trying stages", loaded.stage.find_difference() if self.is_main else "")[0]:
            raise ValueError(problem)
        self._model = loaded.stage.model
        self._stack.enter_context(self._model.running())

    def note(self, text: str) -> None:
        if self.is_main:
            print_note(text)

    def arguments(self) -> dict[str, Any]:
        assert self._model is not None
        return self._model.arguments(self._current.wire)

    def map(self, generate: Callable[[S], T], items: Iterable[S]) -> Iterator[T]:
        def enter(number: int) -> None:
            self._current.wire = GroupWire(self._groups, number, self._while_waiting)

        def run(item: S) -> T:
            with self._turn:
                result = generate(item)
                self._current.wire.finish()
                return result

        numbers = range(self.place.stages + 1)
        threads = [ThreadPoolExecutor(1, f"batch-{number}", enter, (number,)) for number in numbers]
        try:
            waiting = deque(thread.submit(run, item) for thread, item in zip(itertools.cycle(threads), items))
            while waiting:
                yield waiting.popleft().result()
        finally:
            for thread in threads:  # after a failure, others may wait for a message that never comes
                thread.shutdown(wait=False, cancel_futures=True)

    def gather(self, name: str, text: str) -> list[str]:
        return self._groups.all_gather_text(name, text, timeout_s=self._timeout_s)

    @contextlib.contextmanager
    def _while_waiting(self) -> Iterator[None]:
        """Context in which another thread may compute."""
        states = generator_states()
        self._turn.release()
        try:
            yield
        finally:
            self._turn.acquire()
            restore_generators(states)


class GroupWire:
    """Messages for one batch over the group of all ranks, whose order is that of the stages.

    number: of the batch among those in flight; part of the tags. while_waiting: context around a wait.
    """

    def __init__(
        self, groups: Groups, number: int, while_waiting: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> None:
        self._group = groups.world
        self._waits = groups.waits
        self._stage, self._last = self._group.rank(), self._group.size() - 1
        self._hidden_tag, self._token_tag = 2 * number, 2 * number + 1
        self._while_waiting = while_waiting
        self._receiving: dict[int, tuple[Tensor, Work]] = {}
        """By tag."""
        self._device = torch.device("cpu")
        self._sending: list[tuple[Tensor, Work, int]] = []

    def begin(self, hidden: Tensor) -> None:
        assert not self._receiving, "each call of the model makes one token"
        self._device = hidden.device
        if self._stage > 0:
            self._expect(torch.empty(hidden.shape, dtype=hidden.dtype), self._stage - 1, self._hidden_tag)
        if self._stage < self._last:
            self._expect(torch.empty(len(hidden), dtype=torch.int64), self._last, self._token_tag)

    def receive_hidden(self) -> Tensor:
        return self._receive(self._hidden_tag, [self._stage - 1])

    def send_hidden(self, hidden: Tensor) -> None:
        self._send(hidden, [self._stage + 1], self._hidden_tag)

    def receive_tokens(self) -> Tensor:
        return self._receive(self._token_tag, [self._last])

    def send_tokens(self, ids: Tensor) -> None:
        self._send(ids, range(self._last), self._token_tag)

    def finish(self) -> None:
        """Wait for the messages that this rank has sent."""
        with self._while_waiting():
            for _, work, rank in self._sending:
                with self._naming([rank]):
                    self._waits.wait(work)
        self._sending = []

    def _expect(self, buffer: Tensor, rank: int, tag: int) -> None:
        with self._naming([rank]):
            self._receiving[tag] = buffer, self._group.irecv(buffer, rank, tag)

    def _receive(self, tag: int, ranks: Sequence[int]) -> Tensor:
        buffer, work = self._receiving.pop(tag)
        with self._naming(ranks), self._while_waiting():
            self._waits.wait(work)
        return buffer.to(self._device)

    def _send(self, tensor: Tensor, ranks: Sequence[int], tag: int) -> None:
        """Start to send a tensor to some ranks, and wait for the messages before."""
        self.finish()
        tensor = tensor.to(self._group.device).contiguous()
        with self._naming(ranks):
            self._sending = [(tensor, self._group.isend(tensor, rank, tag), rank) for rank in ranks]

    @contextlib.contextmanager
    def _naming(self, ranks: Sequence[int]) -> Iterator[None]:
        """Turn a failure of a message from or to some ranks into a RunError."""
        try:
            yield
        except RuntimeError as error:
            raise RunError(
                f"rank {self._stage} on {socket.gethostname()}: generating with ranks {[*ranks]} failed "
                f"({reason(error)})",
                awaited=ranks,
            ) from error
