"""Laws of what rows depend on: every option of [data] is declared, no stale cache is valid, and checkpoints know it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from lib.labelled import with_special_tokens
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerFast

from acsgd.config.options import Config, DataConfig, ModelConfig, OptimConfig
from acsgd.io.data.row_spec import APART, VERSIONS, RowSpec, RowStage, data_options
from acsgd.io.data.rows.base import Rows
from acsgd.io.data.rows.streamed import StreamedRows
from acsgd.io.data.sources.base import ReadOptions
from acsgd.io.data.sources.sources import parse_sources
from acsgd.run.setup.rows import RowMaker
from acsgd.tasks import find_task

CHAT = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
READING = {each.name for each in dataclasses.fields(ReadOptions)}


class Case(NamedTuple):
    """An option of [data], two values of it, and options with which they differ."""

    option: str
    values: tuple[object, object]
    stage: RowStage
    """First stage that must depend on it."""
    others: dict[str, object]
    task: str = "lm"
    source: str = "records.jsonl"


TEXT, IO, PACK = {"format": "text"}, {"format": "io"}, {"format": "text", "rows": "pack"}
UL2R = {**PACK, "objective": "ul2r", "sentinels": "<unused{}>"}
CASES = (
    Case("format", ("text", "io"), RowStage.TOKENS, {}),
    Case("fields", (None, "text=output"), RowStage.TOKENS, TEXT),
    Case("targets", ("answers", "all"), RowStage.TOKENS, IO),
    Case("input_format", ("__input__", "Q: __input__"), RowStage.TOKENS, IO),
    Case("output_format", ("__output__", " __output__."), RowStage.TOKENS, IO),
    Case("max_prompt", (0, 1), RowStage.TOKENS, IO),
    Case("max_answer", (0, 4), RowStage.TOKENS, IO),
    Case("max_answer", (3, 4), RowStage.TOKENS, IO, "seq2seq"),
    Case("split_special_tokens", (True, False), RowStage.TOKENS, {"format": "messages"}, source="chats.jsonl"),
    Case("on_error", ("stop", "skip"), RowStage.TOKENS, TEXT, source="bad.jsonl"),
    Case("sequence", (24, 16), RowStage.LAYOUT, TEXT),
    Case("sequence", (24, 16), RowStage.LAYOUT, PACK),
    Case("sequence", (24, 16), RowStage.LAYOUT, TEXT, source="stream:records.jsonl"),
    Case("sequence", (24, 16), RowStage.TOKENS, {}, "classification"),
    Case("sequence", (24, 16), RowStage.TOKENS, IO, "seq2seq"),
    Case("rows", ("pack", "single"), RowStage.LAYOUT, TEXT),
    Case("rows", ("pack", "concat"), RowStage.LAYOUT, TEXT, source="stream:records.jsonl"),
    Case("long", ("split", "truncate"), RowStage.LAYOUT, PACK),
    Case("long", ("split", "skip"), RowStage.LAYOUT, PACK, source="stream:records.jsonl"),
    Case("long", ("truncate", "skip"), RowStage.TOKENS, {}, "classification"),
    Case("objective", ("causal", "prefix"), RowStage.LAYOUT, PACK),
    Case("objective", ("prefix", "ul2r"), RowStage.LAYOUT, {**PACK, "sentinels": "<unused{}>"}),
    Case("sentinels", ("<unused{}>", "<other{}>"), RowStage.LAYOUT, UL2R),
    Case("modes", ("a,b,c", "long text,b,c"), RowStage.LAYOUT, UL2R),
    Case("modes", ("a,b,c", "long text,b,c"), RowStage.LAYOUT, UL2R, source="stream:records.jsonl"),
    Case("window", (16, 8), RowStage.SEGMENTS, TEXT, source="stream:records.jsonl"),
    Case("isolate", (False, True), RowStage.ROWS, PACK),
    Case("seed", (0, 1), RowStage.ROWS, {**PACK, "objective": "prefix"}),
    Case("batch", (4, 8), RowStage.BATCHES, TEXT),
    Case("eval_fraction", (0.0, 0.1), RowStage.BATCHES, TEXT),
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of several formats, some longer than a row; chats with special tokens; records of which one is bad."""
    path, draw = tmp_path_factory.mktemp("sources"), np.random.default_rng(0)
    records = []
    for number in range(60):
        words = " ".join(map(str, draw.integers(0, 10**4, draw.integers(1, 12))))
        records.append({"text": f"{number}: {words}", "input": f"{number}?", "output": words, "label": number % 2})
    chats = [
        {"messages": [{"role": "user", "content": "<s>"}, {"role": "assistant", "content": f"{number} </s>"}]}
        for number in range(200)
    ]
    (path / "records.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    (path / "chats.jsonl").write_text("".join(json.dumps(each) + "\n" for each in chats))
    (path / "bad.jsonl").write_text((path / "records.jsonl").read_text() + "{\n")
    return path


@pytest.fixture(scope="module")
def special(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Tokenizer with special tokens around texts, sentinels and a chat template."""
    copy = with_special_tokens(tokenizer)
    copy.add_tokens([f"<{name}{number}>" for name in ("unused", "other") for number in range(4 + (name == "other"))])
    copy.chat_template = CHAT
    return copy


def model_of(task: str, tokenizer: PreTrainedTokenizerFast, **options: Any) -> PreTrainedConfig:
    """Return the config of a model of a task."""
    family = {"classification": "bert", "seq2seq": "bart"}.get(task, "gpt2")
    options |= {"decoder_start_token_id": 2} if task == "seq2seq" else {}
    return AutoConfig.for_model(family, vocab_size=len(tokenizer), **options)


def maker_of(
    case: Case, value: object, directory: Path, tokenizer: PreTrainedTokenizerFast, cache: Path
) -> tuple[RowMaker, Any]:
    """Return what makes rows with a value of the option, and the sources."""
    stream, _, name = case.source.rpartition(":")
    source = f"{stream}{':' if stream else ''}{directory / name}"
    options: dict[str, Any] = {"sequence": 24, "batch": 4, "window": 16, **case.others, case.option: value}
    config = Config(
        ModelConfig("none", task=case.task),  # type: ignore[arg-type]
        DataConfig(source, **options),
        OptimConfig(lr=1.0, steps=1),
    )
    model = model_of(case.task, tokenizer)
    found = parse_sources(source)
    spec = RowSpec.of(config, find_task(config.model.task), model, tokenizer, found)
    sources = parse_sources(source, options=spec.reading)
    return RowMaker(spec, model, tokenizer, "none", cache, stream_dir=cache / "streams"), sources


def values_of(rows: Rows) -> list[object]:
    """Return the values of all rows in two epochs, of a streamed source those of two windows."""
    places = [(index, epoch) for epoch in (0, 1) for index in range(len(rows))] or [(index, 0) for index in range(32)]
    found = [{name: array.tolist() for name, array in rows.read(*place).items()} for place in places]
    if isinstance(rows, StreamedRows):
        rows.close()
    return [*found]


def outcome_of(maker: RowMaker, sources: Any) -> object:
    """Return the values of all rows, or the error."""
    try:
        [rows] = maker.open(sources)
        return values_of(rows)
    except ValueError as error:
        return str(error)


def test_every_option_of_data_is_declared_once() -> None:
    declared = [*data_options(*RowStage), *READING, *APART]
    assert sorted(declared) == sorted(each.name for each in dataclasses.fields(DataConfig))


def test_every_declared_option_has_a_case() -> None:
    assert {case.option for case in CASES} == {*data_options(*RowStage), *READING}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.option}-{case.task}-{case.source}")
def test_no_stale_cache_is_valid(case: Case, directory: Path, special: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """With a cache in which rows of another value lie, rows are those of an empty cache."""
    fresh = [
        outcome_of(*maker_of(case, value, directory, special, tmp_path / str(number)))
        for number, value in enumerate(case.values)
    ]
    shared = [outcome_of(*maker_of(case, value, directory, special, tmp_path / "shared")) for value in case.values]
    assert shared == fresh
    assert (fresh[0] == fresh[1]) == (case.stage == RowStage.BATCHES), "the case shows no difference"


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.option}-{case.task}-{case.source}")
def test_keys_change_from_the_declared_stage_on(
    case: Case, directory: Path, special: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    one, other = (maker_of(case, value, directory, special, tmp_path)[0].spec for value in case.values)
    for stage in RowStage:
        assert (one.key(stage, "") != other.key(stage, "")) == (stage >= case.stage), stage
    assert (one.recorded(), one.reading) != (other.recorded(), other.reading), "a checkpoint does not record it"


def without_begin(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.backend_tokenizer.post_processor = None


CHANGES: dict[str, Callable[[PreTrainedTokenizerFast], object]] = {
    "chat template": lambda tokenizer: setattr(tokenizer, "chat_template", "{{ messages }}"),
    "name in a chat template": lambda tokenizer: setattr(tokenizer, "bos_token", "a"),
    "end of a document": lambda tokenizer: setattr(tokenizer, "eos_token", "a"),
    "beginning of a document": without_begin,
    "vocabulary": lambda tokenizer: tokenizer.add_tokens(["another"]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_tokens_depend_on_the_tokenizer(
    change: str, directory: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    case, keys = CASES[0], []
    for number in range(2):
        copy = with_special_tokens(tokenizer)
        if number:
            CHANGES[change](copy)
        keys.append(maker_of(case, "text", directory, copy, tmp_path)[0].spec.key(RowStage.TOKENS, ""))
    assert keys[0] != keys[1]


def test_tokens_depend_on_the_classes_and_types_of_the_model(tokenizer: PreTrainedTokenizerFast) -> None:
    typed = with_special_tokens(tokenizer)
    typed.model_input_names = ["input_ids", "token_type_ids"]
    data = DataConfig("a.jsonl", sequence=8, batch=1)
    config = Config(ModelConfig("none", task="classification"), data, OptimConfig(lr=1.0, steps=1))
    specs = [
        RowSpec.of(config, find_task(config.model.task), model_of("classification", typed, **options), typed, ())
        for options in ({"num_labels": 2}, {"num_labels": 3}, {"num_labels": 2, "type_vocab_size": 0})
    ]
    assert len({spec.key(RowStage.TOKENS, "") for spec in specs}) == len(specs)


def test_keys_depend_on_the_source(special: PreTrainedTokenizerFast, directory: Path, tmp_path: Path) -> None:
    spec = maker_of(CASES[0], "text", directory, special, tmp_path)[0].spec
    assert len({spec.key(stage, source) for stage in RowStage for source in ("a", "b")}) == 2 * len(RowStage)


def test_a_new_version_of_a_stage_changes_its_key_and_those_of_later_ones(
    special: PreTrainedTokenizerFast, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = maker_of(CASES[0], "text", directory, special, tmp_path)[0].spec
    for changed in VERSIONS:
        before = {stage: spec.key(stage, "") for stage in RowStage}
        monkeypatch.setitem(VERSIONS, changed, VERSIONS[changed] + 1)
        assert [stage for stage in RowStage if spec.key(stage, "") != before[stage]] == list(RowStage)[changed - 1 :]


COMMON: dict[str, object] = {
    "data.sequence": 24,
    "data.batch": 4,
    "data.seed": 0,
    "data.eval_fraction": 0.0,
}
DOCUMENT: dict[str, object] = {"tokens before a document": None, "token after a document": None}
PACKED: dict[str, object] = {"data.rows": "pack", "data.long": "split", "data.isolate": False}


@pytest.mark.parametrize(
    ("case", "recorded"),
    [
        (Case("rows", ("auto", 0), RowStage.LAYOUT, TEXT), DOCUMENT),
        (Case("rows", ("pack", 0), RowStage.LAYOUT, TEXT), DOCUMENT | PACKED),
        (Case("window", (8, 0), RowStage.SEGMENTS, TEXT, source="stream:records.jsonl"), DOCUMENT | {"data.window": 8}),
        (Case("objective", ("prefix", 0), RowStage.LAYOUT, TEXT), DOCUMENT | PACKED | {"data.objective": "prefix"}),
        (
            Case("long", ("auto", 0), RowStage.TOKENS, {}, "classification"),
            {"data.rows": "single", "data.long": "truncate", "data.isolate": False},
        ),
    ],
    ids=["concat", "pack", "stream", "prefix", "classification"],
)
def test_checkpoints_of_older_versions_have_the_same_names(
    case: Case, recorded: dict[str, object], directory: Path, special: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """An option without effect is not recorded, nor is concatenation, which the first versions did not record."""
    begin, end = (special.convert_tokens_to_ids(token) for token in ("<s>", "</s>"))
    expected = {**COMMON, **recorded}
    if "tokens before a document" in expected:
        expected |= {"tokens before a document": [begin], "token after a document": end}
    assert maker_of(case, case.values[0], directory, special, tmp_path)[0].spec.recorded() == expected
