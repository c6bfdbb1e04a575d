"""Configuration: flags > file > defaults; every error names its key."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import typing
from pathlib import Path

import pytest

from acsgd.config import options as config_module
from acsgd.config import run_file as run_file_module
from acsgd.config.checks import check
from acsgd.config.options import FORMER_SWITCHES, REMOVED, RENAMED, Config
from acsgd.config.ranges import Range, ranges_of
from acsgd.config.run_file import parse, to_toml
from acsgd.tasks import check_options

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


@pytest.mark.parametrize("text", ['a "quoted" \\ dir', "\n__input__\r\n\tAnswer:\x7f\x1b\u2028\x85 \U0001f600"])
def test_the_written_configuration_reads_back_equal(text: str, run_file: Path, tmp_path: Path) -> None:
    config = parse([str(run_file), "--data.input_format", f"__input__{text}", "--checkpoint.every", "3"])
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
            '"on_error", "eval_sources" or "eval_fraction" (did you mean "batch"?)',
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
        ("--data.batch 0", "data.batch=0 must be at least 1, at most 16777216"),
        ("--optim.lr nan", "optim.lr=nan must be greater than 0"),
        (
            "--optim.steps None",
            "the length of the run is missing; give, for example, --optim.epochs 3 or --optim.steps",
        ),
        (
            "--optim.epochs 2",
            "optim.steps=5 and optim.epochs=2 are both given; remove one of them, or add --optim.steps None or ",
        ),
        ("--optim.epochs 0", "optim.epochs=0.0 must be greater than 0, at most 1000000"),
        ("--optim.epochs nan", "optim.epochs=nan must be greater than 0"),
        ("--optim.warmup 9", "optim.warmup=9 must be at most optim.steps=5"),
        ("--optim.warmup=-1", "optim.warmup=-1 must be at least 0, at most"),
        (
            "--optim.warmup 10%",
            'optim.warmup="10%" is not a length; give a number of steps, 100, or of epochs, "1 epoch"',
        ),
        ("--data.max_prompt 99 0", "data.max_prompt=99 must be at most data.sequence=64"),
        ("--data.max_answer=-1", "data.max_answer=-1 must be at least 0, at most"),
        ("--pp.exact_steps 1.5", 'pp.exact_steps="1.5" is not a length'),
        (
            "--elastic.min_replicas 3 --elastic.max_replicas 2",
            "elastic.min_replicas=3 must be at most elastic.max_replicas=2",
        ),
        ("--optim.betas 0.9 1.0", "optim.betas contains 1.0, which must be at least 0, less than 1"),
        ("--optim.spike 1", "optim.spike=1.0 must be greater than 1, at most 1000000"),
        ("--optim.spike nan", "optim.spike=nan must be greater than 1"),
        (
            "--optim.spike 3",
            "optim.spike=3.0 restores the last checkpoint, but there is none before the end of the run; "
            'give, for example, checkpoint.every="1"',
        ),
        ("--optim.spike 3 --checkpoint.every 5", "there is none before the end of the run"),
        ("--optim.loss_scale 1000", "optim.loss_scale=1000.0 must be a power of 2; use, for example, 65536"),
        ("--optim.loss_scale inf", "optim.loss_scale=inf must be at least 1, at most 4294967296"),
        ("--optim.loss_scale 0", "optim.loss_scale=0.0 must be at least 1"),
        ("--checkpoint.keep 0", "checkpoint.keep=0 must be at least 1"),
        ("--checkpoint.keep_every 0", "checkpoint.keep_every=0 must be at least 1"),
        *(
            (
                f"--checkpoint.every {every}",
                f'checkpoint.every={every} is not an interval; give steps, "500", or minutes, "10min"',
            )
            for every in (
                "0",
                "x",
                "-5",
                "5m",
                "0min",
                "min",
                "1.5",
                "5minmin",
                "1e3",
                "9" * 400,
                "9" * 400 + "min",
                "٣",
            )
        ),
        (
            "--eval.every 5",
            "eval.every=5 needs evaluation data; give data.eval_sources or, for example, data.eval_fraction=0.05",
        ),
        (
            "--checkpoint.best f1",
            'checkpoint.best="f1" needs evaluation data; give data.eval_sources or, for example, data.eval_fraction=0.',
        ),
    ],
)
def test_an_invalid_value_is_named(flags: str, message: str, run_file: Path) -> None:
    with pytest.raises(ValueError) as error:
        check(parse([str(run_file), *flags.split()]))
    assert message in str(error.value)


ODD = ["inf", "-inf", "nan", "-1", "0", "1e300", str(2**63), "9" * 400]


def test_every_numeric_option_declares_a_range_and_refuses_what_is_outside() -> None:
    """Law: every odd value is refused with its key and its value, or lies in the declared range."""
    base = "--model.name m --data.sources demo --data.sequence 8 --data.batch 2 --optim.lr 1 --optim.steps 3"
    whole = parse(base.split())
    for section in dataclasses.fields(Config):
        kind = typing.get_type_hints(Config)[section.name]
        hints = typing.get_type_hints(kind)
        numeric = [name for name, hint in hints.items() if re.search(r"\b(int|float)\b", str(hint))]
        ranges = ranges_of(kind)
        assert numeric == list(ranges), f"{section.name}: options without a range"
        for name, odd in itertools.product(numeric, ODD):
            key, hint = f"{section.name}.{name}", str(hints[name])
            try:
                number = float(odd) if "float" in hint else int(odd)
            except ValueError:
                continue  # the parser refuses it
            values = (number,) * (2 if name == "betas" else 1)
            changed = {name: values if "tuple" in hint else number}
            config = dataclasses.replace(
                whole, **{section.name: dataclasses.replace(getattr(whole, section.name), **changed)}
            )
            refusal = refusal_of(config)
            assert refusal is None or (key in refusal and "\n" not in refusal), (key, odd, refusal)
            assert refusal or all(each in ranges[name] for each in values), (key, odd)


def test_a_range_has_its_limits_unless_it_excludes_them_and_nothing_beyond() -> None:
    assert [each in Range(1, 3) for each in (0.9, 1, 3, 3.1, math.nan)] == [False, True, True, False, False]
    assert [each in Range(1, 3, above=True, below=True) for each in (1, 1.1, 2.9, 3)] == [False, True, True, False]


def refusal_of(config: Config) -> str | None:
    try:
        check(config)
    except ValueError as error:
        return str(error)
    return None


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


USAGE = [
    ("--pp.forwrd.1 none", "unrecognized option: --pp.forwrd.1 (did you mean --pp.forward.0?)"),
    ("--pp.backward.one none", "unrecognized option: --pp.backward.one (did you mean --pp.backward.0?)"),
    ("--data.btach 3", "unrecognized option: --data.btach (did you mean --data.batch?); all options: train.py"),
    (
        "--model.dtype fp8",
        "invalid choice 'fp8' for argument '--model.dtype'. Expected one of bf16, fp16, fp32",
    ),
    ("--data.batch x", "--data.batch 'x' is not an integer; all options: train"),
    ("--data.batch", "missing value for argument '--data.batch'; all options"),
    ("--optim.betas 1", "missing value for argument '--optim.betas'. Expected 2 values"),
    ("--pp.layers a", "--pp.layers 'a' is not an integer"),
    ("--data.batch 1e99", "--data.batch '1e99' is not an integer"),
    ("unexpected", "unrecognized options: unexpected; all options: train.py --help"),
]
"""Flags, and the beginning of the message."""


@pytest.mark.parametrize("is_main", [True, False])
def test_an_invalid_flag_is_named_in_one_sentence_and_nothing_is_printed(
    is_main: bool, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, message in USAGE:
        with pytest.raises(ValueError) as refused:
            parse([str(run_file), *flags.split()], is_main=is_main)
        text = str(refused.value)
        assert text.startswith(message)
        assert "\n" not in text
        assert not set("│╭╰─").intersection(text)
    with pytest.raises(ValueError, match=r"^required options are missing: --model.name STR, --data.sources STR, "):
        parse([], is_main=is_main)
    assert capsys.readouterr() == ("", "")


def test_only_the_main_rank_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    for is_main in (True, False):
        with pytest.raises(SystemExit) as ended:
            parse(["--help"], is_main=is_main)
        assert not ended.value.code
        printed = capsys.readouterr().out
        assert ("--pp.stages" in printed) == is_main
        assert "{None," not in printed, "None is no choice"


WRONG_TYPES = [
    ("data.batch", '"8"', "data.batch = '8' must be an integer"),
    ("data.batch", "8.0", "data.batch = 8.0 must be an integer"),
    ("data.batch", "true", "data.batch = True must be an integer"),
    ("data.batch", "{x = 1}", "data.batch = a table must be an integer"),
    ("data.batch", "2024-01-01", "data.batch = datetime.date(2024, 1, 1) must be an integer"),
    ("optim.lr", "[1]", "optim.lr = [1] must be a number"),
    ("optim.betas", "[0.9]", "optim.betas = [0.9] must be a list of 2 numbers"),
    ("optim.betas", "0.9", "optim.betas = 0.9 must be a list of 2 numbers"),
    ("pp.layers", "[[1]]", "pp.layers = a nested list must be a list of integers"),
    ("pp.exact_eval", "1", "pp.exact_eval = 1 must be true or false"),
    ("model.name", "3.5", 'model.name = 3.5 must be a text, "..."'),
    ("model.dtype", '"fp8"', """model.dtype = 'fp8' must be "fp32" or "bf16" or "fp16\""""),
    ("model.dtype", "[[[]]]", "model.dtype = a nested list must be"),
    ("log.to", "[" * 50_000, "nests its values too deeply"),
    ("data.batch", "9" * 5000, "is not TOML: Exceeds the limit"),
    ("log.to", '"\\ud800"', "is not TOML"),
]
"""Key, its value in the file, and a part of the message."""


