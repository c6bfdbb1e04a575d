"""Pages of the documentation that are generated from the source, so that they cannot differ from it.

mkdocs loads this file as a hook (mkdocs.yml). Options, plug-ins, metrics and commands come from the dataclasses that
define them, their field docstrings included; the rooms come from tests/unit/test_floors.py; the home page is README.md.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import inspect
import io
import os
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from acsgd import cli
from acsgd.codecs import CODECS
from acsgd.config.options import Config
from acsgd.config.other_tools import Row, programs
from acsgd.config.ranges import ranges_of
from acsgd.dp import MODES
from acsgd.dp.ladder import COMPRESS as DP_COMPRESS
from acsgd.io.data.sources.sources import SOURCES
from acsgd.io.telemetry.json_lines import RANKS_PER_STEP
from acsgd.io.telemetry.record import StepRecord
from acsgd.metrics import METRICS
from acsgd.optim import OPTIMIZERS
from acsgd.optim.schedule import RATE_SCHEDULES
from acsgd.pp import SCHEDULES
from acsgd.pp.schedules.schedules import CHOICE
from acsgd.pp.tied.plan import TIED
from acsgd.pp.wire.delta import Delta
from acsgd.pp.wire.ladder import COMPRESS
from acsgd.run.report import FIELDS_BY_RANK
from acsgd.tasks import TASKS

ROOT = Path(__file__).parents[1]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for path, build in PAGES.items():
        files.append(File.generated(config, path, content=build()))
    return files


def home() -> str:
    """Return README.md with its links as seen from docs/. Links that leave docs/ become plain code."""
    text = (ROOT / "README.md").read_text().replace("](docs/", "](@")
    return re.sub(r"\[([^]]+)\]\((?!\w+://|@)[^)]+\)", r"`\1`", text).replace("](@", "](")


def options() -> str:
    """Return every option of a run, by section."""
    types_of = typing.get_type_hints(Config)
    parts = [
        "# Options\n\nEvery option of a run. A key `section.name` of the TOML file is the flag `--section.name`; "
        "flags > file > defaults. Spec strings such as `cocktail:topk=0.2` are explained in [Plug-ins](plugins.md).\n"
    ]
    for section in dataclasses.fields(Config):
        parts.append(f"## {section.name}\n\n{_docstring(types_of[section.name])}\n")
        for field in _fields(types_of[section.name]):
            signature = f"{field.type}, {f'default {field.default}' if field.default else 'required'}\n{{ .signature }}"
            parts.append(f"### {section.name}.{field.name}\n\n{signature}\n\n{field.doc}\n")
    return "\n".join(parts)


def plugins() -> str:
    """Return every plug-in with its options."""
    parts = [
        "# Plug-ins\n\nA plug-in is chosen by a spec string, `name:key=value,key=value`. Options that are left out "
        "have their default. To add one, see [Your own codec, mode or source](../howto/extend.md).\n",
        "## Codecs\n\n`pp.forward` and `pp.backward` take all of them.\n",
        *(_plugin(name, kind) for name, kind in {**CODECS, "delta": Delta}.items()),
        "## Choice of codecs\n\nValues of `pp.compress`.\n",
        *(_plugin(name, kind) for name, kind in COMPRESS.items()),
        "## Tied weights\n\nValues of `pp.tied`.\n",
        *(_plugin(name, kind) for name, kind in TIED.items()),
        "## Data-parallel modes\n\nValues of `dp.mode`.\n",
        *(_plugin(name, kind) for name, kind in MODES.items()),
        "## Choice of modes\n\nValues of `dp.compress`.\n",
        *(_plugin(name, kind) for name, kind in DP_COMPRESS.items()),
        "## Schedules\n\nValues of `pp.schedule`.\n",
        *(_plugin(name, kind) for name, kind in {**SCHEDULES, **CHOICE}.items()),
        f"## Optimizers\n\nValues of `optim.name`.\n\n{_modes_of_optimizers()}",
        *(_plugin(name, kind) for name, kind in OPTIMIZERS.items()),
        "## Learning-rate schedules\n\nValues of `optim.schedule`, after the warm-up.\n",
        *(_plugin(name, kind) for name, kind in RATE_SCHEDULES.items()),
        "## Sources\n\nNames in `data.sources` and `data.eval_sources`.\n",
        _table(("name", "content"), ((f"`{name}`", _docstring(kind)) for name, kind in SOURCES.items())),
    ]
    return "\n".join(parts)


def _modes_of_optimizers() -> str:
    """Return which optimizers work with which data-parallel modes, by their default options, as a table."""
    rows = (
        (
            f"`{name}`",
            ", ".join(f"`{mode}`" for mode, kind in MODES.items() if kind().requires <= optimizer.capabilities),
        )
        for name, optimizer in OPTIMIZERS.items()
    )
    return _table(("optimizer", "modes of `dp.mode` that take it"), rows)


def metrics() -> str:
    """Return the fields of metrics.jsonl."""
    fields = [field for field in _fields(StepRecord) if field.name not in ("evaluation", "ranks")]
    rows = [(f"`{field.name}`", field.type, field.doc.replace("None =", "null =")) for field in fields]
    rows += [(f"`{name}`", "number", metric.meaning) for name, metric in METRICS.items()]
    of_ranks = ", ".join(f"`{field.name}`" for field in FIELDS_BY_RANK)
    return (
        "# metrics.jsonl\n\nOne JSON object per optimizer step, written by rank 0 into the run directory.\n\n"
        f"{_docstring(StepRecord)} Lines of steps with an evaluation also have its metrics, of the held-out data "
        "after the update; null = not defined.\n\n"
        "`ranks` has numbers of each rank, as `[replicas][ranks per pipeline]`; without those that are 0 on all: "
        f"{of_ranks}. Of n ranks, more than {RANKS_PER_STEP}, it is in the line of every k-th step, k = n / "
        f"{RANKS_PER_STEP}, rounded up. "
        "`compute_s` is the time without waits for other ranks, waits include those of the pipeline "
        "bubble. [See a run](../howto/see.md) shows them.\n\n"
        "Lines with `event` and `after_step` (completed steps) are events: a change of "
        "the [hosts](../howto/elastic.md#what-happens-when) of an elastic run, of the "
        "[speed](../howto/several-hosts.md#hosts-of-different-speed) of ranks, or of the "
        "[codec](../howto/slow-links-stages.md#chosen-from-the-link) of a link, an option that was chosen at the "
        "start, or, on [hosts with disks of their own](../howto/several-hosts.md#hosts-with-disks-of-their-own), the "
        "start of a run.\n\n"
        f"{_table(('field', 'type', 'meaning'), rows)}\n"
    )


def commands() -> str:
    """Return the help texts of the command-line tools."""
    tools: dict[str, Callable[[], object]] = {
        "acsgd": lambda: cli.run(["--help"]),
        "acsgd inspect": lambda: cli.run(["inspect", "--help"]),
        "acsgd eval": lambda: cli.run(["eval", "--help"]),
        "acsgd plan": lambda: cli.run(["plan", "--help"]),
        "acsgd generate": lambda: cli.run(["generate", "--help"]),
        "acsgd data show": lambda: cli.run(["data", "show", "--help"]),
        "acsgd data check": lambda: cli.run(["data", "check", "--help"]),
        "acsgd data dedup": lambda: cli.run(["data", "dedup", "--help"]),
        "acsgd convert to-hf": lambda: cli.run(["convert", "to-hf", "--help"]),
        "acsgd convert from-hf": lambda: cli.run(["convert", "from-hf", "--help"]),
        "acsgd convert from-legacy": lambda: cli.run(["convert", "from-legacy", "--help"]),
        "acsgd convert to-legacy": lambda: cli.run(["convert", "to-legacy", "--help"]),
        "acsgd convert to-peft": lambda: cli.run(["convert", "to-peft", "--help"]),
        "acsgd convert merge": lambda: cli.run(["convert", "merge", "--help"]),
        "acsgd launch": lambda: cli.run(["launch", "--help"]),
        "acsgd host": lambda: cli.run(["host", "--help"]),
        "acsgd join": lambda: cli.run(["join", "--help"]),
        "acsgd net": lambda: cli.run(["net", "--help"]),
        "acsgd report": lambda: cli.run(["report", "--help"]),
        "acsgd top": lambda: cli.run(["top", "--help"]),
        "acsgd fetch": lambda: cli.run(["fetch", "--help"]),
        "acsgd doctor": lambda: cli.run(["doctor", "--help"]),
        "acsgd chaos": lambda: cli.run(["chaos", "--help"]),
    }
    parts = [
        "# Commands\n",
        "## train.py\n\n```\ntorchrun --nproc-per-node 4 train.py RUN.toml [--section.name VALUE ...]\n"
        "torchrun --nproc-per-node 4 -m acsgd RUN.toml      # the same loop, without a checkout\n"
        "acsgd train RUN.toml                               # the same in one process\n"
        "python train.py --help\n```\n\nAll options: [Options](options.md).\n",
        *(f"## {name}\n\n```text\n{_help(run)}\n```\n" for name, run in tools.items()),
        "## python -m acsgd.pp.schedules.simulate\n\nDraws a schedule and prints its bubble and its memory:\n\n"
        "```\npython -m acsgd.pp.schedules.simulate interleaved:chunks=2 4 8 --message 0.5\n```\n",
    ]
    return "\n".join(parts)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace the markers of generated parts, <!-- generated: NAME ARGUMENTS -->; names: PARTS.

    Pages of other tools come first among those that the search finds by their texts, since options of theirs are parts
    of many texts.
    """
    if page.file.src_uri.startswith("migrate/"):
        page.meta["search"] = {"boost": 4}

    def generated(marker: re.Match[str]) -> str:
        build, *arguments = marker[1].split()
        return PARTS[build](*arguments)

    return re.sub(r"<!-- generated: (.*?) -->", generated, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let long specs in tables wrap after commas, and options not after their hyphens."""
    return re.sub(r"<td[ >].*?</td>", lambda cell: _with_breaks(cell[0]), html, flags=re.DOTALL)


def rooms() -> str:
    """Return what each package and file is, in the order of packages that tests/unit/test_floors.py enforces."""
    source = ast.parse((ROOT / "tests/unit/test_floors.py").read_text())
    floors = next(
        ast.literal_eval(node.value)
        for node in source.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLOORS"
    ).split()
    packages = sorted(path for path in (ROOT / "acsgd").rglob("__init__.py") if path.parent != ROOT / "acsgd")
    room_rows = [(f"`{_relative(path.parent)}/`", _summary(path)) for path in packages]
    places = {name.replace(".", "/"): place for place, name in enumerate(floors)}

    def place(path: Path) -> tuple[int, str]:
        name = str(path.relative_to(ROOT / "acsgd").with_suffix(""))
        found = max((each for each in places if f"{name}/".startswith(f"{each}/")), key=len)
        return places[found], name

    files = sorted((path for path in (ROOT / "acsgd").rglob("*.py") if path.name != "__init__.py"), key=place)
    file_rows = [(f"`{_relative(path)}`", _summary(path)) for path in files]
    return (
        "## Rooms\n\n"
        + _table(("package", "content"), room_rows)
        + "\n## Files\n\nFrom the bottom to the top: a package imports only packages above it in this table.\n\n"
        + _table(("file", "content"), file_rows)
    )


def methods(path: str) -> str:
    """Return the methods of a protocol as a table."""
    members = vars(_named(path)).items()
    rows = [
        (f"`{_signature(name, member)}`", _docstring(member.fget if isinstance(member, property) else member))
        for name, member in members
        if not name.startswith("_") and (isinstance(member, property) or inspect.isfunction(member))
    ]
    return _table((f"`{path.rpartition('.')[2]}`", "meaning"), rows)


def tasks() -> str:
    """Return the tasks of models as a table."""

    def shape(name: str, sizes: Iterable[str]) -> str:
        return f"`{name}` `[{', '.join(sizes)}]`"

    rows = (
        (
            f"`{task.name}`",
            f"`{task.model_class.auto_class.__name__}`",
            ", ".join(shape(name, sizes) for name, sizes in task.model_class.inputs.items()),
            shape("labels", task.model_class.labels),
            f"{task.model_class.loss.__name__.replace('_', ' ')}, per label",
            "initialised if the files lack it" if task.model_class.has_new_head else "that of the files",
        )
        for task in TASKS.values()
    )
    return _table(("`model.task`", "class of transformers", "inputs", "labels", "loss", "head"), rows)


def other_tool(name: str) -> str:
    """Return the options of another tool and what to type instead, as a table for each of its programs."""

    def code(text: str) -> str:
        return f"`{text}`" if text else ""

    parts = list[str]()
    for program in programs():
        if program.tool == name:
            rows = (
                (code(f"{row.old} {row.value}".strip()), code(row.shown), _text(row.note))
                for rows in program.rows.values()
                for row in rows
            )
            command = Row("", "", program.command, "").shown
            parts.append(f"## {command}\n\n{_table(('there', 'here', 'what differs'), rows)}")
    return "\n".join(parts)


def errors() -> str:
    """Return the texts of all errors by what they concern, as tables with the file of each."""
    groups: dict[str, set[tuple[str, str]]] = {}
    for text, path in error_texts():
        groups.setdefault(_group_of_error(text, path), set()).add((text, path))
    return "\n".join(
        f"### {group}\n\n{_table(('error', 'raised in'), ((_text(text), f'`{path}`') for text, path in sorted(rows)))}"
        for group, rows in sorted(groups.items())
    )


def error_texts() -> list[tuple[str, str]]:
    """Return the text of each error that a user may see, with "…" for what differs, and the file that raises it."""
    raised = [
        (node.exc, _relative(path))
        for path in sorted((ROOT / "acsgd").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args
    ]
    texts = [(_template(call.args[0]), path) for call, path in raised if ast.unparse(call.func) in USER_ERRORS]
    return [(text, path) for text, path in texts if text]


def _template(node: ast.expr) -> str:
    """Return a text or an f-string with "…" for each value. Empty: neither, or nothing but values."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        text = "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        return re.sub("…+", "…", text) if len(re.findall(r"\w{2,}", text)) > 1 else ""
    return ""


def _group_of_error(text: str, path: str) -> str:
    """Return the section of the options that an error names, or the package that raises it."""
    sections = {field.name for field in dataclasses.fields(Config)}
    for section, _ in re.findall(r"\b([a-z]+)\.([a-z]\w+)", text):
        if section in sections:
            return f"Options of {section}"
    room = Path(path).relative_to("acsgd").parts[0]
    return "Others" if room.endswith(".py") else f"Others, {room}"


USER_ERRORS = {
    "ValueError",
    "InputError",
    "FormatError",
    "RunError",
    "RefusedError",
    "LayersError",
    "ConnectError",
    "NonFiniteError",
}
"""Names of the exceptions whose texts are documented."""
PAGES: dict[str, Callable[[], str]] = {
    "index.md": home,
    "reference/options.md": options,
    "reference/plugins.md": plugins,
    "reference/metrics.md": metrics,
    "reference/commands.md": commands,
}
"""Path of each generated page inside docs/ -> its text."""
PARTS: dict[str, Callable[..., str]] = {
    "rooms": rooms,
    "methods": methods,
    "tasks": tasks,
    "errors": errors,
    "other_tool": other_tool,
}
"""Name of each generated part of a page that is otherwise written by hand."""


class _Field(typing.NamedTuple):
    """A field of a dataclass or NamedTuple, as the reference shows it."""

    name: str
    type: str
    default: str
    """Empty: required."""
    doc: str


def _fields(kind: Any) -> list[_Field]:
    """Return the fields of a dataclass or NamedTuple, base classes included."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("acsgd"):
            docs |= _field_docs(base)
    hints = typing.get_type_hints(kind)
    ranges = ranges_of(kind) if dataclasses.is_dataclass(kind) else {}
    if dataclasses.is_dataclass(kind):
        defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    else:
        defaults = {name: kind._field_defaults.get(name, dataclasses.MISSING) for name in kind._fields}
    if missing := [name for name in defaults if not docs[name]]:
        raise ValueError(f"{kind.__module__}.{kind.__name__}: no docstring below the field {missing[0]}")
    types = {
        name: ", ".join([_type(hints[name]), *([str(ranges[name])] if name in ranges else [])]) for name in defaults
    }
    return [_Field(name, types[name], _default(default), docs[name]) for name, default in defaults.items()]


def _field_docs(kind: type) -> dict[str, str]:
    """Return the string below each annotated field of a class."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(node, ast.ClassDef)
    docs: dict[str, str] = {}
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            is_doc = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            docs[statement.target.id] = _text(following.value.value) if is_doc else ""
    return docs


def _plugin(name: str, kind: type) -> str:
    """Return a plug-in's heading, docstring and options."""
    rows = [(f"`{each.name}`", each.type, each.default, each.doc) for each in _fields(kind)]
    table = _table(("option", "type", "default", "meaning"), rows) if rows else "No options.\n"
    return f"### {name}\n\n{_docstring(kind)}\n\n{table}"


def _type(hint: Any) -> str:
    """Return a type as a reader of the run file sees it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return " or ".join(f"`{choice}`" for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        return _type(next(each for each in arguments if each is not type(None)))
    if origin is Mapping:
        return f"{_type(arguments[1])}s by name"
    if origin is tuple:
        return f"{_type(arguments[0])}s" if arguments[-1] is Ellipsis else f"{len(arguments)} {_type(arguments[0])}s"
    if origin is Sequence:
        return f"{_type(arguments[0])}s"
    return {"str": "text", "int": "integer", "float": "number", "bool": "`true` or `false`"}[hint.__name__]


def _default(value: Any) -> str:
    if value is dataclasses.MISSING:
        return ""
    if value is None or (isinstance(value, Mapping) and not value):
        return "none"
    if isinstance(value, tuple):
        return f"`{' '.join(map(str, value))}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = tuple(head)
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(' '.join(cell.split()) for cell in line)} |\n" for line in lines)


def _named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _signature(name: str, member: Any) -> str:
    if isinstance(member, property):
        return name
    signature = inspect.signature(member)
    parameters = [each.replace(annotation=each.empty) for each in signature.parameters.values() if each.name != "self"]
    return f"{name}{signature.replace(parameters=parameters, return_annotation=signature.empty)}"


def _with_breaks(html: str) -> str:
    def broken(code: re.Match[str]) -> str:
        options = re.sub(r"-[-\w.]+", r'<span class="option">\g<0></span>', code[1])
        return f"<code>{options.replace(',', ',<wbr>')}</code>"

    return re.sub(r"<code>(.*?)</code>", broken, html)


def _docstring(kind: Any) -> str:
    return _text(inspect.getdoc(kind) or "")


def _text(docstring: str) -> str:
    """Return a docstring as Markdown: characters that have a meaning there escaped outside of code."""
    lines = []
    for line in inspect.cleandoc(docstring).splitlines():
        if not line.startswith("    "):  # else it is a code block
            parts = line.split("`")
            parts[::2] = [re.sub(r"([*_|\[])", r"\\\1", part).replace("<", "&lt;") for part in parts[::2]]
            line = "`".join(parts)
        lines.append(line)
    return "\n".join(lines)


def _summary(path: Path) -> str:
    """Return the first sentence of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return _text(docstring.partition("\n\n")[0])


def _relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _file(kind: type) -> str:
    return _relative(Path(inspect.getfile(kind)))


def _help(run: Callable[[], object]) -> str:
    """Return what a command prints for --help, without the box characters' colours."""
    columns, printed = os.environ.get("COLUMNS"), io.StringIO()
    os.environ["COLUMNS"] = "100"
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            run()
    finally:
        os.environ.pop("COLUMNS") if columns is None else os.environ.update(COLUMNS=columns)
    return re.sub(r"\x1b\[[0-9;]*m", "", printed.getvalue()).strip()
