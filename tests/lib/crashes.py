"""Runs that are ended at random moments and started again, compared with a run that was not disturbed.

The run is small, saves after every step, keeps two checkpoints and the best, and its disk is slow, so that most ends
happen during a save. Each start must resume from the newest checkpoint that the previous start left, all of whose
hashes must match, and remove its incomplete ones. A run that reaches its last step must have the weights, moments,
losses and best checkpoint of the undisturbed run; then the next run begins. SIGTERM is sent to some of the ranks; all
ranks must exit 0, with all trained steps saved.
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
from tests.lib.forks import Started, checkpoints_of, finish, make_config, result_of, save_model, started

STEPS = 150
FSYNC_S = 0.003
SPREAD_S = 0.5
"""Seconds of training within which a run is ended."""
EARLY = 0.1
"""Fraction of the kills that may happen before training starts."""


class End(NamedTuple):
    """How one start was ended, and what it left."""

    phase: str
    """"starting", "training", "saving", "removing" (an old checkpoint), or "done" (its last step)."""
    began_at: int | None
    """Step it went on from; None if it did not come that far."""
    newest: int
    """Step of the newest checkpoint in place; 0 = none."""
    leftovers: list[str]
    """Names of what was half-written or half-removed."""


@dataclass
class Campaign:
    """Runs that are ended and started again; the undisturbed run that they must equal is made first."""

    directory: Path
    processes: int = 1
    signal: signal.Signals = signal.SIGKILL
    seed: int = 0
    steps: int = STEPS
    ends: list[End] = field(default_factory=list)
    finished: int = 0
    """Runs that came to their last step, and were equal."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._start_s = 0.5  # from the start of the processes to that of training
        calm = make_config(
            save_model(self.directory / "model"),
            self.directory / "undisturbed",
            processes=self.processes,
            steps=self.steps,
            checkpoint=CheckpointConfig(best=True),
        )
        self.expected = finish(calm, self.processes)
        self.config = dataclasses.replace(calm, checkpoint=CheckpointConfig(every="1", keep=2, best=True))
        self._begin()

    def run(self, kills: int) -> None:
        """End runs `kills` times, and let the last one come to its end. Raises AssertionError if a law is broken."""
        for _ in range(kills + kills // 4 + 5):
            if self.kills < kills:
                self.end_once(self.signal)
        assert self.kills == kills, "most runs came to their end before the signal, or in spite of it"
        self.complete()

    @property
    def kills(self) -> int:
        """Starts that were ended before their last step."""
        return sum(end.phase != "done" for end in self.ends)

    def end_once(self, number: signal.Signals) -> None:
        """Start the run, end it at a moment drawn at random, and check what it found and what it leaves."""
        before = self._look()
        with started(self.config, self.processes, fsync_s=FSYNC_S) as run:
            self._strike(run, number)
            codes = run.join()
        newest, leftovers = self._look()
        began_at, notes = run.began_at(), run.notes()
        if began_at is not None:
            check_beginning(*before, began_at, notes)
        is_done = newest == self.steps and (codes == [0] * self.processes or notes[-1].startswith("done"))
        if number != signal.SIGKILL and not is_done:
            assert codes == [0] * self.processes, (codes, notes)
            assert notes[-1].startswith(f"stopped after step {newest} of "), notes[-3:]
            assert notes[-1].endswith(f"step-{newest:08d}"), notes[-1]
        self.ends.append(End(_phase(is_done, began_at, leftovers), began_at, newest, leftovers))
        if is_done:
            self._compare()

    def complete(self) -> None:
        """Let the run under way come to its end."""
        finish(self.config, self.processes)
        self._compare()

    def _strike(self, run: Started, number: signal.Signals) -> None:
        """Wait for the moment, and send the signal; a run that is to end well must have begun to train."""
        begun = time.monotonic()
        if number == signal.SIGKILL and self._random.random() < EARLY:
            time.sleep(self._random.uniform(0, self._start_s))
        else:
            run.wait_for_training()
            self._start_s = time.monotonic() - begun
            time.sleep(self._random.uniform(0, SPREAD_S))
        ranks = self._random.sample(range(self.processes), self.processes)
        run.send(number, ranks if number == signal.SIGKILL else ranks[: self._random.randint(1, self.processes)])

    def _look(self) -> tuple[int, list[str]]:
        """Return the step of the newest checkpoint in place, and the names of what lies about beside them."""
        directory = checkpoints_of(self.config)
        assert not list(directory.path.glob("corrupt-*")), "a published checkpoint was corrupt"
        return max(directory.steps(), default=0), [path.name for path in directory.leftovers()]

    def _compare(self) -> None:
        assert result_of(self.config) == self.expected, f"{self.config.log.dir} is not what it is undisturbed"
        assert not self._look()[1], "something half-written was left in the end"
        self.finished += 1
        self._begin()

    def _begin(self) -> None:
        """Let the next start be that of a new run."""
        log = dataclasses.replace(self.config.log, dir=str(self.directory / f"run-{self.finished}"))
        self.config = dataclasses.replace(self.config, log=log)


def check_beginning(newest: int, leftovers: list[str], began_at: int, notes: list[str]) -> None:
    """Check that a start went on from the newest checkpoint, and told what it removed."""
    assert began_at == newest, f"step {newest} was in place, but the run went on from step {began_at}: {notes}"
    for name in leftovers:
        assert any(note.startswith(f"removed {name}") for note in notes), (name, notes)


def summary(campaign: Campaign, seconds: float) -> dict[str, Any]:
    """Return what happened, for JSON; that all was equal is why it has come so far."""
    ends = campaign.ends
    phases = Counter(end.phase for end in ends)
    begun = [end.began_at for end in ends if end.began_at is not None]
    return {
        "signal": campaign.signal.name,
        "processes": campaign.processes,
        "seed": campaign.seed,
        "kills": campaign.kills,
        "phases": {phase: phases[phase] for phase in ("starting", "training", "saving", "removing")},
        "leftovers": sum(len(end.leftovers) for end in ends),
        "starts": len(ends) + 1,
        "resumed": sum(step > 0 for step in begun),
        "resumed_from": sorted({step for step in begun if step > 0}),
        "runs_finished_and_equal": campaign.finished,
        "seconds": round(seconds, 1),
    }


def _phase(is_done: bool, began_at: int | None, leftovers: list[str]) -> str:
    if is_done or began_at is None:
        return "done" if is_done else "starting"
    if any(name.endswith(".partial") for name in leftovers):
        return "saving"
    return "removing" if leftovers else "training"
