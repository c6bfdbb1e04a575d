"""Area "faults": each fault that an elastic run must survive, once, at an exact point. Prints a row for each."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from tests.lib import scenes
from tests.lib.elastic_faults import SCENARIOS, draw_run, inject
from tests.soak.area import Case, Outcome


class Faults:
    """One scenario per case, in the order of the table; after the last one again, with other modes and shapes."""

    deadline_s: ClassVar[float] = 600.0
    memory_bytes: ClassVar[int] = 2**40

    @classmethod
    def prepare(cls, directory: Path) -> None:
        scenes.prepare(directory)

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def run(self, case: Case) -> Outcome:
        turn, index = divmod(case.number, len(SCENARIOS))
        name = list(SCENARIOS)[index]
        case.describe(name)
        row = inject(name, case.directory, self._directory, *draw_run(name, turn))
        return Outcome("accepted", row=tuple(row.cells()))
