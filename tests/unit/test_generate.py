"""Laws of `acsgd generate`: its text is transformers' own, in batches as alone, and a resumed file is the same file."""

from __future__ import annotations

import copy
import io
import json
import os
import re
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from lib.commands import acsgd
from lib.model_types import small_config
from lib.models import blocks_of
from lib.processes import started, wait_until
from lib.saved import SMALL, rewrite_tensors, small_run, train_alone
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPTJConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    RwkvConfig,
)

from acsgd import cli
from acsgd.commands.generation import command
from acsgd.commands.generation import model as loading
from acsgd.commands.generation.adapter import PEFTAdapter
from acsgd.commands.generation.decode import Generator
from acsgd.commands.generation.model import load
from acsgd.commands.generation.options import Decoding, GenerateOptions
from acsgd.commands.generation.records import PromptReader, check_output_path, read_records
from acsgd.config.options import DataConfig
from acsgd.config.run_file import parse_flags
from acsgd.errors import RunError
from acsgd.io.checkpoint.directory import CheckpointDirectory
from acsgd.io.data.formats.formats import read_options
from acsgd.optim.fetch import LayerFetch
from acsgd.streams import mix_seed, seed_generators

TinyModel = Callable[..., Path]

TEXTS = ["The", "The statement of the list", "x =", "A class definition is an executable", "for", "and so on: 1, 2, 3"]
TOKENS = ("--max-new-tokens", 12)


def write_records(path: Path, texts: Sequence[str] = TEXTS) -> Path:
    """Write records with a prompt and other fields."""
    path.write_text("".join(f'{{"id": {i}, "prompt": {json.dumps(x)}, "n": 1.50}}\n' for i, x in enumerate(texts)))
    return path


def texts_of(path: Path) -> list[str]:
    """Return the generated texts of an output file."""
    return [json.loads(line)["generated_text"] for line in path.read_text().splitlines()]


def generate_file(model: Path, directory: Path, name: str, *options: object, texts: Sequence[str] = TEXTS) -> Path:
    """Generate for a file of prompts and return the output."""
    out = directory / f"{name}.jsonl"
    source = write_records(directory / "in.jsonl", texts)
    code, printed = acsgd("generate", model, "--file", source, "--out", out, *TOKENS, *options)
    assert code == 0, printed
    return out


