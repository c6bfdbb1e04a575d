"""Campaigns: runs that are interrupted at random moments and started again, compared with an undisturbed run.

The run is small, saves after every step, keeps two checkpoints and the best, and its disk is slow, so that most
interruptions happen during a save. Each start must resume from the newest checkpoint that the previous start left, all
of whose hashes must match, and remove the incomplete ones. A run that reaches its last step must have the weights,
moments, losses and best checkpoint of the undisturbed run; then a new run starts. SIGKILL is sent to all ranks, another
signal to some; then all ranks must exit with code 0 after a save of the last step.
"""

from __future__ import annotations

import dataclasses
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from acsgd.config.options import CheckpointConfig
from tests.lib.forks import POLL_S, StartedRun, checkpoints_of, finish, make_config, result_of, save_model, started

STEPS = 150
FSYNC_S = 0.003
MAX_SAVES = 5
"""Maximum number of checkpoints that a start completes before its interruption is due."""
MAX_DELAY_S = 0.1
"""Maximum time from then to the interruption, seconds."""
EARLY = 0.1
"""Fraction of the kills that may happen before training starts."""
AIMED = 0.4
"""Fraction of the kills that wait for a save in progress: how long saves and steps take depends on the machine."""


class Outcome(NamedTuple):
    """How one start ended, and what it left on disk."""

    phase: str
    """Moment of the interruption: "starting", "training", "saving", "removing" (an old checkpoint); "done" = none."""
    resumed_at: int | None
    """Step from which it resumed; None if it ended before training."""
    newest: int
    """Step of the newest complete checkpoint; 0 = none."""
    leftovers: list[str]
    """Names of partly written and partly removed checkpoints."""


