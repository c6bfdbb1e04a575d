"""Whole runs under torchrun: their files, and the one message when they fail."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from acsgd import cli
from acsgd.config.run_file import parse
from acsgd.io.checkpoint.directory import CheckpointDirectory
from acsgd.pp.stage import MicroBatch, Stage
from acsgd.pp.wire.frame import HEADER_BYTES
from acsgd.shards.disk import ShardDirectory
from tests.lib.forked_torchrun import ForkedTorchrun, Host, Setup, forked_torchrun, nothing
from tests.lib.forks import finish
from tests.lib.injection import Pace
from tests.lib.launched import TRAIN
from tests.lib.patience import stretched
from tests.lib.ports import free_port

TinyModel = Callable[..., Path]
STEPS = 6
LIMIT_S = 120.0


def train_forked(processes: int, run_file: Path, *flags: str) -> None:
    """Run to the last step without torchrun."""
    finish(parse([str(run_file), "--log.to", "jsonl", *flags]), processes)


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
        dir = "{cwd}/runs/one"
        """
    )
    return path


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", ["two", pytest.param("four", marks=pytest.mark.soak)])
def test_runs_of_two_and_of_four_are_the_run_of_one_and_their_exports_are_what_it_trained(
    name: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Two ranks under torchrun; four without it."""
    file = run_file(tmp_path, tiny_model(n_layer=2))
    train_forked(1, file)
    flags = ["--pp.stages", "2", "--checkpoint.every", "4", "--log.dir", f"{tmp_path}/runs/{name}"]
    if name == "four":
        train_forked(4, file, *flags)
    else:
        with torchrun(tmp_path / "host", "--standalone", "--nproc-per-node", 2, TRAIN, file, *flags) as run:
            assert run.wait(LIMIT_S) == 0, run.stderr
    assert_same_run(tmp_path, name)


def assert_same_run(directory: Path, name: str) -> None:
    """Compare the records, the checkpoints and the exported weights of a run with those of the run of one."""
    one, other = (records(directory / "runs" / each) for each in ("one", name))
    assert [r["step"] for r in one] == [r["step"] for r in other] == list(range(1, STEPS + 1))
    for mine, theirs in zip(one, other, strict=True):
        assert theirs["loss"] == pytest.approx(mine["loss"], rel=1e-5)
        assert theirs["grad_norm"] == pytest.approx(mine["grad_norm"], rel=1e-4)
        assert mine["pp_forward_bytes"] == mine["dp_bytes"] == 0
        assert mine["tokens"] == theirs["tokens"] == mine["step"] * 6 * 32
    # three micro-batches of 2 x 32 x 32 floats cross one boundary, each behind a header
    assert other[0]["pp_forward_bytes"] == 3 * (2 * 32 * 32 * 4 + HEADER_BYTES)
    assert [path.name for path in sorted((directory / "runs" / name / "checkpoints").iterdir())] == [
        "step-00000004",
        "step-00000006",
    ]
    assert_same_weights(directory, name)


def assert_same_weights(directory: Path, name: str) -> None:
    """Export the last checkpoints of a run and of the run of one, load them with transformers, compare the weights."""
    models = []
    for each in ("one", name):
        checkpoint = directory / "runs" / each / "checkpoints" / f"step-{STEPS:08d}"
        assert ShardDirectory(checkpoint).step == STEPS
        target = directory / f"hf-{each}-for-{name}"
        cli.run(["convert", "to-hf", str(checkpoint), str(target)])
        models.append(AutoModelForCausalLM.from_pretrained(target))
    for key, tensor in models[0].state_dict().items():
        # AdamW divides by the root of the second moment, so where that is tiny, rounding moves up to a whole step
        assert (tensor - models[1].state_dict()[key]).abs().max() <= 1e-3 * STEPS, key
        assert torch.allclose(tensor, models[1].state_dict()[key], atol=1e-4), key


def test_a_run_starts_from_a_checkpoint_of_another_run_in_bf16_and_interleaved(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    file = run_file(tmp_path, tiny_model("llama"))
    train_forked(1, file)
    checkpoint = tmp_path / f"runs/one/checkpoints/step-{STEPS:08d}"
    flags = "--model.dtype bf16 --pp.stages 2 --pp.schedule interleaved"
    train_forked(2, file, "--model.name", str(checkpoint), "--log.dir", str(tmp_path / "runs/bf16"), *flags.split())
    before, after = records(tmp_path / "runs/one"), records(tmp_path / "runs/bf16")
    # training starts from trained weights; bf16 has 8 bits, which a mean over 192 tokens averages
    assert after[0]["loss"] == pytest.approx(before[-1]["loss"], abs=0.3)
    assert after[0]["loss"] < before[0]["loss"] - 0.1
    # interleaved: three boundaries between four stages, in bf16
    assert after[0]["pp_forward_bytes"] == 3 * 3 * (2 * 32 * 32 * 2 + HEADER_BYTES)


def test_an_error_at_start_is_printed_once_before_anything_is_written(tiny_model: TinyModel, tmp_path: Path) -> None:
    file = run_file(tmp_path, tiny_model(n_layer=2))
    files = sorted(tmp_path.rglob("*"))
    with torchrun(tmp_path / "host", "--standalone", "--nproc-per-node", "2", TRAIN, file, "--pp.stages", "3") as run:
        assert run.wait(LIMIT_S) != 0
        (error,) = run.errors
        message = "error: pp.stages=3 does not divide the number of processes, 2"
        assert error.startswith(message)
        lines = run.stderr.strip().splitlines()
        assert lines[-1] in [f"rank {rank}: {error}" for rank in range(2)], "torchrun's summary"
        assert len(lines) <= 24 - 8, "with one line for each of eight processes that torchrun ends, one screen"
        assert [path for path in sorted(tmp_path.rglob("*")) if tmp_path / "host" not in [path, *path.parents]] == files
        assert {path.name for path in run.directory.iterdir()} == {"stdout", "stderr", "pids"}


def rank_1_dies() -> None:
    """Let rank 1 die in the second step."""
    forward = Stage.forward

    def dying(self: Stage, micro: MicroBatch, *args: Any, **options: Any) -> Any:
        if os.environ["RANK"] == "1" and micro.step == 1:
            os._exit(7)
        return forward(self, micro, *args, **options)

    Stage.forward = dying  # type: ignore[method-assign]


def test_a_dead_rank_is_named_once_with_stage_and_action(tiny_model: TinyModel, tmp_path: Path) -> None:
    file = run_file(tmp_path, tiny_model(n_layer=2))
    flags = ["--pp.stages", "2", "--run.timeout", stretched(12.0), "--data.batch", "8", "--pp.micro", "2"]
    arguments = ["--standalone", "--nproc-per-node", "2", TRAIN, file, *flags]
    with torchrun(tmp_path / "host", *arguments, worker=rank_1_dies) as run:
        assert run.wait(LIMIT_S) != 0
        (error,) = run.errors
        assert error.startswith("error: step 2, stage 0, action "), error
        assert f"rank 1 on {socket.gethostname()} is silent" in error
        assert run.stderr.strip().splitlines()[-2:] == [
            "torchrun: exit code 1 of rank 0; 7 of rank 1",
            f"rank 0: {error}",
        ]


def test_a_run_whose_worker_is_killed_is_started_again_by_torchrun_and_resumes(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """--max-restarts: torchrun's store keeps what the first attempt has written, its failures among it."""
    file, steps = run_file(tmp_path, tiny_model(n_layer=2)), 20
    static = ["--nnodes", "1", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    flags = ["--pp.stages", "2", "--checkpoint.every", "1", "--optim.steps", steps]
    arguments = [*static, "--max-restarts", "1", "--nproc-per-node", "2", TRAIN, file, *flags]
    with torchrun(tmp_path / "host", *arguments, worker=Pace(0.1)) as run:
        run.wait_until(lambda: list(tmp_path.glob("runs/one/checkpoints/step-*")), LIMIT_S)
        os.kill(run.workers[1], signal.SIGKILL)
        assert run.wait(LIMIT_S) == 0, run.stderr
        assert run.stdout.count("resuming from") == 1
    assert [r["step"] for r in records(tmp_path / "runs" / "one")] == list(range(1, steps + 1))


def test_a_run_of_one_host_resumes_on_two_with_disks_of_their_own_of_which_one_is_empty(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    file, hosts = run_file(tmp_path, tiny_model(n_layer=2)), [tmp_path / name for name in ("a", "b")]
    flags = ["--pp.stages", "2", "--checkpoint.every", "2"]
    train_forked(2, file, *flags, "--log.dir", str(hosts[0] / "run"))
    paths = [CheckpointDirectory(host / "run" / "checkpoints") for host in hosts]
    expected = ShardDirectory(paths[0].of(STEPS)).manifest.layers
    for step in (4, STEPS):
        paths[0].remove(step)
    hosts[1].mkdir()
    (hosts[1] / "cache").symlink_to(hosts[0] / "cache")
    train_on_hosts(hosts, file, *flags, "--log.dir", "run")
    for host, path in zip(hosts, paths, strict=True):
        assert [r["step"] for r in records(host / "run")] == list(range(1, STEPS + 1))
        assert path.steps() == [2, 4, STEPS]
        last = ShardDirectory(path.of(STEPS))
        assert last.manifest.layers == expected
        assert not [*last.corrupt_files(), *last.elsewhere]


def train_on_hosts(hosts: list[Path], *arguments: Any) -> None:
    """Run to the last step on hosts of one process with a directory each."""
    port = str(free_port())
    with contextlib.ExitStack() as stack:
        runs = []
        for rank, host in enumerate(hosts):
            static = ["--nnodes", len(hosts), "--node-rank", rank, "--master-addr", "127.0.0.1", "--master-port", port]
            runs.append(stack.enter_context(torchrun(host, "--nproc-per-node", 1, *static, TRAIN, *arguments)))
        for run in runs:
            assert run.wait(LIMIT_S) == 0, run.stderr
        assert f"run/checkpoints is a directory of its own on {len(hosts)} hosts" in runs[0].stderr


@contextlib.contextmanager
def torchrun(directory: Path, *arguments: object, worker: Setup = nothing) -> Iterator[ForkedTorchrun]:
    """Start torchrun in a directory, forked, since interpreters take seconds to start. worker: see `Host`."""
    directory.mkdir(exist_ok=True)
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with forked_torchrun(Host([*map(str, arguments)], environment, directory, worker=worker)) as run:
        yield run
