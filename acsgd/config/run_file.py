"""Read a run's configuration from a TOML file and command-line flags, and write it back as TOML."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
import json
import os
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro

from acsgd.config.options import FORMER_SWITCHES, OF_LINKS, REMOVED, RENAMED, Config
from acsgd.config.other_tools import TRAIN, other_value, refuse_line, refuse_others
from acsgd.config.spec import suggest
from acsgd.config.typed_options import keys_of, normalized, read_table, typed_options
from acsgd.errors import similar
from acsgd.notes import print_note

T = TypeVar("T")

TRUTHS = ("true", "false", "yes", "no", "on", "off", "0", "1")
"""Values with which other programs take switches."""
MAX_SHOWN = 60
"""Maximum number of characters of a value in an error message."""
MAX_USAGE = 400
"""Maximum number of characters of a usage error."""


def parse(argv: list[str], *, prog: str = "train.py", is_main: bool = True) -> Config:
    """Read `RUN.toml [--section.key value ...]`; flags > file > defaults.

    prog: name of the command in its help; is_main: whether this process prints help. Does not check ranges; see
    `acsgd.config.checks`. Raises ValueError for an unreadable file, an unknown key, a renamed or removed option or a
    malformed value, SystemExit for --help.
    """
    argv = list(argv)
    arguments: list[str] = []
    # Not Path.is_file, which raises OSError for a name that is too long.
    if argv and not os.path.isfile(argv[0]) and not argv[0].startswith("--"):
        refuse_pasted(argv)
    if argv and not argv[0].startswith("-"):
        arguments = _as_flags(_read(Path(argv.pop(0))))
    _refuse_former(argv)
    (arguments, of_links), (argv, typed) = _take_links(arguments), _take_links(argv)
    given = {key: of_links[key] | typed[key] for key in OF_LINKS}
    argv += [f"--{key}={' '.join(f'{n}={spec}' for n, spec in given[key].items())}" for key in OF_LINKS if given[key]]
    description = "Fine-tune a Hugging Face model over pipeline stages x replicas."
    return parse_flags(
        Config, argv, arguments, prog=prog, shown=f"{prog} [RUN.toml]", description=description, is_main=is_main
    )


def refuse_pasted(words: Sequence[str]) -> None:
    """Raise ValueError with the line to type if words are a command line of another tool, or options of a run."""
    refuse_line(words, _keys())
    refuse_others(typed_options(words), _keys(), TRAIN)


def with_run_options(kind: type[T], argv: Sequence[str], *, prog: str) -> tuple[T, tuple[str, ...]]:
    """Read the options of a command, and return those of the run among them: those with a dot in their name."""
    own, of_run, is_of_run = list[str](), list[str](), False
    for argument in argv:
        if argument.startswith("--"):
            is_of_run = "." in argument.partition("=")[0]
        (of_run if is_of_run else own).append(argument)
    return parse_flags(kind, own, prog=prog), tuple(of_run)


def parse_flags(
    kind: type[T],
    argv: Sequence[str],
    of_file: Sequence[str] = (),
    *,
    prog: str,
    shown: str | None = None,
    description: str | None = None,
    is_main: bool = True,
) -> T:
    """Read the fields of a dataclass from flags.

    of_file: flags that those of `argv` override; prog, is_main: see `parse`; shown: name of the command with its first
    arguments, for its help; description: default: the docstring. Raises ValueError for an invalid flag, in one
    sentence, SystemExit for --help.
    """
    printed = io.StringIO()
    try:
        help_to = contextlib.nullcontext() if is_main else contextlib.redirect_stdout(io.StringIO())
        with help_to, contextlib.redirect_stderr(printed):
            options = tyro.cli(kind, args=[*of_file, *argv], prog=shown or prog, description=description)
    except SystemExit as end:
        if not end.code:
            raise
        shown_help = _help(kind, argv, prog)
        known, given = _options_in(shown_help), typed_options(argv)
        named = shown_help.partition("usage: ")[2].partition(" [-h]")[0]
        refuse_others(given, {normalized(each) for each in known}, TRAIN if kind is Config else named)
        meant = next(filter(None, (other_value(each.key, text) for each in given for text in each.values)), "")
        text = _option_error(argv, known) or f"{_usage_error(printed.getvalue(), argv)}{meant}"
        raise ValueError(f"{text}; all options: {named} --help") from None
    for note in _repeated(argv) if is_main else ():
        _note_once(note)
    return options


def to_toml(config: Config) -> str:
    """Return the configuration as TOML. `parse` of it returns an equal Config."""
    lines = []
    for section in dataclasses.fields(config):
        lines.append(f"[{section.name}]")
        values = dataclasses.asdict(getattr(config, section.name))
        lines += [f"{key} = {_toml(value)}" for key, value in values.items() if value is not None]
        lines.append("")
    return "\n".join(lines)


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Read a run file. Raises ValueError for unknown sections and keys, and for values of a wrong type."""
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError):
            raise ValueError(f"run file {path} cannot be read ({error.strerror}); give an existing TOML file") from None
        _refuse_other_file(path)
        raise ValueError(f"{path} is not TOML: {error}") from None
    except RecursionError:
        raise ValueError(
            f"{path} nests its values too deeply; an option is a number, a text or a list of them"
        ) from None
    sections = _types_of(Config)
    refuse_others(keys_of(table), _keys(), TRAIN)
    for name, values in table.items():
        if name not in sections or not isinstance(values, dict):
            raise ValueError(f"{path}: unknown section [{name}]{suggest(name, sections)}")
        keys = _types_of(sections[name])
        for key, value in values.items():
            if f"{name}.{key}" in OF_LINKS and isinstance(value, dict):
                _check_links(path, f"{name}.{key}", value)
                continue
            if f"{name}.{key}" in RENAMED:
                raise ValueError(f"{path}: {name}.{key} is now called {RENAMED[f'{name}.{key}']}")
            if f"{name}.{key}" in REMOVED:
                instead = REMOVED[f"{name}.{key}"]
                raise ValueError(f"{path}: {name}.{key} is no longer an option: {instead}; leave it out")
            if isinstance(value, bool) and f"{name}.{key}" in FORMER_SWITCHES:
                instead = FORMER_SWITCHES[f"{name}.{key}"]
                raise ValueError(f"{path}: {name}.{key} is no longer true or false; give {instead}, or leave it out")
            if key not in keys:
                raise ValueError(f"{path}: unknown key {name}.{key}{suggest(key, keys)}")
            if not _has_type(value, keys[key]):
                meant = other_value(f"{name}.{key}", str(value))
                raise ValueError(f"{path}: {name}.{key} = {_shown(value)} must be {_kind(keys[key])}{meant}")
    return table


