"""The protocol of an area: one kind of input or fault, and the law that its cases must obey."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, Protocol


class Outcome(NamedTuple):
    """Legal end of a case."""

    verdict: Literal["accepted", "refused"]
    text: str = ""
    """The sentence with which the input was refused."""
    row: tuple[str, ...] = ()
    """Results, in areas that print a row per case."""


ACCEPTED = Outcome("accepted")


class UnavailableError(Exception):
    """Raised by `Area.prepare` if this machine lacks what the area needs; the message names it."""


def _ignore(text: str) -> None:
    pass


@dataclass
class Case:
    """One case of an area. All that it does follows from `draw`, so that it can be repeated alone."""

    draw: random.Random
    directory: Path
    """Empty directory, the current one of the process, removed after the case."""
    number: int = 0
    report: Callable[[str], None] = field(default=_ignore, repr=False)

    def describe(self, change: str) -> None:
        """Record in one line what the case changes; before it takes effect, which may end the process."""
        self.report(change)


class Area(Protocol):
    """One kind of input or fault."""

    deadline_s: ClassVar[float]
    """Maximum duration of a case, seconds; a longer one counts as a hang."""
    memory_bytes: ClassVar[int]
    """Maximum memory that a process of a case may allocate, bytes."""

    @classmethod
    def prepare(cls, directory: Path) -> None:
        """Write what all cases share into an empty directory, once. Raises UnavailableError."""
        ...

    def __init__(self, directory: Path) -> None:
        """Load what all cases of a process share; directory: as written by `prepare`."""
        ...

    def run(self, case: Case) -> Outcome:
        """Run a case. Whatever it raises is a failure of the project."""
        ...
