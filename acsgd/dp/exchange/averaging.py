"""Compressed means of a vector over the replicas: sharded by owner, or all-gathered.

R replicas; n = elements of a vector, on any device, fp32; messages are uint8 in host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from acsgd.codecs.base import NotFiniteError
from acsgd.codecs.message import MessageCodec
from acsgd.comm.waits import Meter
from acsgd.dp.peers import Peers
from acsgd.errors import RunError


def split_evenly(flat: Tensor, count: int) -> list[Tensor]:
    """Split a tensor [n] into `count` views of nearly equal length."""
    return [flat[len(flat) * j // count : len(flat) * (j + 1) // count] for j in range(count)]


class ShardedMean(NamedTuple):
    """Result of `sharded_mean`."""

    sent: list[Tensor]
    """Decoded messages of this replica, by part, fp32. Its input minus these is its residual."""
    mean: list[Tensor]
    """Decoded means, by part, fp32; equal on all replicas."""
    server_residual: Tensor
    """Residual of the mean of the part that this replica owns, fp32."""


def sharded_mean(
    parts: Sequence[Tensor], server_residual: Tensor | None, codec: MessageCodec, peers: Peers, meter: Meter
) -> ShardedMean:
    """Average vectors in R parts: replica j receives part j of all, averages them and sends the mean to all.

    Both directions are compressed. Each replica sends and receives about 2 (R - 1) / R messages of the whole vector,
    for any R. Call it in the thread of `peers`.

    Args:
        parts: R parts [n_j], fp32. Those of an observer are not sent.
        server_residual: [n_r], what compression has omitted from earlier means of the part r that this replica owns;
            added to the mean. None = no error feedback for the mean.

    Raises:
        RunError: A vector is not finite, or a peer failed.
    """
    others, mine = peers.others, parts[peers.replica]
    lengths = {peer: codec.max_bytes(len(parts[peer])) for peer in others}
    if peers.is_observer:
        peers.exchange({}, {}, meter)
        answers = peers.exchange({}, lengths, meter)
        means = [decode_message(codec, answers[peer], part, peer) for peer, part in enumerate(parts)]
        return ShardedMean([torch.zeros_like(part) for part in parts], means, torch.zeros_like(mine))
    messages = [_encode(codec, part, peers.replica) for part in parts]
    sent = [codec.decode(message, len(part)) for message, part in zip(messages, parts, strict=True)]
    longest = codec.max_bytes(len(mine))
    outgoing = {peer: messages[peer].to(peers.device) for peer in others}
    received = peers.exchange(outgoing, dict.fromkeys(others, longest), meter)
    mean = torch.zeros_like(mine)
    for peer in range(peers.size):  # the same order on every owner
        mean += sent[peer] if peer == peers.replica else decode_message(codec, received[peer], mine, peer)
    mean.div_(peers.size)
    if server_residual is not None:
        mean += server_residual
    answer = _encode(codec, mean, peers.replica)
    answers = peers.exchange(dict.fromkeys(peers.receivers, answer.to(peers.device)), lengths, meter)
    answers[peers.replica] = answer
    means = [decode_message(codec, answers[peer], part, peer) for peer, part in enumerate(parts)]
    return ShardedMean(sent, means, mean - means[peers.replica])


def gathered_mean(x: Tensor, codec: MessageCodec, peers: Peers, meter: Meter) -> tuple[Tensor, Tensor]:
    """All-gather compressed vectors [n]; return this replica's decoded message and the mean of all.

    Compressed in one direction only; each replica receives R - 1 messages of the whole vector. Call it in the thread of
    `peers`. Raises RunError if x is not finite or a peer failed.
    """
    lengths, outgoing = dict.fromkeys(peers.others, codec.max_bytes(len(x))), dict[int, Tensor]()
    if not peers.is_observer:
        message = _encode(codec, x, peers.replica)
        outgoing = dict.fromkeys(peers.receivers, message.to(peers.device))
    received = peers.exchange(outgoing, lengths, meter)
    if not peers.is_observer:
        received[peers.replica] = message
    sent, mean = torch.zeros_like(x), torch.zeros_like(x)
    for peer in range(peers.size):
        decoded = decode_message(codec, received[peer], x, peer)
        mean += decoded
        if peer == peers.replica and not peers.is_observer:
            sent = decoded
    return sent, mean.div_(peers.size)


def decode_message(codec: MessageCodec, message: Tensor, like: Tensor, peer: int) -> Tensor:
    """Decode the message of a replica to the length and device of `like`. Raises RunError if it is invalid."""
    try:
        return codec.decode(message.to(like.device), len(like))
    except ValueError as error:
        raise RunError(f"replica {peer} sent a message that cannot be decoded: {error}") from None


def _encode(codec: MessageCodec, x: Tensor, replica: int) -> Tensor:
    try:
        return codec.encode(x)
    except NotFiniteError as error:
        raise RunError(f"replica {replica}: update is not finite ({error}); resume from a checkpoint") from error
