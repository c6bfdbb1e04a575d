"""Sets in their own layouts: real files against what their layouts say, and files that are not of a set."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from acsgd.io.data.sources.base import BadRecord, RecordCounts, SourceRecord
from acsgd.io.data.sources.glue import GLUE
from acsgd.io.data.sources.natural_instructions import SEPARATORS, STYLES
from acsgd.io.data.sources.sources import parse_sources
from acsgd.io.data.sources.wikitext import detokenized

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
has_data = pytest.mark.skipif(not SHARED.is_dir(), reason=f"no {SHARED}")


def read(name: str) -> list[SourceRecord | BadRecord]:
    """Return the records of a set."""
    [part] = parse_sources(name)
    return list(part.source.records(RecordCounts()))


@has_data
@pytest.mark.parametrize("name", ["mmlu-cot", "bbh-cot"])
def test_chains_of_thought_are_a_document_for_each_subject(name: str) -> None:
    path = SHARED / "mmlu-cot" / f"{name}.json"
    assert {record.fields["subject"]: record.fields["text"] for record in read(f"cot:{path}")} == json.loads(
        path.read_text()
    )


ARTICLES = """ \n = First = \n \n It 's the 1 @,@ 000 th " one " , isn 't it ? \n \n = = Part = = \n \n A @-@ b ( c )
 = Second @-@ best = \n \n A [ b ] don 't = 2 . \n = = = Deep = = = \n"""


def test_articles_of_wikitext_are_running_text(tmp_path: Path) -> None:
    (tmp_path / "wiki").write_text(ARTICLES)
    first, second = read(f"wikitext:{tmp_path / 'wiki'}")
    assert first.fields["text"] == ("\n= First =\n\nIt's the 1,000 th \"one\", isn't it?\n\n== Part ==\n\nA-b (c)\n")
    assert second.fields["text"] == "= Second-best =\n\nA [b] don't = 2.\n=== Deep ===\n"
    assert [first.where, second.where] == [f"{tmp_path / 'wiki'}, line {line}" for line in (1, 9)]


@pytest.mark.parametrize(
    ("prefix", "ending", "text"),
    [
        ("wikitext:", ".tokens", ARTICLES),
        ("cot:", ".json", '{"a": "one", "b": "two"}'),
        ("glue:qnli:", ".tsv", "question\tsentence\tlabel\nWho?\tI.\tentailment\n"),
    ],
)
def test_a_directory_or_pattern_is_all_of_its_files(prefix: str, ending: str, text: str, tmp_path: Path) -> None:
    directory = tmp_path / "parts"
    (directory / "deep").mkdir(parents=True)
    paths = [directory / f"{name}{ending}" for name in ("a", "b", "deep/c")]
    for path in paths:
        path.write_text(text)
    (directory / "README.md").write_text("no data")
    one_by_one = [read(f"{prefix}{path}") for path in paths]
    assert (
        read(f"{prefix}{directory}")
        == read(f"{prefix}{directory}/**/*{ending}")
        == [record for records in one_by_one for record in records]
    )
    assert [len(each) for each in one_by_one] == [len(one_by_one[0])] * 3
    [part] = parse_sources(f"{prefix}{directory}")
    before = part.source.fingerprint
    paths[2].write_text(f"{text} ")
    assert part.source.fingerprint != before
    for path, name in zip(paths, ("train", "dev", "test"), strict=True):
        path.rename(directory / f"{name}{ending}")
    with pytest.raises(
        ValueError, match=f"several splits; give one of them: train: {prefix}{directory}/train{ending};"
    ):
        parse_sources(f"{prefix}{directory}")


@has_data
def test_real_articles_keep_every_word() -> None:
    path = SHARED / "wikitext-2" / "test.txt"
    records = read(f"wikitext:{path}")
    assert len(records) == len(re.findall(r"(?m)^ = [^=\n]*[^=\n ] = $", path.read_text()))
    squeezed = re.sub(r"\s|@(?=[-,.]@)|(?<=[-,.])@", "", path.read_text())
    assert re.sub(r"\s", "", "".join(record.fields["text"] for record in records)) == squeezed
    assert all(re.match(r"\s*= \S.* =\n", record.fields["text"]) for record in records)


