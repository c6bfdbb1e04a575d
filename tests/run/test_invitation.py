"""Two hosts, of which one has no more than an invitation, train one model in two stages under real torchrun."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from acsgd.shards.disk import ShardDirectory
from tests.lib.commands import started
from tests.lib.forked_torchrun import ForkedTorchrun, Host, forked_torchrun
from tests.lib.hosts import ENVIRONMENT, LIMIT_S
from tests.lib.injection import Pace
from tests.lib.ports import free_port


def test_a_host_joins_by_an_invitation(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets the layers that its rank reads, and no others, and prints how far it is.

    The command lines that start are compared, and free of secrets, in `test_invite`.
    """
    shutil.copytree(tiny_model(n_layer=2), tmp_path / "a/gpt")
    (tmp_path / "run.toml").write_text(
        """
        [model]
        name = "gpt"
        [data]
        sources = "demo"
        sequence = 32
        batch = 8
        [pp]
        stages = 2
        layers = [1, 1]
        micro = 1
        [optim]
        lr = 1e-3
        steps = 4000
        [log]
        dir = "run"
        """
    )
    port = free_port()

    def start(name: str, *words: object) -> ForkedTorchrun:
        """Type a command on a host, and start what it becomes."""
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / f"home-{name}").mkdir()
        monkeypatch.setenv("HOME", str(tmp_path / f"home-{name}"))
        monkeypatch.chdir(tmp_path / name)
        environment = ENVIRONMENT | {"HOME": str(tmp_path / f"home-{name}")}
        program = ["-m", "acsgd.cli", *words]
        while program[:2] == ["-m", "acsgd.cli"]:
            program = started(*program[2:])[1:]
        host = Host([str(word) for word in program[2:]], environment, tmp_path / name, worker=Pace(0.05))
        return stack.enter_context(forked_torchrun(host))

    with ExitStack() as stack:
        options = ("--nproc", 1, "--address", "127.0.0.1", "--port", port, "--mesh", "true")
        host = start("a", "host", tmp_path / "run.toml", *options)
        [invitation] = (tmp_path / "home-a/.acsgd").glob("*.invitation")
        views = tmp_path / "a/run/views"
        host.wait_until(lambda: views.exists() and any(views.iterdir()), LIMIT_S)
        guest = start("b", "join", invitation.read_text(), "--nproc", 1)
        metrics = tmp_path / "a" / "run" / "metrics.jsonl"
        host.wait_until(lambda: metrics.exists() and '"hosts": 2' in metrics.read_text(), LIMIT_S)
        model = ShardDirectory(tmp_path / "b/gpt")
        present = [layer for layer in model.manifest.layers if not model.lacks(layer)]
        assert present == ["embed", "block-00001", "head"], "its head is tied to the embedding"
        host.wait_until(lambda: "first step" in guest.stderr, LIMIT_S)
        run = rf"run {invitation.stem}: "
        of_view = r"connected \(view \d+, 2 hosts\)"
        lines = "model and data are ready", of_view, r"all state .*is here", r"first step \(\d+\)"
        found = re.findall(rf"^{run}(.+) after (\d+\.\d) s$", guest.stderr, re.MULTILINE)
        assert [re.fullmatch(line, text) and line for line, (text, _) in zip(lines, found, strict=True)] == [*lines]
        assert sorted(found, key=lambda each: float(each[1])) == found
        assert not guest.errors
        assert not host.errors
