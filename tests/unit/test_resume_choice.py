"""Law: a run goes on from its newest sound checkpoint, says what it passed over, and never guesses."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from lib.saved import SMALL, small_run, train_alone

from acsgd.config.options import Config
from acsgd.errors import RunError
from acsgd.io.checkpoint.directory import CheckpointDirectory
from acsgd.shards.disk import MANIFEST, Manifest

TinyModel = Callable[..., Path]
Damage = Callable[[Path], None]
STEPS = 4


def flip(name: str) -> Damage:
    def damage(checkpoint: Path) -> None:
        content = bytearray((checkpoint / name).read_bytes())
        content[len(content) // 2] ^= 1
        (checkpoint / name).write_bytes(content)

    return damage


def remove(name: str) -> Damage:
    return lambda checkpoint: (checkpoint / name).unlink()


DAMAGES = {
    "a layer": (flip("block-00000.safetensors"), "block-00000.safetensors is corrupt"),
    "a layer gone": (remove("embed.safetensors"), "embed.safetensors is missing"),
    "a companion": (flip("tokenizer.json"), "tokenizer.json is corrupt"),
    "the manifest": (flip(MANIFEST), "manifest.json is corrupt"),
    "half-written": (remove(MANIFEST), "step-00000003 is half-written: it has no manifest.json"),
}


@pytest.fixture(scope="module")
def made(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Return a run that was saved after each of its four steps."""
    config = small_run(tiny_model("gpt2", **SMALL), tmp_path_factory.mktemp("choice") / "runs" / "run", steps=STEPS)
    train_alone(config)
    return config


def stopped_after(made: Config, steps: int, run_dir: Path) -> Config:
    """Return the run as it was after a number of steps, elsewhere."""
    config = dataclasses.replace(made, log=dataclasses.replace(made.log, dir=str(run_dir), to="jsonl,print"))
    shutil.copytree(Path(made.log.dir), run_dir, symlinks=True)
    for step in range(steps + 1, STEPS + 1):
        shutil.rmtree(directory_of(config).of(step))
    return config


def directory_of(config: Config) -> CheckpointDirectory:
    return CheckpointDirectory(Path(config.log.dir) / "checkpoints")


def resuming(config: Config, path: Path | str) -> Config:
    return dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, resume=str(path)))


