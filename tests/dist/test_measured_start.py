"""Laws of options that are chosen at the start: all ranks decide alike, and train as with the same values given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lib.ranks import on_ranks
from lib.training import TIMEOUT, batches_of, losses_of_rank, make_config, train

from acsgd.config.options import Config
from acsgd.groups import connect
from acsgd.launch import Launch
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.plan import choose
from acsgd.run.plan.job import prepare
from acsgd.run.plan.rates import LayerTimes
from acsgd.run.setup import measured
from acsgd.run.setup.build import build_session


def start_and_train(rank: int, world_size: int, store: Path, config: Config) -> tuple[Config, str, Any, list[float]]:
    """Choose, then train; return the options, the sentence, what was measured, and the losses.

    Rank 1 is three times as slow as it is.
    """
    torch.set_num_threads(1)
    found = list[choose.MeasuredRanks]()
    measure, choose_from = measured.measure_layers, measured.timed_schedules

    def slowed(*args: Any) -> LayerTimes:
        times = measure(*args)
        slowness = 3 if rank == 1 else 1
        forward, backward = (tuple(slowness * each for each in of) for of in (times.forward_s, times.backward_s))
        return LayerTimes(times.key, forward, backward)

    def recorded(partition: Any, ranks: choose.MeasuredRanks) -> Any:
        found.append(ranks)
        return choose_from(partition, ranks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured, "LAYERS_S", 0.0)
        patch.setattr(measured, "measure_layers", slowed)
        patch.setattr(measured, "timed_schedules", recorded)
        launch = Launch(rank, rank, world_size)
        job = prepare(config, launch)
        with connect(job.topology, timeout=TIMEOUT, store=dist.FileStore(str(store), world_size)) as groups:
            job, notes = measured.choose_schedule(job, launch, groups)
            assert groups.all_equal(job.fingerprint())
            session = build_session(job, open_weight_source(job), groups)
            losses = train(session, batches_of(job))
    return job.config, notes[0], found[0], losses


def test_ranks_measure_and_decide_alike_and_train_as_with_the_schedule_given(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    config = make_config(tiny_model("gpt2", n_layer=4, n_embd=16), tmp_path, stages=3, schedule="auto")
    by_rank = on_ranks(3, start_and_train, tmp_path / "store", config)
    (chosen, note, ranks, losses), *others = by_rank
    assert all(each == by_rank[0] for each in others)
    assert chosen.pp.schedule != "auto"
    assert note.startswith(f"pp.schedule=auto takes {chosen.pp.schedule}: a step of 6 micro-batches is predicted")
    assert {*ranks.links} == {(0, 1), (1, 0), (1, 2), (2, 1), (2, 0), (0, 2)}
    assert all(link.bytes_per_s > 0 < link.delay_s for link in ranks.links.values())
    total = [sum(times.forward_s) for times in ranks.layers]
    assert total[1] > 1.2 * max(total[0], total[2]), "each rank has its own times"
    given = on_ranks(3, losses_of_rank, tmp_path / "given", [chosen])
    assert given[0][0] == losses
