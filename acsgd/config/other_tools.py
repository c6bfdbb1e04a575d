"""Options of other tools and what to type instead: one table, other_tools.txt, for errors and docs/migrate/."""

from __future__ import annotations

import contextlib
import functools
import importlib.resources
import itertools
import operator
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from acsgd.config.typed_options import Line, Option, keys_of, normalized, read_table, typed_line
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
NEEDED = (
    "--model.name",
    "--data.sources",
    "--data.sequence",
    "--data.batch",
    "--optim.lr",
    "--optim.steps or --optim.epochs",
)
"""Options without which no run starts."""
OWN_PROGRAM = "a program of your own: a run file takes its place, or keep it with our hook, docs/howto/ddp-hooks.md"
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
        return any(place[2] for place in _PLACE.finditer(self.new) if place[2] != "hub")

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

    def is_named(self, program: Option) -> bool:
        """Whether the table has a program of a command line."""
        return any(row.value in ("", *program.values[:1]) for row in self.rows.get(program.key, ()))

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
        return any(row.value in names for row in self.rows.get(key, ()) if row.value)

    def row(self, key: str, values: Sequence[str]) -> Row:
        """Return the row of an option, and of its value if there is one."""
        rows, text = self.rows[key], ",".join(values)
        exact = (row for value in (text, _last(text)) for row in rows if row.value == value)
        absent = Row(rows[0].old, "", "", f"{text} is unknown" if text else "")
        return next(exact, next((row for row in rows if not row.value), absent))


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


def refuse_line(words: Sequence[str], known: Collection[str]) -> None:
    """Raise OtherToolError if words are a whole command line of another tool. known: see `refuse_others`."""
    names = {row.old for program in programs() for rows in program.rows.values() for row in rows if row.old[0] != "-"}
    if line := typed_line(words, names):
        refuse_others(line.options, known, "", line)


def refuse_others(options: Sequence[Option], known: Collection[str], command: str, line: Line | None = None) -> None:
    """Raise OtherToolError if some options are not known, but those of another tool.

    known: normalized names of the options of `command`; line: that has the options.
    """
    if not (found := _programs_of(options, known, command, line)):
        return
    best = found[0]
    if line is not None:
        of_files = itertools.chain(*map(_options_of_file, line.files)) if best.command == TRAIN else ()
        options = [line.program, *of_files, *options]
    by_name = {option.key: option for option in options}
    unknown = [option for option in by_name.values() if option.key not in known]
    lines, launcher, words = list[str](), dict[str, list[str]](), dict[str, list[str]]()
    for option in by_name.values():
        if option in unknown or (option.key in best.rows and len(unknown) > 1):
            row, new = _replacement(option, best, known, by_name)
            note = OWN_PROGRAM if line and option is line.program and not row.old else row.note
            typed = shlex.join([option.name, *option.values])
            lines.append(f"{typed} -> {_joined(new) or 'nothing'}{f' ({note})' if note else ''}")
            to = launcher if new[:1] == ["torchrun"] else words
            to |= {flag[0]: flag for flag in _flags(new) if not row.is_computed or flag[0] not in to}
        else:
            words |= _own_flag(option)
    tools = [TITLES[each.tool] for each in found]
    owners = " and ".join(filter(None, [", ".join(tools[:-1]), tools[-1]]))
    page = f"docs/migrate/{best.tool}.md"
    if len(lines) == 1 and line is None:
        raise OtherToolError(f"{lines[0].replace(' -> ', f' is an option of {owners}; here: ', 1)}; others: {page}")
    start = _filled(Row("", "", best.command, ""), [], by_name)
    if "-m" in start:
        start[(place := start.index("-m")) : place] = itertools.chain(*launcher.values())
    start += itertools.chain(*words.values())
    needed = [name for name in NEEDED if best.command == TRAIN and not words.keys() & {*name.split(" or ")}]
    kind = f"type, and add {', '.join(needed)}:" if needed else "type:"
    raise OtherToolError("\n".join([f"options of {owners} (all of them: {page}):", *lines, kind, _joined(start)]))


def _programs_of(
    options: Sequence[Option], known: Collection[str], command: str, line: Line | None
) -> Sequence[Program]:
    """Return the program that has most of some options, and those of other tools that have as many; empty: none."""
    unknown = [option for option in options if option.key not in known]

    def fit(program: Program) -> tuple[bool, int, bool, int]:
        found = [key for option in unknown if (key := program.key(option, known))]
        exact = sum(program.key(option, known) == option.key for option in unknown)
        values = sum(program.has_value(program.key(option, known), option.values) for option in unknown)
        is_named = line is not None and program.is_named(line.program)
        return is_named, len(found) + exact, program.command.startswith(command), values

    best = max(programs(), key=fit)
    is_found = fit(best)[0] or fit(best)[1]
    return [each for each in programs() if is_found and fit(each) == fit(best) and each.command == best.command]


def _replacement(
    option: Option, best: Program, known: Collection[str], given: Mapping[str, Option]
) -> tuple[Row, list[str]]:
    """Return the row of an option, of another program of that command if need be, and the words to type."""
    kind = best.command.split()[0]
    others = [each for each in programs() if each.command.split()[0] == kind]
    owner = max((best, *others), key=lambda each: (each.key(option, known) != "") + (option.key in each.rows))
    if not (key := owner.key(option, known)):
        return Row("", "", "", "unknown"), []
    row = owner.row(key, option.values)
    return row, _filled(row, option.values, given, owner.rows[key])


def _own_flag(option: Option) -> dict[str, list[str]]:
    """Return the flag of an option of acsgd, by its name."""
    name = f"--{option.name.lstrip('-')}"
    is_switch = option.values in (["true"], ["false"])  # of a file
    typed = name.replace(".", ".no-") if option.values == ["false"] else name
    return {name: [typed, *([] if is_switch else option.values)]}


def _options_of_file(name: str) -> list[Option]:
    """Return the keys of a configuration file, none if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return keys_of(read_table(Path(name)))
    return []


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
        text = _PLACE.sub(lambda _: next(filled), word)
        return text.replace(",", ":", 1) if re.match(r"\w+\{,", word) else text

    return ",".join(part(index) for index in range(max([1, *(len(texts) for _, texts in found)])))


def _values(name: str, values: Sequence[str], given: Mapping[str, Option]) -> Sequence[str]:
    """Return the values of an expression of a template. The name of no option is the value itself.

    Of several numbers, it computes with the largest.
    """
    if name in ("", "hub"):
        given_values = [value.removeprefix("tcp://") for value in values if value.lower() not in OFF]
        return [f"hf:{each}" if name and _is_of_hub(each) else each for each in given_values]
    if name[0] == "+":
        return ["+".join(found)] if (found := _of_option(name[1:], given)) else []
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


def _is_of_hub(name: str) -> bool:
    """Whether a data set is one of the Hub, OWNER/NAME, not a path."""
    return (
        re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) is not None and not Path(name).suffix and not os.path.exists(name)
    )


def _of_option(name: str, given: Mapping[str, Option]) -> Sequence[str]:
    """Return the values of another option, "name", or "name=default"."""
    name, _, default = name.partition("=")
    values: Iterable[str] = given[name].values if name in given else ()
    return [value for value in values if value.lower() not in OFF] or ([default] if default else [])
