"""Messages between two ranks: all tensors arrive unchanged, mismatches are named, and a lost peer is an error."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from lib.links import CPU, connect_pipeline
from lib.patience import stretched, wait_until
from lib.ranks import on_ranks
from torch import Tensor

from acsgd import codecs
from acsgd.codecs.base import wire_bytes
from acsgd.comm.waits import Meter
from acsgd.errors import RunError
from acsgd.groups import Groups
from acsgd.layers.batch import Lengths
from acsgd.layers.description import Dim
from acsgd.pp.wire.cache_plan import CachePlan
from acsgd.pp.wire.coder import TensorSpec, TransferInfo
from acsgd.pp.wire.delta import Delta
from acsgd.pp.wire.frame import HEADER_BYTES, Header, MessageKind
from acsgd.pp.wire.link import Link, LinkFactory
from acsgd.pp.wire.mailbox import MAX_SENDS_IN_FLIGHT
from acsgd.streams import StreamEvent, Streams

SHAPES = {"hidden": (2, 3, 5), "mask": (7,)}
TIMEOUT_S = stretched(1.5)
FORWARD, BACKWARD = "none:dtype=bf16", "none"


def open_link(
    rank: int, groups: Groups, *, forward: str = FORWARD, shapes: dict[str, tuple[int, ...]] = SHAPES
) -> tuple[Link, Meter, Meter]:
    tensors = {name: TensorSpec(shape, torch.float32) for name, shape in shapes.items()}
    meters = Meter(), Meter()
    codec_pair = codecs.parse(forward), codecs.parse(BACKWARD)
    factory = LinkFactory(groups.pp, groups.waits, CPU, [tensors], *([each] for each in codec_pair), *meters)
    return factory.open(0, peer=1 - rank, downstream=rank == 0), *meters


def state_of(step: int, micro: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(100 * step + micro)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


def send_both_ways(rank: int, world_size: int, store: Path, micros: int) -> int:
    with connect_pipeline(rank, world_size, store) as groups:
        link, forward, backward = open_link(rank, groups)
        for step in range(3):
            for _ in range(micros):
                link.inbox.post()
            for micro in range(micros):
                link.send(TransferInfo(step, micro), state_of(step, micro))
            for micro in range(micros):
                got, sent = link.receive(TransferInfo(step, micro)).state, state_of(step, micro)
                for name, tensor in sent.items():
                    expected = tensor.bfloat16().float() if rank == 1 else tensor
                    assert torch.equal(got[name], expected)
            link.outbox.drain()
        sent_bytes = (forward if rank == 0 else backward).sent_bytes
        assert (backward if rank == 0 else forward).sent_bytes == 0
        return sent_bytes


def test_all_tensors_arrive_in_order_in_the_dtype_of_the_codec(tmp_path: Path) -> None:
    micros = 2 * MAX_SENDS_IN_FLIGHT
    sent = on_ranks(2, send_both_ways, tmp_path / "store", micros)
    for spec, sent_bytes in zip((FORWARD, BACKWARD), sent, strict=True):
        declared = sum(HEADER_BYTES + wire_bytes(codecs.parse(spec).wire(shape)) for shape in SHAPES.values())
        assert sent_bytes == 3 * micros * declared


LADDER = ["fixpoint:bits=8", "fixpoint:bits=4,dims=token"]
"""Codecs of a link after the lossless one."""
CHOSEN = [1, 2, 2, 0, 1, 0, 2]
"""By step, the codec of activations; gradients use another one."""


def change_codecs(rank: int, world_size: int, store: Path) -> list[int]:
    """Send both ways with the codecs of each step; return the bytes that this rank sends, by step."""
    ladder, sent_bytes = [codecs.parse(spec) for spec in LADDER], []
    with connect_pipeline(rank, world_size, store) as groups:
        tensors, meters = {name: TensorSpec(shape, torch.float32) for name, shape in SHAPES.items()}, (Meter(), Meter())
        factory = LinkFactory(groups.pp, groups.waits, CPU, [tensors], ladder, ladder, *meters)
        link = factory.open(0, peer=1 - rank, downstream=rank == 0)
        for step, codec in enumerate(CHOSEN):
            ours, theirs = (codec, 2 - codec) if rank == 0 else (2 - codec, codec)
            link.inbox.post()
            link.send(TransferInfo(step, 0, ours), state_of(step, rank))
            got, sent = link.receive(TransferInfo(step, 0, theirs)).state, state_of(step, 1 - rank)
            for name, x in sent.items():
                bound = ladder[theirs - 1].error_bound(x) if theirs else torch.zeros(x.shape)
                assert bool(((got[name] - x).abs() <= bound).all()), (step, name)
            link.outbox.drain()
            sent_bytes.append(meters[rank].sent_bytes)
            meters[rank].reset()
    return sent_bytes


def test_a_link_changes_its_codecs_between_steps(tmp_path: Path) -> None:
    every = [codecs.parse("none"), *map(codecs.parse, LADDER)]
    sizes = [sum(HEADER_BYTES + wire_bytes(codec.wire(shape)) for shape in SHAPES.values()) for codec in every]
    assert len({*sizes}) == 3
    forward, backward = on_ranks(2, change_codecs, tmp_path / "store")
    assert forward == [sizes[codec] for codec in CHOSEN]
    assert backward == [sizes[2 - codec] for codec in CHOSEN]


LONGEST = Lengths(24, 16)
CUT = [Lengths(24, 16), Lengths(8, 16), Lengths(16, 8), Lengths(8, 8)]
"""Lengths of the rows of the micro-batches."""
ENTROPY_CODED = "fixpoint:bits=3,entropy_coding=true"


def open_cut_link(rank: int, groups: Groups, codec: str) -> tuple[Link, dict[str, TensorSpec], Meter]:
    """Open a link for rows of any length, as between the stages of a decoder after an encoder."""
    rows, width = Dim("batch", 0), Dim(None, 5)
    dims = {name: (rows, Dim(size, 0), width) for name, size in (("hidden", "target"), ("encoded", "sequence"))}
    sizes = {"batch": 2, **LONGEST._asdict()}
    tensors = {name: TensorSpec(tuple(d.resolve(sizes) for d in x), torch.float32, x) for name, x in dims.items()}
    meter, pair = Meter(), (codecs.parse(codec), codecs.parse(codec))
    factory = LinkFactory(groups.pp, groups.waits, CPU, [tensors], *([each] for each in pair), meter, meter)
    return factory.open(0, peer=1 - rank, downstream=rank == 0), tensors, meter


def exchange_cut_rows(rank: int, world_size: int, store: Path) -> None:
    """Rank 1 reads no rows: it knows the lengths from the messages, and sends gradients of the same lengths back."""
    with connect_pipeline(rank, world_size, store) as groups:
        for codec in (*codecs.CODECS, ENTROPY_CODED):
            link, specs, meter = open_cut_link(rank, groups, codec)
            for micro, lengths in enumerate(CUT):
                known = TransferInfo(0, micro, lengths=lengths)
                sent = {name: torch.ones(spec.shape_for(lengths)) for name, spec in specs.items()}
                link.inbox.post()
                if rank == 0:
                    link.send(known, sent)
                    received = link.receive(known)
                else:
                    received = link.receive(TransferInfo(0, micro))
                    link.send(known, sent)
                link.outbox.drain()
                assert received.lengths == lengths
                assert {name: x.shape for name, x in received.state.items()} == {n: x.shape for n, x in sent.items()}
                wires = [codecs.parse(codec).wire(tuple(x.shape)) for x in sent.values()]
                most = sum(HEADER_BYTES + wire_bytes(wire) for wire in wires)
                is_coded = codecs.parse(codec).entropy_coding
                assert meter.sent_bytes < most if is_coded else meter.sent_bytes == most
                meter.reset()


def test_messages_are_as_long_as_their_rows_and_say_so(tmp_path: Path) -> None:
    on_ranks(2, exchange_cut_rows, tmp_path / "store")


def receive_other_rows(rank: int, world_size: int, store: Path) -> str:
    with connect_pipeline(rank, world_size, store) as groups:
        link, specs, _ = open_cut_link(rank, groups, "none")
        if rank == 0:
            state = {name: torch.ones(spec.shape_for(CUT[1])) for name, spec in specs.items()}
            link.send(TransferInfo(0, 0, lengths=CUT[1]), state)
            link.outbox.drain()
            return ""
        link.inbox.post()
        with pytest.raises(RunError) as error:
            link.receive(TransferInfo(0, 0, lengths=CUT[2]))
        return str(error.value)


def test_ends_that_read_other_rows_are_named(tmp_path: Path) -> None:
    message = on_ranks(2, receive_other_rows, tmp_path / "store")[1]
    assert "rank 0 sent activation 0 across boundary 0-1, step 1, micro-batch 0 with rows of 8 and 16 tokens" in message
    assert "expected activation 0 across boundary 0-1, step 1, micro-batch 0 with rows of 16 and 8 tokens" in message
    assert "the same acsgd, run file, flags and texts" in message


def wait_for_key(groups: Groups, key: str) -> None:
    wait_until(lambda: groups.store.has(key), poll_s=0.001, describe=lambda: key)


def overlap(rank: int, world_size: int, store: Path) -> None:
    """Each rank waits, as in a long computation, until the other has passed the call that must not block."""
    large = {"hidden": (8 * 2**20,)}  # 32 MB: far more than the socket buffers of the kernel
    with connect_pipeline(rank, world_size, store) as groups:
        link, *_ = open_link(rank, groups, shapes=large)
        if rank == 0:
            link.send(TransferInfo(0, 0), {"hidden": torch.ones(large["hidden"])})
            groups.store.set("send returned", "")
            link.outbox.drain()
            groups.store.set("all sent", "")
        else:
            wait_for_key(groups, "send returned")
            link.inbox.post()
            wait_for_key(groups, "all sent")
            assert bool((link.receive(TransferInfo(0, 0)).state["hidden"] == 1).all())


def test_send_does_not_block_and_a_posted_receive_fills_while_its_rank_computes(tmp_path: Path) -> None:
    on_ranks(2, overlap, tmp_path / "store")


def entropy_code_before_computing(rank: int, world_size: int, store: Path) -> None:
    """Rank 0 computes until rank 1 has received the message that rank 0 sent before."""
    large = {"hidden": (2**10, 2**11)}
    with connect_pipeline(rank, world_size, store) as groups:
        link, *_ = open_link(rank, groups, forward="fixpoint:bits=4,entropy_coding=true", shapes=large)
        if rank == 0:
            link.send(TransferInfo(0, 0), {"hidden": torch.eye(*large["hidden"])})
            wait_for_key(groups, "received")
            link.outbox.drain()
        else:
            link.inbox.post()
            link.receive(TransferInfo(0, 0))
            groups.store.set("received", "")


def test_entropy_coded_message_is_sent_before_its_rank_computes(tmp_path: Path) -> None:
    on_ranks(2, entropy_code_before_computing, tmp_path / "store")


def open_with_other_codecs(rank: int, world_size: int, store: Path) -> str:
    with connect_pipeline(rank, world_size, store) as groups, pytest.raises(RunError) as error:
        open_link(rank, groups, forward="none" if rank else FORWARD)
    return str(error.value)


def test_handshake_finds_different_codecs(tmp_path: Path) -> None:
    for rank, message in enumerate(on_ranks(2, open_with_other_codecs, tmp_path / "store")):
        assert f"rank {1 - rank} sent handshake" in message
        assert "expected handshake" in message


def receive_another(rank: int, world_size: int, store: Path) -> str:
    with connect_pipeline(rank, world_size, store) as groups:
        link, *_ = open_link(rank, groups)
        if rank == 0:
            link.send(TransferInfo(4, 1), state_of(4, 1))
            link.outbox.drain()
            return ""
        link.inbox.post()
        with pytest.raises(RunError) as error:
            link.receive(TransferInfo(4, 0))
        return str(error.value)


def test_unexpected_message_is_named_with_the_expected_one(tmp_path: Path) -> None:
    message = on_ranks(2, receive_another, tmp_path / "store")[1]
    assert "rank 0 sent activation 0 across boundary 0-1, step 5, micro-batch 1" in message
    assert "expected activation 0 across boundary 0-1, step 5, micro-batch 0" in message


def lose_the_peer(rank: int, world_size: int, store: Path, how: str) -> str:
    with connect_pipeline(rank, world_size, store, timeout_s=TIMEOUT_S) as groups:
        link, *_ = open_link(rank, groups)
        if rank == 0:
            if how == "hang":
                time.sleep(2 * TIMEOUT_S)
            return ""  # and close the connection
        link.inbox.post()
        with pytest.raises(RunError) as error:
            link.receive(TransferInfo(0, 0))
        return str(error.value)


@pytest.mark.parametrize("how", ["leave", "hang"])
def test_lost_peer_is_an_error_that_names_rank_and_message(how: str, tmp_path: Path) -> None:
    message = on_ranks(2, lose_the_peer, tmp_path / "store", how)[1]
    assert message.startswith("rank 1 on ")
    assert "waiting for activation 0 across boundary 0-1, step 1, micro-batch 0" in message
    assert "from rank 0 failed after" in message


def test_headers_read_back() -> None:
    header, payload = (
        Header(MessageKind.GRADIENT, 1, 300, 10**9, 70000, 5, 2**20, 7),
        torch.arange(5, dtype=torch.uint8),
    )
    packed = torch.frombuffer(bytearray(header.pack(payload)), dtype=torch.uint8)
    assert len(packed) == HEADER_BYTES
    for rest in ([], [0], [0] * 20):  # a message lies at the start of a buffer of the longest
        assert Header.unpack(torch.cat([packed, payload, torch.tensor(rest, dtype=torch.uint8)])) == header, rest
    with pytest.raises(ValueError, match="starts with b'HTTP' instead of"):
        Header.unpack(torch.frombuffer(bytearray(b"HTTP" + bytes(44)), dtype=torch.uint8))


def send_not_finite(rank: int, world_size: int, store: Path) -> None:
    with connect_pipeline(rank, world_size, store) as groups:
        link, *_ = open_link(rank, groups, forward="fixpoint:bits=4")
        if rank == 0:
            for micro in range(3):
                state = state_of(0, micro)
                if micro == 1:
                    state["hidden"][0, 1, 2] = torch.inf
                link.send(TransferInfo(0, micro), state)
            link.outbox.drain()
            return
        for _ in range(3):
            link.inbox.post()
        for micro in range(3):
            got = link.receive(TransferInfo(0, micro)).state
            assert bool(got["hidden"].isnan().all()) == (micro == 1)
            assert bool(got["hidden"].isfinite().all()) == (micro != 1)
            assert bool(got["mask"].isfinite().all())


def test_tensor_that_a_codec_cannot_encode_arrives_as_nan_and_the_next_as_usual(tmp_path: Path) -> None:
    on_ranks(2, send_not_finite, tmp_path / "store")


class PendingEvent:
    """Event that is complete only after `synchronize`, as on a GPU with much queued work."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        pass