def generated_alone(model: Path, texts: Sequence[str], dtype: torch.dtype, **options: Any) -> list[str]:
    """Return what transformers generates after each text alone, without padding. options: of its generate, and seed."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    found, seed = [], options.pop("seed", 0)
    for index, text in enumerate(texts):
        inputs = tokenizer(text, return_tensors="pt")
        seed_generators(mix_seed(seed, index))
        ids = whole.generate(**inputs, max_new_tokens=12, pad_token_id=0, **{"do_sample": False, **options})
        found.append(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return found


def save_model(
    config: PreTrainedConfig,
    directory: Path,
    tokenizer: PreTrainedTokenizerFast,
    auto_class: Any = AutoModelForCausalLM,
) -> None:
    """Write a model with new weights, and its tokenizer."""
    torch.manual_seed(0)
    model = auto_class.from_config(config)
    for param in model.parameters():
        param.data *= 1 if param.dim() < 2 else 4  # else all texts are alike
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_model_is_that_of_transformers(
    dtype: torch.dtype, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """GPT-J has a table of rotary positions among its buffers."""
    config = GPTJConfig(vocab_size=512, n_embd=32, n_layer=2, n_head=2, rotary_dim=8, n_positions=64, eos_token_id=0)
    save_model(config, tmp_path / "model", tokenizer)
    assert acsgd("convert", "from-hf", tmp_path / "model", tmp_path / "shards") == (0, "")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=dtype)
    expected = dict(whole.named_parameters(remove_duplicate=False)) | dict(whole.named_buffers())
    for source in ("model", "shards"):
        model = load(str(tmp_path / source), dtype=dtype, device=torch.device("cpu")).model
        found = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor)
        assert model.generation_config.to_dict() == whole.generation_config.to_dict()


@pytest.mark.parametrize(("family", "dtype"), [("gpt2", "float32"), ("llama", "bfloat16"), ("qwen2", "float32")])
def test_greedy_text_is_that_of_transformers(family: str, dtype: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    """From a Hugging Face directory and from layer shards, also if blocks stay there; a tied table is stored once."""
    model, shards = tiny_model(family, tie_word_embeddings=True, **blocks_of(family, 2)), tmp_path / "shards"
    expected = generated_alone(model, TEXTS, getattr(torch, dtype))
    assert acsgd("convert", "from-hf", model, shards) == (0, "")
    weights = set[str]()
    for name, source, options in (("a", model, ()), ("b", shards, ()), ("c", shards, ("--offload", "disk"))):
        out = generate_file(source, tmp_path, name, "--dtype", dtype, "--batch", 1, *options)
        assert texts_of(out) == expected
        weights.add(json.loads(Path(f"{out}.options.json").read_text())["weights"])
    assert len(weights) == 1, "a file can be resumed with or without --offload"
    assert len(set(expected)) > 3, "a test that can fail"


@pytest.mark.parametrize(
    ("offload", "end"), [("none", "bfloat16, or --offload cpu (on a GPU) or disk"), ("disk", "bfloat16")]
)
def test_short_memory_is_reported_with_options_that_need_less(
    offload: Any, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*args: Any, **options: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(command, "load", load)
    with pytest.raises(RunError, match=re.escape(end) + "$"):
        command.open_generator("model", Decoding(), dtype=None, device="cpu", offload=offload)


@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_offloaded_parameters_have_values_while_their_block_runs(
    offload: Any, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cpu = tiny_model("gpt2", tie_word_embeddings=True, **blocks_of("gpt2", 3)), torch.device("cpu")
    expected = dict(load(str(path), dtype=None, device=cpu).model.named_parameters())
    refused = r"device is the CPU, .*; give --offload disk|convert it: acsgd convert from-hf"
    with monkeypatch.context() as patch:
        patch.delattr(loading, "_fill")  # refused before anything is read
        with pytest.raises(ValueError, match=refused):
            load(str(path), dtype=None, device=cpu, offload=offload)
    with pytest.raises(ValueError, match="acsgd convert merge ADAPTER TARGET"):
        load(str(path), dtype=None, device=cpu, offload="disk", adapter=cast("PEFTAdapter", object()))
    if offload == "disk":
        assert acsgd("convert", "from-hf", path, tmp_path / "shards") == (0, "")
        path = tmp_path / "shards"
    monkeypatch.setattr(loading, "check_offload", lambda *_: None)
    loaded = load(str(path), dtype=None, device=cpu, offload=offload)
    model, blocks = loaded.model, [*loaded.model.transformer.h]
    held = list[list[bool]]()

    def look(*_: Any) -> None:
        held.append([all(param.stride() != (0,) * param.dim() for param in block.parameters()) for block in blocks])

    for block in blocks:
        block.register_forward_pre_hook(look)
    with torch.inference_mode():
        for _ in range(2):
            model(torch.arange(5)[None])
    assert held == 2 * [[True, False, False], [False, True, False], [False, False, True]]
    found = {name: param.clone() for name, param in loaded.own_parameters()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], param) for name, param in expected.items())


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral"])
def test_a_padded_batch_generates_what_each_prompt_generates_alone(
    family: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Learned positions, rotary positions, and a window shorter than the prompts."""
    model = tiny_model(family, **blocks_of(family, 2))
    alone = generate_file(model, tmp_path, "alone", "--batch", 1)
    for batch in (2, 4):
        assert texts_of(generate_file(model, tmp_path, f"batch {batch}", "--batch", batch)) == texts_of(alone)


