"""Run lm-eval, the Language Model Evaluation Harness, on a model of any form."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from acsgd.commands.evaluation.job import EvaluatedModel
from acsgd.commands.evaluation.options import DTYPES, EvalOptions
from acsgd.notes import print_note
from acsgd.shards.export import to_hf
from acsgd.shards.hub import find_model
from acsgd.shards.manifest import MANIFEST

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_lm_eval(options: EvalOptions, model: EvaluatedModel) -> int:
    """Export the model if need be, and run lm-eval on it. Returns its exit code. Raises ValueError."""
    assert options.lm_eval is not None
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError('--lm-eval needs lm-eval: pip install "acsgd[lm-eval]"')
    directory = find_model(model.name, option="model")
    with _exported(directory) as exported:
        dtype = DTYPES[options.dtype] if options.dtype else "auto"
        arguments = ["--model", "hf", "--tasks", options.lm_eval]
        arguments += ["--model_args", f"pretrained={exported},dtype={dtype}"]
        arguments += [] if options.device == "auto" else ["--device", options.device]
        command = [sys.executable, "-m", "lm_eval", *arguments, *shlex.split(options.lm_eval_args)]
        print_note(shlex.join(command))
        return subprocess.run(command, check=False).returncode


@contextlib.contextmanager
def _exported(directory: Path) -> Iterator[Path]:
    """Yield a Hugging Face directory of a model: its own, or one that exists while the context is open.

    A stop signal leaves the context, too.
    """
    if not os.path.lexists(directory / MANIFEST):
        yield directory
        return
    former = {number: signal.signal(number, _exit) for number in STOP_SIGNALS}
    try:
        with tempfile.TemporaryDirectory(prefix="acsgd-lm-eval-") as name:
            exported = Path(name) / directory.name
            exported.mkdir()
            to_hf(directory, exported)
            yield exported
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
