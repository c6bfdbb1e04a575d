"""Whatever lies in a model directory: it is used, or refused in one sentence that names the file, by all commands."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lib.commands import acsgd
from lib.model_types import small_config
from lib.patience import stretched
from lib.saved import SMALL, small_run, train_alone
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from acsgd.cli import FromHF
from acsgd.commands.generation.model import load
from acsgd.commands.generation.prompts import PromptEncoder
from acsgd.config.options import ModelConfig
from acsgd.errors import RunError
from acsgd.io.checkpoint.directory import newest_checkpoint
from acsgd.launch import Launch
from acsgd.run.plan.job import prepare
from acsgd.shards.disk import MODEL_FILES
from acsgd.shards.export import to_hf
from acsgd.shards.files import tensor_headers
from acsgd.shards.generation import as_field, read_generation_config, set_special_tokens, write_special_tokens
from acsgd.shards.locate import open_model
from acsgd.shards.tokenizer import load_tokenizer

TinyModel = Callable[..., Path]
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%064d\nsize 1000\n" % 0


@pytest.fixture
def model(tiny_model: TinyModel, tmp_path: Path) -> Path:
    """Return a copy of a model of one block."""
    return Path(shutil.copytree(tiny_model("gpt2", **SMALL), tmp_path / "model"))


def sentence_of(command: Callable[[], object]) -> str | None:
    """Return the error of a command, None if it succeeds."""
    try:
        command()
    except (ValueError, RunError) as error:
        return str(error)
    return None


def refused(model: Path, case: str = "", *, quick: bool = False) -> str:
    """Return the sentence with which training and, unless `quick`, also `acsgd convert` refuse a model."""
    target = model.with_name("target")
    sentences = []
    commands: list[Callable[[], object]] = [lambda: open_model(ModelConfig(str(model))), FromHF(str(model), target).run]
    for command in commands[: 1 if quick else 2]:
        sentence = sentence_of(command)
        assert sentence is not None, f"accepted: {case}"
        sentences.append(sentence)
    assert len(set(sentences)) == 1, case
    assert "\n" not in sentences[0], case
    assert not sentences[0].endswith("."), case
    assert not target.exists(), case
    return sentences[0]


def accepted(model: Path) -> None:
    load_tokenizer(*open_model(ModelConfig(str(model)))[:2])
    target = model.with_name("target")
    assert acsgd("convert", "from-hf", model, target) == (0, "")
    assert acsgd("inspect", target) == (0, "")
    shutil.rmtree(target)


# config.json


SIZES = ("n_embd", "n_layer", "n_head", "vocab_size", "n_positions")
WRONG: list[tuple[str, Any]] = [
    *((key, value) for key in SIZES for value in ("abc", None, [1], {}, True, 1.5, 0, -1, 2**31, 10**30)),
    ("n_layer", 5000),
    ("n_embd", 2**30),
    ("n_head", 3),
    ("n_inner", -3),
    ("layer_norm_epsilon", "abc"),
    ("layer_norm_epsilon", float("inf")),
    ("initializer_range", float("nan")),
    ("activation_function", "nope"),
    ("activation_function", 5),
    ("resid_pdrop", 7),
    ("tie_word_embeddings", "yes"),
    ("dtype", "int8"),
    ("dtype", 5),
    ("eos_token_id", "x"),
    ("pad_token_id", {}),
    ("_attn_implementation", "nope"),
    ("id2label", 5),
    ("num_labels", "x"),
    ("quantization_config", {"quant_method": "fp8"}),
    ("model_type", None),
    ("model_type", 5),
    ("model_type", ["gpt2"]),
]


def test_a_wrong_value_in_a_config_is_refused(model: Path) -> None:
    path = model / "config.json"
    fields = json.loads(path.read_text())
    for key, value in WRONG:
        path.write_text(json.dumps({**fields, key: value}))
        assert str(model) in refused(model, f"{key}={value}"), f"{key}={value}"
    path.write_text(json.dumps({**fields, "dtype": "auto"}))
    assert refused(model) == f'{path}: "dtype": "auto" is none of float32, bfloat16, float16, float64; correct it'
    path.write_text(json.dumps({**fields, "model_type": "gtp2"}))
    assert refused(model) == (
        f'{path} is of the unknown type "gtp2" (did you mean gpt2?); correct it, or install a version of transformers '
        "that has it"
    )


def test_a_wrong_value_in_a_config_of_llama_is_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_model("llama", num_hidden_layers=1), tmp_path / "model"))
    path = model / "config.json"
    fields = json.loads(path.read_text())
    wrong: list[tuple[str, Any]] = [
        ("rope_parameters", 5),
        ("rope_parameters", {"rope_type": "nope"}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": "x"}),
        *(("head_dim", value) for value in (-1, 0, 3, "x")),
        *(("num_key_value_heads", value) for value in (-1, 0, 3, "x")),
        *(("intermediate_size", value) for value in (-1, 0, "x", None)),
        ("hidden_act", None),
        ("rms_norm_eps", None),
        ("attention_dropout", 5),
        ("layer_types", ["x"]),
        ("pad_token_id", 1000),
    ]
    for key, value in wrong:
        path.write_text(json.dumps({**fields, key: value}))
        message = refused(model, f"{key}={value}")
        assert str(model) in message, f"{key}={value}"
        assert "divided into layers" not in message, f"{key}={value}"  # what transformers refuses is no matter of them


def test_a_config_that_is_not_an_object_of_json_is_refused(model: Path) -> None:
    path = model / "config.json"
    text = path.read_text()
    wrong: dict[str, bytes] = {
        "empty": b"",
        "list": b"[]",
        "null": b"null",
        "number": b"7",
        "a byte-order mark": b"\xef\xbb\xbf" + text.encode(),
        "UTF-16": text.encode("utf-16"),
        "Latin-1": text.replace("gpt2", "gpt\xe4").encode("latin-1"),
        "a key twice": text.replace("{", '{"n_layer": 1, "n_layer": 2,', 1).encode(),
        "deep nesting": b'{"a":' + b"[" * 200_000,
        "a number of 10,000 digits": text.replace("{", '{"a": ' + "1" * 10_000 + ",", 1).encode(),
        "an infinite number": text.replace("{", '{"a": 1e999,', 1).encode(),
        "two objects": (text + text).encode(),
        "half of it": text[: len(text) // 2].encode(),
        "zeros": bytes(100),
        "a pointer": POINTER,
    }
    for case, content in wrong.items():
        path.write_bytes(content)
        sentence = refused(model, case)
        assert sentence.startswith(f"{path} "), case
    assert sentence == f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` in {model}"


# safetensors


def test_a_file_of_weights_that_is_not_complete_is_refused(model: Path) -> None:
    path = model / "model.safetensors"
    content = path.read_bytes()
    draw = random.Random(0)
    cuts = [0, 1, 7, 8, 9, 100, len(content) // 2, len(content) - 1]
    wrong = {f"cut at {cut}": content[:cut] for cut in cuts}
    wrong |= {
        "one byte more": content + b"\0",
        "a pickle": b"\x80\x04\x95" + draw.randbytes(1000),
        "HTML": b"<html><body>404 Not Found</body></html>",
        "a header of 2**63 bytes": b"\xff" * 8 + content[8:],
    }
    for case, damaged in wrong.items():
        path.write_bytes(damaged)
        assert refused(model, case).startswith(f"{path} is not a complete safetensors file ("), case
    path.write_bytes(POINTER)
    assert refused(model) == f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` in {model}"


def test_a_mutated_header_is_read_or_refused(model: Path) -> None:
    """The header is JSON; each mutation changes one of its bytes."""
    path = model / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    draw = random.Random(1)
    outcomes = {"read": 0, "refused": 0}
    for _ in range(300):
        at = draw.randrange(8 + length)
        damaged = bytearray(content)
        damaged[at] = draw.randrange(256)
        path.write_bytes(damaged)
        sentence = sentence_of(lambda: tensor_headers(path))
        outcomes["read" if sentence is None else "refused"] += 1
        if sentence is not None:
            assert sentence.startswith(f"{path} is not a complete safetensors file ("), f"{at}: {sentence}"
            assert "\n" not in sentence, f"{at}: {sentence}"
    assert min(outcomes.values()) > 10


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.complex64, "C64"),
        (torch.int8, "I8"),
        (torch.uint8, "U8"),
        (torch.bool, "BOOL"),
        (torch.int64, "I64"),
        (torch.float8_e4m3fn, "F8_E4M3"),
    ],
)
def test_weights_that_are_not_floating_point_numbers_are_refused(dtype: torch.dtype, name: str, model: Path) -> None:
    path = model / "model.safetensors"
    tensors = load_file(path)
    tensors["transformer.h.0.mlp.c_fc.weight"] = tensors["transformer.h.0.mlp.c_fc.weight"].to(dtype)
    save_file(tensors, path)
    assert refused(model) == (
        f"{path}: transformer.h.0.mlp.c_fc.weight is of dtype {name}; acsgd trains weights of dtype F64, F32, BF16, "
        "F16: give the model without quantization, or cast it"
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_floating_point_weights_are_accepted(dtype: torch.dtype, model: Path) -> None:
    path = model / "model.safetensors"
    save_file({key: tensor.to(dtype) for key, tensor in load_file(path).items()}, path)
    accepted(model)


def test_a_config_of_another_size_is_refused_at_once(model: Path) -> None:
    path = model / "config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, "n_embd": 16}))
    assert "has shape (24,), but by config.json it has (48,)" in refused(model)
    path.write_text(json.dumps({**fields, "n_layer": 20_000}))
    started = time.perf_counter()
    assert refused(model) == (
        f"{path} says that the model has 20000 blocks, but the files have tensors of at most 1; give config and "
        "weights of the same model"
    )
    assert time.perf_counter() - started < stretched(20.0), "it built the model"


# model.safetensors.index.json


def test_an_index_of_another_form_is_refused(model: Path, tmp_path: Path) -> None:
    index, names = model / "model.safetensors.index.json", list(load_file(model / "model.safetensors"))
    (tmp_path / "secret.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    files: list[Any] = [
        "../secret.safetensors",
        str(tmp_path / "secret.safetensors"),
        "sub/model.safetensors",
        "a\\b",
        "..",
        ".",
        "",
        "a\0b",
        "\ud800",
        "x" * 300,
        5,
        None,
        ["model.safetensors"],
    ]
    wrong = [{"weight_map": dict.fromkeys(names, file)} for file in files]
    wrong += [{"weight_map": value} for value in ([], "x", 5, None)] + [{}, {"metadata": {}}]
    for value in [*wrong, [], None, "x"]:
        index.write_text(json.dumps(value))
        assert refused(model, repr(value)[:100], quick=True).startswith(f"{index} is not "), value
    for value in wrong[:2]:
        index.write_text(json.dumps(value))
        assert "is not a file name; files lie directly in the directory" in refused(model, quick=True)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "absent.safetensors")}))
    assert refused(model) == f"{index} names missing files: absent.safetensors; download them"
    index.write_text(json.dumps({"weight_map": dict.fromkeys([*names, "more"], "model.safetensors")}))
    assert "does not hold more, which the index says" in refused(model)
    index.write_text(json.dumps({"metadata": 5, "weight_map": dict.fromkeys(names, "model.safetensors")}))
    accepted(model)
    shutil.copy(model / "model.safetensors", model / "part.safetensors")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "part.safetensors")}))
    assert refused(model).startswith(f"{model} has model.safetensors, which transformers loads, and {index.name} of")


# What is not a file


def place(kind: str, path: Path) -> None:
    if kind == "directory":
        path.mkdir()
    elif kind == "named pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    elif kind == "dangling link":
        path.symlink_to("nowhere")
    elif kind == "circular link":
        path.symlink_to(path.name)
    else:
        outside = path.parent.with_name("outside")
        outside.write_text("secret")
        path.symlink_to(Path("..") / "outside" if kind == "relative link" else outside.absolute())


def remove(path: Path) -> None:
    path.rmdir() if path.is_dir() else path.unlink()


KINDS = {
    "directory": "is a directory, not a file; rename it or move it elsewhere",
    "named pipe": "is a named pipe, not a file; rename it or move it elsewhere",
    "socket": "is a socket, not a file; rename it or move it elsewhere",
    "dangling link": "is a link to nowhere, which does not exist; put the file in its place",
    "circular link": "is a link to ",
    "relative link": "outside of the directory; put a copy of the file in its place",
    "absolute link": "outside of the directory; put a copy of the file in its place",
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_a_file_inside_the_directory_is_refused(
    kind: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the address of a socket has at most 107 bytes
    model = Path("model")
    needed = ["config.json", "model.safetensors", "tokenizer.json"]
    for name in [*needed, *(pattern.replace("*", "x") for pattern in MODEL_FILES), "model.safetensors.index.json"]:
        path, kept = model / name, Path("kept")
        if is_there := path.exists():
            path.rename(kept)
        place(kind, path)
        sentence = refused(model, name, quick=path.name not in needed)
        assert sentence.startswith(f"{path} is a "), name
        assert KINDS[kind] in sentence, name
        remove(path)
        if is_there:
            kept.rename(path)
    accepted(model)


def test_a_named_pipe_in_place_of_a_manifest_does_not_block(model: Path) -> None:
    os.mkfifo(model / "manifest.json")
    with pytest.raises(RunError, match=r"manifest\.json is a named pipe, not a file"):
        open_model(ModelConfig(str(model)))


# The cache of the Hugging Face Hub


@pytest.fixture
def snapshot(model: Path, tmp_path: Path) -> Path:
    """Return the snapshot of a model in a directory laid out as the Hub's cache: links to blobs."""
    repository = tmp_path / "models--owner--name"
    snapshot, blobs = repository / "snapshots" / "0a1b2c", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(model.iterdir())):
        path.rename(blobs / f"{number:040x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040x}")
    return snapshot


