"""Checkpoints of the replaced systems are converted bit for bit, both ways, and every wrong one is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lib.commands import acsgd
from lib.legacy import OLD, old_deberta, old_model, save_deberta, save_layers, save_stages
from lib.saved import SMALL, assert_describes_its_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

TYPES = sorted(OLD)
BUFFERS = ("attn.bias", "attention.bias", "masked_bias", "inv_freq")
"""Ends of the names of buffers."""


def load(path: Path) -> dict[str, torch.Tensor]:
    content: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    return content


def as_hf(shards: Path, target: Path) -> PreTrainedModel:
    """Return the model in layer shards, loaded by transformers."""
    assert acsgd("convert", "to-hf", shards, target) == (0, "")
    model, loading = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(loading.values()), loading
    return model.eval()


def assert_equal(found: PreTrainedModel, expected: PreTrainedModel) -> None:
    """Compare all tensors, their dtypes, and the logits bit for bit."""
    left, right = found.state_dict(), expected.state_dict()
    assert left.keys() == right.keys()
    for key, x in left.items():
        assert x.dtype == right[key].dtype, key
        assert torch.equal(x, right[key]), key
    tokens = torch.arange(2 * 16).view(2, 16)
    with torch.no_grad():
        assert torch.equal(found(tokens).logits, expected(tokens).logits)


@pytest.mark.parametrize("model_type", TYPES)
def test_a_model_is_imported_bit_for_bit(model_type: str, tmp_path: Path) -> None:
    """Its head has values of its own, though config.json ties it, as their converters wrote it."""
    model = old_model(model_type)
    save_layers(model, tmp_path / "old")
    model.config.tie_word_embeddings = True
    model.config.save_pretrained(tmp_path / "old")
    assert acsgd("convert", "from-legacy", tmp_path / "old", tmp_path / "shards") == (0, "")
    assert_describes_its_model(tmp_path / "shards")
    found = as_hf(tmp_path / "shards", tmp_path / "hf")
    assert not found.config.tie_word_embeddings
    assert_equal(found, model)


@pytest.mark.parametrize("stages", [1, 3, 4])
def test_a_training_checkpoint_is_imported_bit_for_bit(stages: int, tmp_path: Path) -> None:
    """It has neither config.json nor tokenizer, but the state of an optimizer, which is left out."""
    model = old_model("gpt2", dtype=torch.bfloat16)
    import_checkpoint(model, tmp_path, stages)
    assert_equal(as_hf(tmp_path / "shards", tmp_path / "hf"), model)


@pytest.mark.parametrize("model_type", TYPES)
def test_a_training_checkpoint_becomes_a_model_as_their_converters_wrote_it(model_type: str, tmp_path: Path) -> None:
    """With the same names, so that a strict load there finds all buffers, and with the bits of all parameters."""
    model = old_model(model_type, dtype=torch.float16)
    import_checkpoint(model, tmp_path, 2)
    assert acsgd("convert", "to-legacy", tmp_path / "shards", tmp_path / "new") == (0, "")
    save_layers(model, tmp_path / "old")
    before, after = (sorted(path.name for path in (tmp_path / each).glob("*.pt")) for each in ("old", "new"))
    assert before == after
    for name in before:
        old, new = load(tmp_path / "old" / name), load(tmp_path / "new" / name)
        assert {key: x.shape for key, x in old.items()} == {key: x.shape for key, x in new.items()}
        parameters = {key: x for key, x in old.items() if not key.endswith(BUFFERS)}
        for key, x in parameters.items():
            assert x.dtype == new[key].dtype, key
            assert torch.equal(x, new[key]), key
        for key in old.keys() - parameters.keys():  # a load converts them to its dtype
            is_equal = torch.allclose(old[key].float(), new[key].float(), rtol=1e-3)
            assert is_equal or (key.endswith("masked_bias") and new[key] < -1e3), key
        size = sum(x.nbytes for x in new.values())
        assert (tmp_path / "new" / name).stat().st_size < size + 2**14, "a file holds more than its tensors"


def import_checkpoint(model: PreTrainedModel, directory: Path, stages: int) -> None:
    """Write a training checkpoint, and convert it to layer shards."""
    save_stages(model, directory / "checkpoint_10", stages)
    model.config.save_pretrained(directory / "config")
    arguments = (directory / "checkpoint_10", directory / "shards", "--config", directory / "config")
    assert acsgd("convert", "from-legacy", *arguments) == (0, "")


def test_tied_weights_are_written_to_each_file(tmp_path: Path) -> None:
    model = old_model("gpt2", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "hf")
    assert acsgd("convert", "from-hf", tmp_path / "hf", tmp_path / "shards") == (0, "")
    assert acsgd("convert", "to-legacy", tmp_path / "shards", tmp_path / "old") == (0, "")
    embedding = load(tmp_path / "old" / "pytorch_embs.pt")["wte.weight"]
    assert torch.equal(embedding, model.get_input_embeddings().weight)
    assert torch.equal(embedding, load(tmp_path / "old" / "pytorch_lm_head.pt")["lm_head.weight"])
    assert acsgd("convert", "from-legacy", tmp_path / "old", tmp_path / "again") == (0, "")
    assert_equal(as_hf(tmp_path / "again", tmp_path / "hf2"), model)


Change = Callable[[Path], object]


def change(name: str, edit: Callable[[dict[str, Any]], object]) -> Change:
    """Return a function that changes the tensors in a file of a directory."""

    def apply(directory: Path) -> None:
        tensors = load(directory / name)
        edit(tensors)
        torch.save(tensors, directory / name)

    return apply


def configure(**options: Any) -> Change:
    """Return a function that changes config.json."""

    def apply(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | options))

    return apply


def remove(*names: str) -> Change:
    return lambda directory: [(directory / name).unlink() for name in names]


def cut(name: str) -> Change:
    return lambda directory: os.truncate(directory / name, (directory / name).stat().st_size // 2)


class Code:
    """An object that runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch executed",)


