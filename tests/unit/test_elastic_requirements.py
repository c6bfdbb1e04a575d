"""Options that elastic runs refuse, and what their hosts must have in common."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lib.training import make_config
from transformers import AutoConfig, AutoModelForCausalLM

from acsgd.config.options import AdapterConfig, ElasticConfig, ReplicaConfig
from acsgd.elastic.requirements import check_elastic, possible_cuts, setup_of, with_stages
from acsgd.launch import Launch
from acsgd.run.plan.job import prepare
from acsgd.run.plan.partition import most_replicas
from acsgd.run.setup.inputs import open_inputs


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


@pytest.mark.parametrize(
    ("stages", "per_host", "options", "refusal"),
    [
        (1, 2, {}, None),
        (2, 4, {}, None),
        (1, 2, {"shard": "weights", "micro": 2}, "a host has 2 replicas; use a data.batch of 8"),
        (1, 3, {"shard": "weights", "micro": 2}, None),
        (1, 1, {}, "this host has 1, give it --nproc-per-node 2 or more, or --dp.shard none"),
        (1, 1, {"domain": "rack"}, None),
        (1, 1, {"domain": "rack", "micro": 6}, "a domain has 2 replicas; use a data.batch of 12"),
        (2, 2, {"mode": "cocktail_grad"}, "this host has 1, give it --nproc-per-node 4 or more, or --dp.shard none"),
        (1, 2, {"local": "none"}, "use --dp.local auto, or --dp.shard none"),
        (1, 2, {"elastic": {"replan": True}}, "remove elastic.replan, or --dp.shard none"),
        (1, 2, {"elastic": {"max_replicas": 1}}, "use --elastic.max_replicas 2, or --dp.shard none"),
        (
            1,
            2,
            {"elastic": {"min_replicas": 3, "max_replicas": 3}},
            "have 3 to 3 replicas together; change elastic.min",
        ),
        (1, 3, {"elastic": {"min_replicas": 3, "max_replicas": 3}}, None),
        (
            1,
            3,
            {"shard": "gradients", "elastic": {"min_replicas": 4, "max_replicas": 5}},
            "have 4 to 5 replicas together, whose number divides the 6 micro-batches of a step; change",
        ),
        (1, 3, {"shard": "gradients", "elastic": {"min_replicas": 5}}, None),
        (1, 2, {"micro": 6}, "of 1 in a step .* use a data.batch of 12, or --dp.shard none"),
        (1, 2, {"shard": "gradients", "deal": "speed"}, "gives faster ones more; use --data.deal even, or --dp.shard"),
        (2, 4, {"shard": "gradients", "schedule": "zb"}, "backwards in two parts; use --dp.shard optimizer"),
        (2, 4, {"shard": "optimizer", "schedule": "zb"}, None),
        (1, 2, {"shard": "none", "mode": "quantized", "optim": "lion"}, 'optim.name="lion" does not support'),
        (1, 2, {"shard": "none", "mode": "quantized", "optim": "lion", "elastic": {"max_replicas": 1}}, None),
    ],
)
def test_replicas_of_a_host_divide_state_or_the_run_is_refused(
    stages: int,
    per_host: int,
    options: dict[str, Any],
    refusal: str | None,
    tiny_model: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """Also what first matters with a second replica: the run starts with one."""
    config = make_config(
        tiny_model(),
        tmp_path,
        stages=stages,
        micro=options.get("micro", 1),
        schedule=options.get("schedule", "1f1b"),
    )
    dp = ReplicaConfig(
        options.get("mode", "allreduce"),
        shard=options.get("shard", "optimizer"),
        local=options.get("local", "auto"),
        domain=options.get("domain"),
    )
    config = dataclasses.replace(
        config,
        dp=dp,
        data=dataclasses.replace(config.data, deal=options.get("deal", "even")),
        optim=dataclasses.replace(config.optim, name=options.get("optim", "adamw")),
        elastic=ElasticConfig(**options.get("elastic", {})),
    )
    with contextlib.nullcontext() if refusal is None else pytest.raises(ValueError, match=refusal):
        check_elastic(prepare(config, Launch(0, 0, stages, per_host, daemon="socket")))


def test_what_is_measured_at_the_start_is_refused(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    one_stage, two_stages = (make_config(tiny_model(), tmp_path, stages=stages, schedule="auto") for stages in (1, 2))
    check_elastic(prepare(one_stage, Launch()))
    with pytest.raises(ValueError, match=r"pp\.schedule=auto measures all ranks at the start"):
        check_elastic(prepare(two_stages, Launch(0, 0, 2)))
    with pytest.raises(ValueError, match=r"pp\.hosts orders the hosts of a run that keeps them; .*: remove pp\.hosts"):
        check_elastic(prepare(make_config(tiny_model(), tmp_path, stages=2, hosts="auto"), Launch(0, 0, 2)))
    with pytest.raises(ValueError, match=r"dp\.compress=auto measures the links .* give the mode"):
        check_elastic(prepare(dataclasses.replace(one_stage, dp=ReplicaConfig(compress="auto")), Launch()))


def test_more_replicas_than_micro_batches_are_refused(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    config = make_config(tiny_model(), tmp_path, micro=2)
    most = config.data.batch // 2
    assert most_replicas(config) == most, "elastic.max_replicas is not given"
    for low in (most, most + 1):
        elastic = dataclasses.replace(config.elastic, min_replicas=low)
        job = prepare(dataclasses.replace(config, elastic=elastic), Launch())
        if low == most:
            check_elastic(job)
    with pytest.raises(ValueError, match=rf"min_replicas={most + 1} replicas cannot share the {most} micro-batches"):
        check_elastic(job)


@pytest.mark.parametrize(
    ("mode", "is_refused"),
    [("allreduce", True), ("powersgd", True), ("quantized", True), ("cocktail", False), ("local", False)],
)
def test_moments_are_rounded_only_where_replicas_may_have_others(
    mode: str, is_refused: bool, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    config = dataclasses.replace(make_config(tiny_model(), tmp_path), elastic=ElasticConfig(join_moments="rounded"))
    job = prepare(dataclasses.replace(config, dp=ReplicaConfig(mode)), Launch())
    if not is_refused:
        check_elastic(job)
        return
    with pytest.raises(ValueError, match=f"dp.mode={mode} need equal moments"):
        check_elastic(job)


@pytest.mark.parametrize(
    ("adapter", "freeze", "differing"), [("lora", None, {"model"}), (None, "*.h.0.*", {"model"}), (None, None, set())]
)
def test_hosts_have_the_same_model_if_some_of_it_is_frozen(
    adapter: str | None, freeze: str | None, differing: set[str], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Each reads frozen weights from its own files; others are sent."""
    directory = tmp_path / "model"
    shutil.copytree(tiny_model(n_layer=2), directory)
    config = dataclasses.replace(make_config(directory, tmp_path), adapter=AdapterConfig(adapter))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, freeze=freeze))
    setups = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
        model.save_pretrained(directory)
        job = prepare(config, Launch())
        setups.append(setup_of(job, open_inputs(job)).parts)
    assert {name for name in setups[0] if setups[0][name] != setups[1][name]} == differing


