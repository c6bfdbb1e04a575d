"""Law: runs whose device tensors travel over an ordered transport, such as NCCL, train as over gloo, bit for bit."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lib.links import CPU, connect_pipeline
from lib.models import dropout_of
from lib.ordered import OrderedBackend, ordered_transport
from lib.patience import stretched
from lib.ranks import on_ranks
from lib.training import TIMEOUT, make_config, train

from acsgd import codecs
from acsgd.codecs.base import wire_bytes
from acsgd.comm import host_links
from acsgd.comm.communicators import OrderedTransport
from acsgd.comm.process_groups import Group
from acsgd.comm.waits import InterruptibleWaits, Meter
from acsgd.config.options import Config, ReplicaConfig
from acsgd.errors import RunError, WaitInterruptedError
from acsgd.groups import Groups, connect
from acsgd.io.data.batches import Dataset
from acsgd.launch import Launch
from acsgd.pp.wire.coder import TensorSpec, TransferInfo
from acsgd.pp.wire.device_mailbox import DeviceInbox, check_received
from acsgd.pp.wire.frame import HEADER_BYTES, MessageKind
from acsgd.pp.wire.link import LinkFactory
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.plan.job import Job, prepare
from acsgd.run.plan.transports import Endpoint
from acsgd.run.setup import build, measured
from acsgd.run.setup.build import build_session
from acsgd.run.setup.data import open_data
from acsgd.topology import Topology

TinyModel = Callable[..., Path]


def train_and_evaluate(job: Job, groups: Groups) -> list[float]:
    """Return the losses of training, and this rank's part of that of an evaluation of the last batch."""
    session = build_session(job, open_weight_source(job), groups)
    batches = [*Dataset(open_data(job, groups).reader, range(job.config.optim.num_steps))]
    losses = train(session, batches)
    evaluated = session.pipeline.evaluate(batches[-1], len(batches)).loss.item()
    session.close()
    return [*losses, evaluated]


def losses_over_both(
    rank: int, world_size: int, store: Path, configs: Sequence[Config]
) -> list[tuple[list[float], list[float], bool]]:
    """Train each config over gloo and over the ordered transport; return the losses of each, and whether rows of tables
    travelled over the latter."""
    torch.set_num_threads(1)
    losses = []
    for number, config in enumerate(configs):
        job = prepare(config, Launch(rank, rank, world_size, world_size))
        with connect(job.topology, timeout=TIMEOUT, store=dist.FileStore(f"{store}-{number}", world_size)) as groups:
            over_gloo = train_and_evaluate(job, groups)
            ordered = ordered_transport(seed=100 * number + rank)
            groups = groups.with_transport(ordered, torch.device("cpu"), lambda axis, ranks: True)
            over_ordered = train_and_evaluate(job, groups)
            opened = groups._opened._open_communicators()
            has_rows = any(f"of {MessageKind.TABLE_ROWS.plural} of tied weight" in each._subject for each in opened)
        losses.append((over_gloo, over_ordered, has_rows))
    return losses


def run_both(world_size: int, tmp_path: Path, configs: Sequence[Config]) -> None:
    """Train each config over both transports. All losses must be equal."""
    for losses in on_ranks(world_size, losses_over_both, tmp_path / f"store-{world_size}", configs):
        for config, (over_gloo, over_ordered, has_rows) in zip(configs, losses, strict=True):
            assert over_ordered == over_gloo, (config.pp, config.dp)
            assert has_rows == (config.pp.tied in ("rows", "rows:bits=4")), config.pp
            assert over_gloo[-2] < over_gloo[0]


@pytest.mark.parametrize(
    "schedules",
    [
        [("1f1b:lead=2", "lloyd:bits=4", "rows:bits=4")],
        pytest.param(
            [
                ("gpipe", "none", "rows"),
                ("1f1b", "fixpoint:bits=4", "rows"),
                ("interleaved:chunks=2", "none:dtype=bf16", "rows:entropy_coding=true"),
                ("zb", "fixpoint:bits=4", "rows"),
                ("1f1b:lead=2,split_last=true", "none:dtype=bf16", "rows"),
                ("zbv", "fixpoint:bits=4", "dense"),
            ],
            marks=pytest.mark.soak,
        ),
    ],
    ids=["few", "others"],
)
def test_stages(schedules: Sequence[tuple[str, str, str]], tiny_model: TinyModel, tmp_path: Path) -> None:
    model = tiny_model("gpt2", n_layer=4, **dropout_of("gpt2"))
    configs = [
        make_config(model, tmp_path, stages=2, schedule=schedule, forward=forward, backward=forward, micro=1, tied=tied)
        for schedule, forward, tied in schedules
    ]
    run_both(2, tmp_path, configs)


