"""Laws of the grid of replicas x stages, and of the launch environment."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

import pytest

from acsgd.config.options import PipelineConfig
from acsgd.launch import Launch, refuse_several_processes
from acsgd.run.plan.partition import topology_of
from acsgd.run.setup.choices import DEFAULTS
from acsgd.topology import Axis, Topology

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


@pytest.mark.parametrize(
    ("size", "rank", "start"),
    [
        ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", Launch.from_env),
        ("FLUX_JOB_SIZE", "FLUX_TASK_RANK", Launch.from_env),
        ("PMI_SIZE", "PMI_RANK", lambda: refuse_several_processes("acsgd generate")),
    ],
)
def test_processes_of_a_job_without_torchrun_are_refused_once(
    size: str,
    rank: str,
    start: Callable[[], object],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    for tasks, number, errors in (("1", "0", 0), ("4", "0", 1), ("4", "3", 0)):
        monkeypatch.setenv(size, tasks)
        monkeypatch.setenv(rank, number)
        with pytest.raises(SystemExit, match="2") if tasks == "4" else contextlib.nullcontext():
            start()
        assert capsys.readouterr().err.count("has started 4 processes, each would") == errors
    monkeypatch.setenv("RANK", "3")  # started by torchrun, which srun has started
    assert Launch.from_env().rank == 3


@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize(("world_size", "stages"), [(1, 1), (4, 1), (4, 2), (4, 4), (6, 3), (12, 4)])
def test_every_rank_has_one_position_and_is_among_its_peers(world_size: int, stages: int, is_ordered: bool) -> None:
    order = tuple(range(1, world_size, 2)) + tuple(range(0, world_size, 2)) if is_ordered else ()
    grid = [Topology.of(rank, world_size, stages, order) for rank in range(world_size)]
    assert len({(t.replica, t.stage_rank) for t in grid}) == world_size
    for t in grid:
        assert t.world_size == t.replicas * stages == world_size
        assert t.ranks_along("pipeline")[t.stage_rank] == t.ranks_along("replica")[t.replica] == t.rank


def test_neighbours_in_a_pipeline_are_adjacent_ranks() -> None:
    topology = Topology.of(5, 8, 4)
    assert topology.ranks_along("pipeline") == [4, 5, 6, 7]
    assert topology.ranks_along("replica") == [1, 5]
    assert topology.lines("pipeline") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert topology.lines("replica") == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_hosts_change_places_with_all_of_their_ranks() -> None:
    config = dataclasses.replace(DEFAULTS, pp=PipelineConfig(stages=4, hosts=(2, 0, 3, 1)))
    topology = topology_of(config, Launch(5, 1, 8, local_world_size=2))
    assert topology.lines("pipeline") == [[4, 5, 0, 1], [6, 7, 2, 3]]
    assert topology.lines("replica") == [[4, 6], [5, 7], [0, 2], [1, 3]]
    assert (topology.replica, topology.stage_rank) == (0, 1)


def test_any_number_of_axes_makes_a_grid() -> None:
    sizes: dict[Axis, int] = {"replica": 2, "shard": 3, "pipeline": 2}
    grid = [Topology(rank, sizes) for rank in range(12)]
    assert len({tuple(t.index(axis) for axis in sizes) for t in grid}) == 12
    assert grid[9].ranks_along("shard") == [7, 9, 11]
    assert grid[9].ranks_along("context") == [9]
    for axis in sizes:
        assert sorted(rank for line in grid[0].lines(axis) for rank in line) == [*range(12)]
        for t in grid:
            line = t.ranks_along(axis)
            assert line in t.lines(axis)
            assert line[t.index(axis)] == t.rank
            others = [each for each in sizes if each != axis]
            assert {tuple(grid[rank].index(each) for each in others) for rank in line} == {
                tuple(t.index(each) for each in others)
            }


@pytest.mark.parametrize(("world_size", "stages", "advice"), [(1, 2, "--nproc-per-node 2"), (4, 3, "1 or 2 or 4")])
def test_stages_must_divide_the_world(world_size: int, stages: int, advice: str) -> None:
    with pytest.raises(ValueError, match=f"pp.stages={stages} does not divide") as error:
        Topology.of(0, world_size, stages)
    assert advice in str(error.value)
