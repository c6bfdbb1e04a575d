"""Runs that pause for the next view of an elastic run: what is saved if ranks leave then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from lib.forks import checkpoints_of, finish, make_config, save_model, started

from acsgd import train
from acsgd.config.options import CheckpointConfig, Config
from acsgd.elastic.control import Control
from acsgd.elastic.hooks import JOINS, PAUSE, STOPS, BackgroundJoin, Pause, needs_checkpoint
from acsgd.failures.signals import StopSignals
from acsgd.io.checkpoint.progress import Progress
from acsgd.layers.batch import Batch
from acsgd.optim.ownership import Ownership
from acsgd.run.lock.lock import RunLock
from acsgd.run.report import LOSS, StepSummary
from acsgd.run.session import Session, StepResult
from acsgd.run.setup.inputs import RunInputs
from acsgd.run.setup.resume import Start
from acsgd.run.step.checkpointing import Checkpointing
from acsgd.run.step.hooks import LoopState, StepHook
from acsgd.run.step.run import STOP, TrainingRun
from acsgd.topology import Topology

STEPS, PAUSED = 6, 4
"""Steps of the run; steps before the pause."""


def pause(rank: int, leaving: Sequence[int]) -> None:
    """Let this rank pause after PAUSED steps, and before that receive a stop signal if it leaves."""
    open_run, run_steps, train_step = train.open_run, train.run_steps, train.train_step
    control, received = SimpleNamespace(pause_requested=False), list[StopSignals]()

    def opened(begin: Start, inputs: RunInputs, lock: RunLock, signals: StopSignals, *args: Any) -> Any:
        received.append(signals)

        def extra(checkpointing: Checkpointing) -> list[StepHook]:
            pause = Pause(cast(Control, control), checkpointing, begin.session.owned.ownership, STEPS)
            return [BackgroundJoin(begin.session, None, 0), pause]

        return open_run(begin, inputs, lock, signals, *args, stops=STOPS, extra=extra)

    def paused_run_steps(run: TrainingRun) -> None:
        run_steps(run)
        assert (run.state.progress.step, run.state.is_paused, run.state.is_stopped) == (PAUSED, True, False)

    def disturbed_step(session: Session, batch: Batch, before: Progress, *args: Any, **options: Any) -> StepResult:
        result = train_step(session, batch, before, *args, **options)
        if result.progress.step == PAUSED - 1:  # the signal comes first: the pause is its result
            control.pause_requested = True
            received[0].received = "SIGINT" if rank in leaving else None
        return result

    train.open_run, train.run_steps, train.train_step = opened, paused_run_steps, disturbed_step


def paused(directory: Path, processes: int, leaving: Sequence[int]) -> tuple[Config, list[str]]:
    """Train until the pause on two stages; return the config, and what rank 0 has printed."""
    model = save_model(directory / "model")
    config = make_config(
        model, directory / "run", processes=processes, steps=STEPS, checkpoint=CheckpointConfig(every=str(STEPS))
    )
    with started(config, processes, setup=partial(pause, leaving=leaving), fsync_s=0.01) as run:
        assert run.join() == [0] * processes, run.stderr
        return config, run.notes()


@pytest.mark.parametrize(
    ("leaving", "pauses", "expected"),
    [([0, 3], True, False), ([0, 2], True, True), ([0, 2], False, False), ([1, 2, 3], True, True), ([], True, False)],
)
def test_a_checkpoint_is_needed_if_only_those_who_leave_hold_a_stage(
    leaving: Sequence[int], pauses: bool, expected: bool
) -> None:
    """2 stages x 2 replicas: ranks 0 and 2 have the first stage. Who joins has none of it yet."""
    for field, other in ((STOP, JOINS), (JOINS, STOP)):
        reports = [
            {LOSS: 0.0, field: float(rank in leaving), other: 0.0, PAUSE: float(pauses and rank == 1)}
            for rank in range(4)
        ]
        assert needs_checkpoint(StepSummary.of(reports, Topology.of(0, 4, 2)), [range(2)]) == expected


@pytest.mark.parametrize(("leaving", "expected"), [([0, 1], False), ([0, 2], True), ([1, 2], False)])
def test_a_checkpoint_is_needed_if_only_those_who_leave_hold_a_part(leaving: Sequence[int], expected: bool) -> None:
    """2 domains x 2 replicas that divide the state: 0 and 2 have the first part."""
    reports = [{LOSS: 0.0, STOP: float(rank in leaving), JOINS: 0.0, PAUSE: 1.0} for rank in range(4)]
    holders = Ownership(3, 4, (), domains=((0, 1), (2, 3))).holders
    assert needs_checkpoint(StepSummary.of(reports, Topology.of(0, 4, 1)), holders) == expected


@pytest.mark.parametrize("pauses", [False, True])
def test_a_view_begins_with_reports_of_fewer_replicas(pauses: bool) -> None:
    """A step that 2 replicas have left open is closed by 4; what the 2 have reported is none of the 4's pauses."""
    old, new = (
        StepSummary.of([{LOSS: 0.0, STOP: 1.0, JOINS: 0.0, PAUSE: is_asked}] * replicas, Topology.of(0, replicas, 1))
        for replicas, is_asked in ((2, float(pauses)), (4, 1.0))
    )
    state, control = LoopState(Progress(), old, is_open=True), SimpleNamespace(pause_requested=False)
    checkpointing = cast(Checkpointing, SimpleNamespace(is_saving=False))
    for ownership in (Ownership(0, 4), Ownership(3, 4, (), domains=((0, 1), (2, 3)))):
        hook = Pause(cast(Control, control), checkpointing, ownership, STEPS, before=old)
        state.summary, state.save_is_due = old, False
        hook.after_step(state)
        assert not state.save_is_due
        assert pauses or not needs_checkpoint(old, ownership.holders)
        state.summary = new
        hook.after_step(state)
        assert state.save_is_due


@pytest.mark.soak
def test_a_pause_saves_nothing_if_some_who_stay_hold_each_stage(tmp_path: Path) -> None:
    """Ranks 0 and 2 have the first stage."""
    config, _ = paused(tmp_path, 4, leaving=(0, 3))
    assert checkpoints_of(config).steps() == []


@pytest.mark.soak
def test_no_step_is_lost_if_all_holders_of_a_stage_leave(tmp_path: Path) -> None:
    config, notes = paused(tmp_path / "paused", 2, leaving=(0,))
    assert notes[-1].startswith("saved "), "the pause has not waited for the save"
    assert checkpoints_of(config).steps() == [PAUSED]
    calm = replace(config, log=replace(config.log, dir=str(tmp_path / "calm")))
    assert finish(config, 2) == finish(calm, 2)
