"""Special tokens around documents: those that the tokenizer puts around a text, stated and kept in the checkpoint."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lib.commands import acsgd
from lib.corpora import examples_of, tokenize_all
from lib.saved import SMALL, small_run, train_alone
from tokenizers import processors
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

from acsgd.commands.generation.adapter import PEFTAdapter
from acsgd.commands.generation.model import load
from acsgd.commands.generation.options import GenerateOptions
from acsgd.commands.generation.prompts import PromptEncoder, PromptIds
from acsgd.commands.generation.records import PromptReader, read_records
from acsgd.commands.recorded import RecordedModel
from acsgd.config.options import AdapterConfig, DataConfig
from acsgd.config.run_file import parse_flags
from acsgd.io.checkpoint.progress import RunState
from acsgd.io.data.formats.base import Example
from acsgd.io.data.formats.formats import read_options
from acsgd.io.data.sources.base import ReadOptions
from acsgd.io.data.sources.sources import parse_sources
from acsgd.io.data.tokens import pipeline
from acsgd.io.data.tokens.corpus import TOKENS
from acsgd.io.data.tokens.encode import DocumentEncoder
from acsgd.io.data.tokens.encode_examples import ExampleTokens, PairEncoder
from acsgd.io.data.tokens.ends import EndFinder, TextEnds
from acsgd.io.data.tokens.tokens import tokenize
from acsgd.launch import Launch
from acsgd.run.plan.job import prepare
from acsgd.run.setup.inputs import open_inputs
from acsgd.shards.disk import FORMATS, ShardDirectory
from acsgd.shards.generation import ends_of, known_ends, write_ends
from acsgd.shards.tokenizer import DocumentTokens, SpecialTokens, load_tokenizer

TEXTS = ["one two", "", "three " * 9]


def with_template(tokenizer: PreTrainedTokenizerFast, template: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer that puts special tokens around a text: "<s> $A </s>"."""
    copy = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, bos_token="<s>", eos_token="</s>", sep_token="<sep>"
    )
    ids = [(token, copy.convert_tokens_to_ids(token)) for token in ("<s>", "</s>", "<sep>")]
    copy.backend_tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    return copy


