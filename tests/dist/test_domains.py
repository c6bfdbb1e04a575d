"""Laws of replicas that share a domain: they act as one, which has all of their micro-batches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from lib.models import DROPOUT
from lib.ordered import ordered_transport
from lib.patience import stretched
from lib.ranks import on_ranks
from lib.replica_runs import make_replica_config, resumed_at_half
from lib.replicas import LOCAL_SPECS, LR, TIMEOUT, copied, gradients, make_weights
from lib.resume import HALF, TinyModel, checkpoint_of, losses_of, train_ranks
from lib.training import RELATIVE, losses_of_rank, make_config
from lib.views import Script, ScriptedView, train_in_views
from torch import Tensor

from acsgd.config.options import Config, ElasticConfig, ReplicaConfig
from acsgd.config.spec import from_spec
from acsgd.dp import MODES
from acsgd.dp.peers import Peers
from acsgd.errors import RunError
from acsgd.groups import connect
from acsgd.io.data.sampler import deal
from acsgd.optim.base import SecondMoments
from acsgd.shards.disk import ShardDirectory
from acsgd.shards.weights import WeightState
from acsgd.topology import Topology

SMALL = "bucket_mb=0.0005"
"""Option with which most weights have buckets of their own."""
SPECS = [
    "allreduce",
    f"allreduce:dtype=bf16,{SMALL}",
    f"sharded_ps:{SMALL}",
    "central_ps",
    f"powersgd:rank=2,exact_steps=1,{SMALL}",
    *(spec for spec in LOCAL_SPECS if spec != "local"),
]
DOMAINS = {"even": "aabb", "uneven": "aab"}
"""Domain of each replica."""
CONNECTIONS = 3
"""Between two uneven domains."""
STEPS = 5
RUNS = ["cocktail:random=0.5,topk=0.2,exact_steps=1", "powersgd:rank=2"]
"""Modes of whole runs: with local weights and without."""


VIEW_STEPS = 7
EXCHANGING = "cocktail_grad:topk=.25"
"""A mode with an exchange after the step, in which a late rank does not take part."""
ELASTIC = ("powersgd:rank=1", "cocktail:random=.5,topk=.5", EXCHANGING)


class Trained(NamedTuple):
    """Results of one replica in one mode."""

    weights: list[Tensor]
    state: WeightState
    sent_bytes: int


def train_all(
    rank: int, world_size: int, store: Path, domains: str, acting: Sequence[Sequence[int]], *transports: str
) -> list[Trained]:
    """Train in each mode on the gradients of the replicas for which this one acts. transports: "ordered" or none."""
    torch.set_num_threads(1)
    topology, file_store = Topology.of(rank, world_size, 1), dist.FileStore(str(store), world_size)
    count = CONNECTIONS if domains == DOMAINS["uneven"] else 1
    with connect(topology, timeout=TIMEOUT, store=file_store, domain=domains[rank], connections=count) as groups:
        if groups.domains is not None and (leaders := groups.domains.leaders) is not None:
            assert leaders.connections == groups.dp.connections == count
        if transports:
            groups = groups.with_transport(ordered_transport(rank), torch.device("cpu"), lambda axis, ranks: True)
        peers = Peers(groups.dp, groups.waits, domains=groups.domains)
        results = [train(peers, spec, acting[rank]) for spec in SPECS]
        dist.barrier()  # a rank that leaves early would disturb the others' connections
        return results


def train(peers: Peers, spec: str, acts_for: Sequence[int]) -> Trained:
    weights = make_weights()
    sync = from_spec(spec, MODES, key="dp.mode").open(weights, peers)
    for step in range(STEPS):
        sync.begin_step(step)
        for parts in zip(weights, *(gradients(replica, step) for replica in acts_for), strict=True):
            weight, *grads = parts
            weight.master.grad = torch.stack(grads).sum(0)
            sync.grad_ready(weight, is_final=True)
        sync.reduce()
        sync.wait()
        sync.commit()
        with torch.no_grad():
            for weight in weights:
                weight.master.sub_(LR * weight.master.grad)
        moments = SecondMoments({}, 0.999)
        sync.exchange(step, moments)
        sync.after_step(step, moments)
    return Trained(
        [weight.master.detach().clone() for weight in weights], copied(sync.state_dict()), sync.meter.sent_bytes
    )


def assert_equal_states(ours: WeightState, theirs: WeightState, tolerance: float, spec: str) -> None:
    assert ours.keys() == theirs.keys(), spec
    for name, by_key in theirs.items():
        assert ours[name].keys() == by_key.keys(), (spec, name)
        for key, x in by_key.items():
            close = torch.allclose(ours[name][key], x, rtol=tolerance, atol=tolerance, equal_nan=True)
            assert close, (spec, name, key)


@pytest.mark.parametrize("domains", ["ab", "aab"])
def test_modes_train_over_an_ordered_transport_as_over_gloo(domains: str, tmp_path: Path) -> None:
    """Bit for bit: at most two are summed at a time. Sums and updates travel over it, as they would over NCCL."""
    acting = [[r] for r in range(len(domains))]
    over_gloo = on_ranks(len(domains), train_all, tmp_path / "gloo", domains, acting)
    over_ordered = on_ranks(len(domains), train_all, tmp_path / "ordered", domains, acting, "ordered")
    for of_gloo, of_ordered in zip(over_gloo, over_ordered, strict=True):
        for spec, theirs, mine in zip(SPECS, of_gloo, of_ordered, strict=True):
            assert all(map(torch.equal, mine.weights, theirs.weights)), spec
            assert_equal_states(mine.state, theirs.state, 0, spec)
            assert mine.sent_bytes == theirs.sent_bytes, spec


@pytest.mark.parametrize("domains", DOMAINS.values(), ids=DOMAINS.keys())
def test_a_domain_acts_as_one_replica(domains: str, tmp_path: Path) -> None:
    """Its members have the same weights and state, bit for bit, and send what one would."""
    members = [[r for r, name in enumerate(domains) if name == each] for each in dict.fromkeys(domains)]
    ours = on_ranks(len(domains), train_all, tmp_path / "ours", domains, [[r] for r in range(len(domains))])
    single = on_ranks(len(members), train_all, tmp_path / "single", "-" * len(members), members)
    for number, spec in enumerate(SPECS):
        for domain, replicas in enumerate(members):
            expected, (first, *others) = single[domain][number], [ours[replica][number] for replica in replicas]
            for mine, theirs in zip(first.weights, expected.weights, strict=True):
                assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-5), spec
            assert_equal_states(first.state, expected.state, 1e-5, spec)
            assert first.sent_bytes == expected.sent_bytes > 0, spec
            for other in others:
                assert all(map(torch.equal, other.weights, first.weights)), spec
                assert_equal_states(other.state, first.state, 0, spec)
                assert other.sent_bytes == 0, spec


def differ(rank: int, world_size: int, store: Path, domains: str) -> str:
    """Train one step, in which replica 1 computes differently; return the error."""
    torch.set_num_threads(1)
    # Only its timeout ends a send of gloo that fails in the moment in which the receiver has requested the message and
    # closed the connection: Pair::handleRemotePendingRecv has taken it off the list of those that get the error. In a
    # run, the rank that failed ends the others earlier.
    timeout = timedelta(seconds=stretched(20.0))
    topology, file_store = Topology.of(rank, world_size, 1), dist.FileStore(str(store), world_size)
    try:
        with connect(topology, timeout=timeout, store=file_store, domain=domains[rank]) as groups:
            weights, peers = make_weights(), Peers(groups.dp, groups.waits, domains=groups.domains)
            sync = from_spec("cocktail_grad:topk=1", MODES, key="dp.mode").open(weights, peers)
            sync.begin_step(0)
            with torch.no_grad():
                weights[0].master.add_(1.0 + (rank == 1))
            sync.exchange(0, SecondMoments({}, 0.999))
    except RunError as error:
        return str(error)
    return ""


def test_replicas_of_a_domain_that_compute_differently_end_the_run(tmp_path: Path) -> None:
    errors = on_ranks(3, differ, tmp_path / "store", "aab")
    assert all(errors)
    assert "has other updates than rank 0 of its domain" in errors[1]


def test_a_whole_run_in_two_domains_equals_one_of_two_replicas(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Also if resumed on replicas with domains, and without. Micro-batches have unequal numbers of tokens."""
    model = tiny_model("gpt2", **DROPOUT, n_layer=2)

    def configs_in(name: str) -> list[Config]:
        configs = [
            make_replica_config(model, tmp_path / f"{name}-{n}" / "run", mode, stages=1) for n, mode in enumerate(RUNS)
        ]
        return [replace(c, data=replace(c.data, rows="single"), pp=replace(c.pp, micro=1)) for c in configs]

    whole, single = configs_in("whole"), configs_in("single")
    on_ranks(4, train_ranks, tmp_path / "store-whole", whole, "aabb")
    on_ranks(2, train_ranks, tmp_path / "store-single", single)
    for ours, theirs in zip(whole, single, strict=True):
        assert losses_of(ours) == pytest.approx(losses_of(theirs), rel=RELATIVE), ours.dp
        states = [ShardDirectory(checkpoint_of(each)).replica_states("block-00000") for each in (ours, theirs)]
        assert len(states[0]) == len(states[1]) == 2
        for mine, other in zip(*states, strict=True):
            assert_equal_states(mine, other, 1e-4, ours.dp.mode)
    for ranks, domains in ((4, "aabb"), (2, "")):
        halves = [resumed_at_half(each, tmp_path / f"on-{ranks}-{n}" / "run", stages=1) for n, each in enumerate(whole)]
        on_ranks(ranks, train_ranks, tmp_path / f"store-{ranks}", halves, domains)
        for half, full in zip(halves, whole, strict=True):
            assert resumed_losses(half) == pytest.approx(losses_of(full)[HALF:], rel=RELATIVE), (ranks, half.dp)


