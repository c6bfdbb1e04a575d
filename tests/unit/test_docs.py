"""README and docs/ show what exists: their examples do what they say, and every name, path and spec is valid.

test_docs_blocks.py checks each code block; `make docs` checks the links between pages.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from acsgd.codecs.base import pack, unpack, wire_bytes
from acsgd.config.adapters import ADAPTERS
from acsgd.config.spec import from_spec
from acsgd.dp import MODES, hooks
from acsgd.io.data.sources.base import ReadOptions, RecordCounts, SourceRecord
from acsgd.optim import OPTIMIZERS
from acsgd.optim.schedule import RATE_SCHEDULES
from acsgd.pp import SCHEDULES, lower, validate
from acsgd.pp.tied.plan import TIED
from acsgd.pp.wire.ladder import COMPRESS, SPECS

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs/generate.py")
assert _spec is not None
assert _spec.loader is not None
generate = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(generate)
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))}


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """Yield the fenced code blocks of a language, with the page of each."""
    for page, text in PAGES.items():
        for found, code in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            if found == language:
                yield page, code


def example(name: str) -> Any:
    """Return the class of a Python block."""
    names: dict[str, Any] = {"__name__": "builtins"}
    (code,) = (code for _, code in blocks("python") if f"class {name}" in code)
    exec(compile(code, name, "exec", dont_inherit=True), names)
    return names[name]


def test_the_example_codec_encodes_and_decodes() -> None:
    codec, x = example("Sign")(), torch.tensor([[3.0, -1.0, 0.0], [2.0, -2.0, 4.0]])
    wire = codec.wire(x.shape)
    message = torch.empty(wire_bytes(wire), dtype=torch.uint8)
    pack(codec.encode(x), message)
    decoded = codec.decode(unpack(message, wire), x.shape, x.dtype)
    assert decoded.tolist() == [[2.0, -2.0, 0.0], [2.0, -2.0, 2.0]]
    assert ((decoded - x).abs() <= codec.error_bound(x)).all()


def test_the_example_source_yields_documents(tmp_path: Path) -> None:
    source = example("MarkdownDirectory")(str(tmp_path))
    with pytest.raises(ValueError, match="has no"):
        source.check()
    (tmp_path / "a.md").write_text("one")
    before = source.fingerprint
    (tmp_path / "b.md").write_text("two")
    source.check()
    assert source.fingerprint != before
    records = [SourceRecord({"text": text}, str(tmp_path / name)) for name, text in (("a.md", "one"), ("b.md", "two"))]
    assert list(source.records(RecordCounts())) == records


def test_the_example_format_makes_examples() -> None:
    made = example("QuestionAnswer")(ReadOptions(), None)
    record = SourceRecord({"question": "one", "answer": "two"}, "here")
    assert made.detect(record.fields)
    assert made.example(record).segments == (("Q: one\nA: ", False), ("two", True))


def test_the_example_schedule_is_valid() -> None:
    schedule = example("LastInFirstOut")()
    for ranks, micros in [(1, 1), (2, 3), (4, 8)]:
        validate(lower(schedule.program(ranks, micros)))


def test_specs_exist() -> None:
    specs = [
        (page, spec)
        for page, text in PAGES.items()
        for spec in re.findall(r"`([a-z_0-9]+:[a-z_]+=[^`\s.]\S*?)`", text)
        if not spec.startswith("name:")
    ]
    assert len(specs) > 40
    for page, spec in specs:
        _check_specs(page, [spec])


def test_names_and_paths_exist() -> None:
    wrong = []
    for page, text in PAGES.items():
        for path in re.findall(r"`((?:acsgd|benchmarks|deploy|tests|examples|slurm|docs)/[\w/.-]*)`", text):
            if not (ROOT / path).exists():
                wrong.append((page, path))
        for path in re.findall(r"`((?:\w+/)+\w+\.py)`", text):
            if not (ROOT / path).exists() and not (ROOT / "acsgd" / path).exists():
                wrong.append((page, path))
        for name in re.findall(r"(?:`|generated: \w+ )(acsgd\.[\w.]+)\b", text):
            if not _exists(name):
                wrong.append((page, name))
        for module, names in re.findall(r"^\W?\s*from (acsgd[\w.]*) import ([\w, ]+)$", text, re.MULTILINE):
            wrong += [(page, f"{module}.{name}") for name in names.split(", ") if not _exists(f"{module}.{name}")]
    assert not wrong


def test_hooks_take_the_arguments_shown() -> None:
    calls = re.findall(r"\b(CocktailState|MeanState)(\([^)]*\))", PAGES["docs/howto/ddp-hooks.md"])
    assert len(calls) == 2
    for name, arguments in calls:
        call = eval(f"lambda model, optimizer, f: f{arguments}")
        call(None, None, inspect.signature(getattr(hooks, name)).bind)


def test_links_of_the_readme_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", PAGES["README.md"])
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]


def test_cells_of_the_feature_table_are_short() -> None:
    cells = re.findall(r"^\| \[[^|]+\| (.*) \|$", PAGES["README.md"], re.MULTILINE)
    assert len(cells) >= 15
    for cell in cells:
        assert len(re.sub(r"\]\([^)]*\)", "]", cell).split()) <= 15, cell


def test_hand_written_errors_are_raised() -> None:
    page = PAGES["docs/troubleshooting.md"].partition("## Symptoms")[0]
    rows = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    texts = [text for text, _ in generate.error_texts()]
    assert len(rows) >= 20
    assert not [part for part in rows if not any(part in text for text in texts)]


def test_the_worked_example_follows_from_its_formulas() -> None:
    stages, replicas, batch, sequence, hidden, micros, layers, vocabulary = 2, 2, 2, 128, 256, 4, 4, 931
    params = (vocabulary + sequence + 2) * hidden + layers * (12 * hidden**2 + 13 * hidden)
    numbers = [
        (stages - 1) * micros * (48 + batch * sequence * hidden * 4),
        params,
        2 * (replicas - 1) * 4 * params,
    ]
    assert all(f"{number:,}" in PAGES["docs/choose.md"] for number in numbers)


def test_the_core_has_ten_files() -> None:
    names = re.findall(r"^\d+\. `(acsgd/[\w/]+\.py)`", PAGES["docs/architecture/core.md"], re.MULTILINE)
    assert len(set(names)) == 10
    assert all((ROOT / name).exists() for name in names)


def _check_specs(page: str, specs: list[str]) -> None:
    tables = {**ADAPTERS, **SPECS, **COMPRESS, **TIED, **MODES, **SCHEDULES, **OPTIMIZERS, **RATE_SCHEDULES}
    for spec in specs:
        try:
            from_spec(spec, tables, key=page)
        except ValueError as error:
            pytest.fail(str(error))


def _exists(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    with contextlib.suppress(ModuleNotFoundError):
        if importlib.util.find_spec(name) is not None:
            return True
    return hasattr(importlib.import_module(module), attribute)
