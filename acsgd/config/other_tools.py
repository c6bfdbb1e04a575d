"""Options of other tools and what to type instead: one table, other_tools.txt, for errors and docs/migrate/."""

from __future__ import annotations

import functools
import importlib.resources
import itertools
import operator
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from acsgd.errors import InputError, similar

TITLES = {
    "ac-sgd": "AC-SGD",
    "cocktailsgd": "CocktailSGD",
    "together": "Together finetuning",
    "openchatkit": "OpenChatKit",
    "finetuner": "the DeepSpeed finetuner",
    "torchtitan": "torchtitan",
    "axolotl": "axolotl",
    "deepspeed": "DeepSpeed, accelerate or transformers' Trainer",
}
"""Tools, each with the name of its page in docs/migrate/."""
TRAIN = "torchrun -m acsgd"
OFF = ("", "auto", "none", "null", "false", "no", "-1")
"""Values that say nothing, or switch an option off."""


class OtherToolError(InputError):
    """Options of another tool. The message has a line for each, and the line to type."""


class Row(NamedTuple):
    """A row of the table."""

    old: str
    """Option, variable or file of another tool."""
    value: str
    """Value that the row is for; empty: all that have no row."""
    new: str
    """Words to type, a template; empty: none."""
    note: str

    @property
    def is_computed(self) -> bool:
        """Whether the words to type are made of the values of other options, which have options of their own."""
        return any(place[2] for place in _PLACE.finditer(self.new))

    @property
    def shown(self) -> str:
        """The template for a reader: VALUE for the old value, names of other options in capitals."""
        return _PLACE.sub(_shown, self.new)


class Program(NamedTuple):
    """A program of another tool."""

    tool: str
    command: str
    """Command that does the same, a template."""
    rows: Mapping[str, Sequence[Row]]
    """Rows by the normalized name of the option."""

    def key(self, option: Option, known: Collection[str]) -> str:
        """Return the name under which the table has an option, or an empty text. known: see `refuse_others`."""
        section, _, name = option.key.partition(".")
        of_section = [each.partition(".")[2] for each in known if each.startswith(f"{section}.")]
        parents = itertools.accumulate(option.key.split("."), lambda parent, part: f"{parent}.{part}")
        others = ([] if similar(name, of_section) else [name]) if of_section else [*parents]
        return next((each for each in (option.key, *reversed(others)) if each in self.rows), "")

    def has_value(self, key: str, values: Sequence[str]) -> bool:
        """Whether the table has a value of an option, or an item of a list of values."""
        names = {name for value in values for item in value.split(",") for name in (item, item.rpartition(":")[0])}
        return any(row.value in names for row in self.rows[key] if row.value)

    def row(self, key: str, values: Sequence[str]) -> Row:
        """Return the row of an option, and of its value if there is one."""
        rows, text = self.rows[key], ",".join(values)
        exact = (row for value in (text, _last(text)) for row in rows if row.value == value)
        absent = Row(rows[0].old, "", "", f"{text} is unknown" if text else "")
        return next(exact, next((row for row in rows if not row.value), absent))


class Option(NamedTuple):
    """An option as it was typed, or a key of a file with its values."""

    name: str
    values: Sequence[str]

    @property
    def key(self) -> str:
        """Normalized name."""
        return normalized(self.name)


