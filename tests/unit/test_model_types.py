"""Law: a model of any type is converted to shards and back bit for bit, and transformers loads it without a warning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from lib.model_types import TYPES, small_config, task_of, tensors_in
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel

from acsgd.layers.recorders import RandomOps
from acsgd.model_classes import ModelClass
from acsgd.shards.config import number_of_blocks, parameter_count
from acsgd.shards.convert import from_hf
from acsgd.shards.export import to_hf

CASES = [
    *((model_type, None) for model_type in TYPES),
    ("gpt2", False),
    ("llama", True),
    ("bloom", False),
]
"""Type, and whether embedding and head are tied; None as its config says."""


def save(directory: Path, model_type: str, tie: bool | None) -> PreTrainedModel:
    """Save a small model, all of its tensors with other values than its constructor gives them."""
    config = small_config(model_type, **({} if tie is None else {"tie_word_embeddings": tie}))
    torch.manual_seed(0)
    model: PreTrainedModel = task_of(model_type).auto_class.from_config(config)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(torch.randn(tensor.shape) / 8)
    model.save_pretrained(directory)
    return model


def stored_once(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the parameters, tied ones once, and the stored buffers of a model."""
    keys = model.state_dict().keys()
    return dict(model.named_parameters()) | {name: x for name, x in model.named_buffers() if name in keys}


@pytest.mark.parametrize(("model_type", "tie"), CASES)
def test_conversion_to_shards_and_back_is_lossless(model_type: str, tie: bool | None, tmp_path: Path) -> None:
    source, shards, back = (tmp_path / name for name in ("source", "shards", "back"))
    model = save(source, model_type, tie)
    shards.mkdir()
    back.mkdir()
    from_hf(source, shards, task=task_of(model_type).name)
    to_hf(shards, back)
    first, again = tensors_in(source), tensors_in(back)
    assert again.keys() == first.keys()
    for name, tensor in first.items():
        assert again[name].dtype == tensor.dtype, name
        assert torch.equal(again[name], tensor), name
    loaded, info = type(model).from_pretrained(back, output_loading_info=True)
    assert not any(info.values()), info
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    in_shards, expected = tensors_in(shards), stored_once(model)
    assert in_shards.keys() == expected.keys()
    assert all(torch.equal(in_shards[name], tensor) for name, tensor in expected.items())


def test_what_transformers_computes_instead_of_saving_it_is_computed(tmp_path: Path) -> None:
    """Marian's tables of sinusoids are parameters, and in no file."""
    source, shards, back = (tmp_path / name for name in ("source", "shards", "back"))
    sizes = TYPES["bart"]
    config = AutoConfig.for_model("marian", vocab_size=96, pad_token_id=0, decoder_start_token_id=0, **sizes)
    model = AutoModelForSeq2SeqLM.from_config(config)
    model.save_pretrained(source)
    shards.mkdir()
    back.mkdir()
    from_hf(source, shards, task="seq2seq")
    to_hf(shards, back)
    first, again = tensors_in(source), tensors_in(back)
    assert again.keys() == first.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in first.items())
    for name in ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"):
        assert name not in first
        assert torch.equal(tensors_in(shards)[name], model.state_dict()[name])