def test_a_text_without_added_spaces_is_kept() -> None:
    text = '= Title =\n\nIt\'s "one", the well-known (so-called) 1,000. "Yes!" \'No\', he said: x = y\n'
    assert detokenized(text) == text


@has_data
@pytest.mark.parametrize("split", ["train", "test"])
def test_natural_instructions_has_every_instance_of_the_split(split: str) -> None:
    root = SHARED / "natural-instructions"
    tasks = (root / "splits" / "default" / f"{split}_tasks.txt").read_text().split()
    expected: list[tuple[dict[str, Any], str]] = []
    for task in tasks:
        content = json.loads((root / "tasks" / f"{task}.json").read_text())
        expected += [(instance, content["Definition"][0]) for instance in content["Instances"]]
    records = read(f"natural_instructions:{root}:{split}")
    assert len(records) == len(expected)
    seen: Counter[str] = Counter()
    for record, (instance, definition) in zip(records, expected, strict=True):
        prompt, completion = record.fields["prompt"], record.fields["completion"]
        before, after = next(style for style in STYLES if prompt.endswith(style[1]))
        assert completion.removeprefix(" " if after else "") in instance["output"]
        assert f"{before}{instance['input']}\n" in prompt
        seen["definition"] += prompt.startswith(definition)
        seen["labels"] += "Possible labels: " in prompt
        seen[before] += 1
    assert abs(seen["definition"] / len(records) - 2 / 3) < 0.05
    assert 0 < seen["labels"] < 0.55 * len(records)
    assert all(abs(seen[before] / len(records) - 1 / len(STYLES)) < 0.05 for before, _ in STYLES)
    assert records == read(f"natural_instructions:{root}:{split}")


@has_data
@pytest.mark.parametrize(
    ("task", "file", "fields", "labels", "count"),
    [
        ("cola", "CoLA/train", "sentence", ["unacceptable", "acceptable"], 7250),
        ("qnli", "QNLI/dev", "question sentence", ["entailment", "not_entailment"], 5463),
        ("rte", "RTE/train", "sentence1 sentence2", ["entailment", "not_entailment"], 2127),
        ("sst2-sentences", "SST-2-sentences/dev", "sentence", ["negative", "positive"], 1821),
    ],
)
def test_files_of_glue_have_the_fields_of_the_hub(
    task: str, file: str, fields: str, labels: list[str], count: int
) -> None:
    records = read(f"glue:{task}:{SHARED / 'glue' / file}.tsv")
    assert len(records) == count
    assert all(isinstance(record, SourceRecord) for record in records)
    assert all(set(record.fields) == {*fields.split(), "label", "label_name"} for record in records)
    assert all(record.fields[field] for record in records for field in fields.split())
    names = {record.fields["label"]: record.fields["label_name"] for record in records}
    assert (names, [names[label] for label in sorted(names)]) == (dict(enumerate(GLUE[task].labels)), labels)


@pytest.mark.parametrize(
    ("task", "header", "labels"),
    [
        ("mnli", "sentence1\tsentence2\tgold_label", ["entailment", "neutral", "contradiction"]),
        ("wnli", "sentence1\tsentence2\tlabel", ["not_entailment", "entailment"]),
        ("rte", "sentence1\tsentence2\tlabel", ["entailment", "not_entailment"]),
        ("qnli", "question\tsentence\tlabel", ["entailment", "not_entailment"]),
        ("qqp", "question1\tquestion2\tis_duplicate", ["not_duplicate", "duplicate"]),
        ("mrpc", "#1 String\t#2 String\tQuality", ["not_equivalent", "equivalent"]),
    ],
)
def test_labels_have_the_numbers_of_the_hub(task: str, header: str, labels: list[str], tmp_path: Path) -> None:
    """By name, as in the files of some tasks, and by number."""
    path = tmp_path / "a.tsv"
    path.write_text("".join(f"{row}\n" for row in [header, *(f"a\tb\t{n}" for n in [*labels, *range(len(labels))])]))
    found = [(record.fields["label"], record.fields["label_name"]) for record in read(f"glue:{task}:{path}")]
    assert found == [*enumerate(labels)] * 2


