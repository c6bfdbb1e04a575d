"""Every code block of README.md and docs/ is valid as written: Python runs, the rest is parsed by what would run it.

A block that cannot be checked has a comment above it, <!-- not run: REASON -->. Blocks marked `text` are no code: they
show output.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import tyro
from torch.distributed.run import get_args_parser
from torch.nn.parallel import DistributedDataParallel

from acsgd import cli
from acsgd.codecs import CODECS
from acsgd.config.adapters import ADAPTERS
from acsgd.config.run_file import parse
from acsgd.config.spec import from_spec
from acsgd.dp import MODES
from acsgd.optim import OPTIMIZERS
from acsgd.optim.schedule import RATE_SCHEDULES
from acsgd.pp import SCHEDULES
from acsgd.pp.schedules.schedules import CHOICE
from acsgd.pp.tied.plan import TIED
from acsgd.pp.wire.delta import Delta

ROOT = Path(__file__).parents[2]
REQUIRED = {
    "model.name": "m",
    "data.sources": "demo",
    "data.sequence": "8",
    "data.batch": "8",
    "optim.lr": "1",
    "optim.steps": "1",
}
SBATCH_WITH_VALUE = {"--nodes", "--signal"}
PLACEHOLDERS = {"RUN.toml": "examples/gpt2.toml"}


class Block(NamedTuple):
    """A fenced code block."""

    page: str
    line: int
    language: str
    """Empty: shell commands, or JSON lines if it begins with a brace."""
    code: str
    reason: str
    """Why it is not run; empty = it is."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks() -> Iterator[Block]:
    """Yield all code blocks."""
    pattern = r"(?:<!-- not run: ([^>]+) -->\n)?^ *```(\w*)\n(.*?)^ *```$"
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = path.read_text()
        for found in re.finditer(pattern, text, re.DOTALL | re.MULTILINE):
            reason, language, code = found.groups(default="")
            yield Block(
                str(path.relative_to(ROOT)), text.count("\n", 0, found.start()) + 1, language, dedent(code), reason
            )


BLOCKS = list(blocks())


