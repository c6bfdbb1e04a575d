"""Laws of the batches for classification, regression and target sequences: those of transformers."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zstandard
from lib.labelled import SIZES, save_model, with_special_tokens
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BertTokenizer,
    PreTrainedTokenizerFast,
)

from acsgd.config.run_file import parse
from acsgd.errors import RunError
from acsgd.launch import Launch
from acsgd.layers.batch import Batch
from acsgd.model_classes import IGNORED, squared_error
from acsgd.run.plan.job import Job, prepare
from acsgd.run.setup.data import open_data
from acsgd.run.setup.inputs import open_inputs
from acsgd.tasks import check_options

SENTENCES = ["One two three.", "No", "A sentence that is longer than all the others here, by far.", "What? This!"]
LABELS = [1, 0, 2, 1]
T = 12

Model = Callable[..., Path]


@pytest.fixture(scope="module")
def special(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """A tokenizer with special tokens around texts."""
    return with_special_tokens(tokenizer)


@pytest.fixture
def model(special: PreTrainedTokenizerFast, tmp_path: Path) -> Model:
    """Return a function that gives the directory of a small model."""
    return lambda family, task, **options: save_model(tmp_path / "models" / task, special, family, task, **options)


def job_of(model: Path, source: Path, task: str, *options: object) -> Job:
    """Return a run of one process on a file, with batches of 4 sequences."""
    flags = f"--model.name {model} --data.sources {source} --log.dir {source.parent / 'runs' / 'a'} --model.task {task}"
    rest = f"--data.sequence {T} --data.batch 4 --pp.micro 2 --optim.lr 1 --optim.steps 2"
    return prepare(parse([*flags.split(), *rest.split(), *map(str, options)]), Launch(0, 0, 1))


def table(path: Path, *columns: tuple[object, ...]) -> Path:
    """Write a file with tab-separated columns, the first cell of each its name."""
    path.write_text("".join("\t".join(map(str, row)) + "\n" for row in zip(*columns, strict=True)))
    return path


def in_order(batch: Batch) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return inputs and labels of a batch, in the order of the samples in the file."""
    order = batch.sample_ids.flatten().argsort()
    assert batch.inputs is not None
    assert batch.labels is not None
    return {name: x.flatten(0, 1)[order] for name, x in batch.inputs.items()}, batch.labels.flatten(0, 1)[order]


# ---- labels of sequences


def test_a_batch_of_sentences_is_that_of_the_tokenizer(
    special: PreTrainedTokenizerFast, model: Model, tmp_path: Path
) -> None:
    path = table(tmp_path / "a.tsv", ("label", *LABELS), ("sentence", *SENTENCES))
    inputs = open_inputs(job_of(model("bert", "classification", num_labels=3), path, "classification"))
    batch = inputs.reader.batch(0)
    found, labels = in_order(batch)
    expected = special(SENTENCES, padding="max_length", truncation=True, max_length=T, return_tensors="pt")
    assert not found.pop("token_type_ids").any(), "the tokenizer has no types"
    assert found.keys() == {"input_ids", "attention_mask"}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert labels.tolist() == LABELS
    assert labels.dtype == torch.int64
    assert batch.labels is not None
    assert batch.labels.shape == (2, 2)
    padding = 1 - expected["attention_mask"].float().mean().item()
    assert [note.partition(": ")[2] for note in inputs.notes] == [
        "a text begins with 512 ('<s>') and ends with 513 ('</s>'); padding is 514 ('<pad>')",
        f"{path}: longer than {T} tokens and truncated: 1",
        f"{path}: 4 examples in rows of {T} tokens, {padding:.2%} padding",
        f"{path}: 2.00 epochs in 2 steps",
    ]


def test_a_batch_of_pairs_is_that_of_the_tokenizer(
    special: PreTrainedTokenizerFast, model: Model, tmp_path: Path
) -> None:
    others = SENTENCES[::-1]
    columns = ("sentence1", *SENTENCES), ("sentence2", *others), ("label", 0.5, 1, -2.25, 3)
    path = table(tmp_path / "a.tsv", *columns)
    reader = open_data(job_of(model("bert", "regression", num_labels=1), path, "regression")).reader
    found, labels = in_order(reader.batch(0))
    expected = special(SENTENCES, others, padding="max_length", truncation=True, max_length=T, return_tensors="pt")
    assert not found.pop("token_type_ids").any(), "the tokenizer has no types"
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert labels.dtype == torch.float32
    assert labels.tolist() == [0.5, 1, -2.25, 3]


