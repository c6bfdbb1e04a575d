"""Laws of layer shards: conversion to shards and back is lossless, and the layers together equal the original model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lib.model_types import TYPES, small_config, task_of
from lib.models import TINY
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from acsgd.errors import RunError
from acsgd.layers.composed import ComposedModel, State
from acsgd.model_classes import MODEL_CLASSES, ModelClass
from acsgd.shards.config import read_config
from acsgd.shards.convert import from_hf
from acsgd.shards.disk import ShardDirectory
from acsgd.shards.export import to_hf
from acsgd.shards.layer_tensors import layer_tensors
from acsgd.shards.load import LayerLoader, RandomWeights, WeightSource
from acsgd.shards.manifest import MANIFEST, Manifest
from acsgd.shards.weights import Weight

TinyModel = Callable[..., Path]
Convert = Callable[[Path], Path]
CPU = torch.device("cpu")
CASES: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in TINY),
    *((family, {"tie_word_embeddings": family != "gpt2"}) for family in TINY),
]


@pytest.fixture
def convert(tmp_path: Path) -> Convert:
    def to_shards(source: Path) -> Path:
        target = tmp_path / "shards"
        target.mkdir()
        from_hf(source, target)
        return target

    return to_shards


def logits(directory: Path, source: WeightSource) -> tuple[Tensor, list[Weight]]:
    """Return the logits of a model run layer by layer, as stages do, and its weights."""
    config, task = read_config(directory), MODEL_CLASSES["lm"]
    model, description = task.build(config).eval(), task.layers(config)
    composed = ComposedModel(model, description)
    loader = LayerLoader(model, description, source, device=CPU, dtype=torch.float32)
    inputs, layers = {"input_ids": tokens()}, range(len(description.layers))
    weights = [weight for index in layers for weight in loader.load(index).weights]
    with torch.no_grad():
        state: State = {}
        context = composed.context(inputs, layers)
        for index in layers:
            state = composed.call(index, state, inputs, context)
    return state["logits"], weights


def tokens() -> Tensor:
    return torch.randint(0, 512, (2, 40), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("family", "options"), CASES)
def test_conversion_to_shards_and_back_is_lossless(
    family: str, options: dict[str, Any], tiny_model: TinyModel, convert: Convert, tmp_path: Path
) -> None:
    source = tiny_model(family, **options)
    shards, back = convert(source), tmp_path / "back"
    back.mkdir()
    to_hf(shards, back)
    first, again = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (source, back))
    assert first.state_dict().keys() == again.state_dict().keys()
    for key, tensor in first.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[key]), key
    with torch.no_grad():
        expected = first(tokens()).logits
        assert torch.equal(again(tokens()).logits, expected)
    composed, weights = logits(shards, ShardDirectory(shards))
    assert (composed - expected).abs().max() <= 1e-5
    assert len({weight.key for weight in weights}) == len(weights) == len(list(first.parameters()))
    assert AutoTokenizer.from_pretrained(back)("for a while").input_ids


def test_there_is_one_file_per_layer_and_the_manifest_names_all(tiny_model: TinyModel, convert: Convert) -> None:
    shards = convert(tiny_model())
    manifest = ShardDirectory(shards).manifest
    assert [*manifest.layers] == ["embed", *(f"block-{i:05d}" for i in range(6)), "head"]
    assert {entry.file for entry in manifest.layers.values()} == {path.name for path in shards.glob("*.safetensors")}
    assert {entry.file for entry in manifest.files} | {MANIFEST} == {path.name for path in shards.iterdir()}
    assert (manifest.step, manifest.run, manifest.replicas) == (0, None, {})
    assert Manifest.read(shards) == manifest


def test_gpt2_in_the_format_of_the_hub_converts(tiny_model: TinyModel, convert: Convert, tmp_path: Path) -> None:
    """Names in the hub's file lack the prefix "transformer."; it has buffers that transformers no longer uses."""
    model = tiny_model()
    old = tmp_path / "old"
    old.mkdir()
    (old / "config.json").write_bytes((model / "config.json").read_bytes())
    tensors = {key.removeprefix("transformer."): value for key, value in load_file(model / "model.safetensors").items()}
    save_file(tensors | {"h.0.attn.bias": torch.ones(1, 1, 64, 64)}, old / "model.safetensors")
    original, _ = logits(model, ShardDirectory(convert(model)))
    target = tmp_path / "old-shards"
    target.mkdir()
    from_hf(old, target)
    assert torch.equal(logits(target, ShardDirectory(target))[0], original)