LAYERS: dict[str, tuple[Change, str]] = {
    "layers missing": (
        remove("pytorch_1.pt", "pytorch_3.pt", "pytorch_lm_head.pt"),
        "{old} lacks layers of the model in config.json: pytorch_1.pt, pytorch_3.pt, pytorch_lm_head.pt; copy them",
    ),
    "a layer too much": (
        lambda old: (old / "pytorch_4.pt").write_bytes((old / "pytorch_3.pt").read_bytes()),
        "{old} holds layers that the model in config.json does not have: pytorch_4.pt; give the config of the model, "
        "or remove them",
    ),
    "a file of another type of model": (
        lambda old: (old / "pytorch_conv.pt").write_bytes((old / "pytorch_3.pt").read_bytes()),
        "{old} holds layers that the model in config.json does not have: pytorch_conv.pt; give the config of the "
        "model, or remove them",
    ),
    "a tensor missing": (
        change("pytorch_2.pt", lambda tensors: tensors.pop("mlp.c_fc.bias")),
        "{old}/pytorch_2.pt lacks tensors of the model: mlp.c_fc.bias; copy the file again",
    ),
    "a tensor too much": (
        change("pytorch_embs.pt", lambda tensors: tensors.update({"wxe.weight": torch.ones(2)})),
        "{old}/pytorch_embs.pt holds tensors that GPT2LMHeadModel does not have and that would be lost: wxe.weight; "
        "give the config of the model",
    ),
    "another shape": (
        configure(n_positions=16),
        "{old}/pytorch_embs.pt: wpe.weight has shape (64, 16), but by config.json it has (16, 16); give config and "
        "weights of the same model",
    ),
    "a tensor of integers": (
        change("pytorch_0.pt", lambda tensors: tensors.update({"ln_1.bias": torch.ones(16, dtype=torch.int8)})),
        "{old}/pytorch_0.pt: ln_1.bias is of dtype torch.int8; acsgd trains floating-point weights",
    ),
    "NaN": (
        change("pytorch_3.pt", lambda tensors: tensors["ln_1.bias"].fill_(float("nan"))),
        "{old}/pytorch_3.pt: transformer.h.3.ln_1.bias has values that are not finite; give weights without NaN and "
        "infinities",
    ),
    "another mask": (
        change("pytorch_3.pt", lambda tensors: tensors["attn.bias"].fill_(1)),
        "{old}/pytorch_3.pt: attn.bias is not what a model of this config.json computes, so the model was trained with "
        "another attention; give its config, or remove the tensor to convert it nevertheless",
    ),
    "a truncated file": (
        cut("pytorch_3.pt"),
        "{old}/pytorch_3.pt is not a complete file of torch.save; copy it or download it again",
    ),
    "code": (
        change("pytorch_3.pt", lambda tensors: tensors.update({"x": Code()})),
        "{old}/pytorch_3.pt holds posix.system besides tensors, which could run code, and is not read; save a dict of "
        "tensors, or download the model in safetensors",
    ),
    "very many blocks": (
        configure(n_layer=90_000),
        "{old}/config.json says that the model has 90000 blocks, more than any of the replaced systems had; give "
        "config and weights of the same model",
    ),
    "no config": (
        remove("config.json"),
        "{old} has no config.json; give the directory of the model's with --config",
    ),
    "a type without a layout": (
        configure(model_type="mistral"),
        "{old}/config.json is of a model of type 'mistral', for which there is no old layout; there is one for gpt2, "
        "gpt_neo, gptj, gpt_neox, opt, llama, deberta-v2",
    ),
    "both layouts": (
        lambda old: (old / "prank_0_checkpoint.pt").write_bytes((old / "pytorch_3.pt").read_bytes()),
        "{old} holds both pytorch_*.pt and prank_*_checkpoint.pt files; remove one kind",
    ),
}
"""Wrong models: change of the directory, and what is printed."""

