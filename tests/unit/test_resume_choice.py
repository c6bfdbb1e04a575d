"""Law: a run resumes from its newest valid checkpoint, and reports every corrupt one it sets aside."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lib.saved import SMALL, small_run, train_alone
from safetensors.torch import load_file, save_file

from acsgd.config.options import Config
from acsgd.errors import RunError
from acsgd.io.checkpoint.directory import CheckpointDirectory
from acsgd.optim.schedule import learning_rate
from acsgd.shards.manifest import MANIFEST, Manifest

TinyModel = Callable[..., Path]
Corrupt = Callable[[Path], None]
STEPS = 4


def flip(name: str) -> Corrupt:
    def corrupt(checkpoint: Path) -> None:
        content = bytearray((checkpoint / name).read_bytes())
        content[len(content) // 2] ^= 1
        (checkpoint / name).write_bytes(content)

    return corrupt


def remove(name: str) -> Corrupt:
    return lambda checkpoint: (checkpoint / name).unlink()


CORRUPTIONS = {
    "a layer": (flip("block-00000.safetensors"), "block-00000.safetensors is corrupt"),
    "a layer gone": (remove("embed.safetensors"), "embed.safetensors is missing"),
    "a companion": (flip("tokenizer.json"), "tokenizer.json is corrupt"),
    "the manifest": (flip(MANIFEST), "manifest.json is corrupt"),
    "incomplete": (remove(MANIFEST), "step-00000003 is incomplete: it has no manifest.json"),
}


@pytest.fixture(scope="module")
def finished(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Return a run with a checkpoint after each of its four steps."""
    config = small_run(tiny_model("gpt2", **SMALL), tmp_path_factory.mktemp("choice") / "runs" / "run", steps=STEPS)
    train_alone(config)
    return config


def stopped_after(finished: Config, steps: int, run_dir: Path) -> Config:
    """Copy a run as it was after a number of steps."""
    config = dataclasses.replace(finished, log=dataclasses.replace(finished.log, dir=str(run_dir), to="jsonl,print"))
    shutil.copytree(Path(finished.log.dir), run_dir, symlinks=True)
    for step in range(steps + 1, STEPS + 1):
        shutil.rmtree(directory_of(config).of(step))
    return config


def directory_of(config: Config) -> CheckpointDirectory:
    return CheckpointDirectory(Path(config.log.dir) / "checkpoints")


def resuming(config: Config, path: Path | str) -> Config:
    return dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, resume=str(path)))


