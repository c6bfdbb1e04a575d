"""Options of generation in a model directory, above all the tokens that end a text."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from acsgd.shards.config import CONFIG
from acsgd.shards.files import blame, read_json_object

GENERATION_CONFIG = "generation_config.json"
END = "eos_token_id"
"""Field of both files with the tokens that end a generated text."""
TEXT = "text_config"
"""Field of config.json with the config of the language model of one that has other parts."""
SPECIAL_TOKENS = ("bos_token_id", END, "pad_token_id")
"""Fields of both files that are those of a tokenizer, too."""


def read_generation_config(directory: Path) -> GenerationConfig:
    """Read generation_config.json, or in old models the same fields of config.json. Raises ValueError."""
    has_own = os.path.lexists(directory / GENERATION_CONFIG)
    path = directory / (GENERATION_CONFIG if has_own else CONFIG)
    options: dict[str, Any] = {} if has_own else {"_from_model_config": True}
    read_json_object(path)
    with blame(path, "has invalid options for generation", "correct or remove them"):
        return GenerationConfig.from_pretrained(directory, path.name, local_files_only=True, **options)


def ends_of(config: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens at which generation ends a text: those of the options, else that of the tokenizer.

    Raises ValueError if they are no ids.
    """
    ends: Any = config.eos_token_id
    if ends is None:
        ends = tokenizer.eos_token_id
    found = [ends] if isinstance(ends, int) else list(ends or ())
    if not all(isinstance(id_, int) for id_ in found):
        raise ValueError(f"{GENERATION_CONFIG}: {END}={ends!r} is neither an id nor a list of ids; correct it")
    return found


def write_ends(directory: Path, ends: Sequence[int]) -> None:
    """Let generation with the model of a directory end a text at these tokens. Keeps all other options."""
    if GENERATION_CONFIG not in os.listdir(directory):
        options = json.loads(read_generation_config(directory).to_json_string())
    else:
        options = read_json_object(directory / GENERATION_CONFIG)
    options[END] = as_field(ends)
    (directory / GENERATION_CONFIG).write_text(json.dumps(options, indent=2, sort_keys=True) + "\n")


def known_ends(directory: Path, tokenizer_dir: Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens at which generation with a model ends a text, as its files say.

    With a tokenizer from another directory, they are that tokenizer's: the files name others of their own.
    """
    return ends_of(GenerationConfig() if tokenizer_dir != directory else read_generation_config(directory), tokenizer)


def set_ends(config: PreTrainedConfig, directory: Path) -> None:
    """Let the config of a model name the tokens that end a text as generation_config.json of a directory does."""
    if os.path.lexists(directory / GENERATION_CONFIG):
        ends = read_json_object(directory / GENERATION_CONFIG).get(END)
        if ends is not None and ends != getattr(config, END, None):
            setattr(config, END, ends)


def set_special_tokens(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Let the config of a model name the special tokens of another tokenizer than its own: ids have other meanings."""
    for each in (config, config.get_text_config()):
        for name in SPECIAL_TOKENS:
            setattr(each, name, getattr(tokenizer, name))


def write_special_tokens(directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Let the files of a model name the special tokens of another tokenizer than its own. Keeps all other options."""
    ids = {name: getattr(tokenizer, name) for name in SPECIAL_TOKENS}
    for path in (directory / CONFIG, directory / GENERATION_CONFIG):
        if path.is_file():
            fields = read_json_object(path) | ids
            if TEXT in fields:
                fields[TEXT] = fields[TEXT] | ids
            path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")


def as_field(ends: Iterable[int]) -> int | list[int]:
    """Return tokens as the files have them: one id, or a list of several."""
    first, *others = dict.fromkeys(ends)
    return [first, *others] if others else first
