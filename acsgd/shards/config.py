"""Read config.json of a model directory and check that a model of it can be built and run."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from acsgd.config.spec import suggest
from acsgd.errors import similar
from acsgd.layers.description import LayersError, ModelLayers
from acsgd.model_classes import MODEL_CLASSES, ModelClass
from acsgd.shards.files import CONFIG, blame, read_json_object

REMEDY = "correct it or download it again"
MAX_BLOCKS = 99_999
"""Maximum number of blocks: file names of layers have five digits."""
MANY_BLOCKS = 256
"""Number of blocks above which building a model takes seconds. No known model has as many."""
DEPTHS = ("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers")
"""Names, common to types of models or of some, of numbers of blocks."""
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "n_inner",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
"""Names, common to types of models or of some, of sizes that are at least 1."""
FLOATING = ("float32", "bfloat16", "float16", "float64")
"""Types of weights, as config.json names them."""
PROBE = {"batch": 1, "sequence": 2, "target": 2}
"""Sizes of the batch with which a model of one block is run."""


def read_config(
    directory: Path, task: str = "lm", *, is_valid: Callable[[PreTrainedConfig], bool] = lambda config: False
) -> PreTrainedConfig:
    """Read config.json of a Hugging Face or shard directory.

    Runs a model of one block without memory for weights, since transformers checks types but few values; not if
    is_valid returns that a model of the config is known to run.
    Raises ValueError if the file is missing or invalid, or describes a quantized model, or one that transformers does
    not have for the task.
    """
    path = directory / CONFIG
    if not os.path.lexists(path):
        raise ValueError(f"{directory} has no {CONFIG}; give a Hugging Face model directory or a layer-shard directory")
    fields = read_json_object(path)
    _check_type(fields, path, task)
    if fields.get("quantization_config") is not None:
        raise ValueError(
            f'{path} is of a quantized model ("quantization_config"); acsgd trains floating-point weights: give the '
            "model it was quantized from"
        )
    for name in ("dtype", "torch_dtype"):
        if (dtype := fields.get(name)) is not None and dtype not in FLOATING:
            raise ValueError(f'{path}: "{name}": {json.dumps(dtype)} is none of {", ".join(FLOATING)}; correct it')
    with blame(path, "is not a config that transformers can read", REMEDY):
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        text = config.get_text_config()
    _check_sizes(text, path)
    if MODEL_CLASSES[task].has_one_output and config.num_labels != 1:
        raise ValueError(f'{path}: a {task} has one output, not {config.num_labels}; set "num_labels": 1')
    if not is_valid(config):
        with blame(path, "describes a model that cannot be built", REMEDY):
            _run_one_block(config, MODEL_CLASSES[task])
    return config


def derive_layers(directory: Path, config: PreTrainedConfig, task: str) -> ModelLayers:
    """Derive the layers of the model in a directory. Raises LayersError with the reason if that is not possible."""
    path = directory / CONFIG
    with blame(path, "describes a model that cannot be built", REMEDY), _no_logs():
        try:
            return MODEL_CLASSES[task].layers(config)
        except LayersError as error:
            reason = str(error)
    raise LayersError(
        f"{path} describes a model that cannot be divided into layers: {reason}; give one of a type in docs/models.md"
    )


def longest_sequence(config: PreTrainedConfig) -> int | None:
    """Return the maximum sequence length of a model, tokens; None if it has none."""
    longest: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return None if longest == -1 else longest  # XLNet's has this value


def parameter_count(config: PreTrainedConfig, task: str = "lm") -> int:
    """Return the number of parameters of a model. Of a model of very many blocks, takes all for alike."""
    blocks = number_of_blocks(config)
    if blocks <= MANY_BLOCKS:
        return _count(config, MODEL_CLASSES[task])
    one, two = (_count(_shortened(config, number), MODEL_CLASSES[task]) for number in (1, 2))
    return one + (blocks - 1) * (two - one)


def number_of_blocks(config: PreTrainedConfig) -> int:
    """Return the number of blocks of the deepest stack of a model, 0 if it is not known from the config."""
    text = config.get_text_config()
    return max([0, *(value for name in _depths(text) if isinstance(value := getattr(text, name), int))])


def _check_type(fields: dict[str, Any], path: Path, task: str) -> None:
    """Raise ValueError unless transformers has the type of model for a task."""
    if task not in MODEL_CLASSES:
        raise ValueError(f'there is no task "{task}"{suggest(task, MODEL_CLASSES)}')
    model_type = fields.get("model_type")
    if not isinstance(model_type, str):
        raise ValueError(f'{path} has no "model_type" that is a text; download it again')
    if model_type in (types := _types(MODEL_CLASSES[task])):
        return
    if model_type in CONFIG_MAPPING:
        tasks = [name for name, other in MODEL_CLASSES.items() if model_type in _types(other)]
        raise ValueError(
            f'{path} is of the type "{model_type}", for which transformers has no '
            f"{MODEL_CLASSES[task].auto_class.__name__} (task {task}); "
            + (f"give the task {' or '.join(tasks)}" if tasks else "give another model")
        )
    if "auto_map" in fields:
        raise ValueError(
            f'{path} is of the type "{model_type}", whose code lies in its repository ("auto_map"); acsgd runs no code '
            "of repositories: give a model of a type that transformers has, or one converted to such a type"
        )
    nearest = similar(model_type, types)
    raise ValueError(
        f'{path} is of the unknown type "{model_type}"'
        + (f" (did you mean {nearest[0]}?)" if nearest else "")
        + "; correct it, or install a version of transformers that has it"
    )


def _types(model_class: ModelClass) -> list[str]:
    """Return the types of models that transformers has for a task."""
    return list(model_class.auto_class._model_mapping._model_mapping)


def _check_sizes(config: PreTrainedConfig, path: Path) -> None:
    """Raise ValueError for a number of blocks or another size that no model has."""
    names = config.attribute_map
    for name in (*DEPTHS, *SIZES):
        value = vars(config).get(names.get(name, name))
        highest = MAX_BLOCKS if name in DEPTHS else 2**31 - 1
        if value is None or isinstance(value, list | tuple):  # one per block; the model's code checks it
            continue
        if not (isinstance(value, int) and 1 <= value <= highest):
            raise ValueError(
                f"{path}: {names.get(name, name)}={value!r} must be a whole number from 1 to {highest}; {REMEDY}"
            )
    for name, value in vars(config).items():  # attention does not check it on fake tensors
        if "dropout" in name and isinstance(value, int | float) and not 0 <= value <= 1:
            raise ValueError(f"{path}: {name}={value!r} must be a number from 0 to 1; {REMEDY}")


def _run_one_block(config: PreTrainedConfig, model_class: ModelClass) -> None:
    """Run a model with stacks of one block on fake tensors; of a few blocks, if it cannot be shortened.

    Raises what transformers and torch do, except for a model of a type that cannot be divided into layers.
    """
    try:
        _run(_shortened(config, 1), model_class)
    except Exception:  # as in blame
        if number_of_blocks(config) > MANY_BLOCKS:
            raise
        _run(config, model_class)


def _run(config: PreTrainedConfig, model_class: ModelClass) -> None:
    with _no_logs():
        try:
            _trace(config, model_class)
        except LayersError as error:  # raised again, with the reason, where the layers are derived
            if error.__cause__ is not None and _default_runs(config, model_class):
                raise error.__cause__ from None


def _default_runs(config: PreTrainedConfig, model_class: ModelClass) -> bool:
    """Whether a model of the same type with the default config runs, so that the config is the cause of an error."""
    try:
        _trace(_shortened(type(config)(), 1), model_class)
    except Exception:  # as in blame
        return False
    return True


def _trace(config: PreTrainedConfig, model_class: ModelClass) -> None:
    from acsgd.layers.trace import on_fake_tensors, trace  # imports transformers' code of models, which takes seconds

    model = model_class.build(config)
    with on_fake_tensors(model):
        trace(model, model_class.inputs_of(config), PROBE)


@contextlib.contextmanager
def _no_logs() -> Iterator[None]:
    """Context in which torch does not log the errors of operations on fake tensors, which it raises, too."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = False


def _count(config: PreTrainedConfig, model_class: ModelClass) -> int:
    return sum(param.numel() for param in model_class.build(config).parameters())


def _depths(config: PreTrainedConfig) -> list[str]:
    """Return the names of the numbers of blocks in a config."""
    return list(dict.fromkeys(config.attribute_map.get(name, name) for name in DEPTHS) & vars(config).keys())


def _shortened(config: PreTrainedConfig, blocks: int) -> PreTrainedConfig:
    """Return a copy of a config with other numbers of blocks; lists with an entry per block are cut."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    lengths = {getattr(text, name) for name in _depths(text)}
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) in lengths:
            setattr(text, name, value[:blocks])
    for name in _depths(text):
        setattr(text, name, blocks)
    return config