class PendingStreams(Streams):
    def record_event(self) -> StreamEvent:
        return PendingEvent()


def close_links(rank: int, world_size: int, store: Path, directory: Path) -> list[str]:
    """Close a link and the exchange of a tied weight; return the names of the threads that are still alive."""
    before = set(threading.enumerate())
    delta = Delta(bits=4, cache="disk", entropy_coding=True, first_bits=8)
    with connect_pipeline(rank, world_size, store) as groups:
        factory = LinkFactory(
            group=groups.pp,
            waits=groups.waits,
            streams=PendingStreams(torch.device("cpu")),
            boundaries=[{"hidden": TensorSpec((2, 64), torch.float32)}],
            forward=[delta],
            backward=[codecs.parse(BACKWARD)],
            forward_meter=Meter(),
            backward_meter=Meter(),
            cache_plan=CachePlan([4], directory, ["block-00001"], "test", fresh=True),
        )
        link = factory.open(0, peer=1 - rank, downstream=rank == 0)
        outbox, inbox = factory.open_tie(0, TensorSpec((3,), torch.float32), peer=1 - rank)
        link.begin_step([3, 5], [3, 5])
        if rank == 0:
            link.send(TransferInfo(0, 0, samples=(3, 5)), {"hidden": torch.eye(2, 64)})
            link.outbox.drain()
        else:
            link.inbox.post()
            link.receive(TransferInfo(0, 0, samples=(3, 5)))
        inbox.post()
        outbox.send(TransferInfo(0, 0), {"gradient": torch.full((3,), float(rank))})
        outbox.flush(wait=True)
        assert torch.equal(inbox.receive(TransferInfo(0, 0)).state["gradient"], torch.full((3,), 1.0 - rank))
        outbox.drain()
        names = {thread.name.split("_")[0] for thread in set(threading.enumerate()) - before}
        assert any(name.startswith("cache ") for name in names), names
        assert ("entropy coder" in names) == (rank == 0), names
        outbox.close()
        link.close()
        return [thread.name for thread in set(threading.enumerate()) - before if "_" in thread.name]


def test_closed_links_leave_no_thread_and_save_their_caches(tmp_path: Path) -> None:
    directory = tmp_path / "activation-cache"
    assert on_ranks(2, close_links, tmp_path / "store", directory) == [[], []]
    sent, received = (directory / f"block-00001.{side}.hidden" for side in ("sender", "receiver"))
    assert sent.read_bytes() == received.read_bytes()