def tokenized(tokenizer: PreTrainedTokenizerFast, directory: Path) -> str:
    """Return the text of the tokens of three documents."""
    path = directory / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    tokenize(
        parse_sources(str(path))[0].source, tokenizer, DocumentEncoder(tokenizer), directory, vocab_size=len(tokenizer)
    )
    text = tokenizer.decode(np.load(directory / TOKENS).tolist(), clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize(
    ("template", "before", "after"),
    [("$A", [], []), ("<s> $A", ["<s>"], []), ("<s> <sep> $A </s>", ["<s>", "<sep>"], ["</s>"])],
)
@pytest.mark.parametrize("chars", [1, 2**20])
def test_a_document_begins_as_a_text_does(
    template: str,
    before: list[str],
    after: list[str],
    chars: int,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipeline, "BATCH_CHARS", chars)
    special = with_template(tokenizer, template)
    ids = special.convert_tokens_to_ids
    assert SpecialTokens.of(special) == (ids(before), ids(after))
    begin = "".join(before)
    assert tokenized(special, tmp_path) == "".join(f"{begin}{text}</s>" for text in TEXTS)


def test_a_token_that_ends_a_document_begins_the_next(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """As OPT was pretrained: each document is between two of them, and no two are in a row."""
    same = with_template(tokenizer, "</s> $A")
    assert tokenized(same, tmp_path) == "</s>one two</s></s>three three three three three three three three three </s>"


def test_a_long_document_begins_once(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("acsgd.io.data.sources.text.PIECE_CHARS", 8)
    assert tokenized(with_template(tokenizer, "<s> $A"), tmp_path).count("<s>") == len(TEXTS)


@pytest.fixture
def opt(tmp_path: Path) -> Path:
    """A directory with a tokenizer as facebook/opt-125m has it: vocabulary and merges, without tokenizer.json."""
    directory = tmp_path / "opt"
    directory.mkdir()
    tokens = ["<s>", "<pad>", "</s>", "a", "b"]
    (directory / "vocab.json").write_text(json.dumps({token: id_ for id_, token in enumerate(tokens)}))
    (directory / "merges.txt").write_text("#version: 0.2\n")
    settings = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
    settings["tokenizer_class"] = "GPT2Tokenizer"
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    AutoConfig.for_model("opt", vocab_size=5).save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    ("settings", "begin"), [({}, [2]), ({"add_bos_token": True}, [2]), ({"add_bos_token": False}, [])]
)
def test_opt_begins_with_the_id_2_unless_its_files_say_no(
    settings: dict[str, Any], begin: list[int], opt: Path
) -> None:
    path = opt / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    config = AutoConfig.from_pretrained(opt)
    tokenizer = load_tokenizer(opt, config)
    assert DocumentTokens.of(tokenizer) == (begin, 2)
    assert tokenizer("a")["input_ids"] == [*begin, 3]
    tokenizer.save_pretrained(opt)  # as tokenizer.json, which says it in another way
    assert (opt / "tokenizer.json").is_file()
    assert DocumentTokens.of(load_tokenizer(opt, config)) == (begin, 2)


def test_other_types_begin_as_their_tokenizer_says(opt: Path) -> None:
    config = AutoConfig.for_model("gpt2", vocab_size=5)
    assert DocumentTokens.of(load_tokenizer(opt, config)) == ([], 2)


def test_ids_without_a_token_are_stated(tokenizer: PreTrainedTokenizerFast) -> None:
    """Vocabularies are padded to a multiple of a power of two."""
    stated = DocumentTokens.of(tokenizer).describe(tokenizer, 576)
    assert stated.endswith("; no sequence is padded; 64 of the 576 ids of the model have no token")


def test_a_run_states_the_tokens_and_keeps_them(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model = shutil.copytree(tiny_model("gpt2", **SMALL), tmp_path / "model")
    config = small_run(model, tmp_path / "run", steps=1)
    stated = (
        "tokens: a document begins with no token of its own and ends with 0 ('<|endoftext|>'); no sequence is padded"
    )
    assert stated in open_inputs(prepare(config, Launch())).notes
    checkpoints = train_alone(config)
    run = RunState.of(ShardDirectory(next(checkpoints.iterdir())))
    assert run
    data = run.identity.data
    assert (data["tokens before a document"], data["token after a document"]) == ([], 0)

    path = model / "tokenizer.json"
    fields = json.loads(path.read_text())
    token = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    fields["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [token, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="its tokenizer differs from the run's"):
        train_alone(small_run(model, tmp_path / "run", steps=2))


CHAT = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{{ mood }}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% for c in m.tool_calls or [] %}"
    "{{ c.function | tojson }}{% endfor %}ANSWER{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
ENDINGS = {
    "special": (CHAT.replace("ANSWER", "{{ m.content + '<|im_end|>' }}"), ["<|im_end|>"], ["<|im_end|>"]),
    "eos": (CHAT.replace("ANSWER", "{{ m.content + eos_token }}"), ["</s>"], ["</s>"]),
    "both": (CHAT.replace("ANSWER", "{{ m.content + '<|im_end|>' + eos_token }}"), ["</s>"], ["</s>"]),
    "text": (CHAT.replace("ANSWER", "{{ m.content + '###' }}"), None, None),
    "outside of the marks": (
        CHAT.replace("ANSWER", "{% generation %}{{ m.content }}{% endgeneration %}{{ '<|im_end|>' }}"),
        None,
        ["<|im_end|>"],
    ),
    "within the marks": (
        CHAT.replace("ANSWER", "{% generation %}{{ m.content + '<|im_end|>\\n' }}{% endgeneration %}"),
        ["<|im_end|>"],
        ["<|im_end|>"],
    ),
}
"""Chat templates, and what ends their learned texts if answers are learned, and if all is."""


@pytest.mark.parametrize("name", ENDINGS)
@pytest.mark.parametrize("targets", ["answers", "all"])
@pytest.mark.parametrize("batch_chars", [1, 2**18])
def test_learned_texts_end_as_their_format_does(
    name: str, targets: str, batch_chars: int, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "BATCH_CHARS", batch_chars)
    template, of_answers, of_all = ENDINGS[name]
    special = with_template(tokenizer, "$A")
    special.add_tokens(["<|im_start|>", "<|im_end|>"])  # of which the tokenizer need not know that they are special
    special.chat_template = template
    chat = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, "abcd", strict=True)]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    (tmp_path / "pairs.jsonl").write_text('{"input": "a", "output": "b"}\n' * 2)
    options = read_options(DataConfig(sources="", sequence=1, batch=1, targets=targets))  # type: ignore[arg-type]
    sources = parse_sources(f"{tmp_path / 'chat.jsonl'},{tmp_path / 'pairs.jsonl'}", options=options)
    of_chats, of_pairs = (corpus.ends for corpus in tokenize_all(sources, special, tmp_path, vocab_size=1000))
    expected = of_all if targets == "all" else of_answers
    assert of_pairs == ((special.eos_token_id,), 2, 0)
    assert of_chats == (tuple(special.convert_tokens_to_ids(expected or [])), 1, expected is None)
    notes = TextEnds.union([of_chats, of_pairs]).notes(special, [special.eos_token_id])
    kinds = ["ends"] * (expected == ["<|im_end|>"]) + ["warning"] * (expected is None)
    assert [note.partition(":")[0] for note in notes] == kinds


def train_on_chats(
    tokenizer: PreTrainedTokenizerFast,
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    *,
    adapter: str | None = None,
    has_own_file: bool = True,
) -> tuple[Path, list[int]]:
    """Train a model that is stored in fp16 on chats, which end in another token than its texts.

    has_own_file: whether it has a generation_config.json. Returns its checkpoint and the tokens that end a text.
    """
    shutil.copytree(tiny_model("gpt2"), model := tmp_path / "model")
    chat = with_template(tokenizer, "$A")
    chat.add_special_tokens({"eos_token": "<|endoftext|>"})
    chat.chat_template = ENDINGS["special"][0].replace("<|im_end|>", "<sep>")
    chat.save_pretrained(model)
    config = AutoConfig.from_pretrained(model, vocab_size=len(chat), dtype=torch.float16)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    if not has_own_file:
        (model / "generation_config.json").unlink()
    source = tmp_path / "chat.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    source.write_text((json.dumps({"messages": turns}) + "\n") * 40)
    run = small_run(model, tmp_path / "run", steps=1)
    data = DataConfig(str(source), sequence=16, batch=2, input_format="Q: __input__")
    [checkpoint] = train_alone(dataclasses.replace(run, data=data, adapter=AdapterConfig(adapter))).glob("step-*")
    return checkpoint, [config.eos_token_id, chat.convert_tokens_to_ids("<sep>")]


def check_export(directory: Path, ends: list[int], adapter: Path | None = None) -> None:
    """Check that a directory ends texts, computes and reads records as the run did that trained the model."""
    opened = PEFTAdapter.open(adapter) if adapter else None
    loaded = load(str(directory), dtype=None, device=torch.device("cpu"), adapter=opened)
    assert PromptEncoder.of(loaded).ends == ends
    assert loaded.model.dtype == torch.float32
    recorded = RecordedModel.of(str(loaded.tokenizer_directory))
    options = recorded.data_options({}, ("input_format", "sequence"))
    assert (recorded.task, options) == ("lm", {"input_format": "Q: __input__", "sequence": 16})
    assert recorded.options[FORMATS] == ["messages"]


@pytest.mark.parametrize("has_own_file", [True, False])
def test_generation_stops_where_the_texts_of_the_run_end(
    has_own_file: bool, tokenizer: PreTrainedTokenizerFast, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """With a checkpoint, with its export, and with the export in transformers alone."""
    checkpoint, ends = train_on_chats(tokenizer, tiny_model, tmp_path, has_own_file=has_own_file)
    assert acsgd("convert", "to-hf", checkpoint, tmp_path / "hf")[0] == 0
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert exported.generation_config.eos_token_id == exported.config.eos_token_id == ends
    assert exported.dtype == torch.float32
    for directory in (checkpoint, tmp_path / "hf"):
        check_export(directory, ends)


def test_exports_of_an_adapter_keep_what_the_run_has_learned_of_texts(
    tokenizer: PreTrainedTokenizerFast, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    checkpoint, ends = train_on_chats(tokenizer, tiny_model, tmp_path, adapter="lora:r=2")
    peft, merged, hf, again = (tmp_path / name for name in ("peft", "merged", "hf", "again"))
    steps = [("to-peft", checkpoint, peft), ("merge", checkpoint, merged), ("to-hf", merged, hf)]
    for arguments in [*steps, ("merge", peft, again, "--model", tmp_path / "model")]:
        assert acsgd("convert", *arguments)[0] == 0
    for directory in (merged, hf):
        check_export(directory, ends)
        assert AutoConfig.from_pretrained(directory).eos_token_id == ends
    check_export(tmp_path / "model", ends, peft)
    assert GenerationConfig.from_pretrained(peft).eos_token_id == ends
    template = AutoTokenizer.from_pretrained(checkpoint).chat_template
    for directory in (peft, merged, hf, again):
        assert AutoTokenizer.from_pretrained(directory).chat_template == template
        assert GenerationConfig.from_pretrained(directory).eos_token_id == ends


SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "models"
TOKENIZERS = ("gpt2", "gpt-neo-125m", "gpt-neox-20b", "opt-125m")
"""Models there with a tokenizer."""
QUESTIONS: list[tuple[str, dict[str, object]]] = [
    ("", {"prompt": "one plus one is ", "completion": "two"}),
    ("", {"inputs": "in the year 20", "targets": "24"}),
    ("--input-format=Q:__input__A:", {"input": "(", "output": " é"}),
    ("--input-format=__input__", {"input": "def f():\n    ", "output": "return 1"}),
    ("", {"instruction": "Add.", "input": "1 {x} 1", "output": "\n2"}),
    ("", {"instruction": "Add.", "context": "", "response": "2", "history": [["1", "2 "], ["3", "4"]]}),
    ("--format=oig", {"text": "<human>: a\n<bot>: b\n<human>: c\n<bot>:  d"}),
]
"""Options of `acsgd generate`, and a record."""
USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b "}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}]}
CONVERSATIONS: list[dict[str, object]] = [
    {"messages": [USER, ANSWER]},
    {"messages": json.dumps([USER, CALL, {"role": "tool", "content": "1"}, ANSWER]), "tools": [{"name": "f"}]},
    {"messages": [{"role": "user", "content": "a<|im_end|>b"}, ANSWER], "chat_template_kwargs": {"mood": "good"}},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
    {"prompt": [USER, ANSWER, USER], "completion": [ANSWER]},
]
"""Chats with all that changes what stands before their last answer."""


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no {SHARED}")
@pytest.mark.parametrize("name", TOKENIZERS)
def test_generation_begins_and_stops_where_documents_of_known_tokenizers_do(name: str, tmp_path: Path) -> None:
    """The ids of a prompt are the first of its document; the last one is learned, and ends what is generated."""
    config = AutoConfig.from_pretrained(SHARED / name)
    tokenizer = load_tokenizer(SHARED / name, config)
    before = SpecialTokens.of(tokenizer).before
    encoder = PromptEncoder(tokenizer, before, [], [], 0, None, is_encoder_decoder=False)
    of_pairs = dataclasses.replace(encoder, is_encoder_decoder=True)
    documents, finder = DocumentEncoder(tokenizer), EndFinder(tokenizer)
    known = known_ends(SHARED / name, SHARED / name, tokenizer)

    def check(example: Example, prompt: Example, end: int) -> None:
        found = documents.encode([example], documents.tokenize([example]))
        start = encoder.encode(prompt).ids
        assert not found.refused
        assert found.tokens[: len(start)].tolist() == start
        assert np.flatnonzero(~found.targets[: np.flatnonzero(found.targets)[-1]])[-1] == len(start) - 1
        ends = finder.find(found.tokens, found.targets, found.ends)
        assert (ends.ids, ends.num_open) == ((end,), 0)
        shutil.copy(SHARED / name / "config.json", tmp_path)
        write_ends(tmp_path, [*known, *(id_ for id_ in ends.ids if id_ not in known)])
        assert end in known_ends(tmp_path, tmp_path, tokenizer)
        assert end in ends_of(GenerationConfig.from_pretrained(tmp_path), tokenizer)

    for flags, record in QUESTIONS:
        given = parse_flags(GenerateOptions, ["m", "--file=f", *filter(None, [flags])], prog="acsgd generate")
        used = {name: value for name in ("format", "input_format") if (value := getattr(given, name)) is not None}
        [reading] = read_options(DataConfig(sources="", sequence=1, batch=1, **used))
        (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
        [source] = parse_sources(str(tmp_path / "a.jsonl"), options=[reading])
        [example] = examples_of(source.source, tokenizer=tokenizer)
        [asked] = read_records(str(tmp_path / "a.jsonl"))
        prompt = PromptReader(reading, tokenizer, field=None, is_chat=False).of_record(asked)
        check(example, prompt, tokenizer.eos_token_id)
        if [each.is_target for each in example.segments] != [False, True]:
            continue
        limited = dataclasses.replace(reading, max_prompt=2)
        prompt = PromptReader(limited, tokenizer, field=None, is_chat=False).of_record(asked)
        whole, cut = (encoder.encode(each) for each in (prompt._replace(max_prompt=0), prompt))
        is_cut = len(whole.ids) > len(before) + 2
        assert cut == (PromptIds(whole.ids[: len(before) + 2], "data.max_prompt") if is_cut else whole)
        check(example._replace(max_prompt=2), prompt, tokenizer.eos_token_id)
        [tokens] = PairEncoder(tokenizer, 512, "truncate").tokenize([example._replace(max_prompt=2)])
        assert isinstance(tokens, ExampleTokens)
        assert of_pairs.encode(prompt).ids == tokens.parts[0]
        of_run = dataclasses.replace(of_pairs, sequence=3)
        [row] = PairEncoder(tokenizer, 3, "truncate").tokenize([example])
        assert isinstance(row, ExampleTokens)
        assert of_run.encode(prompt._replace(max_prompt=0)).ids == row.parts[0]

    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    documents, finder = DocumentEncoder(tokenizer), EndFinder(tokenizer)
    pairs = PairEncoder(tokenizer, 512, "error")
    for record in CONVERSATIONS:
        (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
        [source] = parse_sources(str(tmp_path / "a.jsonl"))
        [asked] = read_records(str(tmp_path / "a.jsonl"))
        for ending in ("special", "eos", "both"):
            tokenizer.chat_template, ends, _ = ENDINGS[ending]
            assert ends is not None
            [example] = examples_of(source.source, tokenizer=tokenizer)
            prompt = PromptReader(ReadOptions(), tokenizer, field=None, is_chat=False).of_record(asked)
            check(example, prompt, tokenizer.convert_tokens_to_ids(ends[0].replace("</s>", tokenizer.eos_token)))
            [tokens] = pairs.tokenize([example])
            assert isinstance(tokens, ExampleTokens)
            assert of_pairs.encode(prompt).ids == tokens.parts[0]
