"""The commands `acsgd data show` and `acsgd data check`."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lib.labelled import save_model, with_special_tokens
from transformers import PreTrainedTokenizerFast

from acsgd import cli
from acsgd.commands.data.check import FirstPlaces
from acsgd.io.data.tokens import pipeline

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command of `acsgd data` with a small model; return exit code, output and errors."""
    model = tiny_model("gpt2")

    def call(action: str, source: Path | str, *options: str) -> tuple[int, str, str]:
        code: Any = 0
        try:
            cli.run(["data", action, str(source), "--model", str(model), *options])
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def special_models(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that writes a small model of a task."""
    families = {"classification": "bert", "regression": "bert", "seq2seq": "bart"}
    special = with_special_tokens(tokenizer)
    sizes = {"regression": {"num_labels": 1}}
    return lambda task: save_model(tmp_path / task, special, families[task], task, **sizes.get(task, {}))


def write(path: Path, *records: object) -> Path:
    """Write JSON lines; a string is written as it is."""
    path.write_text("".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in records))
    return path


def test_show_prints_what_the_model_sees(run: Run, tmp_path: Path) -> None:
    records = [{"input": f"one {number}", "output": " two"} for number in range(5)]
    path = write(tmp_path / "a.jsonl", *records)
    code, out, _ = run("show", path, "-n", "2", "--input-format", "Q: __input__ A:")
    assert code == 0
    *blocks, ends = out.split("\n\n")
    assert ends == "learned texts end with 0 ('<|endoftext|>')\n"
    assert blocks[0] == 'format "io"; masked tokens are in ⟦⟧'
    for number, block in enumerate(blocks[1:]):
        assert re.match(rf"{path}, line {number + 1}: \d+ tokens, \d of them learned\n", block)
        assert block.strip().endswith(f"\n⟦Q: one {number} A:⟧ two<|endoftext|>")
    assert len(blocks) == 3
    _, out, _ = run("show", path, "-n", "1", "--targets", "all")
    assert "\none 0 two<|endoftext|>\n\nlearned texts end" in out


def test_a_tokenizer_from_elsewhere_is_used_as_in_a_run(
    run: Run, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    other = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="!", pad_token="#")
    other.save_pretrained(tmp_path / "tokenizer")
    path, flags = write(tmp_path / "a.jsonl", {"text": "good"}), ("--tokenizer", str(tmp_path / "tokenizer"))
    for options in ([], ["--sequence", "8", "--rows", "single"]):
        code, out, _ = run("show", path, *flags, *options)
        assert (code, "ood!" in out, "stops there" in out) == (0, True, False)
    assert run("check", path, *flags)[0] == 0
    (tmp_path / "tokenizer" / "tokenizer.json").unlink()
    (tmp_path / "tokenizer" / "config.json").write_text("{}")
    code, _, err = run("check", path, *flags)
    assert (code, "tokenizer has no tokenizer" in err, "or give another with --tokenizer" in err) == (2, True, True)


def test_show_names_bad_records_and_goes_on(run: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "bad", {"text": "good"})
    code, out, _ = run("show", path)
    assert code == 0
    assert f"{path}, line 1 is not JSON" in out
    assert "\ngood<|endoftext|>" in out


@pytest.mark.parametrize("chars", [1, 2**20])
def test_check_counts_everything(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chars: int) -> None:
    monkeypatch.setattr(pipeline, "BATCH_CHARS", chars)
    monkeypatch.setattr("acsgd.io.data.sources.text.PIECE_CHARS", 64)
    path = write(
        tmp_path / "a.jsonl",
        {"text": "one"},
        "bad",
        {"text": " "},
        {"text": "one"},
        {"txt": 1},
        {"text": "x y z\n" * 100},
    )
    code, out, _ = run("check", path, "--sequence", "100")
    assert code == 1
    *head, findings = out.split("malformed: ")
    assert findings == (
        f"2\n  {path}, line 2 is not JSON (Expecting value at column 1): bad\n"
        f'  {path}, line 5 has no string under "text"; its fields: "txt" (a number)\n'
        '  for the first: write one JSON object per line, such as {"text": "..."}\n'
        f"empty: 1\n  {path}, line 3\nrepeated: 1\n  {path}, line 4 repeats {path}, line 1\n"
        f"too long: 1\n  {path}, line 6: {re.search('([0-9]+) tokens', findings)[1]} tokens\n"
        "special tokens in messages: 0\nnothing learned: 0\n"
    )
    assert head[0].startswith(f'{path}: format "text"\n6 records, 4 documents, ')
    [total] = re.findall(r"documents, ([0-9,]+) tokens, \1 of them learned", head[0])
    [longest] = re.findall("line 6: ([0-9]+) tokens", findings)
    documents = [int(count) for count in re.findall(r"to [0-9,]+ +([0-9]+) ", head[0])]
    assert sum(documents) == 4
    assert int(longest) < int(total.replace(",", "")) < int(longest) + 20


def test_check_names_records_that_repeat_those_of_an_earlier_source(run: Run, tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", {"text": "one"}, {"text": "two"})
    test = write(tmp_path / "test.jsonl", {"text": "new"}, {"text": "two", "id": 3})
    code, out, _ = run("check", f"{train},{test}")
    assert code == 0
    assert "repeated: 0\n" in out
    assert f"repeated: 1\n  {test}, line 2 repeats {train}, line 2\n" in out
    assert f"repeated: 2\n  {train}, line 1 repeats {train}, line 1\n" in run("check", f"{train},{train}")[1]
    assert run("check", write(tmp_path / "blank.jsonl", "", " "))[0] == 1


def test_places_of_first_documents_are_those_that_were_added() -> None:
    places = ["a, line 1", "a, line 20", "a, line 020", "demo, topic if", "b", "b, row 0", f"b, id {10**12}", "a, 3"]
    seen = FirstPlaces()
    assert [seen.find_or_add(digest, where) for digest, where in enumerate(places)] == [None] * len(places)
    assert [seen.find_or_add(digest, "c, line 1") for digest in range(len(places))] == places


def test_check_names_chats_with_special_tokens(run: Run, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    shutil.copytree(tiny_model("gpt2"), tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    chats = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]
        for text in ("a", "b<|endoftext|>c")
    ]
    path = write(tmp_path / "a.jsonl", *({"messages": chat} for chat in chats))
    code, out, _ = run("check", path, "--model", str(tmp_path / "chat"))
    assert code == 0
    assert out.endswith(f"special tokens in messages: 1\n  {path}, line 2: <|endoftext|>\nnothing learned: 0\n")


def test_check_counts_the_labels_and_names_those_outside_the_classes(
    run: Run, tmp_path: Path, special_models: Callable[[str], Path]
) -> None:
    labels = [1, "LABEL_0", 1, 2, "good", "good", None]
    path = write(tmp_path / "a.jsonl", *({"text": f"text {n}", "label": label} for n, label in enumerate(labels)))
    options = ("--task", "classification", "--model", str(special_models("classification")))
    code, out, err = run("check", path, *options, "--sequence", "3")
    assert code == 1, err
    head, _, findings = out.partition("malformed: ")
    assert head.startswith(f'{path}: format "label"\n7 records, 3 documents, ')
    assert head.endswith(
        'classes:\n  0 (LABEL_0): 1\n  1 (LABEL_1): 2\nlabel outside the classes:\n  "good": 2\n  2: 1\n'
        'to learn all names, set "id2label" in config.json of the model to '
        '{"0": "LABEL_0", "1": "LABEL_1", "2": "good"}\n'
    )
    lines = findings.splitlines()
    assert lines[:5] == [
        "1",
        f'  {path}, line 7 has no number or name under "label"; its fields: "text", "label" (null)',
        '  for the first: write {"label": 1} or name another field, --fields "label=FIELD"',
        "empty: 0",
        "label outside the classes: 3",
    ]
    for line, number, reason in ((lines[5], 4, "2, but the model has"), (lines[6], 5, '"good", but the classes of')):
        assert line.startswith(f"  {path}, line {number} has the label {reason}")
    assert f"too long: 3\n  {path}, line 1: " in findings
    assert run("check", write(tmp_path / "b.jsonl", {"text": "one", "label": "LABEL_1"}), *options)[0] == 0
    assert run("check", write(tmp_path / "c.jsonl", {"text": "one", "label": 2}), *options)[0] == 1


def test_check_of_values_and_of_target_sequences(
    run: Run, tmp_path: Path, special_models: Callable[[str], Path]
) -> None:
    path = write(tmp_path / "a.jsonl", *({"text": f"text {n}", "label": n / 2} for n in (1, 2, 5)))
    options = ("--task", "regression", "--model", str(special_models("regression")))
    code, out, err = run("check", path, *options)
    assert code == 0, err
    assert "\nlabels from 0.5 to 2.5, mean 1.33333\nmalformed: 0\nempty: 0\nlabel that cannot be learned: 0\n" in out
    code, out, _ = run("check", write(path, {"text": "a", "label": 1}, {"text": "b", "label": "high"}), *options)
    assert code == 1
    assert f'label that cannot be learned: 1\n  {path}, line 2 has the label "high", which is not a number\n' in out
    pairs = [("a", "b"), ("a b c d e f g h", "b"), ("a", "b c d e f g h i j")]
    path = write(tmp_path / "b.jsonl", *({"input": prompt, "output": answer} for prompt, answer in pairs))
    options = ("--task", "seq2seq", "--model", str(special_models("seq2seq")), "--sequence", "10")
    code, out, err = run("check", path, *options)
    assert code == 0, err
    assert re.findall(r"line (\d): \d+ tokens", out) == ["2", "3"], "the longer one of prompt and answer"


def test_check_of_valid_data_succeeds_and_counts_masked_tokens(run: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "a b c d e", "completion": " f"}, {"prompt": "g", "completion": " h"})
    code, out, _ = run("check", path)
    assert code == 0
    assert 'format "prompt"\n2 records, 2 documents' in out
    assert "4 of them learned" in out  # each answer and the token that ends it


def test_check_of_a_text_in_pieces_is_one_document(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("acsgd.io.data.sources.text.PIECE_CHARS", 16)
    (tmp_path / "a.txt").write_text("some words\n" * 20)
    code, out, _ = run("check", f"{tmp_path / 'a.txt'}")
    assert code == 0
    assert "20 records, 1 documents" in out


@pytest.mark.parametrize("action", ["show", "check"])
def test_bad_options_are_one_sentence(run: Run, tmp_path: Path, action: str) -> None:
    path = write(tmp_path / "a.jsonl", {"text": "one"})
    for source, options, message in (
        ("none.jsonl", (), 'source="none.jsonl": none.jsonl does not exist'),
        (path, ("--format", "txt"), 'unknown format; use "auto"'),
        (path, ("--model", "./nothing"), "--model=./nothing does not exist"),
    ):
        code, out, err = run(action, source, *options)
        assert (code, out) == (2, "")
        assert message in err
    assert "--n=0 must be" in run("show", path, "-n", "0")[2]


WORDS = [f"{'word ' * n}end" for n in (3, 1, 30, 2, 5)]


def test_show_prints_the_rows_of_a_run_with_the_borders_of_documents(run: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *({"prompt": "Q:", "completion": f" {text}"} for text in WORDS))
    code, out, err = run("show", path, "--sequence", "64", "--rows", "pack", "--long", "skip", "-n", "9")
    assert code == 0, err
    head, *rows = out.split("\n\n")
    assert "5 documents in" in head
    documents = [part for row in rows for part in re.split(r"document \d+\n", row.strip())[1:]]
    expected = [f"⟦Q:⟧ {text}<|endoftext|>" for text in WORDS if len(text) < 100]  # the others are longer than a row
    assert sorted(part.strip() for part in documents) == sorted(expected)
    for row in rows:
        found = re.match(r"row \d of \d: (\d) documents, (\d+) tokens, (\d+) labels, (\d+) padding\n", row.strip())
        assert found
        assert int(found[1]) == row.count("document ")
        assert int(found[2]) + int(found[4]) == 64


def test_show_prints_labels_and_target_sequences(
    run: Run, tmp_path: Path, special_models: Callable[[str], Path]
) -> None:
    path = write(tmp_path / "a.jsonl", {"text": "one two", "label": 1}, {"text": "three", "label": 0})
    options = ("--model", str(special_models("classification")), "--sequence", "16")
    code, out, err = run("show", path, "--task", "classification", *options)
    assert code == 0, err
    assert re.search(r"row 1 of 2: \d+ tokens, \d+ padding; label 1 \(LABEL_1\)\n<s>one two</s>\n", out)
    assert re.search(r"row 2 of 2: .*; label 0 \(LABEL_0\)\n<s>three</s>\n", out)
    path = write(tmp_path / "b.jsonl", {"input": "one two", "output": "three"})
    options = ("--model", str(special_models("seq2seq")), "--sequence", "16")
    code, out, err = run("show", path, "--task", "seq2seq", *options)
    assert code == 0, err
    assert re.search(r"row 1 of 1: \d+ and \d+ tokens, \d+ and \d+ padding\n⟦<s>one two</s>⟧\n<s>three</s>\n", out)


def test_rows_of_readable_records_are_shown(run: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "bad", {"text": "good " * 9})
    assert f"{path}, line 1 is not JSON" in run("show", path, "--sequence", "4")[2]
    code, out, err = run("show", path, "--sequence", "4", "--on-error", "skip")
    assert code == 0, err
    assert f"skipped 1 of 2 records; the first, {path}, line 1, is not JSON" in out
    assert "row 1 of 9: 4 tokens" in out


def test_options_of_rows_need_their_length(run: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"text": "one"})
    for options in (("--rows", "pack"), ("--long", "skip"), ("--task", "seq2seq"), ("--objective", "prefix")):
        code, out, err = run("show", path, *options)
        assert (code, out) == (2, "")
        assert "give --sequence, too" in err
    assert "--sequence=0 must" in run("show", path, "--sequence", "0")[2]
    assert "--long=skip" in run("show", path, "--sequence", "8", "--long", "skip")[2]


@pytest.mark.parametrize("chars", [1, 2**20])
def test_check_names_records_of_which_nothing_is_learned(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chars: int
) -> None:
    """With --sequence, what a row has of a record counts. Exits with 1 if nothing is learned at all."""
    monkeypatch.setattr(pipeline, "BATCH_CHARS", chars)
    monkeypatch.setattr("acsgd.io.data.sources.text.PIECE_CHARS", 64)
    long, short = ({"input": "x y z\n" * count, "output": "a"} for count in (100, 1))
    path = write(tmp_path / "a.jsonl", long, short, long)
    code, out, _ = run("check", path, "--sequence", "100")
    places = "".join(f"  {path}, line {line}: in its first 100 tokens\n" for line in (1, 3))
    assert (code, out.partition("nothing learned: ")[2]) == (0, f"2\n{places}")
    code, out, _ = run("check", path)
    assert (code, out.partition("nothing learned: ")[2]) == (0, "0\n")
    assert run("check", write(tmp_path / "b.jsonl", long), "--sequence", "100")[0] == 1
