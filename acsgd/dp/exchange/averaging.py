"""Compressed means of a vector over the replicas: sharded by owner, or all-gathered.

R replicas; n = elements of a vector, on any device, fp32; messages are uint8 in host memory.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from acsgd.codecs.base import NotFiniteError
from acsgd.codecs.message import MessageCodec, PackedCodec
from acsgd.codecs.topk import TopK
from acsgd.comm.waits import Meter
from acsgd.dp.exchange.vectors import CodedVector, CodedVectors, SparseVector, UpdateSum, Vector, add_to, dense
from acsgd.dp.peers import Peers
from acsgd.errors import RunError
from acsgd.streams import load_onto


def split_evenly(flat: Tensor, count: int) -> list[Tensor]:
    """Split a tensor [n] into `count` views of nearly equal length."""
    return [flat[len(flat) * j // count : len(flat) * (j + 1) // count] for j in range(count)]


class ShardedMean(NamedTuple):
    """Result of `sharded_mean`."""

    mean: Vector
    """[n], decoded means of all parts; equal on all replicas."""
    server_residual: Tensor
    """Residual of the mean of the part that this replica owns, fp32."""


def sharded_mean(
    parts: Sequence[Tensor | UpdateSum], server_residual: Tensor | None, codec: MessageCodec, peers: Peers, meter: Meter
) -> ShardedMean:
    """Average vectors in R parts: replica j receives part j of all, averages them and sends the mean to all.

    Both directions are compressed. Each replica sends and receives about 2 (R - 1) / R messages of the whole vector,
    for any R. Call it in the thread of `peers`.

    Args:
        parts: R parts [n_j], fp32; changed in place to their residuals, the values minus what was sent, or with TopK
            sums, in which what was sent is noted. An observer sends none.
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
        means = [_decode(codec, answers[owner], part, owner) for owner, part in enumerate(parts)]
        return ShardedMean(_concatenated(means), torch.zeros(len(mine), device=mine.device))
    sent = [_encode(codec, part, peers.replica) for part in parts]
    outgoing = {peer: sent[peer].message.to(peers.device) for peer in others}
    received = peers.exchange(outgoing, dict.fromkeys(others, codec.max_bytes(len(mine))), meter)
    decoded = {peer: _decode(codec, message, mine, peer) for peer, message in received.items()}
    decoded[peers.replica] = _decode_sent(codec, sent[peers.replica], mine, peers.replica)
    mean = _mean_of(decoded, mine, peers.replica, server_residual)
    answer = _encode(codec, mean, peers.replica)
    answers = peers.exchange(dict.fromkeys(peers.receivers, answer.message.to(peers.device)), lengths, meter)
    decoded = {owner: _decode(codec, message, parts[owner], owner) for owner, message in answers.items()}
    decoded[peers.replica] = _decode_sent(codec, answer, mean, peers.replica)
    add_to(mean, decoded[peers.replica], -1)
    for peer in others:
        _subtract(parts[peer], _decode_sent(codec, sent[peer], parts[peer], peers.replica))
    return ShardedMean(_concatenated([decoded[owner] for owner in range(peers.size)]), mean)


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
    decoded = {peer: _decode(codec, message, x, peer) for peer, message in received.items()}
    if sent is None:
        return _mean_of(decoded, x, None, None)
    decoded[peers.replica] = _decode_sent(codec, sent, x, peers.replica)
    return _mean_of(decoded, x, peers.replica, None)


_Decoded = Tensor | SparseVector | CodedVector


def _subtract(x: Tensor | UpdateSum, decoded: _Decoded) -> None:
    """Subtract the decoded message of a vector [n] from it, in place; in a sum, note it."""
    if isinstance(x, Tensor):
        add_to(x, decoded, -1)
    else:
        assert isinstance(decoded, SparseVector)
        x.sent = decoded