STAGES: dict[str, tuple[Change, str]] = {
    "a stage missing": (
        remove("prank_1_checkpoint.pt"),
        "{old} lacks stages of the model: prank_1_checkpoint.pt; copy them",
    ),
    "the last stage missing": (
        remove("prank_2_checkpoint.pt"),
        "{old} holds 5 layers, with embedding and head, but the model in config.json has 6: it lacks the last 1 "
        "(lm_head); copy all of its prank_*_checkpoint.pt files, or give its config",
    ),
    "fewer layers": (
        configure(n_layer=2),
        "{old} holds 6 layers, with embedding and head, but the model in config.json has only 4; give the config of "
        "the model",
    ),
    "a layer missing in a stage": (
        change("prank_0_checkpoint.pt", lambda t: [t.pop(key) for key in [*t] if key.startswith("1.")]),
        "{old}/prank_0_checkpoint.pt lacks layers of its stage: 1; copy it again",
    ),
    "a tensor missing": (
        change("prank_1_checkpoint.pt", lambda tensors: tensors.pop("1.mlp.c_fc.bias")),
        "{old}/prank_1_checkpoint.pt lacks tensors of the model: 1.mlp.c_fc.bias; copy the file again",
    ),
    "a tensor too much": (
        change("prank_2_checkpoint.pt", lambda tensors: tensors.update({"0.x": torch.ones(2)})),
        "{old}/prank_2_checkpoint.pt holds tensors that GPT2LMHeadModel does not have and that would be lost: 0.x; "
        "give the config of the model",
    ),
    "another order": (
        lambda old: (old / "prank_0_checkpoint.pt").rename(old / "prank_3_checkpoint.pt"),
        "{old} lacks stages of the model: prank_0_checkpoint.pt; copy them",
    ),
    "names of another program": (
        change("prank_0_checkpoint.pt", lambda tensors: tensors.update({"step": torch.ones(1)})),
        "{old}/prank_0_checkpoint.pt holds step, whose name does not start with the number of a layer; give a "
        "checkpoint of CocktailSGD or OpenChatKit",
    ),
    "the parent of checkpoints": (
        lambda old: [path.unlink() for path in old.glob("prank*")] + [(old / "latest").write_text("10")],
        "{old} holds neither pytorch_*.pt nor prank_*_checkpoint.pt files; give the directory of one of its "
        "checkpoints, {old}/checkpoint_*",
    ),
    "nothing": (
        lambda old: [path.unlink() for path in old.glob("prank*")],
        "{old} holds neither pytorch_*.pt nor prank_*_checkpoint.pt files; give a model or a training checkpoint of "
        "AC-SGD, CocktailSGD or OpenChatKit",
    ),
}
"""Wrong training checkpoints of three stages: change of the directory, and what is printed."""


@pytest.fixture(scope="module")
def gpt2() -> PreTrainedModel:
    return old_model("gpt2")


def assert_refused(old: Path, message: str, tmp_path: Path) -> None:
    """Assert that a directory is refused with one sentence, and that nothing is written and no code executed."""
    assert acsgd("convert", "from-legacy", old, tmp_path / "new") == (2, f"error: {message.format(old=old)}\n")
    assert os.listdir(tmp_path) == ["old"]
    assert not Path("executed").exists()