@dataclass
class Campaign:
    """Starts of one run after another, each to be interrupted; makes the undisturbed run first."""

    directory: Path
    processes: int = 1
    signal: signal.Signals = signal.SIGKILL
    seed: int = 0
    steps: int = STEPS
    outcomes: list[Outcome] = field(default_factory=list)
    finished: int = 0
    """Runs that reached the last step and equalled the undisturbed run."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._startup_s = 0.5
        undisturbed = make_config(
            save_model(self.directory / "model"),
            self.directory / "undisturbed",
            processes=self.processes,
            steps=self.steps,
            checkpoint=CheckpointConfig(best="eval_loss"),
        )
        self.expected = finish(undisturbed, self.processes)
        self.config = dataclasses.replace(undisturbed, checkpoint=CheckpointConfig(every="1", keep=2, best="eval_loss"))
        self._use_new_run_dir()

    def run(self, interruptions: int) -> None:
        """Interrupt that many starts, then let the last run finish. Raises AssertionError if a law is broken."""
        for _ in range(interruptions + interruptions // 4 + 5):
            if self.interruptions < interruptions:
                self.interrupt(self.signal)
        assert self.interruptions == interruptions, "most runs finished before the signal"
        finish(self.config, self.processes)
        self._compare()

    @property
    def interruptions(self) -> int:
        """Number of starts that ended before their last step."""
        return sum(outcome.phase != "done" for outcome in self.outcomes)

    def interrupt(self, number: signal.Signals) -> None:
        """Start the run, send a signal at a random moment, and check from where it resumed and what it left."""
        before = self._inspect()
        with started(self.config, self.processes, fsync_s=FSYNC_S) as run:
            self._send_at_random_moment(run, number)
            codes = run.join()
        newest, leftovers = self._inspect()
        resumed_at, notes = run.resumed_at(), run.notes()
        if resumed_at is not None:
            check_resume(*before, resumed_at, notes)
        is_done = newest == self.steps and (codes == [0] * self.processes or notes[-1].startswith("done"))
        if number != signal.SIGKILL and not is_done:
            assert codes == [0] * self.processes, (codes, notes)
            assert notes[-1].startswith(f"stopped after step {newest} of "), notes[-3:]
            assert notes[-1].endswith(f"step-{newest:08d}"), notes[-1]
        self.outcomes.append(Outcome(_phase(is_done, resumed_at, leftovers), resumed_at, newest, leftovers))
        if is_done:
            self._compare()

    def _send_at_random_moment(self, run: StartedRun, number: signal.Signals) -> None:
        """Send the signal: SIGKILL to all ranks, sometimes before training; another to some ranks during training."""
        started_at = time.monotonic()
        if number == signal.SIGKILL and self._random.random() < EARLY:
            time.sleep(self._random.uniform(0, self._startup_s))
        else:
            run.wait_for_training()
            self._startup_s = time.monotonic() - started_at
            checkpoints = checkpoints_of(self.config)
            due = max(checkpoints.steps(), default=0) + self._random.randint(0, MAX_SAVES)
            while max(checkpoints.steps(), default=0) < min(due, self.steps) and run.processes[0].is_alive():
                time.sleep(POLL_S)
            if number == signal.SIGKILL and self._random.random() < AIMED:
                while not checkpoints.leftovers() and run.processes[0].is_alive():
                    time.sleep(POLL_S)
            else:
                time.sleep(self._random.uniform(0, MAX_DELAY_S))
        ranks = self._random.sample(range(self.processes), self.processes)
        run.send(number, ranks if number == signal.SIGKILL else ranks[: self._random.randint(1, self.processes)])

    def _inspect(self) -> tuple[int, list[str]]:
        """Return the step of the newest complete checkpoint, and the names of incomplete ones."""
        directory = checkpoints_of(self.config)
        assert not list(directory.path.glob("corrupt-*")), "a published checkpoint was corrupt"
        return max(directory.steps(), default=0), [path.name for path in directory.leftovers()]

    def _compare(self) -> None:
        """Compare a finished run with the undisturbed one, and prepare a new run."""
        assert result_of(self.config) == self.expected, f"{self.config.log.dir} differs from the undisturbed run"
        assert not self._inspect()[1], "a finished run left an incomplete checkpoint"
        self.finished += 1
        self._use_new_run_dir()

    def _use_new_run_dir(self) -> None:
        log = dataclasses.replace(self.config.log, dir=str(self.directory / f"run-{self.finished}"))
        self.config = dataclasses.replace(self.config, log=log)


def check_resume(newest: int, leftovers: list[str], resumed_at: int, notes: list[str]) -> None:
    """Check that a start resumed from the newest checkpoint, and reported each incomplete one that it removed."""
    assert resumed_at == newest, f"the newest checkpoint is of step {newest}, the run resumed at {resumed_at}: {notes}"
    for name in leftovers:
        assert any(note.startswith(f"removed {name}") for note in notes), (name, notes)


def summary(campaign: Campaign, seconds: float) -> dict[str, Any]:
    """Return counts of a campaign in which all checks passed, for JSON."""
    outcomes = campaign.outcomes
    phases = Counter(outcome.phase for outcome in outcomes)
    resumed_from = [outcome.resumed_at for outcome in outcomes if outcome.resumed_at]
    return {
        "signal": campaign.signal.name,
        "processes": campaign.processes,
        "seed": campaign.seed,
        "kills": campaign.interruptions,
        "phases": {phase: phases[phase] for phase in ("starting", "training", "saving", "removing")},
        "leftovers": sum(len(outcome.leftovers) for outcome in outcomes),
        "starts": len(outcomes) + 1,
        "resumed": len(resumed_from),
        "resumed_from": sorted(set(resumed_from)),
        "runs_finished_and_equal": campaign.finished,
        "seconds": round(seconds, 1),
    }


def _phase(is_done: bool, resumed_at: int | None, leftovers: list[str]) -> str:
    if is_done or resumed_at is None:
        return "done" if is_done else "starting"
    if any(name.endswith(".partial") for name in leftovers):
        return "saving"
    return "removing" if leftovers else "training"
