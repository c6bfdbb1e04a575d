"""The example files for users of other tools are valid, and train at a small size."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lib.labelled import SIZES, with_special_tokens
from lib.saved import train_alone
from transformers import AutoConfig, PreTrainedTokenizerFast

from acsgd.config.checks import check
from acsgd.config.run_file import parse
from acsgd.model_classes import MODEL_CLASSES
from acsgd.run.plan.plugins import check_capabilities, parse_plugins
from acsgd.tasks import check_options
from examples.chats import chats

EXAMPLES = Path(__file__).parents[2] / "examples"
NEOX = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
OPT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "ffn_dim": 48, "word_embed_proj_dim": 32}
T5 = {"d_model": 32, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 4, "d_kv": 8, "d_ff": 48}
GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "opt-cocktail": ("opt", "lm", OPT),
    "neox-oig": ("gpt_neox", "lm", NEOX),
    "t5-folder": ("t5", "seq2seq", T5 | {"decoder_start_token_id": 0}),
    "gpt2-delta": ("gpt2", "lm", GPT2),
    "chat-model": ("gpt2", "lm", GPT2),
    "deberta-cola": ("deberta-v2", "classification", SIZES["deberta-v2"] | {"num_hidden_layers": 1}),
    "deberta-cola qnli": ("deberta-v2", "classification", SIZES["deberta-v2"] | {"num_hidden_layers": 1}),
}
"""Example -> type of the model, task, and sizes."""
WORDS = "The river is wide, and the boat will sail when the rain is over."


def write_data(directory: Path) -> dict[str, list[str]]:
    """Write small data in the layout of each example; return the options that name them."""

    def write(name: str, *lines: object) -> Path:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("".join(f"{text}\n" for text in texts))
        return path

    cot = write("cot.json", {f"subject {n}": f"{WORDS}\n\nA: {WORDS * 3}" for n in range(8)})
    oig = [write(f"oig-{n}.jsonl", *[{"text": f"<human>: {WORDS}\n<bot>: {WORDS}"}] * 40) for n in (1, 2)]
    for part in ("train/a", "train/b", "val/a"):
        write(
            f"t5/{part}.jsonl",
            *[{"input": WORDS, "output": "positive"}, {"input": WORDS[:9], "output": "negative"}] * 20,
        )
    wiki = write("wiki.txt", *(f" = {n} = \n\n{WORDS * 4}" for n in range(20)))
    dialogues = write("chats.jsonl", *({"messages": messages} for messages in chats(40)))
    cola = write("cola.tsv", *(f"gj04\t{n % 2}\t\t{WORDS[: 30 + n]}" for n in range(40)))
    labels = ("entailment", "not_entailment")
    qnli = write(
        "qnli.tsv", "index\tquestion\tsentence\tlabel", *(f"{n}\tWho?\t{WORDS}\t{labels[n % 2]}" for n in range(40))
    )

    def both(source: str) -> list[str]:
        return ["--data.sources", source, "--data.eval_sources", source]

    return {
        "opt-cocktail": ["--data.sources", f"cot:{cot}"],
        "neox-oig": ["--data.sources", f"{oig[0]}:0.7,{oig[1]}:0.3"],
        "t5-folder": ["--data.sources", str(directory / "t5/train"), "--data.eval_sources", str(directory / "t5/val")],
        "gpt2-delta": both(f"wikitext:{wiki}"),
        "chat-model": ["--data.sources", str(dialogues)],
        "deberta-cola": both(f"glue:cola:{cola}"),
        "deberta-cola qnli": [*both(f"glue:qnli:{qnli}"), "--checkpoint.best", "accuracy"],
    }


@pytest.fixture
def small(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Callable[[str], list[str]]:
    """Return a function that gives the options which make an example small."""

    def options(name: str) -> list[str]:
        family, task, sizes = MODELS[name]
        special = with_special_tokens(tokenizer) if task != "lm" else tokenizer
        ids = {"pad_token_id": special.pad_token_id, "eos_token_id": special.eos_token_id}
        limits = {} if family == "gpt2" else {"max_position_embeddings": 64}
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, vocab_size=len(special), bos_token_id=0, **ids, **limits, **sizes)
        MODEL_CLASSES[task].auto_class.from_config(config).save_pretrained(tmp_path / "model")
        special.save_pretrained(tmp_path / "model")
        size = "--data.sequence 32 --data.batch 8 --pp.micro 1 --optim.warmup 1"
        return ["--model.name", str(tmp_path / "model"), "--log.dir", str(tmp_path / "run"), *size.split()]

    return options


@pytest.mark.parametrize("name", sorted({name.partition(" ")[0] for name in MODELS}))
def test_the_options_of_an_example_are_valid(name: str) -> None:
    config = parse([str(EXAMPLES / f"{name}.toml")])
    check(config)
    check_options(config)
    plugins = parse_plugins(config)
    check_capabilities(config, plugins.mode.requires, plugins.optimizer.capabilities)


SLOW = {"neox-oig", "t5-folder", "deberta-cola", "deberta-cola qnli"}
"""Examples whose models take seconds to derive."""


@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.soak] * (each in SLOW)) for each in MODELS])
def test_an_example_trains_at_a_small_size(name: str, small: Callable[[str], list[str]], tmp_path: Path) -> None:
    path = str(EXAMPLES / f"{name.partition(' ')[0]}.toml")
    length = "--optim.steps 2 --optim.epochs None --eval.every None --checkpoint.every None --log.to jsonl"
    alone = "--pp.stages 1 --pp.forward none --pp.backward none --dp.mode allreduce"
    train_alone(parse([path, *small(name), *write_data(tmp_path)[name], *length.split(), *alone.split()]))
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [0 < loss < 20 for loss in losses] == [True, True]