def contents(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def assert_same_end(config: Config, made: Config) -> None:
    """Check that the run has ended as the one that was never stopped."""
    one, other = (Manifest.read(directory_of(each).of(STEPS)) for each in (config, made))
    assert (one.layers, one.run) == (other.layers, other.run)
    losses = [
        [json.loads(line)["loss"] for line in (Path(each.log.dir) / "metrics.jsonl").read_text().splitlines()]
        for each in (config, made)
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", DAMAGES)
def test_the_one_before_a_damaged_one_is_taken(
    name: str, made: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = stopped_after(made, 3, tmp_path / "run")
    directory = directory_of(config)
    damage, message = DAMAGES[name]
    damage(directory.of(3))
    damaged = {path.name: content for path, content in contents(directory.of(3)).items()}
    train_alone(config)
    printed = capsys.readouterr().out
    refused = [line for line in printed.splitlines() if line.startswith("refused a checkpoint: ")]
    assert len(refused) == 1
    assert message in refused[0]
    assert refused[0].endswith("; it is now damaged-step-00000003")
    assert f"going on from {directory.of(2)}: step 2, 64 tokens, loss " in printed
    aside = directory.path / "damaged-step-00000003"
    assert {path.name: content for path, content in contents(aside).items()} == damaged
    assert directory.steps() == [1, 2, 3, 4]
    assert_same_end(config, made)


def test_every_damaged_one_is_said_and_set_aside(
    made: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = stopped_after(made, 4, tmp_path / "run")
    directory = directory_of(config)
    for step, name in ((4, "a layer"), (3, "half-written"), (2, "the manifest")):
        DAMAGES[name][0](directory.of(step))
    train_alone(config)
    printed = capsys.readouterr().out
    assert printed.count("refused a checkpoint: ") == 3
    assert f"going on from {directory.of(1)}" in printed
    assert len(list(directory.path.glob("damaged-step-*"))) == 3
    assert_same_end(config, made)


def test_a_sound_one_is_taken_though_an_older_one_is_damaged(made: Config, tmp_path: Path) -> None:
    config = stopped_after(made, 3, tmp_path / "run")
    directory = directory_of(config)
    DAMAGES["a layer"][0](directory.of(1))
    train_alone(config)
    assert directory.steps() == [1, 2, 3, 4]
    assert_same_end(config, made)


def test_nothing_is_trained_if_all_are_damaged(made: Config, tmp_path: Path) -> None:
    config = stopped_after(made, 3, tmp_path / "run")
    directory = directory_of(config)
    for step, name in ((1, "a layer"), (2, "the manifest"), (3, "half-written")):
        DAMAGES[name][0](directory.of(step))
    before = contents(Path(config.log.dir))
    for _ in range(2):
        with pytest.raises(
            RunError, match=r"^no checkpoint is sound: .*; to start anew, give another log\.dir$"
        ) as told:
            train_alone(config)
        for step in (1, 2, 3):
            assert str(directory.of(step)) in str(told.value)
    after = contents(Path(config.log.dir))
    assert before.keys() == after.keys()
    assert {path for path in before if before[path] != after[path]} <= {Path(config.log.dir) / "config.toml"}


@pytest.mark.parametrize("name", [name for name in DAMAGES if name != "half-written"])
def test_one_that_was_asked_for_is_taken_or_none(name: str, made: Config, tmp_path: Path) -> None:
    """In the run's own directory and in another's: the newest sound one is offered, not taken."""
    config = stopped_after(made, 3, tmp_path / "run")
    directory = directory_of(config)
    damage, message = DAMAGES[name]
    damage(directory.of(3))
    DAMAGES["half-written"][0](directory.of(2))
    before = contents(directory.path)
    other = dataclasses.replace(config, log=dataclasses.replace(config.log, dir=str(tmp_path / "other")))
    for start, offered in ((config, "auto"), (other, directory.of(1))):
        with pytest.raises(RunError) as told:
            train_alone(resuming(start, directory.of(3)))
        assert f"{message}" in str(told.value)
        assert str(told.value).endswith(
            f"; to go on from the newest sound one, step-00000001: --checkpoint.resume {offered}"
        )
        assert contents(directory.path) == before
        assert not directory_of(other).steps()
    for start, offered in ((other, directory.of(1)), (config, "auto")):  # what was offered can be typed
        train_alone(resuming(start, offered))
        assert Manifest.read(directory_of(start).of(STEPS)).layers == Manifest.read(directory_of(made).of(STEPS)).layers


def test_one_that_was_asked_for_by_a_link_or_a_relative_path_is_taken(
    made: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = directory_of(stopped_after(made, 3, tmp_path / "run"))
    source.mark_best(2)
    monkeypatch.chdir(tmp_path)
    for number, path in enumerate(
        (source.path / "best", Path("run/checkpoints/best"), Path("run/checkpoints/step-00000002"))
    ):
        start = dataclasses.replace(made, log=dataclasses.replace(made.log, dir=f"start-{number}", to="print"))
        train_alone(resuming(start, path))
        assert "going on from" in (printed := capsys.readouterr().out)
        assert "step-00000002: step 2, 64 tokens" in printed
        assert Manifest.read(directory_of(start).of(STEPS)).layers == Manifest.read(directory_of(made).of(STEPS)).layers


def test_neighbours_of_the_one_that_was_asked_for_do_not_matter(
    made: Config, tmp_path: Path, tiny_model: TinyModel, capsys: pytest.CaptureFixture[str]
) -> None:
    source = directory_of(stopped_after(made, 4, tmp_path / "run"))
    DAMAGES["half-written"][0](source.of(4))
    DAMAGES["the manifest"][0](source.of(3))
    foreign = small_run(tiny_model("gpt2", **SMALL | {"n_layer": 2}), tmp_path / "runs" / "foreign", steps=1)
    shutil.rmtree(source.of(1))
    shutil.copytree(train_alone(foreign) / "step-00000001", source.of(1))
    start = dataclasses.replace(made, log=dataclasses.replace(made.log, dir=str(tmp_path / "start"), to="print"))
    capsys.readouterr()
    train_alone(resuming(start, source.of(2)))
    assert "refused" not in capsys.readouterr().out
    assert source.steps() == [1, 2, 3, 4], "nothing of another run is renamed"