def test_columns_of_other_tasks_are_renamed(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text(
        'Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\tone " quote\ttwo\n2\t7\t8\ta\tb\n-1\t7\t8\ta\tb\n'
    )
    good, bad, hidden = read(f"glue:mrpc:{path}")
    assert good.fields == {"sentence1": 'one " quote', "sentence2": "two", "label": 1, "label_name": "equivalent"}
    assert bad == BadRecord(f"{path}, line 3", 'has the label "2"', "use one of not_equivalent, equivalent", "2")
    assert hidden.reason == 'has the label "-1"'
    path.write_text("sentence1\tsentence2\tscore\na\tb\t2.5\na\tb\tmany\n")
    good, bad = read(f"glue:stsb:{path}")
    assert good.fields == {"sentence1": "a", "sentence2": "b", "label": 2.5}
    assert bad == BadRecord(f"{path}, line 3", 'has the label "many"', "use a number", "many")
    [wrong, _] = read(f"glue:qqp:{path}")
    assert wrong.reason.startswith('has no column "question1"; its columns: sentence1, sentence2, score')


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cot:none.json", 'data.sources="cot:none.json": none.json does not exist in '),
        ("glue:cloa:a.tsv", f"is not a task of GLUE; write glue:TASK:PATH, with one of {', '.join(GLUE)}"),
        ("glue:cola", "is not a task of GLUE"),
        ("natural_instructions:dir:val", "val_tasks.txt does not exist; give a split of dir/splits/default (train)"),
        ("natural_instructions:dir", "dir/tasks/lost.json does not exist in"),
        ("cot:list.json", "data.sources: list.json is not one JSON object; give the file as it is distributed"),
        ("cot:bad.json", "bad.json is not JSON: Expecting value: line 1 column 1 (char 0); download it again"),
        ("natural_instructions:dir:bad", "task.json is not a task of Super-NaturalInstructions: KeyError 'Instances'"),
    ],
)
def test_what_is_not_a_set_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("dir/splits/default").mkdir(parents=True)
    Path("dir/tasks").mkdir()
    Path("dir/splits/default/train_tasks.txt").write_text("lost\n")
    Path("list.json").write_text("[1]")
    Path("bad.json").write_text("bad")
    if name.endswith(":bad"):
        Path("dir/splits/default/bad_tasks.txt").write_text("task")
        Path("dir/tasks/task.json").write_text('{"Definition": ["a"]}')
    with pytest.raises(ValueError) as refused:
        read(name)
    assert message in str(refused.value)


def write_tasks(root: Path, sizes: dict[str, tuple[int, int]]) -> None:
    """Write tasks with a number of instances, and of distinct outputs."""
    (root / "splits" / "default").mkdir(parents=True)
    (root / "splits" / "default" / "train_tasks.txt").write_text("\n".join(sizes))
    (root / "tasks").mkdir()
    for name, (count, labels) in sizes.items():
        instances = [{"id": f"{name}-{n}", "input": f"{name} {n}", "output": [f"o{n % labels}"]} for n in range(count)]
        (root / "tasks" / f"{name}.json").write_text(json.dumps({"Definition": ["Do it."], "Instances": instances}))


