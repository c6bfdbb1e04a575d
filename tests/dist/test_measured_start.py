"""Laws of options that are chosen at the start: all ranks decide alike, and train as with the same values given."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lib import disturbed
from lib.ranks import on_ranks
from lib.training import TIMEOUT, batches_of, losses_of_rank, make_config, train

from acsgd import train as training
from acsgd.config.options import Config, ReplicaConfig
from acsgd.groups import connect
from acsgd.launch import Launch
from acsgd.pp.wire.probe import Probed
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.lock.lock import RunLock
from acsgd.run.plan import choose
from acsgd.run.plan.job import prepare
from acsgd.run.plan.partition import Partition
from acsgd.run.plan.rates import LayerTimes
from acsgd.run.plan.transports import Transports
from acsgd.run.setup import auto, measured
from acsgd.run.setup.build import build_session
from acsgd.run.setup.inputs import open_inputs
from acsgd.run.step import replica_mode
from acsgd.shards.disk import ShardDirectory


def start_and_train(
    rank: int, world_size: int, store: Path, config: Config
) -> tuple[Config, list[str], Any, list[list[float]]]:
    """Choose, then train; return the options, the sentences, what was measured, and the losses, also with that given.

    Times of layers are 1 s on rank 0, 2 s on rank 1 and so on.
    """
    torch.set_num_threads(1)
    found = list[choose.MeasuredRanks]()
    measure, choose_from = measured.measure_layers, auto.timed_divisions

    def slowed(*args: Any) -> LayerTimes:
        times = measure(*args)
        assert min(times.forward_s) > 0 < min(times.backward_s)
        return LayerTimes(
            times.key, *[(1.0 + rank,) * len(times.forward_s)] * 2, context_s=0.1 * rank, split=1.2 + rank
        )

    def recorded(partition: Any, ranks: choose.MeasuredRanks, *largest: Any) -> Any:
        found.append(ranks)
        return choose_from(partition, ranks, *largest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured, "LAYERS_S", 0.0)
        patch.setattr(measured, "measure_layers", slowed)
        patch.setattr(auto, "timed_divisions", recorded)
        launch = Launch(rank, rank, world_size)
        job, files = prepare(config, launch), dist.FileStore(str(store), world_size)
        assert auto.chooses_hosts(job)
        with connect(job.topology, timeout=TIMEOUT, store=dist.PrefixStore("hosts", files)) as groups:
            job, of_hosts = auto.choose_hosts(job, groups)
        with connect(job.topology, timeout=TIMEOUT, store=files) as groups:
            transports = measured.find_transports(job, groups)
            job, choices = auto.choose_options(job, launch, groups, transports)
            choices.insert(0, of_hosts)
            assert groups.all_equal(job.fingerprint())
            session = build_session(job, open_weight_source(job), groups)
            losses = train(session, batches_of(job))
    given = losses_of_rank(rank, world_size, Path(f"{store}-given"), [job.config])
    return job.config, [each.text for each in choices], found[0], [losses, *given]


def test_ranks_measure_and_decide_alike_and_train_as_with_what_they_choose_given(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    chosen_ones = dict.fromkeys(("schedule", "layers", "hosts"), "auto")
    config = make_config(tiny_model("gpt2", n_layer=6, n_embd=16), tmp_path, stages=3, **chosen_ones)
    by_rank = on_ranks(3, start_and_train, tmp_path / "store", config)
    (chosen, (of_hosts, note, of_layers), ranks, losses), *others = by_rank
    assert all(each == by_rank[0] for each in others)
    assert chosen.pp.schedule != "auto"
    assert note.startswith(f"pp.schedule=auto takes {chosen.pp.schedule}: a step of 6 micro-batches is predicted")
    blocks = chosen.pp.blocks
    assert blocks is not None
    order = chosen.pp.host_order
    assert order is not None
    assert of_hosts.startswith(
        f"pp.hosts=auto takes {' '.join(map(str, order))}: a step of 6 micro-batches is predicted"
    )
    assert blocks[order.index(0)] > blocks[order.index(2)], "rank 0 is three times as fast as rank 2"
    assert of_layers.startswith(f"pp.layers=auto takes {' '.join(map(str, blocks))}: a step of 6 micro-batches is ")
    assert {*ranks.links} == {(0, 1), (1, 0), (1, 2), (2, 1), (2, 0), (0, 2)}
    assert all(link.bytes_per_s > 0 < link.delay_s for link in ranks.links.values())
    assert [{*times.forward_s} for times in ranks.layers] == [{1.0 + rank} for rank in order], "each has its own times"
    assert [(times.context_s, times.split) for times in ranks.layers] == [(0.1 * rank, 1.2 + rank) for rank in order]
    assert losses[0] == losses[1]


OPTIM = {"warmup": 0, "schedule": "constant"}


FAST, SLOW = Probed(1e-10, 0.0), Probed(1e-3, 0.01)
"""What is measured of a link."""


class Start(NamedTuple):
    """A run, and what is measured of the links between its replicas."""

    config: Config
    at_start: Probed = SLOW
    after_steps: tuple[Probed, ...] = ()
    """After each step; the last one after all others."""
    without_room: str = "nothing"
    """Mode that the memory of rank 1 does not allow."""
    has_nccl: bool = False
    """Whether some replicas, not those of every stage, exchange over NCCL."""


def start_runs(rank: int, world_size: int, store: Path, starts: Sequence[Start]) -> list[tuple[str, str]]:
    """Run configs one after the other; return the mode at the start of each, and why. Each step measures the links."""
    torch.set_num_threads(1)
    found = []
    for number, (config, at_start, after_steps, without_room, has_nccl) in enumerate(starts):

        def fit(partition: Partition, _: Launch, refused: str = without_room) -> dict[str, Any]:
            return {"reason": "no room" * (rank == 1 and partition.config.dp.mode.startswith(refused))}

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(auto, "_fit", fit)
            patch.setattr(measured, "LAYERS_S", 0.0)
            patch.setattr(replica_mode, "PROBE_EVERY", 1)
            patch.setattr(replica_mode, "PROBES", 1)
            patch.setattr(measured, "probe", lambda *_, link=at_start: link)
            launch = Launch(rank, rank, world_size)
            job = prepare(config, launch)
            with connect(
                job.topology, timeout=TIMEOUT, store=dist.FileStore(f"{store}-{number}", world_size)
            ) as groups:
                transports = measured.find_transports(job, groups)
                if has_nccl:
                    patch.setattr(Transports, "uses_nccl", lambda _, axis, ranks: axis == "replica" and 0 in ranks)
                job, choices = auto.choose_options(job, launch, groups, transports)
                assert (job.modes is not None) == (config.dp.compress is not None and not has_nccl)
                links = chain(after_steps, repeat((at_start, *after_steps)[-1]))

                def probe_ring(*args: Any, links: Iterator[Probed] = links) -> dict[int, Probed]:
                    link = next(links)
                    patch.setattr(measured, "probe", lambda *_: link)
                    return measured.probe_ring(*args)

                patch.setattr(replica_mode, "probe_ring", probe_ring)
                training.train(job, open_inputs(job), groups, RunLock([]), chosen=choices)
            found.append((job.config.dp.mode, "".join(each.text for each in choices)))
    return found


def lines_of(config: Config) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(config.log.dir) / "metrics.jsonl").read_text().splitlines()]


def test_a_chosen_mode_trains_as_a_given_one_and_is_that_of_the_resumed_run(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_model("gpt2", n_layer=2, n_embd=16)

    def config(name: str, steps: int, **dp: Any) -> Config:
        return replace(
            disturbed.make_config(model, tmp_path / "runs" / name, stages=1, every="100", steps=steps, **OPTIM),
            dp=ReplicaConfig(**dp),
        )

    chosen, resumed = config("chosen", 2, compress="auto"), config("chosen", 4, compress="auto:max_loss_cost=0.006")
    given = config("given", 4, mode="cocktail_grad:topk=0.1,bits=4")
    full = config("full", 1, compress="auto")
    starts = [Start(chosen), Start(resumed, FAST, (SLOW,)), Start(given), Start(full, without_room="cocktail_grad")]
    starts.append(Start(config("nccl", 1, compress="auto"), has_nccl=True))
    by_rank = on_ranks(2, start_runs, tmp_path / "store", starts)
    assert by_rank[0] == by_rank[1]
    (mode, text), (kept, why), _, (smaller, _), (over_nccl, _) = by_rank[0]
    assert over_nccl == "allreduce"
    assert mode == kept == given.dp.mode
    assert smaller == "allreduce:dtype=bf16", "a rank has no memory for the other one"
    assert text.startswith(f"dp.compress=auto takes {mode}: a step is predicted to take ")
    assert text.endswith(
        "at a loss cost of 0.0003; the slowest link between replicas has 0.008 Mbit/s and a delay of 10 ms"
    )
    assert why.startswith(f"dp.compress=auto:max_loss_cost=0.006 keeps {mode}, the mode of the checkpoint: a step is ")
    events = [(line["after_step"], line["value"]) for line in lines_of(chosen) if line.get("event") == "choice"]
    assert events == [(0, mode), (2, mode)]
    assert disturbed.end_of(resumed).layers == disturbed.end_of(given).layers


class Change(NamedTuple):
    """A run whose mode changes after the second step, and back after the fourth."""

    mode: str = "cocktail_grad:topk=0.1,bits=4"
    """With slow links."""
    stages: int = 1
    replicas: int = 2
    options: Mapping[str, Mapping[str, Any]] = {}
    """By section."""


OFFLOADED = {"model": {"offload": "cpu"}, "optim": {"offload": "cpu"}}
CHANGES = {
    "one stage": Change(),
    "rows of a tied table": Change(stages=2),
    "divided optimizer state": Change("allreduce:dtype=bf16", options={"dp": {"shard": "optimizer"}}),
    "offloaded": Change(options=OFFLOADED),
    "a stage without trained weights": Change(stages=2, options={"model": {"freeze": "*wte*,*wpe*,*.h.0.*"}}),
    "copies of a tied table": Change(stages=2, replicas=3, options={"pp": {"tied": "dense", "micro": 1}}),
}


@pytest.mark.parametrize(
    "name", [*[*CHANGES][:2], *(pytest.param(name, marks=pytest.mark.soak) for name in [*CHANGES][2:])]
)
def test_a_change_of_the_mode_equals_a_stop_and_a_resume_with_the_other_mode(
    name: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    change, tied = CHANGES[name], {"tie_word_embeddings": "trained" not in name}
    model = tiny_model("gpt2", n_layer=change.stages, n_embd=16, **tied)

    def config(run: str, steps: int, **dp: Any) -> Config:
        plain = disturbed.make_config(
            model, tmp_path / "runs" / run, stages=change.stages, every="100", steps=steps, **OPTIM
        )
        sections = {"dp": {}, **change.options}
        changed = {key: replace(getattr(plain, key), **options) for key, options in sections.items()}
        return replace(plain, **changed | {"dp": replace(changed["dp"], **dp)})

    changed = config("changed", 6, compress="auto")
    stopped = [
        config("stopped", steps, mode=mode) for steps, mode in ((2, "allreduce"), (4, change.mode), (6, "allreduce"))
    ]
    starts = [Start(changed, FAST, (FAST, SLOW, SLOW, FAST)), *map(Start, stopped)]
    on_ranks(change.stages * change.replicas, start_runs, tmp_path / "store", starts)
    events = [(line["after_step"], line["mode"]) for line in lines_of(changed) if line.get("event") == "mode"]
    assert events == [(2, change.mode), (4, "allreduce")]
    losses = [[line["loss"] for line in lines_of(each) if "loss" in line] for each in (changed, stopped[-1])]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    ours, theirs = (ShardDirectory(disturbed.checkpoints_of(each).of(6)) for each in (changed, stopped[-1]))
    assert ours.manifest.run is not None
    assert ours.manifest.run["options"]["dp.mode"] == "allreduce"
    for layer in ours.manifest.layers:  # the mean is rounded to fp32 before it is added, not after
        each, other = (torch.cat([*map(torch.flatten, files.read_layer(layer).values())]) for files in (ours, theirs))
        assert torch.linalg.norm(each - other) <= 1e-4 * torch.linalg.norm(each), layer
