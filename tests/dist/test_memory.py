"""Law: the peak memory of a stage is that of its own layers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from lib.models import save_tiny_model
from transformers import PreTrainedTokenizerFast

MEASURE = """
import json, sys
from datetime import timedelta
from acsgd.config.run_file import parse
from acsgd.run.inputs import open_weight_source
from acsgd.run.job import prepare
from acsgd.shards.convert import read_config
from acsgd.shards.layers import meta_model
from acsgd.topology import Launch, Topology, connect
from acsgd.run.build import build_stages
import transformers.models.gpt2.modeling_gpt2

rank, argv = int(sys.argv[1]), sys.argv[2:]
job = prepare(parse(argv), Launch(rank, rank, 4))
source = open_weight_source(job)
# the groups play no part in loading; one process alone stands for its rank
with connect(Topology(0, 1, 1), timeout=timedelta(seconds=60)) as groups:
    before = job.streams.peak_memory_bytes()
    stages = build_stages(job, meta_model(job.model_config), source, groups)
    print(json.dumps({
        "grown": job.streams.peak_memory_bytes() - before,
        "own": sum(w.param.nbytes for stage in stages.values() for w in stage.weights),
        "dearest": max(sum(w.param.nbytes for w in layer) for s in stages.values() for layer in s.layers.values()),
        "meta": sum(p.device.type == "meta" for s in stages.values() for p in s.model.parameters()),
    }))
"""
"""Loads what one rank of a pipeline of 4 holds, in a process of its own, and prints by how much its peak grew."""

SLACK = 24 * 2**20
"""Python objects of the meta model, allocator arenas, code that is paged in: not a layer's weights (50 MB here)."""


@pytest.fixture(scope="module")
def large_model(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight blocks of 12.6 M parameters: 400 MB, of which a stage holds about a quarter."""
    directory = tmp_path_factory.mktemp("large") / "gpt2"
    save_tiny_model(directory, tokenizer, "gpt2", n_embd=1024, n_layer=8)
    return directory


@pytest.mark.parametrize("rank", range(4))
def test_a_stage_takes_the_memory_of_its_own_layers(
    rank: int, large_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run_dir = tmp_path_factory.getbasetemp() / "memory" / "run"  # the ranks share its cache
    flags = f"--model.name {large_model} --data.sources demo --data.sequence 32 --data.batch 4 --optim.lr 1e-3 "
    flags += f"--optim.steps 1 --pp.stages 4 --log.dir {run_dir} --run.device cpu"
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(rank), *flags.split()], capture_output=True, text=True, check=True
    )
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["meta"] > 0, "another stage's layers took memory"
    # while a layer is read, its file is mapped beside the copy that stays
    assert measured["own"] <= measured["grown"] + SLACK
    assert measured["grown"] <= measured["own"] + measured["dearest"] + SLACK


CONVERT = """
import json, sys, torch
from pathlib import Path
from acsgd.shards.convert import from_hf, to_hf, read_config
from acsgd.shards.layers import meta_model
from acsgd.streams import Streams
source, shards, back = map(Path, sys.argv[1:])
meta_model(read_config(source))  # what transformers imports and keeps is no layer
streams = Streams(torch.device("cpu"))
for convert, given, made in ((from_hf, source, shards), (to_hf, shards, back)):
    made.mkdir()
    before = streams.peak_memory_bytes()
    convert(given, made)
    print(streams.peak_memory_bytes() - before)
"""


def test_conversion_holds_one_layer_at_a_time(large_model: Path, tmp_path: Path) -> None:
    arguments = [str(large_model), str(tmp_path / "shards"), str(tmp_path / "back")]
    done = subprocess.run([sys.executable, "-c", CONVERT, *arguments], capture_output=True, text=True, check=True)
    layer = 50 * 2**20
    for grown in map(int, done.stdout.split()):
        assert grown <= 2 * layer + SLACK  # what is read, mapped, and what is written: of 400 MB in all
