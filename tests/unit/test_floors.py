"""The architecture as tables: which package may import which, and which may name torch.distributed or torch.cuda."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from itertools import zip_longest
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# From the bottom to the top: a package imports only packages of floors below its own.
FLOORS = """
    errors host_memory notes versions
    launch streams config
    codecs comm layers metrics
    io.files model_classes topology
    groups mesh
    failures shards
    adapters io.data io.telemetry optim
    tasks
    dp
    io.checkpoint pp
    run.plan run.report
    run.lock run.evaluation run.initial_weights
    run.session
    run.setup
    run.step
    train
    elastic.membership
    elastic.host
    elastic.state
    elastic
    commands
    main
    __main__
    cli
    command
"""
FLOOR = {f"acsgd.{name}": floor for floor, line in enumerate(FLOORS.strip().splitlines()) for name in line.split()}

# Names that only some files may use.
RESERVED = {
    "torch.distributed": (
        "acsgd.comm.store",
        "acsgd.comm.communicators",
        "acsgd.comm.host_links",
        "acsgd.comm.process_groups",
        "acsgd.groups",
        "acsgd.pp.wire",
        "acsgd.dp",
        "acsgd.io.checkpoint",
        "acsgd.run.plan.measure_messages",
        "acsgd.run.report",
        "acsgd.elastic",
        "acsgd.main",
        "acsgd.commands.evaluation.command",
    ),
    "torch.cuda": ("acsgd.streams", "acsgd.codecs", "acsgd.commands.doctor.host"),
    "os.environ": ("acsgd.launch", "acsgd.io.telemetry.trackers"),
    "os._exit": ("acsgd.__main__", "acsgd.failures.signals"),
}
TORCH_FREE = (
    "acsgd.errors",
    "acsgd.versions",
    "acsgd.comm.waits",
    "acsgd.comm.connections",
    "acsgd.launch",
    "acsgd.topology",
    "acsgd.failures.stdio",
    "acsgd.failures.processes",
    "acsgd.failures.signals",
    "acsgd.failures.report",
    "acsgd.config.ranges",
    "acsgd.config.spec",
    "acsgd.config.options",
    "acsgd.config.checks",
    "acsgd.config.run_file",
    "acsgd.commands.generation.options",
    "acsgd.commands.evaluation.options",
    "acsgd.commands.data.command",
    "acsgd.pp.schedules.actions",
    "acsgd.pp.schedules.dependencies",
    "acsgd.pp.schedules.lowering",
    "acsgd.pp.schedules.validation",
    "acsgd.pp.schedules.schedules",
    "acsgd.pp.schedules.rows",
    "acsgd.pp.schedules.simulate",
)
NEVER_AT_MODULE_LEVEL = (
    "cupy",
    "bitsandbytes",
    "wandb",
    "tensorboard",
    "mlflow",
    "trackio",
    "datasets",
    "pandas",
    "pyarrow",
    "sklearn",
    "scipy",
    "torchmetrics",
    "lm_eval",
)


def _files() -> dict[str, Path]:
    files = {}
    for path in sorted((ROOT / "acsgd").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        files[".".join(part for part in parts if part != "__init__")] = path
    return files


FILES = _files()


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@pytest.fixture(scope="module", autouse=True)
def _forget_trees() -> Iterator[None]:
    """Keep no tree beyond the tests here: each collection of garbage would visit its nodes."""
    yield
    _tree.cache_clear()


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


@functools.cache
def _names(path: Path) -> tuple[str, ...]:
    """Return every dotted name and import of a file, e.g. torch.cuda.Stream."""
    tree = _tree(path)
    return (*_imports(tree), *(_dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)))


def _dotted(node: ast.expr) -> str:
    """Return a dotted name as written. Begins with a dot if it is one of a result, as in function().name."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _package(module: str) -> str:
    """Return the entry of FLOORS that a module belongs to."""
    parts = module.split(".")
    found = [".".join(parts[:n]) for n in range(len(parts), 1, -1) if ".".join(parts[:n]) in FLOOR]
    assert found, f"{module} belongs to no package of FLOORS"
    return found[0]


@functools.cache
def _edges() -> list[tuple[str, str]]:
    """Return every import of one module of the project by another."""
    return [
        (module, name) for module, path in FILES.items() for name in _imports(_tree(path)) if _within(name, "acsgd")
    ]


def test_a_package_imports_only_packages_of_lower_floors() -> None:
    packages = {(module, name, _package(module), _package(name)) for module, name in _edges() if module != "acsgd"}
    wrong = [(module, name) for module, name, mine, other in packages if mine != other and FLOOR[other] >= FLOOR[mine]]
    assert not wrong


