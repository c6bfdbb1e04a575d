"""Area "ties": a tied model on many ranks, then resumed on others. Law: the run is that of one process.

Losses, held-out losses, and the table with its moments: 20 steps on one cut, 10 more on another one.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from pathlib import Path
from typing import ClassVar, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from acsgd.config.options import CheckpointConfig, Config, PipelineConfig
from acsgd.shards.manifest import Manifest
from tests.lib.forks import checkpoints_of, finish, make_config, result_of, save_model
from tests.soak.area import ACCEPTED, Case, Outcome

STEPS = (20, 30)
"""Last step on the first cut, and on the second."""
RELATIVE = 1e-5
"""Tolerance on losses: sums in another order differ by about 1e-7 in fp32, and each step of AdamW amplifies that."""
TABLE_RELATIVE = 1e-4
"""Tolerance on the table and its moments, relative to the largest value of each."""
FAMILIES = ("gpt2", "llama")
BLOCKS = 4


class Cut(NamedTuple):
    """How a run is divided among ranks."""

    stages: int
    replicas: int
    schedule: str
    tied: str


CUTS = [
    Cut(stages, replicas, schedule, tied)
    for stages, replicas in ((4, 2), (2, 2), (4, 1), (2, 1), (1, 2))
    for schedule in ("1f1b", "gpipe", "1f1b:lead=2", "interleaved:chunks=2")
    for tied in ("rows", "dense")
    if stages == 2 or "interleaved" not in schedule
]
"""The first case starts with the first one: 4 stages and 2 replicas."""
ALONE = Cut(1, 1, "1f1b", "rows")


class Ties:
    """A GPT-2 with dropout or a Llama, whose heads are their embeddings, on 1 to 8 ranks, then on 1 to 8 others."""

    deadline_s: ClassVar[float] = 900.0
    memory_bytes: ClassVar[int] = 2**40

    @classmethod
    def prepare(cls, directory: Path) -> None:
        gpt2, llama = save_model(directory / "gpt2", blocks=BLOCKS), directory / "llama"
        shutil.copytree(gpt2, llama)  # for the tokenizer
        torch.manual_seed(0)
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=264,  # rows that no token has
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=BLOCKS,
                num_attention_heads=2,
                max_position_embeddings=16,
                bos_token_id=0,
                eos_token_id=0,
                tie_word_embeddings=True,
            )
        ).save_pretrained(llama)
        for model in (gpt2, llama):
            for steps in STEPS:
                finish(_config(model, directory / f"{model.name}-alone", ALONE, steps), 1)

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._alone = {
            family: _config(directory / family, directory / f"{family}-alone", ALONE, STEPS[-1]) for family in FAMILIES
        }
        self._losses = {family: result_of(config).losses for family, config in self._alone.items()}

    def run(self, case: Case) -> Outcome:
        family = case.draw.choice(FAMILIES)
        first = CUTS[0] if case.number == 0 else case.draw.choice(CUTS)
        cuts = first, case.draw.choice(CUTS)
        case.describe(f"{family} on {' then '.join(map(str, cuts))}")
        for cut, steps in zip(cuts, STEPS, strict=True):
            config = _config(self._directory / family, case.directory / "run", cut, steps)
            losses = finish(config, cut.stages * cut.replicas).losses
            for line, expected in zip(losses, self._losses[family], strict=False):
                assert _numbers(line) == pytest.approx(_numbers(expected), rel=RELATIVE, nan_ok=True), (
                    f"{cut}: step, loss and held-out loss"
                )
            _check_table(checkpoints_of(config).of(steps), checkpoints_of(self._alone[family]).of(steps))
        return ACCEPTED


def _config(model: Path, run_dir: Path, cut: Cut, steps: int) -> Config:
    config = make_config(model, run_dir, processes=2, steps=steps, checkpoint=CheckpointConfig())
    pp = PipelineConfig(stages=cut.stages, schedule=cut.schedule, tied=cut.tied)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, batch=8), pp=pp)


def _numbers(line: tuple[int, float, float | None]) -> list[float]:
    """Return step, loss and held-out loss; NaN = none."""
    return [math.nan if number is None else float(number) for number in line]


def _check_table(trained: Path, alone: Path) -> None:
    """Compare the table and its moments in two checkpoints."""
    table, expected = _table(trained), _table(alone)
    assert table.keys() == expected.keys()
    for name, tensor in expected.items():
        error, largest = float((table[name] - tensor).abs().max()), float(tensor.abs().max())
        assert error <= TABLE_RELATIVE * largest, f"{name} differs by {error:.2g}, its largest value is {largest:.2g}"


def _table(checkpoint: Path) -> dict[str, Tensor]:
    [stored] = Manifest.read(checkpoint).tables.values()
    return load_file(checkpoint / stored.file)