def test_stages_that_read_no_rows_know_their_lengths(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Of padded rows, on four stages, with copies of a tied weight on the first and the last."""
    texts = tmp_path / "texts.jsonl"
    texts.write_text("\n".join(json.dumps({"text": "tell " * (1 + n % 5) + str(n)}) for n in range(60)))
    config = make_config(tiny_model("gpt2", n_layer=4), tmp_path, stages=4, micro=1, tied="dense")
    data = dataclasses.replace(config.data, sources=str(texts), rows="single")
    run_both(4, tmp_path, [dataclasses.replace(config, data=data)])


@pytest.mark.parametrize(
    "modes",
    [
        ["cocktail:exact_steps=2,random=.5"],
        pytest.param(["allreduce:dtype=bf16,bucket_mb=0.01", "powersgd:rank=2"], marks=pytest.mark.soak),
    ],
    ids=["few", "others"],
)
def test_stages_and_replicas(modes: Sequence[str], tiny_model: TinyModel, tmp_path: Path) -> None:
    """Rows of a tied table, exact sums of gradients and compressed updates."""
    config = make_config(tiny_model("gpt2", n_layer=4), tmp_path, stages=2, micro=1)
    run_both(4, tmp_path, [dataclasses.replace(config, dp=ReplicaConfig(mode)) for mode in modes])


CODEC = codecs.parse("fixpoint:bits=8")
SPEC = TensorSpec((2, 3), torch.float32)


def send_activations(rank: int, world_size: int, store: Path) -> None:
    """Send a tensor, one that is not finite, and one of another micro-batch than the receiver expects."""
    with connect_pipeline(rank, world_size, store) as groups:
        groups = groups.with_transport(ordered_transport(rank), CPU.device, lambda axis, ranks: True)
        meters = Meter(), Meter()
        factory = LinkFactory(groups.pp, groups.waits, CPU, [{"hidden": SPEC}], [CODEC], [CODEC], *meters)
        link = factory.open(0, peer=1 - rank, downstream=rank == 0)
        x, infos = (
            torch.randn(SPEC.shape, generator=torch.Generator().manual_seed(1)),
            [TransferInfo(4, n) for n in range(3)],
        )
        if rank == 0:
            link.send(infos[0], {"hidden": x})
            link.send(infos[1], {"hidden": x / 0})
            link.send(infos[1], {"hidden": x})
            link.outbox.drain()
            assert meters[0].sent_bytes == 3 * (HEADER_BYTES + wire_bytes(CODEC.wire(SPEC.shape)))
            return
        assert isinstance(link.inbox, DeviceInbox)
        decoded = CODEC.decode(CODEC.encode(x), SPEC.shape, SPEC.dtype)
        assert torch.equal(link.receive(infos[0]).state["hidden"], decoded)
        assert link.receive(infos[1]).state["hidden"].isnan().all()
        check_received([link.inbox])
        assert torch.equal(link.receive(infos[2]).state["hidden"], decoded), (
            "nothing is read before the end of the step"
        )
        with pytest.raises(
            RunError, match=r"sent activation 0 .* step 5, micro-batch 1, .*; expected .*micro-batch 2, "
        ):
            check_received([link.inbox])
        check_received([link.inbox])


def test_headers_are_compared_at_the_end_of_a_step(tmp_path: Path) -> None:
    on_ranks(2, send_activations, tmp_path / "store")


WAIT_S = 0.1


def delayed(transport: OrderedTransport) -> OrderedTransport:
    """Return a transport each of whose operations lasts for WAIT_S."""
    return transport._replace(open=lambda *args: OrderedBackend(*args, lambda: WAIT_S))


def forbidden(*args: object) -> None:
    raise AssertionError("links are measured once more")


def choose_between_hosts(rank: int, world_size: int, store: Path, config: Config) -> dict[str, str]:
    """Let `auto` choose between two hosts of a GPU each, once for two views; return the sentences."""
    job, ordered, isend = prepare(config, Launch(rank, rank, world_size)), ordered_transport(rank), Group.isend
    never = ordered._replace(open=lambda *args: threading.Event().wait() if rank else ordered.open(*args))
    chosen = {}
    for case, transport in (("faster", ordered), ("slower", delayed(ordered)), ("unreachable", never)):
        with (
            pytest.MonkeyPatch.context() as patch,
            connect(job.topology, timeout=TIMEOUT, store=dist.FileStore(f"{store}-{case}", 2)) as groups,
        ):
            patch.setattr(measured, "endpoint_of", lambda _: Endpoint(f"host {rank}", "gpu", "2"))
            patch.setattr(measured, "NCCL", transport)
            patch.setattr(build, "NCCL", transport)
            patch.setattr(host_links, "BYTES", (2**8, 2**12))
            patch.setattr("acsgd.groups.LIMIT_S", 3 * WAIT_S if case == "unreachable" else TIMEOUT.total_seconds())
            if case == "faster":
                patch.setattr(Group, "isend", lambda *args: time.sleep(WAIT_S) or isend(*args))
            transports = measured.find_transports(job, groups)
            patch.setattr(Groups, "measure_host_links", forbidden)
            # a later view of an elastic run, in which rank 1 knows no measurement
            assert transports == measured.find_transports(job, groups, None if rank else transports.links)
            groups, (note,) = build.open_transports(job, groups, transports)
            assert groups.all_equal("the run goes on")
            assert (groups.dp.reductions is not None) == (case == "faster")
            chosen[case] = note
    return chosen


def test_auto_takes_the_transport_that_is_measured_to_be_faster_between_hosts(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    notes, others = on_ranks(2, choose_between_hosts, tmp_path / "store", make_config(tiny_model(), tmp_path))
    assert notes == others, "all ranks decide alike"
    start = "transport of gradients and updates of replicas:"
    assert re.fullmatch(rf"{start} nccl \(between hosts .+ ms over nccl, .+ ms over gloo\)", notes["faster"])
    near = rf"{start} nccl within a host, else gloo \(between hosts"
    assert re.fullmatch(rf"{near} .+ ms over nccl, .+ ms over gloo\)", notes["slower"])
    assert re.fullmatch(rf"{near} nccl did not connect the hosts in time; NCCL_DEBUG=INFO .+", notes["unreachable"])


def leave_a_sum(rank: int, world_size: int, path: Path) -> float:
    """Interrupt a sum that the other rank does not join; then form new groups. Return how long it took to leave."""
    store, waits, begin = dist.FileStore(str(path), world_size), InterruptibleWaits(), 0.0
    first = connect(Topology.of(rank, 2, 1), timeout=TIMEOUT, store=dist.PrefixStore("0", store), waits=waits)
    with contextlib.suppress(WaitInterruptedError), first as groups:
        groups = groups.with_transport(ordered_transport(rank), CPU.device, lambda axis, ranks: True)
        assert groups.dp.reductions is not None
        work = groups.dp.reductions.all_reduce(torch.ones(3)) if rank == 0 else None
        threading.Timer(0.1, waits.interrupt, ["the view ends"]).start()
        begin = time.monotonic()
        if work is not None:
            groups.waits.wait(work)
        groups.waits.poll(lambda s: bool(time.sleep(s)), 1e6)
        raise AssertionError("waited to the end")
    left_s, waits = time.monotonic() - begin, InterruptibleWaits()
    second = connect(Topology.of(rank, 2, 1), timeout=TIMEOUT, store=dist.PrefixStore("1", store), waits=waits)
    with second as groups:
        groups = groups.with_transport(ordered_transport(rank), CPU.device, lambda axis, ranks: True)
        assert groups.dp.reductions is not None
        total = torch.ones(3)
        waits.wait(groups.dp.reductions.all_reduce(total))
        assert total.tolist() == [2.0] * 3
    return left_s


def test_an_interrupt_aborts_communicators_and_new_ones_follow(tmp_path: Path) -> None:
    assert max(on_ranks(2, leave_a_sum, tmp_path / "store")) < stretched(2.0)
