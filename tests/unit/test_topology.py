"""Laws of the grid of replicas x stages, and of the launch environment."""

from __future__ import annotations

import pytest

from acsgd.launch import Launch
from acsgd.topology import Topology

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize("environment", [TORCHRUN, {}, {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}])
def test_a_launch_is_read_from_the_environment(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    numbers = (5, 1, 8) if environment else (0, 0, 1)
    assert Launch.from_env() == Launch(*numbers, under_torchrun=environment == TORCHRUN)


def test_an_environment_that_torchrun_did_not_make_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "x")
    with pytest.raises(SystemExit, match="2"):
        Launch.from_env()
    assert capsys.readouterr().err == "error: RANK=x in the environment is not a number; start with torchrun\n"


@pytest.mark.parametrize(("world_size", "stages"), [(1, 1), (4, 1), (4, 2), (4, 4), (6, 3), (12, 4)])
def test_every_rank_has_one_position_and_is_among_its_peers(world_size: int, stages: int) -> None:
    grid = [Topology(rank, world_size, stages) for rank in range(world_size)]
    assert len({(t.replica, t.stage_rank) for t in grid}) == world_size
    for t in grid:
        assert t.replicas * stages == world_size
        assert t.rank in t.pipeline(t.replica)
        assert t.rank in t.peers(t.stage_rank)
        assert t.pipeline(t.replica)[t.stage_rank] == t.peers(t.stage_rank)[t.replica] == t.rank


def test_neighbours_in_a_pipeline_are_adjacent_ranks() -> None:
    assert Topology(0, 8, 4).pipeline(1) == [4, 5, 6, 7]
    assert Topology(0, 8, 4).peers(1) == [1, 5]


@pytest.mark.parametrize(("world_size", "stages", "advice"), [(1, 2, "--nproc-per-node 2"), (4, 3, "1 or 2 or 4")])
def test_stages_must_divide_the_world(world_size: int, stages: int, advice: str) -> None:
    with pytest.raises(ValueError, match=f"pp.stages={stages} does not divide") as error:
        Topology(0, world_size, stages)
    assert advice in str(error.value)
