"""train.py, noting when each part of its start is over; run by start.py, under torchrun.

start_noted.py NOTES RUN.toml ...            writes NOTES-<rank>, a JSON list of [part, time.time() at its end]
"""

# ruff: noqa: E402, the imports are what is timed
from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NOTES = [("torchrun and the interpreter", time.time())]


def note(part: str) -> None:
    """Take the time at the end of a part."""
    NOTES.append((part, time.time()))


import torch  # noqa: F401

note("import torch")
from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: F401

note("import transformers")
from acsgd import train

note("import acsgd")


def noting(part: str, name: str) -> None:
    """Let a function of train.py end with a note."""
    function = getattr(train, name)

    def noted(*args: Any, **options: Any) -> Any:
        result = function(*args, **options)
        note(part)
        return result

    setattr(train, name, noted)


@contextlib.contextmanager
def connect(*args: Any, **options: Any) -> Iterator[train.Groups]:
    """Meet the other ranks, and note it."""
    with CONNECT(*args, **options) as groups:
        note("meet, open the groups")
        yield groups


def train_step(worker: train.Session, *args: Any, **options: Any) -> Any:
    """Make the first step, write the notes, and be in the way no more."""
    note("open logs and saver")
    train.train_step = TRAIN_STEP
    result = TRAIN_STEP(worker, *args, **options)
    note("first step")
    Path(f"{sys.argv[1]}-{worker.job.topology.rank}").write_text(json.dumps(NOTES))
    return result


CONNECT, TRAIN_STEP = train.connect, train.train_step
noting("decide: configuration, model, plan", "prepare")
noting("find text and checkpoint", "open_inputs")
noting("verify and load", "start")
train.connect = connect
train.train_step = train_step
train.main(sys.argv[2:], os.getppid())
