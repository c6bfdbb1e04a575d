"""Every command that trains runs the same code and names itself in its help, from any directory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lib.commands import acsgd
from lib.models import NO_LAYERS
from lib.saved import SMALL, small_run, train_alone

from acsgd import cli, main
from acsgd.__main__ import without_train
from acsgd.commands.data.command import Check, Dedup
from acsgd.commands.evaluation.options import EvalOptions
from acsgd.commands.typed import typed
from acsgd.config.run_file import parse
from acsgd.errors import nearest_path, similar
from acsgd.shards.convert import from_hf
from acsgd.shards.manifest import MANIFEST, Manifest, StoredFile

ROOT = Path(__file__).parents[2]


def test_the_installed_module_prints_its_help_in_any_directory(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "acsgd", "--help"], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("usage: python -m acsgd [RUN.toml] [-h]")
    assert "--pp.stages" in done.stdout
    assert not list(tmp_path.iterdir())


def test_acsgd_train_passes_all_arguments_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # the command replaces them
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    arguments = "--model.name m --data.sources demo --data.sequence 8 --data.batch 2 --optim.lr 1 --optim.steps 3"
    monkeypatch.setattr(main, "main", lambda argv, launch, *, prog, end: calls.append((argv, prog)))
    monkeypatch.setattr(sys, "argv", ["acsgd", "train", *arguments.split()])
    cli.main()
    assert calls == [(arguments.split(), "acsgd train")]


@pytest.mark.parametrize(
    ("command", "text", "shown"),
    [
        (cli.Generate, 'name another field, --data.fields "text=FIELD"', 'name another field, --fields "text=FIELD"'),
        (cli.Generate, 'data.sources="a", data.input_format="b"', '--file="a", --input-format="b"'),
        (Check, "data.sources: a.jsonl; model.name=b, data.sequence=8", "source: a.jsonl; --model=b, --sequence=8"),
        (Check, "model.names=b or my.data.fieldsets", "model.names=b or my.data.fieldsets"),
        (Dedup, "--data.on_error skip", "--on-error skip"),
        (cli.FromHF, "model.task=lm", "--task=lm"),
        (EvalOptions, "data.eval_sources=a, pp.micro=2, eval.metrics=b", "--data=a, --micro=2, --metrics=b"),
    ],
)
def test_messages_of_a_command_name_its_own_options(command: type[Any], text: str, shown: str) -> None:
    assert typed(text, command) == shown


HELP = """
import os, sys
from acsgd import cli
try:
    cli.main()
finally:
    assert not {"torch", "numpy"} & sys.modules.keys()
"""

WITHOUT = """
import json, sys
from acsgd import __main__, cli
packages, lines = map(json.loads, sys.argv[1:])
codes = []
for line in lines:
    try:
        (__main__ if line[0] == "eval" else cli).run(line, **{"prog": "acsgd"} if line[0] == "eval" else {})
        codes.append(0)
    except SystemExit as end:
        codes.append(end.code)
    if found := [name for name in packages if name in sys.modules]:
        sys.exit(f"{line} has imported {found}")
