"""Law: `acsgd convert to-hf` writes what transformers loads completely, with a card that says how it was trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lib.commands import acsgd
from lib.saved import SMALL, small_run, train_alone
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

TinyModel = Callable[..., Path]


@pytest.fixture
def shards(tiny_model: TinyModel, tmp_path: Path) -> Path:
    assert acsgd("convert", "from-hf", tiny_model("gpt2"), tmp_path / "shards") == (0, "")
    return tmp_path / "shards"


@pytest.mark.parametrize("size", ["10KB", "0.05MB", "1GiB"])
def test_files_have_the_chosen_size(size: str, shards: Path, tiny_model: TinyModel, tmp_path: Path) -> None:
    target = tmp_path / "target"
    assert acsgd("convert", "to-hf", shards, target, "--shard-size", size) == (0, "")
    limit = {"10KB": 10_000, "0.05MB": 50_000, "1GiB": 2**30}[size]
    files = {path.name: load_file(path) for path in target.glob("*.safetensors")}
    for name, tensors in files.items():
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= limit, name
    if size == "1GiB":
        assert list(files) == ["model.safetensors"]
        assert not (target / "model.safetensors.index.json").exists()
    else:
        index = json.loads((target / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == {key: name for name, tensors in files.items() for key in tensors}
        assert index["metadata"]["total_size"] == sum(x.nbytes for tensors in files.values() for x in tensors.values())
        assert sorted(files) == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    loaded, info = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(info.values()), info
    original = AutoModelForCausalLM.from_pretrained(tiny_model("gpt2")).state_dict()
    assert all(torch.equal(tensor, original[name]) for name, tensor in loaded.state_dict().items())


def test_a_size_of_another_form_is_refused(shards: Path, tmp_path: Path) -> None:
    for size in ("", "5", "GB", "-1GB", "0GB", "5XB", "1.2.3GB", "5 GB", "nanGB"):
        code, printed = acsgd("convert", "to-hf", shards, tmp_path / "target", f"--shard-size={size}")
        assert (code, printed) == (
            2,
            f'error: --shard-size {size} is not a size; give a number with a unit, such as "5GB" or "500MB"\n',
        )
        assert not (tmp_path / "target").exists()


def test_a_trained_model_loads_completely(tiny_model: TinyModel, tmp_path: Path) -> None:
    model, target = tiny_model("gpt2", **SMALL), tmp_path / "target"
    checkpoint = train_alone(small_run(model, tmp_path / "runs" / "run")) / "step-00000002"
    assert acsgd("convert", "to-hf", checkpoint, target) == (0, "")
    assert json.loads((target / "generation_config.json").read_text())
    assert AutoTokenizer.from_pretrained(target)("for a while").input_ids
    card = (target / "README.md").read_text()
    for row in ("| started from | gpt2 |", "| sources | demo |", "| optimizer steps | 2 |", "| optim.lr | 0.001 |"):
        assert row in card
    assert str(tmp_path.parent) not in card
    assert 'base_model: "gpt2"' in card
    _, info = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(info.values()), info
