"""Options of generation in a model directory, above all the tokens that end a text."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from acsgd.shards.files import CONFIG, blame, read_json_object

GENERATION_CONFIG = "generation_config.json"
END = "eos_token_id"
"""Field of both files with the tokens that end a generated text."""
TEXT = "text_config"
"""Field of config.json with the config of the language model of one that has other parts."""
BEGIN, PADDING, START = "bos_token_id", "pad_token_id", "decoder_start_token_id"
SPECIAL_TOKENS = (BEGIN, END, PADDING)
"""Fields of both files that are those of a tokenizer, too."""
COPIES = {
    START: (PADDING, END, BEGIN),
    "forced_bos_token_id": (BEGIN, END, PADDING),
    "forced_eos_token_id": (END, BEGIN, PADDING),
}
"""Fields of both files with the id of one of these tokens, or a list of some."""
OTHER_TOKENS = ("bad_words_ids", "force_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias")
"""Options of generation with ids of any tokens, which say nothing of another tokenizer."""


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

    Negative ones, as transformers takes them, are none. Raises ValueError if they are no ids.
    """
    ends: Any = config.eos_token_id
    if ends is None:
        ends = tokenizer.eos_token_id
    found = _as_list(ends)
    if not all(isinstance(id_, int) for id_ in found):
        raise ValueError(f"{GENERATION_CONFIG}: {END}={ends!r} is neither an id nor a list of ids; correct it")
    return [id_ for id_ in found if id_ >= 0]


def _as_list(ids: Any) -> list[Any]:
    """Return the ids of a field: one, several or none."""
    return [ids] if isinstance(ids, int) else list(ids or ())


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
    """Let the config of a model name the special tokens of another tokenizer than its own: ids have other meanings.

    Raises ValueError if its decoder begins with a token that is none of them.
    """
    for each in (config, config.get_text_config()):
        ids = _special_tokens({name: getattr(each, name, None) for name in (*SPECIAL_TOKENS, *COPIES)}, tokenizer)
        if ids.get(START, 0) is None:
            raise ValueError(
                f"{START}={getattr(each, START)} in config.json of the model is neither {' nor '.join(COPIES[START])}, "
                f"so which token of {tokenizer.name_or_path} a decoder begins with is not known; set it to one of them"
            )
        for name, id_ in ids.items():
            setattr(each, name, id_)


def write_special_tokens(directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Let the files of a model name the special tokens of another tokenizer than its own. Keeps all other options."""
    known = dict[str, Any]()
    for path in (directory / CONFIG, directory / GENERATION_CONFIG):
        if path.is_file():
            fields = read_json_object(path)
            known |= {name: id_ for name, id_ in (fields.get(TEXT) or {}).items() if id_ is not None}
            known |= {name: id_ for name, id_ in fields.items() if id_ is not None}
            ids = _special_tokens(known, tokenizer)
            fields = {name: value for name, value in fields.items() if name not in OTHER_TOKENS} | ids
            if TEXT in fields:
                fields[TEXT] = fields[TEXT] | ids
            path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")


def _special_tokens(known: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the ids of a tokenizer for the fields of a model. known: its present ones.

    A copy of special tokens stays one of those; None if it is of other tokens.
    """
    ids: dict[str, Any] = {name: getattr(tokenizer, name) for name in SPECIAL_TOKENS}
    for name, names in COPIES.items():
        if (copied := known.get(name)) is not None:
            found = [[ids[each] for each in names if id_ in _as_list(known.get(each))] for id_ in _as_list(copied)]
            copies = [first for first, *_ in filter(None, found) if first is not None]
            ids[name] = as_field(copies) if copies else None
    return ids


def as_field(ends: Iterable[int]) -> int | list[int]:
    """Return tokens as the files have them: one id, or a list of several."""
    first, *others = dict.fromkeys(ends)
    return [first, *others] if others else first
