"""Which transport carries what: the choice from options and places of ranks, and refusals that say what to type."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path

import pytest
from lib.training import plain_config

from acsgd.comm.host_links import HostLinkTimes
from acsgd.config.options import Config
from acsgd.launch import set_variables
from acsgd.run.plan.plugins import parse_plugins
from acsgd.run.plan.transports import Endpoint, HostLinks, check_transports, choose_transports
from acsgd.streams import open_streams
from acsgd.topology import Axis, Topology

NCCL = "2.28.9"
ONE_HOST = [Endpoint("a", f"gpu {n}", NCCL) for n in range(4)]
TWO_HOSTS = [Endpoint("ab"[n // 2], f"gpu {n}", NCCL) for n in range(4)]
ON_CPUS = [Endpoint("a", "", "")] * 4
ENTROPY = "fixpoint:bits=4,entropy_coding=true"


def config_of(options: str) -> Config:
    """Return a run of two stages with other options, given as "pp.transport=nccl run.transport=gloo"."""
    config = plain_config(Path("model"), Path("run"), stages=2)
    for option in options.split():
        name, _, value = option.partition("=")
        section, _, key = name.partition(".")
        changed = dataclasses.replace(getattr(config, section), **{key: value})
        config = dataclasses.replace(config, **{section: changed})
    return config


def choose(options: str, endpoints: list[Endpoint], *, has_mesh: bool = False) -> list[str]:
    """Return the sentences on the transports of two pipelines of two stages, without what is the same in all."""
    config = config_of(options)
    chosen = choose_transports(config, parse_plugins(config), endpoints, has_mesh=has_mesh)
    return [text.removeprefix("transport of ") for text in chosen.describe(Topology.of(0, 4, 2))]


NEAR = "nccl within a host, else gloo"


@pytest.mark.parametrize(
    ("options", "endpoints", "stages", "replicas"),
    [
        ("", ONE_HOST, NEAR, NEAR),
        ("run.transport=gloo", ONE_HOST, "gloo", "gloo"),
        ("pp.transport=gloo", ONE_HOST, "gloo", NEAR),
        ("dp.transport=gloo", ONE_HOST, NEAR, "gloo"),
        ("run.transport=gloo dp.transport=auto", ONE_HOST, "gloo", NEAR),
        ("run.transport=nccl dp.transport=gloo", TWO_HOSTS, "nccl", "gloo"),
        ("", ON_CPUS, "gloo (rank 0 on a runs on the CPU)", "gloo (rank 0 on a runs on the CPU)"),
        (f"pp.backward={ENTROPY} dp.transport=nccl", ONE_HOST, None, "nccl"),
        ("pp.forward=delta:bits=4", ONE_HOST, None, NEAR),
    ],
)
def test_transports_are_chosen_from_options_and_places(
    options: str, endpoints: list[Endpoint], stages: str | None, replicas: str
) -> None:
    of_stages, of_replicas = choose(options, endpoints)
    if stages is None:
        assert of_stages.startswith("messages between stages: gloo (")
    else:
        assert of_stages == f"messages between stages: {stages}"
    assert of_replicas == f"gradients and updates of replicas: {replicas}"


def test_auto_uses_nccl_between_ranks_of_one_host_alone() -> None:
    config = config_of("")
    chosen = choose_transports(config, parse_plugins(config), TWO_HOSTS, has_mesh=False)
    assert chosen.uses_nccl("pipeline", [0, 1])
    assert not chosen.uses_nccl("pipeline", [1, 2])
    assert not chosen.uses_nccl("replica", [0, 2])


FASTER, SLOWER = HostLinkTimes(2**20, 0.03, 0.01), HostLinkTimes(2**20, 0.03, 0.025)
NOT_FASTER = "nccl within a host, else gloo (between hosts 1 MB take 25 ms over nccl, 30 ms over gloo)"


@pytest.mark.parametrize(
    ("options", "endpoints", "times", "measured", "stages", "replicas"),
    [
        ("", ONE_HOST, FASTER, [], NEAR, NEAR),
        ("", TWO_HOSTS, SLOWER, ["replica"], NEAR, NOT_FASTER),
        ("", TWO_HOSTS, FASTER, ["replica"], NEAR, "nccl (between hosts 1 MB take 10 ms over nccl, 30 ms over gloo)"),
        ("dp.transport=gloo", TWO_HOSTS, FASTER, [], NEAR, "gloo"),
        ("run.transport=nccl", TWO_HOSTS, SLOWER, [], "nccl", "nccl"),
    ],
)
def test_auto_between_hosts_is_what_is_clearly_faster(
    options: str, endpoints: list[Endpoint], times: HostLinkTimes, measured: list[Axis], stages: str, replicas: str
) -> None:
    config, topology = config_of(options), Topology.of(0, 4, 2)
    chosen = choose_transports(config, parse_plugins(config), endpoints, has_mesh=False)
    assert chosen.unmeasured(topology) == measured, "stages are within a host"
    sentences = chosen.with_measured(measured, HostLinks("ab", times)).describe(topology)
    assert [text.partition(": ")[2] for text in sentences] == [stages, replicas]
    assert chosen.host_ring == ([0] if endpoints is ONE_HOST else [0, 2])


def test_a_measurement_of_hosts_holds_for_fewer_and_one_that_did_not_connect_for_all() -> None:
    times, unreachable = HostLinks("abc", SLOWER), HostLinks("ab", HostLinkTimes(2**20, 0.03, math.inf))
    assert [times.covers(machines) for machines in ("ab", "cba", "abd")] == [True, True, False]
    assert unreachable.covers("abd")


@pytest.mark.parametrize(
    ("options", "endpoints", "has_mesh", "reason"),
    [
        ("run.transport=nccl", [*ONE_HOST[:3], Endpoint("b", "", "")], False, "rank 3 on b runs on the CPU"),
        ("run.transport=nccl", [*ONE_HOST[:3], ONE_HOST[0]], False, "ranks 0 and 3 on a share one GPU"),
        ("dp.transport=nccl", [*ONE_HOST[:3], Endpoint("b", "gpu", "2.1.0")], False, f"{NCCL} of rank 0 on a, 2.1.0"),
        ("dp.transport=nccl", [*ONE_HOST[:3], Endpoint("b", "gpu", "")], False, "b is built without NCCL"),
        ("run.transport=nccl", ONE_HOST, True, "a mesh does not carry"),
        ("dp.transport=nccl data.deal=speed", ONE_HOST, False, "data.deal=speed needs the times of waits"),
        (
            f"run.transport=nccl pp.forward={ENTROPY}",
            ONE_HOST,
            False,
            f"those of pp.forward={ENTROPY} are entropy-coded",
        ),
        (
            "pp.transport=nccl pp.backward=transform",
            ONE_HOST,
            False,
            "those of pp.backward=transform are entropy-coded",
        ),
        ("pp.transport=nccl pp.forward=delta:bits=4", ONE_HOST, False, "caches of pp.forward"),
    ],
)
def test_nccl_is_refused_where_it_cannot_be_used(
    options: str, endpoints: list[Endpoint], has_mesh: bool, reason: str
) -> None:
    key = options.split("=")[0]
    with pytest.raises(ValueError, match=rf"^{key}=nccl: .*{reason}.*; use --(pp|dp|run).transport gloo( for|,)"):
        choose(options, endpoints, has_mesh=has_mesh)
    auto = choose(options.replace("=nccl", "=auto"), endpoints, has_mesh=has_mesh)
    assert any(reason in text for text in auto), "auto tells why it uses gloo"


def test_nccl_on_a_cpu_is_refused_before_ranks_connect() -> None:
    config = config_of("run.transport=nccl")
    cpu = "NCCL connects GPUs, and this rank runs on the CPU"
    with pytest.raises(ValueError, match=f"^run.transport=nccl: {cpu}; use --run.transport gloo, or change that$"):
        check_transports(config, parse_plugins(config), on_gpu=False, has_mesh=False)
    of_stages, entropy = config_of("pp.transport=nccl"), config_of(f"run.transport=nccl pp.forward={ENTROPY}")
    with pytest.raises(ValueError, match=f"^pp.transport=nccl: {cpu}; use --pp.transport gloo for messages between"):
        check_transports(of_stages, parse_plugins(of_stages), on_gpu=False, has_mesh=False)
    with pytest.raises(ValueError, match=r"; use --pp.transport gloo for messages between stages, or change that$"):
        check_transports(entropy, parse_plugins(entropy), on_gpu=True, has_mesh=False)
    check_transports(config, parse_plugins(config), on_gpu=True, has_mesh=False)


def test_variables_of_nccl_that_the_user_has_set_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    monkeypatch.setattr(os, "environ", environment)
    set_variables()
    assert environment.pop("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    assert environment.pop("GLOO_ENABLE_STORE_V2_API") == "1"
    assert environment.pop("TORCH_CPP_LOG_LEVEL") == "ERROR"
    assert set(environment.values()) == {"0"}
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" in environment, "acsgd ends operations, and says why"
    page = Path(__file__).parents[2].joinpath("docs/howto/several-gpus.md").read_text()
    assert all(f"\n| `{name}` | {value} |" in page for name, value in environment.items())


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_more_processes_than_gpus_are_told_how_many_to_launch(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"local rank 2 has no GPU .* 2; launch 2 processes here \(torchrun --nproc-"):
        open_streams(device, 2)
