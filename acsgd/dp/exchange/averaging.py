"""The mean over the replicas of a vector, through a compressor: by servers of a part each, or from all to all.

R replicas; n = elements of a vector, on any device, fp32; messages are uint8 in host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from acsgd.codecs.message import MessageCodec
from acsgd.dp.exchange.peers import Peers
from acsgd.errors import RunError
from acsgd.meter import Meter


def parts(flat: Tensor, count: int) -> list[Tensor]:
    """Cut a tensor [n] into `count` views of about the same length."""
    return [flat[len(flat) * j // count : len(flat) * (j + 1) // count] for j in range(count)]


class Agreed(NamedTuple):
    """What came of an exchange."""

    sent: list[Tensor]
    """By part, what this replica's messages stand for, fp32; the rest is what it still owes."""
    mean: list[Tensor]
    """By part, the mean that all replicas have decoded, fp32; equal on all."""
    error: Tensor
    """Of the part that this replica serves: what the mean still lacks, fp32."""


def served_mean(
    parts: Sequence[Tensor], error: Tensor | None, compressor: MessageCodec, peers: Peers, meter: Meter
) -> Agreed:
    """Exchange vectors that are cut into R parts, part j of which replica j collects, averages and tells.

    parts: R of them, [n_j], fp32; error: [n_r], of part r that this replica serves, what earlier means have lacked;
    None = it is forgotten. Compressed both ways: what the answer lacks is the new error. Each replica sends and
    receives about 2 (R - 1) / R messages of the whole, however many there are. To be called in the thread of `peers`.
    """
    others, mine = [peer for peer in range(peers.size) if peer != peers.replica], parts[peers.replica]
    messages = [compressor.encode(part) for part in parts]
    sent = [compressor.decode(message, len(part)) for message, part in zip(messages, parts, strict=True)]
    longest = compressor.max_bytes(len(mine))
    asked = peers.swap({peer: messages[peer].cpu() for peer in others}, dict.fromkeys(others, longest), meter)
    mean = torch.zeros_like(mine)
    for peer in range(peers.size):  # in one order, so that a replica may take the place of another
        mean += sent[peer] if peer == peers.replica else read_message(compressor, asked[peer], mine, peer)
    owed = mean.div_(peers.size)
    if error is not None:
        owed += error
    answer = compressor.encode(owed)
    lengths = {peer: compressor.max_bytes(len(parts[peer])) for peer in others}
    answers = peers.swap(dict.fromkeys(others, answer.cpu()), lengths, meter)
    answers[peers.replica] = answer
    means = [read_message(compressor, answers[peer], part, peer) for peer, part in enumerate(parts)]
    return Agreed(sent, means, owed - means[peers.replica])


def told_mean(x: Tensor, compressor: MessageCodec, peers: Peers, meter: Meter) -> tuple[Tensor, Tensor]:
    """Exchange vectors [n], each of which every replica decodes; return what this one's stands for, and the mean.

    Compressed once, so nothing is lost on the way back; each replica receives R - 1 messages of the whole. To be called
    in the thread of `peers`.
    """
    others = [peer for peer in range(peers.size) if peer != peers.replica]
    message = compressor.encode(x)
    lengths = dict.fromkeys(others, compressor.max_bytes(len(x)))
    told = peers.swap(dict.fromkeys(others, message.cpu()), lengths, meter)
    told[peers.replica] = message
    mean = torch.zeros_like(x)
    for peer in range(peers.size):
        decoded = read_message(compressor, told[peer], x, peer)
        mean += decoded
        if peer == peers.replica:
            sent = decoded
    return sent, mean.div_(peers.size)


def read_message(compressor: MessageCodec, message: Tensor, like: Tensor, peer: int) -> Tensor:
    """Return what the message of a replica stands for, as long as `like` and on its device. Raises RunError."""
    try:
        return compressor.decode(message.to(like.device), len(like))
    except ValueError as error:
        raise RunError(f"replica {peer} sent a message that cannot be decoded: {error}") from None
