"""The architecture, stated as tables and enforced: who may import whom, and who may touch the outside."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A file imports only from its own package or from a lower floor. Longest prefix wins.
FLOORS = {
    "train": 7,
    "acsgd.cli": 7,
    "acsgd.state": 6,  # a job at work, into checkpoints and out of them
    "acsgd.inputs": 4,  # what it reads
    "acsgd.build": 5,  # how a worker comes about
    "acsgd.worker": 4,  # a job at work
    "acsgd.job": 3,  # a run decided: floor 3 for it reads the tables of all below
    "acsgd.pp.runtime": 3,
    "acsgd.pp.stage": 2,
    "acsgd.pp.link": 2,  # with all that it is made of
    "acsgd.pp.channel": 2,
    "acsgd.pp.agree": 2,
    "acsgd.pp.coder": 2,
    "acsgd.pp.delta": 2,
    "acsgd.pp.memory": 2,
    "acsgd.pp.memory_disk": 2,
    "acsgd.pp.memory_plan": 2,
    "acsgd.pp.tied": 2,
    "acsgd.dp": 2,
    "acsgd.io": 2,
    "acsgd.codecs": 1,
    "acsgd.shards": 1,
    "acsgd.optim": 3,  # AdamW, and what replicas keep of it
    "acsgd.pp": 1,  # actions, laws, schedules, simulate, frame
    "acsgd.config": 0,
    "acsgd.checks": 0,
    "acsgd.precision": 0,
    "acsgd.registry": 0,
    "acsgd.topology": 0,
    "acsgd.streams": 0,
    "acsgd.meter": 0,
    "acsgd.failure": 0,
    "acsgd.signals": 0,
    "acsgd": 0,
}
# The replicas' agreement on a stage is part of the stage; it lies in another package of the same floor.
ALLOWED = {("acsgd.pp.stage", "acsgd.dp.base")}

# What only some files may name.
RESERVED = {
    "torch.distributed": (
        "acsgd.topology",
        "acsgd.pp.link",
        "acsgd.pp.channel",
        "acsgd.pp.agree",
        "acsgd.dp",
        "acsgd.io.checkpoint",
    ),
    "torch.cuda": ("acsgd.streams", "acsgd.codecs"),
    "os.environ": ("acsgd.topology",),
}
TORCH_FREE = (
    "acsgd.registry",
    "acsgd.config",
    "acsgd.checks",
    "acsgd.pp.actions",
    "acsgd.pp.laws",
    "acsgd.pp.schedules",
    "acsgd.pp.simulate",
)
NEVER_AT_MODULE_LEVEL = ("cupy", "bitsandbytes", "wandb", "aim")


def _files() -> dict[str, Path]:
    files = {"train": ROOT / "train.py"}
    for path in sorted((ROOT / "acsgd").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        files[".".join(part for part in parts if part != "__init__")] = path
    return files


FILES = _files()


def _floor(module: str) -> int:
    return FLOORS[max((name for name in FLOORS if _within(module, name)), key=len)]


def _within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module
            assert not node.level
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in FILES else node.module


def _names(tree: ast.AST) -> Iterator[str]:
    """Every dotted name and import, e.g. torch.cuda.Stream."""
    yield from _imports(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)


@pytest.mark.parametrize("module", FILES)
def test_a_file_imports_only_its_own_package_or_lower_floors(module: str) -> None:
    package = module if FILES[module].name == "__init__.py" else module.rpartition(".")[0]
    for imported in _imports(ast.parse(FILES[module].read_text())):
        if not _within(imported, "acsgd") or (module, imported) in ALLOWED:
            continue
        same_package = package not in ("", "acsgd") and _within(imported, package)
        lower = _floor(imported) < _floor(module)
        sibling_at_the_bottom = _floor(imported) == _floor(module) == 0
        assert lower or same_package or sibling_at_the_bottom, f"{module} imports {imported}"


@pytest.mark.parametrize("name", RESERVED)
def test_reserved_names_stay_where_they_belong(name: str) -> None:
    for module, path in FILES.items():
        if any(_within(module, owner) for owner in RESERVED[name]):
            continue
        used = [used for used in _names(ast.parse(path.read_text())) if _within(used, name)]
        assert not used, f"{module} names {used[0]}; only {RESERVED[name]} may"


@pytest.mark.parametrize("module", TORCH_FREE)
def test_pure_files_need_no_torch(module: str) -> None:
    assert not [name for name in _imports(ast.parse(FILES[module].read_text())) if _within(name, "torch")]


def _executed_on_import(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        if not for_types and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from _executed_on_import(child)


def test_optional_packages_are_not_imported_by_the_core() -> None:
    for module, path in FILES.items():
        nodes = _executed_on_import(ast.parse(path.read_text()))
        imports = ast.Module([node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)], [])
        imported = [name for name in _imports(imports) if name.partition(".")[0] in NEVER_AT_MODULE_LEVEL]
        assert not imported, f"{module} imports {imported[0]}"


def test_the_loop_can_be_read_aloud() -> None:
    assert len(FILES["train"].read_text().splitlines()) < 200
