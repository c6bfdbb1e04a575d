"""Law: the peak memory of a stage is that of its own layers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lib.models import save_tiny_model
from lib.ranks import on_ranks
from lib.training import TIMEOUT, batches_of, make_config, train
from transformers import PreTrainedTokenizerFast

from acsgd.config.options import Config
from acsgd.dp.peers import Peers
from acsgd.groups import connect
from acsgd.launch import Launch
from acsgd.layers.composed import ComposedModel
from acsgd.model_classes import MODEL_CLASSES
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.plan.job import prepare
from acsgd.run.setup.build import build_session, build_stages
from acsgd.shards.config import read_config
from acsgd.shards.convert import from_hf
from acsgd.shards.export import to_hf
from acsgd.streams import Streams
from acsgd.topology import Topology

SLACK = 24 * 2**20
"""Python objects of the meta model, allocator arenas, code that is paged in: not a layer's weights (28 MB here)."""


@pytest.fixture(scope="module")
def large_model(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight blocks of 7.1 M parameters: 230 MB, of which a stage holds about a quarter."""
    directory = tmp_path_factory.mktemp("large") / "gpt2"
    save_tiny_model(directory, tokenizer, "gpt2", n_embd=768, n_layer=8)
    return directory


def load_on_rank(rank: int, world_size: int, store: Path, config: Config) -> dict[str, int]:
    """Load what one rank of a pipeline holds; return the growth of the peak of this process and the bytes it holds."""
    job = prepare(config, Launch(rank, rank, world_size))
    source = open_weight_source(job)
    # the groups play no part in loading; one process alone stands for its rank
    with connect(Topology.of(0, 1, 1), timeout=TIMEOUT, store=dist.HashStore()) as groups:
        composed = ComposedModel(job.model.task.model_class.build(job.model.config), job.model.description)
        before = job.streams.peak_memory_bytes()
        stages = build_stages(job, composed, source, Peers(groups.dp, groups.waits))[0].values()
        return {
            "grown": job.streams.peak_memory_bytes() - before,
            "own": sum(weight.param.nbytes for stage in stages for weight in stage.weights),
            "largest": max(sum(w.param.nbytes for w in layer.weights) for stage in stages for layer in stage.layers),
            "meta": sum(p.device.type == "meta" for stage in stages for p in stage.composed.model.parameters()),
        }


def test_a_stage_takes_the_memory_of_its_own_layers(large_model: Path, tmp_path: Path) -> None:
    config = make_config(large_model, tmp_path, stages=4)
    open_weight_source(prepare(config, Launch(0, 0, 4)))  # converts the model
    for measured in on_ranks(4, load_on_rank, tmp_path / "store", config):
        assert measured["meta"] > 0, "another stage's layers took memory"
        # while a layer is read, its file is mapped beside the copy that stays
        assert measured["own"] <= measured["grown"] + SLACK
        assert measured["grown"] <= measured["own"] + measured["largest"] + SLACK


def convert_both_ways(rank: int, world_size: int, model: Path, shards: Path, back: Path) -> list[int]:
    """Convert a model to shards and back; return by how much the peak of this process grew in each."""
    MODEL_CLASSES["lm"].layers(read_config(model))  # what transformers imports and keeps is no layer
    streams, grown = Streams(torch.device("cpu")), []
    for convert, source, target in ((from_hf, model, shards), (to_hf, shards, back)):
        target.mkdir()
        before = streams.peak_memory_bytes()
        convert(source, target)
        grown.append(streams.peak_memory_bytes() - before)
    return grown


def test_conversion_holds_one_layer_at_a_time(large_model: Path, tmp_path: Path) -> None:
    [grown] = on_ranks(1, convert_both_ways, large_model, tmp_path / "shards", tmp_path / "back")
    layer = 28 * 2**20
    # of 230 MB, the layer that is read (mapped) and the one that is written
    assert max(grown) > 0
    assert max(grown) <= 2 * layer + SLACK


def train_on_rank(rank: int, world_size: int, store: Path, config: Config) -> tuple[int, list[float]]:
    """Train a run in this process; return the growth of its peak, and the losses."""
    torch.set_num_threads(1)
    job = prepare(config, Launch(rank, rank, world_size))
    source = open_weight_source(job)
    with connect(job.topology, timeout=TIMEOUT, store=dist.HashStore()) as groups:
        before = job.streams.peak_memory_bytes()
        losses = train(build_session(job, source, groups), batches_of(job))
        return job.streams.peak_memory_bytes() - before, losses


@pytest.mark.soak
def test_weights_on_disk_take_the_memory_of_a_few_layers(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Of 32, in a process of its own: those of two layers, and of one that is read ahead."""
    save_tiny_model(tmp_path / "gpt2", tokenizer, "gpt2", n_embd=512, n_layer=32)
    config = make_config(tmp_path / "gpt2", tmp_path, micro=1)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, freeze="*.h.*"))
    open_weight_source(prepare(config, Launch()))  # converts the model
    on_disk = dataclasses.replace(config, model=dataclasses.replace(config.model, offload="disk"))
    (whole, losses), (divided, same) = (
        on_ranks(1, train_on_rank, tmp_path / name, each)[0] for name, each in (("a", config), ("b", on_disk))
    )
    block = 4 * 12 * 512**2
    assert same == losses
    assert whole > 32 * block
    assert divided < whole - (32 - 3) * block + SLACK
