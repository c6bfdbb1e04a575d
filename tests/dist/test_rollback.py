"""Law: a run continues after a spoiled batch as if that batch had never been learned from."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from lib.disturbed import (
    STEPS,
    Outcome,
    Plan,
    assert_same_end,
    checkpoints_of,
    end_of,
    make_config,
    progress_of,
    records_of,
    run_ranks,
)
from lib.models import DROPOUT
from lib.ranks import on_ranks

from acsgd.config.options import Config
from acsgd.io.checkpoint.progress import RECENT

FACTOR = 1.2
"""Spike threshold."""
SPIKES = (18, 19, 21)
RUN = [*range(19), *range(10, 20), *range(10, 22), *range(20, STEPS)]
"""Steps in the order in which they run with these spikes and checkpoints after 10 and 20 steps."""
AGAIN = [*range(19), *range(10, 20), *range(10, 22), *range(10, STEPS)]
"""The same if the checkpoint after 20 steps is not valid."""
SHORT = 8
"""Number of steps of the runs with NaN."""
NAN_STEP = 5
MODULE = "transformer.h.1.mlp.c_fc"
"""The module of the last stage whose output is NaN."""
SCALED = 16
"""Number of steps of the runs in fp16."""
TOO_LARGE = 2.0**24
"""A loss scale with which fp16 gradients overflow."""

TinyModel = Callable[..., Path]


class Runs(NamedTuple):
    """Runs by name, all in the same processes, with what each rank observed."""

    configs: dict[str, Config]
    outcomes: dict[str, list[Outcome]]


@pytest.fixture(scope="module")
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("gpt2", **DROPOUT, n_layer=2, n_embd=16)


@pytest.fixture(scope="module")
def runs_of(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[int, int]], Runs]:
    """Return a function that runs all plans on a topology, stages and replicas, once."""

    @cache
    def run_all(topology: tuple[int, int]) -> Runs:
        (stages, replicas), directory = topology, tmp_path_factory.mktemp("rollback")
        last = stages * replicas - 1

        def config(name: str, **options: Any) -> Config:
            return make_config(model, directory / name, stages=stages, **options)

        plans = {
            "whole": Plan(config("whole", steps=SHORT, every="2")),
            "nan": Plan(config("nan", steps=SHORT, every="2"), nan=(NAN_STEP, last, MODULE)),
            "nan skipped": Plan(config("nan-skipped", steps=SHORT, on_nan="skip"), nan=(NAN_STEP, last, MODULE)),
            "step skipped": Plan(config("step-skipped", steps=SHORT), skipped=frozenset({NAN_STEP})),
            "overflowing": Plan(config("overflowing", dtype="fp16", steps=SCALED, loss_scale=TOO_LARGE)),
            "scaled down": Plan(config("scaled-down", dtype="fp16", steps=SCALED, loss_scale=1.0), skip_overflows_of=4),
        }
        return runs_on(stages * replicas, plans, directory)

    return run_all


@pytest.fixture(
    params=[
        pytest.param((2, 1), id="two stages", marks=pytest.mark.soak),
        pytest.param((1, 2), id="two replicas"),
    ]
)
def runs(request: pytest.FixtureRequest, runs_of: Callable[[tuple[int, int]], Runs]) -> Runs:
    return runs_of(request.param)


@pytest.mark.parametrize(
    "topology", [(1, 1), *(pytest.param(each, marks=pytest.mark.soak) for each in ((2, 1), (1, 2)))]
)
def test_a_spike_restores_the_checkpoint_and_skips_the_batch(
    topology: tuple[int, int], alone: Runs, model: Path, tmp_path: Path
) -> None:
    runs = alone if topology == (1, 1) else spiking_runs(topology, model, tmp_path)
    spiking, skipping = runs.configs["spiking"], runs.configs["skipping"]
    for outcome in runs.outcomes["spiking"]:
        assert [step.step for step in outcome.steps] == RUN
    for outcome in runs.outcomes["skipping"]:
        assert [step.step for step in outcome.steps] == list(range(STEPS))
    assert_same_end(spiking, skipping)
    assert records_of(spiking)[-1]["skipped"] == len(SPIKES)
    notes = [note for note in runs.outcomes["spiking"][0].notes if "is a spike" in note]
    for note, spike, restored in zip(notes, SPIKES, (10, 10, 20), strict=True):
        assert note.startswith(f"step {spike + 1}: loss ")
        assert f"restored {checkpoints_of(spiking).of(restored)}" in note


def spiking_runs(topology: tuple[int, int], model: Path, tmp_path: Path) -> Runs:
    """Run with spikes on some stages and replicas, and with their steps skipped."""
    (stages, replicas), spikes = topology, frozenset(SPIKES)
    options: dict[str, Any] = {"stages": stages, "dtype": "bf16" if replicas == 2 else "fp32"}
    plans = {
        "spiking": Plan(make_config(model, tmp_path / "runs" / "spiking", spike=FACTOR, **options), garbled=spikes),
        "skipping": Plan(make_config(model, tmp_path / "runs" / "skipping", **options), garbled=spikes, skipped=spikes),
    }
    return runs_on(stages * replicas, plans, tmp_path)


def runs_on(world_size: int, plans: dict[str, Plan], directory: Path) -> Runs:
    """Run plans in the same processes."""
    by_rank = on_ranks(world_size, run_ranks, directory / "store", list(plans.values()))
    outcomes = {name: list(each) for name, each in zip(plans, zip(*by_rank, strict=True), strict=True)}
    return Runs({name: plan.config for name, plan in plans.items()}, outcomes)


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs of one process."""
    directory, spikes, first = tmp_path_factory.mktemp("rollback"), frozenset(SPIKES), frozenset({18})

    def config(name: str, **options: Any) -> Config:
        return make_config(model, directory / name, **{"spike": FACTOR} | options)

    plans = {
        "spiking": Plan(config("spiking"), garbled=spikes),
        "skipping": Plan(config("skipping", spike=None), garbled=spikes, skipped=spikes),
        "interrupted": Plan(config("interrupted"), garbled=spikes, interrupted=spikes),
        "invalid": Plan(config("invalid"), garbled=spikes, invalid=frozenset({20})),
        "early": Plan(config("early"), garbled=frozenset({RECENT - 1})),
        "gone": Plan(config("gone"), garbled=first, gone=frozenset({10})),
    }
    return runs_on(1, plans, directory)