@pytest.mark.parametrize(
    ("family", "options"), [("bert", {}), ("electra", {}), ("deberta", {"type_vocab_size": 2}), ("roberta", {})]
)
@pytest.mark.parametrize("texts", [1, 2])
def test_texts_have_the_types_of_the_tokenizer_if_the_model_takes_them(
    tokenizer: PreTrainedTokenizerFast, family: str, options: dict[str, int], texts: int, tmp_path: Path
) -> None:
    """The whole model of transformers, given what the tokenizer returns, has the same logits."""
    vocabulary = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *map(chr, range(97, 123)),
        *(f"##{c}" for c in "abcdefg"),
    ]
    wordpiece = BertTokenizer(vocab={token: number for number, token in enumerate(vocabulary)}, model_max_length=64)
    options = {"type_vocab_size": 1} if family == "roberta" else options
    config = AutoConfig.for_model(
        family, vocab_size=len(vocabulary), pad_token_id=0, max_position_embeddings=64, **SIZES["bert"] | options
    )
    torch.manual_seed(0)
    whole = AutoModelForSequenceClassification.from_config(config).eval()
    whole.save_pretrained(tmp_path / "model")
    wordpiece.save_pretrained(tmp_path / "model")
    pairs = SENTENCES[::-1] if texts == 2 else None
    columns = [("sentence1", *SENTENCES), ("sentence2", *SENTENCES[::-1])] if pairs else [("sentence", *SENTENCES)]
    path = table(tmp_path / "a.tsv", *columns, ("label", 0, 1, 1, 0))
    found, _ = in_order(open_data(job_of(tmp_path / "model", path, "classification")).reader.batch(0))
    encoded = wordpiece(SENTENCES, pairs, padding="max_length", truncation=True, max_length=T, return_tensors="pt")
    assert ("token_type_ids" in found) == (family != "roberta")
    assert all(torch.equal(tensor, encoded[name]) for name, tensor in found.items())
    assert encoded["token_type_ids"].any() == (texts == 2)
    if family == "roberta":
        del encoded["token_type_ids"]
    with torch.no_grad():
        assert torch.equal(whole(**found).logits, whole(**encoded).logits)


def test_rows_that_are_longer_than_any_example_are_reported(
    special: PreTrainedTokenizerFast, model: Model, tmp_path: Path
) -> None:
    path = table(tmp_path / "a.tsv", ("label", *LABELS), ("sentence", *SENTENCES))
    longest = max(map(len, special(SENTENCES)["input_ids"]))
    directory = model("bert", "classification", num_labels=3)
    for sequence, ending in ((longest, "padding"), (longest + 1, f"so that data.sequence={longest} would do")):
        job = job_of(directory, path, "classification", "--data.sequence", str(sequence))
        assert open_data(job).reader.notes[-1].endswith(ending)


def test_names_of_classes_are_those_of_the_model(model: Model, tmp_path: Path) -> None:
    names = ["yes", "no", "maybe", "yes"]
    path = table(tmp_path / "a.tsv", ("text", *SENTENCES), ("answer", *names))
    known = model("bert", "classification", id2label={0: "no", 1: "yes", 2: "maybe"})
    fields = ("--data.fields", "label=answer")
    _, labels = in_order(open_data(job_of(known, path, "classification", *fields)).reader.batch(0))
    assert labels.tolist() == [1, 0, 2, 1]


def test_long_examples_are_skipped_or_refused(model: Model, tmp_path: Path) -> None:
    path = table(tmp_path / "a.tsv", ("text", *SENTENCES), ("label", *LABELS))
    directory = model("bert", "classification", num_labels=3)
    rows = open_data(job_of(directory, path, "classification", "--data.long", "skip")).reader.rows
    assert len(rows.rows[0]) == 3
    assert f"longer than {T} tokens and left out: 1" in rows.notes[0]
    message = rf"^data\.sources: .*a\.tsv: data\.sequence={T} is too short for the example that begins with: A sentence"
    with pytest.raises(ValueError, match=message):
        open_data(job_of(directory, path, "classification", "--data.long", "error"))


