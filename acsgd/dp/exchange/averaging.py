"""Compressed means of a vector over the replicas: sharded by owner, or all-gathered.

R replicas; n = elements of a vector, on any device, fp32; messages are uint8 in host memory.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from acsgd.codecs.base import NotFiniteError
from acsgd.codecs.message import MessageCodec
from acsgd.codecs.topk import TopK
from acsgd.comm.waits import Meter
from acsgd.dp.exchange.vectors import SparseVector, UpdateSum, add_to, dense
from acsgd.dp.peers import Peers
from acsgd.errors import RunError
from acsgd.streams import load_onto


def split_evenly(flat: Tensor, count: int) -> list[Tensor]:
    """Split a tensor [n] into `count` views of nearly equal length."""
    return [flat[len(flat) * j // count : len(flat) * (j + 1) // count] for j in range(count)]


class ShardedMean(NamedTuple):
    """Result of `sharded_mean`."""

    mean: Tensor | SparseVector
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
        decoded = [_decode(codec, answers[owner], part, owner) for owner, part in enumerate(parts)]
        return ShardedMean(_concatenated(decoded, mine.device), torch.zeros(len(mine), device=mine.device))
    sent = [_encode(codec, part, peers.replica) for part in parts]
    outgoing = {peer: sent[peer].message.to(peers.device) for peer in others}
    received = peers.exchange(outgoing, dict.fromkeys(others, codec.max_bytes(len(mine))), meter)
    decoded = [
        _decode(codec, received[peer], mine, peer)
        if peer in received
        else _subtracted(_decode_sent(codec, sent[peer], mine, peer), mine)
        for peer in range(peers.size)
    ]
    mean = _mean_of(decoded, mine, server_residual)
    answer = _encode(codec, mean, peers.replica)
    answers = peers.exchange(dict.fromkeys(peers.receivers, answer.message.to(peers.device)), lengths, meter)
    decoded = [
        _decode(codec, answers[owner], part, owner)
        if owner in answers
        else _subtracted(_decode_sent(codec, answer, mean, owner), mean)
        for owner, part in enumerate(parts)
    ]
    means = _concatenated(decoded, mine.device)
    for peer in others:
        _read(_subtracted(_decode_sent(codec, sent[peer], parts[peer], peers.replica), parts[peer]))
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
    decoded = [
        _decode(codec, received[peer], x, peer)
        if sent is None or peer in received
        else _subtracted(_decode_sent(codec, sent, x, peer), x)
        for peer in range(peers.size)
    ]
    return _mean_of(decoded, x, None)


class _Blocks(NamedTuple):
    """A decoded message [n], in blocks that are decoded as they are read."""

    n: int
    blocks: Iterator[tuple[slice, Tensor]]

    def subtracting_from(self, x: Tensor) -> _Blocks:
        """Return these blocks, each of which is subtracted from a vector [n], in place, as it is read."""

        def subtract() -> Iterator[tuple[slice, Tensor]]:
            for block, values in self.blocks:
                x[block].sub_(values)
                yield block, values

        return _Blocks(self.n, subtract())


_Decoded = SparseVector | _Blocks


def _subtracted(decoded: _Decoded, x: Tensor | UpdateSum) -> _Decoded:
    """Subtract a decoded message from a vector [n], in place, in blocks as they are read; return the message."""
    if isinstance(x, UpdateSum):
        assert isinstance(decoded, SparseVector)
        x.sent = decoded
    elif isinstance(decoded, SparseVector):
        add_to(x, decoded, -1)
    else:
        return decoded.subtracting_from(x)
    return decoded


def _read(decoded: _Decoded) -> None:
    """Read all blocks."""
    if isinstance(decoded, _Blocks):
        deque(decoded.blocks, maxlen=0)


def _mean_of(decoded: Sequence[_Decoded], like: Tensor | UpdateSum, residual: Tensor | None) -> Tensor:
    """Return the mean of decoded messages [n], in their order, plus a residual. like: a vector [n]."""
    vectors = [each for each in decoded if isinstance(each, SparseVector)]
    if vectors:
        mean = torch.zeros(len(like), device=like.device) if residual is None else residual.clone()
        for each in vectors:
            add_to(mean, each, 1 / len(vectors))
        return mean
    mean = torch.empty(len(like), device=like.device)
    for blocks in zip(*(each.blocks for each in decoded if isinstance(each, _Blocks)), strict=True):
        block = blocks[0][0]
        total = mean[block].copy_(blocks[0][1])
        for _, values in blocks[1:]:
            total.add_(values)
        total.div_(len(blocks))
        if residual is not None:
            total.add_(residual[block])
    return mean


def _concatenated(decoded: Sequence[_Decoded], device: torch.device) -> Tensor | SparseVector:
    """Return one vector [n] of the decoded messages of all parts; sparse if that takes less memory."""
    n, ends = sum(each.n for each in decoded), [*itertools.accumulate((each.n for each in decoded), initial=0)]
    vectors = [each for each in decoded if isinstance(each, SparseVector)]
    if vectors:
        positions = torch.cat([each.positions + start for each, start in zip(vectors, ends, strict=False)])
        whole = SparseVector(n, positions, torch.cat([each.values for each in vectors]))
        return whole if positions.nbytes + whole.values.nbytes < whole.values.itemsize * n else dense(whole)
    tensor = torch.empty(n, device=device)
    for each, target in zip(decoded, tensor.split([each.n for each in decoded]), strict=True):
        assert isinstance(each, _Blocks)
        for block, values in each.blocks:
            target[block] = values
    return tensor


def _decode(codec: MessageCodec, message: Tensor, like: Tensor | UpdateSum, peer: int) -> _Decoded:
    """Decode the message of a replica to the length and device of `like`. Raises RunError if it is invalid."""
    if not isinstance(codec, TopK):
        return _Blocks(len(like), _decoded_blocks(codec, message, like, peer))
    with _errors_of(peer):
        return SparseVector(len(like), *codec.decode_kept(load_onto(like.device, message), len(like)))


def _decoded_blocks(
    codec: MessageCodec, message: Tensor, like: Tensor | UpdateSum, peer: int
) -> Iterator[tuple[slice, Tensor]]:
    with _errors_of(peer):
        yield from codec.decoded_blocks(load_onto(like.device, message), len(like))


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
