"""The initial adapter of a run, and its exports."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from acsgd.adapters.export import merge, to_peft
from acsgd.adapters.inject import is_of_adapter
from acsgd.commands.generation.model import load
from acsgd.config.options import Config
from acsgd.launch import Launch
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.plan.job import prepare
from acsgd.shards.layer_tensors import layer_tensors
from lib.saved import assert_describes_its_model


def initial_adapter(config: Config) -> dict[str, Tensor]:
    """Return the initial parameters of a run's adapter."""
    job = prepare(dataclasses.replace(config, pp=dataclasses.replace(config.pp, stages=1, layers=None)), Launch())
    model, source, layers = job.model.build(torch.float32), open_weight_source(job), job.model.description
    stored = [(layer.name, layer_tensors(model, layers, layer.index)) for layer in layers.layers]
    tensors = {key: x for name, each in stored for key, x in source.tensors(name, each).items()}
    return {key: tensor for key, tensor in tensors.items() if is_of_adapter(key)}


def check_exports(checkpoint: Path, model: Path, directory: Path) -> None:
    """Check that a checkpoint, its adapter in PEFT on the model, and the merged model have the same logits.

    directory: for the exports; must not exist.
    """
    ids, cpu, peft, merged = torch.arange(24).view(2, 12), torch.device("cpu"), directory / "peft", directory / "merged"
    peft.mkdir(parents=True)
    merged.mkdir()
    to_peft(checkpoint, peft)
    merge(checkpoint, merged)
    for path in (checkpoint, merged):
        assert_describes_its_model(path)
    assert AutoTokenizer.from_pretrained(peft).get_vocab() == AutoTokenizer.from_pretrained(model).get_vocab()
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        before = plain(ids).logits
        expected = PeftModel.from_pretrained(plain, peft).eval()(ids).logits
        assert not torch.allclose(before, expected, atol=1e-3)
        for path in (checkpoint, merged):
            loaded = load(str(path), dtype=torch.float32, device=cpu).model
            assert torch.allclose(loaded(ids).logits, expected, atol=1e-5)