def _check_links(path: Path, key: str, values: dict[str, Any]) -> None:
    """Raise ValueError unless a table has a codec for each of some links."""
    for link, spec in values.items():
        if not (link.isdecimal() and isinstance(spec, str)):
            raise ValueError(f'{path}: {key}.{link} = {_shown(spec)}: give the codec of a link, {key}.0 = "none"')


def _take_links(flags: Sequence[str]) -> tuple[list[str], dict[str, dict[int, str]]]:
    """Return the flags but those of single links, such as --pp.forward.1, and the values of these by option."""
    others, found, words = list[str](), {key: dict[int, str]() for key in OF_LINKS}, iter(flags)
    for word in words:
        match = re.fullmatch(r"--(pp\.\w+)\.(\d+)(?:=(.*))?", word)
        if match is None or match[1] not in OF_LINKS:
            others.append(word)
            continue
        spec = next(words, "") if match[3] is None else match[3]
        if not spec or " " in spec:
            raise ValueError(f'{word.partition("=")[0]} "{spec}" is not a codec; give, for example, {word} none')
        found[match[1]][int(match[2])] = spec
    return others, found


@functools.cache
def _types_of(kind: type) -> dict[str, Any]:
    """Return the types of the fields of a dataclass, by name."""
    return typing.get_type_hints(kind)


def _keys() -> set[str]:
    """Return the names of all options of a run, former ones included."""
    sections = _types_of(Config).items()
    return {
        *RENAMED,
        *REMOVED,
        *(f"{name}.{key}" for name, section in sections for key in _types_of(section)),
    }


def _refuse_other_file(path: Path) -> None:
    """Raise ValueError if a file that is not TOML is a configuration of another tool, in YAML or JSON."""
    table = None
    with contextlib.suppress(OSError, ValueError):
        table = read_table(path)
    if isinstance(table, dict):
        refuse_others(keys_of(table), _keys(), TRAIN)


