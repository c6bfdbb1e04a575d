"""Laws of frozen parameters: they never move, cost no state, no traffic and no backward, and are stored once."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lib.frozen import train_rank
from lib.ranks import on_ranks
from lib.resume import HALF, checkpoint_of, losses_of, stopped_half_way, train_ranks
from lib.resume import make_config as make_saved_config
from lib.training import RELATIVE, make_config, train_whole, whole_batches
from transformers import AutoModelForCausalLM

from acsgd.commands.generation.model import load
from acsgd.config.options import Config, ReplicaConfig
from acsgd.dp import MODES
from acsgd.io.checkpoint.inspect import inspect
from acsgd.shards.disk import ShardDirectory
from acsgd.shards.export import to_hf
from acsgd.shards.manifest import Manifest

TinyModel = Callable[..., Path]
LOWER = "transformer.w[tp]e.*,transformer.h.[0-2].*"
"""The embeddings and the first three blocks of a GPT-2; the table of tokens is also its head."""


def oracle_losses(config: Config, frozen: Callable[[str], bool]) -> list[float]:
    """Train in one process with the Hugging Face model, some of whose parameters require no gradient."""
    model = AutoModelForCausalLM.from_pretrained(config.model.name, dtype=torch.float32).train()
    for name, param in model.named_parameters():
        param.requires_grad_(not frozen(name))
    return train_whole(model, config.optim, whole_batches(config))


def freezing(config: Config, patterns: str, mode: str = "allreduce") -> Config:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, freeze=patterns), dp=ReplicaConfig(mode))


FROZEN = ("transformer.wte", "transformer.wpe", "transformer.h.0", "transformer.h.1", "transformer.h.2")
"""Beginnings of the names in LOWER."""


@pytest.mark.parametrize(
    "modes", [["allreduce"], pytest.param([each for each in MODES if each != "allreduce"], marks=pytest.mark.soak)]
)
def test_in_each_mode_parameters_that_are_not_frozen_are_trained(
    modes: list[str], tiny_model: TinyModel, tmp_path: Path
) -> None:
    gpt2 = tiny_model("gpt2", n_layer=4)
    configs = [freezing(make_config(gpt2, tmp_path, steps=3, micro=1), LOWER, mode) for mode in modes]
    expected = oracle_losses(configs[0], lambda name: name.startswith(FROZEN))
    for outcomes in on_ranks(2, train_rank, tmp_path / "store", configs):
        for outcome in outcomes:
            assert outcome.moved == []
            assert outcome.losses[0] == pytest.approx(expected[0], rel=RELATIVE)
            assert outcome.updated == {name for name in parameter_names(gpt2) if not name.startswith(FROZEN)}


def test_frozen_parameters_change_nothing_but_the_work(tiny_model: TinyModel, tmp_path: Path) -> None:
    gpt2, llama = tiny_model("gpt2", n_layer=4), tiny_model("llama", num_hidden_layers=4)
    pp = {"stages": 2, "layers": (2, 2), "micro": 1}
    split = freezing(make_config(gpt2, tmp_path, steps=3, **pp), LOWER)
    norms = freezing(make_config(llama, tmp_path, steps=3, stages=2, micro=1), "*embed*,*proj*,lm_head*")
    recomputed = dataclasses.replace(norms, model=dataclasses.replace(norms.model, recompute="layers"))
    by_rank = on_ranks(2, train_rank, tmp_path / "store", [split, norms, recomputed])

    expected = oracle_losses(split, lambda name: name.startswith(FROZEN))
    assert all(outcome.moved == [] for outcomes in by_rank for outcome in outcomes)
    for outcome in (outcomes[0] for outcomes in by_rank):
        assert outcome.losses == pytest.approx(expected, rel=RELATIVE)
        assert outcome.backward_bytes == outcome.tied_bytes == 0
    by_stage = [by_rank[0][0].updated, by_rank[1][0].updated]
    assert by_stage[0] == set()
    assert by_stage[1] == {name for name in parameter_names(gpt2) if not name.startswith(FROZEN)}

    expected = oracle_losses(norms, lambda name: "norm" not in name)
    for outcome in by_rank[0][1:]:
        assert outcome.losses == pytest.approx(expected, rel=RELATIVE)
        assert outcome.backward_bytes > 0


def parameter_names(model: Path) -> list[str]:
    return [name for name, _ in AutoModelForCausalLM.from_pretrained(model).named_parameters()]


def test_checkpoints_share_the_files_of_constants(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model("gpt2", n_layer=4), model)
    whole = freezing(make_saved_config(model, tmp_path / "whole", "bf16", "none"), LOWER)
    on_ranks(1, train_ranks, tmp_path / "store", [whole])
    same, split = stopped_half_way(whole, tmp_path / "same"), stopped_half_way(whole, tmp_path / "split")
    split = dataclasses.replace(split, pp=dataclasses.replace(split.pp, stages=2))
    other = freezing(stopped_half_way(whole, tmp_path / "other"), "transformer.w[tp]e.*,transformer.h.3.*")
    on_ranks(1, train_ranks, tmp_path / "store-same", [same, other])
    on_ranks(2, train_ranks, tmp_path / "store-split", [split])
    assert losses_of(same) == losses_of(whole)
    assert losses_of(split) == pytest.approx(losses_of(whole), rel=2.0**-8)

    before, after = (ShardDirectory(checkpoint_of(*each)) for each in [(whole, HALF), (other,)])
    for layer, is_frozen in {"embed": True, "block-00000": False, "block-00003": True}.items():
        tensors = before.read_layer(layer)
        assert all(torch.equal(tensors[key], x) == is_frozen for key, x in after.read_layer(layer).items()), layer

    first, last = checkpoint_of(whole, HALF), checkpoint_of(whole)
    manifest = Manifest.read(last)
    assert [*manifest.constants] == ["embed", "block-00000", "block-00001", "block-00002"]
    assert manifest.constants == Manifest.read(first).constants
    assert manifest.layers == Manifest.read(checkpoint_of(same)).layers
    for entry in manifest.constants.values():
        assert (last / entry.file).samefile(first / entry.file)
    shutil.rmtree(first)
    shutil.rmtree(model)
    for checkpoint in (last, checkpoint_of(other)):
        (report,) = inspect(checkpoint)
        assert report.errors == []

    exported = tmp_path / "exported"
    exported.mkdir()
    to_hf(last, exported)
    trained = load(str(last), dtype=torch.float32, device=torch.device("cpu")).model.state_dict()
    base = AutoModelForCausalLM.from_pretrained(tiny_model("gpt2", n_layer=4), dtype=torch.float32).state_dict()
    for name, tensor in AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).state_dict().items():
        assert torch.equal(tensor, trained[name])
        is_frozen = name.startswith(("transformer.w", "transformer.h.0", "transformer.h.1", "transformer.h.2", "lm_"))
        assert torch.equal(tensor, base[name]) == is_frozen, name