print(codes)
"""
"""Runs commands, and ends with a sentence if one has imported a package."""
OF_MODELS = ["transformers.modeling_utils", "torch._dynamo", "peft", "scipy", "datasets"]
OF_TOKENIZERS = ["transformers", "tokenizers", *OF_MODELS[1:]]
HEAVY = ["torch", "cryptography", *OF_TOKENIZERS]


def run_without(packages: list[str], *lines: list[str], directory: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, json.dumps(packages), json.dumps(lines)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )


MISTAKES = [
    ("inspect a/b/c", "a/b/c does not exist; give a checkpoint, a layer-shard directory or a run directory"),
    ("convert from-hf ./a new", "source=./a does not exist; give a directory or a Hugging Face id"),
    ("convert from-hf model rows.jsonl", "rows.jsonl exists already; give a directory that does not"),
    ("convert to-hf a new", "a does not exist; give a checkpoint or a layer-shard directory"),
    ("convert to-hf model new", "model is not a checkpoint or layer-shard directory: it has no manifest.json; it is a"),
    ("convert to-legacy a new", "a does not exist; give a checkpoint or a layer-shard directory"),
    ("convert to-peft a new", "a does not exist; give a checkpoint or a layer-shard directory"),
    ("convert merge a new", "a does not exist; give a checkpoint, a run directory or an adapter directory of PEFT"),
    ("convert from-legacy a new", "a does not exist; give a directory with pytorch_*.pt or prank_*.pt files"),
    ("generate ./a --prompt b", "model=./a does not exist; give a directory or a Hugging Face id"),
    ("eval a", "a does not exist; give a run or a checkpoint or, for a Hugging Face id, --data"),
    ("eval ./a --data rows.jsonl", "model=./a does not exist; give a directory or a Hugging Face id"),
    ("data show a.jsonl --model model", 'source="a.jsonl": a.jsonl does not exist'),
    ("data show rows.jsonl --model ./a", "--model=./a does not exist; give a directory or a Hugging Face id"),
    ("data check rows.jsonl --model ./a", "--model=./a does not exist; give a directory or a Hugging Face id"),
    ("data dedup rows.jsonl -o rows.txt", "--output=rows.txt is not a file of JSON lines; write, for example"),
    ("data dedup rows.jsonl -o rows.jsonl", "--output=rows.jsonl exists already; give a file that does not"),
    ("doctor run.toml --listen 0", "--listen=0 must be at least 1, at most 65535"),
]
"""Command line in a directory with a model and data, and the beginning of the message."""


def test_a_missing_input_is_named_before_the_imports_that_take_seconds(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text": "a"}\n')
    dedup = ["data", "dedup", "rows.jsonl", "-o", "new.jsonl"]
    done = run_without(HEAVY, *(line.split() for line, _ in MISTAKES), dedup, directory=tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, str([2] * len(MISTAKES) + [0])), done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    for error, (line, message) in zip(errors, MISTAKES, strict=True):
        assert error.startswith(f"error: {message}"), line


def test_a_valid_checkpoint_and_a_converted_model_are_inspected_without_transformers(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Which takes most of the time to import."""
    model, run = tiny_model("gpt2", **SMALL), tmp_path / "runs" / "run"
    checkpoints = train_alone(small_run(model, run))
    (tmp_path / "shards").mkdir()
    from_hf(model, tmp_path / "shards")
    done = run_without(OF_TOKENIZERS, ["inspect", str(checkpoints)], ["inspect", str(tmp_path / "shards")])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("all files are valid") == 2