def _has_type(value: Any, hint: Any) -> bool:
    """Whether a TOML value has the type of an option. An integer is also a number and a text."""
    arguments = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_has_type(value, each) for each in arguments if each is not type(None))
    if origin is typing.Literal:
        return value in [each for each in arguments if type(each) is type(value)]
    if origin is tuple:
        is_sized = arguments[-1] is Ellipsis or (isinstance(value, list) and len(value) == len(arguments))
        return isinstance(value, list) and is_sized and all(_has_type(each, arguments[0]) for each in value)
    return type(value) is hint or (hint in (float, str) and type(value) is int)


def _kind(hint: Any) -> str:
    """Return the type of an option in words."""
    arguments = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _kind(next(each for each in arguments if each is not type(None)))
    if origin is typing.Literal:
        return " or ".join(f'"{each}"' for each in arguments)
    if origin is tuple:
        return f"a list of {'' if arguments[-1] is Ellipsis else f'{len(arguments)} '}{_kinds(arguments[0])}"
    return {str: 'a text, "..."', int: "an integer", float: "a number", bool: "true or false"}[hint]


def _kinds(hint: Any) -> str:
    return {int: "integers", float: "numbers"}[hint]


def _shown(value: Any) -> str:
    """Return the beginning of a value, as Python writes it."""
    text = "a table" if isinstance(value, dict) else "a nested list" if _is_nested(value) else repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _is_nested(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(each, (list, dict)) for each in value)


def _help(kind: type[Any], argv: Sequence[str], prog: str) -> str:
    """Return the help of a command; of its subcommand, if the first argument is one."""
    printed = io.StringIO()
    for subcommand in (argv[:1], ()):
        arguments = [*(each for each in subcommand if each[:1] != "-"), "--help"]
        streams = contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO())
        with streams[0], streams[1], contextlib.suppress(SystemExit):
            tyro.cli(kind, args=arguments, prog=prog)
        if printed.getvalue():
            break
    return printed.getvalue()


def _options_in(shown_help: str) -> list[str]:
    """Return the names of the options that a help lists."""
    lines = [line.lstrip("│ ") for line in shown_help.splitlines()]
    return [name for line in lines if line[:1] == "-" for name in re.findall(r"(?<![\w-])--?[a-z][\w.-]*", line)]


def _option_error(argv: Sequence[str], options: Sequence[str]) -> str | None:
    """Return what is wrong with the first option that does not exist, or is a switch with a value; None if none is."""
    for argument, following in itertools.pairwise([*argv, ""]):
        name, is_assigned, value = argument.partition("=")
        known = "--" + name[2:].replace("_", "-")
        if not re.match("--[A-Za-z]", name):
            continue
        if known not in options:
            of_links = {f"--{key}" for key in OF_LINKS} & {*options}
            meant = [_as_documented(each) for each in options if _is_meant(name, each)]
            meant += [f"{each}.0" for each in sorted(of_links) if _is_meant(name.rpartition(".")[0], each)]
            likely = " or ".join(meant)
            return f"unrecognized option: {name}{f' (did you mean {likely}?)' if likely else ''}"
        section, dot, key = known[2:].rpartition(".")
        if not is_assigned and following.lower() in TRUTHS:
            is_assigned, value = "=", following
        if is_assigned and (off := f"--{section}{dot}no-{key}") in options:
            return f"{name} is a switch without a value ({value}); give {name} or {_as_documented(off)}"
    return None


def _as_documented(flag: str) -> str:
    """Return the name of an option as the documentation has it: those of runs with underscores, others with dashes."""
    return "--" + flag[2:].replace("-", "_") if "." in flag else flag.replace("_", "-")


