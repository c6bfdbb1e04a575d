"""`acsgd eval` on several ranks: the metrics of stages and replicas are those of one process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from acsgd import __main__ as entry
from acsgd.commands.evaluation import command
from acsgd.launch import Launch
from tests.lib.ranks import on_ranks


def evaluate_on_rank(rank: int, world_size: int, port: int, output: Path, arguments: list[str]) -> None:
    """Run `python -m acsgd eval` as torchrun starts it, with two ranks per host.

    output: file of what all ranks write to standard output.
    """
    os.environ |= {
        **{"RANK": str(rank), "LOCAL_RANK": str(rank % 2)},
        **{"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": "2"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"},
    }
    with output.open("a") as file:
        os.dup2(file.fileno(), 1)
    with mock.patch.object(command, "connect", wraps=command.connect) as connect:
        entry.main(["eval", *arguments], prog="python -m acsgd")
    assert connect.call_args.kwargs["several_hosts"]


def test_stages_and_replicas_find_what_one_process_finds(
    tiny_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Standard output is one JSON object, whatever the number of ranks."""
    (tmp_path / "text.txt").write_text("The statement of the list is a statement.\n" * 70)
    data = ["--data", str(tmp_path / "text.txt"), "--sequence", "32", "--cache", str(tmp_path / "runs" / "cache")]
    command.main([str(tiny_model()), *data, "--json", "--micro", "4"], Launch(), prog="acsgd eval", end=sys.exit)
    one = json.loads(capsys.readouterr().out)
    arguments, output = [str(tiny_model()), *data, "--json", "--micro", "3", "--stages", "2"], tmp_path / "output"
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    on_ranks(4, evaluate_on_rank, store.port, output, arguments)
    four = json.loads(output.read_text())
    assert four["metrics"] == pytest.approx(one["metrics"], rel=1e-5)
    assert four["sequences"] == one["sequences"] > 10
