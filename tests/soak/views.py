"""Area "views": random histories of the hosts of an elastic run, in a simulator of their membership."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from tests.lib.view_simulator import run_history
from tests.soak.area import ACCEPTED, Case, Outcome


class Views:
    """Hosts that are killed, paused, cut off and started again, with messages and records lost.

    Laws: no two views train at the same time, and once everything is healed, all hosts train together.
    """

    deadline_s: ClassVar[float] = 120.0
    memory_bytes: ClassVar[int] = 2**30

    @classmethod
    def prepare(cls, directory: Path) -> None:
        pass

    def __init__(self, directory: Path) -> None:
        pass

    def run(self, case: Case) -> Outcome:
        seed = case.draw.getrandbits(48)
        case.describe(f"history {seed}")
        run_history(seed)
        return ACCEPTED