def test_data_and_corrupt_files_are_shown_without_the_code_of_models(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Which takes most of the time to import."""
    (tmp_path / "chats.jsonl").write_text('{"prompt": "1 + 1", "completion": "2"}')
    missing = StoredFile("config.json", 1, "0" * 32)
    Manifest(step=2, task="lm", model=NO_LAYERS, layers={}, replicas={}, model_files=[missing], run=None).write(
        tmp_path
    )
    show = ["data", "show", str(tmp_path / "chats.jsonl"), "--model", str(tiny_model())]
    done = run_without(OF_MODELS, show, ["inspect", str(tmp_path)])
    assert (done.returncode, done.stderr, done.stdout.splitlines()[-1]) == (0, "", "[0, 1]")
    assert f"CORRUPT: {tmp_path / 'config.json'} is missing" in done.stdout


def test_the_help_of_acsgd_lists_train_without_loading_torch_and_may_lose_its_reader() -> None:
    command = [sys.executable, "-c", HELP, "--help"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search("train +Train in this process", done.stdout)
    reader, writer = os.pipe()
    os.close(reader)
    closed = subprocess.run(command, env=env, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (closed.returncode, closed.stderr) == (0, b"")


WRONG = [
    ("generate m --promt x", "unrecognized option: --promt (did you mean --prompt?); all options: acsgd generate"),
    ("convert to-hf a b --shards 1", "unrecognized option: --shards; all options: acsgd convert to-hf --help"),
    ("convert to-hf --shards a b", "unrecognized option: --shards; all options: acsgd convert to-hf --help"),
    ("convert to-hf a b --dtype fp8", "invalid choice 'fp8' for argument '--dtype'. Expected one of bfloat16, float16"),
    ("inspect --json=yes a", "--json is a switch without a value (yes); give --json or --no-json; all options: acsgd"),
    ("generate m --prompt a --chat true", "--chat is a switch without a value (true); give --chat or --no-chat; all"),
    ("net nope", "invalid choice 'nope' for argument ACTION. Expected one of rotate; all options: acsgd net --help"),
    ("data dedup a", "required options are missing: -o PATH, --output PATH; all options: acsgd data dedup --help"),
    ("data show a --model m -n x", "-n/--n 'x' is not an integer; all options: acsgd data show --help"),
    ("convert nope", "unrecognized options: nope; available subcommands: from-hf, to-hf, from-legacy, to-legacy, "),
    ("doctor --listen 99999", "--listen=99999 must be at least 1, at most 65535"),
    ("doctor --listen 9 --announce a", "--announce a: a is not host:port; give the address at which others reach this"),
    ("data show a", "required options are missing: --model STR; all options: acsgd data show"),
    ("data show a b --model m", "b is an argument too many; write commas without spaces between several values"),
    ("inspect a b", "b is an argument too many"),
    ("data show a --modell m", "unrecognized option: --modell (did you mean --model?); all options: acsgd data show"),
    ("convert to-hf", "required arguments are missing: SOURCE, TARGET; all options: acsgd convert to-hf --help"),
    ("join", "required arguments are missing: INVITATION; all options: acsgd join --help"),
    (
        "generate m --file a, b",
        "b belongs to no option; write commas without spaces between several values, --file a,b, ",
    ),
    ("generate m --adapter nowhere/a --prompt b", "--adapter nowhere/a does not exist; give an adapter directory of"),
    ("inspect", "required arguments are missing: PATH; all options: acsgd inspect"),
    ("plan", "required arguments are missing: RUN.toml; all options: acsgd plan --help"),
    ("report {tmp}/a", "{tmp}/a is not a run directory: it has neither config.toml nor metrics.jsonl; give"),
    (
        "data show {tmp}/b.jsonl --model {tmp}/a",
        "--model={tmp}/a holds checkpoints of a run; give one of them, {tmp}/a/checkpoints/step-00000020",
    ),
    ("data show {tmp}/lfs.jsonl --model m", 'source="{tmp}/lfs.jsonl": {tmp}/lfs.jsonl is a Git LFS pointer, not the'),
    ("generate m --top-k a", "--top-k 'a' is not an integer; all options: acsgd generate --help"),
    ("dta show", 'acsgd has no command "dta"; use "train", "eval", "convert", '),
]
"""Command line, and the beginning of the message."""


@pytest.mark.parametrize(("line", "message"), WRONG)
def test_a_wrong_command_line_is_one_error(line: str, message: str, tmp_path: Path) -> None:
    line, message = (text.replace("{tmp}", str(tmp_path)) for text in (line, message))
    for step in (10, 20):
        (tmp_path / "a" / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
        (tmp_path / "a" / "checkpoints" / f"step-{step:08d}" / MANIFEST).touch()
    (tmp_path / "b.jsonl").write_text('{"text": "a"}')
    (tmp_path / "lfs.jsonl").write_text("version https://git-lfs.github.com/spec/v1\n")
    code, printed = acsgd(*line.split())
    assert (code, printed.count("\n")) == (2, 1)
    assert printed.startswith(f"error: {message}")


def test_python_m_acsgd_takes_a_run_file_with_and_without_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [["train", "run.toml"], ["run.toml"], ["train"], ["--model.name", "train"], []]
    assert [without_train(argv) for argv in given] == [["run.toml"], ["run.toml"], [], ["--model.name", "train"], []]
    Path("train").mkdir()
    assert without_train(["train"]) == []
    Path("train").rmdir()
    Path("train").touch()
    assert without_train(["train"]) == ["train"]


def test_only_names_of_the_same_meaning_are_suggested() -> None:
    base = ["--model.name", "a", "--data.sources", "b", "--data.sequence", "1", "--data.batch", "1", "--optim.lr", "1"]
    for wrong, hint in (
        ("--weights", "--data.weights"),
        ("--pp.stage", "--pp.stages"),
        ("--data.path", ""),
        ("--data.split", ""),
    ):
        with pytest.raises(ValueError) as refused:
            parse([*base, wrong, "3"])
        assert str(refused.value).partition(";")[0].endswith(f"(did you mean {hint}?)" if hint else f": {wrong}")
    assert similar("topk", ["top_k"])
    assert not similar("int4", ["int8"])


def test_the_nearest_path_is_named(tmp_path: Path) -> None:
    for step in (10, 20):
        (tmp_path / "run" / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    (tmp_path / "train.jsonl").touch()
    newest = tmp_path / "run" / "checkpoints" / "step-00000020"
    found = {"run/checkpoints/step-30": newest, "rn/checkpoints/step-30": newest, "xyz": None, "test.jsonl": None}
    for missing, near in found.items():
        assert nearest_path(tmp_path / missing) == (f" (the nearest is {near})" if near else "")
