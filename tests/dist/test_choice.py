"""Law: all ranks go on from the same checkpoint, though only one of them has read what is wrong with another."""

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
def whole(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Return a run of two stages that was saved after each of its steps."""
    runs = tmp_path_factory.mktemp("choice")
    model = tiny_model("gpt2", **DROPOUT, n_layer=2, n_embd=16)
    config = make_config(model, runs / "runs" / "whole", stages=2, steps=STEPS, every="1")
    on_ranks(2, run_ranks, runs / "store", [Plan(config)])
    return config


def stopped(whole: Config, run_dir: Path, *, resume: str = "auto") -> Config:
    """Return the run as it was after its third step, elsewhere."""
    config = dataclasses.replace(
        whole,
        log=dataclasses.replace(whole.log, dir=str(run_dir)),
        checkpoint=dataclasses.replace(whole.checkpoint, resume=resume),
    )
    for step in range(1, STEPS):
        shutil.copytree(checkpoints_of(whole).of(step), checkpoints_of(config).of(step))
    return config


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("layer", ["block-00000", "block-00001", "head"])
def test_all_ranks_pass_over_what_one_finds_damaged(layer: str, whole: Config, tmp_path: Path) -> None:
    """The first rank reads the first block, the second the other and the head."""
    config = stopped(whole, tmp_path / "runs" / "run")
    damage(checkpoints_of(config).of(3) / f"{layer}.safetensors")
    by_rank = on_ranks(2, run_ranks, tmp_path / "store", [Plan(config)])
    for told in by_rank:
        assert told[0].error is None
        assert [step.step for step in told[0].steps] == [2, 3]
    notes = by_rank[0][0].notes
    assert [note for note in notes if f"{layer}.safetensors is corrupt" in note and "corrupt-step-00000003" in note]
    assert end_of(config).layers == end_of(whole).layers


def test_all_ranks_refuse_alike(whole: Config, tmp_path: Path) -> None:
    """Each rank finds another checkpoint damaged, so none is sound; asked for one, they offer the same."""
    config = stopped(whole, tmp_path / "runs" / "run")
    directory = checkpoints_of(config)
    damage(directory.of(3) / "block-00000.safetensors")
    damage(directory.of(2) / "head.safetensors")
    asking = stopped(whole, tmp_path / "runs" / "asking", resume=str(directory.of(3)))
    shutil.rmtree(checkpoints_of(asking).path)
    damaged = stopped(whole, tmp_path / "runs" / "damaged")
    for step, layer in ((3, "block-00000"), (2, "head"), (1, "block-00001")):
        damage(checkpoints_of(damaged).of(step) / f"{layer}.safetensors")
    by_rank = on_ranks(2, run_ranks, tmp_path / "store", [Plan(asking), Plan(damaged)])
    assert by_rank[0] == by_rank[1]
    offers, refuses = by_rank[0]
    assert (offers.steps, refuses.steps) == ([], [])
    assert offers.error is not None
    assert offers.error.endswith(f"step-00000001: --checkpoint.resume {directory.of(1)}")
    assert refuses.error is not None
    assert refuses.error.startswith("no checkpoint is valid: ")
    assert checkpoints_of(asking).steps() == []
    assert checkpoints_of(damaged).steps() == [1, 2, 3]
