"""Metrics of one step, and the protocol of sinks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

RankNumbers = Mapping[str, Sequence[Sequence[float]]]
"""Numbers of the ranks of a step by name, [replicas][ranks per pipeline]. A name that is missing stands for zeros."""


class StepRecord(NamedTuple):
    """Metrics of one step: one line of metrics.jsonl. Bytes are sums over all ranks and include headers."""

    step: int
    """Number of completed optimizer steps."""
    loss: float | None
    """Mean over the target tokens of the global batch, before the update; None = not finite, or no target tokens
    (targets_per_s is 0): update skipped."""
    tokens: int
    """Number of target tokens trained on since the start of the run."""
    tokens_per_s: float
    """Input tokens of the step without padding, masked ones too, per second."""
    step_s: float
    """Duration of the step, without evaluation and checkpoint, seconds."""
    lr: float
    """Learning rate of the step."""
    grad_norm: float | None
    """Global gradient norm before clipping; None = not finite, update skipped."""
    pp_forward_bytes: int
    """Sent between stages in forward; less in steps of shorter texts where micro-batches of padded rows are cut."""
    pp_backward_bytes: int
    """Sent between stages in backward."""
    tied_bytes: int
    """Sent between stages for weights that layers of several stages share: rows of tables and their gradients."""
    dp_bytes: int
    """Sent between replicas since the previous line, except within a domain whose replicas act as one. Messages sent
    after an update are in the next line."""
    hidden_share: float
    """Fraction of the time of transfers that overlapped with computation; 1 without transfers. Those over NCCL, which
    run on the device, are not measured."""
    peak_memory_bytes: int
    """Peak of the run so far; maximum over the ranks of the first replica."""
    skipped: int = 0
    """Number of skipped updates of the run so far."""
    loss_scale: float = 1.0
    """fp16 loss scale of the next step."""
    save_stall_s: float = 0.0
    """Time in which training waited for a checkpoint, seconds."""
    data_wait_s: float = 0.0
    """Time of the step in which a rank waited for its batch to be read, seconds; maximum over all ranks."""
    targets_per_s: float = 0.0
    """Target tokens of the step, per second."""
    schedule_bubble: float = 0.0
    """Idle share of a pipeline by the schedule alone, without messages and with stages of equal speed."""
    device_tokens_per_s: float = 0.0
    """tokens_per_s divided by the number of ranks, that is of devices."""
    mfu: float | None = None
    """Model FLOP utilization (Chowdhery et al. 2022, arXiv:2204.02311): operations of the matrix products of forward
    and backward per second, without recomputation and padding, as a fraction of the peak of all devices. None =
    unknown: a CPU, a GPU that is not in the table in acsgd/streams.py, frozen parameters, or an encoder-decoder."""
    device_memory_bytes: int = 0
    """Memory of the GPU of rank 0; 0 on CPUs. The rank of peak_memory_bytes may have a GPU with another."""
    ranks: RankNumbers = MappingProxyType({})
    """Numbers of each rank."""
    evaluation: Mapping[str, float] = MappingProxyType({})
    """Metrics of the held-out data after the update, each a separate field, such as eval_loss; empty = none."""

    def numbers(self) -> dict[str, float | None]:
        """Return the numbers of the whole run and the metrics by name: None for values that are not finite."""
        numbers = self._asdict() | dict(self.evaluation)
        del numbers["evaluation"], numbers["ranks"]
        return {name: _finite(value) for name, value in numbers.items()}

    def fields(self) -> dict[str, object]:
        """Return the fields of the record by name, JSON values; `StepRecord(**fields)` is the record."""
        return self._asdict() | {"ranks": dict(self.ranks), "evaluation": dict(self.evaluation)}

    def line(self) -> dict[str, object]:
        """Return the fields of the line, JSON values."""
        return self.numbers() | ({"ranks": dict(self.ranks)} if self.ranks else {})


class RunEvent(NamedTuple):
    """Something that happens between steps: a line of metrics.jsonl of its own."""

    name: str
    after_step: int
    """Number of completed optimizer steps."""
    text: str
    """A sentence for the user."""
    fields: Mapping[str, object]
    """Further fields of the line, JSON values."""

    def line(self) -> dict[str, object]:
        """Return the fields of the line."""
        return {"event": self.name, "after_step": self.after_step, **self.fields}


class Sink(Protocol):
    """A destination of records and notes."""

    def log(self, record: StepRecord) -> None:
        """Write the record of a step."""
        ...

    def note(self, text: str) -> None:
        """Write a sentence for the user."""
        ...

    def event(self, event: RunEvent) -> None:
        """Write an event."""
        ...

    def close(self, *, failed: bool) -> None:
        """Write what is buffered and close. failed: whether an error ended the run."""
        ...


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
