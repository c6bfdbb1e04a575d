"""Laws of pp.schedule=auto: what is taken is what the simulator finds the shortest, by hand where it is simple."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from acsgd.config.options import Config
from acsgd.config.spec import from_spec
from acsgd.launch import Launch
from acsgd.pp.schedules.lowering import lower
from acsgd.pp.schedules.schedules import CANDIDATES, SCHEDULES
from acsgd.pp.schedules.simulate import Cost, simulate
from acsgd.run.plan.choose import GAIN, SPLIT, MeasuredRanks, timed_schedules
from acsgd.run.plan.job import prepare
from acsgd.run.plan.model import describe_run_model
from acsgd.run.plan.partition import Partition, divide_model, open_grid
from acsgd.run.plan.rates import LayerTimes, LinkRate
from acsgd.run.setup import measured
from acsgd.streams import open_streams
from tests.lib.training import make_config

SIZES = {"num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 192}
"""8 layers with the embedding and the head."""


@pytest.fixture
def config(tiny_model: Callable[..., Path], tmp_path: Path) -> Config:
    plain = make_config(tiny_model("llama", **SIZES), tmp_path, stages=4, schedule="auto")
    return replace(plain, data=replace(plain.data, batch=8))


def divided(config: Config) -> Partition:
    grid = open_grid(config, Launch(0, 0, config.pp.stages))
    return divide_model(config, grid, describe_run_model(config), open_streams("cpu", 0))


def ranks(stages: int, link: LinkRate, *, layer_s: float = 1.0) -> MeasuredRanks:
    """Return alike ranks and links. layer_s: time of the forward of a layer, half of that of its backward."""
    pairs = [pair for rank in range(stages) for pair in ((rank, (rank + 1) % stages), ((rank + 1) % stages, rank))]
    return MeasuredRanks((LayerTimes("", (layer_s,) * 8, (2 * layer_s,) * 8),) * stages, dict.fromkeys(pairs, link))


FREE = LinkRate(float("inf"))


@pytest.mark.parametrize("link", [FREE, LinkRate(1e9, 0.5), LinkRate(1e9, 3.0), LinkRate(20e3, 0.1)])
def test_no_other_schedule_makes_a_shorter_step(link: LinkRate, config: Config) -> None:
    """Each is simulated anew, with stages of two layers, or chunks of one, and split backwards that take longer."""
    found = timed_schedules(divided(config), ranks(4, link))
    times = {}
    message = 48 + config.data.sequence * 64 * 4
    for spec in CANDIDATES:
        schedule: Any = from_spec(spec, SCHEDULES, key="")
        layers = 2 / schedule.chunks
        sent = message / link.bytes_per_s
        cost = Cost(layers, 2 * layers * (SPLIT if "zb" in spec else 1), sent, sent, link.delay_s)
        times[spec] = float(simulate(lower(schedule.program(4, 8)), cost).makespan)
    assert {each.schedule: each.step_s for each in found} == pytest.approx(times)
    shortest = min(times.values())
    near = [spec for spec in CANDIDATES if times[spec] <= GAIN * shortest]
    assert found[0].schedule == near[0], "of those that are as short, the one with the fewest activations"


def test_a_choice_depends_on_the_links(config: Config) -> None:
    partition = divided(config)
    chosen = {timed_schedules(partition, ranks(4, link))[0].schedule for link in (FREE, LinkRate(1e9, 3.0))}
    assert len(chosen) == 2
    assert "1f1b" not in chosen


def test_schedules_that_other_options_do_not_allow_are_left_out(config: Config) -> None:
    whole = replace(config, model=replace(config.model, recompute="layers"))
    found = timed_schedules(divided(whole), ranks(4, FREE))
    assert {each.schedule for each in found} == {"1f1b", "1f1b:lead=2", "interleaved:chunks=2"}
    for given in ({"layers": (1, 2, 2, 1)}, {"compress": "auto", "forward": "1=none"}):  # which count the stages
        found = timed_schedules(divided(replace(config, pp=replace(config.pp, **given))), ranks(4, FREE))
        assert {each.schedule for each in found} == {"1f1b", "1f1b:lead=2", "zb", "zb:lead=2"}


def test_a_schedule_is_taken_that_fits_all_ranks(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    job: Any = prepare(config, Launch(0, 0, 4))
    timed = timed_schedules(job, ranks(4, FREE))
    assert timed[0].schedule != "1f1b"

    def taken(fits: Callable[[str], bool], of_other_rank: str = "fits") -> str:
        def check_fit(config: Config, *_: Any) -> None:
            if not fits(config.pp.schedule):
                raise ValueError

        groups: Any = SimpleNamespace(all_gather_text=lambda _, text, timeout_s: [text, of_other_rank])
        monkeypatch.setattr(measured, "check_fit", check_fit)
        return measured._first_fitting(timed, job, Launch(0, 0, 4), groups).schedule

    assert taken(lambda _: True) == timed[0].schedule
    assert taken(lambda schedule: schedule != timed[0].schedule) == timed[1].schedule
    assert taken(lambda _: True, of_other_rank="") == taken(lambda _: False) == "1f1b"