def test_a_snapshot_of_the_hub_is_read(snapshot: Path) -> None:
    accepted(snapshot)


def test_a_link_in_a_snapshot_to_another_repository_is_refused(snapshot: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("{}")
    (snapshot / "tokenizer_config.json").unlink()
    (snapshot / "tokenizer_config.json").symlink_to("../../../secret")
    assert refused(snapshot).startswith(f"{snapshot / 'tokenizer_config.json'} is a link to {tmp_path / 'secret'}, out")


# The tokenizer, and names


def test_a_tokenizer_of_another_form_is_refused(model: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        path = model / name
        content = path.read_bytes()
        wrong = (b"", b"[]", b"null", b"{", b'{"model": 5}', b"\xff\xfe", POINTER, b'{"tokenizer_class": 5}', b"5")
        for damaged in wrong if name == "tokenizer.json" else wrong[:4] + wrong[5:]:
            path.write_bytes(damaged)
            with pytest.raises(ValueError) as error:
                load_tokenizer(*open_model(ModelConfig(str(model)))[:2])
            assert str(error.value).startswith(str(model)), damaged
            assert "\n" not in str(error.value), damaged
        path.write_bytes(content)


def test_numbers_of_a_tokenizer_that_no_library_can_use_are_refused(model: Path) -> None:
    """Of the largest ids, memory would be allocated up to the id, and the process aborted."""
    path = model / "tokenizer.json"
    fields = json.loads(path.read_text())
    first = next(iter(fields["model"]["vocab"]))
    wrong = {
        "tokenizer.json": fields | {"model": fields["model"] | {"vocab": fields["model"]["vocab"] | {first: 2**31}}},
        "tokenizer_config.json": json.loads((model / "tokenizer_config.json").read_text()) | {"model_max_length": "9"},
    }
    for (name, content), message in zip(wrong.items(), (f"id {2**31}", "model_max_length='9' is not"), strict=True):
        before = (model / name).read_bytes()
        (model / name).write_text(json.dumps(content))
        with pytest.raises(ValueError, match=message):
            load_tokenizer(*open_model(ModelConfig(str(model)))[:2])
        (model / name).write_bytes(before)


def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    for name in ("x" * 5000, "/" + "x/" * 3000):
        with pytest.raises(ValueError) as error:
            open_model(ModelConfig(name))
        assert str(error.value).endswith("cannot be read (File name too long); give a directory")
        assert len(str(error.value)) < 200
    for direction, start in (("from-hf", "error: source=xxxxx"), ("to-hf", "error: xxxxx")):
        code, printed = acsgd("convert", direction, "x" * 5000, tmp_path / "a")
        assert code == 2
        assert printed.startswith(start)
        assert printed.count("\n") == 1


def test_a_directory_whose_name_is_not_utf8_is_refused(model: Path, tmp_path: Path) -> None:
    renamed = Path(os.fsdecode(os.fsencode(tmp_path) + b"/m\xff"))
    model.rename(renamed)
    assert refused(renamed).endswith("has a path that is not UTF-8; rename it")


def test_a_tokenizer_from_elsewhere_is_that_of_the_run_and_of_its_checkpoints(
    model: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Also for a model that has none, or files of another one; config.json is that of the model."""
    other = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="!", bos_token="?")
    other.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "config.json").write_text("{}")
    (model / "tokenizer.json").unlink()
    (model / "merges.txt").write_text("of another tokenizer")
    config = small_run(model, tmp_path / "run", steps=1)
    with pytest.raises(ValueError, match=r"has no tokenizer .*give another with model\.tokenizer"):
        train_alone(config)
    elsewhere = dataclasses.replace(config.model, tokenizer=str(tmp_path / "tokenizer"))
    checkpoint = newest_checkpoint(train_alone(dataclasses.replace(config, model=elsewhere)).parent)
    assert AutoTokenizer.from_pretrained(checkpoint).eos_token == "!"
    assert not (checkpoint / "merges.txt").exists()
    assert json.loads((checkpoint / "config.json").read_text())["n_layer"] == 1
    with pytest.raises(ValueError, match=r"model\.tokenizer=absent"):
        prepare(dataclasses.replace(config, model=dataclasses.replace(elsewhere, tokenizer="absent/a/b")), Launch())


@pytest.mark.parametrize(("padding", "has_options"), [(None, False), ("#", True)])
def test_special_tokens_of_a_run_and_its_files_are_those_of_its_tokenizer(
    tiny_model: TinyModel,
    tokenizer: PreTrainedTokenizerFast,
    padding: str | None,
    has_options: bool,
    tmp_path: Path,
) -> None:
    """Ids of the model's own vocabulary are those of any other tokens, which would end texts, or learn nothing."""
    model = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    old = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    (model / "config.json").write_text(json.dumps(json.loads((model / "config.json").read_text()) | old))
    (model / "generation_config.json").unlink()
    if has_options:
        (model / "generation_config.json").write_text(json.dumps(old | {"eos_token_id": [2, 4], "top_p": 0.5}))
    other = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token="!", bos_token="?", pad_token=padding
    )
    other.save_pretrained(tmp_path / "tokenizer")
    config = small_run(model, tmp_path / "run", steps=1)
    options = dataclasses.replace(config.model, init="scratch", tokenizer=str(tmp_path / "tokenizer"))
    config = dataclasses.replace(config, model=options)
    job = prepare(config, Launch())
    assert job.ends == [other.eos_token_id]
    assert job.model.build(torch.float32).model.embed_tokens.padding_idx == other.pad_token_id  # type: ignore[union-attr]
    if padding is None:
        classifier = dataclasses.replace(config, model=dataclasses.replace(options, task="classification"))
        with pytest.raises(ValueError, match="tokenizer has no pad_token"):
            prepare(classifier, Launch())
    checkpoint, exported = newest_checkpoint(train_alone(config).parent), tmp_path / "hf"
    exported.mkdir()
    to_hf(checkpoint, exported)
    for directory in (checkpoint, exported):
        loaded = load(str(directory), dtype=None, device=torch.device("cpu"))
        assert PromptEncoder.of(loaded).ends == [other.eos_token_id]
        found = read_generation_config(directory)
        for each in (AutoConfig.from_pretrained(directory), found):
            assert [getattr(each, name) for name in old] == [getattr(other, name) for name in old], directory
        assert found.top_p == (0.5 if has_options else None)


@pytest.mark.parametrize(
    ("start", "copies", "forced", "ends"),
    [
        (1, "pad_token_id", 2, ["eos_token_id"]),
        (2, "eos_token_id", [2, 7, 1], ["eos_token_id", "pad_token_id"]),
        (0, "bos_token_id", [5], ["eos_token_id"]),
        (7, None, 7, []),
    ],
    ids=["t5", "bart", "bos", "language"],
)
def test_what_copies_a_special_token_copies_that_of_another_tokenizer(
    tokenizer: PreTrainedTokenizerFast, start: int, copies: str | None, forced: Any, ends: list[str], tmp_path: Path
) -> None:
    """As the first token of a decoder; the id of any other token says nothing of another tokenizer."""
    other = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token="!", bos_token="?", pad_token="#"
    )
    ids = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": [2, 5], "forced_eos_token_id": forced}
    config = small_config("bart", **ids, decoder_start_token_id=start)
    config.save_pretrained(tmp_path)
    # the other special tokens may be in config.json alone, and several may end a text
    options = {"eos_token_id": [2, 5], "forced_eos_token_id": forced, "decoder_start_token_id": start, "top_p": 0.5}
    (tmp_path / "generation_config.json").write_text(json.dumps(options | {"bad_words_ids": [[1]]}))
    new_forced = as_field(getattr(other, name) for name in ends) if ends else None
    expected = {"forced_eos_token_id": new_forced, "decoder_start_token_id": copies and getattr(other, copies)}
    if copies is None:
        with pytest.raises(ValueError, match=r"decoder_start_token_id=7 in config\.json of the model is neither pad"):
            set_special_tokens(config, other)
    else:
        set_special_tokens(config, other)
        assert {name: getattr(config, name) for name in expected} == expected
    write_special_tokens(tmp_path, other)
    found = read_generation_config(tmp_path)
    for each in (AutoConfig.from_pretrained(tmp_path), found):
        assert {name: getattr(each, name) for name in expected} == expected
    assert found.bad_words_ids is None
    assert found.top_p == 0.5


def test_a_tokenizer_from_elsewhere_with_too_many_tokens_names_the_directory_of_the_model(
    model: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    larger = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<new>")
    larger.save_pretrained(tmp_path / "tokenizer")
    config = small_run(model, tmp_path / "run")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, tokenizer=str(tmp_path / "tokenizer")))
    with pytest.raises(ValueError, match="has 513 tokens") as error:
        prepare(config, Launch())
    assert f"copy its files to {model} and add rows" in str(error.value)
    assert f"acsgd convert from-hf {model} TARGET --resize-embeddings" in str(error.value)