def _mean_of(
    decoded: Mapping[int, _Decoded], x: Tensor | UpdateSum, own: int | None, residual: Tensor | None
) -> Tensor:
    """Return the mean of decoded messages [n] plus a residual.

    decoded: by replica; added in ascending order of the replica. own: replica whose message encodes x [n]; this message
    is subtracted from it, in place. None = x is left alone.
    """
    ordered = sorted(decoded)
    if isinstance(decoded[ordered[0]], SparseVector):
        mean = torch.zeros(len(x), device=x.device) if residual is None else residual.clone()
        for peer in ordered:
            add_to(mean, decoded[peer], 1 / len(ordered))
        if own is not None:
            _subtract(x, decoded[own])
        return mean
    assert isinstance(x, Tensor)
    mean = torch.empty_like(x)
    for peer, block, values in _interleaved(decoded):
        total = mean[block]
        total.copy_(values) if peer == ordered[0] else total.add_(values)
        if peer == own:
            x[block].sub_(values)
        if peer == ordered[-1]:
            total.div_(len(ordered))
            if residual is not None:
                total.add_(residual[block])
    return mean


def _interleaved(decoded: Mapping[int, _Decoded]) -> Iterator[tuple[int, slice, Tensor]]:
    """Yield the first block of each message, in ascending order of the replica, then the next ones, and so on.

    Of coded messages, no more than two decoded blocks are in memory, however many replicas there are.
    """
    iterators = {peer: _blocks(decoded[peer]) for peer in sorted(decoded)}
    while True:
        for peer, blocks in iterators.items():
            if (found := next(blocks, None)) is None:
                return
            yield peer, *found


def _blocks(decoded: _Decoded) -> Iterator[tuple[slice, Tensor]]:
    if isinstance(decoded, CodedVector):
        yield from decoded.blocks()
    else:
        assert isinstance(decoded, Tensor)
        yield slice(0, len(decoded)), decoded


def _concatenated(decoded: Sequence[_Decoded]) -> Vector:
    """Return one vector [n] of the decoded messages of all parts, in the form that takes the least memory."""
    coded = [each for each in decoded if isinstance(each, CodedVector)]
    sparse = [each for each in decoded if isinstance(each, SparseVector)]
    if coded:
        return CodedVectors(coded)
    if not sparse:
        return torch.cat([each for each in decoded if isinstance(each, Tensor)])
    starts = itertools.accumulate((each.n for each in sparse[:-1]), initial=0)
    positions = torch.cat([each.positions + start for each, start in zip(sparse, starts, strict=True)])
    whole = SparseVector(sum(each.n for each in sparse), positions, torch.cat([each.values for each in sparse]))
    return whole if positions.nbytes + whole.values.nbytes < whole.values.itemsize * whole.n else dense(whole)


def _decode(codec: MessageCodec, message: Tensor, like: Tensor | UpdateSum, peer: int) -> _Decoded:
    """Decode the message of a replica to the length and device of `like`. Raises RunError if it is invalid."""
    message = load_onto(like.device, message)
    with _errors_of(peer):
        if isinstance(codec, TopK):
            return SparseVector(len(like), *codec.decode_kept(message, len(like)))
        if isinstance(codec, PackedCodec) and codec.decodes_in_blocks:
            codec.check(message, len(like))
            return CodedVector(len(like), codec, message)
        return codec.decode(message, len(like))


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


def _encode(codec: MessageCodec, x: Tensor | UpdateSum, replica: int) -> _Sent:
    try:
        if isinstance(codec, TopK):
            return _Sent(*codec.encode_kept(x))
        assert isinstance(x, Tensor)
        return _Sent(codec.encode(x), None)
    except NotFiniteError as error:
        raise RunError(f"replica {replica}: update is not finite ({error}); resume from a checkpoint") from error


def _decode_sent(codec: MessageCodec, sent: _Sent, like: Tensor | UpdateSum, replica: int) -> _Decoded:
    """Decode a message of this replica, as others do; the positions in it are known."""
    if not isinstance(codec, TopK):
        return _decode(codec, sent.message, like, replica)
    assert sent.positions is not None
    return SparseVector(len(like), sent.positions, codec.decode_values(sent.message, len(like)))