@pytest.mark.parametrize(("few", "many"), [(7, 100), (1, 50), (60, 100), (42, 100), (43, 100), (5, 0), (0, 30)])
def test_at_least_three_of_ten_instructions_are_classifications(tmp_path: Path, few: int, many: int) -> None:
    """Exactly as many as needed, each instance about equally often; all others once."""
    write_tasks(tmp_path, {"few": (few, 3), "many": (many, 1000)} if many else {"few": (few, 3)})
    records = [record for record in read(f"natural_instructions:{tmp_path}") if isinstance(record, SourceRecord)]
    used = Counter(record.where for record in records)
    of_few = {where: count for where, count in used.items() if "few.json" in where}
    expected = max(few, -(-many * 3 // 7)) if few else 0
    assert (sum(of_few.values()), len(of_few)) == (expected, few)
    assert not few or expected / len(records) >= 0.3
    assert len({*of_few.values()} | {min(of_few.values(), default=0), max(of_few.values(), default=0)}) <= 2
    assert all(count == 1 for where, count in used.items() if where not in of_few)
    prompts = Counter(record.fields["prompt"] for record in records)
    assert many != 50 or max(prompts.values()) < 6, "repetitions have other prompts"


def test_prompts_of_classifications_name_every_label(tmp_path: Path) -> None:
    write_tasks(tmp_path, {"few": (400, 3), "many": (400, 400)})
    records = read(f"natural_instructions:{tmp_path}")
    with_labels = [record for record in records if "Possible labels: o0, o1, o2" in record.fields["prompt"]]
    assert all("few.json" in record.where for record in with_labels)
    assert abs(len(with_labels) - 200) < 5 * 10
    ends = (re.split(r"(?:few|many) [0-9]+", record.fields["prompt"])[1] for record in records)
    separators = Counter(re.sub("[A-Z][a-z]*:$", "", end) for end in ends)
    assert separators.keys() == {*SEPARATORS}
    assert all(abs(count - 160) < 5 * (800 * 0.2 * 0.8) ** 0.5 for count in separators.values())


@has_data
def test_files_of_the_pile_are_its_texts() -> None:
    directory = SHARED / "pile-zst"
    total = 0
    for split, names in (("", "*[!dt]"), (":validation", "*_valid"), (":test", "*_test")):
        found = [record.fields["text"] for record in read(f"pile:{directory}{split}")]
        assert found == [record.fields["text"] for record in read(f"{directory}/{names}.jsonl.zst")]
        total += len(found)
    assert total == 632


def test_abstracts_are_documents(tmp_path: Path) -> None:
    for split, text in (("train", " one\n"), ("test", "two ")):
        Dataset.from_dict({"abstract": [text], "title": ["t"]}).save_to_disk(tmp_path / "both" / split)
    for name, text in (("both", "one"), ("both:train", "one"), ("both:test", "two"), ("both/test", "two")):
        assert [record.fields["text"] for record in read(f"arxiv21:{tmp_path / name}")] == [text]
    [bad] = read(f"pile:{tmp_path / 'both'}:test")
    assert bad == BadRecord(
        f"{next((tmp_path / 'both' / 'test').glob('*.arrow'))}, row 1",
        'has no string under "text"; its fields: "abstract", "title"',
        "give the set as it is distributed",
    )


def test_prompts_of_p3_are_joined_to_their_answers(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    rows = [{"inputs": f"Is it {n}?\n" if n % 2 else f"It is {n}: ", "targets": "yes\n"} for n in range(600)]
    (tmp_path / "data" / "train-00000.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "data" / "test-00000.jsonl").write_text(json.dumps(rows[0]))
    records = read(f"p3:{tmp_path}")
    joined = Counter[str]()
    for record, row in zip(records, rows, strict=True):
        prompt, answer = record.fields["prompt"], record.fields["completion"]
        assert prompt.startswith(row["inputs"].strip())
        assert answer == (" yes" if prompt.endswith(":") else "yes")
        joined[prompt.removeprefix(row["inputs"].strip())] += 1
    assert joined.pop("") == 300
    assert joined.keys() == {separator + after for separator in SEPARATORS for _, after in STYLES}
    assert records == read(f"p3:{tmp_path}:train")
    assert len(read(f"p3:{tmp_path}:test")) == 1
    with pytest.raises(ValueError, match=r"has no files of the split val \(test, train\); give another one$"):
        read(f"p3:{tmp_path}:val")
