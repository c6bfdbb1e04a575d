"""Laws of the connection for the state of a rank that joins."""

from __future__ import annotations

import contextlib
import math
import random
import socket
import struct
import time
from collections.abc import Iterator

import pytest
import torch
from lib.patience import stretched

from acsgd.elastic.state.channel import BUFFER_BYTES, PART_S, Address, StateReceiver, StateSender
from acsgd.elastic.state.transfer import rounded

TIMEOUT_S = stretched(30.0)
LONG = bytes(range(256)) * (BUFFER_BYTES // 128)


RATE = 2e6
"""Bytes per second, at which messages are compressed."""


@pytest.fixture
def rate() -> float:
    return math.inf


@pytest.fixture
def sender(rate: float) -> Iterator[StateSender]:
    with contextlib.closing(StateSender("127.0.0.1", TIMEOUT_S)) as opened:
        opened.limit(rate)
        yield opened


@pytest.fixture
def receiver(sender: StateSender) -> Iterator[StateReceiver]:
    with contextlib.closing(StateReceiver(sender.address, TIMEOUT_S)) as opened:
        yield opened


def received(receiver: StateReceiver) -> bytes | None:
    assert receiver.wait(TIMEOUT_S)
    return receiver.take()


@pytest.mark.parametrize("rate", [math.inf, RATE])
def test_messages_arrive_in_their_order(sender: StateSender, receiver: StateReceiver) -> None:
    messages = [LONG, b"", *(bytes(range(length)) for length in range(1, 10)), b"last"]
    for message in messages:
        sender.send(message)
    assert [received(receiver) for _ in messages] == messages
    assert receiver.take() is None
    assert not receiver.wait(0.0)


@pytest.mark.parametrize("rate", [RATE])
def test_messages_are_sent_no_faster_than_the_rate(sender: StateSender, receiver: StateReceiver) -> None:
    message, started = random.Random(0).randbytes(int(0.2 * RATE)), time.monotonic()
    sender.send(message)
    assert received(receiver) == message
    assert time.monotonic() - started >= 0.2 - 2 * PART_S


def test_what_follows_the_first_bytes_is_sent_slowly_until_the_next_limit(
    sender: StateSender, receiver: StateReceiver
) -> None:
    sender.limit(math.inf, 1, slow_rate=10)  # a part, of which it is the first byte, then a byte per .1 s
    sender.send(LONG)
    sender.send(b"last")
    assert not receiver.wait(0.1)
    sender.limit(math.inf)
    assert [received(receiver) for _ in range(2)] == [LONG, b"last"]


@pytest.mark.parametrize(("rate", "is_rounded", "fewest", "most"), [(RATE, False, 0.8, 0.88), (RATE, True, 0.2, 0.25)])
def test_state_takes_fewer_bytes(sender: StateSender, is_rounded: bool, fewest: float, most: float) -> None:
    """Of normal values, the exponents have less than 3 bits of information, and rounded ones have 4 others."""
    exact = torch.randn(2**18, generator=torch.Generator().manual_seed(0))
    values = rounded(exact) if is_rounded else exact
    torch.testing.assert_close(values, exact, rtol=1 / 16, atol=0)
    state = values.numpy().tobytes()
    sender.send(state)
    with socket.create_connection((sender.address.host, sender.address.port), TIMEOUT_S) as connection:
        connection.sendall(bytes.fromhex(sender.address.token))
        length, is_compressed = struct.unpack("<Q?", connection.recv(9, socket.MSG_WAITALL))
    assert is_compressed
    assert fewest * len(state) < length < most * len(state)


def test_a_process_without_the_token_gets_nothing_and_disturbs_nobody(sender: StateSender) -> None:
    sender.send(b"state")
    with socket.create_connection((sender.address.host, sender.address.port), TIMEOUT_S) as stranger:
        stranger.sendall(bytes(16))
        assert stranger.recv(1) == b""
    with contextlib.closing(StateReceiver(sender.address, TIMEOUT_S)) as receiver:
        assert received(receiver) == b"state"
    assert sender.error is None


def test_the_end_of_the_sender_is_an_error_of_the_receiver(sender: StateSender, receiver: StateReceiver) -> None:
    sender.send(LONG)
    assert received(receiver) == LONG
    sender.close()
    assert receiver.wait(TIMEOUT_S)
    assert receiver.error is not None


def test_a_message_whose_connection_is_cut_in_its_middle_does_not_arrive() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address("127.0.0.1", server.getsockname()[1], token=bytes(16).hex())
        with contextlib.closing(StateReceiver(address, TIMEOUT_S)) as receiver:
            connection, _ = server.accept()
            connection.sendall(struct.pack("<Q?", 5, False) + b"state")
            connection.sendall(struct.pack("<Q?", len(LONG), False) + LONG[: len(LONG) // 2])
            connection.close()
            receiver._thread.join(TIMEOUT_S)
            assert receiver.take() == b"state"
            assert receiver.take() is None
            assert receiver.error is not None


def test_the_end_of_the_receiver_is_an_error_of_the_sender(sender: StateSender, receiver: StateReceiver) -> None:
    sender.send(b"state")
    assert received(receiver) == b"state"
    receiver.close()
    assert receiver.error is None
    for _ in range(1000):
        sender.send(LONG)
    sender._thread.join(TIMEOUT_S)
    assert sender.error is not None


def test_closing_ends_the_threads_at_any_time() -> None:
    sender = StateSender("127.0.0.1", TIMEOUT_S)  # which waits for its receiver
    sender.close()
    sender._thread.join(TIMEOUT_S)
    assert sender.error is None
    assert not sender._thread.is_alive()


def test_a_sender_that_has_ended_is_named() -> None:
    sender = StateSender("127.0.0.1", TIMEOUT_S)
    sender.close()
    sender._thread.join(TIMEOUT_S)
    receiver = StateReceiver(sender.address, TIMEOUT_S)
    assert receiver.wait(TIMEOUT_S)
    assert receiver.error is not None
    assert "refused" in receiver.error