def test_tensors_that_would_be_lost_or_are_missing_are_named(tiny_model: TinyModel, tmp_path: Path) -> None:
    model, bad = tiny_model(), tmp_path / "bad"
    bad.mkdir()
    (bad / "config.json").write_bytes((model / "config.json").read_bytes())
    tensors = load_file(model / "model.safetensors")
    save_file(tensors | {"value_head.weight": torch.ones(2)}, bad / "model.safetensors")
    with pytest.raises(ValueError, match=r"would be lost: value_head.weight"):
        from_hf(bad, tmp_path)
    del tensors["transformer.h.3.mlp.c_fc.weight"]
    save_file(tensors, bad / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks parameters of the model: .*h\.3\.mlp\.c_fc\.weight"):
        from_hf(bad, tmp_path)


def test_a_head_that_is_tied_by_config_but_not_in_value_is_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    model, bad = tiny_model(), tmp_path / "bad"
    bad.mkdir()
    (bad / "config.json").write_bytes((model / "config.json").read_bytes())
    tensors = load_file(model / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["transformer.wte.weight"] + 1}, bad / "model.safetensors")
    with pytest.raises(ValueError, match=r"ties lm_head\.weight to transformer\.wte\.weight, but their values differ"):
        from_hf(bad, tmp_path)


def test_casting_on_export_is_rounding_to_nearest(tiny_model: TinyModel, convert: Convert, tmp_path: Path) -> None:
    source, back = tiny_model("llama"), tmp_path / "back"
    shards = convert(source)
    back.mkdir()
    to_hf(shards, back, dtype="bfloat16")
    original = AutoModelForCausalLM.from_pretrained(source).state_dict()
    model = AutoModelForCausalLM.from_pretrained(back)
    assert model.dtype == torch.bfloat16
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, original[key].bfloat16()), key


@pytest.mark.parametrize("corruption", ["flip", "truncate", "remove"])
def test_a_corrupt_file_is_named_and_refused(corruption: str, tiny_model: TinyModel, convert: Convert) -> None:
    shards = convert(tiny_model())
    victim = shards / "block-00002.safetensors"
    content = bytearray(victim.read_bytes())
    if corruption == "remove":
        victim.unlink()
    elif corruption == "truncate":
        victim.write_bytes(content[:-1])
    else:
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
    with pytest.raises(RunError, match=r"block-00002\.safetensors is (corrupt|missing)"):
        logits(shards, ShardDirectory(shards))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_weights_keep_no_file_mapped(dtype: torch.dtype, tiny_model: TinyModel, convert: Convert) -> None:
    """A master weight in a mapped file would occupy memory twice, and change if the file is replaced."""
    directory = convert(tiny_model())
    config = read_config(directory)
    model, description = MODEL_CLASSES["lm"].build(config), MODEL_CLASSES["lm"].layers(config)
    loader = LayerLoader(model, description, ShardDirectory(directory), device=CPU, dtype=dtype, has_masters=True)
    held = [loader.load(index) for index in range(len(description.layers))]
    assert str(directory) not in Path("/proc/self/maps").read_text()
    for weight in (weight for layer in held for weight in layer.weights):
        assert torch.equal(weight.param, weight.master.to(dtype))


