"""Whole runs under torchrun: their files, and the one message when they fail."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from acsgd.shards.disk import ShardDirectory

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
TinyModel = Callable[..., Path]
STEPS = 6


def start(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)


def train(processes: int, cwd: Path, run_file: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    launcher = [*TORCHRUN, str(processes)] if processes > 1 else [sys.executable]
    return start([*launcher, str(ROOT / "train.py"), str(run_file), *flags], cwd)


def run_file(cwd: Path, model: Path) -> Path:
    path = cwd / "run.toml"
    path.write_text(
        f"""
        [model]
        name = "{model}"
        [data]
        sources = "demo"
        sequence = 32
        batch = 6
        [pp]
        micro = 2
        [optim]
        lr = 1e-3
        steps = {STEPS}
        [log]
        dir = "runs/one"
        """
    )
    return path


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_run_of_four_is_the_run_of_one_and_its_export_is_what_it_trained(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    file = run_file(tmp_path, tiny_model())
    alone = train(1, tmp_path, file)
    assert alone.returncode == 0, alone.stderr
    four = train(4, tmp_path, file, "--pp.stages", "2", "--log.dir", "runs/four", "--checkpoint.every", "4")
    assert four.returncode == 0, four.stderr
    one, other = (records(tmp_path / "runs" / name) for name in ("one", "four"))
    assert [r["step"] for r in one] == [r["step"] for r in other] == list(range(1, STEPS + 1))
    for mine, theirs in zip(one, other, strict=True):
        assert theirs["loss"] == pytest.approx(mine["loss"], rel=1e-5)
        assert theirs["grad_norm"] == pytest.approx(mine["grad_norm"], rel=1e-4)
        assert mine["pp_forward_bytes"] == mine["dp_bytes"] == 0
        assert mine["tokens"] == theirs["tokens"] == mine["step"] * 6 * 32
    # three micro-batches of 2 x 32 x 32 floats cross one boundary, each behind a header of 32 bytes
    assert other[0]["pp_forward_bytes"] == 3 * (2 * 32 * 32 * 4 + 32)
    assert [path.name for path in sorted((tmp_path / "runs/four/checkpoints").iterdir())] == [
        "step-00000004",
        "step-00000006",
    ]
    assert_same_weights(tmp_path)


def assert_same_weights(cwd: Path) -> None:
    """Export both runs' last checkpoints and compare them as Hugging Face loads them."""
    models = []
    for name in ("one", "four"):
        checkpoint = cwd / "runs" / name / "checkpoints" / f"step-{STEPS:08d}"
        assert ShardDirectory(checkpoint).step == STEPS
        target = cwd / f"hf-{name}"
        done = start([sys.executable, "-m", "acsgd.cli", "convert", "to-hf", str(checkpoint), str(target)], cwd)
        assert done.returncode == 0, done.stderr
        models.append(AutoModelForCausalLM.from_pretrained(target))
    for key, tensor in models[0].state_dict().items():
        # AdamW divides by the root of the second moment, so where that is tiny, rounding moves up to a whole step
        assert (tensor - models[1].state_dict()[key]).abs().max() <= 1e-3 * STEPS, key
        assert torch.allclose(tensor, models[1].state_dict()[key], atol=1e-4), key


def test_training_goes_on_from_a_checkpoint_in_bf16_and_with_a_narrow_wire(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    file = run_file(tmp_path, tiny_model("llama"))
    assert train(1, tmp_path, file).returncode == 0
    checkpoint = tmp_path / f"runs/one/checkpoints/step-{STEPS:08d}"
    flags = f"--model.name {checkpoint} --model.dtype bf16 --pp.stages 2 --pp.schedule interleaved --log.dir runs/bf16"
    done = train(2, tmp_path, file, *flags.split())
    assert done.returncode == 0, done.stderr
    before, after = records(tmp_path / "runs/one"), records(tmp_path / "runs/bf16")
    # it starts from trained weights; bf16 has 8 bits, which a mean over 192 tokens averages
    assert after[0]["loss"] == pytest.approx(before[-1]["loss"], abs=0.3)
    assert after[0]["loss"] < before[0]["loss"] - 0.1
    # interleaved: three boundaries between four stages, in bf16
    assert after[0]["pp_forward_bytes"] == 3 * 3 * (2 * 32 * 32 * 2 + 32)


def test_an_error_at_start_is_printed_once_before_anything_is_written(tiny_model: TinyModel, tmp_path: Path) -> None:
    file = run_file(tmp_path, tiny_model())
    before = sorted(tmp_path.rglob("*"))
    message = "pp.stages=3 does not divide the number of processes, 4"
    done = train(4, tmp_path, file, "--pp.stages", "3")
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    assert errors[0].startswith(f"error: {message}")
    assert done.stderr.strip().splitlines()[-2].startswith(f"  traceback : error: {message}"), "torchrun's summary"
    assert sorted(tmp_path.rglob("*")) == before


FAULTY = """
import os, runpy, sys
from acsgd.pp.stage import Stage
forward = Stage.forward
def dying(self, micro, *args, **options):
    if os.environ["RANK"] == "1" and micro.step == 1:
        os._exit(7)
    return forward(self, micro, *args, **options)
Stage.forward = dying
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script in which rank 1 dies in the second step."""


def test_a_dead_rank_is_named_once_with_stage_and_action(tiny_model: TinyModel, tmp_path: Path) -> None:
    file = run_file(tmp_path, tiny_model())
    (tmp_path / "faulty.py").write_text(FAULTY)
    flags = ["--pp.stages", "2", "--run.timeout", "20", "--data.batch", "8", "--pp.micro", "2"]
    done = start([*TORCHRUN, "2", "faulty.py", str(ROOT / "train.py"), str(file), *flags], tmp_path)
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    assert errors[0].startswith("error: step 2, stage 0, action "), errors
    assert f"rank 1 on {socket.gethostname()} is silent" in errors[0]