@pytest.mark.soak
def test_micro_batches_dealt_by_speed_within_a_domain_are_those_of_one_replica(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Speeds that change from step to step, of replicas and of the sums of their domains."""
    model, speeds = tiny_model("gpt2", **DROPOUT, n_layer=2), [(3, 1, 2, 2), (1, 2, 1, 4), (1, 1, 5, 1), (2, 2, 2, 2)]
    config = make_config(model, tmp_path, micro=1)
    config = replace(config, data=replace(config.data, batch=8))
    configs = [replace(config, dp=ReplicaConfig(mode)) for mode in RUNS]
    of_two = [(a + b, c + d) for a, b, c, d in speeds]
    for deals in speeds, of_two:
        assert all([*map(len, deal(8, of_step))] == [*of_step] for of_step in deals)
    losses = []
    for of_step, domains in ((speeds, "aabb"), (of_two, "")):
        dealt, store = dict.fromkeys(range(len(RUNS)), of_step), tmp_path / f"store-{len(of_step[0])}"
        losses.append(on_ranks(len(of_step[0]), losses_of_rank, store, configs, False, dealt, domains)[0])
    for mode, whole, single in zip(RUNS, *losses, strict=True):
        assert whole == pytest.approx(single, rel=RELATIVE), mode


def resumed_losses(config: Config) -> list[float]:
    lines = (Path(config.log.dir) / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


PARTING = [
    ScriptedView(range(4), 2),
    ScriptedView((2, 3), 3),  # each for itself
    ScriptedView((3, 2, 1), 4),
    ScriptedView((0, 2), 5),
    ScriptedView((1, 0, 2, 3), VIEW_STEPS),
]
VIEWS: dict[str, Script] = {
    "calm": [ScriptedView(range(4), VIEW_STEPS)],
    "one of a domain is late": [ScriptedView(range(4), 3, late=(1,)), ScriptedView(range(4), VIEW_STEPS)],
    "the leader misses the exchange": [ScriptedView(range(4), 3, unsynced=(0,)), ScriptedView(range(4), VIEW_STEPS)],
    "domains part and meet": PARTING,
    "domains part and meet over an ordered transport": [view._replace(is_ordered=True) for view in PARTING],
    "a domain joins": [ScriptedView((0, 1), 2), ScriptedView(range(4), VIEW_STEPS)],
    "joins in the background": [ScriptedView((0, 1), 2), ScriptedView(range(4), VIEW_STEPS)],
    "one of a domain joins in the background": [ScriptedView((0, 1, 2), 2), ScriptedView(range(4), VIEW_STEPS)],
}


FEW = ("calm", "one of a domain is late", "a domain joins", "one of a domain joins in the background")
"""Views in which the replicas of a domain differ in what they know, or get their state from each other."""


@pytest.mark.parametrize(
    ("mode", "names"),
    [(ELASTIC[1], FEW), *(pytest.param(mode, tuple(VIEWS), marks=pytest.mark.soak) for mode in ELASTIC)],
)
def test_domains_of_an_elastic_run_have_equal_state_in_every_view(
    mode: str, names: Sequence[str], tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Else replicas of a domain would send different messages, which ends the run."""
    config = make_config(tiny_model(n_layer=1), tmp_path, steps=VIEW_STEPS, micro=1)
    config = replace(config, data=replace(config.data, batch=4))
    runs = {
        name: (
            replace(
                config,
                dp=ReplicaConfig(mode, domain="aabb"),
                elastic=ElasticConfig(join_budget=0 if "background" in name else 1e6),
            ),
            script,
        )
        for name, script in ((name, VIEWS[name]) for name in names)
        if not (script[0].late and mode == EXCHANGING)
    }
    processes = on_ranks(4, train_in_views, tmp_path / "store", runs)
    losses: dict[str, dict[int, float]] = {}
    for run in runs:
        of_run = losses[run] = {}
        for step in range(1, VIEW_STEPS + 1):
            digests = {process[run].digests[step] for process in processes if step in process[run].digests}
            assert len(digests) == 1, (run, step)
            (of_run[step],) = {process[run].losses[step] for process in processes if step in process[run].losses}
        assert of_run[VIEW_STEPS] < of_run[1], run
    received = [process["a domain joins"].received_bytes for process in processes]
    sent = sum(process["a domain joins"].sent_between_hosts for process in processes)
    assert received == [[0], [0], [sent], [sent]], "the state reaches the host once, and both of its replicas"
    assert sent > 0
    parting = [losses[each] for each in losses if each.startswith("domains part and meet")]
    assert parting[1:] == [pytest.approx(each, rel=RELATIVE) for each in parting[:1]], "over both transports"
    if mode != EXCHANGING:
        assert losses["one of a domain is late"] == pytest.approx(losses["calm"], rel=RELATIVE)


@pytest.mark.soak
@pytest.mark.parametrize("mode", ELASTIC)
def test_layers_that_move_between_stages_have_the_state_of_their_domain(
    mode: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Pipelines of two stages become single ranks, each of which has kept the state of half of the layers."""
    config = make_config(tiny_model(n_layer=2), tmp_path, steps=VIEW_STEPS, micro=1, stages=2)
    config = replace(config, data=replace(config.data, batch=6), dp=ReplicaConfig(mode, domain="aaaabb"))
    config = replace(config, elastic=ElasticConfig(join_budget=1e6, replan=True, min_replicas=3))
    script = [ScriptedView(range(6), 4), ScriptedView(range(5), VIEW_STEPS)]
    processes = on_ranks(6, train_in_views, tmp_path / "store", {"moves": (config, script)})
    trained = [process["moves"] for process in processes]
    assert all(each.received_bytes[-1] for each in trained[:5]), "all have received layers"
    for step in range(1, VIEW_STEPS + 1):
        digests = {process.digests[step] for process in trained if step in process.digests}
        assert len(digests) == (2 if step <= 4 else 1), (step, digests)