def test_a_directory_without_shards_is_refused(
    tiny_model: TinyModel, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"is not a checkpoint or layer-shard directory: it has no manifest\.json$"):
        ShardDirectory(tmp_path)
    with pytest.raises(ValueError, match=r"nowhere does not exist; give a checkpoint or a layer-shard directory$"):
        ShardDirectory(tmp_path / "nowhere")
    (tmp_path / MANIFEST).write_text('{"name": "of another program"}')
    with pytest.raises(ValueError, match=r"manifest\.json is not the manifest of a layer-shard directory$"):
        ShardDirectory(tmp_path)
    (tmp_path / MANIFEST).write_text('{"format": "acsgd-shards", "version": 1}')
    with pytest.raises(ValueError, match=r"written in version 1 of the format, .* version 6; convert the model again"):
        ShardDirectory(tmp_path)
    shards = convert(tiny_model())
    manifest = Manifest.read(shards)
    monkeypatch.setattr("acsgd.shards.manifest.VERSION", 7)
    manifest.write(shards)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"written in version 7 of the format, .* version 6; upgrade acsgd$"):
        ShardDirectory(shards)


@pytest.mark.parametrize("family", TINY)
def test_new_weights_depend_on_seed_and_layer_alone_and_are_drawn_as_transformers_does(
    family: str, tiny_model: TinyModel
) -> None:
    config, task = read_config(tiny_model(family)), MODEL_CLASSES["lm"]
    model, description = task.build(config), task.layers(config)

    def draw(seed: int, index: int) -> dict[str, Tensor]:
        source = RandomWeights(task, config, description, seed=seed)
        return source.tensors(description.layers[index].name, layer_tensors(model, description, index))

    drawn: dict[str, Tensor] = {}
    for index in reversed(range(len(description.layers))):  # in any order
        drawn |= draw(1, index)
    assert all(torch.equal(drawn[key], tensor) for key, tensor in draw(1, 4).items())
    theirs = dict(AutoModelForCausalLM.from_config(config).named_parameters())
    assert drawn.keys() == theirs.keys()
    for key, tensor in drawn.items():
        # standard errors: of a deviation std / sqrt(2n), of a mean std / sqrt(n); five of them
        n, std = tensor.numel(), float(theirs[key].std()) if theirs[key].numel() > 1 else 0.0
        assert abs(float(tensor.std()) - std) <= 5 * 2 * std / (2 * n) ** 0.5, key
        assert abs(float(tensor.mean() - theirs[key].mean())) <= 5 * 2 * std / n**0.5 + 1e-7, key
    assert any(not torch.equal(drawn[key], tensor) for key, tensor in draw(2, 4).items())


@pytest.mark.parametrize("model_type", TYPES)
def test_every_new_weight_is_set(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the code between two blocks, too, as the last norm of an encoder."""
    task, config = task_of(model_type), small_config(model_type)
    model, description = task.build(config), task.layers(config)
    empty = partial(torch.full_like, fill_value=torch.nan)
    monkeypatch.setattr(torch, "empty_like", lambda x, **options: empty(x, **options))
    source = RandomWeights(task, config, description, seed=1)
    for layer in description.layers:
        for key, tensor in source.tensors(layer.name, layer_tensors(model, description, layer.index)).items():
            assert tensor.isfinite().all(), (layer.name, key)


def test_new_weights_of_all_layers_build_the_structure_of_the_model_once(tiny_model: TinyModel) -> None:
    """Once per layer, a model of 5000 blocks would take hours."""
    built: list[PreTrainedModel] = []

    class Counted(ModelClass):
        def build(self, config: PreTrainedConfig) -> PreTrainedModel:
            built.append(super().build(config))
            return built[-1]

    config, lm = read_config(tiny_model()), MODEL_CLASSES["lm"]
    model, description = lm.build(config), lm.layers(config)
    source = RandomWeights(Counted(*dataclasses.astuple(lm)), config, description, seed=1)
    for layer in description.layers:
        source.tensors(layer.name, layer_tensors(model, description, layer.index))
    assert len(built) == 1
    assert all(param.is_meta for param in built[0].parameters()), "it keeps weights"
