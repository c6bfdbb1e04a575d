"""README and docs/ show what exists: their code runs, their commands parse, and every name, path and spec is valid.

`make docs` checks the links between pages.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from acsgd.codecs import CODECS
from acsgd.codecs.base import Field, pack, unpack, wire_bytes
from acsgd.config.adapters import ADAPTERS
from acsgd.config.run_file import parse
from acsgd.config.spec import from_spec
from acsgd.dp import MODES, hooks
from acsgd.io.data.formats.base import Example, OptionsOfFormat, TextSegment
from acsgd.io.data.sources.base import ReadOptions, RecordCounts, SourceRecord
from acsgd.optim import OPTIMIZERS
from acsgd.optim.schedule import RATE_SCHEDULES
from acsgd.pp import SCHEDULES, Action, Op, lower, validate
from acsgd.pp.tied.plan import TIED
from acsgd.pp.wire.delta import Delta

ROOT = Path(__file__).parents[2]
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))}
REQUIRED = {
    "model.name": "m",
    "data.sources": "demo",
    "data.sequence": "8",
    "data.batch": "8",
    "optim.lr": "1",
    "optim.steps": "1",
}


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """Yield the fenced code blocks of a language, with the page of each. Language "": without one, shell commands."""
    for page, text in PAGES.items():
        for found, code in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            if found == language:
                yield page, code


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield the words of each shell command, with its page. Skips those with an ellipsis or a placeholder."""
    for page, code in blocks(""):
        for line in code.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words and not any("..." in word or word.isupper() or word == "RUN.toml" for word in words):
                yield page, words


def example(name: str) -> Any:
    """Return the class of a Python block."""
    names: dict[str, Any] = {
        "dataclass": dataclass,
        "ClassVar": ClassVar,
        "Fraction": Fraction,
        "Path": Path,
        "torch": torch,
        "Field": Field,
        "Record": SourceRecord,
        "OptionsOfFormat": OptionsOfFormat,
        "Example": Example,
        "Segment": TextSegment,
        "ReadOptions": ReadOptions,
        "Action": Action,
        "Op": Op,
    }
    (code,) = (code for _, code in blocks("python") if f"class {name}" in code)
    exec(code, names)
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
        validate(lower(schedule.rows(ranks, micros)))


def test_toml_blocks_and_training_commands_parse(tmp_path: Path) -> None:
    seen = 0
    for _, code in blocks("toml"):
        path = tmp_path / "run.toml"
        path.write_text(code)
        given = {f"{section}.{key}" for section, keys in tomllib.loads(code).items() for key in keys}
        parse([str(path), *(f"--{key}={value}" for key, value in REQUIRED.items() if key not in given)])
        seen += 1
    for page, words in commands():
        for script in ("train.py", "slurm/train.sbatch", "slurm/elastic.sbatch"):
            if script in words and "--help" not in words:
                arguments = words[words.index(script) + (1 if script == "train.py" else 2) :]
                try:
                    config = parse(arguments)
                except (ValueError, SystemExit) as error:
                    pytest.fail(f"{page}: {' '.join(words)}: {error}")
                _check_specs(page, [config.pp.forward, config.pp.backward, config.dp.mode, config.pp.schedule])
                seen += 1
    assert seen > 15


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


def test_modules_and_flags_of_commands_exist() -> None:
    seen = 0
    for page, words in commands():
        if "-m" in words and words[0].endswith("python"):
            module = words[words.index("-m") + 1]
            found = importlib.util.find_spec(module)
            assert found is not None, f"{page}: no module {module}"
            assert found.origin is not None
            text = Path(found.origin).read_text()
            for flag in (word for word in words if word.startswith("--")):
                assert f'"{flag}"' in text, f"{page}: {module} has no flag {flag}"
            seen += 1
    assert seen > 10


def test_names_and_paths_exist() -> None:
    wrong = []
    for page, text in PAGES.items():
        for path in re.findall(r"`((?:acsgd|benchmarks|tests|examples|slurm|docs)/[\w/.-]*)`", text):
            if not (ROOT / path).exists():
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
        call = eval(f"lambda model, f: f{arguments}")
        call(None, inspect.signature(getattr(hooks, name)).bind)


def test_links_of_the_readme_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", PAGES["README.md"])
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]


def _check_specs(page: str, specs: list[str]) -> None:
    tables = {**ADAPTERS, **CODECS, "delta": Delta, **TIED, **MODES, **SCHEDULES, **OPTIMIZERS, **RATE_SCHEDULES}
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