def test_a_value_of_a_wrong_type_in_the_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    for key, value, message in WRONG_TYPES:
        path.write_text(f"{key} = {value}\n")
        with pytest.raises(ValueError) as refused:
            parse([str(path)])
        text = str(refused.value)
        assert message in text
        assert text.startswith(f"{path}")
        assert "\n" not in text
    path.write_bytes(b"log.dir = '\xff'\n")
    with pytest.raises(ValueError, match="is not TOML: 'utf-8' codec"):
        parse([str(path)])
    for name in ("x" * 300, str(tmp_path)):
        with pytest.raises(ValueError, match=r"^run file .* cannot be read \("):
            parse([name])


@pytest.mark.parametrize("former", RENAMED)
def test_a_renamed_option_is_refused_with_its_name(former: str, tmp_path: Path) -> None:
    section, _, key = former.partition(".")
    path = tmp_path / "run.toml"
    path.write_text(f'[{section}]\n{key} = "x"\n')
    with pytest.raises(ValueError, match=rf"{former} is now called {RENAMED[former]}$"):
        parse([str(path)])
    for typed in (former, former.replace("_", "-")):
        with pytest.raises(ValueError, match=rf"^--{typed} is now called --{RENAMED[former]}$"):
            parse([f"--{typed}=x"])


