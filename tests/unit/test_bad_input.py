"""Every mistake is found before any process group exists, is told in one sentence, and leaves nothing behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from acsgd.config import Config, parse
from acsgd.job import open_data, open_source, prepare
from acsgd.topology import Launch

TinyModel = Callable[..., Path]


def refuse(tmp_path: Path, flags: str, *, world_size: int = 1) -> str:
    """Return the message with which a run is refused; checks that it wrote nothing."""
    run_dir = tmp_path / "runs" / "bad"
    before = sorted(tmp_path.rglob("*"))
    given = flags.split()
    defaults = {
        "--data.task": "demo",
        "--data.sequence": "32",
        "--data.batch": "4",
        "--optim.lr": "1e-3",
        "--optim.steps": "2",
        "--log.dir": str(run_dir),
    }
    for flag, value in defaults.items():
        if flag not in given:
            given += [flag, value]
    config = parse(given)
    with pytest.raises(ValueError) as refused:
        decide(config, Launch(0, 0, world_size))
    assert sorted(tmp_path.rglob("*")) == before, "a refused run wrote something"
    return str(refused.value)


def decide(config: Config, launch: Launch) -> None:
    """Do all that a rank does before it meets the others."""
    job = prepare(config, launch)
    open_data(job)
    open_source(job)


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize(
    ("flags", "world_size", "message"),
    [
        ("--pp.schedule 1f2b", 1, 'pp.schedule="1f2b": unknown name "1f2b"; use "gpipe", "1f1b" or "interleaved"'),
        ("--pp.schedule interleaved:chunk=2", 1, 'has no option "chunk"; it takes "chunks" or "lead"'),
        ("--pp.forward fixpoint8", 1, 'pp.forward="fixpoint8": unknown name'),
        ("--dp.mode allreduce:bucket_mb=0", 1, 'dp.mode="allreduce:bucket_mb=0": bucket_mb=0.0 must be greater'),
        ("--pp.stages 2", 1, "pp.stages=2 does not divide the number of processes, 1; use --pp.stages 1"),
        ("--pp.stages 3", 4, "pp.stages=3 does not divide the number of processes, 4; use --pp.stages 1 or 2 or 4"),
        ("--pp.stages 9", 9, "needs 9 stages, but the model has 8 layers (an embedding, 6 blocks, a head)"),
        ("--pp.stages 3 --pp.schedule interleaved:chunks=3", 3, "needs 9 stages, but the model has 8 layers"),
        ("--pp.micro 4", 2, "into 1 micro-batches, too few for 2 replicas; use a smaller pp.micro, or data.batch"),
        ("--pp.micro 3", 1, "pp.micro=3 does not divide data.batch=4"),
        ("--pp.stages 2 --pp.layers 3 2", 2, "pp.layers=[3, 2] adds up to 5, but the model has 6 blocks"),
        ("--pp.stages 2 --pp.layers 6", 2, "pp.layers=[6] has 1 entries, but there are 2 stages"),
        ("--data.sequence 65", 1, "data.sequence=65 is longer than the model allows; use data.sequence=64 or less"),
        ("--data.task no.jsonl", 1, "no.jsonl does not exist"),
        ("--data.task empty.jsonl", 1, "empty.jsonl is empty"),
        ("--data.task blank.jsonl", 1, "blank.jsonl gives no token"),
        ("--data.task short.txt", 1, "fewer than one sequence"),
        ("--data.task broken.jsonl", 1, "broken.jsonl, line 2"),
        ("--data.task text.csv", 1, 'unknown source "text.csv"'),
        ("--log.dir empty.jsonl/run", 1, "empty.jsonl is a file; give a directory"),
        ("--checkpoint.dir empty.jsonl", 1, "checkpoint.dir=empty.jsonl"),
        ("--run.device cuda", 1, "local rank 0 has no GPU of its own"),
    ],
)
def test_a_run_that_cannot_be_is_refused(
    flags: str, world_size: int, message: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "blank.jsonl").write_text('{"text": ""}\n')
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "broken.jsonl").write_text('{"text": "fine"}\n{"txet": "not"}\n')
    told = refuse(tmp_path, f"--model.name {tiny_model()} {flags}", world_size=world_size)
    assert message in told
    assert "\n" not in told


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    assert "model.name=nothing is a directory without config.json" in refuse(tmp_path, "--model.name nothing")
    assert "model.name=./no/where is not a directory" in refuse(tmp_path, "--model.name ./no/where")


def test_an_id_that_the_hub_does_not_give_is_refused(tmp_path: Path) -> None:
    assert "model.name=no/such-model is neither a directory here nor" in refuse(tmp_path, "--model.name no/such-model")


@pytest.mark.parametrize("model_type", ["opt", "gtp2"])
def test_an_unknown_family_is_refused_with_the_known_ones(model_type: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": model_type}))
    told = refuse(tmp_path, "--model.name model")
    assert f'unknown family "{model_type}"; use "gpt2", "llama", "mistral" or "qwen2"' in told


def test_a_broken_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{")
    assert "is not a config that transformers can read" in refuse(tmp_path, "--model.name model")


def test_a_tokenizer_of_another_model_is_refused(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 100, "n_positions": 64}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert "model has no tokenizer (tokenizer.json" in refuse(tmp_path, "--model.name model --model.init scratch")
    tokenizer.save_pretrained(tmp_path / "model")
    told = refuse(tmp_path, "--model.name model --model.init scratch")
    assert f"has {len(tokenizer)} tokens, but the model's vocabulary only 100" in told


def test_a_model_without_safetensors_is_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for path in tiny_model().iterdir():
        if path.suffix == ".json":
            (model / path.name).write_bytes(path.read_bytes())
    told = refuse(tmp_path, "--model.name model")
    assert "has neither model.safetensors nor model.safetensors.index.json" in told
    assert "--model.init scratch" in told
