"""Law: all ranks resume from the same checkpoint, even if only one rank has read the corrupt file of another."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from lib.disturbed import Plan, checkpoints_of, end_of, make_config, run_ranks
from lib.models import DROPOUT
from lib.ranks import on_ranks

from acsgd.config.options import Config

TinyModel = Callable[..., Path]
STEPS = 4


@pytest.fixture(scope="module")
def finished(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Return the config of a finished run of two stages that was saved after every step."""
    runs = tmp_path_factory.mktemp("choice")
    model = tiny_model("gpt2", **DROPOUT, n_layer=2, n_embd=16)
    config = make_config(model, runs / "runs" / "finished", stages=2, steps=STEPS, every="1")
    on_ranks(2, run_ranks, runs / "store", [Plan(config)])
    return config


def copy_before_last_step(finished: Config, run_dir: Path, *, resume: str = "auto") -> Config:
    """Copy the checkpoints of the first three steps to another run directory; return the config of that run."""
    config = dataclasses.replace(
        finished,
        log=dataclasses.replace(finished.log, dir=str(run_dir)),
        checkpoint=dataclasses.replace(finished.checkpoint, resume=resume),
    )
    for step in range(1, STEPS):
        shutil.copytree(checkpoints_of(finished).of(step), checkpoints_of(config).of(step))
    return config


def corrupt(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("layer", ["block-00000", "block-00001", "head"])
def test_all_ranks_skip_a_checkpoint_that_one_rank_finds_corrupt(layer: str, finished: Config, tmp_path: Path) -> None:
    """Rank 0 reads the first block, rank 1 the second block and the head."""
    config = copy_before_last_step(finished, tmp_path / "runs" / "run")
    corrupt(checkpoints_of(config).of(3) / f"{layer}.safetensors")
    by_rank = on_ranks(2, run_ranks, tmp_path / "store", [Plan(config)])
    for starts in by_rank:
        assert starts[0].error is None
        assert [step.step for step in starts[0].steps] == [2, 3]
    notes = by_rank[0][0].notes
    assert [note for note in notes if f"{layer}.safetensors is corrupt" in note and "corrupt-step-00000003" in note]
    assert end_of(config).layers == end_of(finished).layers


def test_all_ranks_raise_the_same_error(finished: Config, tmp_path: Path) -> None:
    """Each rank finds another checkpoint corrupt. The error names a valid one if there is any."""
    config = copy_before_last_step(finished, tmp_path / "runs" / "run")
    directory = checkpoints_of(config)
    corrupt(directory.of(3) / "block-00000.safetensors")
    corrupt(directory.of(2) / "head.safetensors")
    named = copy_before_last_step(finished, tmp_path / "runs" / "named", resume=str(directory.of(3)))
    shutil.rmtree(checkpoints_of(named).path)
    all_corrupt = copy_before_last_step(finished, tmp_path / "runs" / "all_corrupt")
    for step, layer in ((3, "block-00000"), (2, "head"), (1, "block-00001")):
        corrupt(checkpoints_of(all_corrupt).of(step) / f"{layer}.safetensors")
    by_rank = on_ranks(2, run_ranks, tmp_path / "store", [Plan(named), Plan(all_corrupt)])
    assert by_rank[0] == by_rank[1]
    named_start, unnamed_start = by_rank[0]
    assert (named_start.steps, unnamed_start.steps) == ([], [])
    assert named_start.error is not None
    assert named_start.error.endswith(f"step-00000001: --checkpoint.resume {directory.of(1)}")
    assert unnamed_start.error is not None
    assert unnamed_start.error.startswith("no checkpoint is valid: ")
    assert checkpoints_of(named).steps() == []
    assert checkpoints_of(all_corrupt).steps() == [1, 2, 3]
