"""Laws of standard output and standard error: whatever becomes of their readers, no write raises or waits for long."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from lib.patience import stretched

from acsgd.failures.stdio import StandardStream

BROKEN = {"pipe": "Broken pipe", "/dev/full": "No space left on device"}
"""Reasons why a write fails, by the argument of `broken`."""


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    try:
        yield reader, writer
    finally:
        os.close(writer)
        os.close(reader)


@contextlib.contextmanager
def broken(path: str) -> Iterator[int]:
    """Yield a descriptor whose writes fail: of a file, or "pipe" = a pipe without a reader."""
    if path == "pipe":
        reader, fd = os.pipe()
        os.close(reader)
    else:
        fd = os.open(path, os.O_WRONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def fill(fd: int) -> None:
    """Write to a pipe until it is full."""
    os.set_blocking(fd, False)
    try:
        while True:
            os.write(fd, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(fd, True)


def test_every_byte_is_written_in_order(pipe: tuple[int, int]) -> None:
    for timeout_s in (None, 60.0):
        stream = StandardStream(pipe[1], "out", timeout_s=timeout_s)
        data = b"".join(b"line %d\n" % number for number in range(20_000))  # more than a pipe holds
        with ThreadPoolExecutor() as threads, os.fdopen(os.dup(pipe[0]), "rb") as reader:
            contents = threads.submit(reader.read, len(data))
            assert stream.write(data[:1000]) == 1000
            assert stream.write(data[1000:]) == len(data) - 1000
            assert contents.result() == data, timeout_s
        assert stream.failures == []


def test_output_that_fails_is_dropped_and_each_reason_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    for path, reason in BROKEN.items():
        for timeout_s in (None, 60.0):
            caplog.clear()
            with broken(path) as fd, caplog.at_level(logging.WARNING, "acsgd"):
                stream = StandardStream(fd, "standard output", timeout_s=timeout_s)
                assert stream.write(b"line\n") == 5
                assert caplog.messages == [], "there is no log yet"
                stream.start_log()
                assert [stream.write(b"line\n") for _ in range(3)] == [5] * 3
            message = f"standard output cannot be written ({reason}): output is dropped until it can"
            assert caplog.messages == stream.failures == [message]


def test_output_that_nobody_reads_delays_one_write_and_no_later_one_and_reaches_a_reader_that_returns(
    pipe: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = pipe
    stream = StandardStream(writer, "standard error", timeout_s=0.2)
    stream.start_log()
    fill(writer)
    started = time.monotonic()
    with caplog.at_level(logging.WARNING, "acsgd"):
        stream.write(b"first\n")
        assert time.monotonic() - started >= 0.2
        stream.timeout_s = 60.0
        stream.write(b"dropped\n")
        assert time.monotonic() - started < stretched(30.0)
    assert caplog.messages == stream.failures
    assert stream.failures[0].startswith("standard error cannot be written (nothing was read for 0.2 s)")
    while os.read(reader, 65536)[-6:] != b"first\n":
        pass
    stream._writer.join()
    stream.write(b"second\n")
    assert os.read(reader, 65536) == b"second\n"


SCRIPT = """
import sys, warnings
from acsgd.failures.stdio import protect_streams
protect_streams()
print("a line")
sys.stdout.write("a part of a line, which Python writes when it ends \\udcff")
warnings.warn("a warning")
with open(sys.argv[1], "w") as file:
    file.write(str(file.fileno()))
"""


def test_a_process_whose_output_fails_or_is_closed_exits_with_0(tmp_path: Path) -> None:
    script, file = [sys.executable, "-c", SCRIPT, str(tmp_path / "file")], tmp_path / "file"
    for path in BROKEN:
        with broken(path) as fd:
            assert subprocess.run(script, check=False, stdout=fd, stderr=fd).returncode == 0, path
    assert subprocess.run(["sh", "-c", '"$@" <&- >&- 2>&-', "sh", *script], check=False).returncode == 0
    assert int(file.read_text()) > 2, "a file of the run got the number of a standard stream"