def test_a_cast_leaves_buffers_as_they_are(tmp_path: Path) -> None:
    source, shards, back = (tmp_path / name for name in ("source", "shards", "back"))
    save(source, "deepseek_v3", tie=None)
    shards.mkdir()
    back.mkdir()
    from_hf(source, shards)
    to_hf(shards, back, dtype="bfloat16")
    first, again = tensors_in(source), tensors_in(back)
    assert again.keys() == first.keys()
    assert any(name.endswith("e_score_correction_bias") for name in first)
    for name, tensor in first.items():
        expected = tensor if name.endswith("e_score_correction_bias") else tensor.bfloat16()
        assert again[name].dtype == expected.dtype, name
        assert torch.equal(again[name], expected), name
    assert json.loads((back / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_head_that_the_class_of_a_model_ties_keeps_its_own_values(tmp_path: Path) -> None:
    """The config of T5 1.1 says that its head is not tied; transformers' class ties it unless the values differ."""
    source, shards, back = (tmp_path / name for name in ("source", "shards", "back"))
    model = save(source, "t5", tie=None)
    head = torch.randn(small_config("t5").vocab_size, small_config("t5").d_model)
    save_file(tensors_in(source) | {"lm_head.weight": head}, source / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((source / "config.json").read_text())
    shards.mkdir()
    with pytest.raises(
        ValueError, match=r"config\.json ties lm_head\.weight to shared\.weight, but their values differ"
    ):
        from_hf(source, shards, task="seq2seq")
    (source / "config.json").write_text(json.dumps(fields | {"tie_word_embeddings": False}))
    back.mkdir()
    from_hf(source, shards, task="seq2seq")
    to_hf(shards, back)
    first, again = tensors_in(source), tensors_in(back)
    assert again.keys() == first.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in first.items())
    assert not torch.equal(again["lm_head.weight"], again["shared.weight"])
    assert json.loads((back / "config.json").read_text())["tie_word_embeddings"] is False
    loaded = type(model).from_pretrained(back)
    assert torch.equal(loaded.state_dict()["lm_head.weight"], head)


@pytest.mark.parametrize("model_type", ["gpt2", "deberta-v2"])
def test_a_head_that_the_files_lack_is_new(model_type: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, shards, again = (tmp_path / name for name in ("source", "shards", "again"))
    if model_type == "gpt2":  # with a head for another task, which is left out
        save(source, model_type, tie=False)
        new = {"score.weight"}
    else:  # the body alone
        model = save(source, model_type, tie=None)
        new = {"pooler.dense.weight", "pooler.dense.bias", "classifier.weight", "classifier.bias"}
        body = {name: x for name, x in model.state_dict().items() if name not in new}
        save_file(body, source / "model.safetensors", metadata={"format": "pt"})
    before = torch.random.get_rng_state()
    for target in (shards, again):
        target.mkdir()
        from_hf(source, target, task="classification")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert capsys.readouterr().err.count(": a new head is initialised\n") == 2
    first, second, in_files = tensors_in(shards), tensors_in(again), tensors_in(source)
    assert first.keys() - in_files.keys() == new
    assert in_files.keys() - first.keys() == ({"lm_head.weight"} if model_type == "gpt2" else set())
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
        assert name in new or torch.equal(tensor, in_files[name]), name
    head = first["score.weight" if model_type == "gpt2" else "classifier.weight"]
    assert 0.01 < float(head.std()) < 0.04, "initializer_range of both is 0.02"


def test_a_new_head_does_not_excuse_a_missing_body(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save(source, "deberta-v2", tie=None)
    tensors = tensors_in(source)
    name = "deberta.encoder.layer.1.output.dense.weight"
    save_file({key: x for key, x in tensors.items() if key != name}, source / "model.safetensors")
    with pytest.raises(ValueError, match=f"lacks parameters of the model: {name}"):
        from_hf(source, tmp_path, task="classification")
    save_file(tensors | {name.replace(".1.", ".9."): tensors[name].clone()}, source / "model.safetensors")
    with pytest.raises(ValueError, match=r"would be lost: deberta\.encoder\.layer\.9"):
        from_hf(source, tmp_path, task="classification")


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "mixtral", "deberta-v2", "t5"])
def test_a_model_without_weights_is_built_without_initialising_them(model_type: str) -> None:
    """Random initialization on the meta device takes longer than all the rest of a build."""
    task, config, random = task_of(model_type), small_config(model_type), RandomOps()
    with random:
        task.build(config)
    assert not random.segments
    with random:
        task.auto_class.from_config(config)
    assert random.segments


@pytest.mark.parametrize("model_type", ["gpt2", "opt", "gpt_neo", "qwen3", "t5"])
def test_the_parameters_of_very_many_blocks_are_counted_from_few(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, task = small_config(model_type), task_of(model_type)
    whole = sum(param.numel() for param in task.build(config).parameters())
    assert parameter_count(config, task.name) == whole
    monkeypatch.setattr("acsgd.shards.config.MANY_BLOCKS", 1)
    built, build = list[int](), type(task).build

    def count(task: ModelClass, config: PreTrainedConfig) -> PreTrainedModel:
        built.append(number_of_blocks(config))
        return build(task, config)

    monkeypatch.setattr(ModelClass, "build", count)
    assert parameter_count(config, task.name) == whole
    assert built == [1, 2]
