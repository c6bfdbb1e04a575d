"""The chat template of a run: that of the tokenizer, or of a file, with values for its variables.

The values are part of the template, as lines that set what is not set: what reads the tokenizer of a checkpoint or of
an export writes chats as the run did, and a caller that gives a variable still overrides the run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from acsgd.config.options import DataConfig
from acsgd.config.spec import assignments
from acsgd.errors import missing
from acsgd.io.files.checksum import new_file_checksum

FILE = "chat_template.jinja"
"""File of a model directory with the chat template, which takes precedence over that of tokenizer_config.json."""
OPTION, VARIABLES = "data.chat_template", "data.chat_template_kwargs"
TEMPLATES = {
    "openchatkit": (
        "{%- for message in messages %}"
        "{%- if message.role == 'assistant' %}"
        "{{- '<bot>:' }}{% generation %}{{- ' ' ~ message.content ~ eos_token }}{% endgeneration %}"
        "{%- else %}{{- ('<human>: ' if message.role == 'user' else '') ~ message.content }}{%- endif %}"
        "{{- '' if loop.last and message.role == 'assistant' else '\\n' }}"
        "{%- endfor %}"
        "{{- '<bot>:' if add_generation_prompt }}"
    )
}
"""Chat templates by name. In that of OpenChatKit, turns are lines; eos_token ends answers, so that generation stops."""
DATE = "strftime_now"
"""Function with which chat templates write the present date."""
GIVEN = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables that transformers always gives to a template, besides special tokens."""


def set_chat_template(tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> None:
    """Let a tokenizer write chats as data.chat_template and data.chat_template_kwargs say. Raises ValueError."""
    if data.chat_template is not None:
        tokenizer.chat_template = TEMPLATES.get(data.chat_template) or _read(Path(data.chat_template))
        try:
            tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
        except TemplateSyntaxError as error:
            raise ValueError(f"{OPTION}={data.chat_template}, line {error.lineno}: {error.message}") from None
        except Exception:  # a template may refuse this chat, with an error of any class
            pass
    variables = _parse(data.chat_template_kwargs)
    if variables and not tokenizer.chat_template:
        raise ValueError(
            f"{VARIABLES}={data.chat_template_kwargs}: the tokenizer {tokenizer.name_or_path} has no chat template; "
            f"give one with {OPTION}"
        )
    templates: Any = tokenizer.chat_template
    by_name: Mapping[str, str] = templates if isinstance(templates, Mapping) else {"": templates or ""}
    for name in variables:
        if name in (*GIVEN, *tokenizer.special_tokens_map) or not any(names(each, name) for each in by_name.values()):
            raise ValueError(f'{VARIABLES}: "{name}" is no variable of the chat template that can be set; remove it')
    lines = "".join(
        f"{{%- if {name} is not defined %}}{{%- set {name} = {value!r} %}}{{%- endif %}}\n"
        for name, value in variables.items()
    )
    if isinstance(templates, Mapping):
        tokenizer.chat_template = {name: lines + each for name, each in templates.items()}
    elif lines:
        tokenizer.chat_template = lines + templates


def describe_template(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return a checksum of the chat template of a run as that of an option, which may name it."""
    return {OPTION: new_file_checksum(repr(tokenizer.chat_template).encode()).hexdigest()[:8]}


def describe_date(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return a sentence on a chat template that writes the present date; nothing of others."""
    chat: Any = [{"role": "user", "content": "a"}]
    try:
        template = str(tokenizer.get_chat_template()).replace(f"{DATE}(", f"'{DATE}'.format(")
        text: Any = tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False)
    except Exception:  # a template may refuse this chat, with an error of any class
        return []
    if DATE not in text:
        return []
    return [
        f"warning: the chat template writes the present date ({DATE}): texts and prompts of another day differ; set "
        f'its variable, for example --{VARIABLES} "date_string=26 Jul 2024", or give another template, --{OPTION} FILE'
    ]


def write_chat_template(directory: Path, tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> bool:
    """Write the chat template into a directory with the files of the tokenizer; return whether that changed any."""
    if not _is_given(data):
        return False
    templates: Any = tokenizer.chat_template
    if isinstance(templates, str):
        (directory / FILE).write_text(templates, encoding="utf-8")
        return True
    (directory / FILE).unlink(missing_ok=True)
    settings = directory / "tokenizer_config.json"
    fields = json.loads(settings.read_bytes())
    fields["chat_template"] = [{"name": name, "template": each} for name, each in templates.items()]
    settings.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return True


@lru_cache(maxsize=256)
def names(template: str, name: str) -> bool:
    """Return whether a template has a name in it."""
    return bool(re.search(rf"\b{re.escape(name)}\b", template))


def _is_given(data: DataConfig) -> bool:
    return data.chat_template is not None or data.chat_template_kwargs is not None


def _read(path: Path) -> str:
    try:
        template = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ValueError(f"{OPTION}={path} {missing(path)}; give a file with a Jinja template") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ValueError(f"{OPTION}={path} cannot be read ({reason}); give a file with a Jinja template") from None
    if not template.strip():
        raise ValueError(f"{OPTION}={path} is empty; give a file with a Jinja template")
    return template


def _parse(text: str | None) -> dict[str, Any]:
    """Return variables by name: values as JSON, or as texts; or all of them as a JSON object. Raises ValueError."""
    if text is None:
        return {}
    whole, pairs = _value(text), assignments(text) or []
    found: dict[str, Any] = whole if isinstance(whole, dict) else {name: _value(value) for name, value in pairs}
    are_names = all(name.isidentifier() and name.isascii() for name in found)
    is_cut = found is not whole and (len(found) < len(pairs) or any(_continues(value) for _, value in pairs))
    if not (found and are_names) or is_cut:
        raise ValueError(
            f'{VARIABLES}="{text}" is not a list of variables; write "enable_thinking=false", or a JSON object, '
            '{"enable_thinking": false}'
        )
    return found


def _continues(text: str) -> bool:
    """Return whether a value is a text that goes on after a JSON value and a comma: "1,b" lacks a name for b."""
    before = (text[: comma.start()] for comma in re.finditer(",", text))
    return _value(text) == text and any(_value(each) != each for each in before)


def _value(text: str) -> Any:
    """Return a JSON value, or the text if it is none."""
    try:
        return json.loads(text, parse_constant=str)
    except ValueError:
        return text