def test_a_model_that_padding_changes_gets_one_prompt_at_a_time(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RWKV ignores the mask: padding enters its state."""
    config = RwkvConfig(vocab_size=512, hidden_size=32, num_hidden_layers=2, context_length=64, eos_token_id=0)
    save_model(config, tmp_path / "model", tokenizer)
    expected = generated_alone(tmp_path / "model", TEXTS, torch.float32)
    assert texts_of(generate_file(tmp_path / "model", tmp_path, "out", "--batch", 4)) == expected
    monkeypatch.setattr(Generator, "pads_exactly", lambda generator: True)
    assert texts_of(generate_file(tmp_path / "model", tmp_path, "padded", "--batch", 4)) != expected


@pytest.mark.parametrize("model_type", ["t5", "bart"])
def test_an_encoder_decoder_generates_the_text_of_transformers(
    model_type: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative positions, and learned ones, which count padding: prompts of a batch are padded on the right.

    A run has truncated what is longer than its rows.
    """
    ids = {"pad_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 0, "forced_eos_token_id": None}
    config = small_config(model_type, vocab_size=512, **ids)
    save_model(config, tmp_path / "model", tokenizer, AutoModelForSeq2SeqLM)
    whole = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model")

    def generated(**options: Any) -> list[str]:
        inputs = [tokenizer(text, return_tensors="pt", **options) for text in TEXTS]
        found = [whole.generate(**each, max_new_tokens=12, do_sample=False) for each in inputs]
        return [tokenizer.decode(ids[0], skip_special_tokens=True) for ids in found]

    expected = generated()
    assert acsgd("convert", "from-hf", tmp_path / "model", tmp_path / "shards", "--task", "seq2seq")[0] == 0
    for source in ("model", "shards"):
        assert texts_of(generate_file(tmp_path / source, tmp_path, source, "--batch", 4)) == expected
    enter, behind = LayerFetch.enter, dict[int, int]()

    def look(fetch: LayerFetch, group: int, ahead: int) -> None:
        behind[group] = ahead
        enter(fetch, group, ahead)

    monkeypatch.setattr(LayerFetch, "enter", look)
    assert texts_of(generate_file(tmp_path / "shards", tmp_path, "disk", "--offload", "disk")) == expected
    assert behind == {0: 1, 1: 2, 2: 3, 3: 2}, "behind the last block, the first one of the decoder is fetched"
    assert len(set(expected)) > 1, "a test that can fail"
    options = {"model.task": "seq2seq", "data.sequence": 1, "data.long": "auto"}
    (tmp_path / "model" / "run_options.json").write_text(json.dumps(options))
    cut = generated(truncation=True, max_length=1)
    assert texts_of(generate_file(tmp_path / "model", tmp_path, "cut", "--batch", 4)) == cut
    assert cut != expected, "a test that can fail"


@pytest.mark.parametrize(
    "options",
    [
        {"stop_strings": ["e"]},
        {"stop_strings": ["e"], "eos_token_id": -1},
        {"eos_token_id": -1},
        {"eos_token_id": [9999]},
    ],
)
def test_texts_end_as_generation_config_says(options: dict[str, Any], tiny_model: TinyModel, tmp_path: Path) -> None:
    """Ids that the model cannot generate end nothing, and pad nothing."""
    model = Path(shutil.copytree(tiny_model("llama", num_hidden_layers=1), tmp_path / "model"))
    (model / "generation_config.json").write_text(json.dumps(options))
    expected = generated_alone(model, TEXTS, torch.float32, tokenizer=AutoTokenizer.from_pretrained(model))
    assert texts_of(generate_file(model, tmp_path, "out", "--batch", 4)) == expected
    if "stop_strings" in options:
        assert any(text.endswith("e") for text in expected), "a test that can fail"


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ("--num-beams 3 --batch 4", {"num_beams": 3}),
        ("--temperature 0.7 --seed 7 --batch 1", {"temperature": 0.7, "seed": 7}),
        ("--temperature 2 --top-k 5 --batch 1", {"temperature": 2.0, "top_k": 5}),
        ("--temperature 2 --top-p 0.3 --batch 1", {"temperature": 2.0, "top_p": 0.3}),
        ("--temperature 2 --num-beams 3 --batch 1", {"temperature": 2.0, "num_beams": 3}),
    ],
)
def test_each_option_decodes_as_that_of_transformers(
    flags: str, options: dict[str, Any], tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Whatever generation_config.json says of them, or of what generate returns."""
    model, texts = Path(shutil.copytree(tiny_model("llama", num_hidden_layers=1), tmp_path / "model")), TEXTS[:4]
    sampling = {"do_sample": True, "top_k": 0, "top_p": 1.0} if "temperature" in options else {}
    expected = generated_alone(model, texts, torch.float32, **sampling | options)
    others = {"num_beams": 2, "do_sample": True, "temperature": 0.1, "top_k": 2, "top_p": 0.1}
    config = json.loads((model / "generation_config.json").read_text()) | others | {"return_dict_in_generate": True}
    (model / "generation_config.json").write_text(json.dumps(config))
    assert texts_of(generate_file(model, tmp_path, "out", *flags.split(), texts=texts)) == expected


def test_all_fields_of_a_record_are_kept_as_they_are(tiny_model: TinyModel, tmp_path: Path) -> None:
    lines = [
        '{"prompt": "a", "n": 1.50, "x": "\\u00e9\\n", "n": 2}',
        "",
        '  {"prompt":"b" }  ',
        '{"prompt": "é", "y": {}}',
    ]
    source, out = tmp_path / "in.jsonl", tmp_path / "new" / "out.jsonl"
    source.write_text("\r\n".join(lines))
    assert acsgd("generate", tiny_model(), "--file", source, "--out", out, *TOKENS)[0] == 0
    records = [line.strip()[:-1].rstrip() for line in lines if line]
    written = out.read_text().splitlines()
    assert [line[: len(record)] for line, record in zip(written, records, strict=True)] == records
    assert all(isinstance(json.loads(line)["generated_text"], str) for line in written)
    assert str(tmp_path) not in out.read_text() + (tmp_path / "new" / "out.jsonl.options.json").read_text()


@pytest.mark.parametrize("sampling", [(), ("--temperature", 2, "--top-k", 100, "--top-p", 0.99)])
def test_a_file_that_was_interrupted_anywhere_becomes_the_same_file(
    sampling: tuple[object, ...], tiny_model: TinyModel, tmp_path: Path
) -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    out = generate_file(model, tmp_path, "out", "--batch", 4, *sampling)
    whole = out.read_bytes()
    ends = [place + 1 for place, byte in enumerate(whole) if byte == ord("\n")]
    assert len(ends) == len(TEXTS)
    for end in [0, 1, ends[0], ends[3], ends[-1], ends[1] - 1, ends[4] + 7]:
        out.write_bytes(whole[:end])
        generate_file(model, tmp_path, "out", "--batch", 4, *sampling)
        assert out.read_bytes() == whole


def test_a_killed_process_leaves_a_file_that_is_resumed(tiny_model: TinyModel, tmp_path: Path) -> None:
    """The process is killed after its first records, at no particular point."""
    model, texts = tiny_model("llama"), [f"{number}: {text}" for number in range(4) for text in TEXTS]
    whole = generate_file(model, tmp_path, "whole", "--batch", 2, texts=texts).read_bytes()
    out = tmp_path / "out.jsonl"
    with started(generate_file, model, tmp_path, "out", "--batch", 2, texts=texts) as process:
        wait_until(lambda: out.exists() and out.stat().st_size, process)
    assert process.exitcode == -signal.SIGKILL
    assert whole.startswith(out.read_bytes())
    assert out.read_bytes() != whole
    assert generate_file(model, tmp_path, "out", "--batch", 2, texts=texts).read_bytes() == whole


def test_a_full_disk_is_named_and_the_file_is_resumed(tiny_model: TinyModel, tmp_path: Path) -> None:
    """The limit of the size of files stands for the disk."""
    model = tiny_model("llama", num_hidden_layers=1)
    whole = generate_file(model, tmp_path, "whole").read_bytes()
    out, (soft, hard) = tmp_path / "out.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) - 20, hard))
    try:
        code, printed = acsgd("generate", model, "--file", tmp_path / "in.jsonl", "--out", out, *TOKENS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (code, f"error: {out}: File too large; raise the limit" in printed) == (2, True)
    assert out.read_bytes() == whole[:-20]
    assert generate_file(model, tmp_path, "out").read_bytes() == whole


def test_sampling_depends_on_the_seed(tiny_model: TinyModel, tmp_path: Path) -> None:
    model, sampling = tiny_model("llama", num_hidden_layers=1), ("--temperature", 2)
    texts = [
        texts_of(generate_file(model, tmp_path, f"{place}", *sampling, "--seed", seed))
        for place, seed in enumerate((0, 0, 1))
    ]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        (("--max-new-tokens", 13), "was written with max_new_tokens=12, now 13"),
        (("--temperature", 1), "was written with temperature=0.0, now 1.0"),
        (("--batch", 2), "was written with batch=8, now 2"),
        (("--dtype", "bfloat16"), 'was written with dtype="float32", now "bfloat16"'),
    ],
)
def test_a_file_is_resumed_with_the_same_options_only(
    options: tuple[object, ...], difference: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    out = generate_file(tiny_model(), tmp_path, "out")
    before = out.read_bytes()
    code, printed = acsgd("generate", tiny_model(), "--file", tmp_path / "in.jsonl", "--out", out, *TOKENS, *options)
    assert code == 2
    assert f"error: {out} {difference}; use the same to resume it, or remove {out}" in printed
    assert out.read_bytes() == before


def test_a_file_is_resumed_with_the_same_model_and_prompts_only(tiny_model: TinyModel, tmp_path: Path) -> None:
    model, source = tiny_model("llama"), tmp_path / "in.jsonl"
    out = generate_file(model, tmp_path, "out")
    command = ("generate", tiny_model("llama", rms_norm_eps=1e-5), "--file", source, "--out", out, *TOKENS)
    assert acsgd(*command)[0] == 0, "the weights are the same"
    code, printed = acsgd("generate", tiny_model("qwen2"), *command[2:])
    assert (code, "was written with other weights;" in printed) == (2, True)
    write_records(source, [*TEXTS[:-1], "other"])
    code, printed = acsgd(*command)
    assert (code, "was written with other prompts" in printed) == (2, True)
    source.write_text(write_records(source).read_text().replace("1.50", "1.5"))
    code, printed = acsgd(*command)
    assert (code, f"{out}, line 1 is not record 1 of the input" in printed) == (2, True)


def test_a_file_of_something_else_is_kept(tiny_model: TinyModel, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("my notes\n")
    source = write_records(tmp_path / "in.jsonl")
    code, printed = acsgd("generate", tiny_model(), "--file", source, "--out", out)
    assert code == 2
    assert f"error: {out} exists, but out.jsonl.options.json does not" in printed
    assert out.read_text() == "my notes\n"
    code, printed = acsgd("generate", tiny_model(), "--file", source, "--out", source)
    assert (code, printed) == (2, f"error: --out {source} is the input itself; give another file\n")


IN = {"instruction": "Add.", "input": "1 2"}
ALPACA = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n"
)
"""The prompt of IN, as Stanford Alpaca (Taori et al. 2023) writes it."""
PROMPTS: list[tuple[str, dict[str, object], str] | tuple[str, dict[str, object], str, str]] = [
    ("", {"prompt": "a"}, "a"),
    ("", {"question": "a", "text": "b"}, "b", "question"),
    ("", {"prompt": "a", "n": 0, "tags": [], "note": None}, "a", "n"),
    ("", {"messages": [{"role": "user", "content": "a"}]}, "user:a;assistant:"),
    ("", {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "user:a;assistant:"),
    ("--field q", {"q": [{"role": "user", "content": "a"}], "system": "s"}, "system:s;user:a;assistant:"),
    ("--chat", {"prompt": "a", "system": "s", "tools": [{"name": "f"}]}, "tools;system:s;user:a;assistant:"),
    ("", IN, ALPACA),
    ("", {**IN, "output": None}, ALPACA),
    ("--input-format Q:__input__A:", {"input": "a"}, "Q:aA:"),
    ("--input-format Q:__input__A: --fields prompt=q,completion=a", {"q": "a"}, "Q:aA:"),
    ("--input-format Q:__input__A: --field q", {"q": "a", "prompt": "b"}, "Q:aA:", "prompt"),
    ("--field q --fields system=s", {"q": [{"role": "user", "content": "a"}], "s": "b"}, "system:b;user:a;assistant:"),
    ("--field q --fields q=meta.x", {"meta": {"x": "a", "n": 1}, "text": "b"}, "a", "meta.n text"),
    ("--field q", {"q": [{"role": "user", "content": "a", "name": "c"}]}, "user:a;assistant:", "messages.name"),
    ("--fields input=q,output=a", {"q": "a", "input": "b", "n": 1}, "a", "input n"),
    ("--input-format Q:__input__A: --format prompt", {"prompt": "a", "input": "b"}, "Q:a\nbA:"),
    ("--input-format Q:__input__A:", {"text": "a"}, "a"),
    ("--chat", {"input": "a"}, "user:a;assistant:"),
    ("--chat --format messages", {"prompt": "a"}, "user:a;assistant:"),
    ("--format text", {"prompt": "a"}, "a"),
    ("--format oig", {"text": "<human>: a\n<bot>: b"}, "<human>: a\n<bot>:"),
    ("--input-format Q:__input__A:", {"input": "b", "history": [["a", "c"]]}, "Q:aA:c\n\nQ:bA:"),
]
"""Options, record, and the prompt that is made of it; fields of the record with a value on which it does not depend."""


@pytest.mark.parametrize(("options", "record", "prompt", "unread"), [(*each, "")[:4] for each in PROMPTS])
def test_a_prompt_is_that_of_training_without_the_answer(
    options: str,
    record: dict[str, object],
    prompt: str,
    unread: str,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
) -> None:
    """The prompts of an adapted record with its answer are those of `acsgd eval --generate`."""
    (tmp_path / "in.jsonl").write_text(f"{json.dumps(record)}\n")
    given = parse_flags(GenerateOptions, ["m", "--file", f"{tmp_path}", *options.split()], prog="acsgd generate")
    used = {name: value for name in ("format", "fields", "input_format") if (value := getattr(given, name)) is not None}
    [reading] = read_options(DataConfig(sources="", sequence=1, batch=1, **used))
    chat = copy.deepcopy(tokenizer)
    chat.chat_template = (
        "{{ 'tools;' if tools }}{% for m in messages %}{{ m.role + ':' + m.content + ';' }}{% endfor %}"
        "{{ 'assistant:' if add_generation_prompt }}"
    )
    reader = PromptReader(reading, chat, field=given.field, is_chat=given.chat)
    [found] = read_records(str(given.file))
    assert reader.of_record(found).text == prompt
    names = {name for note in reader.notes() for name in re.findall(r'"([^"]+)" \(1\)', note)}
    assert names == {*unread.split()}
    assert all(note.startswith(f"--file: {tmp_path}: fields that are not read") for note in reader.notes())


def test_prompts_of_several_sources_are_read_in_their_order_and_not_from_the_output(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "1.jsonl").write_text('{"prompt": "x",  "n": 1.50}\n')
    (tmp_path / "b" / "2.json").write_text('[{"prompt": "y"}]')
    write_records(tmp_path / "a.jsonl", ["z"])
    records = read_records(f"{tmp_path}/b,{tmp_path}/a.jsonl")
    assert [record.fields["prompt"] for record in records] == ["x", "y", "z"]
    assert records[0].text == '{"prompt": "x",  "n": 1.50}'
    for out in ("b/out.jsonl", "a.jsonl", "b"):
        with pytest.raises(ValueError, match=r"^--out .* is (part of )?the input itself; give another file$"):
            check_output_path(tmp_path / out, f"{tmp_path}/b,{tmp_path}/*.jsonl")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": "b"', "line 2 is not JSON (Expecting ',' delimiter at column 15): "),
        ('{"prompt": "a"}\n[1]', "line 2 is not a JSON object: [1]"),
        ('{"prompt": "a"}\n{"text": "b"}', 'line 2 has no string under "prompt"; its fields: "text"; write'),
        (
            '{"question": "a", "id": 1}',
            "line 1, has no field prompt, text, input or messages; its fields: 'question', ",
        ),
        ('{"prompt": 3}', 'line 1 has no string under "prompt"; its fields: "prompt" (a number); write'),
        ('{"prompt": ""}', "line 1: the prompt has no tokens; give a text"),
        ('{"prompt": "\\ud800"}', "line 1: the prompt is not valid UTF-8; correct it"),
        ('{"prompt": "a"}\n\n{"prompt": "' + "a b " * 64 + '"}', "line 3: the prompt has 128 tokens, the model takes"),
        ('{"prompt": "a", "generated_text": "b"}', 'line 1, has a "generated_text" already; rename or remove the'),
        ('{"messages": [{"role": "user", "content": "a"}]}', "line 1: the tokenizer "),
        ("\n", " has no records; give a file with one JSON object per line"),
    ],
)
def test_a_wrong_record_is_named_before_any_work(
    content: str, message: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(content)
    code, printed = acsgd("generate", tiny_model(), "--file", source, "--out", out)
    errors = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert (code, len(errors)) == (2, 1)
    assert errors[0].startswith(f"error: {source}")
    assert message in errors[0]
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--prompt", "a", "--file", "b"), "--prompt and --file exclude each other; give one of them"),
        (("--file", "b"), "--file and --out belong together; give both, or --prompt"),
        (
            ("--prompt", "a", "--timeout", 5),
            "--timeout is the wait for other processes; remove it, or start several with torchrun",
        ),
        (("--prompt", "a", "--field", "b"), "--field names a field of --file; give --file, too"),
        (("--prompt", "a", "--batch", "4"), "--batch is a number of prompts of --file; give --file, too"),
        (("--prompt", "a", "--top-k", 5), "--top-k applies to sampling; add, for example, --temperature 1"),
        (("--prompt", "a", "--top-p", 0), "--top-p=0.0 must be greater than 0, at most 1"),
        (("--prompt", "a", "--max-new-tokens", 0), "--max-new-tokens=0 must be at least 1, at most 1048576"),
    ],
)
def test_a_wrong_option_is_named(options: tuple[object, ...], message: str) -> None:
    assert acsgd("generate", "nowhere", *options) == (2, f"error: {message}\n")


def test_a_run_directory_is_its_newest_valid_checkpoint(tiny_model: TinyModel, tmp_path: Path) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    for step, family in enumerate(("gpt2", "llama", "qwen2"), start=1):
        assert acsgd("convert", "from-hf", tiny_model(family), checkpoints / f"step-{step:08d}") == (0, "")
    corrupt = max((checkpoints / "step-00000003").glob("*.safetensors"))
    corrupt.write_bytes(corrupt.read_bytes()[:-1] + b"!")
    code, printed = acsgd("generate", tmp_path / "run", "--prompt", "The", *TOKENS)
    assert code == 0
    assert "skipped a checkpoint:" in printed
    assert "step-00000002: LlamaForCausalLM" in printed
    code, printed = acsgd("generate", checkpoints / "step-00000003", "--prompt", "The", *TOKENS)
    assert (code, "is corrupt" in printed) == (2, True)

    def gather(name: str, text: str) -> list[str]:
        """Be with another rank, which lacks no checkpoint, and on which the second is corrupt."""
        return [text, {"finding checkpoints": text, "loading step-00000002": "corrupt there"}.get(name, "")]

    loaded = load(str(tmp_path / "run"), dtype=None, device=torch.device("cpu"), gather=gather)
    assert loaded.directory.name == "step-00000001"
    with pytest.raises(RunError, match="is on all hosts"):
        load(str(tmp_path / "run"), dtype=None, device=torch.device("cpu"), gather=lambda _, text: [text, "[]"])


def test_a_checkpoint_generates_what_its_export_generates(tiny_model: TinyModel, tmp_path: Path) -> None:
    """In the dtype of the run, whatever config.json of the model says."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model("gpt2", **SMALL), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    checkpoint = CheckpointDirectory(train_alone(small_run(model, tmp_path / "run"))).of(2)
    assert acsgd("convert", "to-hf", checkpoint, tmp_path / "export") == (0, "")
    code, printed = acsgd("generate", tmp_path / "run", "--prompt", "The")
    assert (code, f"{checkpoint}: GPT2LMHeadModel, 0.0 M parameters, float32 on cpu" in printed) == (0, True)
    texts = texts_of(generate_file(tmp_path / "run", tmp_path, "out", "--batch", 1, texts=["The", "x ="]))
    assert texts == generated_alone(tmp_path / "export", ["The", "x ="], torch.float32)
    assert texts != generated_alone(model, ["The", "x ="], torch.float32), "it was trained"


def message_of(model: Path) -> str:
    """Return the error of a model that cannot be used."""
    code, printed = acsgd("generate", model, "--prompt", "The")
    assert code == 2
    return printed.removeprefix("error: ")


def test_a_directory_without_the_weights_of_a_model_is_refused(
    tiny_model: TinyModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    assert message_of(tmp_path) == (
        f"model={tmp_path} is a directory without config.json; give a Hugging Face model directory or a layer-shard "
        "directory\n"
    )
    shards = tmp_path / "shards"
    assert acsgd("convert", "from-hf", tiny_model("llama"), shards) == (0, "")
    block = max(shards.glob("block-*.safetensors"))
    rewrite_tensors(block, lambda x: x.update(other=x[max(x)] + 1))
    assert message_of(shards) == f"{block} is invalid: it holds other, which the run did not save\n"
    rewrite_tensors(block, lambda x: [x.pop(max(x.keys() - {"other"}))].clear())
    assert message_of(shards) == f"{block} is invalid: it lacks model.layers.5.self_attn.v_proj.weight\n"


def test_a_hugging_face_directory_without_a_parameter_is_refused(
    tiny_model: TinyModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model("llama"), model)
    tensors = load_file(model / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    assert message_of(model).startswith(f"{model} lacks parameters of the model: model.norm.weight; give weights and ")
    classifier = GPT2ForSequenceClassification(
        GPT2Config(vocab_size=512, n_embd=8, n_head=2, n_layer=1, pad_token_id=0)
    )
    classifier.save_pretrained(tmp_path / "classifier")
    tokenizer.save_pretrained(tmp_path / "classifier")
    assert message_of(tmp_path / "classifier") == (
        f"{tmp_path / 'classifier'} holds tensors that GPT2LMHeadModel does not have and that would be lost: "
        "score.weight\n"
    )
    shards = tmp_path / "shards"
    assert acsgd("convert", "from-hf", tmp_path / "classifier", shards, "--task", "classification")[0] == 0
    assert message_of(shards) == f"{shards} holds a GPT2ForSequenceClassification, which does not generate text\n"


def with_template(model: Path, directory: Path) -> Path:
    """Copy a model with a chat template that counts the messages."""
    shutil.copytree(model, directory)
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}\n{% endfor %}{{ messages | length }} a:"
    )
    return directory


def test_a_chat_template_is_applied_once(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = with_template(tiny_model("llama"), tmp_path / "model")
    expected = generated_alone(model, ["u: The\n1 a:", "u: x =\n1 a:"], torch.float32)
    printed = io.StringIO()
    with redirect_stdout(printed):
        cli.run(["generate", str(model), "--prompt", "The", "--chat", "--max-new-tokens", "12"])
    assert printed.getvalue() == expected[0] + "\n"
    out = generate_file(model, tmp_path, "texts", "--chat", texts=["The", "x ="])
    assert texts_of(out) == expected
    source, out = tmp_path / "messages.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"messages": [{"role": "user", "content": "The"}]}\n')
    assert acsgd("generate", model, "--file", source, "--out", out, *TOKENS)[0] == 0
    assert texts_of(out) == expected[:1]


def chat(model: Path, lines: str, output: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Chat with lines as standard input; return the lines on standard output."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    former = signal.getsignal(signal.SIGINT)
    try:
        with redirect_stdout(output):
            cli.run(["generate", str(model), "--max-new-tokens", "12"])
    finally:
        signal.signal(signal.SIGINT, former)
    return output.getvalue().splitlines()


def test_a_chat_keeps_its_messages(tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_template(tiny_model("llama", max_position_embeddings=512), tmp_path / "model")
    printed = io.StringIO()
    chat(model, "The\n\nx =\n", printed, monkeypatch)
    first = generated_alone(model, ["u: The\n1 a:"], torch.float32)[0]
    second = generated_alone(model, [f"u: The\na: {first}\nu: x =\n3 a:"], torch.float32)[0]
    assert printed.getvalue() == f"{first}\n{second}\n"


def test_a_chat_leaves_out_its_oldest_messages(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model = with_template(tiny_model("llama", num_hidden_layers=1), tmp_path / "model")
    printed = io.StringIO()
    chat(model, "The list of words\nx\n" + "a " * 70 + "\nThe\n", printed, monkeypatch)
    first = generated_alone(model, ["u: The list of words\n1 a:"], torch.float32)[0]
    second = generated_alone(model, [f"u: The list of words\na: {first}\nu: x\n3 a:"], torch.float32)[0]
    third = generated_alone(model, [f"u: x\na: {second}\nu: The\n3 a:"], torch.float32)[0]
    assert printed.getvalue() == f"{first}\n{second}\n{third}\n"
    notes = capfd.readouterr().err
    assert notes.count("the conversation is too long for the model: its oldest message and reply are left out") == 3
    assert "error: the prompt has" in notes


def test_a_chat_of_a_run_that_truncates_loses_no_newest_message(
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Unless it alone is too long, which is said; also without a template."""
    ids = {"pad_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 0, "forced_eos_token_id": None}
    plain = tmp_path / "plain"
    save_model(small_config("bart", vocab_size=512, **ids), plain, tokenizer, AutoModelForSeq2SeqLM)
    options = {"model.task": "seq2seq", "data.sequence": 20, "data.long": "auto"}
    (plain / "run_options.json").write_text(json.dumps(options))
    whole, model = AutoModelForSeq2SeqLM.from_pretrained(plain), with_template(plain, tmp_path / "model")

    def reply(text: str) -> str:
        inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=20)
        found = whole.generate(**inputs, max_new_tokens=12, do_sample=False)
        return tokenizer.decode(found[0], skip_special_tokens=True)

    long, cut = "a " * 40, "longer than data.sequence of the run and truncated, as in training: 1"
    expected = [reply(f"u: {text}\n1 a:") for text in ("The", "x =", long)]
    assert chat(model, f"The\nx =\n{long}\n", io.StringIO(), monkeypatch) == expected
    notes = capfd.readouterr().err
    assert (notes.count("its oldest message and reply are left out"), notes.count(cut)) == (2, 1)
    assert chat(plain, f"The\n{long}\n", io.StringIO(), monkeypatch) == [reply("The"), reply(long)]
    assert capfd.readouterr().err.count(cut) == 1


def test_without_a_chat_template_each_line_is_a_prompt(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model, printed = tiny_model("llama"), io.StringIO()
    chat(model, "The\nx =\n", printed, monkeypatch)
    assert printed.getvalue() == "".join(f"{x}\n" for x in generated_alone(model, ["The", "x ="], torch.float32))


class PressingCtrlC(io.StringIO):
    """Standard output that sends SIGINT to this process at the third write of text."""

    writes = 0

    def write(self, text: str) -> int:
        self.writes += bool(text)
        if self.writes == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return super().write(text)


def test_ctrl_c_ends_a_reply_and_not_the_chat(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model, printed = tiny_model("gpt2"), PressingCtrlC()
    chat(model, " I I\n I I\n", printed, monkeypatch)
    whole = generated_alone(model, [" I I"], torch.float32)[0]
    first, second = printed.getvalue().splitlines()
    assert second == whole
    assert 0 < len(first) < len(whole)
    assert whole.startswith(first)
