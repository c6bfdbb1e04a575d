"""Every command that trains runs the same code and names itself in its help, from any directory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from acsgd import cli, main

ROOT = Path(__file__).parents[2]


def test_the_installed_module_prints_its_help_in_any_directory(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "acsgd", "--help"], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("usage: python -m acsgd [RUN.toml] [-h]")
    assert "--pp.stages" in done.stdout
    assert not list(tmp_path.iterdir())


def test_acsgd_train_passes_all_arguments_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # the command replaces them
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    arguments = "--model.name m --data.sources demo --data.sequence 8 --data.batch 2 --optim.lr 1 --optim.steps 3"
    monkeypatch.setattr(main, "main", lambda argv, launch, *, prog, end: calls.append((argv, prog)))
    monkeypatch.setattr(sys, "argv", ["acsgd", "train", *arguments.split()])
    cli.main()
    assert calls == [(arguments.split(), "acsgd train")]


HELP = """
import os, sys
from acsgd import cli
try:
    cli.main()
finally:
    assert "torch" not in sys.modules
"""


def test_the_help_of_acsgd_lists_train_without_loading_torch_and_may_lose_its_reader() -> None:
    command = [sys.executable, "-c", HELP, "--help"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search("train +Train in this process", done.stdout)
    reader, writer = os.pipe()
    os.close(reader)
    closed = subprocess.run(command, env=env, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (closed.returncode, closed.stderr) == (0, b"")
