"""Compressed means of a vector over the replicas: sharded by owner, or all-gathered.

R replicas; n = elements of a vector, on any device, fp32; messages are uint8 in host memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from acsgd.codecs.base import NotFiniteError
from acsgd.codecs.message import MessageCodec
from acsgd.codecs.topk import TopK
from acsgd.comm.waits import Meter
from acsgd.dp.peers import Peers
from acsgd.errors import RunError
from acsgd.streams import load_onto


def split_evenly(flat: Tensor, count: int) -> list[Tensor]:
    """Split a tensor [n] into `count` views of nearly equal length."""
    return [flat[len(flat) * j // count : len(flat) * (j + 1) // count] for j in range(count)]


class ShardedMean(NamedTuple):
    """Result of `sharded_mean`."""

    mean: Tensor
    """[n], decoded means of all parts, fp32; equal on all replicas."""
    server_residual: Tensor
    """Residual of the mean of the part that this replica owns, fp32."""


def sharded_mean(
    parts: Sequence[Tensor], server_residual: Tensor | None, codec: MessageCodec, peers: Peers, meter: Meter
) -> ShardedMean:
    """Average vectors in R parts: replica j receives part j of all, averages them and sends the mean to all.

    Both directions are compressed. Each replica sends and receives about 2 (R - 1) / R messages of the whole vector,
    for any R. Call it in the thread of `peers`.

    Args:
        parts: R parts [n_j], fp32; changed in place to their residuals, the values minus what was sent. An observer
            sends none.
        server_residual: [n_r], what compression has omitted from earlier means of the part r that this replica owns;
            added to the mean. None = no error feedback for the mean.

    Raises:
        RunError: A vector is not finite, or a peer failed.
    """
    others, mine = peers.others, parts[peers.replica]
    lengths = {peer: codec.max_bytes(len(parts[peer])) for peer in others}
    if peers.is_observer:
        peers.exchange({}, {}, meter)
        answers, mean = peers.exchange({}, lengths, meter), torch.zeros_like(mine)
        return ShardedMean(_decode_parts(codec, answers, parts, None), mean)
    messages = [_encode(codec, part, peers.replica) for part in parts]
    outgoing = {peer: messages[peer].to(peers.device) for peer in others}
    received = peers.exchange(outgoing, dict.fromkeys(others, codec.max_bytes(len(mine))), meter)
    received[peers.replica] = messages[peers.replica]
    mean = torch.zeros_like(mine)
    for peer in range(peers.size):  # the same order on every owner
        _add_decoded(codec, received[peer], peer, mean, mine if peer == peers.replica else None)
    mean.div_(peers.size)
    if server_residual is not None:
        mean += server_residual
    answer = _encode(codec, mean, peers.replica)
    answers = peers.exchange(dict.fromkeys(peers.receivers, answer.to(peers.device)), lengths, meter)
    answers[peers.replica] = answer
    means = _decode_parts(codec, answers, parts, (peers.replica, mean))
    for peer in others:
        _add_decoded(codec, messages[peer], peers.replica, None, parts[peer])
    return ShardedMean(means, mean)


def gathered_mean(x: Tensor, codec: MessageCodec, peers: Peers, meter: Meter) -> Tensor:
    """All-gather compressed vectors [n]; return the mean of the decoded ones. Changes x in place to its residual.

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
    mean = torch.zeros_like(x)
    for peer in range(peers.size):
        is_mine = peer == peers.replica and not peers.is_observer
        _add_decoded(codec, received[peer], peer, mean, x if is_mine else None)
    return mean.div_(peers.size)


def _decode_parts(
    codec: MessageCodec, answers: Mapping[int, Tensor], parts: Sequence[Tensor], residual: tuple[int, Tensor] | None
) -> Tensor:
    """Decode the messages of the owners of all parts; return the whole vector [n].

    residual: an owner, and a vector from which its decoded message is subtracted, in place.
    """
    whole = parts[0].new_zeros(sum(map(len, parts)))
    for owner, target in enumerate(whole.split([len(part) for part in parts])):
        _add_decoded(codec, answers[owner], owner, target, residual[1] if residual and residual[0] == owner else None)
    return whole


def _add_decoded(
    codec: MessageCodec, message: Tensor, peer: int, added: Tensor | None, subtracted: Tensor | None
) -> None:
    """Add the decoded message of a replica to one vector [n], and subtract it from another, both in place.

    Raises RunError if it is invalid.
    """
    like = added if added is not None else subtracted
    assert like is not None
    if isinstance(codec, TopK):
        with _errors_of(peer):
            positions, values = codec.decode_kept(load_onto(like.device, message), len(like))
        for target, alpha in (added, 1), (subtracted, -1):
            if target is not None:
                target.index_copy_(0, positions, target.index_select(0, positions).add_(values, alpha=alpha))
        return
    decoded = decode_message(codec, message, like, peer)
    if added is not None:
        added.add_(decoded)
    if subtracted is not None:
        subtracted.sub_(decoded)


def decode_message(codec: MessageCodec, message: Tensor, like: Tensor, peer: int) -> Tensor:
    """Decode the message of a replica to the length and device of `like`. Raises RunError if it is invalid."""
    with _errors_of(peer):
        return codec.decode(load_onto(like.device, message), len(like))


@contextlib.contextmanager
def _errors_of(peer: int) -> Iterator[None]:
    """Name the replica whose message is invalid."""
    try:
        yield
    except ValueError as error:
        raise RunError(f"replica {peer} sent a message that cannot be decoded: {error}") from None


def _encode(codec: MessageCodec, x: Tensor, replica: int) -> Tensor:
    try:
        return codec.encode(x)
    except NotFiniteError as error:
        raise RunError(f"replica {replica}: update is not finite ({error}); resume from a checkpoint") from error
