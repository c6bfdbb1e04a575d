"""Laws of `acsgd generate` on several ranks: the texts are those of one process, whatever the number of stages."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lib.commands import acsgd
from lib.model_types import CAUSAL, small_config
from lib.models import blocks_of
from lib.ranks import on_ranks
from lib.saved import small_run, train_alone
from transformers import RwkvConfig

from acsgd import __main__ as entry
from acsgd.commands.generation.model import StagePlace, load
from acsgd.commands.generation.options import GenerateOptions
from acsgd.commands.generation.trial import find_difference
from acsgd.config.options import AdapterConfig
from acsgd.config.run_file import parse_flags
from acsgd.model_classes import MODEL_CLASSES

TinyModel = Callable[..., Path]
TEXTS = ["The", "The statement of the list", "x =", "A class definition is an executable", "for", "and so on: 1, 2, 3"]


def generate_on_rank(rank: int, world_size: int, port: int, arguments: Sequence[str]) -> None:
    """Run `python -m acsgd generate` as torchrun starts it. port: of the store."""
    os.environ |= {
        **{"RANK": str(rank), "LOCAL_RANK": str(rank)},
        **{"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"},
    }
    entry.main(["generate", *arguments], prog="python -m acsgd")


def begin(whole: Path, target: Path, *, records: int) -> None:
    """Write the first records of an output file, as if its process had been killed after them."""
    target.write_text("".join(whole.read_text().splitlines(keepends=True)[:records]))
    shutil.copy(f"{whole}.options.json", f"{target}.options.json")


@pytest.mark.parametrize(
    "name", ["greedy", *(pytest.param(x, marks=pytest.mark.soak) for x in ("sampled", "adapter", "on disk"))]
)
def test_texts_of_stages_are_those_of_one_process(name: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    """A tied table, sliding windows and a checkpoint with LoRA; greedy and sampled, more batches than are on their way;
    and a file that one process has begun."""
    source = tmp_path / "in.jsonl"
    source.write_text("".join(f"{json.dumps({'prompt': text})}\n" for text in TEXTS * 2))
    tied = tiny_model("gpt2", tie_word_embeddings=True, **blocks_of("gpt2", 4))
    windows = tiny_model("mistral", **blocks_of("mistral", 4))
    commands = {
        "greedy": lambda: [str(tied), "--batch", "2"],
        "sampled": lambda: [str(windows), "--batch", "3", "--temperature", "1.5", "--dtype", "bfloat16"],
        "adapter": lambda: [str(trained_adapter(tied, tmp_path)), "--batch", "4"],
        "on disk": lambda: [str(trained_adapter(tied, tmp_path)), "--batch", "4", "--offload", "disk"],
    }
    arguments = [*commands[name](), "--file", str(source), "--max-new-tokens", "12", "--out"]
    code, printed = acsgd("generate", *arguments, tmp_path / "alone")
    assert code == 0, printed
    if name == "greedy":
        begin(tmp_path / "alone", tmp_path / "together", records=3)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    on_ranks(3, generate_on_rank, store.port, [*arguments, str(tmp_path / "together")])
    assert (tmp_path / "together").read_text() == (tmp_path / "alone").read_text()
    assert len({*(tmp_path / "together").read_text().splitlines()}) > 4, "a test that can fail"


def trained_adapter(model: Path, tmp_path: Path) -> Path:
    """Train LoRA in one process; return the checkpoint."""
    return train_alone(replace(small_run(model, tmp_path / "run"), adapter=AdapterConfig("lora:r=2")))


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=[] if name in ("gpt_neo", "bloom", "deepseek_v3") else pytest.mark.soak)
        for name in CAUSAL
    ],
)
def test_a_trial_finds_no_difference_for_any_type(model_type: str) -> None:
    """Each stage takes positions, windows and biases from its own cache."""
    config = small_config(model_type)
    model_class = MODEL_CLASSES["lm"]
    assert find_difference(model_class, config, model_class.layers(config)) == ""


def test_a_model_that_does_not_generate_in_stages_is_refused() -> None:
    """A recurrent state is not a list of keys."""
    model_class, config = MODEL_CLASSES["lm"], RwkvConfig(hidden_size=32, num_hidden_layers=2, vocab_size=96)
    assert "start it without torchrun" in find_difference(model_class, config, model_class.layers(config))


@pytest.mark.parametrize(
    ("options", "generation", "reason"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, {}, "keeps state outside"),
        ({}, {"prefill_chunk_size": 4}, "prefill_chunk_size needs the model in one process"),
        ({"num_hidden_layers": 1}, {}, "has 1 blocks, too few for 2 processes"),
    ],
)
def test_a_model_that_needs_one_process_is_refused(
    options: dict[str, Any], generation: dict[str, Any], reason: str, tiny_model: TinyModel
) -> None:
    directory = tiny_model("llama", **options)
    if generation:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    with pytest.raises(ValueError, match=reason):
        load(str(directory), dtype=None, device=torch.device("cpu"), place=StagePlace(0, 2))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--num-beams", "2", "--prompt", "x"], "--num-beams needs the whole model"),
        (["--adapter", "adapter", "--prompt", "x"], "--adapter needs the whole model"),
        ([], "a chat runs in one process"),
        (["--prompt", "x", "--timeout", "0"], "--timeout=0.0 must be at least 0.1"),
    ],
)
def test_what_needs_one_process_is_refused_under_torchrun(words: Sequence[str], reason: str) -> None:
    options = parse_flags(GenerateOptions, ["model", *words], prog="acsgd generate")
    with pytest.raises(ValueError, match=reason):
        options.check(world_size=2)