@pytest.mark.parametrize("case", LAYERS)
def test_a_wrong_model_is_refused(case: str, gpt2: PreTrainedModel, tmp_path: Path) -> None:
    old = tmp_path / "old"
    save_layers(gpt2, old)
    gpt2.config.save_pretrained(old)
    edit, message = LAYERS[case]
    edit(old)
    assert_refused(old, message, tmp_path)


@pytest.mark.parametrize("case", STAGES)
def test_a_wrong_checkpoint_is_refused(case: str, gpt2: PreTrainedModel, tmp_path: Path) -> None:
    old = tmp_path / "old"
    save_stages(gpt2, old, 3)
    gpt2.config.save_pretrained(old)
    edit, message = STAGES[case]
    edit(old)
    assert_refused(old, message, tmp_path)


def test_a_wrong_rotary_base_is_refused(tmp_path: Path) -> None:
    """It changes no shape, and the model would compute something else."""
    model = old_model("llama")
    save_layers(model, tmp_path / "old")
    model.config.rope_parameters["rope_theta"] = 500000.0
    model.config.save_pretrained(tmp_path / "old")
    code, printed = acsgd("convert", "from-legacy", tmp_path / "old", tmp_path / "new")
    assert code == 2
    assert "self_attn.rotary_emb.inv_freq is not what a model of this config.json computes" in printed


def test_a_type_without_a_layout_is_refused_on_the_way_back(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    assert acsgd("convert", "from-hf", tiny_model("mistral", num_hidden_layers=1), shards) == (0, "")
    code, printed = acsgd("convert", "to-legacy", shards, tmp_path / "old")
    assert code == 2
    assert "is of a model of type 'mistral', for which there is no old layout" in printed
    assert os.listdir(tmp_path) == ["shards"]


def test_a_model_for_another_task_is_refused_on_the_way_back(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """The old layout has no place for its head."""
    arguments = (tiny_model("gpt2", **SMALL, pad_token_id=0), tmp_path / "shards", "--task", "classification")
    assert acsgd("convert", "from-hf", *arguments)[0] == 0
    code, printed = acsgd("convert", "to-legacy", tmp_path / "shards", tmp_path / "old")
    assert code == 2
    assert "is a model for the task classification; the old layout of gpt2 is of the task lm" in printed


def test_a_deberta_is_imported_bit_for_bit_with_a_new_head(tmp_path: Path) -> None:
    model = old_deberta()
    save_deberta(model, tmp_path / "old")
    stated = "a new head is initialised"
    for target in ("shards", "again"):
        code, printed = acsgd("convert", "from-legacy", tmp_path / "old", tmp_path / target)
        assert code == 0
        assert f"lacks pooler.dense.weight, pooler.dense.bias, classifier.weight and 1 more: {stated}" in printed
    first, second = (tmp_path / each / "head.safetensors" for each in ("shards", "again"))
    assert first.read_bytes() == second.read_bytes(), "a new head is the same in each conversion"
    assert acsgd("convert", "to-hf", tmp_path / "shards", tmp_path / "hf") == (0, "")
    found = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    model.load_state_dict({key: x for key, x in found.state_dict().items() if "deberta" not in key}, strict=False)
    assert_equal(found, model)

    assert acsgd("convert", "to-legacy", tmp_path / "shards", tmp_path / "new") == (0, "")
    for path in (tmp_path / "old").glob("*.pt"):
        old, new = load(path), load(tmp_path / "new" / path.name)
        assert old.keys() == new.keys()
        assert all(torch.equal(old[key], new[key]) for key in old)
    assert acsgd("convert", "from-legacy", tmp_path / "new", tmp_path / "third") == (0, "")
    assert first.read_bytes() == (tmp_path / "third" / "head.safetensors").read_bytes(), "the head is kept"


@pytest.mark.parametrize("name", ["pytorch_rel_embs.pt", "pytorch_ln.pt", "pytorch_conv.pt"])
def test_a_deberta_without_one_of_its_files_is_refused(name: str, tmp_path: Path) -> None:
    save_deberta(old_deberta(), tmp_path / "old")
    (tmp_path / "old" / name).unlink()
    assert_refused(tmp_path / "old", f"{{old}} lacks layers of the model in config.json: {name}; copy them", tmp_path)