@pytest.mark.parametrize(
    ("task", "labels", "line", "message"),
    [
        ("classification", [0, 1, 3, 0], 4, "has the label 3, but the model has the classes 0 to 2; correct it, or"),
        ("classification", [0, 0.5, 1, 0], 3, "has the label 0.5, but the model has the classes 0 to 2"),
        ("classification", [-1, 1, 3, 0], 2, "has the label -1, but the model has the classes"),
        ("classification", [0, 10**30, 3, 0], 3, "has the label 1000"),
        ("classification", [0, "a", 1, 0], 3, 'has the label "a", but the classes of the model are LABEL_0, LABEL_1, '),
        ("regression", ["x", 1, 0, 1], 2, 'has the label "x", which is not a number'),
        ("regression", [1, 1e39, 1, 1], 3, "has the label 1e+39, which is not finite in fp32"),
        ("regression", [1, IGNORED, 1, 1], 3, "has the label -100, which means that there is none; shift or scale all"),
        ("regression", ["nan", 1, 1, 1], 2, 'has no number or name under "label"; its fields: "text", "label"'),
        ("regression", ["", 1, 1, 1], 2, 'has the label "", which is not a number'),
    ],
)
def test_a_label_that_the_model_cannot_learn_is_named_or_skipped(
    task: str, labels: list[object], line: int, message: str, model: Model, tmp_path: Path
) -> None:
    path = table(tmp_path / "a.tsv", ("text", *SENTENCES), ("label", *labels))
    directory = model("bert", task, num_labels=3 if task == "classification" else 1)
    with pytest.raises(ValueError, match=f"^data.sources: {path}, line {line} {re.escape(message)}"):
        open_data(job_of(directory, path, task))
    reader = open_data(job_of(directory, path, task, "--data.on_error", "skip")).reader
    valid = [label for label in labels if isinstance(label, int) and 0 <= label < 3]
    assert sorted(float(reader.rows.rows[0].read(index)["labels"]) for index in range(len(valid))) == sorted(valid)
    assert f"skipped {4 - len(valid)} of 4 records; the first, {path}, line {line}, {message[:20]}" in reader.notes[0]


def test_classes_of_another_model_are_found_in_cached_tokens(model: Model, tmp_path: Path) -> None:
    path = table(tmp_path / "a.tsv", ("text", *SENTENCES), ("label", *LABELS))
    three, two = (model("bert", "classification", num_labels=number) for number in (3, 2))
    assert three == two, "the same directory, with another config.json"
    model("bert", "classification", num_labels=3)
    open_data(job_of(three, path, "classification"))
    model("bert", "classification", num_labels=2)
    with pytest.raises(ValueError, match=r"a\.tsv, line 4 has the label 2, but the model has the classes 0 to 1"):
        open_data(job_of(two, path, "classification"))


RECORDS = [{"text": text, "label": label} for text, label in zip(SENTENCES, ["no", "yes", "maybe", "no"], strict=True)]
LINES = "".join(f"{json.dumps(record)}\n" for record in RECORDS)
CELLS = "".join(f"{text}\t{label}\n" for text, label in [("text", "label"), *(each.values() for each in RECORDS)])
FILES: dict[str, tuple[bytes, str]] = {
    "a.jsonl": (LINES.encode(), "line 3"),
    "a.jsonl.zst": (zstandard.compress(LINES.encode()), "line 3"),
    "a.jsonl.gz": (gzip.compress(LINES.encode()), "line 3"),
    "a.json": (json.dumps(RECORDS).encode(), "line 1, record 3"),
    "a.tsv": (CELLS.encode(), "line 4"),
    "a.csv": (re.sub("(.*)\t(.*)", r'"\1","\2"', CELLS).encode(), "line 4"),
    "a.parquet": (b"", "row 3"),
    "a.arrow": (b"", "row 3"),
}
"""Files with RECORDS, and the place of the third one."""