@pytest.mark.parametrize("former", REMOVED)
def test_a_removed_option_is_refused_with_what_happens_without_it(former: str, tmp_path: Path) -> None:
    section, _, key = former.partition(".")
    path = tmp_path / "run.toml"
    path.write_text(f"[{section}]\n{key} = 1.0\n")
    instead = re.escape(REMOVED[former])
    with pytest.raises(ValueError, match=rf"{former} is no longer an option: {instead}; leave it out$"):
        parse([str(path)])
    for typed in (former, former.replace("_", "-")):
        with pytest.raises(ValueError, match=rf"^--{typed} is no longer an option: {instead}; leave it out$"):
            parse([f"--{typed}=1"])


@pytest.mark.parametrize("flags", ["", "=true", " true", " False", " --log.to jsonl"])
def test_a_former_switch_is_refused_with_what_to_give(flags: str, tmp_path: Path) -> None:
    for option, instead in FORMER_SWITCHES.items():
        section, _, key = option.partition(".")
        path = tmp_path / "run.toml"
        path.write_text(f"[{section}]\n{key} = true\n")
        with pytest.raises(ValueError) as refused:
            parse([str(path)])
        assert str(refused.value) == f"{path}: {option} is no longer true or false; give {instead}, or leave it out"
        for flag in (f"--{option}{flags}", f"--{section}.no-{key}"):
            with pytest.raises(ValueError, match=rf"^--.*{key} is no longer a switch; give {re.escape(instead)}, or"):
                parse(flag.split())


def test_an_option_that_is_given_again_is_noted(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_file_module._note_once.cache_clear()
    flags = "--data.batch=3 --optim.steps 5 --optim.steps=5 --data.isolate --data.batch 7 --data.no-isolate"
    config = parse([str(run_file), *flags.split()])
    assert config.data.batch == 7
    assert capsys.readouterr().err == "".join(
        f"{name} is given more than once; the last one holds\n" for name in ("--data.batch", "--data.no-isolate")
    )


def test_a_usage_error_that_quotes_a_long_value_is_short() -> None:
    with pytest.raises(ValueError) as refused:
        parse(["--model.name", "x", "--data.on_error", "x" * 70_000])
    assert "data.on_error" in str(refused.value)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    ("adapter", "option"),
    [
        ("prefix_tuning:tokens=4", "--model.task seq2seq"),
        ("prompt_tuning:tokens=4", "--model.task classification"),
        ("prompt_tuning:tokens=4", "--data.objective prefix"),
    ],
)
def test_virtual_tokens_are_refused_with_other_tasks_and_objectives(run_file: Path, adapter: str, option: str) -> None:
    check(parse([str(run_file), "--adapter.spec", adapter]))
    config = parse([str(run_file), "--adapter.spec", adapter, *option.split()])
    with pytest.raises(
        ValueError, match=rf'adapter\.spec="{adapter}": virtual tokens are for model\.task=lm .*use lora'
    ):
        check_options(config)
