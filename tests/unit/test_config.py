"""Configuration: flags > file > defaults; every error names its key."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

import pytest

from acsgd.config import options as config_module
from acsgd.config.checks import check
from acsgd.config.options import RENAMED, Config
from acsgd.config.run_file import parse, to_toml

RUN = """
[model]
name = "some/model"
[data]
sources = "demo"
sequence = 64
batch = 8
[pp]
layers = [2, 3]
[optim]
lr = 1e-3
steps = 5
betas = [0.9, 0.95]
clip = inf
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def test_flags_override_the_file_and_the_file_the_defaults(run_file: Path) -> None:
    config = parse([str(run_file), "--data.batch", "6", "--optim.betas", "0.8", "0.9"])
    assert config.data.batch == 6
    assert config.data.sequence == 64
    assert config.optim.betas == (0.8, 0.9)
    assert config.optim.eps == 1e-8
    assert config.pp.layers == (2, 3)


def test_the_written_configuration_reads_back_equal(run_file: Path, tmp_path: Path) -> None:
    config = parse([str(run_file), "--log.dir", 'a "quoted" \\ dir', "--checkpoint.every", "3"])
    again = tmp_path / "again.toml"
    again.write_text(to_toml(config))
    assert parse([str(again)]) == config


def test_no_file_is_needed() -> None:
    flags = "--model.name m --data.sources demo --data.sequence 8 --data.batch 2 --optim.lr 1 --optim.steps 3"
    assert parse(flags.split()).model.name == "m"


def test_every_option_is_a_field_with_a_docstring() -> None:
    """An attribute without annotation would not be a field and could not be set."""
    source = Path(config_module.__file__).read_text()
    for section in dataclasses.fields(Config):
        kind = typing.get_type_hints(Config)[section.name]
        fields = {field.name for field in dataclasses.fields(kind)}
        own = {name for name, value in vars(kind).items() if not (name.startswith("_") or isinstance(value, property))}
        assert own <= fields
        for name in fields:
            assert f"    {name}: " in source


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[modle]\nname = 'x'", 'unknown section [modle]; use "model"'),
        (
            "[data]\nbtach = 3",
            'unknown key data.btach; use "sources", "sequence", "batch", "seed", "on_error", '
            '"eval_sources" or "eval_fraction" (did you mean "batch"?)',
        ),
        ("name = 'x'", "unknown section [name]"),
        ("[model", "is not TOML"),
    ],
)
def test_an_error_in_the_file_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"bad\.toml") as error:
        parse([str(path)])
    assert message in str(error.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ValueError, match=r"run file no\.toml cannot be read"):
        parse(["no.toml"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--pp.micro 3", "pp.micro=3 does not divide data.batch=8; use pp.micro=1 or 2 or 4"),
        ("--data.batch 0", "data.batch=0 must be greater than 0"),
        ("--optim.lr nan", "optim.lr=nan must be greater than 0"),
        ("--optim.warmup 9", "optim.warmup=9 must lie between 0 and optim.steps=5"),
        ("--optim.betas 0.9 1.0", "must lie in [0, 1)"),
        ("--optim.spike 1", "optim.spike=1.0 must be greater than 1, a multiple of the mean loss"),
        ("--optim.spike nan", "optim.spike=nan must be greater than 1"),
        (
            "--optim.spike 3",
            "optim.spike=3.0 restores the last checkpoint, but there is none before the end of the run; "
            'give, for example, checkpoint.every="500"',
        ),
        ("--optim.loss_scale 1000", "optim.loss_scale=1000.0 must be a power of 2; use, for example, 65536"),
        ("--optim.loss_scale inf", "optim.loss_scale=inf must be a power of 2"),
        ("--optim.loss_scale 0", "optim.loss_scale=0.0 must be greater than 0"),
        ("--checkpoint.keep 0", "checkpoint.keep=0 must be greater than 0"),
        ("--checkpoint.keep_every 0", "checkpoint.keep_every=0 must be greater than 0"),
        *(
            (
                f"--checkpoint.every {every}",
                f'checkpoint.every={every} is not an interval; give steps, "500", or minutes, "10min"',
            )
            for every in ("0", "x", "-5", "5m", "0min", "min", "1.5", "5minmin", "1e3")
        ),
        (
            "--eval.every 5",
            "eval.every=5 needs evaluation data; give data.eval_sources or, for example, data.eval_fraction=0.05",
        ),
        (
            "--checkpoint.best",
            "checkpoint.best needs evaluation data; give data.eval_sources or, for example, data.eval_fraction=0.05",
        ),
        ("--log.to print,wandbb", 'log.to="print,wandbb": unknown wandbb; use "print", "jsonl", "text", "wandb"'),
    ],
)
def test_an_invalid_value_is_named(flags: str, message: str, run_file: Path) -> None:
    with pytest.raises(ValueError) as error:
        check(parse([str(run_file), *flags.split()]))
    assert message in str(error.value)


def test_a_checkpoint_interval_with_a_blank_is_named(run_file: Path) -> None:
    with pytest.raises(ValueError) as error:
        check(parse([str(run_file), "--checkpoint.every", "5 min"]))
    assert "checkpoint.every=5 min is not an interval" in str(error.value)


@pytest.mark.parametrize(
    ("every", "steps", "seconds"), [("500", 500, None), ("10min", None, 600.0), ("0.5min", None, 30)]
)
def test_a_checkpoint_interval_is_steps_or_minutes(
    every: str, steps: int | None, seconds: float | None, run_file: Path
) -> None:
    config = parse([str(run_file), "--checkpoint.every", every])
    check(config)
    assert (config.checkpoint.every_steps, config.checkpoint.every_s) == (steps, seconds)


@pytest.mark.parametrize(
    ("flags", "message"),
    [("--data.btach 3", "--data.batch"), ("--model.dtype fp8", "fp8"), ("--data.batch x", "'x'")],
)
def test_an_invalid_flag_is_named(flags: str, message: str, run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse([str(run_file), *flags.split()])
    assert ended.value.code
    printed = capsys.readouterr()
    words = " ".join((printed.err + printed.out).replace("│", " ").split())
    assert message in words


@pytest.mark.parametrize("flags", ["--data.btach 3", "--data.batch x", "--model.dtype fp8"])
def test_ranks_other_than_the_main_rank_print_nothing(
    flags: str, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse([str(run_file), *flags.split()], is_main=False)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("former", RENAMED)
def test_a_renamed_option_is_refused_with_its_name(former: str, tmp_path: Path) -> None:
    section, _, key = former.partition(".")
    path = tmp_path / "run.toml"
    path.write_text(f'[{section}]\n{key} = "x"\n')
    with pytest.raises(ValueError, match=rf"{former} is now called {RENAMED[former]}$"):
        parse([str(path)])
    with pytest.raises(ValueError, match=rf"^--{former} is now called --{RENAMED[former]}$"):
        parse([f"--{former}=x"])
