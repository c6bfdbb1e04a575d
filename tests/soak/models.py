"""Area "models": a model of any type of `lib.model_types`, divided at random. Law: the run is that of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from tests.lib.model_types import TYPES
from tests.lib.typed_runs import Runs, assert_equal, oracle, splits
from tests.soak.area import ACCEPTED, Case, Outcome

SPECIAL: dict[str, dict[str, Any]] = {
    "": {},
    "recompute": {"model.recompute": "layers"},
    "micro-batches of 1": {"pp.micro": 1},
    "micro-batches of 3": {"pp.micro": 3},
    "padded rows": {"data.rows": "single"},
}
"""Options of a run, by name."""


class Models:
    """A small model of a type on two or four ranks. The first cases are all types in order."""

    deadline_s: ClassVar[float] = 600.0
    memory_bytes: ClassVar[int] = 2**40

    @classmethod
    def prepare(cls, directory: Path) -> None:
        """Nothing is shared."""

    def __init__(self, directory: Path) -> None:
        """Nothing is shared."""

    def run(self, case: Case) -> Outcome:
        types = [*TYPES]
        model_type = types[case.number] if case.number < len(types) else case.draw.choice(types)
        split = case.draw.choice([*splits(model_type)])
        special = case.draw.choice([*SPECIAL])
        case.describe(f"{model_type}, {split}, {special}")
        runs = Runs(case.directory)
        config = runs.add(model_type, split, special, **SPECIAL[special])
        for ranks in (2, 4):
            runs.train(ranks)
        assert_equal(config, oracle(config))
        return ACCEPTED
