"""Two hosts, of which one has no more than an invitation, train one model under real torchrun."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.lib.launched import running

TinyModel = Callable[..., Path]
ACSGD = [sys.executable, "-m", "acsgd.cli"]
LIMIT_S = 150.0


def test_a_host_joins_by_an_invitation(tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "run.toml").write_text(
        f"""
        [model]
        name = "{tiny_model(n_layer=2)}"
        [data]
        sources = "demo"
        sequence = 32
        batch = 8
        [pp]
        micro = 1
        [optim]
        lr = 1e-3
        steps = 4000
        [log]
        dir = "run"
        """
    )
    with ExitStack() as stack:
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        options = ["--nproc", "1", "--address", "127.0.0.1", "--port", str(port), "--mesh", "true"]
        host = stack.enter_context(running([*ACSGD, "host", str(tmp_path / "run.toml"), *options], tmp_path / "a"))
        host.wait_until(lambda: "acsgd join" in host.stdout, LIMIT_S)
        [invitation] = re.findall(r"acsgd join (\S+)", host.stdout)
        guest = stack.enter_context(running([*ACSGD, "join", invitation, "--nproc", "1"], tmp_path / "b"))
        metrics = tmp_path / "a" / "run" / "metrics.jsonl"
        host.wait_until(lambda: metrics.exists() and '"hosts": 2' in metrics.read_text(), LIMIT_S)
        lines = list(_command_lines())
        assert any("torch.distributed.run" in line for line in lines)
        assert not [line for line in lines if invitation in line]
        assert not guest.errors
        assert not host.errors


def _command_lines() -> Iterator[str]:
    """Yield the command line of each process."""
    for process in psutil.process_iter(["cmdline"]):
        yield " ".join(process.info["cmdline"] or ())
