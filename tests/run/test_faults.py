"""Some of the faults that an elastic run must survive, at exact points. All: `python -m tests.soak --areas faults`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lib import scenes
from tests.lib.elastic_faults import inject
from tests.lib.scenes import SHAPES

SELECTION = {
    "host dies, row sent to one only": ("1x3", "allreduce"),
    "coordinator dies, view recorded": ("1x3", "allreduce"),
    "receiver of a copy dies": ("1x3", "allreduce"),
    "SIGTERM during a change": ("2x2", "allreduce"),
}
"""Shape and mode of each."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("inputs")
    scenes.prepare(directory)
    return directory


@pytest.mark.parametrize("fault", SELECTION)
def test_a_run_survives(fault: str, inputs: Path, tmp_path: Path) -> None:
    shape, mode = SELECTION[fault]
    row = inject(fault, tmp_path, inputs, SHAPES[shape], mode)
    assert row.step_s is not None
    print(" | ".join(row.cells()))