def test_hosts_are_started_in_any_directory(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those with disks of their own save to a directory each, as they log to one."""
    config, setups = make_config(tiny_model(), tmp_path), []
    config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, dir="saved"))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        job = prepare(config, Launch())
        setups.append(setup_of(job, open_inputs(job)).parts)
    assert setups[0] == setups[1]


def test_replanned_runs_have_a_cut_for_each_number_of_stages_that_their_jobs_use(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    config = make_config(tiny_model(), tmp_path, stages=3)
    job = prepare(config, Launch(0, 0, 3))
    assert possible_cuts(job) == (job.layout.cut,)
    elastic = dataclasses.replace(config, elastic=ElasticConfig(replan=True))
    cuts = possible_cuts(prepare(elastic, Launch(0, 0, 3)))
    assert [len(cut) for cut in cuts] == [3, 2, 1]
    for cut in cuts:
        assert prepare(with_stages(elastic, len(cut)), Launch(0, 0, len(cut))).layout.cut == cut
    fixed = dataclasses.replace(elastic, pp=dataclasses.replace(config.pp, layers=(2, 2, 2)))
    with pytest.raises(ValueError, match=r"pp.layers=\[2, 2, 2\] is for pp.stages=3"):
        check_elastic(prepare(fixed, Launch(0, 0, 3)))
