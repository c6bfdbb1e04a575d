"""`acsgd convert` writes a complete directory or nothing, and ends with one sentence."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
from lib.commands import acsgd
from lib.saved import SMALL

from acsgd.shards import convert

TinyModel = Callable[..., Path]
FORK = multiprocessing.get_context("fork")


def convert_and_wait(source: Path, target: Path, started: Event, outcome: Connection) -> None:
    """Convert a model in a process that stops for a signal when its files are written, before the rename."""
    from_hf = convert.from_hf

    def slowly(source: Path, directory: Path) -> None:
        from_hf(source, directory)
        started.set()
        signal.pause()

    convert.from_hf = slowly
    outcome.send(acsgd("convert", "from-hf", source, target))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_signal_leaves_nothing(number: signal.Signals, tiny_model: TinyModel, tmp_path: Path) -> None:
    started, (outcome, end) = FORK.Event(), FORK.Pipe(duplex=False)
    arguments = (tiny_model("gpt2", **SMALL), tmp_path / "new" / "target", started, end)
    process = FORK.Process(target=convert_and_wait, args=arguments)
    process.start()
    assert started.wait(60)
    assert os.listdir(tmp_path / "new"), "it works elsewhere"
    assert process.pid
    os.kill(process.pid, number)
    assert outcome.poll(60)
    code, printed = outcome.recv()
    process.join(60)
    assert (code, printed) == (128 + number, f"error: stopped by {number.name}; nothing was written\n")
    assert os.listdir(tmp_path) == []


def test_of_two_converts_to_one_target_the_later_keeps_the_result_of_the_other(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, from_hf = tiny_model("gpt2", **SMALL), tmp_path / "target", convert.from_hf

    def second(source: Path, directory: Path) -> None:
        """Convert while another process does the whole of the same."""
        monkeypatch.setattr(convert, "from_hf", from_hf)
        assert acsgd("convert", "from-hf", source, target) == (0, "")
        from_hf(source, directory)

    monkeypatch.setattr(convert, "from_hf", second)
    assert acsgd("convert", "from-hf", source, target) == (
        2,
        f"error: {target} was created by another process meanwhile and is kept; nothing else was written\n",
    )
    assert os.listdir(tmp_path) == ["target"]
    assert acsgd("inspect", target)[0] == 0


@pytest.mark.parametrize("direction", ["from-hf", "to-hf"])
def test_a_full_disk_leaves_nothing(direction: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    """The limit of the size of files stands for the disk: the system refuses the write."""
    source, target = tiny_model("gpt2", **SMALL), tmp_path / "new" / "target"
    if direction == "to-hf":
        assert acsgd("convert", "from-hf", source, tmp_path / "shards") == (0, "")
        source = tmp_path / "shards"
    before = os.listdir(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**12, hard))
    try:
        code, printed = acsgd("convert", direction, source, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (code, printed) == (
        2,
        f"error: {target}: File too large; raise the limit on the size of files (ulimit -f), or give a path on another "
        "disk\n",
    )
    assert os.listdir(tmp_path) == before


def test_a_taken_target_is_named(tiny_model: TinyModel, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.symlink_to("nowhere")
    code, printed = acsgd("convert", "from-hf", tiny_model("gpt2", **SMALL), target)
    assert (code, printed) == (2, f"error: {target} exists already; give a directory that does not, or remove it\n")
