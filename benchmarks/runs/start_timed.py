"""train.py with the time of each part of its start; run by start.py under torchrun.

start_timed.py TIMES RUN.toml ...           writes TIMES-<rank>, a JSON list of [part, time.time() at its end]
"""

# ruff: noqa: E402, the imports are timed
from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from acsgd.failures.signals import end_with_torchrun
from acsgd.launch import Launch

TIMES = [("torchrun, Python", time.time())]
LAUNCH = Launch.from_env()
end_with_torchrun(os.getppid(), is_main=LAUNCH.local_rank == 0, end=os._exit)


def record(part: str) -> None:
    """Record the end of a part."""
    TIMES.append((part, time.time()))


import torch  # noqa: F401

record("import torch")
from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: F401

record("import transformers")
from acsgd import main, train
from acsgd.groups import Groups
from acsgd.run.session import Session

record("import acsgd")


def record_after(part: str, module: ModuleType, name: str) -> None:
    """Replace a function of a module by one that records the end of a part when it returns."""
    function = getattr(module, name)

    def recording(*args: Any, **options: Any) -> Any:
        result = function(*args, **options)
        record(part)
        return result

    setattr(module, name, recording)


@contextlib.contextmanager
def connect(*args: Any, **options: Any) -> Iterator[Groups]:
    """Connect the ranks and record the end of that."""
    with CONNECT(*args, **options) as groups:
        record("connect ranks")
        yield groups


def train_step(session: Session, *args: Any, **options: Any) -> Any:
    """Run the first step, write the times, and restore the original function."""
    record("open logs and saver")
    train.train_step = TRAIN_STEP
    result = TRAIN_STEP(session, *args, **options)
    record("first step")
    Path(f"{sys.argv[1]}-{session.job.topology.rank}").write_text(json.dumps(TIMES))
    return result


CONNECT, TRAIN_STEP = main.connect, train.train_step
record_after("plan the run", main, "prepare")
record_after("open text and checkpoint", main, "open_inputs")
record_after("verify and load the checkpoint", train, "start")
main.connect = connect
train.train_step = train_step
main.main(sys.argv[2:], LAUNCH, prog="train.py", end=os._exit)