def test_a_view_that_ends_before_the_checkpoint_is_restored_learns_nothing_from_the_spike(alone: Runs) -> None:
    assert [step.step for step in alone.outcomes["interrupted"][0].steps] == RUN
    assert_same_end(alone.configs["interrupted"], alone.configs["spiking"])


def test_a_spike_that_is_too_early_or_has_no_checkpoint_before_it_is_learned(alone: Runs) -> None:
    for name in ("early", "gone"):
        (outcome,) = alone.outcomes[name]
        assert [step.step for step in outcome.steps] == list(range(STEPS))
        assert all(step.updated for step in outcome.steps)
    assert any(
        note.startswith("step 19: ") and note.endswith("no valid checkpoint to restore: training continues")
        for note in outcome.notes
    )


def test_a_rollback_passes_over_a_checkpoint_that_is_not_valid(alone: Runs) -> None:
    (outcome,), directory = alone.outcomes["invalid"], checkpoints_of(alone.configs["invalid"])
    assert [step.step for step in outcome.steps] == AGAIN
    (passed_over,) = [note for note in outcome.notes if note.startswith("passed over a checkpoint: ")]
    assert f"{directory.of(20) / 'head.safetensors'} is invalid: " in passed_over
    assert f"; restored {directory.of(10)}, will skip this batch" in outcome.notes[outcome.notes.index(passed_over) + 1]


@pytest.mark.soak
def test_learning_from_the_spike_would_have_mattered_and_false_alarms_do_nothing(model: Path, tmp_path: Path) -> None:
    """The runs that are compared above do not agree for lack of a spike."""
    plans = [
        Plan(make_config(model, tmp_path / "runs" / "learned"), garbled=frozenset({18})),
        Plan(make_config(model, tmp_path / "runs" / "skipped"), garbled=frozenset({18}), skipped=frozenset({18})),
        Plan(make_config(model, tmp_path / "runs" / "calm", spike=FACTOR)),
        Plan(make_config(model, tmp_path / "runs" / "early", spike=FACTOR), garbled=frozenset({RECENT - 1})),
        Plan(make_config(model, tmp_path / "runs" / "unsaved", spike=FACTOR, every="20"), garbled=frozenset({18})),
        Plan(
            make_config(model, tmp_path / "runs" / "gone", spike=FACTOR), garbled=frozenset({18}), gone=frozenset({10})
        ),
    ]
    (outcomes,) = on_ranks(1, run_ranks, tmp_path / "store", plans)
    learned, skipped = (plan.config for plan in plans[:2])
    losses = [record["loss"] for record in records_of(learned)]
    assert losses[18] > FACTOR * sum(losses[2:18]) / RECENT
    assert end_of(learned).layers != end_of(skipped).layers
    for number in (2, 3, 4, 5):  # no spike; too early to be measured; no checkpoint to restore, or none any more
        assert [step.step for step in outcomes[number].steps] == list(range(STEPS))
        assert all(step.updated for step in outcomes[number].steps)
    assert_same_end(plans[5].config, learned)
    assert any(
        note.startswith("step 19: ") and note.endswith("no valid checkpoint to restore: training continues")
        for note in outcomes[5].notes
    )


@pytest.mark.soak
def test_a_rollback_takes_the_newest_valid_checkpoint(model: Path, tmp_path: Path) -> None:
    """Of two stages only one reads the layer that is invalid; both take the same checkpoint."""
    spikes, runs = frozenset(SPIKES), tmp_path / "runs"
    plans = [
        Plan(make_config(model, runs / "skipping", stages=2), garbled=spikes, skipped=spikes),
        Plan(make_config(model, runs / "invalid", stages=2, spike=FACTOR), garbled=spikes, invalid=frozenset({20})),
    ]
    by_rank = on_ranks(2, run_ranks, tmp_path / "store", plans)
    invalid = plans[1].config
    for outcomes in by_rank:
        assert [step.step for step in outcomes[1].steps] == AGAIN
    assert_same_end(invalid, plans[0].config)
    notes = by_rank[0][1].notes
    (passed_over,) = [note for note in notes if note.startswith("passed over a checkpoint: ")]
    assert f"{checkpoints_of(invalid).of(20) / 'head.safetensors'} is invalid: " in passed_over
    assert f"; restored {checkpoints_of(invalid).of(10)}, will skip this batch" in notes[notes.index(passed_over) + 1]