@pytest.mark.parametrize(
    ("name", "streams"), [*((name, False) for name in FILES), ("a.jsonl", True), ("a.parquet", True)]
)
def test_the_place_of_a_label_outside_the_classes_is_named(
    name: str, streams: bool, model: Model, tmp_path: Path
) -> None:
    """In the second of two files."""
    content, place = FILES[name]
    for directory, records in (("1", RECORDS[:2]), ("2", RECORDS)):
        (tmp_path / "data" / directory).mkdir(parents=True)
        path = tmp_path / "data" / directory / name
        path.write_bytes(content)
        if not content:
            write_table(path, records)
    if content:
        (tmp_path / "data" / "1" / name).unlink()
        (tmp_path / "data" / "1.jsonl").write_text("".join(LINES.splitlines(keepends=True)[:2]))
    directory = model("bert", "classification", id2label={0: "no", 1: "yes"})
    source = f"{'stream:' if streams else ''}{tmp_path / 'data'}/"
    job = job_of(directory, path, "classification", "--data.sources", source)
    message = rf'^data\.sources: {path}, {place} has the label "maybe", but the classes of the model are no, yes; '
    with pytest.raises((ValueError, RunError), match=message):
        open_data(job).reader.batch(0)


def write_table(path: Path, records: list[dict[str, str]]) -> None:
    """Write a file of Parquet or Arrow."""
    rows = pa.Table.from_pylist(records)
    if path.suffix == ".parquet":
        pq.write_table(rows, path)
        return
    with pa.ipc.new_file(path, rows.schema) as file:
        file.write_table(rows)


def test_texts_and_pairs_are_not_mixed(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"sentence1": "a", "sentence2": "b", "label": 1}\n{"text": "alone", "label": 0}\n')
    message = r"a\.jsonl, line 2 has one text, but the first record has two; divide them into two sources"
    with pytest.raises(ValueError, match=message):
        open_data(job_of(model("bert", "classification"), path, "classification"))
    skipped = open_data(job_of(model("bert", "classification"), path, "classification", "--data.on_error", "skip"))
    assert len(skipped.reader.rows.rows[0]) == 1


