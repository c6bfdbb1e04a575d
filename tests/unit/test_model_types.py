"""Law: a model of any type is converted to shards and back bit for bit, and transformers loads it without a warning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from lib.model_types import TYPES, small_config, task_of
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from acsgd.shards.convert import from_hf
from acsgd.shards.export import to_hf
from acsgd.tasks import TASKS

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


def stored(directory: Path) -> dict[str, Tensor]:
    """Return all tensors in the files of a directory."""
    tensors = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
    return tensors


def stored_once(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the parameters, tied ones once, and the stored buffers of a model."""
    keys = model.state_dict().keys()
    return dict(model.named_parameters()) | {name: x for name, x in model.named_buffers() if name in keys}


@pytest.mark.parametrize(("model_type", "tie"), CASES)
def test_conversion_to_shards_and_back_is_lossless(
    model_type: str, tie: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TASKS, "task", task_of(model_type))  # type: ignore[arg-type]
    source, shards, back = (tmp_path / name for name in ("source", "shards", "back"))
    model = save(source, model_type, tie)
    shards.mkdir()
    back.mkdir()
    from_hf(source, shards, task="task")
    to_hf(shards, back)
    first, again = stored(source), stored(back)
    assert again.keys() == first.keys()
    for name, tensor in first.items():
        assert again[name].dtype == tensor.dtype, name
        assert torch.equal(again[name], tensor), name
    loaded, info = type(model).from_pretrained(back, output_loading_info=True)
    assert not any(info.values()), info
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    in_shards, expected = stored(shards), stored_once(model)
    assert in_shards.keys() == expected.keys()
    assert all(torch.equal(in_shards[name], tensor) for name, tensor in expected.items())


def test_a_head_that_the_class_of_a_model_ties_keeps_its_own_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config of T5 1.1 says that its head is not tied; transformers' class ties it unless the values differ."""
    monkeypatch.setitem(TASKS, "task", task_of("t5"))  # type: ignore[arg-type]
    source, shards, back = (tmp_path / name for name in ("source", "shards", "back"))
    model = save(source, "t5", tie=None)
    head = torch.randn(small_config("t5").vocab_size, small_config("t5").d_model)
    save_file(stored(source) | {"lm_head.weight": head}, source / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((source / "config.json").read_text())
    shards.mkdir()
    with pytest.raises(
        ValueError, match=r"config\.json ties lm_head\.weight to shared\.weight, but their values differ"
    ):
        from_hf(source, shards, task="task")
    (source / "config.json").write_text(json.dumps(fields | {"tie_word_embeddings": False}))
    back.mkdir()
    from_hf(source, shards, task="task")
    to_hf(shards, back)
    first, again = stored(source), stored(back)
    assert again.keys() == first.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in first.items())
    assert not torch.equal(again["lm_head.weight"], again["shared.weight"])
    assert json.loads((back / "config.json").read_text())["tie_word_embeddings"] is False
    loaded = type(model).from_pretrained(back)
    assert torch.equal(loaded.state_dict()["lm_head.weight"], head)