_PLACE = re.compile(r"\{(?:([^{}?]*)\?)?([^{}?]*)\}")
_WORD = re.compile(r"(?:\{[^}]*\}|[^\s{])+")
_OPERATORS: Mapping[str, Callable[[int, int], int]] = {
    "*": operator.mul,
    "+": operator.add,
    "/": lambda a, b: -(-a // b),
}


@functools.cache
def programs() -> Sequence[Program]:
    """Return the programs of all tools."""
    found: dict[tuple[str, str], dict[str, list[Row]]] = {}
    sections = list[dict[str, list[Row]]]()
    for line in (importlib.resources.files(__package__) / "other_tools.txt").read_text().splitlines():
        if head := re.fullmatch(r"\[(.*): (.*)\]", line):
            sections = [found.setdefault((tool, head[1]), {}) for tool in head[2].split(", ")]
        elif line and line[0] != "#":
            old, new, note = (cell.strip() for cell in line.split(" |"))
            name, _, value = old.partition(" ")
            for rows in sections:
                rows.setdefault(normalized(name), []).append(Row(name, value, new, note))
    return [Program(tool, command, rows) for (tool, command), rows in found.items()]


def normalized(name: str) -> str:
    """Return the name of an option without leading dashes, with underscores."""
    return name.lstrip("-").replace("-", "_")


def typed_options(argv: Sequence[str]) -> list[Option]:
    """Return the options of a command line, each with the words after it."""
    options = list[Option]()
    for word in argv:
        if re.match(r"--?[A-Za-z]", word):
            name, is_assigned, value = word.partition("=")
            options.append(Option(name, [value] if is_assigned else []))
        elif options:
            options[-1] = Option(options[-1].name, [*options[-1].values, word])
    return options


def keys_of(table: Any, prefix: str = "") -> list[Option]:
    """Return the keys of nested tables, "a.b", with their values. Lists of tables are one table with several values."""
    if isinstance(table, list) and any(isinstance(each, dict) for each in table):
        merged: dict[str, list[str]] = {}
        for name, values in (option for each in table for option in keys_of(each, prefix)):
            merged.setdefault(name, []).extend(values)
        return [Option(name, values) for name, values in merged.items()]
    if not isinstance(table, dict):
        values = table if isinstance(table, list) else [table]
        return [Option(prefix, [str(each).lower() if isinstance(each, bool) else str(each) for each in values])]
    return [
        option for key, each in table.items() for option in keys_of(each, f"{prefix}.{key}" if prefix else str(key))
    ]


def refuse_others(options: Sequence[Option], known: Collection[str], command: str) -> None:
    """Raise OtherToolError if some options are not known, but those of another tool.

    known: normalized names of the options of `command`.
    """
    by_name = {option.key: option for option in options}
    unknown = [option for option in by_name.values() if option.key not in known]

    def match(program: Program, option: Option) -> int:
        key = program.key(option, known)
        return (key != "") + (key == option.key != "")

    def fit(program: Program) -> tuple[int, bool, int]:
        found = [option for option in unknown if match(program, option)]
        values = sum(program.has_value(program.key(option, known), option.values) for option in found)
        return sum(match(program, option) for option in found), program.command.startswith(command), values

    best = max(programs(), key=fit)
    if not fit(best)[0]:
        return
    tools = [TITLES[each.tool] for each in programs() if fit(each) == fit(best) and each.command == best.command]
    owners = " and ".join(filter(None, [", ".join(tools[:-1]), tools[-1]]))
    page = f"docs/migrate/{best.tool}.md"
    lines, launcher, words = list[str](), dict[str, list[str]](), dict[str, list[str]]()
    for option in by_name.values():
        typed = shlex.join([option.name, *option.values])
        if option in unknown or (option.key in best.rows and len(unknown) > 1):
            owner = max((best, *programs()), key=lambda each: match(each, option))
            key = owner.key(option, known)
            row = owner.row(key, option.values) if key else Row("", "", "", "unknown")
            new = _filled(row, option.values, by_name, owner.rows.get(key, ()))
            lines.append(f"{typed} -> {_joined(new) or 'nothing'}{f' ({row.note})' if row.note else ''}")
            to = launcher if new[:1] == ["torchrun"] else words
            to |= {flag[0]: flag for flag in _flags(new) if not row.is_computed or flag[0] not in to}
        else:
            name = f"--{option.name.lstrip('-')}"
            is_switch = option.values in (["true"], ["false"])  # of a file
            words[name] = [name.replace(".", ".no-") if option.values == ["false"] else name]
            words[name] += [] if is_switch else option.values
    if len(lines) == 1:
        raise OtherToolError(f"{lines[0].replace(' -> ', f' is an option of {owners}; here: ', 1)}; others: {page}")
    start = _filled(Row("", "", best.command, ""), [], by_name)
    start[1:1] = itertools.chain(*launcher.values()) if best.command == TRAIN else []
    start += itertools.chain(*words.values())
    raise OtherToolError("\n".join([f"options of {owners} (all of them: {page}):", *lines, "type:", _joined(start)]))


def other_value(key: str, value: str) -> str:
    """Return ' ("value" of another tool is "VALUE")' for a value of an option that other tools call so, else ""."""
    for program in programs():
        for rows in program.rows.values():
            for row in rows:
                if row.value not in (value, _last(value)) or not row.value:
                    continue
                filled = dict(each[:2] for each in _flags(_filled(row, [], {})) if each[1:])
                if (new := filled.get(f"--{key}", value)) != value:
                    return f' ("{value}" of {TITLES[program.tool]} is "{new}")'
                if not row.new and any(each.new.startswith(f"--{key} ") for each in rows):
                    return f' ("{value}" of {TITLES[program.tool]}: {row.note})'
    return ""


def _shown(place: re.Match[str]) -> str:
    return (place[1] or "") + (re.sub(r"=[\w.]+", "", place[2]).upper().strip("*") or "VALUE")


def _last(value: str) -> str:
    """Return the last part of a dotted name of Python, such as torch.float16 or <class 'a.B'>."""
    return value.strip("<>'").rpartition(".")[2]


def _flags(words: Sequence[str]) -> list[list[str]]:
    """Return the options among some words, each with its values."""
    flags = list[list[str]]()
    for word in words:
        if word.startswith("--"):
            flags.append([word])
        elif flags:
            flags[-1].append(word)
    return flags


def _joined(words: Sequence[str]) -> str:
    return " ".join(word if re.fullmatch(r"[$\w.,:/*+=@{}&-]+", word) else shlex.quote(word) for word in words)


def _filled(row: Row, values: Sequence[str], given: Mapping[str, Option], rows: Sequence[Row] = ()) -> list[str]:
    """Return the words of a row's template, without options that lack their value.

    values: of the option; given: all options by their names; rows: those of the option.
    """
    if "{" not in row.new and not row.value and values and values[0].lower() in OFF:
        return []
    if len(values) == 1 and "," in values[0] and not row.value:
        values = [",".join(_of_item(item, rows) for item in values[0].split(","))]
    words = list[list[str]]()
    for word in _WORD.findall(row.new):
        if word.startswith("--") or not words:
            words.append([])
        words[-1] += values if word == "{*}" else [_evaluated(word, values, given)]
    return [word for flag in words if all(flag) for word in flag]


def _of_item(item: str, rows: Sequence[Row]) -> str:
    """Return the new name of an item, "name" or "name:weight", of a list of values."""
    name, colon, weight = item.rpartition(":")
    if not re.fullmatch(r"[0-9.]+", weight):
        name, colon, weight = item, "", ""
    new = next((row.new for row in rows if row.value == name), "")
    return f"{new.split()[1] if new else name}{colon}{weight}"


def _evaluated(word: str, values: Sequence[str], given: Mapping[str, Option]) -> str:
    """Return a word of a template with its values; one for each, with commas between, where an option has several.

    Empty if a value is missing.
    """
    found = [(place[1], _values(place[2], values, given)) for place in _PLACE.finditer(word)]
    if any(before is None and not texts for before, texts in found):
        return ""

    def part(index: int) -> str:
        filled = (f"{before or ''}{texts[min(index, len(texts) - 1)]}" if texts else "" for before, texts in found)
        return _PLACE.sub(lambda _: next(filled), word)

    return ",".join(part(index) for index in range(max([1, *(len(texts) for _, texts in found)])))


def _values(name: str, values: Sequence[str], given: Mapping[str, Option]) -> Sequence[str]:
    """Return the values of an expression of a template. The name of no option is the value itself.

    Of several numbers, it computes with the largest.
    """
    if not name:
        return [value.removeprefix("tcp://") for value in values if value.lower() not in OFF]
    first, *rest = re.split(r" ([*/+]) ", name)
    found = _of_option(first, given)
    for sign, other in zip(rest[::2], rest[1::2], strict=True):
        operand = _of_option(other, given)
        if not found or not operand:
            found = found or (operand if sign != "/" else [])
        elif all(value.isdecimal() for value in (*found, *operand)):
            found = [str(_OPERATORS[sign](*(max(map(int, values)) for values in (found, operand))))]
        else:
            found = [f"{found[0]}{sign}{operand[0]}"]
    return found


def _of_option(name: str, given: Mapping[str, Option]) -> Sequence[str]:
    """Return the values of another option, "name", or "name=default"."""
    name, _, default = name.partition("=")
    values: Iterable[str] = given[name].values if name in given else ()
    return [value for value in values if value.lower() not in OFF] or ([default] if default else [])