def test_no_cycle_between_modules_or_packages_side_by_side() -> None:
    """At each level of the tree, modules and packages form a partial order; a package's __init__ is one of them."""
    levels: dict[str, TopologicalSorter[str]] = {}
    for module, name in _edges():
        pairs = [*zip_longest(module.split("."), name.split("."), fillvalue="__init__")]
        depth = next(level for level, (mine, other) in enumerate(pairs) if mine != other)
        levels.setdefault(str(pairs[:depth]), TopologicalSorter()).add(*pairs[depth])
    del levels["[('acsgd', 'acsgd')]"]  # FLOORS says more
    for sorter in levels.values():
        sorter.prepare()


@pytest.mark.parametrize("name", RESERVED)
def test_reserved_names_are_used_only_where_allowed(name: str) -> None:
    for module, path in FILES.items():
        if any(_within(module, owner) for owner in RESERVED[name]):
            continue
        used = [used for used in _names(path) if _within(used, name)]
        assert not used, f"{module} names {used[0]}; only {RESERVED[name]} may"


# Calls without arguments of a method `wait`, which are no waits for an operation of torch, by file.
OTHER_WAITS = {
    "acsgd.commands.launch.hosts": {"self._process"},
    "acsgd.comm.host_links": {"work"},
    "acsgd.comm.waits": {"work", "self._work"},
    "acsgd.run.plan.dry_run": {"sync"},
    "acsgd.run.plan.measure_messages": {"sync"},
    "acsgd.dp.exchange.following": {"self._sync"},
    "acsgd.dp.exchange.local_weights": {"self._reduction"},
    "acsgd.dp.modes.cocktail": {"super()"},
    "acsgd.dp.modes.powersgd": {"super()"},
    "acsgd.elastic.host.daemon": {"self._ended"},
    "acsgd.elastic.host.register": {"self._has_answered"},
    "acsgd.mesh.carrier": {"peer.connected"},
    "acsgd.mesh.mesh": {"self._ended"},
    "acsgd.mesh.mirrors": {"self._changed"},
    "acsgd.mesh.rotation": {"self._answered"},
    "acsgd.dp.exchange.sharded": {"self._across_domains"},
    "acsgd.mesh.transport": {"self._handshake_ended"},
    "acsgd.pp.runtime": {"stage.sync"},
    "acsgd.pp.wire.cache_sync": {"exchange"},
    "acsgd.pp.wire.channel": {"exchange"},
    "acsgd.run.step.checkpointing": {"self._saver"},
}
BLOCKING = {"send", "recv", "barrier", "broadcast", "reduce", "gather", "scatter", "monitored_barrier"}


def test_all_waits_for_other_ranks_are_those_of_acsgd_waits() -> None:
    """So that they can be interrupted: no file waits for an operation itself, or calls a blocking one."""
    for module, path in FILES.items():
        for call in (node for node in ast.walk(_tree(path)) if isinstance(node, ast.Call)):
            if not isinstance(call.func, ast.Attribute):
                continue
            owner, name = ast.unparse(call.func.value), call.func.attr
            if name == "wait" and not call.args:
                assert owner in OTHER_WAITS.get(module, ()), f"{module} calls {owner}.wait(); use Waits.wait"
            if owner == "dist" and (name in BLOCKING or name.startswith(("all_", "reduce_", "batch_"))):
                is_async = any(k.arg == "async_op" and ast.unparse(k.value) == "True" for k in call.keywords)
                assert is_async, f"{module} calls dist.{name}, which blocks; pass async_op=True, and use Waits.wait"


@pytest.mark.parametrize("module", TORCH_FREE)
def test_pure_files_need_no_torch(module: str) -> None:
    assert not [name for name in _imports(_tree(FILES[module])) if _within(name, "torch")]


def _executed_on_import(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        if not for_types and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from _executed_on_import(child)


def test_optional_packages_are_not_imported_by_the_core() -> None:
    for module, path in FILES.items():
        nodes = _executed_on_import(_tree(path))
        imports = ast.Module([node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)], [])
        imported = [name for name in _imports(imports) if name.partition(".")[0] in NEVER_AT_MODULE_LEVEL]
        assert not imported, f"{module} imports {imported[0]}"


def test_the_training_loop_is_short() -> None:
    assert len(FILES["acsgd.train"].read_text().splitlines()) < 200


def test_nothing_is_pickled_by_hand() -> None:
    """No object collective and no unpickling but of tensors alone, in tests and benchmarks either."""
    for folder in ("acsgd", "benchmarks", "examples", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not re.search("_object|pickle|torch.load", path.read_text()):
                continue
            used = [n for n in _names(path) if n.endswith(("_object", "_object_list")) or _within(n, "pickle")]
            assert not used, path
            if loads := _names(path).count("torch.load"):
                nodes = ast.walk(_tree(path))
                assert loads == sum(_loads_only_tensors(node) for node in nodes), path


def _loads_only_tensors(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and ast.unparse(node.func) == "torch.load"
        and any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
    )
