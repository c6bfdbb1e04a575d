"""Messages of chats as data sets write them: their roles, fields, tool calls and parts."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from acsgd.io.data.formats.base import FormatError, has_value, is_null
from acsgd.io.data.sources.base import ReadOptions
from acsgd.io.data.sources.text import excerpt

ChatMessage = dict[str, Any]

SYSTEM, USER, ASSISTANT, TOOL, DEVELOPER = "system", "user", "assistant", "tool", "developer"
ROLES = {**{role: role for role in (SYSTEM, USER, ASSISTANT, TOOL, DEVELOPER)}, "function": TOOL}
SPEAKERS = {
    **ROLES,
    "human": USER,
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bot": ASSISTANT,
    "observation": TOOL,
    "function_call": ASSISTANT,
}
"""Roles and the speakers of ShareGPT, and what they are for chat templates."""
NAMES = {"from": "role", "value": "content", "text": "content"}
"""Fields of a message of ShareGPT and its variants, and what chat templates call them."""
FUNCTION_CALL = "function_call"
"""Speaker of ShareGPT whose text is a tool call, or a list of them: {"name": ..., "arguments": {...}}."""
FUNCTIONS = "functions"
"""Tools as OpenAI had them before "tools". A message calls one with FUNCTION_CALL in place of TOOL_CALLS."""
WEIGHT, TRAIN = "weight", "train"
"""Fields of a record, or of a message, that say how much it is learned, and whether it is."""
FLAGS = (WEIGHT, TRAIN, "training", "loss")
"""Fields of a message, or record, that say whether it is learned: 1 or true, 0 or false. They are those of OpenAI,
axolotl and ms-swift."""
UNDESIRABLE = ("label", "kto_tag")
"""Fields of a record that are false if its answer is one to avoid. They are those of TRL and LLaMA-Factory."""
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
"""Fields of a record with what belongs to its text in data of models that see or hear."""
MAX_NUMBER_CHARS = 32
"""Maximum length of a text that may be a number or a flag, characters."""
TOOL_CALLS = "tool_calls"


def check_learnable(fields: Mapping[str, Any], options: ReadOptions) -> None:
    """Raise FormatError if a record says that its answer is not to be learned as it stands, unless its format is given.

    It may be one to avoid, not to be learned, of another weight, or belong to images.
    """
    if options.format != "auto":
        return
    problems = [
        f'"{name}": false, which says that its answer is one to avoid'
        for name in UNDESIRABLE
        if fields.get(name) is False  # the text "False" may be the name of a class
    ]
    problems += [
        f'"{name}", which are not read, and may be what its text is about'
        for name in MEDIA
        if has_value(fields.get(name))
    ]
    _refuse([*_weights(fields, "its answer"), *problems])


def check_weight(fields: Mapping[str, Any], options: ReadOptions) -> None:
    """Raise FormatError if a text says that it is not learned as others are, unless its format is given.

    It does so by `train` and by a weight: a number from 0 to 1. Others are those of things, as "loss" is often a score.
    """
    if options.format != "auto":
        return
    weight = _flag_or_number(fields.get(WEIGHT))
    is_fraction = isinstance(weight, int | float) and 0 <= weight <= 1
    names = (TRAIN, WEIGHT) if is_fraction else (TRAIN,)
    _refuse([*_weights({name: fields.get(name) for name in names}, "it")], " text")


def _weights(fields: Mapping[str, Any], what: str) -> Iterator[str]:
    """Yield the fields of a record that say that it is not learned, or how much. what: that is learned."""
    for name in FLAGS:
        if _flag_or_number(fields.get(name)) == 0:
            yield f'"{name}": {json.dumps(fields[name], default=str)}, which says that {what} is not learned'
    weight = _flag_or_number(fields.get(WEIGHT))
    if isinstance(weight, int | float) and weight != 1 and not is_null(weight):
        yield f'"{WEIGHT}": {json.dumps(fields[WEIGHT])}, which says how much it is learned'


def _refuse(problems: Sequence[str], form: str = "") -> None:
    if problems:
        raise FormatError(
            f"has {problems[0]}", f"remove it or the record or, if it says something else, give --data.format{form}"
        )


def _flag_or_number(value: Any) -> Any:
    """Return the flag or number that a short text is, as in tables without types; other values themselves."""
    if not isinstance(value, str) or len(value) > MAX_NUMBER_CHARS:
        return value
    if (text := value.strip().lower()) in ("true", "false"):
        return text == "true"
    with contextlib.suppress(ValueError):
        return float(text)
    return value


def messages_in(value: Any) -> list[Any] | None:
    """Return the messages of a list, or of one that is JSON text, with the fields that chat templates know."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if not is_list(value):
        return None
    return [_named(each) if isinstance(each, Mapping) else each for each in value]