def test_a_save_in_progress_is_completed_before_nan_ends_the_run(model: Path, tmp_path: Path) -> None:
    nan = (NAN_STEP, 1, MODULE)
    config = make_config(model, tmp_path / "runs" / "run", stages=2, steps=SHORT, every="4")
    outcomes = on_ranks(2, run_ranks, tmp_path / "store", [Plan(config, nan=nan, saves_after_nan=True)])
    for (outcome,) in outcomes:
        assert outcome.error is not None
        assert outcome.saved == [4]
    assert any(note.startswith(f"saved {checkpoints_of(config).of(4)}") for note in outcomes[0][0].notes)


def test_nan_ends_the_run_names_its_origin_and_leaves_checkpoints_alone(runs: Runs) -> None:
    outcomes, whole = runs.outcomes["nan"], runs.configs["whole"]
    world_size, stages = len(outcomes), runs.configs["nan"].pp.stages
    replicas = world_size // stages
    samples = outcomes[-1].steps[NAN_STEP].samples[0]
    for outcome in outcomes:
        assert [step.step for step in outcome.steps] == list(range(NAN_STEP + 1))
        error = outcome.error
        assert error is not None
        assert error.startswith(f"step {NAN_STEP + 1}: loss nan, gradient norm nan; first in output of {MODULE} (nan; ")
        micro = 0 if replicas == 1 else 1
        assert f"(nan; forward, stage {stages - 1}, micro-batch {micro}), samples {samples};" in error
        assert error == outcomes[0].error, "all ranks raise the same"
    directory, expected = checkpoints_of(runs.configs["nan"]), checkpoints_of(whole)
    assert directory.steps() == [2, 4]
    for step in directory.steps():
        files = {path.name: path.read_bytes() for path in directory.of(step).iterdir()}
        assert files == {path.name: path.read_bytes() for path in expected.of(step).iterdir()}


def test_a_run_that_nan_ended_resumes_to_the_same_weights(runs: Runs, tmp_path: Path) -> None:
    config = runs.configs["nan"]
    on_ranks(len(runs.outcomes["nan"]), run_ranks, tmp_path / "store", [Plan(config)])
    assert end_of(config).layers == end_of(runs.configs["whole"]).layers


def test_nan_is_skipped_and_counted_if_asked_for(runs: Runs) -> None:
    nan, simple = runs.configs["nan skipped"], runs.configs["step skipped"]
    for outcome in runs.outcomes["nan skipped"]:
        assert [step.updated for step in outcome.steps] == [step != NAN_STEP for step in range(SHORT)]
    records = records_of(nan)
    assert [record["skipped"] for record in records] == [0] * NAN_STEP + [1] * (SHORT - NAN_STEP)
    assert (records[NAN_STEP]["loss"], records[NAN_STEP]["grad_norm"]) == (None, None)
    pairs = [(one["loss"], other["loss"]) for one, other in zip(records, records_of(simple), strict=True)]
    assert all(one == other for one, other in pairs[:NAN_STEP] + pairs[NAN_STEP + 1 :])
    assert end_of(nan).layers == end_of(simple).layers
    assert progress_of(nan) == progress_of(simple)


def test_an_fp16_overflow_halves_the_scale_and_skips_one_update(runs: Runs) -> None:
    outcomes, config, simple = runs.outcomes["overflowing"], runs.configs["overflowing"], runs.configs["scaled down"]
    steps = [step._replace(samples=[]) for step in outcomes[0].steps]
    for outcome in outcomes:
        assert [step._replace(samples=[]) for step in outcome.steps] == steps, "all ranks alike"
    scale = TOO_LARGE
    for step, after in zip(steps, [*steps[1:], None], strict=True):
        assert step.scale == scale
        scale = scale if step.updated else scale / 2
        assert after is None or after.scale == scale
    overflows = [step.step for step in steps if not step.updated]
    assert overflows, "nothing overflowed"
    assert len(overflows) < SCALED - 4, "training continues"
    records = records_of(config)
    assert [record["skipped"] for record in records] == [
        sum(overflow <= step for overflow in overflows) for step in range(SCALED)
    ]
    assert all(record["loss"] is not None for record in records), "the loss itself is finite"
    assert [record["grad_norm"] is None for record in records] == [not step.updated for step in steps]
    # the same as skipping the first updates at a small scale
    first = next(step.step for step in steps if step.updated)
    assert {step.scale for step in runs.outcomes["scaled down"][0].steps[:first]} == {1.0}
    assert end_of(config).layers == end_of(simple).layers
    assert [record["loss"] for record in records] == [record["loss"] for record in records_of(simple)]