def test_a_text_that_is_too_long_to_be_tokenized_at_once_is_named_once(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("acsgd.io.data.sources.text.PIECE_CHARS", 64)
    monkeypatch.setattr("acsgd.io.data.tokens.pipeline.BATCH_CHARS", 100)
    path = tmp_path / "a.jsonl"
    texts = ["x y z\n" * 100, "x y z\n" * 20, "short", "last"]
    records = [{"sentence1": text, "sentence2": "other", "label": 1} for text in texts]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    directory = model("bert", "classification")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1 has a text of more than 131,072 characters; shorten it"):
        open_data(job_of(directory, path, "classification"))
    reader = open_data(job_of(directory, path, "classification", "--data.on_error", "skip")).reader
    assert len(reader.rows.rows[0]) == 2
    assert "skipped 2 of 4 records; the first, " in reader.notes[0]


def test_a_source_whose_examples_are_all_skipped_is_refused(model: Model, tmp_path: Path) -> None:
    path = table(tmp_path / "a.tsv", ("text", SENTENCES[2]), ("label", 1))
    with pytest.raises(ValueError, match=rf"has no token .* \(longer than {T} tokens and left out: 1\); give"):
        open_data(job_of(model("bert", "classification"), path, "classification", "--data.long", "skip"))


# ---- target sequences


def test_target_sequences_have_the_loss_of_transformers(
    special: PreTrainedTokenizerFast, model: Model, tmp_path: Path
) -> None:
    """The whole model makes its own decoder inputs of the labels."""
    answers = ["one", "No way, this is an answer that is longer than a row.", "two three", "."]
    path = table(tmp_path / "a.tsv", ("input", *SENTENCES), ("output", *answers))
    directory = model("bart", "seq2seq", decoder_start_token_id=special.eos_token_id)
    reader = open_data(job_of(directory, path, "seq2seq")).reader
    found, labels = in_order(reader.batch(0))
    options = {"padding": "max_length", "truncation": True, "max_length": T, "return_tensors": "pt"}
    prompts, targets = special(SENTENCES, **options), special(text_target=answers, **options)
    expected = targets["input_ids"].masked_fill(targets["attention_mask"] == 0, IGNORED)
    assert torch.equal(labels, expected)
    padding = 1 - torch.cat([prompts["attention_mask"], targets["attention_mask"]]).float().mean().item()
    assert reader.notes[-1].endswith(f", {padding:.2%} padding")
    whole = AutoModelForSeq2SeqLM.from_pretrained(directory).eval()
    with torch.no_grad():
        ours = whole(**found)
        theirs = whole(input_ids=prompts["input_ids"], attention_mask=prompts["attention_mask"], labels=expected)
    kept = labels != IGNORED
    assert torch.equal(ours.logits[kept], theirs.logits[kept])


def test_prompts_and_target_sequences_have_limits_of_their_own(
    special: PreTrainedTokenizerFast, model: Model, tmp_path: Path
) -> None:
    answers = ["one", "No way, this is an answer that is longer than a row.", "two three", "."]
    path = table(tmp_path / "a.tsv", ("input", *SENTENCES), ("output", *answers))
    directory = model("bart", "seq2seq", decoder_start_token_id=special.eos_token_id)
    limits = "--data.max_prompt", "5", "--data.max_answer", "3"
    reader = open_data(job_of(directory, path, "seq2seq", *limits)).reader
    found, labels = in_order(reader.batch(0))
    prompts = special(SENTENCES, truncation=True, max_length=5)["input_ids"]
    targets = special(text_target=answers, truncation=True, max_length=3)["input_ids"]
    mask = found["attention_mask"].bool()
    assert [ids[kept].tolist() for ids, kept in zip(found["input_ids"], mask, strict=True)] == prompts
    assert [each[each != IGNORED].tolist() for each in labels] == targets
    assert f"longer than data.max_prompt=5 or data.max_answer=3 and truncated: {len(SENTENCES)}" in reader.notes[-2]
    virtual = open_data(job_of(directory, path, "seq2seq", "--adapter.spec", "prompt_tuning:tokens=3")).reader
    rows = [virtual.rows.rows[0].read(index) for index in range(len(SENTENCES))]
    assert max(row["attention_mask"].sum() for row in rows) == T - 3
    with pytest.raises(ValueError, match=r"data\.max_prompt=5 is too short for the example that begins with: One"):
        open_data(job_of(directory, path, "seq2seq", "--data.max_prompt", "5", "--data.long", "error"))


def test_records_without_a_prompt_are_refused(model: Model, tmp_path: Path) -> None:
    path = table(tmp_path / "a.tsv", ("text", *SENTENCES))
    message = r"a\.tsv, line 2 has no prompt with an answer: One two three\.; use records with both"
    with pytest.raises(ValueError, match=message):
        open_data(job_of(model("bart", "seq2seq"), path, "seq2seq"))


# ---- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--data.rows pack", r"^data\.rows=pack is for model\.task=lm; classification has one example per row"),
        ("--data.long split", r"^data\.long=split is for model\.task=lm; use data\.long=truncate, skip or error"),
    ],
)
def test_options_for_documents_are_refused(options: str, message: str) -> None:
    flags = "--model.name a --model.task classification --data.sources demo --data.sequence 8 --data.batch 2"
    with pytest.raises(ValueError, match=message):
        check_options(parse([*flags.split(), "--optim.lr", "1", "--optim.steps", "2", *options.split()]))


@pytest.mark.parametrize(("task", "form"), [("classification", "text"), ("lm", "label")])
def test_a_format_for_another_task_is_refused(task: str, form: str, tmp_path: Path) -> None:
    path = table(tmp_path / "a.tsv", ("text", *SENTENCES))
    other = "lm or seq2seq" if form == "text" else "classification or regression"
    with pytest.raises(ValueError, match=rf'^data\.format="{form}" is for model\.task={other}; remove data\.format$'):
        job_of(tmp_path, path, task, "--data.format", form)


def test_padding_has_no_squared_error() -> None:
    labels = torch.tensor([1.0, IGNORED, -2.0])
    assert squared_error(torch.tensor([[2.0], [5.0], [-4.0]]), labels) == 1 + 4
