"""Options that elastic runs refuse."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from lib.training import make_config

from acsgd.config.options import ReplicaConfig
from acsgd.elastic.setup import check_elastic
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
        ("cocktail", 2, True, True),
        ("diloco", 2, True, True),
        ("cocktail", 2, False, False),
        ("cocktail", 1, True, False),
        ("powersgd", 2, True, False),
        ("allreduce", 2, True, False),
    ],
)
def test_copies_of_a_tied_weight_stay_equal_or_the_mode_is_refused(
    mode: str, stages: int, tied: bool, is_refused: bool, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    config = make_config(tiny_model(tie_word_embeddings=tied), tmp_path, stages=stages)
    job = prepare(dataclasses.replace(config, dp=ReplicaConfig(mode)), Launch(0, 0, stages))
    if not is_refused:
        check_elastic(job)
        return
    with pytest.raises(
        ValueError, match=f"dp.mode={mode} keeps state per replica, and .*wte.weight is on several stages"
    ):
        check_elastic(job)
