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
        return ShardedMean(_decode_parts(codec, answers, parts, {}), mean)
    sent = [_encode(codec, part, peers.replica) for part in parts]
    outgoing = {peer: sent[peer].message.to(peers.device) for peer in others}
    received = peers.exchange(outgoing, dict.fromkeys(others, codec.max_bytes(len(mine))), meter)
    mean = torch.zeros_like(mine)
    for peer in range(peers.size):  # the same order on every owner
        if peer == peers.replica:
            decoded = _decode_sent(codec, sent[peer], mine, peer)
            _add(mine, decoded, -1)
        else:
            decoded = _decode(codec, received[peer], mean, peer)
        _add(mean, decoded)
    mean.div_(peers.size)
    if server_residual is not None:
        mean += server_residual
    answer = _encode(codec, mean, peers.replica)
    answers = peers.exchange(dict.fromkeys(peers.receivers, answer.message.to(peers.device)), lengths, meter)
    decoded = _decode_sent(codec, answer, mean, peers.replica)
    means = _decode_parts(codec, answers, parts, {peers.replica: decoded})
    _add(mean, decoded, -1)
    for peer in others:
        _add(parts[peer], _decode_sent(codec, sent[peer], parts[peer], peers.replica), -1)
    return ShardedMean(means, mean)


def gathered_mean(x: Tensor, codec: MessageCodec, peers: Peers, meter: Meter) -> Tensor:
    """All-gather compressed vectors [n]; return the mean of the decoded ones. Changes x in place to its residual.

    Compressed in one direction only; each replica receives R - 1 messages of the whole vector. Call it in the thread of
    `peers`. Raises RunError if x is not finite or a peer failed.
    """
    lengths, outgoing = dict.fromkeys(peers.others, codec.max_bytes(len(x))), dict[int, Tensor]()
    sent = None if peers.is_observer else _encode(codec, x, peers.replica)
    if sent is not None:
        outgoing = dict.fromkeys(peers.receivers, sent.message.to(peers.device))
    received = peers.exchange(outgoing, lengths, meter)
    mean = torch.zeros_like(x)
    for peer in range(peers.size):
        if sent is not None and peer == peers.replica:
            decoded = _decode_sent(codec, sent, x, peer)
            _add(x, decoded, -1)
        else:
            decoded = _decode(codec, received[peer], mean, peer)
        _add(mean, decoded)
    return mean.div_(peers.size)


class _Kept(NamedTuple):
    """Decoded elements of a vector whose other elements are 0."""

    positions: Tensor
    values: Tensor


def _decode_parts(
    codec: MessageCodec,
    answers: Mapping[int, Tensor],
    parts: Sequence[Tensor],
    known: Mapping[int, _Kept | Tensor],
) -> Tensor:
    """Decode the messages of the owners of all parts; return the whole vector [n]. known: what is decoded already."""
    whole = parts[0].new_zeros(sum(map(len, parts)))
    for owner, target in enumerate(whole.split([len(part) for part in parts])):
        _add(target, known[owner] if owner in known else _decode(codec, answers[owner], target, owner))
    return whole


def _add(x: Tensor, decoded: _Kept | Tensor, alpha: int = 1) -> None:
    """Add a decoded message times `alpha` to a vector [n], in place."""
    if isinstance(decoded, _Kept):
        positions, values = decoded
        x.index_copy_(0, positions, x.index_select(0, positions).add_(values, alpha=alpha))
    else:
        x.add_(decoded, alpha=alpha)


def _decode(codec: MessageCodec, message: Tensor, like: Tensor, peer: int) -> _Kept | Tensor:
    """Decode the message of a replica to the length and device of `like`. Raises RunError if it is invalid."""
    if not isinstance(codec, TopK):
        return decode_message(codec, message, like, peer)
    with _errors_of(peer):
        return _Kept(*codec.decode_kept(load_onto(like.device, message), len(like)))


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


class _Sent(NamedTuple):
    """A message of this replica."""

    message: Tensor
    positions: Tensor | None
    """Those of the elements that TopK keeps."""


def _encode(codec: MessageCodec, x: Tensor, replica: int) -> _Sent:
    try:
        if isinstance(codec, TopK):
            return _Sent(*codec.encode_kept(x))
        return _Sent(codec.encode(x), None)
    except NotFiniteError as error:
        raise RunError(f"replica {replica}: update is not finite ({error}); resume from a checkpoint") from error


def _decode_sent(codec: MessageCodec, sent: _Sent, like: Tensor, replica: int) -> _Kept | Tensor:
    """Decode a message of this replica, as others do; the positions in it are known."""
    if not isinstance(codec, TopK):
        return decode_message(codec, sent.message, like, replica)
    assert sent.positions is not None
    return _Kept(sent.positions, codec.decode_values(sent.message, len(like)))