def _named(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with the names of chat templates, where it has none of them for the same."""
    named = dict(message)
    for name, new in NAMES.items():
        if not is_null(named.get(name)) and is_null(named.get(new)):  # tables of rows add nulls
            named[new] = named.pop(name)
    return named


def is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def calls_in(value: Any, place: str) -> list[dict[str, Any]]:
    """Return the tool calls of a value, which may be JSON text. Raises FormatError."""
    found = value
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            found = json.loads(value)
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, dict) and has_name(call) and "arguments" in call for call in calls):
        raise FormatError(
            f"has no tool call in {place} ({excerpt(repr(value))})", 'write {"name": "...", "arguments": {...}}'
        )
    return [{"type": "function", "function": call} for call in calls]


def has_name(call: Mapping[str, Any]) -> bool:
    return isinstance(name := call.get("name"), str) and bool(name)


def is_answer(role: Any) -> bool:
    """Return whether messages of a role, or speaker, are those of the assistant."""
    return SPEAKERS.get(role) == ASSISTANT


def learned_flag(turn: Mapping[str, Any], place: str, *, default: bool) -> bool:
    """Return what the flag of a message says, `default` if it has none. Raises FormatError."""
    flags = {name: turn[name] for name in FLAGS if not is_null(turn.get(name))}
    if any(flag not in (0, 1) for flag in flags.values()) or len({*flags.values()}) > 1:
        found = ", ".join(f'"{name}": {json.dumps(flag, default=str)}' for name, flag in flags.items())
        raise FormatError(f"has {found} in {place}", "an answer is learned (1, true) or not (0, false)")
    return bool(next(iter(flags.values()), default))


def texts_of(parts: Sequence[Any], place: str) -> Iterator[str]:
    """Yield the texts of the parts of a message. Raises FormatError if one is no text."""
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise FormatError(f"has a part in {place} that is no text ({excerpt(repr(kind))})", "remove the record")
        yield text


def parsed(value: Any, kind: type, name: str) -> Any:
    """Return a value of a kind, which may be given as JSON text, as tables do; None if there is none.

    Raises FormatError.
    """
    if not has_value(value):
        return None
    found = value
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except ValueError:
            found = None
    if not isinstance(found, kind):
        what = "list" if kind is list else "object"
        raise FormatError(f"has no JSON {what} under {name}: {excerpt(str(value))}", "correct it, or remove the record")
    return found


def arguments_of(message: ChatMessage) -> Iterator[Any]:
    """Yield the arguments of each tool call of a message."""
    map_arguments(message, (found := list[Any]()).append)
    yield from found


def map_arguments(message: ChatMessage, change: Callable[[Any], Any]) -> ChatMessage:
    """Return a message with changed arguments of its tool calls."""

    def changed(call: Any) -> Any:
        if not isinstance(call, Mapping):
            return call
        if isinstance(call.get("function"), Mapping):
            return {**call, "function": changed(call["function"])}
        return {**call, "arguments": change(call["arguments"])} if "arguments" in call else call

    calls = message.get(TOOL_CALLS)
    return {**message, TOOL_CALLS: [changed(call) for call in calls]} if is_list(calls) else message


def map_strings(value: Any, change: Callable[[str], Any]) -> Any:
    """Return a JSON value with changed strings."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: map_strings(each, change) for name, each in value.items()}
    return [map_strings(each, change) for each in value] if isinstance(value, list | tuple) else value