@pytest.mark.parametrize("block", [block for block in BLOCKS if not block.reason and block.language != "text"], ids=str)
def test_code_blocks_are_valid(block: Block, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.environ", {"COLUMNS": "200"})
    kind = "json" if block.code.startswith("{") else block.language
    {"": check_shell, "bash": check_shell, "python": run_python, "diff": run_diff}.get(
        kind, lambda code: PARSERS[kind](code, tmp_path)
    )(block.code)


def test_few_blocks_are_not_run() -> None:
    assert sum(bool(block.reason) for block in BLOCKS) <= 5
    assert sum(block.language != "text" for block in BLOCKS) > 90


@pytest.mark.parametrize(
    "line",
    [
        "make nothing",
        "acsgd inspect --bogus",
        "acsgd data show a.jsonl --bogus 1",
        "acsgd eval runs/gpt2 --bogus 1",
        "acsgd plan examples/gpt2.toml --bogus 1",
        "acsgd plan examples/gpt2.toml --pp.stage 2",
        "torchrun --bogus 1 train.py examples/gpt2.toml",
        "torchrun --nproc-per-node 4 train.py examples/gpt2.toml --pp.stage 4",
        "sbatch --nodes 2 slurm/absent.sbatch 4 examples/gpt2.toml",
        "python -m benchmarks.codecs.speed --bogus 1",
        "pip install acsgd[bogus]",
        "kubectl create configmap acsgd --from-file run.toml=examples/absent.toml",
        "torchrun --nproc-per-node 4 train.py examples/gpt2.toml --data.sources a.txt --dp.mode cocktail:topk2=1",
        "ls",
    ],
)
def test_the_check_of_commands_finds(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", {"COLUMNS": "200"})
    with pytest.raises((AssertionError, ValueError, SystemExit)):
        check_shell(line)


def run_python(code: str) -> None:
    exec(compile(code, "<block>", "exec", dont_inherit=True), {"__name__": "builtins"})


def run_diff(code: str) -> None:
    """Run what the block leaves, on a model in one process."""
    after = "\n".join(line[1:] for line in code.splitlines() if not line.startswith("-"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        names = {"model": torch.nn.Linear(64, 64), "DistributedDataParallel": DistributedDataParallel, "torch": torch}
        exec(after, names)
        names["model"](torch.ones(2, 64)).sum().backward()  # type: ignore[operator]
    finally:
        dist.destroy_process_group()


def check_toml(code: str, directory: Path) -> None:
    """Parse it as a run file, with what it leaves out."""
    path = directory / "run.toml"
    path.write_text(code)
    given = {f"{section}.{key}" for section, keys in tomllib.loads(code).items() for key in keys}
    parse([str(path), *(f"--{key}={value}" for key, value in REQUIRED.items() if key not in given)])


def check_json(code: str, directory: Path) -> None:
    for line in code.splitlines():
        json.loads(line)


PARSERS = {"toml": check_toml, "json": check_json}


def check_shell(code: str) -> None:
    """Parse each command of shell lines by the parser that would run it."""
    for line in code.replace("\\\n", " ").splitlines():
        for part in re.split(r"\s&&\s", line):
            if words := shlex.split(part, comments=True):
                check_command([PLACEHOLDERS.get(word, word) for word in words])


def check_command(words: Sequence[str]) -> None:
    """Check one command without running it. Raises AssertionError, ValueError or SystemExit if it is not valid."""
    while re.match(r"[A-Za-z_]+=", words[0]):  # variables of the environment
        words = words[1:]
    if words[0] == "nohup":  # nohup COMMAND > FILE 2>&1 &
        words = words[1 : words.index(">")]
    name, *arguments = words
    name = name.removeprefix(".venv/bin/").removeprefix("runs/trl/bin/")
    assert name in COMMANDS, f"this test does not know the command {name}"
    COMMANDS[name](arguments)


def check_make(arguments: Sequence[str]) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert arguments[0] in targets, f"no target {arguments[0]}"


def check_torchrun(arguments: Sequence[str]) -> None:
    options = get_args_parser().parse_args(arguments)
    script = ["-m", options.training_script] if options.module else [options.training_script]
    check_python([*script, *options.training_script_args])


def check_python(arguments: Sequence[str]) -> None:
    if arguments[0] == "-m":
        check_module(arguments[1], arguments[2:])
    elif arguments[0] == "train.py":
        check_training(arguments[1:])
    else:
        assert (ROOT / arguments[0]).exists(), f"no file {arguments[0]}"


def check_module(module: str, arguments: Sequence[str]) -> None:
    if module == "venv":
        return
    if module == "acsgd":
        (check_acsgd if arguments[0] in ("eval", "generate") else check_training)(arguments)
        return
    found = importlib.util.find_spec(module)
    if found is not None and found.origin is None:  # a package
        found = importlib.util.find_spec(f"{module}.__main__")
    assert found is not None, f"no module {module}"
    assert found.origin is not None
    source = Path(found.origin)
    if source.name == "__init__.py":
        source = source.with_name("__main__.py")
    text = source.read_text()
    for flag in (word for word in arguments if word.startswith("--")):
        assert f'"{flag}"' in text, f"{module} has no flag {flag}"


def check_training(arguments: Sequence[str]) -> None:
    if "--help" in arguments:
        return
    arguments = list(arguments)
    if arguments[0].endswith(".toml") and not (ROOT / arguments[0]).exists():
        arguments[0] = str(ROOT / "examples/gpt2.toml")  # the reader's own file
    config = parse(arguments)
    tables = {**ADAPTERS, **CODECS, "delta": Delta, **TIED, **MODES, **SCHEDULES, **CHOICE}
    tables |= {**OPTIMIZERS, **RATE_SCHEDULES}
    pp, dp, optim = config.pp, config.dp, config.optim
    for spec in (pp.forward, pp.backward, pp.tied, pp.schedule, dp.mode, optim.name, optim.schedule):
        from_spec(spec, tables, key="spec")
    if config.adapter.spec:
        from_spec(config.adapter.spec, tables, key="adapter.spec")


def check_acsgd(arguments: Sequence[str]) -> None:
    if arguments[0] == "train":
        check_training(arguments[1:])
        return
    if arguments[0] in ("plan", "launch"):  # options of the run are among their own
        command = cli.COMMANDS[arguments[0]].parse(arguments[1:])
        check_training([str(command.run_file), *command.overrides])
        return
    if "--help" not in arguments:
        tyro.extras.subcommand_cli_from_dict(cli.COMMANDS, prog="acsgd", args=list(arguments))


def check_sbatch(arguments: Sequence[str]) -> None:
    arguments = list(arguments)
    while arguments[0].startswith("--"):
        assert arguments[0] in SBATCH_WITH_VALUE, f"this test does not know the option {arguments[0]} of sbatch"
        arguments = arguments[2:]
    script, processes, *training = arguments
    assert (ROOT / script).exists(), f"no file {script}"
    assert processes.isdigit()
    check_training(training)


def check_pip(arguments: Sequence[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert arguments[0] == "install"
    for words in re.findall(r"(?:acsgd|\.)\[(.+?)\]", " ".join(arguments)):
        assert set(words.split(",")) <= extras.keys(), f"no extra {words}"


def check_deployment(arguments: Sequence[str]) -> None:
    """Check that the files that a command of kubectl, podman or SkyPilot names exist."""
    for word in arguments:
        if found := re.search(r"(?:^|=)((?:deploy|examples)/.+)", word):
            assert (ROOT / found[1]).exists(), f"no file {found[1]}"


def accept(arguments: Sequence[str]) -> None:
    """Accept a command of the system."""


COMMANDS = {
    "make": check_make,
    "torchrun": check_torchrun,
    "python": check_python,
    "acsgd": check_acsgd,
    "sbatch": check_sbatch,
    "pip": check_pip,
    "kubectl": check_deployment,
    "podman": check_deployment,
    "sky": check_deployment,
    "export": accept,
    ".": accept,
    "tail": accept,
}
"""Name of a command -> what checks its arguments."""
