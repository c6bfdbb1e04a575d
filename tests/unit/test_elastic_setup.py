"""Options that elastic runs refuse."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from lib.training import make_config

from acsgd.config.options import AdapterConfig, ElasticConfig, ReplicaConfig
from acsgd.elastic.setup import check_elastic, possible_cuts, with_stages
from acsgd.launch import Launch
from acsgd.run.job import prepare


@pytest.mark.parametrize(("cache", "is_refused"), [("ram", False), ("disk", True)])
def test_caches_in_files_of_replicas_are_refused(
    cache: str, is_refused: bool, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    job = prepare(make_config(tiny_model(), tmp_path, stages=2, forward=f"delta:bits=4,cache={cache}"), Launch(0, 0, 2))
    if not is_refused:
        check_elastic(job)
        return
    with pytest.raises(ValueError, match="use cache=ram"):
        check_elastic(job)


@pytest.mark.parametrize(
    ("mode", "stages", "tied", "is_refused"),
    [
        ("cocktail", 2, "dense", True),
        ("diloco", 2, "dense", True),
        ("cocktail", 2, "rows", False),
        ("cocktail", 1, "dense", False),
        ("powersgd", 2, "dense", False),
        ("allreduce", 2, "dense", False),
    ],
)
def test_copies_of_a_tied_weight_stay_equal_or_the_mode_is_refused(
    mode: str, stages: int, tied: str, is_refused: bool, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    config = make_config(tiny_model(), tmp_path, stages=stages, tied=tied)
    job = prepare(dataclasses.replace(config, dp=ReplicaConfig(mode)), Launch(0, 0, stages))
    if not is_refused:
        check_elastic(job)
        return
    with pytest.raises(ValueError, match=f"dp.mode={mode} keeps state per replica, and .* copies of .*wte.weight"):
        check_elastic(job)


def test_quantized_layers_are_refused(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="the extra 8bit is not installed")
    config = make_config(tiny_model("llama", num_hidden_layers=2), tmp_path)
    quantized = dataclasses.replace(
        config, model=dataclasses.replace(config.model, quantize="nf4"), adapter=AdapterConfig("lora")
    )
    with pytest.raises(ValueError, match=r"model.quantize=nf4: elastic runs cannot move quantized layers .* yet"):
        check_elastic(prepare(quantized, Launch()))


def test_replanned_runs_have_a_cut_for_each_number_of_stages_that_their_jobs_use(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    config = make_config(tiny_model(), tmp_path, stages=3)
    job = prepare(config, Launch(0, 0, 3))
    assert possible_cuts(job) == (job.cut,)
    elastic = dataclasses.replace(config, elastic=ElasticConfig(replan=True))
    cuts = possible_cuts(prepare(elastic, Launch(0, 0, 3)))
    assert [len(cut) for cut in cuts] == [3, 2, 1]
    for cut in cuts:
        assert prepare(with_stages(elastic, len(cut)), Launch(0, 0, len(cut))).cut == cut
    fixed = dataclasses.replace(elastic, pp=dataclasses.replace(config.pp, layers=(2, 2, 2)))
    with pytest.raises(ValueError, match=r"pp.layers=\[2, 2, 2\] is for pp.stages=3"):
        check_elastic(prepare(fixed, Launch(0, 0, 3)))
