"""Law: state of replicas that is missing or does not fit is found before its use, in every data-parallel mode."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lib.cache import share_cache
from lib.ranks import on_ranks
from lib.resume import TinyModel, train_ranks
from lib.saved import SMALL, rewrite_tensors, small_run
from safetensors.torch import load_file
from torch import Tensor

from acsgd.config.options import Config, ReplicaConfig
from acsgd.config.spec import from_spec
from acsgd.dp import MODES
from acsgd.errors import CorruptFileError
from acsgd.io.checkpoint.contents import LOCAL_OPTIMIZER, Contents, build_tensors
from acsgd.io.checkpoint.directory import CheckpointDirectory
from acsgd.io.checkpoint.inspect import inspect
from acsgd.shards.config import read_config
from acsgd.shards.disk import ShardDirectory
from acsgd.shards.manifest import Manifest

SPECS = [
    "allreduce",
    "powersgd:rank=1",
    "quantized:exact_steps=1",
    "cocktail_grad:topk=0.1",
    "local",
    "cocktail",
    "diloco:inner=4,delay=2",
    "sparseloco:inner=2",
]
ON_STAGES = ("powersgd:rank=1", "diloco:inner=4,delay=2")
FEW = ("allreduce", *ON_STAGES)
STEPS = 2


@pytest.fixture(scope="module", params=[FEW, pytest.param(SPECS, marks=pytest.mark.soak)], ids=["few", "all"])
def runs(
    request: pytest.FixtureRequest, tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Config]:
    """Return a run of each mode on 1 or 2 stages x 2 replicas, of a model with a tied weight, saved after each step."""
    directory, model = tmp_path_factory.mktemp("contents"), tiny_model("gpt2", **SMALL | {"n_layer": 2})
    configs = {}
    for number, spec in enumerate(request.param):
        config = small_run(model, directory / f"run-{number}" / "run", steps=STEPS)
        share_cache(model, Path(config.log.dir))
        configs[spec] = dataclasses.replace(
            config,
            data=dataclasses.replace(config.data, batch=4),
            pp=dataclasses.replace(config.pp, micro=1, stages=2 if spec in ON_STAGES else 1),
            dp=ReplicaConfig(spec),
        )
    for stages in (1, 2):
        ours = [config for config in configs.values() if config.pp.stages == stages]
        on_ranks(2 * stages, train_ranks, directory / f"store-{stages}", ours)
    return configs


def directory_of(config: Config) -> CheckpointDirectory:
    return CheckpointDirectory(Path(config.log.dir) / "checkpoints")


def contents_of(checkpoint: Path) -> Contents:
    shards = ShardDirectory(checkpoint)
    return Contents.of(shards, build_tensors(shards.manifest, read_config(checkpoint)))


def error_of(contents: Contents, checkpoint: Path, name: str) -> str:
    """Return the error of the check of a layer, or of that of a tied weight, empty if it is valid.

    contents: what the checkpoint must hold.
    """
    model = contents.shards.manifest.model
    layer = name if name in contents.shards.manifest.layers else model.first_holder(name).name
    try:
        dataclasses.replace(contents, shards=ShardDirectory(checkpoint)).check(model.index(layer))
    except CorruptFileError as error:
        return str(error)
    return ""


def assert_valid(checkpoint: Path) -> None:
    (report,) = inspect(checkpoint)
    assert report.errors == [], checkpoint


def test_all_modes_with_state_are_covered() -> None:
    stateful = {name for name, mode in MODES.items() if mode().states}
    assert {spec.partition(":")[0] for spec in SPECS} == stateful | {"allreduce"}


def test_every_mode_saves_what_it_declares(runs: dict[str, Config]) -> None:
    for spec, config in runs.items():
        checkpoint = directory_of(config).of(STEPS)
        assert_valid(checkpoint)
        states = {state.name: state.required for state in from_spec(spec, MODES, key="dp.mode").states}
        files = list(checkpoint.glob("*.replica-*"))
        required = {name for name, is_required in states.items() if is_required}
        for file in files:
            names = {name.partition("/")[0] for name in load_file(file) if not name.startswith(LOCAL_OPTIMIZER)}
            assert required <= names <= states.keys(), (spec, file)
        assert bool(files) == bool(states), spec


def shorten(x: Tensor) -> Tensor:
    return x.flatten()[:-1].clone() if x.dim() else x.expand(2).clone()


def with_inf(x: Tensor) -> Tensor:
    return torch.full_like(x, torch.inf)


def test_state_of_a_replica_that_does_not_fit_is_named(runs: dict[str, Config], tmp_path: Path) -> None:
    """One tensor of each kind, on the second replica: absent, of another shape, not finite."""
    changes: dict[str, Callable[[Tensor], Tensor] | None] = {"lacks": None, "shape": shorten, "infinite": with_inf}
    for number, (spec, config) in enumerate(runs.items()):
        source = directory_of(config).of(STEPS)
        contents = contents_of(source)
        file = source / "block-00001.replica-00001.safetensors"
        kinds = {name.partition("/")[0]: name for name in load_file(file)} if file.exists() else {}
        for kind, name in kinds.items():
            for change, how in changes.items():
                checkpoint = Path(shutil.copytree(source, tmp_path / f"{number}-{kind}-{change}" / source.name))

                def apply(tensors: dict[str, Tensor], name: str = name, how: Any = how) -> None:
                    tensor = tensors.pop(name)
                    if how is not None:
                        tensors[name] = how(tensor)

                rewrite_tensors(checkpoint / file.name, apply)
                error = error_of(contents, checkpoint, "block-00001")
                assert error.startswith(f"{checkpoint / file.name} is invalid: "), (spec, kind, change)
                assert name in error, (spec, kind, change)


def test_a_replica_whose_state_is_not_listed_is_named(runs: dict[str, Config], tmp_path: Path) -> None:
    for number, (spec, config) in enumerate(runs.items()):
        source = directory_of(config).of(STEPS)
        contents = contents_of(source)
        manifest = contents.shards.manifest
        for layer, files in manifest.replicas.items():
            checkpoint = Path(shutil.copytree(source, tmp_path / f"{number}-{layer}" / source.name))
            dataclasses.replace(manifest, replicas=manifest.replicas | {layer: files[:1]}).write(checkpoint)
            expected = f"manifest.json is invalid: it lists the state of 1 replicas for {layer}, but 2 saved it"
            assert error_of(contents, checkpoint, layer) == f"{checkpoint}/{expected}", spec


@pytest.mark.parametrize("spec", [ON_STAGES[0], pytest.param(ON_STAGES[1], marks=pytest.mark.soak)])
def test_all_ranks_resume_from_an_older_checkpoint_if_a_residual_does_not_fit(
    spec: str, runs: dict[str, Config], tmp_path: Path
) -> None:
    """Only the ranks of one stage read it. The resumed run saves the same again."""
    config = runs[spec]
    run = Path(shutil.copytree(config.log.dir, tmp_path / "run", symlinks=True))
    resumed = dataclasses.replace(config, log=dataclasses.replace(config.log, dir=str(run)))
    share_cache(Path(config.model.name), run)
    checkpoint = directory_of(resumed).of(STEPS)
    expected = Manifest.read(checkpoint)
    file = checkpoint / "block-00001.replica-00001.safetensors"
    name = next(name for name in load_file(file) if not name.startswith(LOCAL_OPTIMIZER))
    rewrite_tensors(file, lambda tensors: tensors.update({name: with_inf(tensors[name])}))
    on_ranks(4, train_ranks, tmp_path / "store", [resumed])
    assert Manifest.read(checkpoint) == expected
    assert (checkpoint.parent / f"corrupt-{checkpoint.name}").is_dir()


def test_a_run_resumes_in_every_other_mode_after_one_without_state(runs: dict[str, Config], tmp_path: Path) -> None:
    plain, configs = runs["allreduce"], []
    for number, spec in enumerate(["sharded_ps", "central_ps", *SPECS[1:]]):
        run = tmp_path / f"run-{number}" / "run"
        share_cache(Path(plain.model.name), run)
        config = dataclasses.replace(
            plain,
            log=dataclasses.replace(plain.log, dir=str(run)),
            dp=ReplicaConfig(spec),
            pp=dataclasses.replace(plain.pp, stages=1),
        )
        shutil.copytree(directory_of(plain).of(1), directory_of(config).of(1))
        configs.append(config)
    trained = on_ranks(2, train_ranks, tmp_path / "store", configs)
    for config, batches in zip(configs, trained[0], strict=True):
        assert [step for step, _ in batches] == [1], config.dp.mode
        assert_valid(directory_of(config).of(STEPS))


def test_with_allreduce_a_run_resumes_as_on_one_replica(runs: dict[str, Config], tmp_path: Path) -> None:
    """What replicas had not exchanged is folded into the weights alike, and so is their optimizer state."""
    several, single = list[Config](), list[Config]()
    for spec, config in runs.items():
        if spec == "allreduce" or spec.startswith("powersgd"):  # which keeps gradients, see the note of the resumed run
            continue
        for started, mode in (several, "allreduce"), (single, spec):
            run = tmp_path / f"{len(started)}-{mode.partition(':')[0]}" / "run"
            share_cache(Path(config.model.name), run)
            pp, log = dataclasses.replace(config.pp, stages=1), dataclasses.replace(config.log, dir=str(run))
            started.append(dataclasses.replace(config, dp=ReplicaConfig(mode), pp=pp, log=log))
            shutil.copytree(directory_of(config).of(1), directory_of(started[-1]).of(1))
            assert any(directory_of(config).of(1).glob("*.replica-00001.safetensors"))
    on_ranks(2, train_ranks, tmp_path / "store-2", several)
    on_ranks(1, train_ranks, tmp_path / "store-1", single)
    for config, alone in zip(several, single, strict=True):
        files = [ShardDirectory(directory_of(each).of(STEPS)) for each in (config, alone)]
        assert not files[0].manifest.replicas, "all-reduce has no state"
        for layer in files[0].manifest.layers:
            ours, theirs = ({**each.read_layer(layer), **_flat(each.state(layer))} for each in files)
            assert ours.keys() == theirs.keys()
            for key, tensor in ours.items():
                assert (tensor - theirs[key]).norm() <= 1e-5 * tensor.norm(), (alone.dp.mode, key)


def _flat(state: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{name} {key}": tensor for name, by_key in state.items() for key, tensor in by_key.items()}