def _usage_error(printed: str, argv: Sequence[str]) -> str:
    """Return tyro's usage error, a title and sections of text between lines, as one sentence. argv: what was typed."""
    sections: list[list[str]] = [[]]
    for line in printed.splitlines():
        text = line.strip("│| ")
        if set(text) <= set("─-"):
            sections.append([])
        elif text[0] not in "╭╰+":
            sections[-1].append(text)
    filled = [section for section in sections if section]
    error, *others = filled if printed.startswith("╭") else filled[1:]
    if error[0].startswith("Missing from"):  # each option or argument is followed by its description
        names = [text.removesuffix(" (required)") for text in error if _ARGUMENT.match(text)]
        is_option = any(name[:1] == "-" for name in names)
        return f"required {'options' if is_option else 'arguments'} are missing: {', '.join(names)}"
    unknown = error[0].removeprefix("Unrecognized options: ").partition(",")[0]
    place = argv.index(unknown) if unknown in argv and unknown[:1] != "-" else 0
    if place > 1 and argv[place - 2][:2] == "--" and "=" not in argv[place - 2]:
        option, value = argv[place - 2 : place]
        return (
            f"{unknown} belongs to no option; write commas without spaces between several values, "
            f'{option} {value.removesuffix(",")},{unknown}, or a text in quotes, {option} "{value} {unknown}"'
        )
    if place > 0 and argv[place - 1][:1] != "-":
        return f"{unknown} is an argument too many; write commas without spaces between several values of one argument"
    hint = next((f"; {' '.join(each)}" for each in others if each[0].startswith("Available")), "").lower()
    text = " ".join(error).partition(" Got errors: ")[0].removesuffix(".")
    text = re.sub(r"'(?:\w+\.)?(\w+)'(?=\. Expected)", lambda argument: argument[1].upper(), text)  # as in the help
    text = text.removesuffix(". Expected 1 values")
    choices = re.search(r"Expected one of (\(.*\))", text)
    if choices:  # tyro has no order of those of an option that may be left out
        named = sorted({*re.findall(r"'([^']*)'", choices[1])} - {"None"})
        text = f"{text[: choices.start(1)]}{', '.join(named)}"
    text = re.sub(r"--[\w.-]+", lambda flag: _as_documented(flag[0]), text)
    if parsing := re.match(r"Error parsing (\S+): (?=.*(int\b|float\b))", text, re.IGNORECASE):
        option, kind = parsing.groups()
        names = option.split("/")
        words = ((*word.partition("="), after) for word, after in itertools.pairwise([*argv, ""]))
        value = next((value or after for name, _, value, after in words if _as_documented(name) in names), "")
        text = f"{option} {_shown(value)} is not {'an integer' if kind.lower() == 'int' else 'a number'}"
    if len(text) > MAX_USAGE:  # tyro has broken a long value into lines
        text = f"{text[: MAX_USAGE // 2]}...{text[-MAX_USAGE // 2 :]}"
    return text[:1].lower() + text[1:] + hint


_ARGUMENT = re.compile(r"-|\{|[A-Z]+(\.toml)?( |$)")
"""Beginning of an option, or the placeholder of an argument."""


def _repeated(argv: Sequence[str]) -> Iterator[str]:
    """Yield a sentence on each option that is given again, with another value, which then holds."""
    given = dict[str, tuple[str, list[str]]]()
    for each in typed_options(argv):
        typed = each.key, [*each.values]
        option = re.sub(r"^((?:\w+\.)?)no_", r"\1", each.key)  # a switch and its opposite
        if given.get(option, typed) != typed:
            yield f"{each.name} is given more than once; the last one holds"
        given[option] = typed


@functools.cache
def _note_once(text: str) -> None:
    """Print a note that this process has not printed: a command line may be read twice."""
    print_note(text)


def _is_meant(unknown: str, option: str) -> bool:
    """Whether an unknown option is another one in another section, or a misspelled one."""
    wrong, right = (name.lstrip("-").replace("-", "_").rpartition(".")[2] for name in (unknown, option))
    return bool(similar(wrong, [right]))


def _refuse_former(argv: list[str]) -> None:
    """Raise ValueError for a flag that was removed, or with a former name or value."""
    for argument, following in itertools.pairwise([*argv, "--"]):
        key, is_assigned, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--"):
            continue
        if (former := key.replace("-", "_")) in RENAMED:
            raise ValueError(f"--{key} is now called --{RENAMED[former]}")
        if former in REMOVED:
            raise ValueError(f"--{key} is no longer an option: {REMOVED[former]}; leave it out")
        name, value = key.replace(".no-", "."), value if is_assigned else following
        if name in FORMER_SWITCHES and (name != key or value.startswith("--") or value.lower() in ("true", "false")):
            raise ValueError(f"--{key} is no longer a switch; give {FORMER_SWITCHES[name]}, or leave it out")


def _as_flags(table: dict[str, dict[str, Any]]) -> list[str]:
    """Return a TOML table as flags, so that file and command line have the same type checks."""
    flags: list[str] = []
    for section, values in table.items():
        for key, value in values.items():
            if isinstance(value, bool):
                flags.append(f"--{section}.{key}" if value else f"--{section}.no-{key}")
            elif isinstance(value, dict):
                flags += [f"--{section}.{key}.{link}={each}" for link, each in value.items()]
            elif isinstance(value, list):
                flags += [f"--{section}.{key}", *map(str, value)]
            else:
                flags.append(f"--{section}.{key}={value}")
    return flags


def _toml(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, str):  # a string of JSON, in which DEL need not be escaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else str(value)
