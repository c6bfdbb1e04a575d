"""Configurations: flags, run files, model directories and run directories with odd values."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import shutil
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from acsgd.config.options import Config
from acsgd.config.run_file import parse
from acsgd.launch import Launch
from acsgd.run.plan.job import prepare
from acsgd.run.setup.inputs import open_inputs
from tests.soak.area import ACCEPTED, Case, Outcome
from tests.soak.mutate import (
    FLOATS,
    INTEGERS,
    STRINGS,
    any_value,
    changed_bytes,
    changed_file,
    changed_json_file,
    near_value,
    shown,
)
from tests.soak.oracle import attempt_start
from tests.soak.runs import LIMIT_S, OPTIONS, copy_into, train_here, write_inputs

BASE = OPTIONS | {"optim.steps": 2}
"""Options of a run that trains in half a second."""
SPECS = {
    "pp.schedule": ["1f1b", "gpipe", "1f1b:lead=2", "interleaved:chunks=2"],
    "pp.forward": ["none:dtype=bf16", "fixpoint:bits=8", "lloyd:bits=4", "hadamard", "delta:bits=4", "delta:step=2"],
    "pp.backward": ["fixpoint:bits=4,scale=l2,clip=8,entropy_coding=true", "hadamard", "delta"],
    "dp.mode": [
        "allreduce:bucket_mb=1",
        "powersgd:rank=2",
        "local",
        "diloco:inner=4",
        "sparseloco:topk=0.1",
        "quantized:bits=1",
        "cocktail:random=0.1,topk=0.2,bits=4",
        "cocktail_grad",
    ],
    "optim.name": ["adamw", "adafactor:decay=-0.8", "lion:beta1=0.9", "sgd:momentum=0.9,nesterov=true"],
    "optim.schedule": ["wsd:decay=0.2", "polynomial:power=2,min=0.1", "exponential:min=0.01", "cosine:min=0.1"],
    "data.sources": ["demo", "text.txt:0.5,demo:2", "text.txt,text.txt", "text.txt:inf", "text.csv", "absent.jsonl"],
    "checkpoint.every": ["1", "0", "0.5min", "10min", "min", "1e9", "9" * 400, "9" * 400 + "min"],
    "checkpoint.resume": ["auto", "never", "model", "runs", "absent"],
    "log.to": ["print", "jsonl,text", "print,print", ",", "other"],
}
"""Texts from which those of an option are made."""
PATHS = (
    "runs/other",
    "x" * 300,
    "a\nb",
    "text.txt",
    "text.txt/x",
    "/dev/null",
    "/proc/x",
    "runs/\udcff",
    "runs/é",
    "runs/" + 60 * "y/",
)
"""Values of options that name directories to write to. None leads out of the directory of the case."""  # fmt: skip
RUN_FILES = (
    "run/config.toml",
    "run/metrics.jsonl",
    "run/logs",
    "run/logs/rank-00000.log",
    "run/checkpoints",
    "run/checkpoints/.step-00000002.partial",
    "run/checkpoints/step-00000001",
    "run/checkpoints/best",
    "cache",
    "cache/tokens",
    "cache/models",
    "run",
)
"""What a run writes, relative to the parent of its directory."""
MAX_STEPS, MAX_BATCH = 4, 16
"""Limits of a configuration that is also run."""


class Configs:
    """Runs that are started with odd values, and trained if they are accepted and short."""

    deadline_s: ClassVar[float] = LIMIT_S + 30
    memory_bytes: ClassVar[int] = 4 * 2**30

    @classmethod
    def prepare(cls, directory: Path) -> None:
        """Write a model and a text."""
        write_inputs(directory)

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def run(self, case: Case) -> Outcome:
        """Start a run with some values changed."""
        copy_into(["model", "text.txt"], self._directory, case.directory)
        kinds = [_flags, _flags, _run_file, _model, _run_directory]
        argv, change = case.draw.choice(kinds)(case.draw)
        case.describe(change)
        world_size = case.draw.choice([1, 1, 1, 2, 3, 4])
        started = attempt_start(lambda: _start(argv, world_size), NAMES)
        if isinstance(started, Outcome):
            return started
        if world_size > 1 or not _is_short(started):
            return ACCEPTED
        return train_here(argv).outcome(NAMES)


def _start(argv: list[str], world_size: int) -> Config:
    """Do what a rank does before it connects; return the configuration."""
    config = parse(argv)
    if _is_bounded(config):
        open_inputs(prepare(config, Launch(0, 0, world_size, world_size)))
    else:
        prepare(config, Launch(0, 0, world_size, world_size))
    return config


def _is_bounded(config: Config) -> bool:
    return config.model.name == "model" and config.data.sequence <= 16


def _is_short(config: Config) -> bool:
    return (
        _is_bounded(config)
        and (config.optim.steps or math.inf) <= MAX_STEPS
        and config.data.batch <= MAX_BATCH
        and "wandb" not in config.log.to
    )


def _options() -> dict[str, Any]:
    """Return the type of every option, by key."""
    return {
        f"{section.name}.{option.name}": typing.get_type_hints(sections[section.name])[option.name]
        for sections in [typing.get_type_hints(Config)]
        for section in dataclasses.fields(Config)
        for option in dataclasses.fields(sections[section.name])
    }


OPTIONS = _options()
FILES = ("run.toml", "config.json", "tokenizer", "model.safetensors", "text.txt", "runs/", "metrics.jsonl", "logs")
NAMES = [
    *OPTIONS,
    *FILES,
    *PATHS,
    "unrecognized option",
    "belongs to no option",
    *(f"[{section.name}]" for section in dataclasses.fields(Config)),
]
"""What a sentence may name."""


def _odd_text(draw: random.Random, key: str) -> str:
    """Return the text of an option's value."""
    if key in ("log.dir", "checkpoint.dir"):
        return draw.choice(PATHS)
    if key in SPECS and draw.random() < 0.8:
        text = draw.choice(SPECS[key])
        return text if draw.random() < 0.4 else _changed_spec(draw, text)
    kinds: list[Callable[[], str]] = [
        lambda: str(draw.choice(INTEGERS)),
        lambda: str(draw.choice(FLOATS)),
        lambda: draw.choice(
            ["1_0", "0x10", "1e3", "+1", " 1", "1 ", "01", "1.", ".5", "infinity", "NaN", "[1]", "1,2"]
        ),
        lambda: draw.choice([text for text in STRINGS if "\0" not in text and "\ud800" not in text]),
        lambda: str(near_value(draw, BASE.get(key, 1))),
    ]
    return draw.choice(kinds)()


