"""Area "internet": an elastic run over five places of an internet, whose hosts come and go with disks of their own."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from benchmarks.common import netlab
from benchmarks.runs import internet
from tests.lib import scenes
from tests.soak.area import Case, Outcome, UnavailableError

EVENTS = 40
COLUMNS = ("events", "steps", "views", "loss difference", "fetched", "refused")


class Internet:
    """One run per case, as of `benchmarks.runs.internet`."""

    deadline_s: ClassVar[float] = 3600.0
    memory_bytes: ClassVar[int] = 2**40

    @classmethod
    def prepare(cls, directory: Path) -> None:
        """Write the inputs. Raises UnavailableError if this machine or user cannot create the network."""
        try:
            netlab.check(needs_tun=True, needs_nat=True)
        except RuntimeError as error:
            raise UnavailableError(str(error)) from None
        scenes.prepare(directory)

    def __init__(self, directory: Path) -> None:
        self._inputs = directory

    def run(self, case: Case) -> Outcome:
        done = internet.run(case.directory, self._inputs, case.draw, EVENTS, case.describe).figures
        numbers = (EVENTS, done["steps"], done["views"], f"{done['loss difference']:.1e}", done["fetched"])
        return Outcome("accepted", row=(*map(str, numbers), str(done["refused"])))
