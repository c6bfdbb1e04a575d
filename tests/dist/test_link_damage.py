"""A bit flipped between two processes ends the exchange with an error that names the message; the next ones arrive."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from lib.damage import damage_sends
from lib.links import CPU, connect_pipeline
from lib.ranks import on_ranks
from lib.replicas import on_replicas

from acsgd import codecs
from acsgd.comm.waits import Meter
from acsgd.dp.peers import Peers
from acsgd.errors import RunError
from acsgd.pp.wire.cache_plan import CachePlan
from acsgd.pp.wire.coder import EXACT, TensorSpec, TransferInfo
from acsgd.pp.wire.delta import Delta
from acsgd.pp.wire.link import LinkFactory

SPECS = ["none", "none:dtype=fp16", "fixpoint:bits=4", "fixpoint:bits=2,entropy_coding=true", "lloyd", "hadamard"]
DELTAS = Delta(), Delta(first_bits=4), Delta(step=2.5)
"""The last one accepts messages shorter than expected."""
SPEC = TensorSpec((2, 8, 16), torch.float32)
BITS = [0, 45, 8 * 16 + 3, 8 * 24 + 1, 8 * 32, 8 * 40 + 6, -1]
"""Of header (magic, kind, length, checksum) and payload."""


def damage_links(rank: int, world_size: int, store: Path) -> None:
    with connect_pipeline(rank, world_size, store) as groups, pytest.MonkeyPatch.context() as patch:
        bits: list[int | None] = []
        damage_sends(patch, bits)
        for spec in SPECS:
            codec = codecs.parse(spec)
            factory = LinkFactory(groups.pp, groups.waits, CPU, [{"hidden": SPEC}], [codec], [codec], Meter(), Meter())
            link = factory.open(0, peer=1 - rank, downstream=rank == 0)
            for step, bit in enumerate([*BITS, None]):
                x, info = torch.randn(SPEC.shape, generator=torch.Generator().manual_seed(step)), TransferInfo(step, 2)
                if rank == 0:
                    bits += [] if bit is None else [bit]
                    link.send(info, {"hidden": x})
                    link.outbox.drain()
                    continue
                link.inbox.post()
                if bit is None:
                    assert bool((link.receive(info).state["hidden"] - x).abs().max() < 3), spec
                    continue
                with pytest.raises(RunError) as error:
                    link.receive(info)
                for text in ("rank 0 sent a corrupt message", f"boundary 0-1, step {step + 1}, micro-batch 2"):
                    assert text in str(error.value), (spec, bit)
            link.close()


def test_a_damaged_message_between_stages_is_named(tmp_path: Path) -> None:
    on_ranks(2, damage_links, tmp_path / "store")


def damage_cache_syncs(rank: int, world_size: int, store: Path) -> None:
    """Damage what the ends of a link send to compare their caches: the nonce at the start, or a step's versions."""
    with connect_pipeline(rank, world_size, store) as groups, pytest.MonkeyPatch.context() as patch:
        bits: list[int | None] = []
        damage_sends(patch, bits)
        for delta, damaging_rank, bit, what in itertools.product(DELTAS, (0, 1), (0, 40, 62), ("nonce", "versions")):
            case = delta, damaging_rank, bit, what
            plan = CachePlan([4], Path("unused"), ["block-00001"], "test", fresh=True)
            factory = LinkFactory(
                groups.pp, groups.waits, CPU, [{"hidden": SPEC}], [delta], [EXACT], Meter(), Meter(), plan
            )
            if rank == damaging_rank and what == "nonce":
                bits += [None, None, bit]  # the first two are handshakes
            link = factory.open(0, peer=1 - rank, downstream=rank == 0)
            failures = []
            for step in range(2):
                if rank == damaging_rank and what == "versions" and step == 1:
                    bits.append(bit)
                link.begin_step([3, 5], [3, 5])
                x = torch.randn(SPEC.shape, generator=torch.Generator().manual_seed(step))
                info = TransferInfo(step, 0, samples=(3, 5))
                if rank == 0:
                    link.send(info, {"hidden": x})
                    link.outbox.drain()
                    continue
                link.inbox.post()
                try:
                    link.receive(info)
                except RunError as error:
                    failures.append(str(error))
            link.close()
            if rank == 1:
                first = 1 if what == "nonce" else 2
                assert failures, case
                for text in ("rank 0 sent a corrupt message", f"boundary 0-1, step {first}, micro-batch 0"):
                    assert text in failures[0], case


def test_a_damaged_comparison_of_caches_is_found_by_the_next_message(tmp_path: Path) -> None:
    on_ranks(2, damage_cache_syncs, tmp_path / "store")


def damage_exchanges(rank: int, peers: Peers) -> None:
    bits: list[int | None] = []
    with pytest.MonkeyPatch.context() as patch:
        damage_sends(patch, bits)
        of_header = [[bit] for bit in range(8 * 16)]
        of_parts = [
            [*[None] * part, bit] for part in range(1, 1 + peers.group.connections) for bit in (0, 8 * 4 + 5, -1)
        ]
        for number, damage in enumerate([*of_header, *of_parts, []], start=1):
            message = torch.randint(0, 256, (number,), generator=torch.Generator().manual_seed(number)).byte()
            bits += damage if rank == 0 else []

            def exchange(message: torch.Tensor = message) -> dict[int, torch.Tensor]:
                return peers.exchange({1 - rank: message}, {1 - rank: 200}, Meter())

            work = peers.submit(exchange)
            if rank == 0 or not damage:
                assert torch.equal(work.result(Meter())[1 - rank], message), damage
                continue
            with pytest.raises(RunError) as error:
                work.result(Meter())
            for text in ("replica 0 (rank 0) sent a corrupt message", f"expected message {number} "):
                assert text in str(error.value), damage


@pytest.mark.parametrize("connections", [1, 3])
def test_a_damaged_message_between_replicas_is_named(connections: int, tmp_path: Path) -> None:
    on_replicas(2, damage_exchanges, tmp_path / "store", connections=connections)
