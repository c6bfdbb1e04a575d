"""A process of `acsgd generate` that is interrupted ends with a sentence, and is resumed where it stopped."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

from tests.lib.commands import acsgd
from tests.lib.launched import running

TinyModel = Callable[..., Path]

RECORDS = 100


def test_an_interrupted_process_is_resumed_where_it_stopped(tiny_model: TinyModel, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(f'{{"prompt": "The number {number}"}}\n' for number in range(RECORDS)))
    options = ["generate", str(tiny_model("llama")), "--file", str(source), "--out", str(out)]
    options += ["--max-new-tokens", "20", "--batch", "4", "--temperature", "1"]
    with running([sys.executable, "-m", "acsgd.cli", *options], tmp_path) as run:
        run.wait_until(lambda: out.exists() and b"\n" in out.read_bytes(), 120)
        run.process.send_signal(signal.SIGSTOP)  # or it might end before
        code, printed = acsgd(*options)
        assert (code, f"another process writes {out}" in printed) == (2, True)
        run.process.send_signal(signal.SIGINT)
        run.process.send_signal(signal.SIGCONT)
        assert run.wait() == 130
        lines = out.read_text().splitlines()
        assert 0 < len(lines) < RECORDS
        assert run.stderr.splitlines()[-1] == (
            f"error: stopped by SIGINT; {out} holds {len(lines)} of {RECORDS} records; the same command resumes"
        )
        assert run.stdout == ""
    code, printed = acsgd(*options)
    assert (code, f"{out} holds {len(lines)} of {RECORDS} records; resuming" in printed) == (0, True)
    whole = out.read_text().splitlines()
    assert (len(whole), whole[: len(lines)]) == (RECORDS, lines)
