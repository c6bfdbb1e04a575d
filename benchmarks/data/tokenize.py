"""Time to tokenize a file of JSON lines, against `datasets.map` and against the bare tokenizer:

    .venv/bin/python -m benchmarks.data.tokenize [--model gpt2] [--megabytes 20] [--rounds 5]

Of plain texts, prompts with answers, and chats. Ours reads the file and writes the token cache to disk, as a run does.
`datasets.map` has one process per core; it begins with the records already loaded, and writes tokens and masks of
targets. The bare tokenizer calls encode_batch on the texts in memory, with all cores, and drops the result. Sides
alternate; a ratio is the time of the other side divided by ours, so that more than 1 means that ours is faster. The
ratio of processor time, of the bare tokenizer only, does not depend on what else runs on the machine.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import datasets
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from acsgd.config.options import Config, DataConfig, ModelConfig, OptimConfig
from acsgd.io.data.row_spec import RowSpec
from acsgd.io.data.sources.sources import parse_sources
from acsgd.io.data.tokens.corpus import Corpus
from acsgd.io.data.tokens.encode import DocumentEncoder
from acsgd.io.data.tokens.tokens import open_tokens
from acsgd.tasks import find_task
from benchmarks.common.compare import Comparison, alternate, summarise

MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{% else %}{{ message.content }}<|im_end|>"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML, with marks around what the assistant writes."""
BATCH = 1000
"""Texts per call of encode_batch and of the function of `map`, whose default this is."""
CORES = len(os.sched_getaffinity(0))
GOALS = {"map": 1.0, "bare": 0.8}


def tokens_of(path: Path, tokenizer: PreTrainedTokenizerBase, cache: Path) -> Corpus:
    """Tokenize a file of documents into an empty cache."""
    sources, size = parse_sources(str(path)), len(tokenizer)
    data, model = DataConfig(sources=str(path), sequence=8, batch=1), AutoConfig.for_model("gpt2", vocab_size=size)
    spec = RowSpec.of(
        Config(ModelConfig("none"), data, OptimConfig(lr=1.0, steps=1)), find_task("lm"), model, tokenizer, sources
    )
    return open_tokens(sources[0].source, spec, tokenizer, cache, DocumentEncoder(tokenizer), vocab_size=size)


class Kind(NamedTuple):
    """Records of one format, and how `datasets.map` tokenizes them."""

    record: Callable[[list[str]], dict[str, Any]]
    """Makes a record of pieces of text."""
    text: Callable[[PreTrainedTokenizerBase, dict[str, Any]], str]
    """Returns the text of a record."""
    tokenize: Callable[[PreTrainedTokenizerBase, dict[str, list[Any]]], dict[str, Any]]
    """Tokenizes a batch of columns."""
    template: str | None = None


def plain(tokenizer: PreTrainedTokenizerBase, batch: dict[str, list[Any]]) -> dict[str, Any]:
    ids = tokenizer(batch["text"], add_special_tokens=False, return_attention_mask=False)["input_ids"]
    return {"input_ids": [[*each, tokenizer.eos_token_id] for each in ids]}


def masked(tokenizer: PreTrainedTokenizerBase, batch: dict[str, list[Any]]) -> dict[str, Any]:
    texts = [prompt + answer for prompt, answer in zip(batch["prompt"], batch["completion"], strict=True)]
    options = {"add_special_tokens": False, "return_attention_mask": False, "return_offsets_mapping": True}
    encoded = tokenizer(texts, **options)
    ids = [[*each, tokenizer.eos_token_id] for each in encoded["input_ids"]]
    masks = [
        [*(end > len(prompt) for _, end in spans), True]
        for prompt, spans in zip(batch["prompt"], encoded["offset_mapping"], strict=True)
    ]
    return {"input_ids": ids, "targets": masks}


def chat(tokenizer: PreTrainedTokenizerBase, batch: dict[str, list[Any]]) -> dict[str, Any]:
    options = {"return_dict": True, "return_assistant_tokens_mask": True}
    encoded = tokenizer.apply_chat_template(batch["messages"], **options)
    return {"input_ids": encoded["input_ids"], "targets": encoded["assistant_masks"]}


def unmarked(tokenizer: PreTrainedTokenizerBase, batch: dict[str, list[Any]]) -> dict[str, Any]:
    """Without targets, which `apply_chat_template` finds only by marks."""
    return {"input_ids": tokenizer.apply_chat_template(batch["messages"], return_dict=True)["input_ids"]}


def messages(pieces: list[str]) -> dict[str, Any]:
    roles = itertools.cycle(("user", "assistant"))
    return {"messages": [{"role": role, "content": piece} for role, piece in zip(roles, pieces, strict=False)]}


def rendered(tokenizer: PreTrainedTokenizerBase, record: dict[str, Any]) -> str:
    text = tokenizer.apply_chat_template(record["messages"], tokenize=False)
    assert isinstance(text, str)
    return text


UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
KINDS = {
    "text": Kind(lambda pieces: {"text": " ".join(pieces)}, lambda _, record: record["text"], plain),
    "prompt": Kind(
        lambda pieces: {"prompt": " ".join(pieces[:3]), "completion": " " + pieces[3]},
        lambda _, record: record["prompt"] + record["completion"],
        masked,
    ),
    "chat": Kind(messages, rendered, chat, MARKED),
    "chat without marks": Kind(messages, rendered, unmarked, UNMARKED),
}


def pieces(text: str) -> Iterator[list[str]]:
    """Yield four pieces of text of 100 to 699 characters each, of lengths that vary, without end."""
    start, number = 0, 0
    while True:
        found = []
        for _ in range(4):
            length = 100 + number * 7919 % 600
            found.append(text[start : start + length].strip() or "x")
            start, number = (start + length) % (len(text) - 1000), number + 1
        yield found


def write(path: Path, kind: Kind, text: str, nbytes: int) -> list[dict[str, Any]]:
    """Write records of about `nbytes` in all; return them."""
    records = []
    with path.open("w") as file:
        for each in pieces(text):
            records.append(kind.record(each))
            file.write(json.dumps(records[-1]) + "\n")
            if file.tell() >= nbytes:
                return records
    raise AssertionError


def load(model: str | None, text: str, template: str | None) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model, or else a byte-level BPE of 8192 tokens, trained on a text."""
    if model:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model)
    else:
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        bpe.train_from_iterator(
            text.splitlines(keepends=True),
            trainers.BpeTrainer(vocab_size=8192, initial_alphabet=alphabet, show_progress=False),
        )
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = template
    return tokenizer


def compare(name: str, kind: Kind, options: argparse.Namespace, text: str, scratch: Path) -> dict[str, Any]:
    """Compare all sides on one kind of records."""
    tokenizer = load(options.model, text, kind.template)
    path, number = scratch / "records.jsonl", itertools.count()
    records = write(path, kind, text, int(options.megabytes * 2**20))
    texts = [kind.text(tokenizer, record) for record in records]

    def ours(_: int) -> float:
        return len(tokens_of(path, tokenizer, scratch / f"cache-{next(number)}").tokens)

    def bare(_: int) -> float:
        encode = tokenizer.backend_tokenizer.encode_batch
        batches = (encode(texts[i : i + BATCH], add_special_tokens=False) for i in range(0, len(texts), BATCH))
        return sum(len(each) for batch in batches for each in batch) + len(texts) * (kind.template is None)

    loaded = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(scratch / "datasets"))

    def mapped(_: int) -> float:
        function = functools.partial(kind.tokenize, tokenizer)
        target = str(scratch / f"map-{next(number)}.arrow")
        made = loaded.map(
            function,
            batched=True,
            num_proc=CORES,
            remove_columns=loaded.column_names,
            cache_file_name=target,
            load_from_cache_file=False,
        )
        return sum(made.data.column("input_ids").combine_chunks().value_lengths().to_pylist())

    found: dict[str, Any] = {"tokens": int(bare(0))}
    for other, side in (("map", mapped), ("bare", bare)):
        ranks = alternate(ours, side, warmup=1, rounds=options.rounds, steps=1, barrier=lambda: None)
        found[other] = summarise([ranks], steps=1)
        assert found[other].loss_error == 0, f"{name}: ours and {other} have different numbers of tokens"
    return found


def ratios(comparison: Comparison) -> list[float]:
    """Return the time of the other side divided by ours, of each round."""
    return sorted(1 / ratio for ratio in comparison.ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory with a tokenizer; default: one of 8192 tokens, trained on the text")
    parser.add_argument("--text", type=Path, help="text of the records; default: the topics of Python's help()")
    parser.add_argument("--megabytes", type=float, default=20, help="size of each file of records")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/tokenize.json"))
    options = parser.parse_args()
    datasets.disable_progress_bars()
    text = options.text.read_text() if options.text else "\n".join(topics[topic] for topic in sorted(topics))
    table = Table("records", "M tokens", "ours, M/s", "against", "ratio", "lowest", "highest", "processor", "goal")
    results: dict[str, Any] = {}
    for name in options.kinds.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            found = compare(name, KINDS[name], options, text, Path(scratch))
        for other, goal in GOALS.items():
            low, *_, high = each = ratios(found[other])
            median, rate = 1 / found[other].median, found["tokens"] / found[other].ours_s / 1e6
            cpu = 1 / found[other].cpu if other == "bare" else None
            cells = (f"{found['tokens'] / 1e6:.2f}", f"{rate:.2f}", other, f"{median:.2f}", f"{low:.2f}", f"{high:.2f}")
            table.add_row(name, *cells, f"{cpu:.2f}" if cpu else "", f"{goal}")
            values = {"tokens": found["tokens"], "rate": rate, "median": median, "ratios": each, "cpu": cpu}
            results[f"{name} / {other}"] = values
    Console().print(table)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    environment = {"cores": CORES, "python": platform.python_version(), "datasets": datasets.__version__}
    options.json.write_text(json.dumps({**environment, "model": options.model, "results": results}, indent=2))


if __name__ == "__main__":
    main()