def contents(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def assert_same_end(config: Config, finished: Config) -> None:
    """Check that a resumed run ended as the uninterrupted one."""
    one, other = (Manifest.read(directory_of(each).of(STEPS)) for each in (config, finished))
    assert (one.layers, one.run) == (other.layers, other.run)
    losses = [
        [json.loads(line)["loss"] for line in (Path(each.log.dir) / "metrics.jsonl").read_text().splitlines()]
        for each in (config, finished)
    ]
    assert losses[0] == losses[1]


def assert_same_layers(config: Config, finished: Config) -> None:
    one, other = (Manifest.read(directory_of(each).of(STEPS)) for each in (config, finished))
    assert one.layers == other.layers


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_run_resumes_from_the_newest_valid_checkpoint(
    name: str, finished: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = stopped_after(finished, 3, tmp_path / "run")
    directory = directory_of(config)
    corrupt, message = CORRUPTIONS[name]
    corrupt(directory.of(3))
    before = {path.name: content for path, content in contents(directory.of(3)).items()}
    train_alone(config)
    printed = capsys.readouterr().out
    rejected = [line for line in printed.splitlines() if line.startswith("set aside a checkpoint: ")]
    assert len(rejected) == 1
    assert message in rejected[0]
    assert rejected[0].endswith("; renamed to corrupt-step-00000003")
    assert f" from {directory.of(2)}: step 2, 64 tokens, loss " in printed
    aside = directory.path / "corrupt-step-00000003"
    assert {path.name: content for path, content in contents(aside).items()} == before
    assert directory.steps() == [1, 2, 3, 4]
    assert_same_end(config, finished)


def test_every_corrupt_checkpoint_is_reported_and_set_aside(
    finished: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = stopped_after(finished, 4, tmp_path / "run")
    directory = directory_of(config)
    for step, name in ((4, "a layer"), (3, "incomplete"), (2, "the manifest")):
        CORRUPTIONS[name][0](directory.of(step))
    train_alone(config)
    printed = capsys.readouterr().out
    assert printed.count("set aside a checkpoint: ") == 3
    assert f" from {directory.of(1)}" in printed
    assert len(list(directory.path.glob("corrupt-step-*"))) == 3
    assert_same_end(config, finished)


def test_an_older_corrupt_checkpoint_does_not_matter(finished: Config, tmp_path: Path) -> None:
    config = stopped_after(finished, 3, tmp_path / "run")
    directory = directory_of(config)
    CORRUPTIONS["a layer"][0](directory.of(1))
    train_alone(config)
    assert directory.steps() == [1, 2, 3, 4]
    assert_same_end(config, finished)


def test_a_run_without_a_valid_checkpoint_fails(finished: Config, tmp_path: Path) -> None:
    config = stopped_after(finished, 3, tmp_path / "run")
    directory = directory_of(config)
    for step, name in ((1, "a layer"), (2, "the manifest"), (3, "incomplete")):
        CORRUPTIONS[name][0](directory.of(step))
    before = contents(Path(config.log.dir))
    for _ in range(2):
        with pytest.raises(
            RunError, match=r"^no checkpoint is valid: .*; to start a new run, give another log\.dir$"
        ) as error:
            train_alone(config)
        for step in (1, 2, 3):
            assert str(directory.of(step)) in str(error.value)
    after = contents(Path(config.log.dir))
    assert before.keys() == after.keys()
    assert {path for path in before if before[path] != after[path]} <= {Path(config.log.dir) / "config.toml"}


@pytest.mark.parametrize("name", [name for name in CORRUPTIONS if name != "incomplete"])
def test_a_requested_checkpoint_is_used_or_the_run_fails(name: str, finished: Config, tmp_path: Path) -> None:
    """In the run's own directory and in another one: the newest valid checkpoint is suggested, not used."""
    config = stopped_after(finished, 3, tmp_path / "run")
    directory = directory_of(config)
    corrupt, message = CORRUPTIONS[name]
    corrupt(directory.of(3))
    CORRUPTIONS["incomplete"][0](directory.of(2))
    before = contents(directory.path)
    other = dataclasses.replace(config, log=dataclasses.replace(config.log, dir=str(tmp_path / "other")))
    for start, suggested in ((config, "auto"), (other, directory.of(1))):
        with pytest.raises(RunError) as error:
            train_alone(resuming(start, directory.of(3)))
        assert message in str(error.value)
        assert str(error.value).endswith(
            f"; to resume from the newest valid one, step-00000001: --checkpoint.resume {suggested}"
        )
        assert contents(directory.path) == before
        assert not directory_of(other).steps()
    for start, suggested in ((other, directory.of(1)), (config, "auto")):  # the suggestions work
        train_alone(resuming(start, suggested))
        assert (
            Manifest.read(directory_of(start).of(STEPS)).layers
            == Manifest.read(directory_of(finished).of(STEPS)).layers
        )


def test_a_checkpoint_can_be_requested_by_a_link_or_a_relative_path(
    finished: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = directory_of(stopped_after(finished, 3, tmp_path / "run"))
    source.mark_best(2)
    monkeypatch.chdir(tmp_path)
    for number, path in enumerate(
        (source.path / "best", Path("run/checkpoints/best"), Path("run/checkpoints/step-00000002"))
    ):
        start = dataclasses.replace(finished, log=dataclasses.replace(finished.log, dir=f"start-{number}", to="print"))
        train_alone(resuming(start, path))
        assert "step-00000002: step 2, 64 tokens" in capsys.readouterr().out
        assert (
            Manifest.read(directory_of(start).of(STEPS)).layers
            == Manifest.read(directory_of(finished).of(STEPS)).layers
        )


def test_other_checkpoints_beside_a_requested_one_do_not_matter(
    finished: Config, tmp_path: Path, tiny_model: TinyModel, capsys: pytest.CaptureFixture[str]
) -> None:
    source = directory_of(stopped_after(finished, 4, tmp_path / "run"))
    CORRUPTIONS["incomplete"][0](source.of(4))
    CORRUPTIONS["the manifest"][0](source.of(3))
    foreign = small_run(tiny_model("gpt2", **SMALL | {"n_layer": 2}), tmp_path / "runs" / "foreign", steps=1)
    shutil.rmtree(source.of(1))
    shutil.copytree(train_alone(foreign) / "step-00000001", source.of(1))
    start = dataclasses.replace(
        finished, log=dataclasses.replace(finished.log, dir=str(tmp_path / "start"), to="print")
    )
    capsys.readouterr()
    train_alone(resuming(start, source.of(2)))
    assert "set aside" not in capsys.readouterr().out
    assert source.steps() == [1, 2, 3, 4], "a checkpoint of another run was renamed"


@pytest.fixture(scope="module")
def other_model(finished: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of the same name and config as that of the finished run, with other weights."""
    other = tmp_path_factory.mktemp("other") / Path(finished.model.name).name
    shutil.copytree(finished.model.name, other)
    tensors = load_file(other / "model.safetensors")
    save_file({name: tensor + 0.125 for name, tensor in tensors.items()}, other / "model.safetensors", {"format": "pt"})
    return other


def with_model(config: Config, **model: Any) -> Config:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **model))


def test_a_run_resumes_only_with_the_weights_it_started_from_whatever_their_name(
    finished: Config, other_model: Path, tmp_path: Path
) -> None:
    config = stopped_after(finished, 3, tmp_path / "run")
    before = contents(directory_of(config).path)
    for changed, difference in (
        (with_model(config, name=str(other_model)), f"the weights of gpt2, and model.name={other_model} has others"),
        (with_model(config, init="scratch"), "the weights of gpt2, and model.init=scratch gives others"),
    ):
        with pytest.raises(ValueError, match=re.escape(difference)) as error:
            train_alone(changed)
        assert "--log.dir NEW or --checkpoint.resume never" in str(error.value)
        assert contents(directory_of(config).path) == before
    renamed = shutil.copytree(finished.model.name, tmp_path / "renamed")
    train_alone(with_model(config, name=str(renamed)))
    assert_same_layers(config, finished)


def test_never_starts_a_new_run_and_keeps_the_checkpoints_of_the_earlier_one(
    finished: Config, other_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = stopped_after(finished, 3, tmp_path / "run")
    directory = directory_of(config)
    directory.mark_best(2)
    earlier = {step: contents(directory.of(step)).values() for step in directory.steps()}
    other = with_model(config, name=str(other_model))
    train_alone(resuming(other, "never"))
    moved = CheckpointDirectory(directory.path / "earlier-1")
    assert (
        f"checkpoint.resume=never: the checkpoints of the earlier run are in {moved.path} now"
        in capsys.readouterr().out
    )
    assert [*earlier] == moved.steps()
    assert (moved.path / "metrics.jsonl").is_file()
    assert all([*contents(moved.of(step)).values()] == [*earlier[step]] for step in earlier)
    assert moved.best() == moved.of(2)
    assert directory.best() is None
    alone = dataclasses.replace(other, log=dataclasses.replace(other.log, dir=str(tmp_path / "alone")))
    train_alone(alone)
    assert_same_end(config, alone)


def with_optim(config: Config, **optim: Any) -> Config:
    return dataclasses.replace(config, optim=dataclasses.replace(config.optim, **optim))


@pytest.mark.parametrize(
    ("steps", "last"), [(STEPS, "step 4 of 4 is done"), (STEPS - 1, "step 4 is done, the last is step 3")]
)
def test_a_run_whose_steps_are_done_says_that_nothing_is_left(
    steps: int, last: str, finished: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = stopped_after(finished, STEPS, tmp_path / "run")
    train_alone(with_optim(config, steps=steps, lr=2e-3))
    printed = capsys.readouterr().out
    assert f"nothing left to train: {last}; raise optim.steps, or give another log.dir" in printed
    assert "done: " not in printed
    assert "stopped" not in printed


def test_a_learning_rate_that_rises_and_another_chat_template_are_said_at_a_resume(
    finished: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = stopped_after(finished, STEPS, tmp_path / "run")
    longer = with_optim(config, steps=STEPS + 2)
    template = dataclasses.replace(config.data, chat_template="openchatkit")
    train_alone(dataclasses.replace(longer, data=template))
    last, now = learning_rate(STEPS - 1, finished.optim), learning_rate(STEPS, longer.optim)
    assert now > last
    printed = capsys.readouterr().out
    assert f"the learning rate of step 5 is {now:.3g}, after {last:.3g} in step 4" in printed
    assert re.search(r"what it saves reads and writes others .*: data.chat_template is \w+ in the checkpoint", printed)
