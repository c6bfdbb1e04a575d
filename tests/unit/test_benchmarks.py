"""Laws: what benchmarks import is there, and a case that fails ends no other. The benchmarks themselves take long."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.common.compare import run_all
from benchmarks.gpu.tables import texts

ROOT = Path(__file__).parents[2]


def names_of(body: list[ast.stmt]) -> Iterator[str]:
    """Return the names that a module binds at its top level."""
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Assign() | ast.AnnAssign():
                yield from (each.id for each in ast.walk(node) if isinstance(each, ast.Name))
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from (alias.asname or alias.name for alias in names)
            case ast.If(body=inner) | ast.Try(body=inner):
                yield from names_of(inner)


def has(module: str, name: str) -> bool:
    """Return whether a module of the repository has a name, or a module of that name."""
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if (path / name).is_dir() or (path / f"{name}.py").exists():
        return True
    return file.exists() and name in names_in(file)


@functools.cache
def names_in(file: Path) -> frozenset[str]:
    """Return the names that the module of a file binds."""
    return frozenset(names_of(ast.parse(file.read_text()).body))


def test_every_name_that_a_benchmark_imports_exists() -> None:
    imported = [
        (file.relative_to(ROOT), node.module, alias.name)
        for file in (ROOT / "benchmarks").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(("acsgd", "benchmarks", "tests"))
        for alias in node.names
    ]
    assert len(imported) > 100
    assert [each for each in imported if not has(*each[1:])] == []


def test_cases_after_one_that_fails_still_run() -> None:
    results, runs = list[str](), list[list[str]]()

    def run(names: Sequence[str]) -> None:
        runs.append([*names])
        for name in names:
            if name in ("b", "d"):
                raise ValueError(f"fault of {name}")
            results.append(name)

    failed = run_all("abcd", run, lambda: set(results))
    assert failed == ["b (fault of b)", "d (fault of d)"]
    assert runs == [["a", "b", "c", "d"], ["c", "d"]]
    assert results == ["a", "c"]


@pytest.mark.soak
@pytest.mark.parametrize("parts", ["ranks,step,overlap", "recovery"])  # the latter takes minutes
def test_benchmarks_of_gpus_are_rehearsed_on_cpus(parts: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--quick", "--only", parts, "--out", str(tmp_path)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    tables = {*parts.split(",")} | ({"messages"} if "ranks" in parts else set())
    assert {*texts(tmp_path)} == tables, "those for the documentation"
