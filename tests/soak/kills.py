"""Area "kills": torchrun is killed at a random moment of its start or of training. Law: all processes end with it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ClassVar

from tests.lib.forks import save_model
from tests.lib.launched import TORCHRUN, TRAIN, Run, running
from tests.soak.area import ACCEPTED, Case, Outcome

LIMIT_S = 10.0
"""Time within which all processes must have ended, seconds."""
START_S = 240.0
"""Maximum time until torchrun is killed, seconds; a busy machine starts a run in a minute."""
OPTIONS = (
    "--data.sources demo --data.sequence 16 --data.batch 12 --pp.micro 2 --optim.steps 100000 --optim.lr 1e-3 "
    "--log.dir run"
)
SHELL = ["--no-python", "sh", "-c", '"$@"; exit $?', "sh", sys.executable]
"""Arguments of torchrun that start each rank from a shell script."""


def _has_loaded_torch(pids: Iterable[int]) -> bool:
    try:
        return any("libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    except OSError:  # a process has ended
        return False


MOMENTS: dict[str, tuple[Callable[[Run], object], float]] = {
    "torchrun starts": (lambda run: True, 1.0),
    "torchrun imports torch": (lambda run: _has_loaded_torch([run.process.pid]), 3.0),
    "the first rank starts": (lambda run: run.ranks(), 0.3),
    "a rank imports torch": (lambda run: _has_loaded_torch(run.ranks().values()), 4.0),
    "training starts": (lambda run: (run.directory / "run/metrics.jsonl").exists(), 1.0),
}
"""Conditions after which torchrun is killed, and the longest delay, seconds."""


class Kills:
    """One torchrun per case, of one to three ranks, with and without wandb's process and a shell above each rank."""

    deadline_s: ClassVar[float] = START_S + 2 * LIMIT_S
    memory_bytes: ClassVar[int] = 2**40

    @classmethod
    def prepare(cls, directory: Path) -> None:
        save_model(directory / "model")

    def __init__(self, directory: Path) -> None:
        self._model = directory / "model"
        os.environ["WANDB_MODE"] = "offline"

    def run(self, case: Case) -> Outcome:
        ranks, moment = case.draw.randint(1, 3), case.draw.choice(list(MOMENTS))
        condition, longest_s = MOMENTS[moment]
        delay_s = case.draw.uniform(0.0, longest_s)
        log_to = case.draw.choice(["print,jsonl,text", "jsonl,wandb"])
        launcher = case.draw.choice([[], SHELL])
        below = " below a shell" if launcher else ""
        case.describe(f"{ranks} ranks{below}, log.to={log_to}: SIGKILL {delay_s:.3f} s after {moment}")
        options = [*OPTIONS.split(), "--model.name", str(self._model), "--log.to", log_to]
        with running([*TORCHRUN, str(ranks), *launcher, TRAIN, *options], case.directory) as run:
            run.wait_until(lambda: run.process.poll() is not None or condition(run), START_S)
            time.sleep(delay_s)
            assert run.process.poll() is None, f"the run ended by itself: {run.stderr}"
            run.process.kill()
            run.process.wait()
            _check_that_all_end(run, time.monotonic() + LIMIT_S)
        return ACCEPTED


def _check_that_all_end(run: Run, deadline: float) -> None:
    while (alive := run.environments() or run.environments()) and time.monotonic() < deadline:
        time.sleep(0.1)
    commands = [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200] for pid in alive]
    assert not alive, f"{len(alive)} processes outlive torchrun by {LIMIT_S:g} s: {commands}"