def _changed_spec(draw: random.Random, text: str) -> str:
    """Return a spec string with an odd value, or with characters changed."""
    if "=" in text and draw.random() < 0.7:
        head, _, last = text.rpartition("=")
        return f"{head}={draw.choice([*INTEGERS, *FLOATS, '', last + last, 'true'])}"
    at = draw.randrange(len(text) + 1)
    inserted = draw.choice(["", ":", ",", "=", " ", "0", "é", ":bits=9", ",bits=1", "\n"])
    return text[:at] + inserted + text[at + draw.randint(0, 1) :]


def _flags(draw: random.Random) -> tuple[list[str], str]:
    changed = {key: _odd_text(draw, key) for key in draw.sample(list(OPTIONS), draw.choice([1, 1, 2, 3]))}
    flags = [f"--{key}={value}" for key, value in (BASE | changed).items()]
    if draw.random() < 0.1:
        draw.shuffle(flags)
        flags[0] = flags[0].replace("=", draw.choice(["", "==", " "]), 1)
    return flags, f"flags {shown(changed, 200)}"


def _run_file(draw: random.Random) -> tuple[list[str], str]:
    """Write a run file with odd values, or with changed bytes."""
    values, changed = dict(BASE), {}
    for key in draw.sample(list(OPTIONS), draw.choice([0, 1, 1, 2])):
        near = near_value(draw, BASE.get(key, 1))
        odd = _odd_text(draw, key)
        changed[key] = odd if key in SPECS or key.endswith(".dir") else draw.choice([near, odd, any_value(draw)])
    values |= changed
    sections: dict[str, list[str]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, []).append(f"{name} = {_toml(value)}")
    text = "\n".join(f"[{section}]\n" + "\n".join(lines) for section, lines in sections.items())
    data, change = text.encode(errors="replace"), f"run file {shown(changed, 200)}"
    if not changed or draw.random() < 0.2:
        safe = [b"dir =", b'"model"']  # paths must stay inside the directory of the case
        mutated, byte_change = changed_bytes(draw, data)
        if all(part in mutated for part in safe):
            data, change = mutated, f"run file, {byte_change}"
    Path("run.toml").write_bytes(data)
    return ["run.toml"], change


def _toml(value: Any) -> str:
    """Serialise a JSON value as TOML, which has no null."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(key)} = {_toml(item)}' for key, item in value.items())}}}"
    return "1979-05-27" if value is None else json.dumps(value)


def _model(draw: random.Random) -> tuple[list[str], str]:
    """Change a file of the model directory, or replace it by something that is no file."""
    path = draw.choice(sorted(Path("model").iterdir()))
    argv = [f"--{key}={value}" for key, value in BASE.items()]
    if draw.random() < 0.15:
        argv.append("--model.init=scratch")
    action = draw.random()
    if path.suffix == ".json" and action < 0.6:
        change = changed_json_file(draw, path)
    elif action < 0.85:
        change = changed_file(draw, path, sorted(Path("model").iterdir()))
    else:
        change = replaced(draw, path)
    return argv, f"model/{change}"


def _run_directory(draw: random.Random) -> tuple[list[str], str]:
    """Put something else where the run writes its files."""
    path = Path("runs") / draw.choice(RUN_FILES)
    path.parent.mkdir(parents=True, exist_ok=True)
    return [f"--{key}={value}" for key, value in BASE.items()], f"{path}: {replaced(draw, path).partition(': ')[2]}"


def replaced(draw: random.Random, path: Path) -> str:
    """Replace a file, or put in its place something that is no regular file."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    kind = draw.choice(
        ["directory", "fifo", "dangling link", "link to itself", "link to a directory", "git-lfs pointer", "empty"]
    )
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "git-lfs pointer":
        path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n")
    elif kind == "empty":
        path.touch()
    else:
        path.symlink_to({"dangling link": "nowhere", "link to itself": path.name, "link to a directory": "."}[kind])
    return f"{path.name}: {kind}"
